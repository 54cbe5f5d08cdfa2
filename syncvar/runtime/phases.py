"""The first phase of every call in shared memory: the ranks have said the same, or nothing happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.arena.channels import Channel

__all__ = ["DISAGREE", "agreed", "settled"]

DISAGREE = 0
"""Yielded when the ranks do not make the same call: only the launcher's verdict can end the wait."""


def settled(channel: Channel) -> Iterator[int]:
    """Wait, where an earlier call was given up, until the others are past what this rank has published."""
    if not channel.is_settled:
        if channel.last:  # else it has published nothing yet
            yield -channel.phase if channel.phase else channel.last
        channel.is_settled = True


def agreed(channel: Channel, check: int, reached: int) -> Iterator[int]:
    """Wait for phase 0 of all ranks, and compare."""
    yield reached
    if channel.disagreeing(check):
        yield DISAGREE
