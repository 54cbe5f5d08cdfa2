"""Schedules made of other schedules: with WORK in other places, or with fewer transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    Reduce,
    Send,
    consecutive_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.algorithms.schedule import Schedule, Step


def common_chunk(one: Chunk, other: Chunk) -> Chunk:
    """Return the elements that two chunks of WORK have in common."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Chunk(start, stop) if start < stop else Chunk(0, 0)


def relocated(plan: Schedule, places: Sequence[Chunk]) -> Schedule:
    """Return a schedule whose WORK lies in several places, one after another."""
    packed = consecutive_chunks(place.count for place in places)
    pairs = tuple(zip(packed, places, strict=True))
    rounds = tuple(tuple(_relocated_step(step, pairs) for step in steps) for steps in plan.rounds)
    return plan._replace(work_count=max(place.stop for place in places), rounds=rounds)


def _relocated_step(step: Step, places: Sequence[tuple[Chunk, Chunk]]) -> Step:
    if isinstance(step, Copy | Reduce):
        source, target = (
            _relocated_chunk(step.source, places),
            _relocated_chunk(step.target, places),
        )
        return step._replace(source=source, target=target)
    return step._replace(chunk=_relocated_chunk(step.chunk, places))


def _relocated_chunk(chunk: Chunk, places: Sequence[tuple[Chunk, Chunk]]) -> Chunk:
    if chunk.buffer == Buffer.SCRATCH:
        return chunk
    for packed, place in places:
        if packed.start <= chunk.start and chunk.stop <= packed.stop and packed.count:
            shift = place.start - packed.start
            return Chunk(chunk.start + shift, chunk.stop + shift)
    assert not chunk.count, f"{chunk} is in no single place"
    return Chunk(0, 0)


def exchange_steps(rank: int, sent: Sequence[Chunk], places: Sequence[Chunk]) -> list[Step]:
    """Return the steps of a rank that sends a chunk to each other rank, and receives one."""
    size = len(sent)
    steps: list[Step] = []
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        steps += [Send(target, sent[target]), Recv(source, places[source])]
    return steps


def without_peers(plan: Schedule, peers: range) -> Schedule:
    """Return a schedule without its transfers from and to some ranks."""
    rounds = tuple(
        tuple(step for step in steps if not (isinstance(step, Send | Recv) and step.peer in peers))
        for steps in plan.rounds
    )
    return plan._replace(rounds=rounds)
