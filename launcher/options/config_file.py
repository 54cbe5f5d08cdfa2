"""Reading the tables [launch] and [runtime] of a TOML file, and settings of the runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig, nearest
from syncvar_launcher.options.option_table import BY_KEY, OPTIONS, Option

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checked options and the checked runtime settings of a file."""
    document = _document(path)
    for name, table in document.items():
        if name not in ("launch", "runtime"):
            hint = nearest(name, ("launch", "runtime"))
            raise ConfigError(f"{path}: unknown table [{name}]{hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table")
    launch: dict[str, Any] = {}
    for key, value in document.get("launch", {}).items():
        option = BY_KEY.get(key)
        if option is None:
            is_setting = key in RuntimeConfig.names()
            hint = ": it belongs to [runtime]" if is_setting else setting_hint(key, key, BY_KEY)
            raise ConfigError(f"{path}: unknown key {key!r} in [launch]{hint}")
        launch[key] = read_value(option, value, f"{path}: {key} in [launch]", is_text=False)
    settings: dict[str, Any] = {}
    for key, value in document.get("runtime", {}).items():
        if key not in RuntimeConfig.names():
            names = RuntimeConfig.names()
            hint = ": it belongs to [launch]" if key in BY_KEY else setting_hint(key, key, names)
            raise ConfigError(f"{path}: unknown key {key!r} in [runtime]{hint}")
        settings[key] = _setting(key, value, f"{path}: [runtime]")
    return launch, settings


def read_value(option: Option, value: Any, source: str, *, is_text: bool) -> Any:
    """Return the checked value of an option; errors begin with the source."""
    try:
        return option.value(value, is_text=is_text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def setting_hint(key: str, text: str, known: Iterable[str]) -> str:
    """Return the setting that a short option stands for, or the most similar known name."""
    for option in OPTIONS:
        if option.setting and key == option.key:
            name = option.setting
            return f": it sets {name}, which is {PREFIX}{name.upper()} or a key of [runtime]"
    return nearest(text, tuple(known))


def _document(path: Path) -> dict[str, Any]:
    import tomllib  # only a file needs it

    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def _setting(name: str, value: Any, source: str) -> Any:
    kind: type = type(getattr(RuntimeConfig(), name))
    if kind is int and isinstance(value, float):
        raise ConfigError(f"{source}: {name} must be a whole number, not {value!r}")
    try:
        checked = RuntimeConfig(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return kind(getattr(checked, name))
