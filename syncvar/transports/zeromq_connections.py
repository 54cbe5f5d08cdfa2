"""The connections of a ROUTER: their peers, their ends, and the number of unauthenticated ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.transports.disconnect_reasons import CLOSED, ConnectionCopy
from syncvar.transports.zeromq_sockets import close_monitor, events_of, monitor_of

if TYPE_CHECKING:
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import Gate


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
