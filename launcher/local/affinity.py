"""Decides which cores each worker may use, and how many BLAS threads it may start.

Without binding, workers that share cores make slow small calls. BLAS libraries that each start a
thread per core slow each other down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar_launcher.options.option_table import BIND_MODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class Binding(NamedTuple):
    """The cores of each worker of one host.

    Args:
        cores: For each local rank the cores that it may use, or None without binding.
        reason: The reason, in one sentence.
    """

    cores: tuple[tuple[int, ...] | None, ...]
    reason: str


def plan_binding(
    workers: int,
    usable_cores: Sequence[int],
    online_cores: int,
    mode: str = "auto",
    cores_per_worker: int | None = None,
) -> Binding:
    """Decide which cores each worker of a host may use.

    All workers get equally many cores, because a collective waits for the slowest. Remaining cores
    stay free for the launcher.

    Args:
        workers: The number of workers on this host, at least 1.
        usable_cores: The cores that the launcher may use, in the order of assignment.
        online_cores: The number of cores of the host. Fewer usable ones mean that an affinity is
            set.
        mode: "auto" (bind without an affinity, if each core gets equally many workers), "cores"
            (always) or "none".
        cores_per_worker: The cores of each worker, or None for an equal share. A number also binds
            under "auto".

    Example:
        >>> plan_binding(2, [0, 1, 2, 3], 4).cores
        ((0, 1), (2, 3))
        >>> plan_binding(3, [0, 1], 2)
        Binding(cores=(None, None, None), reason='not bound: 3 workers share 2 usable cores')
    """
    usable = len(usable_cores)
    if mode not in BIND_MODES:
        raise ConfigError(f"bind must be one of {', '.join(BIND_MODES)}, not {mode!r}")
    if cores_per_worker is not None and workers * cores_per_worker > usable:
        fewer_cores, fewer_workers = usable // workers, usable // cores_per_worker
        remedies = [f"--cores-per-worker {fewer_cores}"] * (fewer_cores > 0)
        remedies += [f"at most {_count(fewer_workers, 'worker')}"] * (fewer_workers > 0)
        use = f"use {' or '.join(remedies)}, or " if remedies else ""
        raise ConfigError(
            f"{_count(workers, 'worker')} with {_count(cores_per_worker, 'core')} each need "
            f"{workers * cores_per_worker} cores, but this host lets us use {usable}: "
            f"{use}leave --cores-per-worker out"
        )
    unbound: tuple[None, ...] = (None,) * workers
    if mode == "none":
        return Binding(unbound, "not bound: --bind none")
    if mode == "auto" and workers > usable and workers % usable:
        return Binding(
            unbound, f"not bound: {_count(workers, 'worker')} share {_count(usable, 'usable core')}"
        )
    if mode == "auto" and cores_per_worker is None and usable != online_cores:
        return Binding(
            unbound,
            f"not bound: an affinity is set already ({usable} of {_count(online_cores, 'core')} "
            "usable)",
        )
    if workers > usable:
        shared = tuple((usable_cores[worker % usable],) for worker in range(workers))
        return Binding(
            shared,
            f"bound in turn: {_count(workers, 'worker')} share {_count(usable, 'usable core')}",
        )
    size = cores_per_worker or usable // workers
    cores = tuple(
        tuple(usable_cores[worker * size : (worker + 1) * size]) for worker in range(workers)
    )
    return Binding(cores, f"bound: {_count(size, 'core')} of its own for each worker")


def blas_threads(workers: int, usable: int, cores_per_worker: int | None = None) -> int:
    """Return how many BLAS threads each worker may start.

    `usable` is the number of cores that the workers may use together.

    Example:
        >>> blas_threads(4, 8), blas_threads(4, 2), blas_threads(1, 8, 3)
        (2, 1, 3)
    """
    return cores_per_worker or max(1, usable // workers)


def blas_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the thread variables to set for a worker, without those that it already has.

    Example:
        >>> sorted(blas_environment(2, {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "8"}))
        ['NUMEXPR_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'VECLIB_MAXIMUM_THREADS']
    """
    return {name: str(threads) for name in BLAS_VARIABLES if name not in environ}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
