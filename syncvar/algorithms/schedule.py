"""The words in which an algorithm is written down: chunk, step, round, plan.

An algorithm is data. It says which ranges of a flat buffer a rank sends, receives, reduces and
copies, in which order; it knows neither dtypes nor sockets. The tests run schedules on symbols, the
runtime runs them on arrays.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

_Kind = TypeVar("_Kind", bound=tuple[Any, ...])


class Buffer(IntEnum):
    """Where a chunk lies: the flat buffer of the collective, or room of the algorithm's own."""

    WORK = 0
    SCRATCH = 1


class Chunk(NamedTuple):
    """The elements [start, stop) of a buffer. May be empty."""

    start: int
    stop: int
    buffer: Buffer = Buffer.WORK

    @property
    def count(self) -> int:  # type: ignore[override]  # what a tuple calls so, nobody asks a chunk for
        """Number of elements."""
        return self.stop - self.start


def _of_its_kind(kind: type[_Kind]) -> type[_Kind]:
    """Let steps of two kinds differ whatever is in them, which tuples with the same elements do not."""

    def is_same(one: Any, other: object) -> bool:
        return isinstance(other, kind) and tuple.__eq__(one, other)

    def differs(one: Any, other: object) -> bool:
        return not is_same(one, other)

    kind.__eq__, kind.__ne__ = is_same, differs  # type: ignore[method-assign]
    return kind


@_of_its_kind
class Send(NamedTuple):
    """Send a chunk to a peer. An empty chunk is sent too: the peer waits for its header."""

    peer: int
    chunk: Chunk


@_of_its_kind
class Recv(NamedTuple):
    """Receive into a chunk, overwriting it."""

    peer: int
    chunk: Chunk


@_of_its_kind
class RecvReduce(NamedTuple):
    """Receive and combine with what the chunk holds.

    `incoming_left` says that the incoming value is the left operand: it is set exactly when the
    incoming value holds the lower contributing rank, so that results do not depend on who happens
    to compute them.
    """

    peer: int
    chunk: Chunk
    incoming_left: bool


@_of_its_kind
class Copy(NamedTuple):
    """Copy one local chunk over another of the same count."""

    source: Chunk
    target: Chunk


@_of_its_kind
class Reduce(NamedTuple):
    """Combine a local chunk into another of the same count.

    `source_left` makes the source the left operand.
    """

    source: Chunk
    target: Chunk
    source_left: bool


Step = Send | Recv | RecvReduce | Copy | Reduce

Round = tuple[Step, ...]
"""Steps done together.

The transfers (Send, Recv, RecvReduce) come first in the tuple and are posted together: a send reads what the chunk
held when the round began. There is at most one transfer to each peer and one from each peer, and both ends of it
have the same round number: a rank with nothing to do yields an empty round. No written range overlaps another written
range or a sent one. When all transfers are complete the local steps (Copy, Reduce) run in the order given. A range
that was sent in an earlier round may be written only by something that follows from the peer's having received it: the
memory of a send is borrowed until then.
"""


class ScheduleArgs(NamedTuple):
    """The arguments of a builder, for one rank of a group of n ranks.

    Args:
        rank: The rank in the group, 0 <= rank < n.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the vector; may be 0, or smaller than n.
        counts: Elements of each rank's block, in rank order; uneven counts and 0 are allowed.
        root: The root of a broadcast, reduce, gather or scatter.
        matrix: matrix[s][d] elements go from rank s to rank d in an all-to-all.
    """

    rank: int
    world_size: int
    count: int = 0  # type: ignore[assignment]  # as in Chunk
    counts: tuple[int, ...] = ()
    root: int = 0
    matrix: tuple[tuple[int, ...], ...] = ()


class Schedule(NamedTuple):
    """The rounds of one rank.

    Args:
        collective: For instance "all_reduce".
        algorithm: For instance "ring".
        rank: The rank whose rounds these are, in the group.
        world_size: Ranks of the group.
        work_count: Elements of the WORK buffer; in an all-to-all it differs from rank to rank.
        scratch_count: Elements of the SCRATCH buffer.
        rounds: What to do.
    """

    collective: str
    algorithm: str
    rank: int
    world_size: int
    work_count: int
    scratch_count: int
    rounds: tuple[Round, ...]
