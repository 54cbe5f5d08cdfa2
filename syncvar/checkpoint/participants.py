"""Who saves or restores together: the replicas of variables, or one worker for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.collectives.sync_points import gather_objects
from syncvar.runtime.communicator import Communicator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SoloGroup", "Together", "gathered"]


class SoloGroup:
    """The group of a worker that saves or restores for all, or leaves that to rank 0.

    Args:
        rank: This worker.
        workers: How many the job has.
    """

    size = 1

    def __init__(self, rank: int, workers: int) -> None:
        self.rank = self.member_rank = rank
        self.workers = workers
        self.members = (rank,)

    def require_all(self, what: str, instead: str = "") -> None:
        """Do nothing: nobody else is needed."""


Together = Communicator | SoloGroup


def gathered(
    group: Together, name: str, make: Callable[[], Any], timeout: float | None
) -> list[Any]:
    """Return what every rank of a group makes; what `make` raises is the caller's error, of which the others are told."""
    if isinstance(group, SoloGroup):
        return [make()]
    found: list[Any] = gather_objects(group, name, make, timeout)
    return found
