"""The launcher's end of the control channels: one ROUTER, a coordinator behind it. Imports no NumPy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.errors import ConfigError, RendezvousError, WireError
from syncvar.transports.zeromq import (
    COMING_AND_GOING,
    events_of,
    look_for_silence,
    milliseconds,
    monitor_of,
    parse_control_identity,
    set_family,
)
from syncvar.wire import (
    CONTROL_NBYTES_MAX,
    Action,
    Coordinator,
    Fail,
    Mute,
    Say,
    ServerTable,
    pack_message,
    parse_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.config import RuntimeConfig
    from syncvar.transports.curve import Gate, LinkKeys

__all__ = ["Store"]


class Store:
    """Rendezvous and control of one job.

    Args:
        endpoint: Where to listen, for instance "ipc:///run/user/0/syncvar/x/store", or "tcp://10.0.0.7:*" for any port.
        world_size: Ranks of the job.
        job_id: Its random identity.
        config: Deadlines and intervals.
        generation: The first that ranks may join; those of an earlier one are refused.
        keys: What a tcp endpoint is protected by.

    Attributes:
        stalls: Which of the sentences to show tell of a long wait.
        endpoint: Where it listens.
        seen: Says of a rank what can be seen of its process, for instance ", CPU busy"; nothing unless it is set.
        servers: Where the servers of the job are; what changes there is told by `serve`.
        place: Says where a rank stands of which no Python thread answers, for instance "in user code, train.py:49"; likewise.
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
        self._told_version = 0
        self._asking: dict[bytes, int] = {}  # who has asked for the servers -> its host
        self.said: list[str] = []
        self.stalls: set[str] = set()
        self.seen: Callable[[int], str] = lambda _: ""
        self.place: Callable[[int], str] = lambda _: ""
        self.failure: Fail | None = None
        self.refused_messages = 0
        self._peers: dict[int, bytes] = {}
        self._monitor: Any = None
        self._on_descriptor: dict[int, bytes] = {}  # who has joined by which connection, while they are watched
        self._closed: list[bytes] = []
        self._balance = 0  # of connections that have ended, less those that had been proved
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: Any = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_NBYTES_MAX)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(config.handshake_timeout_s))
        self.socket.setsockopt(zmq.SNDHWM, 10_000)
        self.socket.setsockopt(zmq.RCVHWM, 10_000)
        self._gate: Gate | None = None
        try:
            if endpoint.startswith("tcp://"):
                if keys is None and config.encryption != "off":
                    raise ConfigError(f"nobody may listen on {endpoint} without the job's secret")
                from syncvar.transports.curve import Gate

                self._gate = Gate(self._context, keys)
                self._monitor = monitor_of(self._context, self.socket, COMING_AND_GOING)
                set_family(self.socket, endpoint)
                look_for_silence(self.socket, config)
                if keys is not None:
                    keys.listen(self.socket)
            self.socket.bind(endpoint)
            self.endpoint = endpoint if not endpoint.endswith(":*") else self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            if self._gate is not None:
                self._gate.guard(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise RendezvousError(f"rank 0 cannot listen on {endpoint}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def serve(self, now: float) -> None:
        """Handle every message that has come, and what the clock makes due."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._handle([one.bytes for one in frames], now, frames[-1])
        self._note_closed()
        self._carry_out(self.coordinator.tick(now))
        if self.servers.version != self._told_version:
            self._told_version = self.servers.version
            for peer in self._asking:
                self._tell_servers(peer)

    def ended(self, rank: int, reason: str, now: float) -> None:
        """Tell the others that a rank ended badly."""
        self._carry_out(self.coordinator.ended(rank, reason, now))

    def given_up(self, rank: int, reason: str, now: float) -> None:
        """Tell the others, and the rank itself, that it is counted as lost."""
        self._carry_out(self.coordinator.given_up(rank, reason, now))

    def finished(self, rank: int, now: float) -> None:
        """Note that a rank ended in order."""
        self._carry_out(self.coordinator.finished(rank, now))

    def watch(self) -> None:
        """Begin to watch for channels that close, for `take_lost` or `has_closed`."""
        if self._monitor is None:
            self._monitor = monitor_of(self._context, self.socket, COMING_AND_GOING)

    def take_lost(self, now: float) -> list[int]:
        """Return the ranks whose channel has closed since the last call; what they had said before has been handled."""
        self._note_closed()
        if not self._closed:
            return []
        closed, self._closed = self._closed, []
        self.serve(now)
        return [rank for rank, peer in self._peers.items() if peer in closed]

    def has_closed(self, rank: int, now: float) -> bool:
        """Return whether a rank's channel has closed; what it had said before has been handled then."""
        self._note_closed()
        if self._peers.get(rank) not in self._closed:
            return False
        self.serve(now)
        return True

    def take_said(self) -> list[str]:
        """Return the sentences to show since the last call."""
        said, self.said = self.said, []
        return said

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._monitor is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    @property
    def refused_peers(self) -> int:
        """How many tried to connect over tcp and are no members of the job."""
        return 0 if self._gate is None else self._gate.refused_peers

    def _note_closed(self) -> None:
        for event, descriptor in () if self._monitor is None else events_of(self._monitor):
            self._balance += 1 if event == zmq.EVENT_DISCONNECTED else -1
            peer = self._on_descriptor.pop(descriptor, None) if event == zmq.EVENT_DISCONNECTED else None
            if peer is not None:
                self._closed.append(peer)
        if self._gate is not None:
            self._gate.unproved(self._balance + len(self._on_descriptor))

    def _handle(self, parts: list[bytes], now: float, came: zmq.Frame) -> None:
        rank = parse_control_identity(parts[0])
        if len(parts) == 2 and parse_control_identity(parts[0], b"S") is not None:
            self._handle_servers(parts[0], parts[1])
            return
        if rank is None or len(parts) != 2:
            self.refused_messages += 1
            return
        try:
            message = parse_message(parts[1])
            if message["kind"] == "join":
                if message["rank"] != rank:
                    raise WireError(f"rank {rank} claims to be rank {message['rank']}")
                previous = self._peers.get(rank)
                self._peers[rank] = parts[0]
                if self._monitor is not None:
                    self._note_closed()  # what has closed before was an earlier user of this descriptor
                    self._on_descriptor[int(came.get(zmq.SRCFD))] = parts[0]
                refused, actions = self.coordinator.join(message, now)
                if refused:
                    if self._gate is not None:
                        self._gate.refuse(str(came.get("Peer-Address")))
                    del self._peers[rank]  # a stranger has no say in this job
                    if previous is not None:
                        self._peers[rank] = previous
                    self._send(parts[0], pack_message("refused", error="RendezvousError", reason=refused, missing=[]))
                self._carry_out(actions)
            elif self._peers.get(rank) == parts[0]:
                self._carry_out(self.coordinator.message(rank, message, now))
            else:
                self.refused_messages += 1
        except WireError as error:
            self.refused_messages += 1
            self.said.append(f"a control message was refused: {error}")

    def _handle_servers(self, peer: bytes, data: bytes) -> None:
        """Handle what a server says of itself, or somebody's question for the servers."""
        try:
            message = parse_message(data)
            if message["kind"] == "holds":
                self.servers.holds(message)
                return
            if message["kind"] not in ("serve", "find_servers"):
                raise WireError(f"{message['kind']!r} came where servers are asked for")
            refused = self.servers.refusal(message) or (self.servers.serves(message) if message["kind"] == "serve" else "")
        except WireError as error:
            self.refused_messages += 1
            self.said.append(f"a control message was refused: {error}")
            return
        if refused:
            self._send(peer, pack_message("refused", error="RendezvousError", reason=refused, missing=[]))
            return
        self._asking[peer] = message["host_index"]
        self._tell_servers(peer)

    def _tell_servers(self, peer: bytes) -> None:
        self._send(peer, self.servers.told(self._asking[peer]))

    def _send(self, peer: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([peer, data], zmq.NOBLOCK)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self.said.append(action.text)
                if action.is_stall:
                    self.stalls.add(action.text)
            elif isinstance(action, Mute):
                words = f"no Python thread answers since {action.seconds:.0f} s{self.seen(action.rank)}"
                self.coordinator.stalls.mute(action.rank, words)
                place = self.place(action.rank)
                self.said.append(f"rank {action.rank}: {words}" + (f", {place}" if place else ""))
            elif isinstance(action, Fail):
                self.failure = self.failure or action
            else:
                peer = self._peers.get(action.rank)
                if peer is not None:
                    self._send(peer, action.data)
