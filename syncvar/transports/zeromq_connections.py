"""Who is at the other end of each connection of a ROUTER, which of them have ended, and how many were strangers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.transports.disconnect_reasons import CLOSED, ConnectionCopy
from syncvar.transports.zeromq_sockets import close_monitor, events_of, monitor_of

if TYPE_CHECKING:
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import Gate

__all__ = ["Connections"]


class Connections:
    """A ROUTER and what connects to it.

    Args:
        context: Its ZeroMQ context.
        config: After how long a peer is lost.

    Attributes:
        socket: The ROUTER, not bound yet.
        gate: Who decides about strangers and counts them; None where nobody can come from other hosts.
        monitor: To wait for what `ended` tells.
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
            self.socket.close(linger=0)  # else its context would never end
            raise
        self._peers: dict[
            int, tuple[bytes, ConnectionCopy | None]
        ] = {}  # by the descriptor of its connection
        self._balance = 0  # of connections that have ended, less those that had been proved

    def joined(self, identity: bytes, first: zmq.Frame) -> None:
        """Note that a peer has proved to be a member, by a frame that came from it.

        What `ended` has to tell must have been taken: it concerns earlier users of this descriptor.
        """
        with contextlib.suppress(zmq.ZMQError, ValueError):
            descriptor = int(first.get(zmq.SRCFD))
            self._let_go(self._peers.get(descriptor))  # of one that joins once more
            copy = None if self.gate is None else ConnectionCopy(descriptor)
            self._peers[descriptor] = identity, copy

    def refused(self, first: zmq.Frame) -> None:
        """Count a stranger, by a frame that came from it."""
        if self.gate is not None:
            self.gate.refuse(str(first.get("Peer-Address")))

    def ended(self) -> dict[bytes, str]:
        """Return the identities of the peers whose connections have ended since the last call, and why in words."""
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
