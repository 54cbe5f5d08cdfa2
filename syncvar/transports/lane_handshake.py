"""How a lane begins: the offers of two ranks, the connection, and proofs in both directions.

Two ranks agree on their ZeroMQ links, which have checked who they are, whether they use a lane.
The higher rank offers a port and a `LaneKey` that serves once. The lower rank connects, shows the
first half of the key, and expects the second half. Its last byte commits both to the lane. So
neither sends a frame before the other is certainly there, and without a lane nothing is lost.

`LaneListener` closes connections that do not prove to be a member's, and counts them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from syncvar.transports.lanes import Lane, configure

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.lanes import LaneConnection

_HELLO = struct.Struct("<8sI16s")  # magic, rank of the connecting process, first half of the key
_MAGIC = b"svlane01"
_HALF_NBYTES = 16
_COMMIT = b"\1"
_CONNECT_S = 4.0  # TCP repeats a lost first packet after 1 s and 3 s
_WAITING_MAX = 16  # connections that may stay without a proof after `_PROVE_S`
_PROVE_S = 1.0
_PENDING_MAX = 256
_ACCEPTED_MAX = 64  # at a time
_BACKLOG = 256


class LaneKey(NamedTuple):
    """A random key for one connection: what the connecting rank shows, and what it expects."""

    shown: bytes
    expected: bytes

    @classmethod
    def random(cls) -> LaneKey:
        """Return a new key."""
        return cls(os.urandom(_HALF_NBYTES), os.urandom(_HALF_NBYTES))

    @classmethod
    def parse(cls, data: bytes) -> LaneKey | None:
        """Return the key in an offer; None if it has the wrong length."""
        if len(data) != 2 * _HALF_NBYTES:
            return None
        return cls(data[:_HALF_NBYTES], data[_HALF_NBYTES:])

    def pack(self) -> bytes:
        """Return the key as bytes."""
        return self.shown + self.expected


class LaneSecurity(Protocol):
    """The protection of a lane: `PlainLanes`, or `LaneTls`."""

    def wrap(self, connection: socket.socket, *, is_server: bool) -> LaneConnection:
        """Return a connected socket with this protection."""

    def go_on(self, connection: LaneConnection) -> None:
        """Go on with its handshake; BlockingIOError if it waits, OSError if it has failed."""

    def lane(self, peer: int, connection: LaneConnection, config: RuntimeConfig) -> Lane:
        """Return the lane of a connection that both ranks have committed to."""


class PlainLanes:
    """Lanes without encryption."""

    def wrap(self, connection: socket.socket, *, is_server: bool) -> LaneConnection:  # noqa: ARG002
        """Return the connection."""
        return connection

    def go_on(self, connection: LaneConnection) -> None:
        """Do nothing."""

    def lane(self, peer: int, connection: LaneConnection, config: RuntimeConfig) -> Lane:
        """Return a lane with checksums."""
        assert isinstance(connection, socket.socket)
        return Lane(peer, connection, config)


class HandshakeStep(Enum):
    """The outcome of a look at a connection."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


