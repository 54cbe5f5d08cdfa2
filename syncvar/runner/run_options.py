"""Options of `sv.run`, translated to those of `syncvar-launch`, which checks their values."""

from __future__ import annotations

import math
import numbers
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RunOptions(NamedTuple):
    """Options of `sv.run` for the launcher.

    Args:
        workers: Number of workers; "auto" for one per usable core; None for the launcher's default.
        limit_s: Time limit of the whole job, in seconds.
        max_restarts: How often all workers may be restarted.
        servers: Number of parameter servers.
        hosts: Hosts with slots, or the path of a host file; None for this host.
        env: Variables of all workers.
        output: Ranks whose lines are shown; None for the launcher's default.
        log_dir: Folder for one file per rank and stream; None for none.
    """

    workers: int | str | None
    limit_s: float
    max_restarts: int
    servers: int
    hosts: Sequence[str] | str | None
    env: Mapping[str, str]
    output: str | None
    log_dir: str | None

    def command_line(self) -> list[str]:
        """Return the options of the launcher; it copies the variables of `env` from its own."""
        pairs: list[tuple[str, Any]] = [
            ("--workers", self.workers),
            ("--timeout", None if self.limit_s == math.inf else self.limit_s),
            ("--max-restarts", self.max_restarts or None),
            ("--servers", self.servers or None),
            ("--hostfile", self.hosts if isinstance(self.hosts, str) else None),
            ("--hosts", ",".join(self.hosts) if isinstance(self.hosts, list) else None),
            ("--output", self.output),
            ("--log-dir", self.log_dir),
            *(("--env", name) for name in self.env),
        ]
        return [f"{name}={value}" for name, value in pairs if value is not None]

    def check_engine(self) -> None:
        """Check that an engine supports the options.

        Raises:
            ConfigError: An option is for the launcher only.
        """
        if self.workers == "auto":
            raise ConfigError(
                'workers="auto" counts the cores of this host: write a number for an engine'
            )
        for name in ("servers", "hosts", "env", "output", "log_dir"):
            if getattr(self, name):
                raise ConfigError(
                    f'{name}= is an option of engine="local": leave it out for an engine'
                )


def checked_options(
    workers: Any, timeout: Any, max_restarts: Any, others: Mapping[str, Any]
) -> RunOptions:
    """Return the options of a call of `sv.run`.

    Raises:
        ConfigError: An option has the wrong type.
    """
    is_count = isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1
    if workers not in (None, "auto") and not is_count:
        raise ConfigError(f'workers must be a positive integer or "auto", not {workers!r:.100}')
    return RunOptions(
        workers=workers,
        limit_s=math.inf if timeout is None else _seconds(timeout),
        max_restarts=_count("max_restarts", max_restarts),
        servers=_count("servers", others["servers"]),
        hosts=_hosts(others["hosts"]),
        env=_variables(others["env"]),
        output=_output(others["output"]),
        log_dir=None if others["log_dir"] is None else _path("log_dir", others["log_dir"]),
    )


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a whole number of at least 0, not {value!r:.100}")
    return value


def _seconds(timeout: Any) -> float:
    number = timeout
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        number = math.nan
    try:
        seconds = float(number)
    except OverflowError:  # a whole number beyond all floats
        seconds = math.inf if number > 0 else math.nan
    if not seconds > 0:
        raise ConfigError(
            f"timeout must be seconds above 0, or None for no limit, not {timeout!r:.100}"
        )
    return seconds


def _hosts(hosts: Any) -> list[str] | str | None:
    if hosts is None:
        return None
    if isinstance(hosts, str | os.PathLike):
        return _path("hosts", hosts)
    names = list(hosts) if hasattr(hosts, "__iter__") else []
    if not names or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(
            f"hosts must be a list such as ['node1:4', 'node2:4'], or the path of a host file, "
            f"not {hosts!r:.100}"
        )
    return names


def _variables(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    is_mapping = hasattr(env, "items") and all(
        isinstance(text, str) for pair in env.items() for text in pair
    )
    if not is_mapping:
        raise ConfigError(
            f"env must be a dict of texts, such as env={{'NAME': 'value'}}, not {env!r:.100}"
        )
    for name, value in env.items():
        if not name or "=" in name or "*" in name or "\0" in name + value:
            raise ConfigError(
                f"env has {name!r:.100}, which cannot be a variable with such a value"
            )
    return dict(env)


def _output(output: Any) -> str | None:
    if output is None or isinstance(output, str):
        return output
    ranks = list(output) if hasattr(output, "__iter__") else [output]
    if not ranks or not all(isinstance(one, int) and not isinstance(one, bool) for one in ranks):
        raise ConfigError(
            f'output must be "all", "first", "failed", "none" or ranks, not {output!r:.100}'
        )
    return ",".join(str(one) for one in ranks)


def _path(name: str, path: Any) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise ConfigError(f"{name} must be a path, not {path!r:.100}") from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path, not {path!r:.100}")
    return text
