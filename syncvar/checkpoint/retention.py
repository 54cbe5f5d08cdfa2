"""Which checkpoints of a folder stay, and which is the best one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Kept", "best_of", "superfluous"]


class Kept(NamedTuple):
    """A committed checkpoint of a folder."""

    step: int
    metric: float | None = None


def best_of(kept: Sequence[Kept], best: str | None) -> Kept | None:
    """Return the checkpoint with the best metric, the later one of equals; None where none has a number.

    Args:
        kept: In any order.
        best: "min", "max" or None.

    Example:
        >>> best_of([Kept(1, 0.5), Kept(2, float("nan")), Kept(3, 0.7)], "min")
        Kept(step=1, metric=0.5)
    """
    if best is None:
        return None
    sign = 1.0 if best == "max" else -1.0
    rated = [(sign * one.metric, one.step, one) for one in kept if one.metric is not None and not math.isnan(one.metric)]
    return max(rated)[2] if rated else None


def superfluous(kept: Sequence[Kept], keep: int | None, best: str | None) -> list[Kept]:
    """Return the checkpoints to remove, oldest first: all but the `keep` latest and the best.

    Args:
        kept: In any order.
        keep: How many of the latest stay; None means all.
        best: "min", "max" or None.

    Example:
        >>> superfluous([Kept(1, 0.1), Kept(2, 0.5), Kept(3, 0.4), Kept(4, 0.3)], 2, "min")
        [Kept(step=2, metric=0.5)]
    """
    if keep is None:
        return []
    ordered = sorted(kept, key=lambda one: one.step)
    stays = {one.step for one in ordered[-keep:]}
    winner = best_of(ordered, best)
    if winner is not None:
        stays.add(winner.step)
    return [one for one in ordered if one.step not in stays]
