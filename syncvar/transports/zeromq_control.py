"""The control channel of a worker to the launcher, or to rank 0 without a launcher."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import HandshakeError
from syncvar.protocol.control_messages import Message, parse_message
from syncvar.protocol.frame import CONTROL_NBYTES_MAX
from syncvar.transports.zeromq_sockets import (
    CLOSED,
    ConnectionCopy,
    ask_for_signs_of_life,
    close_monitor,
    events_of,
    limit_frames,
    milliseconds,
    monitor_of,
    set_family,
)

if TYPE_CHECKING:
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import LinkKeys

_IDENTITY = struct.Struct("<cI8s")
_POLLIN = int(zmq.POLLIN)  # to combine flags of pyzmq takes a microsecond
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSALS_MAX = 5


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

    Args:
        context: ZeroMQ context of this process.
        endpoint: Address of the launcher.
        rank: Rank of this process.
        config: Limits and intervals.
        keys: Keys for a tcp endpoint.
        keeper: The rank that listens there instead of a launcher. If the channel closes or falls
            silent, that rank has failed. A launcher watches its workers, and itself, by other
            means.
        kind: Type of the channel, as for `control_identity`.

    Attributes:
        keeper: As above.
        monitor: Events of the channel; None for a launcher on this host.
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
        self._end = ""  # why the keeper has failed
        self._copy: ConnectionCopy | None = None
        self.socket.setsockopt(zmq.ROUTING_ID, control_identity(rank, kind))
        limit_frames(self.socket, CONTROL_NBYTES_MAX)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.rendezvous_timeout_s))
        self.socket.setsockopt(zmq.LINGER, 0)
        if endpoint.startswith("tcp://"):
            set_family(self.socket, endpoint)
            if keys is not None:
                keys.connect(self.socket)
            events = _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
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
            return {
                "kind": "abort",
                "rank": self.keeper,
                "host": "",
                "failure_kind": "lost",
                "reason": self._end,
                "group": -1,
                "call": -1,
                "missing": [],
                "status": [],
            }
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
            elif event & _REFUSED:
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
