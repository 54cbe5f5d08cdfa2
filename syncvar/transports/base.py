"""The contract of every transport, and of the control channel beside it.

A transport moves frames between the ranks of one generation. It knows no collective and never calls upward.

* **Order**: frames of one sender to one receiver arrive in the order sent, once, or the link is reported lost. Frames
  of different senders arrive in any order. Whoever sits above must not rely on more: `syncvar.testing` also offers
  transports that reorder.
* **What blocks**: only `wait` and `wait_idle`, and `close` for at most its linger. `send` queues what cannot go at once.
* **Who owns memory**: a payload given with `borrow=True` is borrowed until the returned loan says `is_done()`; with
  `borrow=False` it is copied before `send` returns. A received payload belongs to the receiver.
* **Failure**: a link never heals. It is reported once as `PeerDisconnected`, after every frame that arrived before; sends to a
  lost peer are dropped silently, since the report has been made.
* **Errors**: operating system and ZeroMQ errors surface as children of `TransportError`, their cause kept.
* **Threads**: one thread at a time may use a transport; only `wake` and `wait_idle` may be called
  beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.protocol.control_messages import Message
    from syncvar.protocol.frame import Header

__all__ = ["Arrival", "BorrowedFrame", "Control", "Frame", "PeerDisconnected", "Transport"]


class Frame(NamedTuple):
    """An arrived frame.

    Args:
        header: Parsed and checked; its source is the peer that really sent it.
        payload: `header.nbytes` bytes, owned by the receiver.
    """

    header: Header
    payload: bytes | memoryview


class PeerDisconnected(NamedTuple):
    """A link that will deliver nothing more.

    Args:
        peer: The rank at its other end.
        reason: What was seen, for instance "it closed the connection without a goodbye".
    """

    peer: int
    reason: str


Arrival = Frame | PeerDisconnected


class BorrowedFrame(Protocol):
    """Memory that a transport still reads."""

    def is_done(self) -> bool:
        """Return whether the memory may be written again."""


class Transport(Protocol):
    """Frames between ranks; see the module's text for the contract."""

    @property
    def address(self) -> str:
        """Where peers reach this rank; valid from construction."""

    @property
    def outside(self) -> str:
        """Where peers of other hosts reach it; empty where they do not."""

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Learn where the peers are. Links open when they are first used."""

    def send(
        self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False
    ) -> BorrowedFrame | None:
        """Send a frame; returns a loan when the payload was borrowed and is still being read."""

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None when there is none now."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until something may have arrived, `wake` is called, or the time is over.

        Returns:
            Whether a control message may have arrived too.
        """

    def wait_idle(self, timeout_s: float) -> None:
        """Wait like `wait`, without using the transport: the progress thread may call it beside a driver.

        It ends too when frames that could not go at once can go: who has sent them may be busy elsewhere.
        """

    def wake(self) -> None:
        """Make `wait` and `wait_idle` return, from any thread."""

    def close(self, linger_s: float) -> None:
        """Give up all links; frames already sent are flushed for at most `linger_s` seconds. Idempotent."""


class Control(Protocol):
    """The channel to the process that keeps the roll.

    Attributes:
        keeper: The rank whose process keeps the roll; None for the launcher.
    """

    keeper: int | None

    def send(self, data: bytes) -> None:
        """Send a control message; never blocks."""

    def receive(self) -> Message | None:
        """Return the next control message, or None when there is none now."""

    def close(self, linger_s: float) -> None:
        """Close the channel. Idempotent."""