def place_of(address: str) -> tuple[str, int]:
    """Return host and port of a tcp endpoint of ZeroMQ.

    Example:
        >>> place_of("tcp://[fd00::1]:4000")
        ('fd00::1', 4000)
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


class LaneConnector:
    """A connection that this rank opens to rank `peer` for a lane; `connection` is its socket.

    Its owner calls `step` when the socket is ready, and `expire` from time to time. `problem` says
    why it failed.
    """

    connection: LaneConnection

    def __init__(self, peer: int, security: LaneSecurity) -> None:
        self.peer = peer
        self.problem = ""
        self.is_connected = False
        self._security = security
        self._until = 0.0
        self._place = ""
        self._hello = self._expected = self._answer = b""

    def connect(
        self, rank: int, place: tuple[str, int], key: LaneKey, config: RuntimeConfig
    ) -> None:
        """Begin to connect to a place, as rank `rank`."""
        host, port = place
        self._place = f"{host} port {port}"
        self._until = time.monotonic() + min(_CONNECT_S, config.link_opening_s)
        self._hello = _HELLO.pack(_MAGIC, rank, key.shown)
        self._expected = key.expected
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        raw = self.connection = self._raw = socket.socket(family, socket.SOCK_STREAM)
        try:
            configure(raw, config)
            with contextlib.suppress(BlockingIOError):
                raw.connect((host, port))
        except OSError as error:
            self.problem = f"{self._place}: {error.strerror}"

    @property
    def due(self) -> float:
        """When it fails, in monotonic seconds."""
        return 0.0 if self.problem else self._until

    def expire(self, now: float) -> bool:
        """Return whether it has failed or its time is over."""
        if not self.problem and now >= self._until:
            self.problem = f"{self._place} did not answer in time"
        return bool(self.problem)

    def step(self) -> HandshakeStep:
        """Do what is possible now."""
        try:
            if not self.is_connected:
                code = self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))  # noqa: TRY301
                self.is_connected = True
                self.connection = self._security.wrap(self._raw, is_server=False)
            if self._hello:
                self._security.go_on(self.connection)
                self.connection.send(self._hello)
                self._hello = b""
            data = self.connection.recv(_HALF_NBYTES - len(self._answer))
            if not data:
                raise OSError(0, "it closed the connection")  # noqa: TRY301
            self._answer += data
            if len(self._answer) < _HALF_NBYTES:
                return HandshakeStep.PENDING
            if not hmac.compare_digest(self._answer, self._expected):
                raise OSError(0, "another process answers there")  # noqa: TRY301
            self.connection.send(_COMMIT)
        except BlockingIOError:
            return HandshakeStep.PENDING
        except OSError as error:
            self.problem = f"{self._place}: {error.strerror or error}"
            return HandshakeStep.FAILED
        return HandshakeStep.DONE


class LaneArrival:
    """A connection that another process has opened; `rank` is its number once it has proved it."""

    def __init__(
        self, connection: socket.socket, place: str, since: float, security: LaneSecurity
    ) -> None:
        self.connection: LaneConnection = connection
        self._raw = connection
        self.descriptor = connection.fileno()
        self.place = place
        self.since = since
        self.rank: int | None = None
        self._security = security
        self._is_wrapped = self._is_protected = False
        self._data = b""

    def step(self, keys: dict[int, LaneKey]) -> HandshakeStep:
        """Do what is possible now; `keys` has the keys that were offered and not used yet."""
        try:
            if not self._is_wrapped:
                self._is_wrapped = True
                self.connection = self._security.wrap(self._raw, is_server=True)
            if not self._is_protected:
                self._security.go_on(self.connection)
                self._is_protected = True
            if self.rank is None and not self._identify(keys):
                return HandshakeStep.FAILED
            data = self.connection.recv(len(_COMMIT))
        except BlockingIOError:
            return HandshakeStep.PENDING
        except OSError:
            return HandshakeStep.FAILED
        return HandshakeStep.DONE if data == _COMMIT else HandshakeStep.FAILED

    def _identify(self, keys: dict[int, LaneKey]) -> bool:
        """Find out the rank, and answer; return whether it has shown a key that was offered."""
        while len(self._data) < _HELLO.size:
            data = self.connection.recv(_HELLO.size - len(self._data))
            if not data:
                return False
            self._data += data
        magic, rank, shown = _HELLO.unpack(self._data)
        key = keys.get(rank)
        if magic != _MAGIC or key is None or not hmac.compare_digest(shown, key.shown):
            return False
        del keys[rank]  # it serves once
        self.rank = rank
        self.connection.send(key.expected)
        return True


class LaneListener:
    """The socket at which a rank accepts lanes; `refuse` counts a stranger at a place.

    It listens once `open` has been called, so ranks that only connect have no port.
    """

    def __init__(self, host: str, config: RuntimeConfig, refuse: Callable[[str], None]) -> None:
        self._host = host
        self._config = config
        self._refuse = refuse
        self.keys: dict[int, LaneKey] = {}  # by rank
        self.arrivals: dict[int, LaneArrival] = {}  # by descriptor
        self._socket: socket.socket | None = None

    @property
    def descriptor(self) -> int:
        """Descriptor that signals new connections; -1 while it does not listen."""
        return -1 if self._socket is None else self._socket.fileno()

    def open(self) -> int:
        """Listen, if it does not yet; return the port. Raises OSError."""
        if self._socket is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            with contextlib.ExitStack() as undoing:
                new = undoing.enter_context(socket.socket(family, socket.SOCK_STREAM))
                new.settimeout(0.0)
                new.bind((self._host, 0))
                new.listen(_BACKLOG)
                undoing.pop_all()
            self._socket = new
        return int(self._socket.getsockname()[1])

    def accept(self, now: float, security: LaneSecurity) -> list[LaneArrival]:
        """Return some new connections; the oldest ones without a proof make room."""
        new: list[LaneArrival] = []
        while self._socket is not None and len(new) < _ACCEPTED_MAX:
            if len(self.arrivals) >= _PENDING_MAX:
                self._close(next(iter(self.arrivals.values())))
            try:
                connection, place = self._socket.accept()
            except OSError:  # none, or it has ended already, or there is no descriptor left
                break
            configure(connection, self._config)
            arrival = LaneArrival(connection, str(place[0]), now, security)
            self.arrivals[arrival.descriptor] = arrival
            new.append(arrival)
        return new

    def step(self, arrival: LaneArrival) -> HandshakeStep:
        """Look at a connection; forget it when it is a lane or has failed."""
        outcome = arrival.step(self.keys)
        if outcome is HandshakeStep.DONE:
            del self.arrivals[arrival.descriptor]
        elif outcome is HandshakeStep.FAILED:
            self._close(arrival)
        return outcome

    def expire(self, now: float) -> None:
        """Close the oldest connections without a proof that had time for it, until few are left."""
        late = [
            one
            for one in self.arrivals.values()
            if one.rank is None and now - one.since >= _PROVE_S
        ]
        for one in late[: max(0, len(late) - _WAITING_MAX)]:
            self._close(one)

    def _close(self, arrival: LaneArrival) -> None:
        del self.arrivals[arrival.descriptor]
        arrival.connection.close()
        if arrival.rank is None:
            self._refuse(arrival.place)

    def close(self) -> None:
        """Close the listener and the connections that are no lanes yet."""
        for one in list(self.arrivals.values()):
            one.connection.close()
        self.arrivals.clear()
        if self._socket is not None:
            self._socket.close()
