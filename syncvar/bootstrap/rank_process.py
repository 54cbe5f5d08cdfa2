"""Which process is the rank: programs that it starts inherit its variables, and must not take its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.core.environment import PREFIX, RankEnvironment
from syncvar.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

__all__ = ["claim_rank", "environment_of"]

_VARIABLE = PREFIX + "PROCESS"
_START_FIELD = 19  # of /proc/PID/stat, counted after the name


def claim_rank(environ: MutableMapping[str, str]) -> None:
    """Note in the environment that this process is the rank of which the environment speaks."""
    environ[_VARIABLE] = _identity()


def environment_of(environ: Mapping[str, str], *, alone: bool = False) -> RankEnvironment | None:
    """Return which rank a launcher has made this process; None where it may be a world of one.

    Args:
        environ: The environment of this process.
        alone: It asks for a world of one.

    Raises:
        UsageError: It was started by a rank, inherited that rank's variables, and does not ask for a world of one.
        ConfigError: The variables are incomplete or wrong.
    """
    claimed = environ.get(_VARIABLE)
    if claimed is None or claimed == _identity():
        return RankEnvironment.from_mapping(environ)
    from syncvar.bootstrap.launch_env.detection import (
        is_meant_alone,  # only a program that a rank started needs it
    )

    if alone or is_meant_alone(environ):
        return None
    raise UsageError(
        f"process {os.getpid()} was started by rank {environ.get(PREFIX + 'RANK')} (process {claimed.partition(':')[0]}) and is no "
        f"rank itself: a rank is one process, and its variables are inherited. To use syncvar there as a world of one, call "
        f"sv.init(alone=True) first, or start it with {PREFIX}WORLD_SIZE=1. Where it should be the rank, and what started it is a "
        f"wrapper, start the wrapper with syncvar-launch --no-python"
    )


def _identity() -> str:
    """Return the number of this process and when it began: numbers of processes are used again."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        return f"{os.getpid()}:{file.read().rpartition(')')[2].split()[_START_FIELD]}"
