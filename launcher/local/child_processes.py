"""What the system is told of the launcher's children: they end with it, and it can take in those of a child that ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.core.parent_death import end_with, libc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PR_SET_CHILD_SUBREAPER = 36


def child_of(parent: int, cores: Sequence[int] | None = None) -> Callable[[], None]:
    """Return what a new child does before its program: it ends with its parent, and uses certain cores.

    Args:
        parent: The process that starts it.
        cores: Those it may use, or None for all.
    """

    def prepare() -> None:
        end_with(parent)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


def adopt_orphans(*, is_on: bool) -> None:
    """Become, or no longer be, the parent of descendants whose own parent ends."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
