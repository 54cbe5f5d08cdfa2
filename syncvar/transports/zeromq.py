"""Frames over ZeroMQ: unix sockets on one host, tcp between hosts.

Each rank binds one ROUTER for everything that comes in, and opens one DEALER to each peer that it sends to. A link is
fail-stop: it never reconnects (ZeroMQ loses messages silently when it does), and a DISCONNECTED event without a
goodbye before it is a loss. Between hosts a link is encrypted, and both its ends prove that they know the job's secret; where
that is not wanted (`encryption`), each payload has a checksum. The sender's routing identity names job, generation, rank and
incarnation, so that a process of another job, an old one, or one that comes a second time is not taken for a member.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any

import zmq
from zmq.backend import zmq_poll

from syncvar.errors import ConfigError, HandshakeError, TransportError, WireError
from syncvar.transports.base import Arrival, Frame, Loan, Lost
from syncvar.wire import (
    CARRIERS,
    CONTROL_NBYTES_MAX,
    HEADER_NBYTES,
    Kind,
    Message,
    pack_header,
    parse_header,
    parse_message,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncvar.config import RuntimeConfig
    from syncvar.transports.curve import Gate, LinkKeys

__all__ = [
    "COMING_AND_GOING", "ZeromqControl", "ZeromqTransport", "ask_for_signs_of_life", "bound_messages", "bracketed", "control_identity",
    "events_of", "job_nonce", "look_for_silence", "milliseconds", "monitor_of", "parse_control_identity", "set_family", "tcp_endpoint", "why_closed",
]  # fmt: skip

_IDENTITY = struct.Struct("<c8sII8s")
_CONTROL_IDENTITY = struct.Struct("<cI8s")
_MONITORED = struct.Struct("=Hi")  # zmq_socket_monitor(3): event, and its value
_JOINED_NBYTES_MAX = 4096  # a payload up to this size travels in one message part with its header
_BORROW_NBYTES_MIN = 128 << 10  # below, copying was measured cheaper than pyzmq's bookkeeping of borrowed memory
_POLLIN, _MORE = int(zmq.POLLIN), int(zmq.NOBLOCK | zmq.SNDMORE)  # to combine flags of pyzmq takes a microsecond
_BRIEF_MS = 2
_GOODBYE_MS = 200
_WATCH_EVERY_S = 0.02
_HANDSHAKE_MS = 10_000
_OTHER_HALF_S = 0.2  # when one connection of a pair of ranks has closed, the other is about to; it may bring frames
_MORE_S = 1.0  # as long as it brings frames, the next one may take so long: 1 MiB over 10 Mbit/s
_UNIX_PATH_MAX = 107
_CHECKSUM = struct.Struct("<I")  # of a payload, behind the header, where nothing else would notice a change
COMING_AND_GOING = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSALS_MAX = 5


def job_nonce(job_id: str) -> bytes:
    """Return what stands for a job in the identities of its processes."""
    import hashlib  # it loads OpenSSL, which the launcher does without

    return hashlib.blake2b(job_id.encode(), digest_size=8).digest()


def bracketed(address: str) -> str:
    """Return an address as it stands before a port.

    Example:
        >>> bracketed("10.0.0.7"), bracketed("fd00::7")
        ('10.0.0.7', '[fd00::7]')
    """
    return f"[{address}]" if ":" in address else address


def tcp_endpoint(address: str, port: int | str | None = None) -> str:
    """Return an address as ZeroMQ takes it.

    Example:
        >>> tcp_endpoint("10.0.0.7"), tcp_endpoint("fd00::7", "*")
        ('tcp://10.0.0.7', 'tcp://[fd00::7]:*')
    """
    place = f"tcp://{bracketed(address)}"
    return place if port is None else f"{place}:{port}"


def set_family(socket: Any, endpoint: str) -> None:
    """Let a socket speak IPv6 where its address is one; an IPv4 address would become another one by that."""
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))


def control_identity(rank: int, kind: bytes = b"C") -> bytes:
    """Return a fresh routing identity for a rank's control channel, or, of kind `b"S"`, for one on which it asks for servers."""
    return _CONTROL_IDENTITY.pack(kind, rank, os.urandom(8))


