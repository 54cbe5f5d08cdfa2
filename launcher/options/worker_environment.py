"""Decides which variables a worker gets: inherited ones, and those of `--env`.

A worker on the launcher's host inherits all variables. With `--env-clear`, and on other hosts, a
worker gets only an allow-list and the variables of `--env`. So tokens in the launcher's environment
stay there. `--env NAME` takes the value from the environment, so no secret stands on a command
line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncvar.core.environment import PREFIX, RankEnvironment
from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY_FD = "SYNCVAR_KEY_FD"
"""The variable in which a worker finds the number of the secret's descriptor."""

KEY_FILE = "SYNCVAR_KEY_FILE"
"""The variable in which a program finds the path of the secret's file."""

# Variables of the launcher itself and of its parent: no worker gets them.
WITHHELD = frozenset(
    (
        *(KEY_FD, "SYNCVAR_KEY", "SYNCVAR_STATUS_FD", "SYNCVAR_PROCESS"),
        *("SYNCVAR_PASS_FDS", "SYNCVAR_PARENT_FD", "SYNCVAR_OUTCOME_FILE"),
    )
)

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_CONTRACT = frozenset(RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "").to_mapping())
_SETTINGS = frozenset(PREFIX + name.upper() for name in RuntimeConfig.names())

_OF_ONE_HOST = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "XDG_RUNTIME_DIR", "VIRTUAL_ENV"),
        *("CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH"),
        *(PREFIX + "CALL_FD", PREFIX + "RESULT_DIR"),
    )
)
_ALLOWED = _OF_ONE_HOST.union(
    ("LANG", "LANGUAGE", "TERM", "TZ", "NO_COLOR", "FORCE_COLOR", PREFIX + "FULL_TRACEBACK")
)
_ALLOWED_FAMILIES = (
    *("LC_", "PYTHON", "OMP_", "GOMP_", "KMP_"),
    *("MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "VECLIB_"),
)

# They run code in every process that gets them, so neither PREFIX* nor the allow-list copies them.
_BY_NAME_ONLY = ("LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP", "BASH_ENV", "ENV")


def inherited_variables(environ: Mapping[str, str], *, is_clear: bool) -> dict[str, str]:
    """Return the variables that a worker inherits.

    `is_clear` limits them to the allow-list, as for `--env-clear` and on other hosts.

    Example:
        >>> environ = {"PATH": "/bin", "LC_ALL": "C", "API_TOKEN": "x", "SYNCVAR_KEY": "y"}
        >>> inherited_variables(environ, is_clear=True)
        {'PATH': '/bin', 'LC_ALL': 'C'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in WITHHELD and (not is_clear or _is_allowed(name))
    }


def carried_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the allow-list that other hosts get, as they mean the same there.

    Example:
        >>> environ = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "2", "API_TOKEN": "x"}
        >>> carried_variables(environ)
        {'LC_ALL': 'C', 'OMP_NUM_THREADS': '2'}
    """
    return {
        name: value
        for name, value in inherited_variables(environ, is_clear=True).items()
        if name not in _OF_ONE_HOST
    }


def check_assignment(text: str) -> None:
    """Check the form of a value of `--env`: NAME=value, NAME or PREFIX*."""
    name, equals, _ = text.partition("=")
    if not equals and text.endswith("*"):
        if not _NAME.fullmatch(text[:-1]):
            raise ConfigError(
                f"{text!r} is not a prefix of variable names (letters, digits and _, no digit "
                "first) followed by *"
            )
        return
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a variable name (letters, digits and _, no digit first)"
        )
    if "\0" in text:
        raise ConfigError(f"the value of {name} has a zero byte")
    if name in _CONTRACT:
        raise ConfigError(f"{name} is set by the launcher, for each rank its own")
    if name in _SETTINGS:
        raise ConfigError(
            f"{name} is a setting of the whole job: set it in the environment of syncvar-launch "
            "or in [runtime]"
        )


def env_variables(items: Sequence[str], environ: Mapping[str, str], source: str) -> dict[str, str]:
    """Return the variables that `--env` sets or copies.

    Args:
        items: Values of `--env`, checked by `check_assignment`.
        environ: The launcher's environment, the source of copies.
        source: The source of the items, for messages.

    Example:
        >>> environ = {"LANG": "C", "AWS_REGION": "x", "AWS_ID": "y"}
        >>> env_variables(["A=1", "LANG", "AWS_*"], environ, "command line")
        {'A': '1', 'LANG': 'C', 'AWS_REGION': 'x', 'AWS_ID': 'y'}
    """
    result: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if equals:
            result[name] = value
        elif item.endswith("*"):
            found = {
                name: value
                for name, value in environ.items()
                if name.startswith(item[:-1]) and _may_be_copied(name)
            }
            if not found:
                raise ConfigError(
                    f"--env {item} ({source}): syncvar-launch has no variable to copy whose name "
                    f"begins with {item[:-1]}"
                )
            result |= found
        elif name in environ:
            result[name] = environ[name]
        else:
            raise ConfigError(
                f"--env {name} ({source}): syncvar-launch has no variable {name} to copy; give "
                f"{name}=value"
            )
    return result


def _is_allowed(name: str) -> bool:
    is_of_family = name.startswith(_ALLOWED_FAMILIES) and name not in _BY_NAME_ONLY
    return name in _ALLOWED or name in _SETTINGS or is_of_family


def _may_be_copied(name: str) -> bool:
    is_ours = name in _CONTRACT | _SETTINGS | WITHHELD
    return bool(_NAME.fullmatch(name)) and name not in _BY_NAME_ONLY and not is_ours
