"""Configs from files and from the command line."""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import runpy
import traceback
import typing
from pathlib import Path
from typing import Any

import tyro

from moejax.config.errors import ConfigError, require
from moejax.config.run import RunConfig

SHORTHANDS = {
    "profile": "observe.profile",
    "dump": "observe.dump",
    "debug": "train.debug",
    "resume": "checkpoint.resume",
}
"""Command-line names that stand for a field."""


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """Loads a config file and applies the command line to it.

    Args:
      path: a Python file with one function `config() -> RunConfig`.
      overrides: command-line arguments, e.g. `["--mesh.expert", "4", "--debug"]`; see `override`.

    Raises:
      ConfigError: the file is missing or wrong, or an override is; a failed check inside the file comes through as it is.
    """
    path = Path(path)
    if not path.is_file():
        folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
        there = ", ".join(sorted(str(file) for file in folder.glob("*.py"))) or "no config"
        raise ConfigError(f"There is no config file {path}; in {folder} lies: {there}.")
    config = _call(path)
    require(isinstance(config, RunConfig), f"{path}: config() returned {type(config).__name__}, it must return a RunConfig.")
    _check_types(config)
    return override(config, overrides)


def _call(path: Path) -> Any:
    """What the file's config() returns; an exception inside becomes a ConfigError with its place."""
    try:
        make = runpy.run_path(str(path), run_name=path.stem).get("config")
        if not callable(make):
            raise ConfigError(f"{path} has no function config(); a config file is one function config() -> RunConfig.")
        return make()
    except ConfigError:
        raise
    except Exception as error:
        inside = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else inside[-1].lineno if inside else "?"
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}{_legal_fields(error)}") from error


def _legal_fields(error: Exception) -> str:
    """What a config class does take, after Python's complaint of a keyword that it does not."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument", str(error))
    for kind in _classes(RunConfig):
        if found and kind.__name__ == found[1]:
            return f". Its fields are {', '.join(field.name for field in dataclasses.fields(kind))}."
    return ""


def _classes(kind: type) -> typing.Iterator[type]:
    """A config class and those of its fields."""
    yield kind
    for inner in typing.get_type_hints(kind).values():
        for each in (inner, *typing.get_args(inner)):
            if isinstance(each, type) and dataclasses.is_dataclass(each):
                yield from _classes(each)


def override(config: RunConfig, args: typing.Sequence[str]) -> RunConfig:
    """The config with fields replaced.

    Args:
      config: what is overridden.
      args: `--field.of.a.field value` or `=value`; `-` and `_` are the same in a name; a bool's value may be left out, and
        `--no-` before its last name means False; an entry of a tuple of groups has its index for a name (`--data.sources.0.path`).

    Raises:
      ConfigError: an unknown key (with those close to it), a value of another type, or a config that fails its checks.
    """
    changes: dict[str, list[str]] = {}
    for key, values in _split(args):
        rest, _, leaf = key.rpartition(".")
        if leaf.startswith("no_") and key not in fields(config) and not values:
            key, values = f"{rest}.{leaf[3:]}".lstrip("."), ["False"]
        key = SHORTHANDS.get(key, key)
        require(key not in changes, f"--{key} is given twice.")
        _check_key(config, key)
        changes[key] = values
    return _replace(config, changes, "")


def fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name to annotated type of every field that can be overridden, nested ones and entries of tuples included."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            found |= fields(value, f"{prefix}{name}.")
        elif _is_group_tuple(kind):
            for index, entry in enumerate(value):
                found |= fields(entry, f"{prefix}{name}.{index}.")
        else:
            found[prefix + name] = kind
    return found


def help_text(config: RunConfig) -> str:
    """Every field of the config with its meaning and its value, as shown by --help."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(RunConfig, prog="moejax train CONFIG", default=config, args=["--help"])
    return text.getvalue()


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain dicts, lists and values."""
    return dataclasses.asdict(config)


def to_json(config: Any) -> str:
    """A config as indented json."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def _is_group_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple and dataclasses.is_dataclass(typing.get_args(kind)[0])


