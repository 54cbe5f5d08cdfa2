"""Rank, size and host of this process. Each function joins the job first, if necessary."""

from __future__ import annotations

from syncvar.bootstrap.process import current


def rank() -> int:
    """Return this process's rank in the world; 0 without a launcher.

    Example:
        >>> import syncvar as sv
        >>> sv.rank()
        0
    """
    return current().rank


def world_size() -> int:
    """Return the number of ranks in the world; 1 without a launcher.

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
    """Return how often this job's workers have been restarted; 0 in the first run.

    Equal on all ranks.

    `syncvar-launch --max-restarts` restarts all workers when one fails. So do torchrun, a requeue
    of Slurm and a JobSet. Only checkpoints survive a restart. An Indexed Job of Kubernetes does not
    count its restarts, so the number stays 0.

    Example:
        >>> import syncvar as sv
        >>> sv.restart_count()
        0
    """
    return current().restarts
