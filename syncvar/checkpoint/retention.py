"""Which checkpoints of a directory to keep, and which one is the best. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RetainedCheckpoint(NamedTuple):
    """A committed checkpoint of a manager's directory.

    Args:
        step: Step of the program.
        metric: Quality, or None.
        number: Sequence number of the save in the directory; 0 if the manifest has none.
        is_whole: Whether no damage is known.
    """

    step: int
    metric: float | None = None
    number: int = 0
    is_whole: bool = True

    @property
    def place(self) -> tuple[int, int]:
        """Sort key of the order of saving; checkpoints without a number are ordered by step."""
        return self.number, self.step


def best_of(kept: Sequence[RetainedCheckpoint], best: str | None) -> RetainedCheckpoint | None:
    """Return the checkpoint with the best metric, the latest of equals; None without metrics."""
    if best is None:
        return None
    sign = 1.0 if best == "max" else -1.0
    rated = [
        (sign * one.metric, one)
        for one in kept
        if one.metric is not None and not math.isnan(one.metric)
    ]
    return max(rated, key=lambda pair: (pair[0], pair[1].place))[1] if rated else None


def superfluous(
    kept: Sequence[RetainedCheckpoint], keep: int | None, best: str | None
) -> list[RetainedCheckpoint]:
    """Return the checkpoints to remove, oldest first: all but the `keep` latest and the best.

    A damaged checkpoint does not count; it goes when it is older than all that stay.
    """
    ordered = sorted(kept, key=lambda one: one.place)
    whole = [index for index, one in enumerate(ordered) if one.is_whole]
    if keep is None or len(whole) <= keep:
        return []
    winner = best_of(ordered, best)
    return [one for one in ordered[: whole[-keep]] if one is not winner]
