"""A world in one thread: a seeded scheduler steps collectives and delivers frames late.

Each step starts a rank's next call or delivers one frame; the seed decides which. A payload is
read from its borrowed memory as late as possible, at delivery. So the simulation finds schedules
that overwrite memory which they have sent but may not reuse yet.

Example:
    >>> import numpy as np, syncvar as sv
    >>> world = Simulation(3, seed=1)
    >>> world.call(lambda rank, group: sv.all_reduce(np.full(4, rank), group=group))
    >>> [int(result[0]) for result in world.run()[0]]
    [3, 3, 3]
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from syncvar.collectives.groups import Group
from syncvar.protocol.frame import HEADER_NBYTES, parse_header
from syncvar.runtime.communicator import CollectiveSpec, Communicator
from syncvar.runtime.recorder import Recorder, RecordIdentity
from syncvar.runtime.request import RequestState
from syncvar.transports.base import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.runtime.link_exchange import LinkExchange
    from syncvar.runtime.request import Request

_GROUP = 5


class Simulation:
    """A world of one group whose collectives run step by step.

    Args:
        world_size: Number of ranks.
        seed: Seed that decides which rank or frame is next.
        overtake_max: Number of frames that a frame may overtake on its link; 0 keeps the order.
        segment_bytes: Largest payload of a frame, in bytes.
        async_depth: Number of calls that a rank may have in progress.
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
        self._overtake_max = overtake_max
        self._async_depth = async_depth
        self._groups = [
            _Recorder(_GROUP, range(world_size), Recorder(RecordIdentity(rank, world_size)), None)
            for rank in range(world_size)
        ]
        for rank, communicator in enumerate(self._groups):
            communicator.frame_sink = _SimulatedSink(self, rank, segment_bytes)
        self._calls: list[list[Request]] = [[] for _ in range(world_size)]
        self._started = [0] * world_size
        self._links: dict[tuple[int, int], list[_SimulatedFrame]] = {}
        self._early: list[dict[int, list[Frame]]] = [{} for _ in range(world_size)]
        self._unused: dict[tuple[int, int], int] = {}

    def call(self, make: Callable[[int, Group], Any]) -> None:
        """Add a call that every rank makes.

        Args:
            make: Function of a rank and its group that calls one collective of that group, or
                returns a `CollectiveSpec`.
        """
        for rank, communicator in enumerate(self._groups):
            request: CollectiveSpec = make(rank, Group(communicator))
            number = len(self._calls[rank])
            self._calls[rank].append(communicator.operation(number, request))

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
        operation = self._calls[rank][number]
        operation.advance()
        for frame in self._early[rank].pop(number, ()):
            self._hand(rank, operation, frame)

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

    def _hand(self, rank: int, operation: Request, frame: Frame) -> None:
        name = operation.label
        is_same = frame.header.fingerprint == operation.fingerprint
        assert is_same, f"{name}: a frame of another call"
        assert not operation.is_over, f"{name}: a frame came after the end on rank {rank}"
        operation.accept(frame)
        if operation.state == RequestState.DRAINING:
            operation.advance()

    def _check_end(self) -> None:
        for rank, operations in enumerate(self._calls):
            for operation in operations:
                if operation.error is not None:
                    raise operation.error
                assert operation.state == RequestState.DONE, (
                    f"rank {rank} is in {operation.label} (call {operation.call + 1}), waiting for "
                    f"{operation.awaiting}"
                )
                unused = operation.unused_frames()
                assert not unused, f"{operation.label}: frames were left over on rank {rank}"
        assert not any(self._early), "frames of calls that were never made"
        lost = {link: nbytes for link, nbytes in self._unused.items() if nbytes}
        assert not lost, f"bytes that no rank reported as consumed: {lost}"


class _SimulatedFrame:
    """A frame on its way; it borrows its payload."""

    __slots__ = ("call", "header", "is_read", "payload")

    def __init__(self, call: int, header: bytes, payload: memoryview | None) -> None:
        self.call = call
        self.header = header
        self.payload = payload
        self.is_read = False

    def is_done(self) -> bool:
        return self.is_read


class _SimulatedSink:
    generation = 0

    def __init__(self, world: Simulation, rank: int, segment_bytes: int) -> None:
        self.rank = rank
        self.segment_bytes = segment_bytes
        self._world = world

    def post(
        self, links: LinkExchange, peer: int, header: bytes, payload: memoryview | None
    ) -> None:
        world = self._world
        item = _SimulatedFrame(links.call, header, payload)
        if payload is not None:
            links.loans.append(item)
        link = (self.rank, peer)
        world._links.setdefault(link, []).append(item)  # noqa: SLF001
        nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
        world._unused[link] = world._unused.get(link, 0) + nbytes  # noqa: SLF001
        world.frames_sent += 1

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        assert group == _GROUP, f"credit for group {group}"
        self._world._unused[peer, self.rank] -= nbytes + HEADER_NBYTES  # noqa: SLF001


class _Recorder(Communicator):
    """A group that checks calls and returns their specs instead of running them."""

    def perform(
        self,
        name: str,
        check: Callable[[], CollectiveSpec],
        timeout: float | None = None,
        *,
        async_op: bool = False,
        after_queued: bool = True,
    ) -> Any:
        del name, timeout, async_op, after_queued
        return check()
