"""Whether what a rank has sent to another host has arrived there, which it waits for at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncvar.transports.disconnect_reasons import Sent
    from syncvar.transports.zeromq_sender import SendLink

__all__ = ["Delivery"]

_SIGNS_NBYTES_MAX = 4096  # of signs of life between two looks; ZeroMQ writes 8192 at once where there is more to send


class Delivery:
    """Tells by one look after the other whether a peer's host has all that its link was given.

    Signs of life go on meanwhile. On a long way some of them are always unacknowledged, so that no look finds
    nothing on the way. What counts is what had been written when ZeroMQ wrote nothing else any more.

    Args:
        link: The link. Nobody sends on it any more.

    Attributes:
        is_complete: The peer's host has all.
    """

    __slots__ = ("_before", "_end", "_link", "is_complete")

    def __init__(self, link: SendLink) -> None:
        self._link = link
        self._before: tuple[int, Sent] | None = None
        self._end: int | None = None  # so many bytes had been written behind the last frame
        self.is_complete = False

    def look(self) -> bool:
        """Look again, a little later than before; return whether anything has moved since the last look."""
        kept, sent = len(self._link.outbox), self._link.sent()
        before, self._before = self._before, (kept, sent)
        if before is None:
            return True
        kept_before, sent_before = before
        if self._end is None and not kept and not kept_before and _is_idle(sent_before, sent):
            self._end = sent.written
        if self._end is not None:  # not every system counts what is acknowledged
            self.is_complete = sent.acknowledged >= self._end or not sent.held
        return (
            kept < kept_before
            or sent.acknowledged > sent_before.acknowledged
            or sent.held < sent_before.held
        )


def _is_idle(before: Sent, now: Sent) -> bool:
    """Return whether ZeroMQ has written no more than signs of life, though the system would have taken it."""
    grown = now.written - before.written
    return before.is_steady and now.is_steady and grown <= _SIGNS_NBYTES_MAX
