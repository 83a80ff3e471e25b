"""The one error of a wrong config."""


class ConfigError(ValueError):
    """A config that cannot run. The message names the field, the value it has and what would fit."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
