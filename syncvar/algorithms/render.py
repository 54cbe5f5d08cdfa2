"""Schedules as text, for transcripts, documents and error messages.

Notation: `w[2:5]` are elements 2, 3 and 4 of WORK, `s[2:5]` of SCRATCH; `<3>` is the value received
from rank 3. The operands of `+` stand in the order of the reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from syncvar.algorithms.schedule import Buffer, Chunk, Copy, Recv, RecvReduce, Reduce, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.algorithms.schedule import Schedule, Step

_T = TypeVar("_T")


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


_DOTS = "..."


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
