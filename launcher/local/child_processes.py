"""Prepares child processes of the launcher: they end with it, and it can adopt their orphans."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.core.fork_cleanup import end_with, libc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PR_SET_CHILD_SUBREAPER = 36


def child_of(parent: int, cores: Sequence[int] | None = None) -> Callable[[], None]:
    """Return a function for a new child to call before its program.

    The child then ends with `parent`, and uses only `cores`; None for all.
    """

    def prepare() -> None:
        end_with(parent)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


def adopt_orphans(*, is_on: bool) -> None:
    """Become the parent of descendants whose own parent ends, or stop being it."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
