"""The links between workers and servers.

Within a host they are Unix sockets (`same_host_links`). Between hosts, or without shared memory,
they are ZeroMQ sockets: each server binds a ROUTER, and its peers connect a DEALER. Unlike a link
between ranks, such a link may break and be connected again, by the same process or by its
successor. Messages in transit are then lost, and the client repeats them. The routing identity
names job, attempt, process and incarnation, so that a server ignores processes of other jobs and
attempts, and prefers the later incarnation of a worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from syncvar.core.errors import TransportError
from syncvar.core.process_ids import SERVER_0, is_server, process_name
from syncvar.parameter_server.messages import (
    NBYTES_MAX,
    join_frames,
    pack_frames,
    split_part,
    unpack_frames,
)
from syncvar.parameter_server.same_host_links import Pipe, UnixListener
from syncvar.protocol.frame import FRAME_NBYTES, HELLO_NBYTES_MAX
from syncvar.transports.zeromq_sockets import (
    bind_in_folder,
    job_nonce,
    limit_frames,
    milliseconds,
    set_family,
    set_heartbeats,
    tcp_endpoint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.parameter_server.same_host_links import ShmBufferPool
    from syncvar.shm.segment_file import SegmentId, SharedMemoryReference
    from syncvar.transports.curve import Gate, LinkKeys

_IDENTITY = struct.Struct("<c8sIII4s")
_MAGIC = b"p"
# ZeroMQ: below this size, a copy is cheaper than a frame of its own.
_SEPARATE_NBYTES_MIN = 32 << 10
_ZERO_COPY_NBYTES_MIN = 128 << 10  # as between ranks: below, a copy is cheaper

Frames = list[Any]
Route = bytes | Pipe


class SocketPoller:
    """An epoll of ZeroMQ sockets, other sockets and descriptors.

    The descriptor of a ZeroMQ socket only signals what arrives after the last call of the socket.
    So a caller that has sent on the socket, or left messages in it, calls `touch`. The socket then
    counts as readable until `is_empty`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ones: dict[int, Any] = {}
        self._touched: dict[int, Any] = {}

    def add(self, one: Any) -> None:
        """Wait for a socket or descriptor too."""
        descriptor = _descriptor(one)
        self._ones[descriptor] = one
        self._epoll.register(descriptor, select.EPOLLIN)
        if isinstance(one, zmq.Socket):
            self._touched[descriptor] = one

    def remove(self, one: Any) -> None:
        """Stop waiting for it; call this before closing it."""
        descriptor = _descriptor(one)
        if self._ones.pop(descriptor, None) is not None:
            self._touched.pop(descriptor, None)
            self._epoll.unregister(descriptor)

    def write(self, one: Any, *, waits: bool) -> None:
        """Start or stop waiting until a socket takes more bytes."""
        self._epoll.modify(_descriptor(one), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def touch(self, socket: Any) -> None:
        """Count a socket as readable."""
        self._touched[_descriptor(socket)] = socket

    def is_empty(self, socket: Any) -> None:
        """Note that a socket is empty."""
        if self._touched:
            self._touched.pop(_descriptor(socket), None)

    def wait(self, timeout_s: float) -> list[Any]:
        """Return what may be readable, after at most `timeout_s`; some may turn out to be empty."""
        polled = self._epoll.poll(0.0 if self._touched else max(0.0, timeout_s))
        descriptors = dict.fromkeys([*self._touched, *(descriptor for descriptor, _ in polled)])
        return [self._ones[descriptor] for descriptor in descriptors if descriptor in self._ones]

    def close(self) -> None:
        """Close the epoll."""
        self._epoll.close()


def _descriptor(one: Any) -> int:
    if isinstance(one, zmq.Socket):
        return int(one.getsockopt(zmq.FD))
    return one if isinstance(one, int) else int(one.fileno())


class ReceivedMessage(NamedTuple):
    """A message that has arrived."""

    number: int  # process number of the sender
    incarnation: int  # incarnation of the sender
    frames: Frames  # buffers that do not change
    answers: Route  # route for answers to exactly this process


class ServerLinks:
    """The sockets of one process; for one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[Any],
        environment: RankEnvironment,
        config: RuntimeConfig,
        keys: LinkKeys | None,
        lender: ShmBufferPool | None = None,
    ) -> None:
        self._context, self._environment, self._config = context, environment, config
        self._keys, self._lender = keys, lender
        self._number = environment.rank + (SERVER_0 if environment.role == "server" else 0)
        self._nonce = job_nonce(environment.job_id)
        self._routing = _IDENTITY.pack(
            _MAGIC,
            self._nonce,
            environment.generation,
            self._number,
            environment.incarnation,
            os.urandom(4),
        )
        self.refused = 0  # number of dropped messages: malformed, or not of this job
        # The poller of the sockets; it may wait for other descriptors too.
        self.watching = SocketPoller()
        self._dealers: dict[int, Any] = {}  # server -> ZeroMQ socket or pipe
        self._addresses: dict[int, str] = {}
        self._incarnations: dict[int, int] = {}
        self._routes: dict[int, Route] = {}  # process number -> route of its last message
        # Process number -> shared memory that the process has mapped.
        self._mapped: dict[int, SegmentId | None] = {}
        self._router: Any = None
        self._listener: UnixListener | None = None
        self._pipes: list[Pipe] = []  # opened by other processes
        self._gate: Gate | None = None
        self.address = self.outside = ""

    # -- a server ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Listen for the processes of this host, and of others if there are several."""
        me, config = self._environment, self._config
        self._router = self._context.socket(zmq.ROUTER)
        self._configure(self._router)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            name = f"s{me.rank}-{me.generation}-{me.incarnation}"
            self.address = bind_in_folder(self._router, me.socket_directory, name)
            self._listener = UnixListener(_pipe_path(self.address))
            if me.host_count > 1:
                from syncvar.transports.curve import gate_for_hosts

                name = f"server {me.rank}"
                self._gate = gate_for_hosts(
                    self._context, self._router, self._keys, config, self._number, name
                )
                endpoint = tcp_endpoint(me.host_address)
                set_family(self._router, endpoint)
                self.outside = f"{endpoint}:{self._router.bind_to_random_port(endpoint)}"
                self._gate.guard(self.outside)
        except (zmq.ZMQError, OSError) as error:
            raise TransportError(f"server {me.rank} cannot listen: {error}") from error
        self.watching.add(self._router)
        self.watching.add(self._listener)

    # -- all processes -----------------------------------------------------------------------------

    def connect(self, server: int, address: str) -> None:
        """Open the link to a server, or replace it if the address has changed."""
        if self._addresses.get(server) == address:
            return
        self.forget(SERVER_0 + server)
        self._addresses[server] = address
        if address.startswith("ipc://") and self._config.transport != "zmq":
            self._dealers[server] = self._open(server)
            return
        socket = self._context.socket(zmq.DEALER)
        self._configure(socket)
        if address.startswith("tcp://"):
            set_family(socket, address)
            set_heartbeats(socket, self._config)
            if self._keys is not None:
                self._keys.connect_host(socket, self._config, self._number, SERVER_0 + server)
        socket.setsockopt(zmq.ROUTING_ID, self._routing)
        socket.connect(address)
        self._dealers[server] = socket
        self.watching.add(socket)

    def forget(self, number: int, incarnation: int = 0) -> None:
        """Close the links to a process that has ended; those of later incarnations stay."""
        if self._incarnations.get(number, 0) <= incarnation:
            self._routes.pop(number, None)
            self._mapped.pop(number, None)
        if is_server(number):
            self._addresses.pop(number - SERVER_0, None)
            dealer = self._dealers.pop(number - SERVER_0, None)
            if dealer is not None:
                self.watching.remove(dealer)
                self._end(dealer, 0.0)
        if self._lender is not None:
            self._lender.forget(number, incarnation)

    def sockets(self) -> list[Any]:
        """Return the sockets that receive messages."""
        own = [one for one in (self._router, self._listener) if one is not None]
        return [*self._dealers.values(), *self._pipes, *own]

    @property
    def is_behind(self) -> bool:
        """Whether a pipe has unsent bytes."""
        links = (*self._dealers.values(), *self._pipes)
        return any(isinstance(one, Pipe) and one.is_behind for one in links)

    def send(self, number: int, frames: Sequence[Any], route: Route | None = None) -> bool:
        """Send buffers that do not change; return False if the process cannot be reached.

        `route` is `ReceivedMessage.answers`, for exactly that process; None for the latest one.
        """
        to = self._dealers.get(number - SERVER_0) or route or self._routes.get(number)
        if isinstance(to, Pipe) and to.is_over:
            to = self._open(number - SERVER_0) if number - SERVER_0 in self._dealers else None
        if to is None:
            return False
        lender = self._lender
        segment = None if lender is None else lender.segment
        lent: Sequence[tuple[int, SharedMemoryReference]] = ()
        # `_mapped` is about the latest incarnation.
        is_to_latest = not route or to is not route or route == self._routes.get(number)
        if lender is not None and is_to_latest and self._mapped.get(number) == segment:
            lent = lender.lend(number, frames, self._incarnations.get(number, 0))
        if isinstance(to, Pipe):
            is_sent = to.send(pack_frames(frames, lent, segment=segment))
            if to.is_behind:
                self.watching.write(to, waits=True)
            return is_sent
        message = pack_frames(
            frames,
            lent,
            segment=segment,
            has_checksum=self._is_bare(number),
            separate_nbytes=_SEPARATE_NBYTES_MIN,
        )
        socket = self._router if isinstance(to, bytes) else to
        whole = (b"".join(message.pieces), *message.separate)
        prefix = [to] if isinstance(to, bytes) else []
        parts = [*prefix, *(frame for part in whole for frame in split_part(part))]
        self.watching.touch(socket)
        try:
            for part in parts[:-1]:
                self._put(socket, part, zmq.NOBLOCK | zmq.SNDMORE)
            self._put(socket, parts[-1], zmq.NOBLOCK)
        except zmq.ZMQError:  # the process has ended, and the launcher will report it
            return False
        return True

    @staticmethod
    def may_have_more(one: Any) -> bool:
        """Return whether a call of `receive` is due after one that returned a message."""
        return not isinstance(one, Pipe) or one.has_more

    def receive(self, one: Any) -> ReceivedMessage | None:
        """Return the next message of one socket, or None; drops messages of other jobs."""
        if isinstance(one, Pipe):
            return self._receive_from_pipe(one)
        if isinstance(one, UnixListener):
            while (pipe := one.accept()) is not None:
                self._pipes.append(pipe)
                self.watching.add(pipe)
            return None
        # Reading EVENTS is cheaper than the exception of an empty socket.
        while one.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            parts = deque(one.recv_multipart(zmq.NOBLOCK, copy=False))
            message = self._receive_from_zeromq(one, parts)
            if message is not None:
                return message
            self.refused += 1
        self.watching.is_empty(one)
        return None

    def close(self, linger_s: float) -> None:
        """Flush for at most `linger_s`, and close."""
        for one in self.sockets():
            self._end(one, linger_s)
        self._dealers.clear()
        self._pipes.clear()
        self._router = self._listener = None
        self.watching.close()
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    @staticmethod
    def _end(one: Any, linger_s: float) -> None:
        if isinstance(one, zmq.Socket):
            one.close(linger=int(linger_s * 1000))
        elif isinstance(one, Pipe):
            one.close(linger_s)
        else:
            one.close()

    def _open(self, server: int) -> Pipe:
        """Open the pipe to a server; it is over if the server has ended."""
        hello = pack_frames([self._routing])
        pipe = self._dealers[server] = Pipe.open(_pipe_path(self._addresses[server]), hello)
        pipe.peer = SERVER_0 + server, 0
        if not pipe.is_over:
            self.watching.add(pipe)
        return pipe

    def _receive_from_pipe(self, pipe: Pipe) -> ReceivedMessage | None:
        """Return the next message of a pipe; close a pipe with anything else."""
        if pipe.is_behind:
            pipe.flush()
            self.watching.write(pipe, waits=pipe.is_behind)
        borrow = None if self._lender is None else self._lender.borrow
        try:
            while True:
                message = pipe.receive(NBYTES_MAX if pipe.peer else HELLO_NBYTES_MAX)
                if message is None:
                    break
                frames, segment = unpack_frames(message, (), borrow)
                if pipe.peer is not None:
                    route = b"" if pipe.is_opener else pipe
                    return self._message_from(pipe.peer, frames, route, segment)
                pipe.peer = self._process_of(bytes(frames[0])) if len(frames) == 1 else None
                if pipe.peer is None:
                    raise ValueError("a process of another job has opened a pipe")
        except ValueError:
            self.refused += 1
            pipe.is_over = True
        if pipe.is_over:
            self._drop(pipe)
        else:
            self.watching.is_empty(pipe)
        return None

    def _drop(self, pipe: Pipe) -> None:
        self.watching.remove(pipe)
        pipe.close()
        if pipe in self._pipes:
            self._pipes.remove(pipe)

    def _configure(self, socket: Any) -> None:
        socket.set_hwm(0)  # a worker waits for answers before it sends much more
        socket.setsockopt(zmq.LINGER, 0)
        limit_frames(socket, FRAME_NBYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(self._config.link_opening_s))

    @staticmethod
    def _put(socket: Any, part: Any, flags: int) -> None:
        is_large = memoryview(part).nbytes >= _ZERO_COPY_NBYTES_MIN
        socket.send(part, flags, copy=not is_large)

    def _is_bare(self, number: int) -> bool:
        """Return whether the link to a process has neither encryption nor a checksum."""
        if self._config.encryption == "required" or self._environment.host_count == 1:
            return False
        address = self._addresses.get(number - SERVER_0, "")
        return address.startswith("tcp://") if is_server(number) and address else True

    def _receive_from_zeromq(self, socket: Any, parts: deque[Any]) -> ReceivedMessage | None:
        """Return the message in some parts; None if it is not of this job."""
        answers = b""
        if socket is self._router:
            answers = parts.popleft().bytes
            process = self._process_of(answers)
            if process is None:
                if self._gate is not None and parts:
                    with contextlib.suppress(zmq.ZMQError):
                        self._gate.refuse(str(parts[0].get("Peer-Address")))
                return None
        else:
            servers = (server for server, one in self._dealers.items() if one is socket)
            process = SERVER_0 + next(servers), 0
        borrow = None if self._lender is None else self._lender.borrow
        try:
            first, *separate = join_frames(parts.popleft().buffer for _ in range(len(parts)))
            frames, segment = unpack_frames(first, separate, borrow)
        except ValueError:
            return None
        return self._message_from(process, frames, answers, segment)

    def _message_from(
        self, process: tuple[int, int], frames: Frames, answers: Route, segment: SegmentId | None
    ) -> ReceivedMessage:
        """Return a message, after noting route and memory of its process and incarnation."""
        number, incarnation = process
        if incarnation >= self._incarnations.get(number, 0):
            self._mapped[number] = segment
            if answers:
                self._incarnations[number] = incarnation
                self._routes[number] = answers
        return ReceivedMessage(number, incarnation, frames, answers)

    def _process_of(self, identity: bytes) -> tuple[int, int] | None:
        """Return number and incarnation in an identity; None for another job or attempt."""
        if len(identity) != _IDENTITY.size:
            return None
        me = self._environment
        magic, nonce, attempt, number, incarnation, _ = _IDENTITY.unpack(identity)
        if (magic, nonce, attempt) != (_MAGIC, self._nonce, me.generation):
            return None
        count, index = (
            (me.servers, number - SERVER_0) if is_server(number) else (me.world_size, number)
        )
        return (number, incarnation) if index < count else None

    def __repr__(self) -> str:
        return f"links of {process_name(self._number)} to servers {sorted(self._dealers)}"


def _pipe_path(address: str) -> str:
    return f"{address.removeprefix('ipc://')}p"
