"""The server end of the control channels: one ROUTER socket and a coordinator. Imports no NumPy.

The launcher runs it; without a launcher, rank 0's process does (`HostService`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core.errors import ConfigError, RendezvousError, WireError
from syncvar.core.host_clock import boot_identity
from syncvar.core.process_ids import RANKS, ProcessNames, is_server, process_name
from syncvar.protocol.control_messages import Message, pack_message, parse_message
from syncvar.protocol.coordinator import AbortJob, Action, Coordinator, ShowMessage, Unresponsive
from syncvar.protocol.frame import CONTROL_NBYTES_MAX
from syncvar.protocol.observer import Observer
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
        kinds: The kind of each: "stall", "straggler" or "notice".
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
        self._job_id, self._config = job_id, config
        # What is known of pairs of hosts, for all generations of an elastic job.
        self._host_rates: dict[tuple[str, str], tuple[int, int]] = {}
        self._seat(range(world_size), generation)
        self.enrollments: list[tuple[int, Message]] = []  # messages of workers of an elastic job
        self._worker_peers: dict[int, bytes] = {}
        self._incarnations: dict[int, int] = {}  # the newest process of each worker
        self.servers = ServerTable(job_id, generation)
        self._sent_version = 0
        self._asking: dict[bytes, int] = {}  # peers that asked for the servers -> their hosts
        self.messages: list[str] = []
        self.kinds: dict[str, str] = {}
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

    def _seat(self, workers: Sequence[int], generation: int, names: ProcessNames = RANKS) -> None:
        """Begin a membership of these workers, in the order of their ranks."""
        observer = Observer(self._config.observe_interval_s, boot_identity(), time.monotonic_ns)
        self.coordinator = Coordinator(
            len(workers), self._job_id, self._config, generation, observer, names
        )
        self.coordinator.network.known = self._host_rates
        self._names = names
        self.workers = tuple(workers)
        self._ranks = {worker: rank for rank, worker in enumerate(workers)}

    def begin_generation(self, workers: Sequence[int], generation: int) -> None:
        """Begin the next generation of an elastic job; refuse all further messages of the last."""
        self._seat(workers, generation, ProcessNames("worker", workers))
        self._peers.clear()
        self._closed.clear()  # each generation has channels of its own
        self.failure = None

    def rank_of(self, worker: int) -> int | None:
        """Return the rank of a worker in the present membership; None for others.

        A server has its number for a rank.
        """
        return worker if is_server(worker) else self._ranks.get(worker)

    def is_member(self, worker: int) -> bool:
        """Return whether a worker has joined the present membership, and has not left."""
        rank = self.rank_of(worker)
        return rank in self.coordinator.handshake.members and rank not in self.coordinator.left

    def send_to_worker(self, worker: int, data: bytes) -> None:
        """Send a message to a worker of an elastic job that has enrolled before."""
        peer = self._worker_peers.get(worker)
        if peer is not None:
            self._send(peer, data)

    def restarted(self, worker: int, incarnation: int) -> None:
        """Note that a new process replaces one; refuse messages of earlier ones to the launcher."""
        self.servers.restarted(worker, incarnation)
        self._incarnations[worker] = incarnation
        self._worker_peers.pop(worker, None)

    def position(self, worker: int) -> str:
        """Return the last known state of a worker, for the failure report."""
        rank = self.rank_of(worker)
        if rank is None:
            return f"not a member of generation {self.coordinator.handshake.generation}"
        return self.coordinator.position(rank)

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
        worker: int,
        reason: str,
        now: float,
        status: int | None = None,
        kind: str = "lost",
    ) -> None:
        """Inform the other ranks that a worker ended with an error, and its status if known.

        `kind` is that of `PeerLost`.
        """
        rank = self.rank_of(worker)
        if rank is not None:
            self._carry_out(self.coordinator.ended(rank, reason, now, status, kind))

    def fence_rank(self, worker: int, reason: str, now: float) -> None:
        """Inform all ranks, including its own, that a worker counts as failed."""
        rank = self.rank_of(worker)
        if rank is not None:
            self._carry_out(self.coordinator.fence_rank(rank, reason, now))

    def finished(self, worker: int, now: float) -> None:
        """Record that a worker ended without error."""
        rank = self.rank_of(worker)
        if rank is not None:
            self._carry_out(self.coordinator.finished(rank, now))

    def take_lost(self, now: float) -> dict[int, str]:
        """Handle messages; return ranks whose channel has closed since the last call, and why."""
        self._note_closed()
        if not self._closed:
            return {}
        closed, self._closed = self._closed, {}
        self.serve(now)
        return {rank: closed[peer] for rank, peer in self._peers.items() if peer in closed}

    def has_closed(self, worker: int, now: float) -> bool:
        """Return whether a worker's channel has closed; handles its messages first."""
        self._note_closed()
        rank = self.rank_of(worker)
        if rank is None or self._peers.get(rank) not in self._closed:
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
        if len(parts) == 2 and (worker := parse_control_identity(parts[0], b"E")) is not None:
            self._handle_worker(worker, parts[0], parse_message(parts[1]))
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

    def _handle_worker(self, worker: int, peer: bytes, message: Message) -> None:
        """Keep a message of a worker of an elastic job about its membership, for the launcher."""
        kind = message["kind"]
        if kind not in ("enroll", "leaving"):
            raise WireError(f"{kind!r} is no message about the membership")
        if kind == "enroll":
            if message["job"] != self._job_id:
                raise WireError("a worker of another job tried to enroll")
            newest = self._incarnations.get(worker, 0)
            if message["incarnation"] < newest:  # of an earlier process, which has ended
                self.refused_messages += 1
                return
            self._incarnations[worker] = message["incarnation"]
            self._worker_peers[worker] = peer
        if self._worker_peers.get(worker) == peer:
            self.enrollments.append((worker, message))
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
                self.kinds[text] = action.kind
            elif isinstance(action, Unresponsive):
                worker = self.workers[action.rank]
                words = f"no Python thread answers since {action.seconds:.0f} s{self.seen(worker)}"
                self.coordinator.stalls.record_silent(action.rank, words)
                place = self.place(worker)
                text = f"{process_name(action.rank, self._names)}: {words}"
                self.messages.append(f"{text}, {place}" if place else text)
            elif isinstance(action, AbortJob):
                reason = self._with_absent(action.reason, action.absent)
                self.failure = self.failure or action._replace(reason=reason)
            else:
                peer = self._peers.get(action.rank)
                if peer is not None:
                    self._send(peer, action.data)

    def _with_absent(self, text: str, ranks: Sequence[int]) -> str:
        words = self.absent([self.workers[rank] for rank in ranks]) if ranks else ""
        return f"{text}; {words}" if words else text
