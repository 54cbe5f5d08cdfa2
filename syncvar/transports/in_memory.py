"""Frames within one process: a world as threads, or as steps of one thread, with seeded faults.

The network's decisions (delay, loss, reordering, cut links) depend on the seed, the link and the
frame's number on that link. They never depend on how threads happen to run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncvar.protocol.control_messages import Message, parse_message
from syncvar.protocol.coordinator import AbortJob, Action, Coordinator, ShowMessage, Unresponsive
from syncvar.protocol.frame import FrameType, parse_header
from syncvar.transports.base import Arrival, Frame, PeerDisconnected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.transports.base import BorrowedFrame, Placer


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults that the network causes.

    Each decision depends on the seed, the link, whether the frame is DATA, and its number among
    such frames.

    Args:
        seed: Seed of all decisions.
        delay_max: Largest delay of a frame, in looks of its receiver.
        reorder: Probability that a frame overtakes the one before it on its link.
        loss: Probability that a DATA frame vanishes. No real transport does that; the call must end
            by its deadline.
        cut: (source, target, number): the link is cut before its frame of that number; both ends
            see `PeerDisconnected`.
    """

    seed: int = 0
    delay_max: int = 0
    reorder: float = 0.0
    loss: float = 0.0
    cut: tuple[int, int, int] | None = None


@dataclass(slots=True)
class _FrameInFlight:
    due: int
    frame: Frame


class MemoryNetwork:
    """The links between the ranks of one in-process world, with the launcher's coordinator."""

    def __init__(
        self, world_size: int, faults: Faults | None = None, coordinator: Coordinator | None = None
    ) -> None:
        self.world_size = world_size
        self.faults = faults or Faults()
        self.coordinator = coordinator
        self.lock = threading.RLock()
        self.arrived = [threading.Condition(self.lock) for _ in range(world_size)]
        ranks = range(world_size)
        self.flying: list[deque[_FrameInFlight]] = [deque() for _ in ranks]
        self.control: list[deque[bytes]] = [deque() for _ in ranks]
        self.events: list[deque[PeerDisconnected]] = [deque() for _ in ranks]
        self.looks = [0] * world_size
        self.woken = [False] * world_size  # for `wait`
        self.woken_idle = [False] * world_size
        self.messages: list[str] = []
        self.frames_sent = 0
        self._random: dict[tuple[int, int, bool], random.Random] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._dead_links: set[tuple[int, int]] = set()
        self._generation = 0

    def post(self, source: int, target: int, frame: Frame) -> None:
        """Queue a frame from `source` for `target`."""
        link = (source, target)
        with self.lock:
            if link in self._dead_links:
                return
            number = self._numbers.get(link, 0)
            self._numbers[link] = number + 1
            faults = self.faults
            if faults.cut is not None and link == faults.cut[:2] and number >= faults.cut[2]:
                self.cut(source, target)
                return
            self.frames_sent += 1
            is_data = frame.header.kind == FrameType.DATA
            delay, overtakes, is_lost = self._decide(source, target, is_data=is_data)
            if is_lost and is_data:
                return
            queue = self.flying[target]
            item = _FrameInFlight(self.looks[target] + delay, frame)
            if overtakes:
                queue.appendleft(item)
            else:
                queue.append(item)
            self.arrived[target].notify_all()

    def _decide(self, source: int, target: int, *, is_data: bool) -> tuple[int, bool, bool]:
        """Return (delay, overtakes, is lost) of the next frame of a link.

        Credit frames have their own decisions, because the time when a rank sends them depends on
        the threads.
        """
        faults = self.faults
        if not (faults.delay_max or faults.reorder or faults.loss):
            return 0, False, False
        draw = self._random.get((source, target, is_data))
        if draw is None:
            text = f"{faults.seed}/{source}/{target}/{is_data}"
            draw = random.Random(text)  # noqa: S311  (faults, not secrets)
            self._random[source, target, is_data] = draw
        delay = draw.randint(0, faults.delay_max)
        return delay, draw.random() < faults.reorder, draw.random() < faults.loss

    def open(self, generation: int) -> None:
        """Begin a generation when its first rank opens; all ranks have left the one before."""
        with self.lock:
            if generation != self._generation:
                self._generation = generation
                self._dead_links.clear()
                for flying, events in zip(self.flying, self.events, strict=True):
                    flying.clear()
                    events.clear()

    def leave(self, rank: int, *, orderly: bool) -> None:
        """Close all links of a rank; if it is not orderly, the others see `PeerDisconnected`."""
        with self.lock:
            for peer in range(self.world_size):
                if peer != rank and orderly:
                    self._dead_links |= {(rank, peer), (peer, rank)}
                elif peer != rank:
                    self.cut(rank, peer)

    def cut(self, source: int, target: int) -> None:
        """Cut both directions between two ranks."""
        with self.lock:
            for a, b in ((source, target), (target, source)):
                if (a, b) not in self._dead_links:
                    self._dead_links.add((a, b))
                    self.events[b].append(PeerDisconnected(a, "connection cut"))
                    self.arrived[b].notify_all()

    def take(self, rank: int) -> Arrival | None:
        """Return a rank's next arrival; frames of a link keep their order without faults."""
        with self.lock:
            self.looks[rank] += 1
            look = self.looks[rank]
            queue = self.flying[rank]
            blocked: set[int] = set()
            for index, item in enumerate(queue):
                source = item.frame.header.source
                if item.due > look or (source in blocked and self.faults.reorder == 0):
                    blocked.add(source)
                    continue
                del queue[index]
                return item.frame
            if not queue and self.events[rank]:
                return self.events[rank].popleft()
            return None

    def wait(self, rank: int, timeout_s: float) -> bool:
        """Wait until something may have arrived for a rank."""
        with self.lock:
            self.tick()
            if not (self._has_news(rank) or self.woken[rank]):
                self.arrived[rank].wait(min(timeout_s, 0.05))
            self.woken[rank] = False
            return True

    def wait_idle(self, rank: int, timeout_s: float) -> None:
        """Wait like `wait`, without taking part in the driver's work."""
        with self.lock:
            if not (self._has_news(rank) or self.woken_idle[rank]):
                self.arrived[rank].wait(timeout_s)
            self.woken_idle[rank] = False

    def _has_news(self, rank: int) -> bool:
        return bool(self.flying[rank] or self.events[rank] or self.control[rank])

    def wake(self, rank: int) -> None:
        """Make `wait` and `wait_idle` of a rank return, each once."""
        with self.lock:
            self.woken[rank] = self.woken_idle[rank] = True
            self.arrived[rank].notify_all()

    def tick(self) -> None:
        """Let the coordinator check its deadlines."""
        if self.coordinator is not None:
            self.carry_out(self.coordinator.tick(time.monotonic()))

    def send_to_coordinator(self, rank: int, data: bytes) -> None:
        """Pass a control message of a rank to the coordinator."""
        with self.lock:
            if self.coordinator is None:
                return
            message = parse_message(data)
            now = time.monotonic()
            if message["kind"] == "join":
                refused, actions = self.coordinator.join(message, now)
                if refused:
                    raise ValueError(refused)
                self.carry_out(actions)
            else:
                self.carry_out(self.coordinator.message(rank, message, now))

    def ended(self, rank: int, reason: str) -> None:
        """Report the failure of a rank to the coordinator, as the launcher would."""
        with self.lock:
            if self.coordinator is not None:
                now = time.monotonic()
                self.carry_out(self.coordinator.ended(rank, reason, now, kind="raised"))

    def carry_out(self, actions: list[Action]) -> None:
        """Carry out the decisions of the coordinator."""
        for action in actions:
            if isinstance(action, ShowMessage):
                self.messages.append(action.text)
            elif isinstance(action, AbortJob):
                self.messages.append(action.reason)
            elif isinstance(action, Unresponsive):
                self.messages.append(
                    f"rank {action.rank}: no Python thread answers since {action.seconds:.0f} s"
                )
            else:
                self.control[action.rank].append(action.data)
                self.arrived[action.rank].notify_all()


