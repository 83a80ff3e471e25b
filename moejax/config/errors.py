"""The one error of a wrong config, and the checks that many configs share."""

import operator
import re
from typing import Any

RELATIONS = {">=": operator.ge, ">": operator.gt}
WORDS = {">=": "at least", ">": "above"}


class ConfigError(ValueError):
    """A config that cannot run. The message names the field, the value it has and what would fit."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_ranges(group: str, config: Any, **rules: str) -> None:
    """Raises ConfigError for the first field that breaks its rule: a relation, a bound, and what is to be said of the bound.

    Args:
      group: the config's name in messages.
      config: has the fields.
      rules: e.g. `num_heads=">= 1"`, `clip_norm=">= 0 (0: no clipping)"`.
    """
    for name, rule in rules.items():
        relation, bound, *hint = rule.split(maxsplit=2)
        value = getattr(config, name)
        require(
            isinstance(value, int | float),
            f"{group}.{name}={value!r} is no number; it must be {' '.join((WORDS[relation], bound, *hint))}.",
        )
        require(RELATIONS[relation](value, float(bound)), f"{group}.{name}={value} must be {' '.join((WORDS[relation], bound, *hint))}.")


def refuse_unused(group: str, config: Any, *names: str, unless: bool, why: str) -> None:
    """Raises ConfigError for the first of the fields that has another value than its default, `unless` what uses it is there.

    Args:
      group: the config's name in messages.
      config: a dataclass.
      names: fields that something else may leave without effect.
      unless: whether they have an effect.
      why: what leaves them without, as a sentence without its stop.
    """
    for name in names:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        require(unless or value == default, f"{group}.{name}={value} would be ignored: {why}. Leave it out ({default}), or change that.")


def regular_expression(field: str, pattern: str) -> re.Pattern:
    """The compiled pattern; a ConfigError that names the field if it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}={pattern!r} is no regular expression: {error}.") from error
