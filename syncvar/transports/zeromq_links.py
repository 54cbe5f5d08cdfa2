"""Links of a rank: DEALERs to other ranks and to the launcher, and the connections of a ROUTER.

A `SendLink` sends frames in order, at once or later; `Delivery` finds out whether all have arrived.
`Connections` knows the peers of a ROUTER, why their connections ended, and the number of
unauthenticated ones. `ZeromqControl` is the control channel to the launcher, or to rank 0 without a
launcher.
"""

from __future__ import annotations

import collections
import contextlib
import os
import struct
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import HandshakeError, WireError
from syncvar.protocol.control_messages import Message, parse_message
from syncvar.protocol.frame import CONTROL_NBYTES_MAX, HEADER_NBYTES, FrameType, parse_header
from syncvar.transports.zeromq_sockets import (
    CLOSED,
    ConnectionCopy,
    Sent,
    ask_for_signs_of_life,
    close_monitor,
    events_of,
    limit_frames,
    milliseconds,
    monitor_of,
    set_family,
    unanswered,
)

if TYPE_CHECKING:
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import Gate, LinkKeys

_JOINED_NBYTES_MAX = 4096  # a payload up to this size travels in one message part with its header
_BORROW_NBYTES_MIN = 128 << 10  # below, a copy is cheaper than pyzmq's tracking of borrowed memory
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)  # combining pyzmq flags takes a microsecond
# Bytes of heartbeats between two looks. With more to send ZeroMQ writes 8192 at once.
_HEARTBEAT_NBYTES_MAX = 4096
_DONE = zmq.MessageTracker()
_LINK_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)

_IDENTITY = struct.Struct("<cI8s")  # of a control channel: kind, rank, random bytes
_POLLIN = int(zmq.POLLIN)
_REFUSED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSALS_MAX = 5


class _ZeroMQLoan:
    """A borrowed payload, read until the tracker is done; queued frames have no tracker."""

    __slots__ = ("tracker",)

    def __init__(self, tracker: Any = None) -> None:
        self.tracker = tracker

    def is_done(self) -> bool:
        return self.tracker is not None and bool(self.tracker.done)


class SendLink:
    """A link to a peer: a DEALER with its options set, connected to an address.

    `outbox` has the queued frames, each with its payload and the loan of a borrowed one. The peer
    `is_answered` once it has answered, and `is_remote` if it may be on another host.
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
        self.monitor = monitor_of(context, socket, _LINK_EVENTS)
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

    No thread sends on the link any more. Heartbeats go on meanwhile, and over a slow path some are
    always unacknowledged. So the check compares with the bytes that ZeroMQ had written when it
    wrote nothing but heartbeats any more.
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
    """A ROUTER, not bound yet, and its connections.

    `gate` authenticates and counts clients; it is None without other hosts. `monitor` is the socket
    to wait for the events of `ended`.
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


def control_identity(rank: int, kind: bytes = b"C") -> bytes:
    """Return a fresh routing identity for a control channel; kind `b"S"` asks for servers."""
    return _IDENTITY.pack(kind, rank, os.urandom(8))


def parse_control_identity(identity: bytes, kind: bytes = b"C") -> int | None:
    """Return the rank in a routing identity, or None for another kind of identity."""
    if len(identity) != _IDENTITY.size or identity[:1] != kind:
        return None
    return int(_IDENTITY.unpack(identity)[1])