class MemoryTransport:
    """One rank's end of a `MemoryNetwork`; `syncvar.transports.base` has the contract."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.placer: Placer | None = None
        self._network = network
        self._rank = rank
        self._closed = False

    @property
    def address(self) -> str:
        """Where peers reach this rank."""
        return f"memory://{self._rank}"

    @property
    def outside(self) -> str:
        """The same address: an in-process world has no other hosts."""
        return self.address

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Begin a generation; the network knows the peers."""
        del addresses
        self._network.open(generation)

    def send(
        self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False
    ) -> BorrowedFrame | None:
        """Copy a frame to the peer's queue."""
        del borrow
        data = bytes(payload) if payload is not None else b""
        self._network.post(self._rank, peer, Frame(parse_header(header), data))
        return None

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None."""
        return self._network.take(self._rank)

    def wait(self, timeout_s: float) -> bool:
        """Wait for anything."""
        return self._network.wait(self._rank, timeout_s)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until something may have arrived, without taking it."""
        self._network.wait_idle(self._rank, timeout_s)

    def wake(self) -> None:
        """Make `wait` return."""
        self._network.wake(self._rank)

    def close(self, linger_s: float) -> None:
        """Close all links, orderly unless `linger_s` is 0."""
        if not self._closed:
            self._closed = True
            self._network.leave(self._rank, orderly=linger_s > 0)


class MemoryControl:
    """One rank's control channel; a new channel drops the messages of the one before."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        self.keeper: int | None = None
        with network.lock:
            network.control[rank].clear()

    def send(self, data: bytes) -> None:
        """Send a control message."""
        self._network.send_to_coordinator(self._rank, data)

    def receive(self) -> Message | None:
        """Return the next control message, or None."""
        with self._network.lock:
            queue = self._network.control[self._rank]
            return parse_message(queue.popleft()) if queue else None

    def close(self, linger_s: float) -> None:
        """Close the channel."""
        del linger_s
