"""Simulated worlds in one thread, in which a seed decides everything.

`Simulation` steps collectives and delivers frames late. `Cluster` runs workers and servers in
virtual time, with crashes and an unreliable network. The same seed gives the same steps, so a
failure can be reproduced.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.collectives.groups import Group
from syncvar.core.process_ids import failover_order
from syncvar.parameter_server.messages import frames_of, message_of
from syncvar.parameter_server.request_client import Client
from syncvar.parameter_server.server_machine import Server
from syncvar.protocol.frame import HEADER_NBYTES, parse_header
from syncvar.runtime.communicator import CheckedCall, Communicator
from syncvar.runtime.link_exchange import ScratchPool
from syncvar.runtime.recorder import Recorder, RecordIdentity
from syncvar.runtime.request import RequestState
from syncvar.transports.base import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.parameter_server.messages import Endpoint, OutgoingMessage
    from syncvar.parameter_server.request_client import RequestBuilder, Ticket
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.link_exchange import LinkExchange
    from syncvar.runtime.request import Request

_GROUP = 5
_RESEND_S = 0.05


class Simulation:
    """A world of one group whose collectives run step by step.

    Each step starts a rank's next call or delivers one frame; the seed decides which. A payload is
    read from its borrowed memory as late as possible, at delivery. So the simulation finds
    schedules that overwrite memory which they have sent but may not reuse yet.

    Args:
        world_size: Number of ranks.
        seed: Seed that decides which rank or frame is next.
        overtake_max: Number of frames that a frame may overtake on its link; 0 keeps the order.
        segment_bytes: Largest payload of a frame, in bytes.
        async_depth: Number of calls that a rank may have in progress.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> world = Simulation(3, seed=1)
        >>> world.call(lambda rank, group: sv.all_reduce(np.full(4, rank), group=group))
        >>> [int(result[0]) for result in world.run()[0]]
        [3, 3, 3]
    """

    def __init__(
        self,
        world_size: int,
        seed: int,
        *,
        overtake_max: int = 0,
        segment_bytes: int = 1 << 20,
        async_depth: int = 1,
    ) -> None:
        self.world_size = world_size
        self.steps = 0
        self.frames_sent = 0
        self._random = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
        self._overtake_max, self._async_depth = overtake_max, async_depth
        ranks = range(world_size)
        self._groups = [
            _Recorder(_GROUP, ranks, Recorder(RecordIdentity(rank, world_size)), None)
            for rank in ranks
        ]
        self._calls: list[list[Request]] = [[] for _ in range(world_size)]
        self._started = [0] * world_size
        self._links: dict[tuple[int, int], list[_SimulatedFrame]] = {}
        self._early: list[dict[int, list[Frame]]] = [{} for _ in range(world_size)]
        self._unused: dict[tuple[int, int], int] = {}
        for rank, communicator in enumerate(self._groups):
            communicator.frame_sink = _SimulatedSink(
                self, rank, segment_bytes, self._links, self._unused
            )

    def call(self, make: Callable[[int, Group], Any]) -> None:
        """Add a call that every rank makes.

        Args:
            make: Function of a rank and its group that calls one collective of that group, or
                returns a `CheckedCall`.
        """
        for rank, communicator in enumerate(self._groups):
            checked: CheckedCall = make(rank, Group(communicator))
            number = len(self._calls[rank])
            self._calls[rank].append(communicator.request_of(number, checked))

    def run(self) -> list[list[Any]]:
        """Step until no rank can step, and return for each call the results by rank.

        Raises:
            AssertionError: A call did not end, a frame was left over, or credit was lost.
        """
        while True:
            choices = [link for link, flying in self._links.items() if flying]
            choices += [(rank, -1) for rank in range(self.world_size) if self._may_start(rank)]
            if not choices:
                break
            self.steps += 1
            rank, target = self._random.choice(choices)
            if target < 0:
                self._start(rank)
            else:
                self._deliver((rank, target))
        self._check_end()
        return [
            [self._calls[rank][number].result for rank in range(self.world_size)]
            for number in range(len(self._calls[0]))
        ]

    # -- steps -------------------------------------------------------------------------------------

    def _may_start(self, rank: int) -> bool:
        started = self._started[rank]
        if started == len(self._calls[rank]):
            return False
        running = [one for one in self._calls[rank][:started] if not one.is_over]
        return len(running) < self._async_depth

    def _start(self, rank: int) -> None:
        number = self._started[rank]
        self._started[rank] += 1
        request = self._calls[rank][number]
        request.advance()
        for frame in self._early[rank].pop(number, ()):
            self._hand(rank, request, frame)

    def _deliver(self, link: tuple[int, int]) -> None:
        flying = self._links[link]
        last = min(self._overtake_max, len(flying) - 1)
        item = flying.pop(self._random.randint(0, last) if last else 0)
        payload = b"" if item.payload is None else bytes(item.payload)
        frame = Frame(parse_header(item.header), payload)
        item.is_read = True
        sender = self._calls[link[0]][item.call]
        if sender.state == RequestState.DRAINING:
            sender.advance()
        target = link[1]
        number = frame.header.call
        if number >= self._started[target]:
            self._early[target].setdefault(number, []).append(frame)
        else:
            self._hand(target, self._calls[target][number], frame)

    def _hand(self, rank: int, request: Request, frame: Frame) -> None:
        name = request.label
        is_same = frame.header.fingerprint == request.fingerprint
        assert is_same, f"{name}: a frame of another call"
        assert not request.is_over, f"{name}: a frame came after the end on rank {rank}"
        request.accept(frame)
        if request.state == RequestState.DRAINING:
            request.advance()

    def _check_end(self) -> None:
        for rank, requests in enumerate(self._calls):
            for request in requests:
                if request.error is not None:
                    raise request.error
                assert request.state == RequestState.DONE, (
                    f"rank {rank} is in {request.label} (call {request.call + 1}), waiting for "
                    f"{request.awaiting}"
                )
                unused = request.unused_frames()
                assert not unused, f"{request.label}: frames were left over on rank {rank}"
        assert not any(self._early), "frames of calls that were never made"
        lost = {link: nbytes for link, nbytes in self._unused.items() if nbytes}
        assert not lost, f"bytes that no rank reported as consumed: {lost}"


class _SimulatedFrame:
    """A frame on its way; it borrows its payload."""

    __slots__ = ("call", "header", "is_read", "payload")

    def __init__(self, call: int, header: bytes, payload: memoryview | None) -> None:
        self.call, self.header, self.payload = call, header, payload
        self.is_read = False

    def is_done(self) -> bool:
        return self.is_read


class _SimulatedSink:
    generation = 0

    def __init__(
        self,
        world: Simulation,
        rank: int,
        segment_bytes: int,
        links: dict[tuple[int, int], list[_SimulatedFrame]],
        unused: dict[tuple[int, int], int],
    ) -> None:
        self.rank, self.segment_bytes, self.scratch = rank, segment_bytes, ScratchPool()
        self._world, self._links, self._unused = world, links, unused

    def post(
        self, links: LinkExchange, peer: int, header: bytes, payload: memoryview | None
    ) -> None:
        item = _SimulatedFrame(links.call, header, payload)
        if payload is not None:
            links.loans.append(item)
        link = (self.rank, peer)
        self._links.setdefault(link, []).append(item)
        nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
        self._unused[link] = self._unused.get(link, 0) + nbytes
        self._world.frames_sent += 1

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        assert group == _GROUP, f"credit for group {group}"
        self._unused[peer, self.rank] -= nbytes + HEADER_NBYTES


class _Recorder(Communicator):
    """A group that checks calls and returns their specs instead of running them."""

    def perform(
        self,
        name: str | CollectiveSpec,
        check: Callable[[], CheckedCall],
        timeout: float | None = None,
        *,
        async_op: bool = False,
        after_queued: bool = True,
    ) -> Any:
        del name, timeout, async_op, after_queued
        return check()


class Ask(NamedTuple):
    """A request that a program yields; it resumes with the request's ticket.

    Args:
        asking: The request.
        snapshot: Whether all its reads see one version.
        waits: Whether the program resumes when the request is over, not at once.
    """

    asking: RequestBuilder
    snapshot: bool = False
    waits: bool = True


class _SimulatedWorker:
    """A running worker: its client, its program and the ticket that it waits for."""

    def __init__(self, client: Client, program: Generator[Ask, Ticket, None]) -> None:
        self.client, self.program = client, program
        self.awaited: Ticket | None = None
        self.is_over = False


class Cluster:
    """A job of workers and servers in virtual time.

    The network delays, drops, duplicates and reorders messages. The cluster drives the same state
    machines as the processes of a job.

    Args:
        workers: Number of workers; higher ranks, up to `workers + evaluators`, are evaluators.
        servers: Number of servers.
        seed: Seed of all random decisions.
        program: Generator function of (rank, incarnation) that yields `Ask` and gets its ticket.
        replicas: 1 if each server's state has a replica on the next server, else 0.
        evaluators: Number of workers for which nobody waits.
        delay_s: Longest delay of a message, in seconds; delays are random, so messages overtake.
        loss: Probability that a message is dropped.
        double: Probability that a message is duplicated.
        notice_s: Longest time until a process learns of a crash, in seconds.
        through_wire: Whether messages are packed and parsed, as between processes.

    Example:
        >>> import numpy as np
        >>> from syncvar.parameter_server.request_client import RequestBuilder
        >>> from syncvar.parameter_server.shard import Spec
        >>> def program(rank, incarnation):
        ...     asking = RequestBuilder()
        ...     spec, zero = Spec((), "int64", "NONE", (), 0), np.zeros((), np.int64)
        ...     asking.create(0, "v", spec, None, zero)
        ...     asking.push(0, "v", "assign_add", np.asarray(rank + 1))
        ...     yield Ask(asking)
        >>> cluster = Cluster(workers=3, servers=1, seed=1, program=program, loss=0.3)
        >>> cluster.run()
        >>> int(cluster.value(0, "v"))
        6
    """

    def __init__(  # noqa: PLR0913  (public signature)
        self,
        workers: int,
        servers: int,
        seed: int,
        program: Callable[[int, int], Generator[Ask, Ticket, None]],
        *,
        replicas: int = 0,
        evaluators: int = 0,
        delay_s: float = 0.01,
        loss: float = 0.0,
        double: float = 0.0,
        notice_s: float = 0.1,
        through_wire: bool = False,
    ) -> None:
        self.now = 0.0
        self.delivered = 0
        self.errors: dict[int, Exception] = {}
        self._random = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
        self._delay_s, self._loss, self._double, self._notice_s = delay_s, loss, double, notice_s
        self._through_wire, self._program = through_wire, program
        self._events: list[tuple[float, int, Any]] = []
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._heirs = [failover_order(index, [0] * servers, replicas) for index in range(servers)]
        self.servers: dict[int, Server] = {
            index: Server(index, workers, self._heirs, resend_s=_RESEND_S)
            for index in range(servers)
        }
        self._server_count = servers
        self.lost: list[int] = []
        self._workers: dict[int, _SimulatedWorker] = {}
        self._awaited_starts = workers + evaluators
        for rank in range(workers + evaluators):
            self._at(self._random.uniform(0, delay_s), partial(self._start, rank, 0))
        self._wakes: dict[Endpoint, float] = {}

    # -- used by tests -----------------------------------------------------------------------------

    def kill_worker(self, rank: int, at: float, back_s: float = 0.2) -> None:
        """Kill a worker at a time and restart it `back_s` later, unless it has ended."""
        self._at(at, lambda: self._kill_worker(rank, back_s))

    def kill_server(self, server: int, at: float) -> None:
        """Kill a server at a time, or once others hold all its state; never the last server."""
        self._at(at, lambda: self._kill_server(server))

    def run(self, limit_s: float = 1000.0) -> None:
        """Run until all programs have ended.

        Args:
            limit_s: Limit of virtual time, in seconds.

        Raises:
            AssertionError: They do not end. An exception of a program is raised as it is.
        """
        while self._events and (self._awaited_starts or self._unfinished()):
            at, _, act = heapq.heappop(self._events)
            self.now = at
            assert at < limit_s, (
                f"workers {self._unfinished()} have not ended after {limit_s:g} s of virtual time"
            )
            act()
            if self.errors:
                raise next(iter(self.errors.values()))
        assert not self._unfinished(), f"workers {self._unfinished()} wait forever"

    def value(self, server: int, key: str) -> NDArray[Any]:
        """Return the value of a variable on a server, or on the replica that replaces it."""
        holder = next(one for one in (server, *self._heirs[server]) if one in self.servers)
        machine = self.servers[holder]
        if server in machine.primaries:
            return machine.primaries[server].ledger.shards[key].array
        return machine.copies[server].shards[key].array

    @property
    def digest(self) -> str:
        """Digest of all messages so far."""
        return self._digest.hexdigest()

    # -- events ------------------------------------------------------------------------------------

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def _unfinished(self) -> list[int]:
        return [rank for rank, one in self._workers.items() if not one.is_over]

    def _start(self, rank: int, incarnation: int) -> None:
        self._awaited_starts -= 1
        client = Client(rank, incarnation, self._server_count, self._heirs, resend_s=_RESEND_S)
        process = self._workers[rank] = _SimulatedWorker(client, self._program(rank, incarnation))
        for server in self.lost:
            client.server_lost(server, self.now)
        self._step(rank, process, None)

    def _step(self, rank: int, process: _SimulatedWorker, ticket: Ticket | None) -> None:
        """Run a program up to its next request that it waits for."""
        try:
            while True:
                ask = next(process.program) if ticket is None else process.program.send(ticket)
                make = process.client.snapshot if ask.snapshot else process.client.request
                ticket, outgoing = make(ask.asking.parts(), self.now)
                self._send(("worker", rank), outgoing)
                if ask.waits:
                    process.awaited = ticket
                    break
        except StopIteration:
            process.is_over = True
        except Exception as error:  # the test's own, raised by `run`
            self.errors[rank] = error
        self._wake_later(("worker", rank), process.client.wake_at())

    def _send(self, sender: Endpoint, outgoing: list[OutgoingMessage]) -> None:
        rng = self._random
        for one in outgoing:
            for _ in range(2 if rng.random() < self._double else 1):
                if rng.random() >= self._loss:
                    arrival = self.now + rng.uniform(0, self._delay_s)
                    self._at(arrival, partial(self._deliver, sender, one))

    def _deliver(self, sender: Endpoint, outgoing: OutgoingMessage) -> None:
        kind, index = outgoing.target
        message, arrays = outgoing.message, outgoing.arrays
        self.delivered += 1
        name = f"{message['kind']} {message['server']} {message.get('number')}"
        self._digest.update(f"{self.now!r} {sender} {outgoing.target} {name}\n".encode())
        if self._through_wire:
            message, arrays = message_of([bytes(frame) for frame in frames_of(message, arrays)])
        if kind == "server":
            if index in self.servers:
                answers = self.servers[index].handle(sender, message, arrays, self.now)
                self._send(("server", index), answers)
                self._wake_later(outgoing.target, self.servers[index].wake_at())
            return
        process = self._workers.get(index)
        if process is None or (process.is_over and not process.client.unanswered):
            return
        self._send(outgoing.target, process.client.handle(sender, message, arrays, self.now))
        self._wake_later(outgoing.target, process.client.wake_at())
        ticket = process.awaited
        if ticket is not None and ticket.is_over:
            process.awaited = None
            self._step(index, process, ticket)

    def _wake_later(self, process: Endpoint, when: float) -> None:
        if when < self._wakes.get(process, float("inf")):
            self._wakes[process] = when
            self._at(max(when, self.now), lambda: self._wake(process))

    def _machine(self, process: Endpoint) -> Any:
        kind, index = process
        if kind == "server":
            return self.servers.get(index)
        return self._workers[index].client if index in self._workers else None

    def _wake(self, process: Endpoint) -> None:
        self._wakes.pop(process, None)
        machine = self._machine(process)
        if machine is None:
            return
        self._send(process, machine.wake(self.now))
        when = machine.wake_at()
        self._wake_later(process, when if when > self.now else self.now + _RESEND_S)

    # -- crashes -----------------------------------------------------------------------------------

    def _soon(self) -> float:
        return self.now + self._random.uniform(0, self._notice_s)

    def _kill_worker(self, rank: int, back_s: float) -> None:
        process = self._workers.get(rank)
        if process is None or process.is_over:
            return
        incarnation = process.client.incarnation
        process.program.close()
        del self._workers[rank]
        for server in list(self.servers):
            self._at(self._soon(), partial(self._report_worker, server, rank, incarnation))
        self._awaited_starts += 1
        self._at(self.now + back_s, partial(self._start, rank, incarnation + 1))

    def _report_worker(self, server: int, rank: int, incarnation: int) -> None:
        if server in self.servers:
            messages = self.servers[server].worker_lost(rank, incarnation, self.now)
            self._send(("server", server), messages)

    def _kill_server(self, server: int) -> None:
        others = [one for index, one in self.servers.items() if index != server]
        if not all(
            any(ledger in one.primaries or ledger in one.copies for one in others)
            for ledger in range(self._server_count)
        ):
            if len(self.servers) > 1 and self._unfinished():
                self._at(self.now + _RESEND_S, partial(self._kill_server, server))
            return
        del self.servers[server]
        self.lost.append(server)
        for other in list(self.servers):
            self._at(self._soon(), partial(self._report_server, ("server", other), server))
        for rank in list(self._workers):
            self._at(self._soon(), partial(self._report_server, ("worker", rank), server))

    def _report_server(self, process: Endpoint, server: int) -> None:
        machine = self._machine(process)
        if machine is not None:
            self._send(process, machine.server_lost(server, self.now))
            self._wake_later(process, machine.wake_at())
