"""The links between workers and servers: messages of frames, over sockets of their own.

Each server binds a ROUTER; whoever speaks to it opens a DEALER. Unlike a link between ranks one of these may break and be
connected again, by the same process or by the one that was started in its place: what was under way is lost then, and whoever
sent it sends it again (`syncvar.servers.client`). The routing identity names job, generation, process and incarnation, so that
a process of another job or an old one is not heard, and of two incarnations of a worker the later one counts.

A message is one part that tells of the others (which of them lie in shared memory, and their checksum where nothing else
protects them; and whether its sender sees that memory), and the frames.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import zmq

from syncvar.errors import ConfigError, TransportError
from syncvar.roles import SERVER_0, is_server, process_name
from syncvar.transports.zeromq import ask_for_signs_of_life, job_nonce, milliseconds, set_family, tcp_endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.config import RuntimeConfig
    from syncvar.env import RankEnvironment
    from syncvar.serving.lending import Lender
    from syncvar.transports.curve import Gate, LinkKeys

__all__ = ["Came", "Links"]

_IDENTITY = struct.Struct("<c8sIII4s")
_KIND = b"p"
_FRAME_NBYTES_MAX = 1 << 34
_BORROW_NBYTES_MIN = 128 << 10  # as between ranks: below, copying is cheaper

Frames = list[Any]


class Came(NamedTuple):
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
    answers: bytes


class Links:
    """The sockets of one process. Not safe in several threads.

    Args:
        context: ZeroMQ context of this process.
        environment: Who this process is.
        config: Limits and intervals.
        keys: What tcp links are protected by; None where they are not, or there are none.
        lender: Memory shared with the processes of this host; None where there is none.

    Attributes:
        refused: Messages that were dropped because they are not of this job, or not what they say.
    """

    def __init__(
        self, context: zmq.Context[Any], environment: RankEnvironment, config: RuntimeConfig, keys: LinkKeys | None,
        lender: Lender | None = None,
    ) -> None:  # fmt: skip
        self._context = context
        self._environment = environment
        self._config = config
        self._keys = keys
        self._lender = lender
        self._number = environment.rank + (SERVER_0 if environment.role == "server" else 0)
        self._nonce = job_nonce(environment.job_id)
        self._routing = _IDENTITY.pack(
            _KIND, self._nonce, environment.generation, self._number, environment.incarnation, os.urandom(4)
        )
        self.refused = 0
        self._dealers: dict[int, Any] = {}  # by the server's index
        self._addresses: dict[int, str] = {}
        self._incarnations: dict[int, int] = {}
        self._routes: dict[int, bytes] = {}  # to who has spoken to this server last, by number
        self._seeing: set[int] = set()  # who has said that it sees the shared memory
        self._head = msgpack.packb([[], 0, lender is not None])
        self._router: Any = None
        self._gate: Gate | None = None
        self.address = self.outside = ""

    # -- a server -------------------------------------------------------------------------------------------------

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
            path = os.path.join(me.socket_directory, f"s{me.rank}-{me.generation}-{me.incarnation}")  # noqa: PTH118
            self._router.bind(f"ipc://{path}")
            os.chmod(path, 0o600)
            self.address = f"ipc://{path}"
            if me.host_count > 1:
                if self._keys is None and config.encryption != "off":
                    raise ConfigError(f"server {me.rank} may not listen for other hosts without the job's secret")
                from syncvar.transports.curve import Gate

                self._gate = Gate(self._context, self._keys, rank=self._number if config.encryption == "control-only" else None)
                if self._keys is not None:  # addresses that are bound already stay as they were
                    (self._keys.listen if config.encryption == "required" else self._keys.listen_for_tickets)(self._router)
                place = tcp_endpoint(me.host_address)
                set_family(self._router, place)
                self._router.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.handshake_timeout_s))
                self.outside = f"{place}:{self._router.bind_to_random_port(place)}"
                self._gate.guard(self.outside)
        except zmq.ZMQError as error:
            raise TransportError(f"server {me.rank} cannot listen: {error}") from error

    # -- everybody ------------------------------------------------------------------------------------------------

    def connect(self, server: int, address: str) -> None:
        """Open the link to a server, or open it anew where it has moved."""
        if self._addresses.get(server) == address:
            return
        self.forget(SERVER_0 + server)
        socket = self._context.socket(zmq.DEALER)
        self._configure(socket)
        if address.startswith("tcp://"):
            set_family(socket, address)
            ask_for_signs_of_life(socket, self._config)
            if self._keys is not None and self._config.encryption == "required":
                self._keys.connect(socket)
            elif self._keys is not None:
                self._keys.connect_by_ticket(socket, self._number, SERVER_0 + server)
        socket.setsockopt(zmq.ROUTING_ID, self._routing)
        socket.connect(address)
        self._dealers[server], self._addresses[server] = socket, address

    def forget(self, number: int) -> None:
        """Let go of what leads to a process that has ended."""
        self._routes.pop(number, None)
        self._seeing.discard(number)
        if is_server(number):
            self._addresses.pop(number - SERVER_0, None)
            dealer = self._dealers.pop(number - SERVER_0, None)
            if dealer is not None:
                dealer.close(linger=0)
        if self._lender is not None:
            self._lender.forget(number)

    def sockets(self) -> list[Any]:
        """Return what to wait for."""
        return [*self._dealers.values(), *([self._router] if self._router is not None else [])]

    def send(self, number: int, frames: Sequence[Any], route: bytes | None = None) -> bool:
        """Send a message; it is lost where the process cannot be reached now.

        Args:
            number: The process.
            frames: Buffers that do not change any more.
            route: As `Came.answers` has it, for exactly that process; None for the latest with the number.

        Returns:
            Whether it is on its way.
        """
        server = number - SERVER_0
        if self._router is not None and not (is_server(number) and server in self._dealers):
            to = route or self._routes.get(number)
            if to is None:
                return False
            socket, parts = self._router, [to]
        elif server in self._dealers:
            socket, parts = self._dealers[server], []
        else:
            return False
        lent = self._lender.lend(number, frames) if self._lender is not None and number in self._seeing else []
        if lent:
            empty = {index for index, _, _ in lent}
            frames = [b"" if index in empty else frame for index, frame in enumerate(frames)]
        head = self._head
        if lent or self._is_bare(number):
            head = msgpack.packb([lent, _checksum(frames) if self._is_bare(number) else 0, self._lender is not None])
        parts += [head, *frames]
        try:
            for part in parts[:-1]:
                self._put(socket, part, zmq.NOBLOCK | zmq.SNDMORE)
            self._put(socket, parts[-1], zmq.NOBLOCK)
        except zmq.ZMQError:  # nobody is there: it has ended, and the launcher is about to say so
            return False
        return True

    def receive(self, socket: Any) -> Came | None:
        """Return the next message that has come on a socket, or None; others than messages of this job are dropped."""
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            came = self._came(socket, parts)
            if came is not None:
                return came
            self.refused += 1

    def close(self, linger_s: float) -> None:
        """Flush for at most so many seconds, and close."""
        for socket in self.sockets():
            socket.close(linger=int(linger_s * 1000))
        self._dealers.clear()
        self._router = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _configure(self, socket: Any) -> None:
        socket.set_hwm(0)  # a worker waits for answers before it sends much more
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_NBYTES_MAX)

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

    def _came(self, socket: Any, parts: list[Any]) -> Came | None:
        answers = b""
        if socket is self._router:
            answers = parts.pop(0).bytes
            who = self._who(answers)
            if who is None:
                if self._gate is not None and parts:
                    with contextlib.suppress(zmq.ZMQError):
                        self._gate.refuse(str(parts[0].get("Peer-Address")))
                return None
            number, incarnation = who
            if incarnation >= self._incarnations.get(number, 0):
                self._incarnations[number] = incarnation
                self._routes[number] = answers
        else:
            server = next(server for server, one in self._dealers.items() if one is socket)
            number, incarnation = SERVER_0 + server, 0
        if len(parts) < 2:
            return None
        frames: Frames = [part.buffer for part in parts[1:]]
        try:
            lent, checksum, sees = msgpack.unpackb(parts[0].buffer)
            if checksum and checksum != _checksum(frames):
                return None
            for index, offset, nbytes in lent:
                if self._lender is None:
                    return None
                frames[index] = self._lender.borrow(offset, nbytes)
            (self._seeing.add if sees else self._seeing.discard)(number)
        except (ValueError, TypeError, IndexError, msgpack.UnpackException):
            return None
        return Came(number, incarnation, frames, answers)

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


def _checksum(frames: Sequence[Any]) -> int:
    value = 0
    for frame in frames:
        value = zlib.crc32(frame, value)
    return value or 1
