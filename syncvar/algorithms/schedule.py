"""Schedules as data: chunk, step, round, schedule; how to cut chunks; schedules as text.

A schedule says which ranges of a flat buffer a rank sends, receives, reduces and copies, in which
order. It knows neither dtypes nor sockets. The tests run schedules on symbols, the runtime runs
them on arrays.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_T = TypeVar("_T")
_StepType = TypeVar("_StepType", bound=tuple[Any, ...])
_DOTS = "..."


class Buffer(IntEnum):
    """The buffer of a chunk: WORK is the collective's, SCRATCH the algorithm's.

    WORK holds the vector, input and result. Collectives of blocks have all blocks there in rank
    order, with the own block in place at the start. An all-to-all has the blocks by destination,
    then the blocks by source. INPUT is the caller's, which compiled schedules may read instead.
    """

    WORK = 0
    SCRATCH = 1
    INPUT = 2


class Chunk(NamedTuple):
    """The elements [start, stop) of a buffer. May be empty."""

    start: int
    stop: int
    buffer: Buffer = Buffer.WORK

    @property
    def count(self) -> int:  # type: ignore[override]  # nobody needs tuple.count
        """Number of elements."""
        return self.stop - self.start


def _compare_type(step_type: type[_StepType]) -> type[_StepType]:
    """Make steps of different types unequal, though tuples with equal elements are equal."""

    def is_same(one: Any, other: object) -> bool:
        return isinstance(other, step_type) and tuple.__eq__(one, other)

    def differs(one: Any, other: object) -> bool:
        return not is_same(one, other)

    step_type.__eq__, step_type.__ne__ = is_same, differs  # type: ignore[method-assign]
    return step_type


@_compare_type
class Send(NamedTuple):
    """Send a chunk to a peer. An empty chunk is sent too: the peer waits for its header."""

    peer: int
    chunk: Chunk


@_compare_type
class Recv(NamedTuple):
    """Receive into a chunk, overwriting it."""

    peer: int
    chunk: Chunk


@_compare_type
class RecvReduce(NamedTuple):
    """Receive and combine with the content of the chunk.

    `incoming_left` makes the incoming value the left operand. It is set exactly when that value
    holds the lower contributing rank, so results do not depend on which rank computes them.
    """

    peer: int
    chunk: Chunk
    incoming_left: bool


@_compare_type
class Copy(NamedTuple):
    """Copy one local chunk over another of the same count."""

    source: Chunk
    target: Chunk


@_compare_type
class Reduce(NamedTuple):
    """Combine a source into a target of equal count; `source_left` sets the operand order."""

    source: Chunk
    target: Chunk
    source_left: bool


Step = Send | Recv | RecvReduce | Copy | Reduce

Round = tuple[Step, ...]
"""Steps of one round.

The transfers (Send, Recv, RecvReduce) come first, and a rank posts them together. A send reads what
its chunk held at the start of the round. Each peer has at most one transfer in each direction, and
both ends count it as the same round, so an idle rank yields an empty round. No written range
overlaps another written range or a sent one. After the transfers the local steps (Copy, Reduce) run
in order.