class ZeromqControl:
    """The control channel of a worker: one DEALER to the launcher's ROUTER.

    `keeper` is the rank that listens there instead of a launcher. If the channel closes or falls
    silent, that rank has failed. A launcher watches its workers, and itself, by other means. `kind`
    is as for `control_identity`. For a launcher on this host the `monitor` is None.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        rank: int,
        config: RuntimeConfig,
        keys: LinkKeys | None = None,
        keeper: int | None = None,
        kind: bytes = b"C",
    ) -> None:
        self.socket: Any = context.socket(zmq.DEALER)
        self.monitor: Any = None
        self._config = config
        self.keeper = keeper
        self._is_up = self._has_reported = False
        self._end = ""  # reason of the keeper's failure
        self._copy: ConnectionCopy | None = None
        self.socket.setsockopt(zmq.ROUTING_ID, control_identity(rank, kind))
        limit_frames(self.socket, CONTROL_NBYTES_MAX)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.rendezvous_timeout_s))
        self.socket.setsockopt(zmq.LINGER, 0)
        if endpoint.startswith("tcp://"):
            set_family(self.socket, endpoint)
            if keys is not None:
                keys.connect(self.socket)
            events = _REFUSED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED
            if keeper is not None:
                ask_for_signs_of_life(self.socket, config)
                events |= zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
            self.monitor = monitor_of(context, self.socket, events)
        self.socket.connect(endpoint)
        self._endpoint = endpoint
        self._closed = False
        self._has_sent = False
        self._refusals = 0
        self._has_keys = keys is not None

    def send(self, data: bytes) -> None:
        """Send a control message; drop it if the launcher is gone."""
        self._has_sent = True
        with contextlib.suppress(zmq.Again):
            self.socket.send(data, zmq.NOBLOCK)

    def descriptors(self) -> list[int]:
        """Return the descriptors that signal arrivals."""
        return [one.getsockopt(zmq.FD) for one in (self.socket, self.monitor) if one is not None]

    def may_have_more(self) -> bool:
        """Return whether a message may be unnoticed: sending clears the descriptor's signal."""
        has_sent, self._has_sent = self._has_sent, False
        return has_sent

    def receive(self) -> Message | None:
        """Return the next control message, or None."""
        if self.monitor is not None:  # before messages: those from before the end come first
            self._watch()
        if self.socket.getsockopt(zmq.EVENTS) & _POLLIN:
            return parse_message(self.socket.recv(zmq.NOBLOCK))
        if self._end and not self._has_reported:
            self._has_reported = True
            lost = {"failure_kind": "lost", "rank": self.keeper, "host": "", "reason": self._end}
            return {"kind": "abort", "group": -1, "call": -1, "missing": [], "status": [], **lost}
        return None

    def close(self, linger_s: float) -> None:
        """Close the channel after flushing for at most `linger_s` seconds."""
        if not self._closed:
            self._closed = True
            if self._copy is not None:
                self._copy.close()
            if self.monitor is not None:
                with contextlib.suppress(HandshakeError):
                    self._watch()
                close_monitor(self.socket, self.monitor)
            self.socket.close(linger=0 if self._end else int(linger_s * 1000))

    def _watch(self) -> None:
        for event, value in events_of(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
            elif event & _REFUSED_EVENTS:
                self._refused(event, value)
            elif event == zmq.EVENT_CONNECTED:
                self._copy_connection(value)
            elif self._is_up and not self._end:  # before that another process may have listened
                self._end = CLOSED if self._copy is None else self._copy.reason(self._config)

    def _copy_connection(self, descriptor: int) -> None:
        if self._copy is not None:
            self._copy.close()
        self._copy = None if self._end else ConnectionCopy(descriptor)

    def _refused(self, event: int, value: int) -> None:
        if self._is_up:
            return
        self._refusals += 1
        failure = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
        if (event, value) == failure:
            raise HandshakeError(
                f"{self._endpoint} has another mode of encryption than this process: give all "
                "ranks the same setting (SYNCVAR_ENCRYPTION)"
            )
        if self._refusals < _REFUSALS_MAX:  # the listener may have been about to end
            return
        # A listener may reset the connection before this process reads its greeting. Then the event
        # above never comes. Without keys there is no secret that could differ.
        closed = f"{self._endpoint} has refused the connection {self._refusals} times"
        if not self._has_keys:
            raise HandshakeError(
                f"{closed}: either it has another mode of encryption than this process (give all "
                "ranks the same SYNCVAR_ENCRYPTION), or it is not a rank of this job"
            )
        raise HandshakeError(
            f"{closed}: does this process have the same secret (SYNCVAR_KEY_FILE or SYNCVAR_KEY) "
            "as the others, and the same mode of encryption (SYNCVAR_ENCRYPTION)?"
        )