def parse_control_identity(identity: bytes, kind: bytes = b"C") -> int | None:
    """Return the rank of a control channel's routing identity, or None when it is none of the kind."""
    if len(identity) != _CONTROL_IDENTITY.size or identity[:1] != kind:
        return None
    return int(_CONTROL_IDENTITY.unpack(identity)[1])


def bound_messages(socket: Any, nbytes: int, count: int) -> None:
    """Bound how long a message that comes may be, and how many may wait in each direction."""
    for option, value in ((zmq.MAXMSGSIZE, nbytes), (zmq.SNDHWM, count), (zmq.RCVHWM, count)):
        socket.setsockopt(option, value)


def monitor_of(context: zmq.Context[Any], socket: Any, events: int) -> Any:
    """Return a socket on which the events of another one come.

    ZeroMQ's own thread would wait for whoever takes no events, and everything else with it: strangers who come and go while a
    rank computes must not get there. So they have no limit, unlike those of pyzmq's function.
    """
    place = f"inproc://events-{os.urandom(8).hex()}"
    socket.monitor(place, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(place)
    return monitor


def events_of(monitor: Any) -> Iterator[tuple[int, int]]:
    """Take the events, each with its value, that have come on a monitor so far.

    pyzmq has a function for it, in a module that imports asyncio, which costs every worker 30 ms.
    """
    while True:
        try:
            event: tuple[int, int] = _MONITORED.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        yield event


def ask_for_signs_of_life(socket: Any, config: RuntimeConfig) -> None:
    """Let a tcp connection that is silent for longer than `lost_after_s` be closed at both ends.

    The end that connects asks for signs of life, and says how long the other may wait for such a question. A question that is
    followed by any other message, and that by silence, leaves the other end without a limit (libzmq 4.3.5): there the system
    looks whether the peer's still answers.
    """
    silence = milliseconds(config.link_silence_s)
    socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds(config.heartbeat_interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence)
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(silence, 6_553_500))
    look_for_silence(socket, config)


def look_for_silence(socket: Any, config: RuntimeConfig) -> None:
    """Let the system close tcp connections whose other end does not answer its probes, or acknowledge what it is sent."""
    silence = milliseconds(config.link_silence_s)
    if silence:
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 1), (zmq.TCP_KEEPALIVE_INTVL, 1),
            (zmq.TCP_KEEPALIVE_CNT, 1 + silence // 1000), (zmq.TCP_MAXRT, silence),
        ):  # fmt: skip
            socket.setsockopt(option, value)


def why_closed(config: RuntimeConfig) -> str:
    """Return in words why a connection has ended without a goodbye."""
    return f"connection closed, or silent for {config.lost_after_s:g} s"


class _QueuedLoan:
    """A borrowed payload that could not be handed to ZeroMQ yet."""

    __slots__ = ("tracker",)

    def __init__(self) -> None:
        self.tracker: Any = None

    def is_done(self) -> bool:
        return self.tracker is not None and bool(self.tracker.done)


class _TrackedLoan:
    """A borrowed payload that ZeroMQ reads until its tracker is done."""

    __slots__ = ("tracker",)

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    def is_done(self) -> bool:
        return bool(self.tracker.done)


class _Link:
    """The outgoing half of a pair of ranks."""

    __slots__ = ("connected", "monitor", "opened", "outbox", "socket")

    def __init__(self, socket: Any, monitor: Any, opened: float) -> None:
        self.socket = socket
        self.monitor = monitor
        self.opened = opened
        self.connected = False
        self.outbox: collections.deque[tuple[bytes, memoryview | None, _QueuedLoan | None]] = collections.deque()


