"""Decides which process is the rank.

Programs that it starts inherit its variables, but are not the rank.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.core.environment import PREFIX, RankEnvironment
from syncvar.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

_VARIABLE = PREFIX + "PROCESS"
_START_FIELD = 19  # field of /proc/PID/stat after the name


def claim_rank(environ: MutableMapping[str, str]) -> None:
    """Record in the environment that this process is the rank of its variables."""
    environ[_VARIABLE] = _identity()


def environment_of(environ: Mapping[str, str], *, alone: bool = False) -> RankEnvironment | None:
    """Return the rank that a launcher has made this process; None for a possible world of one.

    Raises:
        UsageError: A rank has started this process, which has inherited its variables and does not
            ask for a world of one.
        ConfigError: The variables are incomplete or wrong.
    """
    claimed = environ.get(_VARIABLE)
    if claimed is None or claimed == _identity():
        return RankEnvironment.from_mapping(environ)
    from syncvar.bootstrap.launch_env.detection import (
        wants_world_of_one,  # only needed in a program that a rank has started
    )

    if alone or wants_world_of_one(environ):
        return None
    raise UsageError(
        f"process {os.getpid()} was started by rank {environ.get(PREFIX + 'RANK')} (process "
        f"{claimed.partition(':')[0]}) and is no rank itself: a rank is one process, and its "
        "variables are inherited. To use syncvar there as a world of one, call "
        f"sv.init(alone=True) first, or start it with {PREFIX}WORLD_SIZE=1. Where it should be "
        "the rank, and what started it is a wrapper, start the wrapper with syncvar-launch "
        "--no-python"
    )


def _identity() -> str:
    """Return PID and start time of this process, because the system reuses PIDs."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        return f"{os.getpid()}:{file.read().rpartition(')')[2].split()[_START_FIELD]}"
