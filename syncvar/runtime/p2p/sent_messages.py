"""The pairs and tags with which this rank has sent messages, and the program lines that began it.

At shutdown the launcher compares them with the receives (`protocol.unreceived_messages`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from syncvar.protocol.unreceived_messages import STREAMS_MAX, SentCount
from syncvar.runtime.flight_recorder.call_sites import own_site

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE_MAX = 200  # characters; all of them must fit into one control message


class SentMessages:
    """The pairs and tags with which this rank has sent messages, limited to those used last."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, int, str]] = {}

    def note(self, identity: int, dest: int, tag: int) -> None:
        """Record, from any thread, that this rank begins to send messages with a pair and tag."""
        known = self._streams.pop(identity, None)
        self._streams[identity] = known or (dest, tag, own_site()[-_LINE_MAX:])
        if len(self._streams) > STREAMS_MAX:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread has changed it
                self._streams.pop(next(iter(self._streams)), None)

    def counts(self, following: Callable[[int], int]) -> list[SentCount]:
        """Return how many messages this rank has sent with each pair and tag.

        Args:
            following: Returns the number of the next message of a pair and tag.
        """
        return [
            SentCount(identity, dest, tag, following(identity), line)
            for identity, (dest, tag, line) in list(self._streams.items())[-STREAMS_MAX:]
        ]
