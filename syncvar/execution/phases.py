"""The first phase of every call in shared memory: the ranks have said the same, or nothing happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.arena.channel import Channel

__all__ = ["DISAGREE", "NEVER", "agreed", "settled"]

DISAGREE = 0
"""Yielded when the ranks do not make the same call: only the launcher's verdict can end the wait."""

NEVER = -(1 << 40)
"""Yielded when a rank that this one needs is no more: the launcher will say so."""


def settled(channel: Channel, *, to_its_end: bool = True) -> Iterator[int]:
    """Wait, where an earlier call was given up, until the others are past what this rank has published.

    Args:
        channel: This rank's end.
        to_its_end: Where the ranks have agreed on a call, all of them come to its last phase. Not so in a call that
            also needs other hosts: then it is enough that all have come to the call, so that no rank is two ahead.
    """
    if not channel.is_settled:
        if channel.last:  # else it has published nothing yet
            yield -channel.phase if channel.phase and to_its_end else channel.last
        channel.is_settled = True


def agreed(channel: Channel, check: int, reached: int) -> Iterator[int]:
    """Wait for phase 0 of all ranks, and compare."""
    yield reached
    if channel.disagreeing(check):
        yield DISAGREE
