"""The contract of all transports and of the control channel, and how waits end (`Wakeup`).

A transport moves frames between the ranks of one generation. It knows no collective and never calls
upward.

* **Order**: frames of one sender reach one receiver in the order sent, each once, or the transport
  reports the link as lost. Frames of different senders arrive in any order. Callers must not rely
  on more: `syncvar.testing` also reorders.
* **Blocking**: only `wait`, `wait_idle`, and `close` for at most its linger. `send` queues what
  cannot go at once.
* **Memory**: with `borrow=True` the transport reads the payload until the returned `BorrowedFrame`
  says `is_done()`; with `borrow=False` it copies the payload before `send` returns. The receiver
  owns a received payload. The transport may ask `placer` where a payload belongs that is under way,
  and receive it there, instead of into memory of its own.
* **Failure**: a link never heals. The transport reports the loss once, as `PeerDisconnected`, after
  all frames that arrived before; it drops later sends to this peer silently.
* **Errors**: operating system and ZeroMQ errors become children of `TransportError`, with their
  cause.
* **Threads**: one thread at a time may use a transport; only `wake` and `wait_idle` may run beside
  it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from syncvar.core.errors import WireError
from syncvar.protocol.frame import CARRIERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.protocol.control_messages import Message
    from syncvar.protocol.frame import Header


class Frame(NamedTuple):
    """An arrived frame, and its payload, which the receiver owns; its source is the real sender."""

    header: Header
    payload: bytes | memoryview


class PeerDisconnected(NamedTuple):
    """A link to `peer` that delivers nothing more, and the observed reason."""

    peer: int
    reason: str


Arrival = Frame | PeerDisconnected


class BorrowedFrame(Protocol):
    """Memory that a transport still reads."""

    def is_done(self) -> bool:
        """Return whether the caller may write the memory again."""


class Place:
    """Memory of the receiver in which a payload that is under way shall arrive.

    A transport writes there while it holds `lock`, and only if `is_open`. `close` ends that, from
    any thread: the owner may use the memory again when it returns.
    """

    __slots__ = ("is_open", "lock", "memory")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.is_open = True
        self.lock = threading.RLock()  # a signal's handler may close what its thread writes

    def close(self) -> None:
        """Let no transport write there any more."""
        with self.lock:
            self.is_open = False


class Placer(Protocol):
    """Finds where payloads belong."""

    def __call__(self, header: Header, /) -> Place | None:
        """Return where the payload of a valid header belongs; None if nobody waits for it yet."""


class Transport(Protocol):
    """Frames between ranks; the module's text has the contract."""

    placer: Placer | None  # of the caller

    @property
    def address(self) -> str:
        """Address of this rank for its peers; valid from construction."""

    @property
    def outside(self) -> str:
        """Address for peers of other hosts; empty if there are none."""

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Set the addresses of the peers. Links open at their first use."""

    def send(
        self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False
    ) -> BorrowedFrame | None:
        """Send a frame; return the borrowed payload if the transport still reads it."""

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for an arrival, `wake` or the timeout.

        Return whether a control message may have arrived too.
        """

    def wait_idle(self, timeout_s: float) -> None:
        """Wait like `wait`, without using the transport: any thread may call it beside a driver.

        It also ends when the transport can send queued frames, because their sender may be busy.
        """

    def wake(self) -> None:
        """Make `wait` and `wait_idle` return, from any thread."""

    def close(self, linger_s: float) -> None:
        """Close all links after flushing sent frames for at most `linger_s` seconds. Idempotent."""


class Control(Protocol):
    """The channel to the membership's manager: rank `keeper`, or None for the launcher."""

    keeper: int | None

    def send(self, data: bytes) -> None:
        """Send a control message; never blocks."""

    def receive(self) -> Message | None:
        """Return the next control message, or None when there is none now."""

    def close(self, linger_s: float) -> None:
        """Close the channel. Idempotent."""


def check_sender(header: Header, source: int, generation: int) -> None:
    """Raise WireError if a frame of `source` claims another rank or another generation."""
    if (header.source, header.generation) != (source, generation):
        claim = f"rank {header.source}, generation {header.generation}"
        raise WireError(f"a frame of rank {source} claims {claim}")


def check_length(header: Header, source: int, nbytes: int) -> None:
    """Raise WireError if the payload of `nbytes` bytes has another length than announced."""
    if header.kind in CARRIERS and header.nbytes != nbytes:
        lengths = f"announces {header.nbytes} bytes and has {nbytes}"
        raise WireError(f"a frame of rank {source} {lengths}")


class Wakeup:
    """Two signals: one for the driver, one for the thread that waits idle beside it.

    `driver` is the descriptor of the driver's signal, -1 once closed. `arrivals` polls this signal
    and all watched descriptors, `idle` the idle thread's signal and the same descriptors.
    """

    def __init__(self) -> None:
        self.driver = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._idler = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.arrivals, self.idle = select.poll(), select.poll()
        self.arrivals.register(self.driver, select.POLLIN)
        self.idle.register(self._idler, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let arrivals at a descriptor end both waits."""
        self.arrivals.register(descriptor, select.POLLIN)
        self.idle.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        """End both waits, from any thread."""
        with contextlib.suppress(OSError, ValueError):  # closed: no thread waits
            os.eventfd_write(self.driver, 1)
            os.eventfd_write(self._idler, 1)

    def watch_idle(self, descriptor: int) -> None:
        """Let arrivals at a descriptor end the idle wait, also a running one."""
        self.idle.register(descriptor, select.POLLIN)
        os.eventfd_write(self._idler, 1)

    def take(self) -> None:
        """Clear the driver's signal."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.driver)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait as the idle thread; return whether there was any signal or arrival."""
        ready = self.idle.poll(max(0.0, timeout_s) * 1000)
        for descriptor, _ in ready:
            if descriptor == self._idler:
                with contextlib.suppress(OSError):
                    os.eventfd_read(descriptor)
        return bool(ready)

    def close(self) -> None:
        """Close the signals; later wakes do nothing."""
        os.close(self.driver)
        os.close(self._idler)
        self.driver = self._idler = -1