class ZeromqControl:
    """The control channel of a worker: one DEALER to the launcher's ROUTER.

    Args:
        context: ZeroMQ context of this process.
        endpoint: Where the launcher listens.
        rank: This process's rank.
        config: Limits and intervals.
        keys: What a tcp endpoint is protected by.
        keeper: The rank whose process listens there, where no launcher does: if the channel closes or falls silent, that
            rank is lost. A launcher watches its workers, and itself, by other means.
        kind: Of the channel, as `control_identity` has it.

    Attributes:
        monitor: Tells of the channel's end; None where a launcher listens.
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
        self._keeper = keeper
        self._is_up = self._is_lost = self._has_told = False
        self.socket.setsockopt(zmq.ROUTING_ID, control_identity(rank, kind))
        self.socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_NBYTES_MAX)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        if endpoint.startswith("tcp://"):
            set_family(self.socket, endpoint)
            if keys is not None:
                keys.connect(self.socket)
            events = _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
            if keeper is not None:
                ask_for_signs_of_life(self.socket, config)
                events |= zmq.EVENT_DISCONNECTED
            self.monitor = monitor_of(context, self.socket, events)
        self.socket.connect(endpoint)
        self._endpoint = endpoint
        self._closed = False
        self._has_sent = False
        self._refusals = 0

    def send(self, data: bytes) -> None:
        """Send a control message; dropped when the launcher is gone, since this process is about to be ended then."""
        self._has_sent = True
        with contextlib.suppress(zmq.Again):
            self.socket.send(data, zmq.NOBLOCK)

    def descriptors(self) -> list[int]:
        """Return the descriptors that tell of arrivals."""
        return [one.getsockopt(zmq.FD) for one in (self.socket, self.monitor) if one is not None]

    def may_have_more(self) -> bool:
        """Return whether a message may have come unnoticed: sending takes the descriptor's signal of arrivals away."""
        has_sent, self._has_sent = self._has_sent, False
        return has_sent

    def receive(self) -> Message | None:
        """Return the next control message, or None.

        Raises:
            HandshakeError: Who listens there does not take this process for a member.
        """
        if self.monitor is not None:  # first: what had come before the end is still there to be taken
            self._watch()
        if self.socket.getsockopt(zmq.EVENTS) & _POLLIN:
            return parse_message(self.socket.recv(zmq.NOBLOCK))
        if self._is_lost and not self._has_told:
            self._has_told = True
            return {
                "kind": "abort", "rank": self._keeper, "host": "", "kind_of_break": "lost", "reason": why_closed(self._config),
                "group": -1, "call": -1, "missing": [],
            }  # fmt: skip
        return None

    def close(self, linger_s: float) -> None:
        """Close the channel; messages already sent are flushed for at most `linger_s` seconds."""
        if not self._closed:
            self._closed = True
            if self.monitor is not None:
                with contextlib.suppress(HandshakeError):
                    self._watch()
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.disable_monitor()
                self.monitor.close(linger=0)
            self.socket.close(linger=0 if self._is_lost else int(linger_s * 1000))

    def _watch(self) -> None:
        for event, value in events_of(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
            elif event & _REFUSED:
                self._refused(event, value)
            elif self._is_up:  # before, somebody else may have listened there
                self._is_lost = True

    def _refused(self, event: int, value: int) -> None:
        if self._is_up:
            return
        self._refusals += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            raise HandshakeError(
                f"{self._endpoint} has another mode of encryption than this process: give all ranks the same setting "
                f"(SYNCVAR_ENCRYPTION)"
            )
        if self._refusals >= _REFUSALS_MAX:  # once or twice, it may have been about to end
            raise HandshakeError(
                f"{self._endpoint} has closed the connection {self._refusals} times before it was one: does this process have "
                f"the same secret (SYNCVAR_KEY_FILE or SYNCVAR_KEY) as the others?"
            )


class ZeromqTransport:
    """Frames over ZeroMQ; see `syncvar.transports.base` for the contract.

    Args:
        context: ZeroMQ context of this process.
        rank: This process's rank in the world.
        endpoint: Where to bind: "ipc://<directory>" (a socket file of this rank is made in it) or "tcp://<address>"
            (a free port is taken).
        job_id: The job's random identity.
        config: Limits and intervals.
        control: Control channel to wait for beside the data.
        outside: Where to listen for other hosts too: "tcp://<address>"; empty where there are none.
        keys: What links between hosts are protected by; needed with `outside`, unless `encryption` is off.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        rank: int,
        endpoint: str,
        job_id: str,
        config: RuntimeConfig,
        control: ZeromqControl | None = None,
        *,
        outside: str = "",
        keys: LinkKeys | None = None,
    ) -> None:
        self._context = context
        self._rank = rank
        self._config = config
        self._nonce = job_nonce(job_id)
        self._incarnation = os.urandom(8)
        self._generation = 0
        self._addresses: Mapping[int, str] = {}
        self._links: dict[int, _Link] = {}
        self._sources: dict[bytes, int] = {}
        self._checksummed: frozenset[int] = frozenset()  # peers whose payloads nothing else protects
        self._source_of_descriptor: dict[int, int] = {}
        self._lost: set[int] = set()
        self._departed: set[int] = set()
        self._closing: dict[int, float] = {}  # peer that disconnected -> when to judge it, once the ROUTER is empty
        self._pending_losses: collections.deque[Lost] = collections.deque()
        self._watched = 0.0
        self._unsent: dict[int, int] = {}  # peer whose link does not take frames yet -> descriptor that tells when it does
        self._is_open = False
        self._closed = False
        self.refused_frames = 0
        self._balance = 0  # of connections that have ended, less those that had been proved
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_idle = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._idle = select.poll()
        self._idle.register(self._wake_idle, select.POLLIN)
        self._keys = keys
        self._gate: Gate | None = None
        self._router: Any = context.socket(zmq.ROUTER)
        self._router_monitor: Any = None
        try:
            self._configure(self._router, endpoint)
            # The DEALERs ask for signs of life. A ROUTER answers and goes by the time to live that they name: its own
            # timer may fire on a connection that is just ending, and libzmq 4.3.5 aborts the process then ("Assertion
            # failed: !_io_error"; with heartbeats every 10 ms, once in a few hundred ends of a world).
            self._router.setsockopt(zmq.HEARTBEAT_IVL, 0)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router_monitor = monitor_of(context, self._router, COMING_AND_GOING)
            self.address = self._bind(endpoint)
            self.outside = ""
            if outside:
                if keys is None and config.encryption != "off":
                    raise ConfigError(f"rank {rank} may not listen on {outside} without the job's secret")
                from syncvar.transports.curve import Gate

                self._gate = Gate(context, keys, rank=rank if config.encryption == "control-only" else None)
                if keys is not None:  # addresses that are bound already stay as they were
                    (keys.listen if config.encryption == "required" else keys.listen_for_tickets)(self._router)
                self._configure(self._router, outside)
                self._router.setsockopt(zmq.HEARTBEAT_IVL, 0)
                self.outside = self._bind(outside)
                self._gate.guard(self.outside)
        except BaseException:
            self.close(0)
            raise
        self._waiting_for: list[tuple[Any, int]] = [(self._wake, zmq.POLLIN)]
        self._control = control
        self._control_items: tuple[Any, ...] = ()
        self._arrivals = select.poll()
        self._arrivals.register(self._wake, select.POLLIN)
        if control is not None:
            watched = [one for one in (control.socket, control.monitor) if one is not None]
            self._control_items = (*watched, *map(self._wait_for, watched))

    # -- the contract ---------------------------------------------------------------------------------------------

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Learn where the peers are."""
        self._addresses = addresses
        self._generation = generation
        if self._gate is not None and self._config.encryption != "required":
            self._checksummed = frozenset(peer for peer, address in addresses.items() if address.startswith("tcp://"))
        # Not before: a peer may have opened earlier, and what nobody takes yet would keep waits from waiting.
        if not self._is_open:
            self._is_open = True
            self._wait_for(self._router)

    def send(self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False) -> Loan | None:
        """Send a frame to a peer; opens the link when it is the first."""
        if peer in self._lost or peer in self._departed:
            return None
        link = self._links.get(peer) or self._open_link(peer)
        if peer in self._checksummed:
            header = self._with_checksum(header, payload)
        if not link.outbox:
            try:
                return self._send_now(link, header, payload, borrow=borrow)
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                raise TransportError(f"sending to rank {peer} failed: {error}") from error
        loan = None
        if payload is not None:
            if borrow:
                loan = _QueuedLoan()
            else:
                payload = memoryview(bytes(payload))
        link.outbox.append((header, payload, loan))
        if peer not in self._unsent:
            self._hold_back(peer, link)
        return loan

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None."""
        router = self._router
        # Asking first is cheaper than the exception that an empty socket raises.
        while router.getsockopt(zmq.EVENTS) & _POLLIN:
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise TransportError(f"receiving failed: {error}") from error
            source = self._sources.get(identity)
            arrival = self._receive_frame(identity, source)
            if arrival is not None:
                return arrival
        if self._closing:
            self._judge_closing()
        if self._unsent:
            self._flush()
        if self._pending_losses:
            return self._pending_losses.popleft()
        return None

    def wait(self, timeout_s: float) -> bool:
        """Wait for anything; see the contract.

        Callers have taken everything that had arrived, so that the sockets' descriptors tell of everything that comes
        later. Polling those costs one system call; ZeroMQ's own poll, which also looks at monitors and at sockets
        that could not send, costs many and is kept for longer waits.
        """
        if self._control is not None and self._control.may_have_more():
            return True
        now = time.monotonic()
        if now - self._watched >= _WATCH_EVERY_S:  # also a driver whose waits are all short must see losses
            self._watch_links(now)
        if self._closing:
            timeout_s = min(timeout_s, min(self._closing.values()) - now)
        if self._pending_losses:
            timeout_s = 0.0
        milliseconds = max(1, int(min(timeout_s, 3600.0) * 1000)) if timeout_s > 0 else 0
        if not self._unsent:
            ready = self._arrivals.poll(min(milliseconds, _BRIEF_MS))
            if ready or milliseconds <= _BRIEF_MS:
                return self._is_control(ready)
            milliseconds -= _BRIEF_MS
        items = [*self._waiting_for, (self._router_monitor, zmq.POLLIN)]
        items += [(link.monitor, zmq.POLLIN) for link in self._links.values() if link.monitor is not None]
        items += [(self._links[peer].socket, zmq.POLLOUT) for peer in self._unsent]
        ready = zmq_poll(items, milliseconds)
        if self._unsent:
            self._flush()  # now: the poll has taken the descriptors' signals, and the caller may have what it waits for
        self._watch_links(time.monotonic())
        return self._is_control(ready)

    def _is_control(self, ready: list[tuple[Any, int]]) -> bool:
        seen = False
        for item, _ in ready:
            if item == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                seen = True
            elif item in self._control_items:
                seen = True
        return seen

    def wake(self) -> None:
        """Make `wait` and `wait_idle` return, from any thread."""
        with contextlib.suppress(OSError, ValueError):  # closed: then nobody waits
            os.eventfd_write(self._wake, 1)
            os.eventfd_write(self._wake_idle, 1)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait on the sockets' descriptors only: the sockets belong to the driver."""
        for descriptor, _ in self._idle.poll(timeout_s * 1000):
            if descriptor == self._wake_idle:
                with contextlib.suppress(OSError):
                    os.eventfd_read(descriptor)

    def close(self, linger_s: float) -> None:
        """Say goodbye on every link (unless `linger_s` is 0), flush, and close all sockets."""
        if self._closed:
            return
        self._closed = True
        if linger_s > 0:
            self._say_goodbye(linger_s)
        linger_ms = int(linger_s * 1000)
        for link in self._links.values():
            self._close_link(link, linger_ms)
        self._links.clear()
        with contextlib.suppress(zmq.ZMQError):
            self._router.disable_monitor()
        if self._router_monitor is not None:
            self._router_monitor.close(linger=0)
        self._router.close(linger=min(linger_ms, _GOODBYE_MS))  # it sends nothing but goodbyes
        if self._gate is not None:
            self._gate.close()
        os.close(self._wake)
        os.close(self._wake_idle)
        self._wake = self._wake_idle = -1

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def refused_peers(self) -> int:
        """How many tried to connect over tcp and are no members of the job."""
        return 0 if self._gate is None else self._gate.refused_peers

    @staticmethod
    def _with_checksum(header: bytes, payload: memoryview | None = None) -> bytes:
        return header + _CHECKSUM.pack(zlib.crc32(payload) if payload is not None else 0)

    def _wait_for(self, socket: Any) -> int:
        """Let arrivals at a socket end waits; returns its descriptor."""
        descriptor: int = socket.getsockopt(zmq.FD)
        self._waiting_for.append((socket, zmq.POLLIN))
        self._arrivals.register(descriptor, select.POLLIN)
        self._idle.register(descriptor, select.POLLIN)
        return descriptor

    def _configure(self, socket: Any, address: str) -> None:
        config = self._config
        socket.set_hwm(0)  # bytes are bounded by credit above; messages need no second bound
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.MAXMSGSIZE, config.segment_bytes + 4096)
        socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.handshake_timeout_s))
        # Signs of life tell of partitions and hosts that are gone. Within a host there are none of these: the system
        # closes the connections of a process that ends, and the agent sees one that is stopped.
        if address.startswith("tcp://"):
            set_family(socket, address)
            ask_for_signs_of_life(socket, config)

    def _bind(self, endpoint: str) -> str:
        scheme, _, place = endpoint.partition("://")
        try:
            if scheme == "ipc":
                path = os.path.join(place, f"r{self._rank}-{self._incarnation[:4].hex()}")  # noqa: PTH118
                if len(path) > _UNIX_PATH_MAX:
                    raise ConfigError(
                        f"the socket path {path!r} has {len(path)} bytes, the system allows {_UNIX_PATH_MAX}: "
                        f"set XDG_RUNTIME_DIR or TMPDIR to a shorter directory"
                    )
                self._router.bind(f"ipc://{path}")
                os.chmod(path, 0o600)  # a umask would be that of all threads; until now the folder, 0700, has kept others out
                return f"ipc://{path}"
            port = self._router.bind_to_random_port(f"tcp://{place}")
        except zmq.ZMQError as error:
            raise TransportError(f"cannot listen on {endpoint}: {error}") from error
        return f"tcp://{place}:{port}"

    def _open_link(self, peer: int) -> _Link:
        address = self._addresses.get(peer)
        if address is None:
            raise TransportError(f"no address of rank {peer} is known")
        socket = self._context.socket(zmq.DEALER)
        self._configure(socket, address)
        if self._keys is not None and address.startswith("tcp://"):
            if self._config.encryption == "required":
                self._keys.connect(socket)
            else:
                self._keys.connect_by_ticket(socket, self._rank, peer)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(
            zmq.ROUTING_ID, _IDENTITY.pack(b"s", self._nonce, self._generation, self._rank, self._incarnation)
        )
        monitor = monitor_of(self._context, socket, zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot connect to rank {peer} at {address}: {error}") from error
        link = self._links[peer] = _Link(socket, monitor, time.monotonic())
        return link

    @staticmethod
    def _send_now(link: _Link, header: bytes, payload: memoryview | None, *, borrow: bool) -> Loan | None:
        if payload is None or not payload.nbytes:
            link.socket.send(header, zmq.NOBLOCK)
            return None
        if payload.nbytes <= _JOINED_NBYTES_MAX:
            link.socket.send(header + payload, zmq.NOBLOCK)
            return None
        link.socket.send(header, _MORE)
        if borrow and payload.nbytes >= _BORROW_NBYTES_MIN:
            return _TrackedLoan(link.socket.send(payload, zmq.NOBLOCK, copy=False, track=True))
        link.socket.send(payload, zmq.NOBLOCK)
        return None

    def _hold_back(self, peer: int, link: _Link) -> None:
        """Let `wait_idle` end when a link can take frames: whoever has left them may do something else for long."""
        descriptor = self._unsent[peer] = link.socket.getsockopt(zmq.FD)
        self._idle.register(descriptor, select.POLLIN)
        os.eventfd_write(self._wake_idle, 1)

    def _hold_no_more(self, peer: int) -> None:
        descriptor = self._unsent.pop(peer, None)
        if descriptor is not None:
            self._idle.unregister(descriptor)

    def _flush(self) -> None:
        for peer in list(self._unsent):
            link = self._links.get(peer)
            while link is not None and link.outbox:
                header, payload, loan = link.outbox[0]
                try:
                    sent = self._send_now(link, header, payload, borrow=loan is not None)
                except zmq.Again:
                    break
                link.outbox.popleft()
                if loan is not None:
                    loan.tracker = sent.tracker if isinstance(sent, _TrackedLoan) else _DONE
            if link is None or not link.outbox:
                self._hold_no_more(peer)

    def _receive_frame(self, identity: bytes, source: int | None) -> Frame | None:
        if not self._router.getsockopt(zmq.RCVMORE):
            self.refused_frames += 1
            return None
        if source is None:
            first = self._router.recv(zmq.NOBLOCK, copy=False)
            data = bytes(first.buffer)
            source = self._meet(identity, first)
            if source is None and self._gate is not None:
                self._gate.refuse(str(first.get("Peer-Address")))
        else:
            data = self._router.recv(zmq.NOBLOCK)
        payload: bytes | memoryview = b""
        checksum = None
        if source in self._checksummed:
            checksum = data[HEADER_NBYTES : HEADER_NBYTES + _CHECKSUM.size]
            data = data[:HEADER_NBYTES] + data[HEADER_NBYTES + _CHECKSUM.size :]
        if len(data) > HEADER_NBYTES:
            data, payload = data[:HEADER_NBYTES], memoryview(data)[HEADER_NBYTES:]
        if self._router.getsockopt(zmq.RCVMORE):
            payload = self._router.recv(zmq.NOBLOCK, copy=False).buffer
            while self._router.getsockopt(zmq.RCVMORE):
                self._router.recv(zmq.NOBLOCK)
                source = None
        if source is None or source in self._lost:
            self.refused_frames += 1
            return None
        try:
            header = parse_header(data, self._config.segment_bytes)
            if header.source != source or header.generation != self._generation:
                raise WireError(f"a frame of rank {source} claims rank {header.source}, generation {header.generation}")
            if header.kind in CARRIERS and header.nbytes != len(payload):
                raise WireError(f"a frame of rank {source} announces {header.nbytes} bytes and has {len(payload)}")
            if checksum is not None and checksum != _CHECKSUM.pack(zlib.crc32(payload)):
                raise WireError(f"the checksum of a payload of rank {source} is wrong")
        except WireError as error:
            self.refused_frames += 1
            self._lose(source, str(error))
            return None
        if header.kind == Kind.BYE:
            self._departed.add(source)
            return None
        if self._closing.get(source):  # what it sent before it left may be long: its goodbye comes behind that
            self._closing[source] = time.monotonic() + _MORE_S
        return Frame(header, payload)

    def _meet(self, identity: bytes, first: Any) -> int | None:
        """Check the identity of a peer that sends for the first time, and note on which descriptor it came."""
        if len(identity) != _IDENTITY.size:
            return None
        kind, nonce, generation, rank, _ = _IDENTITY.unpack(identity)
        if kind != b"s" or nonce != self._nonce or generation != self._generation or rank not in self._addresses:
            return None
        if rank in self._sources.values():  # a link opens once: whoever comes again is somebody else
            return None
        # Disconnections already reported concern earlier users of this descriptor number: handle them first.
        self._watch_router()
        self._sources[identity] = rank
        with contextlib.suppress(zmq.ZMQError, ValueError):
            self._source_of_descriptor[int(first.get(zmq.SRCFD))] = rank
        return int(rank)

    def _watch_router(self) -> None:
        for event, descriptor in events_of(self._router_monitor):
            self._balance += 1 if event == zmq.EVENT_DISCONNECTED else -1
            peer = self._source_of_descriptor.pop(descriptor, None) if event == zmq.EVENT_DISCONNECTED else None
            if peer is not None:
                self._closing[peer] = 0.0
        if self._gate is not None:
            self._gate.unproved(self._balance + len(self._source_of_descriptor))

    def _watch_links(self, now: float) -> None:
        self._watched = now
        self._watch_router()
        for peer, link in list(self._links.items()):
            if link.monitor is None:
                continue
            closed = False
            for event, _ in events_of(link.monitor):
                if event == zmq.EVENT_CONNECTED:
                    link.connected = True
                else:
                    closed = True
            if closed:
                self._read_goodbye(peer, link)
                self._closing.setdefault(peer, now + _OTHER_HALF_S)
            elif not link.connected and now - link.opened > self._config.handshake_timeout_s:
                self._lose(peer, f"no connection within {self._config.handshake_timeout_s:g} s")

    def _read_goodbye(self, peer: int, link: _Link) -> None:
        while True:
            try:
                data = link.socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            with contextlib.suppress(WireError):
                if len(data) == HEADER_NBYTES and parse_header(data).kind == Kind.BYE:
                    self._departed.add(peer)

    def _judge_closing(self) -> None:
        # The ROUTER was empty after the disconnection was seen: all that had arrived, goodbyes too, has been taken.
        now = time.monotonic()
        for peer in [peer for peer, due in self._closing.items() if due <= now]:
            del self._closing[peer]
            self._disconnected(peer)

    def _disconnected(self, peer: int) -> None:
        if peer not in self._departed:
            self._lose(peer, why_closed(self._config))
            return
        link = self._links.pop(peer, None)
        if link is not None:
            self._hold_no_more(peer)
            self._close_link(link, 0)

    def _lose(self, peer: int, reason: str) -> None:
        if peer in self._lost:
            return
        self._lost.add(peer)
        self._pending_losses.append(Lost(peer, reason))
        link = self._links.pop(peer, None)
        if link is not None:
            self._hold_no_more(peer)
            self._close_link(link, 0)

    @staticmethod
    def _close_link(link: _Link, linger_ms: int) -> None:
        if link.monitor is not None:
            with contextlib.suppress(zmq.ZMQError):
                link.socket.disable_monitor()
            link.monitor.close(linger=0)
            link.monitor = None
        for _, _, loan in link.outbox:
            if loan is not None:
                loan.tracker = _DONE
        link.socket.close(linger=linger_ms)

    def _say_goodbye(self, linger_s: float) -> None:
        header = pack_header(Kind.BYE, self._rank, self._generation, 0)
        while self.receive() is not None:  # so that peers whose frames nobody took are known, and told
            pass
        deadline = time.monotonic() + linger_s
        while self._unsent and time.monotonic() < deadline:
            self._flush()
            if self._unsent:
                zmq_poll([(self._links[peer].socket, zmq.POLLOUT) for peer in self._unsent], 50)
                self._watch_links(time.monotonic())
                self._judge_closing()
        for peer, link in self._links.items():
            if peer not in self._departed:
                with contextlib.suppress(zmq.ZMQError):
                    link.socket.send(self._with_checksum(header) if peer in self._checksummed else header, zmq.NOBLOCK)
        for identity, peer in self._sources.items():
            if peer in self._departed or peer in self._lost:
                continue  # it has closed; what is sent to it would only hold up our own end
            try:
                self._router.send_multipart([identity, header], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                    raise TransportError(f"saying goodbye failed: {error}") from error


class _Done:
    done = True


_DONE = _Done()


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds; an infinite or huge time becomes 0, which ZeroMQ takes as "off"."""
    return 0 if seconds > 1e6 else max(1, int(seconds * 1000))
