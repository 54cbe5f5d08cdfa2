"""Which checkpoints of a directory stay, and which is the best one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RetainedCheckpoint(NamedTuple):
    """A committed checkpoint of a manager's directory.

    Args:
        step: Of the program.
        metric: How good it is, or None.
        number: Of the save, counted in the directory; 0 where the manifest has none.
        is_whole: Nothing is known to be wrong with it.
    """

    step: int
    metric: float | None = None
    number: int = 0
    is_whole: bool = True

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the order of saving; checkpoints without a number keep the order of steps."""
        return self.number, self.step


def best_of(kept: Sequence[RetainedCheckpoint], best: str | None) -> RetainedCheckpoint | None:
    """Return the checkpoint with the best metric, the later one of equals; None where none has a number.

    Args:
        kept: In any order.
        best: "min", "max" or None.

    Example:
        >>> best_of([RetainedCheckpoint(1, 0.5), RetainedCheckpoint(2, float("nan")), RetainedCheckpoint(3, 0.7)], "min").step
        1
    """
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
    """Return the checkpoints to remove, oldest first: all but the `keep` latest saves and the best.

    One that is not whole does not count; it is removed when it is older than all that stay.

    Args:
        kept: In any order.
        keep: How many of the latest stay; None means all.
        best: "min", "max" or None.

    Example:
        >>> saves = [RetainedCheckpoint(1, 0.1), RetainedCheckpoint(2, 0.5), RetainedCheckpoint(3, 0.4), RetainedCheckpoint(4, 0.3)]
        >>> [one.step for one in superfluous(saves, 2, "min")]
        [2]
    """
    ordered = sorted(kept, key=lambda one: one.place)
    whole = [at for at, one in enumerate(ordered) if one.is_whole]
    if keep is None or len(whole) <= keep:
        return []
    winner = best_of(ordered, best)
    return [one for one in ordered[: whole[-keep]] if one is not winner]
