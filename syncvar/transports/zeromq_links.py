"""The two halves of links between ranks: DEALERs that send, and the connections of a ROUTER.

A `SendLink` sends frames in order, at once or later. `Connections` knows the peers of a ROUTER, why
their connections ended, and the number of unauthenticated ones.
"""

from __future__ import annotations

import collections
import contextlib
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import WireError
from syncvar.protocol.frame import HEADER_NBYTES, FrameType, parse_header
from syncvar.transports.zeromq_sockets import (
    CLOSED,
    ConnectionCopy,
    Sent,
    close_monitor,
    events_of,
    monitor_of,
    unanswered,
)

if TYPE_CHECKING:
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import Gate

_JOINED_NBYTES_MAX = 4096  # a payload up to this size travels in one message part with its header
_BORROW_NBYTES_MIN = 128 << 10  # below, a copy is cheaper than pyzmq's tracking of borrowed memory
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)  # combining pyzmq flags takes a microsecond
# Bytes of heartbeats between two looks. With more to send ZeroMQ writes 8192 at once.
_HEARTBEAT_NBYTES_MAX = 4096
_DONE = zmq.MessageTracker()
_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)


class _ZeroMQLoan:
    """A borrowed payload, read until the tracker is done; queued frames have no tracker."""

    __slots__ = ("tracker",)

    def __init__(self, tracker: Any = None) -> None:
        self.tracker = tracker

    def is_done(self) -> bool:
        return self.tracker is not None and bool(self.tracker.done)


