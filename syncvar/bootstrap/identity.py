"""Who this process is. Each function joins the job first, if that has not happened."""

from __future__ import annotations

from syncvar.bootstrap.process import current

__all__ = [
    "host_count",
    "host_index",
    "local_rank",
    "local_world_size",
    "rank",
    "restart_count",
    "world_size",
]


def rank() -> int:
    """Return this process's rank in the world, 0 without a launcher.

    Example:
        >>> import syncvar as sv
        >>> sv.rank()
        0
    """
    return current().rank


def world_size() -> int:
    """Return the number of ranks in the world, 1 without a launcher.

    Example:
        >>> import syncvar as sv
        >>> sv.world_size()
        1
    """
    return current().world_size


def local_rank() -> int:
    """Return this process's rank among those of its host."""
    return current().local_rank


def local_world_size() -> int:
    """Return the number of ranks on this host."""
    return current().local_world_size


def host_index() -> int:
    """Return the index of this host, 0 for the first."""
    return current().host_index


def host_count() -> int:
    """Return the number of hosts."""
    return current().host_count


def restart_count() -> int:
    """Return how often this job's workers have been started again before, 0 in the first run and without a launcher.

    `syncvar-launch --max-restarts` starts all workers again when one is lost, and so do torchrun, a
    requeue of Slurm and a JobSet; only checkpoints survive that. An Indexed Job of Kubernetes does
    not tell its pods, so the number stays 0 there. The same on every rank.

    Example:
        >>> import syncvar as sv
        >>> sv.restart_count()
        0
    """
    return current().restarts
