"""The server end of the control channels: one ROUTER socket and a coordinator. Imports no NumPy.

The launcher runs it; without a launcher, rank 0's process does (`HostService`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import ConfigError, RendezvousError, WireError
from syncvar.protocol.control_messages import Message, pack_message, parse_message
from syncvar.protocol.coordinator import AbortJob, Action, Coordinator, ShowMessage, Unresponsive
from syncvar.protocol.frame import CONTROL_NBYTES_MAX
from syncvar.protocol.server_directory import ServerTable
from syncvar.transports.zeromq_links import Connections, parse_control_identity
from syncvar.transports.zeromq_sockets import (
    bound_messages,
    milliseconds,
    set_family,
    set_keepalive,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import LinkKeys

_QUEUED = 10_000


class RendezvousServer:
    """Rendezvous and control channels of one job.

    Attributes:
        endpoint: Address with the real port.
        messages: Messages to show.
        stalls: Those of them that report a long wait.
        seen: Returns the visible state of a rank's process, for instance ", CPU busy".
        servers: Locations of the parameter servers; `serve` publishes changes.
        place: Returns the program line of an unresponsive rank, for instance "in user code,
            train.py:49".
        absent: Returns what ranks do that have not joined while others wait for them.
    """

    def __init__(
        self,
        endpoint: str,
        world_size: int,
        job_id: str,
        config: RuntimeConfig,
        generation: int = 0,
        keys: LinkKeys | None = None,
    ) -> None:
        self.coordinator = Coordinator(world_size, job_id, config, generation)
        self.servers = ServerTable(job_id, generation)
        self._sent_version = 0
        self._asking: dict[bytes, int] = {}  # peers that asked for the servers -> their hosts
        self.messages: list[str] = []
        self.stalls: set[str] = set()
        self.seen: Callable[[int], str] = lambda _: ""
        self.place: Callable[[int], str] = lambda _: ""
        self.absent: Callable[[Sequence[int]], str] = lambda _: ""
        self.failure: AbortJob | None = None
        self.refused_messages = 0
        self._peers: dict[int, bytes] = {}
        self._closed: dict[bytes, str] = {}  # closed channels and the reasons
        self._context: zmq.Context[Any] = zmq.Context()
        self._connections = Connections(self._context, config)
        self.socket = self._connections.socket
        try:
            bound_messages(self.socket, CONTROL_NBYTES_MAX, _QUEUED)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.link_opening_s))
            if endpoint.startswith("tcp://"):
                self._listen_to_hosts(endpoint, config, keys)
            self.socket.bind(endpoint)
            self.endpoint = endpoint
            if endpoint.endswith(":*"):
                self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            if self._connections.gate is not None:
                self._connections.gate.guard(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise RendezvousError(
                f"rank 0 cannot listen on {endpoint}: {error.strerror}"
            ) from error
        except BaseException:
            self.close()
            raise

    def _listen_to_hosts(self, endpoint: str, config: RuntimeConfig, keys: LinkKeys | None) -> None:
        if keys is None and config.encryption != "off":
            raise ConfigError(f"rank 0 cannot listen on {endpoint} without the job's secret")
        from syncvar.transports.curve import Gate

        self._connections.gate = Gate(self._context, keys)
        set_family(self.socket, endpoint)
        set_keepalive(self.socket, config)
        if keys is not None:
            keys.listen(self.socket)

    def serve(self, now: float) -> None:
        """Handle all messages that have come, and what is due at `now`."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self._handle([one.bytes for one in frames], now, frames[-1])
            except WireError as error:
                self.refused_messages += 1
                self.messages.append(f"a control message was refused: {error}")
        self._note_closed()
        self._carry_out(self.coordinator.tick(now))
        if self.servers.version != self._sent_version:
            self._sent_version = self.servers.version
            for peer in self._asking:
                self._send_servers(peer)

    def ended(
        self,
        rank: int,
        reason: str,
        now: float,
        status: int | None = None,
        kind: str = "lost",
    ) -> None:
        """Inform the other ranks that a rank ended with an error, and with this status if known.

        `kind` is that of `PeerLost`.
        """
        self._carry_out(self.coordinator.ended(rank, reason, now, status, kind))

    def fence_rank(self, rank: int, reason: str, now: float) -> None:
        """Inform all ranks, including itself, that a rank counts as failed."""
        self._carry_out(self.coordinator.fence_rank(rank, reason, now))

    def finished(self, rank: int, now: float) -> None:
        """Record that a rank ended without error."""
        self._carry_out(self.coordinator.finished(rank, now))

    def take_lost(self, now: float) -> dict[int, str]:
        """Handle messages; return ranks whose channel has closed since the last call, and why."""
        self._note_closed()
        if not self._closed:
            return {}
        closed, self._closed = self._closed, {}
        self.serve(now)
        return {rank: closed[peer] for rank, peer in self._peers.items() if peer in closed}

    def has_closed(self, rank: int, now: float) -> bool:
        """Return whether a rank's channel has closed; handles its messages first."""
        self._note_closed()
        if self._peers.get(rank) not in self._closed:
            return False
        self.serve(now)
        return True

    def take_messages(self) -> list[str]:
        """Return the messages to show since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; flush messages for at most so many seconds. Idempotent."""
        self._connections.close(int(linger_s * 1000))
        self._context.term()

    def _note_closed(self) -> None:
        self._closed |= self._connections.ended()

    def _handle(self, parts: list[bytes], now: float, frame: zmq.Frame) -> None:
        rank = parse_control_identity(parts[0])
        if len(parts) == 2 and parse_control_identity(parts[0], b"S") is not None:
            self._handle_servers(parts[0], parse_message(parts[1]))
            return
        if rank is None or len(parts) != 2:
            self.refused_messages += 1
            return
        message = parse_message(parts[1])
        if message["kind"] == "join":
            if message["rank"] != rank:
                raise WireError(f"rank {rank} claims to be rank {message['rank']}")
            self._note_closed()  # older closures belong to an earlier user of this descriptor
            self._connections.joined(parts[0], frame)
            refused, actions = self.coordinator.join(message, now)
            if refused:  # an unknown peer must not affect the job
                self._connections.refused(frame)
                self._refuse(parts[0], refused)
                return
            self._peers[rank] = parts[0]
            self._carry_out(actions)
        elif self._peers.get(rank) == parts[0]:
            self._carry_out(self.coordinator.message(rank, message, now))
        else:
            self.refused_messages += 1

    def _handle_servers(self, peer: bytes, message: Message) -> None:
        """Handle a message of a server, or a request for the list of servers."""
        if message["kind"] == "holds":
            self.servers.add_replica(message)
            return
        if message["kind"] not in ("serve", "find_servers"):
            raise WireError(f"{message['kind']!r} is no message about servers")
        refused = self.servers.refusal(message) or (
            self.servers.add_server(message) if message["kind"] == "serve" else ""
        )
        if refused:
            self._refuse(peer, refused)
            return
        self._asking[peer] = message["host_index"]
        self._send_servers(peer)

    def _refuse(self, peer: bytes, reason: str) -> None:
        self._send(
            peer, pack_message("refused", error="RendezvousError", reason=reason, missing=[])
        )

    def _send_servers(self, peer: bytes) -> None:
        self._send(peer, self.servers.message_for(self._asking[peer]))

    def _send(self, peer: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([peer, data], zmq.NOBLOCK)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, ShowMessage):
                text = self._with_absent(action.text, action.absent)
                self.messages.append(text)
                if action.is_stall:
                    self.stalls.add(text)
            elif isinstance(action, Unresponsive):
                words = (
                    f"no Python thread answers since {action.seconds:.0f} s{self.seen(action.rank)}"
                )
                self.coordinator.stalls.record_silent(action.rank, words)
                place = self.place(action.rank)
                text = f"rank {action.rank}: {words}"
                self.messages.append(f"{text}, {place}" if place else text)
            elif isinstance(action, AbortJob):
                reason = self._with_absent(action.reason, action.absent)
                self.failure = self.failure or action._replace(reason=reason)
            else:
                peer = self._peers.get(action.rank)
                if peer is not None:
                    self._send(peer, action.data)

    def _with_absent(self, text: str, ranks: Sequence[int]) -> str:
        words = self.absent(ranks) if ranks else ""
        return f"{text}; {words}" if words else text