Borrow rule: a rank may overwrite a range that it sent only after something proves that the peer has
received it.
"""


class ScheduleArgs(NamedTuple):
    """The arguments of a builder, for one rank of a group of n ranks."""

    rank: int  # the rank in the group, 0 <= rank < n
    world_size: int  # ranks of the group, n >= 1
    # Elements of the vector; may be 0, or smaller than n.
    count: int = 0  # type: ignore[assignment]  # as in Chunk
    # Elements of each rank's block, in rank order; uneven counts and 0 are allowed.
    counts: tuple[int, ...] = ()
    root: int = 0  # root of a broadcast, reduce, gather or scatter
    # matrix[s][d] elements go from rank s to rank d in an all-to-all.
    matrix: tuple[tuple[int, ...], ...] = ()


class Schedule(NamedTuple):
    """The rounds of one rank."""

    collective: str  # for instance "all_reduce"
    algorithm: str  # for instance "ring"
    rank: int  # the rank in the group
    world_size: int  # ranks of the group
    work_count: int  # elements of the WORK buffer; in an all-to-all it differs from rank to rank
    scratch_count: int  # elements of the SCRATCH buffer
    rounds: tuple[Round, ...]  # the rounds in order


def consecutive_chunks(
    counts: Iterable[int], buffer: Buffer = Buffer.WORK, start: int = 0
) -> list[Chunk]:
    """Return chunks of the given counts; each starts where the one before stops.

    Example:
        >>> [(c.start, c.stop) for c in consecutive_chunks([2, 0, 3])]
        [(0, 2), (2, 2), (2, 5)]
    """
    chunks = []
    for count in counts:
        chunks.append(Chunk(start, start + count, buffer))
        start += count
    return chunks


def even_chunks(count: int, parts: int, buffer: Buffer = Buffer.WORK) -> list[Chunk]:
    """Cut `count` elements into consecutive chunks whose sizes differ by at most one.

    The longer chunks come first; trailing ones may be empty.

    Example:
        >>> [c.count for c in even_chunks(7, 3)], [c.count for c in even_chunks(1, 3)]
        ([3, 2, 2], [1, 0, 0])
    """
    base, longer = divmod(count, parts)
    return consecutive_chunks([base + 1] * longer + [base] * (parts - longer), buffer)


def exchange_blocks(matrix: Sequence[Sequence[int]], rank: int) -> tuple[list[Chunk], list[Chunk]]:
    """Return the WORK buffer of an all-to-all: blocks by destination, then blocks by source.

    Example:
        >>> outgoing, incoming = exchange_blocks([[1, 2], [0, 3]], 0)
        >>> [(c.start, c.stop) for c in (*outgoing, *incoming)]
        [(0, 1), (1, 3), (3, 4), (4, 4)]
    """
    world_size = len(matrix)
    blocks = consecutive_chunks([*matrix[rank], *(row[rank] for row in matrix)])
    return blocks[:world_size], blocks[world_size:]


# -- schedules as text -----------------------------------------------------------------------------
#
# Notation: `w[2:5]` are elements 2, 3 and 4 of WORK, `s[2:5]` of SCRATCH; `<3>` is the value
# received from rank 3. The operands of `+` stand in the order of the reduction.


def step_text(step: Step) -> str:
    """Return one step in the notation of this module.

    Example:
        >>> step_text(RecvReduce(3, Chunk(2, 5), incoming_left=True))
        'w[2:5] = <3> + w[2:5]'
        >>> step_text(Send(1, Chunk(0, 2, Buffer.SCRATCH)))
        's[0:2] to 1'
    """
    match step:
        case Send(peer, chunk):
            return f"{_chunk(chunk)} to {peer}"
        case Recv(peer, chunk):
            return f"{_chunk(chunk)} = <{peer}>"
        case RecvReduce(peer, chunk, incoming_left):
            return _sum(chunk, f"<{peer}>", other_left=incoming_left)
        case Copy(source, target):
            return f"{_chunk(target)} = {_chunk(source)}"
        case Reduce(source, target, source_left):
            return _sum(target, _chunk(source), other_left=source_left)


def schedule_text(schedules: Sequence[Schedule], *, most: int | None = None) -> str:
    """Return the schedules of a group as text: one table for each round, one row for each rank.

    With `most` the text shows at most that many ranks and rounds, and 3 steps of a type; dots
    replace the rest.
    """
    first = schedules[0]
    scratch_count = max(schedule.scratch_count for schedule in schedules)
    counts = [str(schedule.work_count) for schedule in schedules]
    shown = counts[:1] if len(set(counts)) == 1 else _shortened(counts, most)
    elements = " / ".join(text or _DOTS for text in shown)
    sizes = f"world size {first.world_size}, {elements} elements, scratch {scratch_count}"
    lines = [f"{first.collective} by {first.algorithm}: {sizes}"]
    for number in _shortened(range(max(len(schedule.rounds) for schedule in schedules)), most):
        lines.append("")
        if number is None:
            lines.append(_DOTS)
            continue
        rows: list[tuple[str, ...]] = [(f"round {number}", "send", "receive", "then")]
        for schedule in _shortened(schedules, most):
            if schedule is None:
                rows.append((_DOTS, "", "", ""))
                continue
            steps = schedule.rounds[number] if number < len(schedule.rounds) else ()
            kinds: tuple[list[str], list[str], list[str]] = ([], [], [])
            for step in steps:
                kinds[
                    0 if isinstance(step, Send) else 1 if isinstance(step, Recv | RecvReduce) else 2
                ].append(step_text(step))
            short = [_shortened(texts, most and 3) for texts in kinds]
            cells = ["; ".join(text or _DOTS for text in texts) for texts in short]
            rows.append((f"rank {schedule.rank}", *cells))
        lines += _table(rows)
    return "".join(f"{line}\n" for line in lines)


def _shortened(items: Sequence[_T], most: int | None) -> list[_T | None]:
    """Return the items; if there are more than `most`, the first ones, None and the last one."""
    if most is None or len(items) <= most:
        return list(items)
    return [*items[: most - 1], None, items[-1]]


def _chunk(chunk: Chunk) -> str:
    return f"{'w' if chunk.buffer == Buffer.WORK else 's'}[{chunk.start}:{chunk.stop}]"


def _sum(target: Chunk, other: str, *, other_left: bool) -> str:
    own = _chunk(target)
    return f"{own} = {other} + {own}" if other_left else f"{own} = {own} + {other}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad the columns to equal width, and drop columns that are empty below the heading."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(len(cell) for cell in column) for column in columns]
    return [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
