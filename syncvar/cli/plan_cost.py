"""Predicted times and traffic of schedules: an interpreter that moves a clock instead of data.

Over links a rank has one port to send and one to receive, used at the same time. A message of b
bytes occupies both ports for latency + b * per_byte; a rank sends in the order of its schedule.
Reductions and copies follow after the transfers of the round. This is the single-port, full-duplex
alpha-beta-gamma model (Hockney 1994; Chan et al. 2007, section 2); formulas of papers test it.

In shared memory a round is a phase: all ranks publish, wait for each other, and read. It costs the
latency, the copies of the slowest rank, and its reductions. The constants are rough measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from syncvar.algorithms.schedule import Copy, Recv, RecvReduce, Reduce, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.algorithms.schedule import Schedule, Step


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of a path.

    Args:
        latency: Seconds of a message, or of a phase in shared memory, whatever its size.
        per_byte: Seconds per byte of a message; in shared memory per byte copied out or in.
        per_reduced_byte: Seconds per byte of a reduction's result.
        per_copied_byte: Seconds per byte of a local copy.
        shared: Whether rounds are phases in shared memory.
    """

    latency: float
    per_byte: float
    per_reduced_byte: float
    per_copied_byte: float
    shared: bool = False

    def text(self) -> str:
        """Return the constants in words."""
        unit = "phase" if self.shared else "message"
        return (
            f"{self.latency * 1e6:.0f} us per {unit}, {self.per_byte * 1e9:.2f} ns per byte, "
            f"{self.per_reduced_byte * 1e9:.2f} ns per byte reduced"
        )


LINKS = CostModel(latency=45e-6, per_byte=0.4e-9, per_reduced_byte=0.1e-9, per_copied_byte=0.1e-9)
"""Unix sockets between processes of one host: a message of Python and libzmq, 2.5 GB/s."""

SHM = CostModel(
    latency=10e-6, per_byte=0.1e-9, per_reduced_byte=0.1e-9, per_copied_byte=0.1e-9, shared=True
)
"""Memory that the ranks of one host share: a wait for all, and copies at 10 GB/s."""


def predicted_seconds(plans: Sequence[Schedule], itemsize: int, model: CostModel = LINKS) -> float:
    """Return the seconds from a common start to the end of the last rank."""
    one_round = _phase if model.shared else _round
    now = [0.0] * len(plans)
    for number in range(max(len(plan.rounds) for plan in plans)):
        steps = [plan.rounds[number] if number < len(plan.rounds) else () for plan in plans]
        now = one_round(steps, now, itemsize, model)
    return max(now)


def _round(
    steps: Sequence[tuple[Step, ...]], now: Sequence[float], itemsize: int, model: CostModel
) -> list[float]:
    """Return when each rank ends a round over links that it begins at `now`."""
    queues = [[step for step in reversed(mine) if isinstance(step, Send)] for mine in steps]
    out_free, in_free, ends = list(now), list(now), list(now)
    heap = [(now[rank], rank) for rank, queue in enumerate(queues) if queue]
    heapify(heap)
    while heap:
        start, rank = heap[0]
        send = queues[rank][-1]
        possible = max(out_free[rank], in_free[send.peer])
        if possible > start:
            heapreplace(heap, (possible, rank))
            continue
        queues[rank].pop()
        end = start + model.latency + send.chunk.count * itemsize * model.per_byte
        out_free[rank] = in_free[send.peer] = end
        ends[rank], ends[send.peer] = max(ends[rank], end), max(ends[send.peer], end)
        if queues[rank]:
            heapreplace(heap, (end, rank))
        else:
            heappop(heap)
    return [end + _local(mine, itemsize, model) for end, mine in zip(ends, steps, strict=True)]


def _phase(
    steps: Sequence[tuple[Step, ...]], now: Sequence[float], itemsize: int, model: CostModel
) -> list[float]:
    """Return when each rank ends a phase; no rank reads before all have published."""
    published = [
        sum(chunk.count for chunk in {step.chunk for step in mine if isinstance(step, Send)})
        for mine in steps
    ]
    received = [sum(step.chunk.count for step in mine if isinstance(step, Recv)) for mine in steps]
    per_element = itemsize * model.per_byte
    ready = model.latency + max(
        begin + count * per_element for begin, count in zip(now, published, strict=True)
    )
    return [
        ready + count * per_element + _local(mine, itemsize, model)
        for count, mine in zip(received, steps, strict=True)
    ]


def _local(steps: tuple[Step, ...], itemsize: int, model: CostModel) -> float:
    seconds = 0.0
    for step in steps:
        if isinstance(step, RecvReduce):
            seconds += step.chunk.count * itemsize * model.per_reduced_byte
        elif isinstance(step, Reduce):
            seconds += step.target.count * itemsize * model.per_reduced_byte
        elif isinstance(step, Copy):
            seconds += step.target.count * itemsize * model.per_copied_byte
    return seconds


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Traffic of schedules.

    Args:
        rounds: Rounds in which some rank sends.
        messages: Messages sent by each rank.
        elements: Elements sent by each rank.
    """

    rounds: int
    messages: tuple[int, ...]
    elements: tuple[int, ...]


def traffic(plans: Sequence[Schedule]) -> TrafficReport:
    """Count rounds, messages and elements of the schedules of all ranks."""
    sends = [
        [step for steps in plan.rounds for step in steps if isinstance(step, Send)]
        for plan in plans
    ]
    sending_rounds = {
        number
        for plan in plans
        for number, steps in enumerate(plan.rounds)
        if any(isinstance(step, Send) for step in steps)
    }
    return TrafficReport(
        rounds=len(sending_rounds),
        messages=tuple(len(steps) for steps in sends),
        elements=tuple(sum(step.chunk.count for step in steps) for steps in sends),
    )