class SendLink:
    """A link to a peer.

    Args:
        context: ZeroMQ context of this process.
        socket: A DEALER with its options set.
        address: Address of the peer.

    Attributes:
        outbox: Queued frames, each with its payload and the loan of a borrowed one.
        is_connected: The connection is open.
        is_answered: The peer has answered on it.
        is_remote: The peer may be on another host.
        opened: Time of opening, by the monotonic clock.

    Raises:
        ZMQError: The system refuses.
    """

    __slots__ = (
        "_copy",
        "is_answered",
        "is_connected",
        "is_remote",
        "monitor",
        "opened",
        "outbox",
        "socket",
    )

    def __init__(self, context: zmq.Context[Any], socket: Any, address: str) -> None:
        self.socket = socket
        self.monitor = monitor_of(context, socket, _EVENTS)
        self.opened = time.monotonic()
        self.is_connected = self.is_answered = False
        self._copy: ConnectionCopy | None = None
        self.is_remote = address.startswith("tcp://")
        self.outbox: collections.deque[tuple[bytes, memoryview | None, _ZeroMQLoan | None]] = (
            collections.deque()
        )
        socket.connect(address)

    def send(
        self, header: bytes, payload: memoryview | None, *, borrow: bool
    ) -> _ZeroMQLoan | None:
        """Send a frame now."""
        if payload is None or not payload.nbytes:
            self.socket.send(header, zmq.NOBLOCK)
            return None
        if payload.nbytes <= _JOINED_NBYTES_MAX:
            self.socket.send(header + payload, zmq.NOBLOCK)
            return None
        self.socket.send(header, _MORE)
        if borrow and payload.nbytes >= _BORROW_NBYTES_MIN:
            return _ZeroMQLoan(self.socket.send(payload, zmq.NOBLOCK, copy=False, track=True))
        self.socket.send(payload, zmq.NOBLOCK)
        return None

    def put_off(
        self, header: bytes, payload: memoryview | None, *, borrow: bool
    ) -> _ZeroMQLoan | None:
        """Queue a frame for `flush`, behind those already queued."""
        loan = None
        if payload is not None:
            if borrow:
                loan = _ZeroMQLoan()
            else:
                payload = memoryview(bytes(payload))
        self.outbox.append((header, payload, loan))
        return loan

    def flush(self) -> None:
        """Send queued frames, as many as ZeroMQ takes now."""
        while self.outbox:
            header, payload, loan = self.outbox[0]
            try:
                sent = self.send(header, payload, borrow=loan is not None)
            except zmq.Again:
                return
            self.outbox.popleft()
            if loan is not None:
                loan.tracker = _DONE if sent is None else sent.tracker

    def end(self, config: RuntimeConfig) -> str:
        """Return why the connection has ended since the last call; empty if it has not."""
        reason = ""
        for event, value in events_of(self.monitor):
            if event == zmq.EVENT_CONNECTED:
                self.is_connected = True
                if self.is_remote:
                    self._copy = ConnectionCopy(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_answered = True
            else:
                reason = reason or self._end_reason(config)
        return reason

    def _end_reason(self, config: RuntimeConfig) -> str:
        waited_s = time.monotonic() - self.opened
        if not self.is_answered and waited_s >= config.link_opening_s:
            return unanswered(waited_s)
        return CLOSED if self._copy is None else self._copy.reason(config)

    def sent(self) -> Sent:
        """Return the state of the bytes that ZeroMQ has written to another host."""
        return Sent() if self._copy is None else self._copy.sent()

    def has_received_bye(self) -> bool:
        """Return whether the peer has sent BYE on this link; a link carries nothing else back."""
        has_bye = False
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return has_bye
            with contextlib.suppress(WireError):
                is_bye = len(data) == HEADER_NBYTES and parse_header(data).kind == FrameType.BYE
                has_bye = has_bye or is_bye

    def close(self, linger_ms: int) -> None:
        """Close the link, flushing ZeroMQ's frames for so long; drop the queued ones."""
        close_monitor(self.socket, self.monitor)
        if self._copy is not None:
            self._copy.close()
        for _, _, loan in self.outbox:
            if loan is not None:
                loan.tracker = _DONE
        self.socket.close(linger=linger_ms)


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


class Connections:
    """A ROUTER and its connections.

    Args:
        context: ZeroMQ context of this process.
        config: Time limits.

    Attributes:
        socket: The ROUTER, not bound yet.
        gate: Authenticates and counts clients; None without other hosts.
        monitor: Socket to wait for the events of `ended`.
    """

    def __init__(self, context: zmq.Context[Any], config: RuntimeConfig) -> None:
        self._config = config
        self.gate: Gate | None = None
        self.socket: Any = context.socket(zmq.ROUTER)
        try:
            self.monitor = monitor_of(
                context, self.socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
        except BaseException:
            self.socket.close(linger=0)  # else the context would never end
            raise
        self._peers: dict[int, tuple[bytes, ConnectionCopy | None]] = {}  # by descriptor
        self._balance = 0  # ended connections minus authenticated ones

    def joined(self, identity: bytes, first: zmq.Frame) -> None:
        """Record an authenticated peer, by the first frame from it.

        Call `ended` before: earlier events concern earlier users of this descriptor.
        """
        with contextlib.suppress(zmq.ZMQError, ValueError):
            descriptor = int(first.get(zmq.SRCFD))
            self._let_go(self._peers.get(descriptor))  # if the peer joins again
            copy = None if self.gate is None else ConnectionCopy(descriptor)
            self._peers[descriptor] = identity, copy

    def refused(self, first: zmq.Frame) -> None:
        """Count an unauthenticated client, by a frame from it."""
        if self.gate is not None:
            self.gate.refuse(str(first.get("Peer-Address")))

    def ended(self) -> dict[bytes, str]:
        """Return the peers whose connections ended since the last call, and the reasons."""
        ended = {}
        for event, descriptor in events_of(self.monitor):
            self._balance += 1 if event == zmq.EVENT_DISCONNECTED else -1
            peer = self._peers.pop(descriptor, None) if event == zmq.EVENT_DISCONNECTED else None
            if peer is not None:
                identity, copy = peer
                ended[identity] = CLOSED if copy is None else copy.reason(self._config)
        if self.gate is not None:
            self.gate.unproved(self._balance + len(self._peers))
        return ended

    def close(self, linger_ms: int = 0) -> None:
        """Close the ROUTER, flushing for so long."""
        close_monitor(self.socket, self.monitor)
        for one in self._peers.values():
            self._let_go(one)
        self.socket.close(linger=linger_ms)
        if self.gate is not None:
            self.gate.close()

    @staticmethod
    def _let_go(peer: tuple[bytes, ConnectionCopy | None] | None) -> None:
        if peer is not None and peer[1] is not None:
            peer[1].close()
