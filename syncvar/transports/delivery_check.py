"""Delivery check: whether another host has received all that a rank sent.

A rank waits for it at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncvar.transports.disconnect_reasons import Sent
    from syncvar.transports.zeromq_sender import SendLink

# Bytes of heartbeats between two looks. With more to send ZeroMQ writes 8192 at once.
_HEARTBEAT_NBYTES_MAX = 4096


class Delivery:
    """Finds out by repeated looks whether a peer's host has received all bytes of a link.

    Heartbeats go on meanwhile, and over a slow path some are always unacknowledged. So the check
    compares with the bytes that ZeroMQ had written when it wrote nothing but heartbeats any more.

    Args:
        link: A link on which no thread sends any more.

    Attributes:
        is_complete: Whether the peer's host has received all.
    """

    __slots__ = ("_before", "_end", "_link", "is_complete")

    def __init__(self, link: SendLink) -> None:
        self._link = link
        self._before: tuple[int, Sent] | None = None
        self._end: int | None = None  # bytes written up to the last frame
        self.is_complete = False

    def look(self) -> bool:
        """Look again; return whether bytes have moved since the last look."""
        queued, sent = len(self._link.outbox), self._link.sent()
        before, self._before = self._before, (queued, sent)
        if before is None:
            return True
        queued_before, sent_before = before
        if self._end is None and not queued and not queued_before and _is_idle(sent_before, sent):
            self._end = sent.written
        if self._end is not None:  # not every system counts acknowledged bytes
            self.is_complete = sent.acknowledged >= self._end or not sent.held
        return (
            queued < queued_before
            or sent.acknowledged > sent_before.acknowledged
            or sent.held < sent_before.held
        )


def _is_idle(before: Sent, now: Sent) -> bool:
    """Return whether ZeroMQ wrote only heartbeats, though the system would have taken more."""
    grown = now.written - before.written
    return before.is_steady and now.is_steady and grown <= _HEARTBEAT_NBYTES_MAX
