"""Plans as text, for transcripts, documents and error messages.

Notation: `w[2:5]` are elements 2, 3 and 4 of WORK, `s[2:5]` of SCRATCH; `<3>` is what came from rank 3; the operands
of `+` stand in the order in which they are combined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.plans.model import Buffer, Chunk, Copy, Recv, RecvReduce, Reduce, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.plans.model import Plan, Step

__all__ = ["plan_text", "step_text"]


def step_text(step: Step) -> str:
    """Return one step in the notation of this module.

    Args:
        step: Any step.

    Returns:
        One line, without its end.

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
            return _sum(chunk, f"<{peer}>", incoming_left)
        case Copy(source, target):
            return f"{_chunk(target)} = {_chunk(source)}"
        case Reduce(source, target, source_left):
            return _sum(target, _chunk(source), source_left)


def plan_text(plans: Sequence[Plan]) -> str:
    """Return the plan of a whole group as text: one table per round, one row per rank.

    Args:
        plans: The plans of all ranks, in rank order, at least one.

    Returns:
        Lines, each ended; a group that has nothing to do gets the heading only.
    """
    first = plans[0]
    scratch_count = max(plan.scratch_count for plan in plans)
    counts = [str(plan.work_count) for plan in plans]
    elements = counts[0] if len(set(counts)) == 1 else " / ".join(counts)
    sizes = f"world size {first.world_size}, {elements} elements, scratch {scratch_count}"
    lines = [f"{first.collective} by {first.algorithm}: {sizes}"]
    for number in range(max(len(plan.rounds) for plan in plans)):
        rows = [(f"round {number}", "send", "receive", "then")]
        for plan in plans:
            steps = plan.rounds[number] if number < len(plan.rounds) else ()
            sends = [step_text(step) for step in steps if isinstance(step, Send)]
            receives = [step_text(step) for step in steps if isinstance(step, Recv | RecvReduce)]
            local = [step_text(step) for step in steps if isinstance(step, Copy | Reduce)]
            rows.append((f"rank {plan.rank}", "; ".join(sends), "; ".join(receives), "; ".join(local)))
        lines.append("")
        lines += _table(rows)
    return "".join(f"{line}\n" for line in lines)


def _chunk(chunk: Chunk) -> str:
    return f"{'w' if chunk.buffer == Buffer.WORK else 's'}[{chunk.start}:{chunk.stop}]"


def _sum(target: Chunk, other: str, other_left: bool) -> str:
    own = _chunk(target)
    return f"{own} = {other} + {own}" if other_left else f"{own} = {own} + {other}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad columns to equal width; columns that are empty below their heading are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(len(cell) for cell in column) for column in columns]
    return [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
