"""The links between workers and servers: messages of frames, over sockets of their own.

Within a host these are pipes (`pipes`), between hosts, and where shared memory is not wanted, sockets of ZeroMQ: each server binds
a ROUTER, and whoever speaks to it opens a DEALER. Unlike a link between ranks one of these may break and be
connected again, by the same process or by the one that was started in its place: what was under way is lost then, and whoever
sent it sends it again (`syncvar.parameter_server.client.request_client`). The routing identity names job, generation, process and incarnation, so that
a process of another job or an old one is not heard, and of two incarnations of a worker the later one counts.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from syncvar.core.errors import TransportError
from syncvar.core.network import tcp_endpoint
from syncvar.core.process_ids import SERVER_0, is_server, process_name
from syncvar.parameter_server.transport.framing import NBYTES_MAX, cut, joined, packed, unpacked
from syncvar.parameter_server.transport.poller import Watching
from syncvar.parameter_server.transport.unix_stream import Pipe, UnixListener
from syncvar.protocol.message_limits import FRAME_NBYTES, HELLO_NBYTES_MAX
from syncvar.transports.zeromq_sockets import (
    ask_for_signs_of_life,
    bind_in_folder,
    job_nonce,
    limit_frames,
    milliseconds,
    set_family,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.parameter_server.transport.shm_buffers import ShmBufferPool
    from syncvar.shm.shm_references import SegmentId, SharedMemoryReference
    from syncvar.transports.curve import Gate, LinkKeys

_IDENTITY = struct.Struct("<c8sIII4s")
_KIND = b"p"
_APART_NBYTES_MIN = (
    32 << 10
)  # in messages of ZeroMQ: below, a frame of its own is more work than a copy
_BORROW_NBYTES_MIN = 128 << 10  # as between ranks: below, copying is cheaper

Frames = list[Any]
Route = bytes | Pipe


class ReceivedMessage(NamedTuple):
    """A message that has come.

    Args:
        number: The process that sent it.
        incarnation: Which of the processes that have had this number.
        frames: Buffers, which stay as they are.
        answers: Where an answer goes that is meant for exactly this process.
    """

    number: int
    incarnation: int
    frames: Frames
    answers: Route


class ServerLinks:
    """The sockets of one process. Not safe in several threads.

    Args:
        context: ZeroMQ context of this process.
        environment: Who this process is.
        config: Limits and intervals.
        keys: What tcp links are protected by; None where they are not, or there are none.
        lender: Memory shared with the processes of this host; None where there is none.

    Attributes:
        refused: Messages that were dropped because they are not of this job, or not what they say.
        watching: What tells which of the sockets have something; other things may be waited for too.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        environment: RankEnvironment,
        config: RuntimeConfig,
        keys: LinkKeys | None,
        lender: ShmBufferPool | None = None,
    ) -> None:
        self._context = context
        self._environment = environment
        self._config = config
        self._keys = keys
        self._lender = lender
        self._number = environment.rank + (SERVER_0 if environment.role == "server" else 0)
        self._nonce = job_nonce(environment.job_id)
        self._routing = _IDENTITY.pack(
            _KIND,
            self._nonce,
            environment.generation,
            self._number,
            environment.incarnation,
            os.urandom(4),
        )
        self.refused = 0
        self.watching = Watching()
        self._dealers: dict[int, Any] = {}  # by the server's index: sockets of ZeroMQ, or pipes
        self._addresses: dict[int, str] = {}
        self._incarnations: dict[int, int] = {}
        self._routes: dict[int, Route] = {}  # to who has spoken to this server last, by number
        self._mapped: dict[
            int, SegmentId | None
        ] = {}  # by number, the shared memory that a process has said to have mapped
        self._router: Any = None
        self._door: UnixListener | None = None
        self._pipes: list[Pipe] = []  # that others have opened
        self._gate: Gate | None = None
        self.address = self.outside = ""

    # -- a server ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Listen for the processes of this host, and of others where there are some.

        Raises:
            TransportError: The system refuses.
        """
        me, config = self._environment, self._config
        self._router = self._context.socket(zmq.ROUTER)
        self._configure(self._router)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.address = bind_in_folder(
                self._router, me.socket_directory, f"s{me.rank}-{me.generation}-{me.incarnation}"
            )
            self._door = UnixListener(_door_of(self.address))
            if me.host_count > 1:
                from syncvar.transports.curve import gate_for_hosts

                self._gate = gate_for_hosts(
                    self._context,
                    self._router,
                    self._keys,
                    config,
                    self._number,
                    f"server {me.rank}",
                )
                place = tcp_endpoint(me.host_address)
                set_family(self._router, place)
                self.outside = f"{place}:{self._router.bind_to_random_port(place)}"
                self._gate.guard(self.outside)
        except (zmq.ZMQError, OSError) as error:
            raise TransportError(f"server {me.rank} cannot listen: {error}") from error
        self.watching.add(self._router)
        self.watching.add(self._door)

    # -- everybody ---------------------------------------------------------------------------------

    def connect(self, server: int, address: str) -> None:
        """Open the link to a server, or open it anew where it has moved."""
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
            ask_for_signs_of_life(socket, self._config)
            if self._keys is not None:
                self._keys.connect_host(socket, self._config, self._number, SERVER_0 + server)
        socket.setsockopt(zmq.ROUTING_ID, self._routing)
        socket.connect(address)
        self._dealers[server] = socket
        self.watching.add(socket)

    def forget(self, number: int, incarnation: int = 0) -> None:
        """Let go of what leads to a process that has ended.

        Args:
            number: The process.
            incarnation: The one that has ended; routes of a later one stay.
        """
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
        """Return what messages come from."""
        own = [one for one in (self._router, self._door) if one is not None]
        return [*self._dealers.values(), *self._pipes, *own]

    @property
    def is_behind(self) -> bool:
        """Whether a pipe has not taken yet all that was sent."""
        return any(
            isinstance(one, Pipe) and one.is_behind
            for one in (*self._dealers.values(), *self._pipes)
        )

    def send(self, number: int, frames: Sequence[Any], route: Route | None = None) -> bool:
        """Send a message; it is lost where the process cannot be reached now.

        Args:
            number: The process.
            frames: Buffers that do not change any more.
            route: As `ReceivedMessage.answers` has it, for exactly that process; None for the latest with the number.

        Returns:
            Whether it is on its way.
        """
        to = self._dealers.get(number - SERVER_0) or route or self._routes.get(number)
        if isinstance(to, Pipe) and to.is_over:
            to = self._open(number - SERVER_0) if number - SERVER_0 in self._dealers else None
        if to is None:
            return False
        lender = self._lender
        segment = None if lender is None else lender.segment
        lent: Sequence[tuple[int, SharedMemoryReference]] = ()
        is_to_latest = (
            not route or to is not route or route == self._routes.get(number)
        )  # `_mapped` is of the latest incarnation
        if lender is not None and is_to_latest and self._mapped.get(number) == segment:
            lent = lender.lend(number, frames, self._incarnations.get(number, 0))
        if isinstance(to, Pipe):
            is_on_its_way = to.send(packed(frames, lent, segment=segment))
            if to.is_behind:
                self.watching.write(to, waits=True)
            return is_on_its_way
        message = packed(
            frames,
            lent,
            segment=segment,
            has_checksum=self._is_bare(number),
            apart_nbytes=_APART_NBYTES_MIN,
        )
        socket = self._router if isinstance(to, bytes) else to
        whole = (b"".join(message.pieces), *message.apart)
        parts = [
            *([to] if isinstance(to, bytes) else ()),
            *(one for part in whole for one in cut(part)),
        ]
        self.watching.touch(socket)
        try:
            for part in parts[:-1]:
                self._put(socket, part, zmq.NOBLOCK | zmq.SNDMORE)
            self._put(socket, parts[-1], zmq.NOBLOCK)
        except zmq.ZMQError:  # nobody is there: it has ended, and the launcher is about to say so
            return False
        return True

    @staticmethod
    def may_have_more(one: Any) -> bool:
        """Return whether `receive` has to be called again, after it has returned a message, until it returns None."""
        return not isinstance(one, Pipe) or one.has_more

    def receive(self, one: Any) -> ReceivedMessage | None:
        """Return the next message that has come on one of the sockets, or None; others than messages of this job are dropped.

        Raises:
            InternalError: A message refers to shared memory that this process has not mapped.
        """
        if isinstance(one, Pipe):
            return self._piped(one)
        if isinstance(one, UnixListener):
            while (pipe := one.accept()) is not None:
                self._pipes.append(pipe)
                self.watching.add(pipe)
            return None
        while (
            one.getsockopt(zmq.EVENTS) & zmq.POLLIN
        ):  # cheaper than the exception that an empty socket raises
            came = self._came(one, deque(one.recv_multipart(zmq.NOBLOCK, copy=False)))
            if came is not None:
                return came
            self.refused += 1
        self.watching.is_empty(one)
        return None

    def close(self, linger_s: float) -> None:
        """Flush for at most so many seconds, and close."""
        for one in self.sockets():
            self._end(one, linger_s)
        self._dealers.clear()
        self._pipes.clear()
        self._router = self._door = None
        self.watching.close()
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    # -- inside ------------------------------------------------------------------------------------

    @staticmethod
    def _end(one: Any, linger_s: float) -> None:
        if isinstance(one, zmq.Socket):
            one.close(linger=int(linger_s * 1000))
        elif isinstance(one, Pipe):
            one.close(linger_s)
        else:
            one.close()

    def _open(self, server: int) -> Pipe:
        """Open the pipe to a server, also again; it is over where nobody is there, which the launcher is about to say."""
        made = self._dealers[server] = Pipe.open(
            _door_of(self._addresses[server]), packed([self._routing])
        )
        made.peer = SERVER_0 + server, 0
        if not made.is_over:
            self.watching.add(made)
        return made

    def _piped(self, pipe: Pipe) -> ReceivedMessage | None:
        """Return the next message of a pipe; one that says something else than messages of this job is closed."""
        if pipe.is_behind:
            pipe.flush()
            self.watching.write(pipe, waits=pipe.is_behind)
        try:
            while (
                message := pipe.receive(NBYTES_MAX if pipe.peer else HELLO_NBYTES_MAX)
            ) is not None:
                frames, segment = unpacked(
                    message, (), None if self._lender is None else self._lender.borrow
                )
                if pipe.peer is not None:
                    return self._from(pipe.peer, frames, b"" if pipe.is_opener else pipe, segment)
                pipe.peer = self._who(bytes(frames[0])) if len(frames) == 1 else None
                if pipe.peer is None:
                    raise ValueError("somebody else than a process of this job has opened a pipe")
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
        is_large = memoryview(part).nbytes >= _BORROW_NBYTES_MIN
        socket.send(part, flags, copy=not is_large)

    def _is_bare(self, number: int) -> bool:
        """Return whether nothing protects what goes to or comes from a process."""
        if self._config.encryption == "required" or self._environment.host_count == 1:
            return False
        address = self._addresses.get(number - SERVER_0, "")
        return address.startswith("tcp://") if is_server(number) and address else True

    def _came(self, socket: Any, parts: deque[Any]) -> ReceivedMessage | None:
        """Return what has come on a socket of ZeroMQ; None where it is no message of this job."""
        answers = b""
        if socket is self._router:
            answers = parts.popleft().bytes
            who = self._who(answers)
            if who is None:
                if self._gate is not None and parts:
                    with contextlib.suppress(zmq.ZMQError):
                        self._gate.refuse(str(parts[0].get("Peer-Address")))
                return None
        else:
            who = (
                next(SERVER_0 + server for server, one in self._dealers.items() if one is socket),
                0,
            )
        borrow = None if self._lender is None else self._lender.borrow
        try:
            first, *apart = joined(parts.popleft().buffer for _ in range(len(parts)))
            frames, segment = unpacked(first, apart, borrow)
        except ValueError:
            return None
        return self._from(who, frames, answers, segment)

    def _from(
        self, who: tuple[int, int], frames: Frames, answers: Route, segment: SegmentId | None
    ) -> ReceivedMessage:
        """Return a message of a process, an incarnation of it; what is answered to that one goes back where it came from."""
        number, incarnation = who
        if incarnation >= self._incarnations.get(number, 0):
            self._mapped[number] = segment
            if answers:
                self._incarnations[number] = incarnation
                self._routes[number] = answers
        return ReceivedMessage(number, incarnation, frames, answers)

    def _who(self, identity: bytes) -> tuple[int, int] | None:
        if len(identity) != _IDENTITY.size:
            return None
        kind, nonce, generation, number, incarnation, _ = _IDENTITY.unpack(identity)
        if kind != _KIND or nonce != self._nonce or generation != self._environment.generation:
            return None
        me = self._environment
        is_there = number - SERVER_0 < me.servers if is_server(number) else number < me.world_size
        return (number, incarnation) if is_there else None

    def __repr__(self) -> str:
        """Return who speaks with whom."""
        return f"links of {process_name(self._number)} to servers {sorted(self._dealers)}"


def _door_of(address: str) -> str:
    """Return where the pipes to a server are opened, by the address at which its host reaches it over ZeroMQ."""
    return f"{address.removeprefix('ipc://')}p"