def _split(args: typing.Sequence[str]) -> typing.Iterator[tuple[str, list[str]]]:
    """Dotted names with their values; a value may begin with one dash (-1) but not with two."""
    position = 0
    while position < len(args):
        require(args[position].startswith("--"), f"{args[position]!r} belongs to no --key; write --field value.")
        key, equals, value = args[position][2:].partition("=")
        position += 1
        values = [value] if equals else []
        while not equals and position < len(args) and not args[position].startswith("--"):
            values.append(args[position])
            position += 1
        yield key.replace("-", "_"), values


def _check_key(config: RunConfig, key: str) -> None:
    legal = fields(config)
    if key in legal:
        return
    group = key
    while group and not any(name.startswith(group + ".") for name in legal):
        group = group.rpartition(".")[0]
    inside = [name for name in legal if name.startswith(group + ".")] if group else list(legal)
    siblings = list(dict.fromkeys(name.removeprefix(group).lstrip(".").partition(".")[0] for name in inside))
    where = f"{group} has" if group else "At the top are"
    require(group != key, f"--{key} is a group of fields, set one of them. {where}: {', '.join(siblings)}.")
    leaf = key.rpartition(".")[2]
    close = [name for name in legal if name.rpartition(".")[2] == leaf] + difflib.get_close_matches(key, [*legal, *SHORTHANDS], n=3)
    hint = f" Did you mean --{' or --'.join(dict.fromkeys(close))}?" if close else ""
    raise ConfigError(f"--{key}: there is no such field.{hint} {where}: {', '.join(siblings)}.")


def _replace(config: Any, changes: dict[str, list[str]], prefix: str) -> Any:
    """Rebuilds from the leaves up, so that a group is checked once, with all its new values."""
    new: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(type(config)).items():
        path, value = prefix + name, getattr(config, name)
        if path in changes:
            new[name] = _parse(path, kind, changes[path])
        elif not any(key.startswith(path + ".") for key in changes):
            continue
        elif dataclasses.is_dataclass(value):
            new[name] = _replace(value, changes, path + ".")
        else:
            new[name] = tuple(_replace(entry, changes, f"{path}.{index}.") for index, entry in enumerate(value))
    return dataclasses.replace(config, **new) if new else config


def _parse(path: str, kind: Any, values: list[str]) -> Any:
    """The value that the words of the command line spell."""
    words = ["True"] if kind is bool and not values else values
    try:
        if typing.get_origin(kind) is tuple:
            return tuple(_word(typing.get_args(kind)[0], word) for word in words)
        (word,) = words
        return _word(kind, word)
    except (ValueError, KeyError):
        given = repr(" ".join(values)) if values else "nothing"
        raise ConfigError(f"--{path}: {given} is no {_spell(kind)}.") from None


def _word(kind: Any, word: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return {str(value): value for value in typing.get_args(kind)}[word]
    return {"true": True, "false": False}[word.lower()] if kind is bool else kind(word)


def _spell(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is typing.Literal:
        return "value of " + ", ".join(repr(value) for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"sequence of {typing.get_args(kind)[0].__name__}"
    return {int: "whole number (int)", float: "number (float)", bool: "True or False (bool)", str: "text (str)"}[kind]


def _check_types(config: Any, prefix: str = "") -> None:
    """Python does not check the types of a dataclass; a file's `kind="adam"` must not reach a branch that knows no such kind."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            require(isinstance(value, kind), f"{prefix}{name}={value!r} is no {kind.__name__}.")
            _check_types(value, f"{prefix}{name}.")
        elif _is_group_tuple(kind):
            entry_kind = typing.get_args(kind)[0]
            require(
                isinstance(value, tuple) and all(isinstance(entry, entry_kind) for entry in value),
                f"{prefix}{name}={value!r} is no tuple of {entry_kind.__name__}.",
            )
            for index, entry in enumerate(value):
                _check_types(entry, f"{prefix}{name}.{index}.")
        else:
            require(_fits(value, kind), f"{prefix}{name}={value!r} is no {_spell(kind)}.")


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(entry, typing.get_args(kind)[0]) for entry in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind
