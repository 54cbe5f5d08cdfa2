"""Workers and servers in one thread and in virtual time, with a network that delays, loses, doubles and reorders, and crashes.

It drives the same state machines as the processes of a job. All that happens follows from the seed: the same seed gives the same
messages at the same times, so a failure is found again.

Example:
    >>> import numpy as np
    >>> from syncvar.parameter_server.client.request_builder import RequestBuilder
    >>> from syncvar.parameter_server.server.shard import Spec
    >>> def program(rank, incarnation):
    ...     asking = RequestBuilder()
    ...     asking.create(0, "v", Spec((), "int64", "NONE", (), 0), None, np.zeros((), np.int64))
    ...     asking.push(0, "v", "assign_add", np.asarray(rank + 1))
    ...     yield Ask(asking)
    >>> cluster = Cluster(workers=3, servers=1, seed=1, program=program, loss=0.3)
    >>> cluster.run()
    >>> int(cluster.value(0, "v"))
    6
"""

from __future__ import annotations

import hashlib
import heapq
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.process_ids import heirs_of
from syncvar.parameter_server.client.request_client import Client
from syncvar.parameter_server.messages import frames_of, message_of
from syncvar.parameter_server.server.server_machine import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.parameter_server.client.request_builder import RequestBuilder
    from syncvar.parameter_server.client.request_client import Ticket
    from syncvar.parameter_server.messages import Endpoint, OutgoingMessage

_RESEND_S = 0.05


class Ask(NamedTuple):
    """What a program yields: a request, to be resumed with its ticket.

    Args:
        asking: What is asked.
        snapshot: All reads are of one version.
        waits: Go on when it is over, not at once.
    """

    asking: RequestBuilder
    snapshot: bool = False
    waits: bool = True


class _SimulatedWorker:
    """A worker that runs: its client, its program and the request that it waits for."""

    def __init__(self, client: Client, program: Generator[Ask, Ticket, None]) -> None:
        self.client = client
        self.program = program
        self.awaited: Ticket | None = None
        self.is_over = False


class Cluster:
    """A job in virtual time.

    Args:
        workers: Ranks; those beyond, up to `workers + evaluators`, are evaluators.
        servers: How many.
        seed: Decides everything.
        program: Called with rank and incarnation; yields an `Ask`, gets its ticket.
        replicas: 1: each server's ledger has a copy on the next server.
        evaluators: Workers for which nobody waits.
        delay_s: Longest time a message takes; each takes any time up to it, so they overtake each other.
        loss: Probability that a message is lost.
        double: Probability that it comes twice.
        notice_s: Longest time after which a crash is told to the others, to each at a time of its own.
        through_wire: Messages are packed and parsed, as between processes.
    """

    def __init__(
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
        self._through_wire = through_wire
        self._program = program
        self._events: list[tuple[float, int, Any]] = []
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._heirs = [heirs_of(index, [0] * servers, replicas) for index in range(servers)]
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

    # -- what a test does with it ------------------------------------------------------------------

    def kill_worker(self, rank: int, at: float, back_s: float = 0.2) -> None:
        """Kill a worker at a time, and start it again later; one that has ended is left alone."""
        self._at(at, lambda: self._kill_worker(rank, back_s))

    def kill_server(self, server: int, at: float) -> None:
        """Kill a server at a time, or later: once all that it holds is on another one too. The last one is left alone."""
        self._at(at, lambda: self._kill_server(server))

    def run(self, limit_s: float = 1000.0) -> None:
        """Run until all programs have ended.

        Raises:
            AssertionError: They do not end, or one of them raised.
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
        assert not self._unfinished(), f"workers {self._unfinished()} wait for ever"

    def value(self, server: int, key: str) -> NDArray[Any]:
        """Return what a server holds."""
        place = next(one for one in (server, *self._heirs[server]) if one in self.servers)
        there = self.servers[place]
        ledger = (
            there.primaries[server].ledger if server in there.primaries else there.copies[server]
        )
        return ledger.shards[key].array

    @property
    def digest(self) -> str:
        """What stands for all that happened so far."""
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
        """Let a program go on to its next request that it waits for."""
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
                    self._at(
                        self.now + rng.uniform(0, self._delay_s),
                        partial(self._deliver, sender, one),
                    )

    def _deliver(self, sender: Endpoint, outgoing: OutgoingMessage) -> None:
        kind, index = outgoing.target
        message, arrays = outgoing.message, outgoing.arrays
        self.delivered += 1
        told = f"{self.now!r} {sender} {outgoing.target} {message['kind']} {message['server']} {message.get('number')}\n"
        self._digest.update(told.encode())
        if self._through_wire:
            message, arrays = message_of([bytes(frame) for frame in frames_of(message, arrays)])
        if kind == "server":
            if index in self.servers:
                self._send(
                    ("server", index), self.servers[index].handle(sender, message, arrays, self.now)
                )
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

    def _wake_later(self, who: Endpoint, when: float) -> None:
        if when < self._wakes.get(who, float("inf")):
            self._wakes[who] = when
            self._at(max(when, self.now), lambda: self._wake(who))

    def _wake(self, who: Endpoint) -> None:
        self._wakes.pop(who, None)
        kind, index = who
        one: Any = self.servers.get(index) if kind == "server" else self._workers.get(index)
        if one is None:
            return
        machine = one if kind == "server" else one.client
        self._send(who, machine.wake(self.now))
        self._wake_later(
            who, machine.wake_at() if machine.wake_at() > self.now else self.now + _RESEND_S
        )

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
            self._at(self._soon(), partial(self._tell_worker_lost, server, rank, incarnation))

        self._awaited_starts += 1
        self._at(self.now + back_s, partial(self._start, rank, incarnation + 1))

    def _tell_worker_lost(self, server: int, rank: int, incarnation: int) -> None:
        if server in self.servers:
            self._send(
                ("server", server), self.servers[server].worker_lost(rank, incarnation, self.now)
            )

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
            self._at(self._soon(), partial(self._tell_server_lost, ("server", other), server))
        for rank in list(self._workers):
            self._at(self._soon(), partial(self._tell_server_lost, ("worker", rank), server))

    def _tell_server_lost(self, who: Endpoint, server: int) -> None:
        one: Any = self.servers.get(who[1]) if who[0] == "server" else self._workers.get(who[1])
        if one is None:
            return
        machine = one if who[0] == "server" else one.client
        self._send(who, machine.server_lost(server, self.now))
        self._wake_later(who, machine.wake_at())
