"""A plan read for memory that all ranks see: a rank publishes once what it sends, and each receiver takes its part.

Over links every send is a message of its own. In shared memory the same bytes sent to several ranks are published
once, one range after another; who receives needs to know where in the sender's publication its part begins. That
follows from the plans of all ranks, which are pure data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.errors import PlanError
from syncvar.plans.model import Copy, Recv, RecvReduce, Reduce, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.plans.model import Chunk, Plan

__all__ = ["Publication", "Take", "publications"]


class Take(NamedTuple):
    """What a rank takes from the publication of another.

    Args:
        peer: Who published, in the group.
        start: First element in its publication.
        target: Where it goes here.
        step: The step of the plan: a Recv overwrites, a RecvReduce combines.
    """

    peer: int
    start: int
    target: Chunk
    step: Recv | RecvReduce


class Publication(NamedTuple):
    """One round of one rank.

    Args:
        ranges: What it publishes, one after the other.
        length: Elements of all ranges together.
        longest: Elements of the longest publication of this round, over all ranks.
        takes: What it takes from others.
        local: Copies and reductions afterwards.
    """

    ranges: tuple[Chunk, ...]
    length: int
    longest: int
    takes: tuple[Take, ...]
    local: tuple[Copy | Reduce, ...]


def publications(plans: Sequence[Plan], rank: int) -> tuple[Publication, ...]:
    """Return the rounds of a rank as publications.

    Args:
        plans: The plans of all ranks, in rank order.
        rank: Whose rounds are wanted.

    Raises:
        PlanError: A receive has no send.

    Cost: one pass over the steps of all plans.

    Example:
        >>> from syncvar.plans import build_all
        >>> first, second = publications(build_all("all_reduce", "owners", 2, count=6), 0)
        >>> [(chunk.start, chunk.stop) for chunk in first.ranges], first.takes[0].start
        ([(3, 6)], 0)
    """
    rounds = []
    for number, steps in enumerate(plans[rank].rounds):
        layouts = [_layout(plan, number) for plan in plans]
        takes = []
        for step in steps:
            if isinstance(step, Recv | RecvReduce):
                sent = next((s for s in _sends(plans[step.peer], number) if s.peer == rank), None)
                if sent is None:
                    raise PlanError(f"round {number}: rank {step.peer} sends nothing to rank {rank}")
                takes.append(Take(step.peer, layouts[step.peer][sent.chunk], step.chunk, step))
        counts = [sum(chunk.count for chunk in layout) for layout in layouts]
        local = tuple(step for step in steps if isinstance(step, Copy | Reduce))
        rounds.append(Publication(tuple(layouts[rank]), counts[rank], max(counts), tuple(takes), local))
    return tuple(rounds)


def _sends(plan: Plan, number: int) -> list[Send]:
    return [step for step in plan.rounds[number] if isinstance(step, Send)]


def _layout(plan: Plan, number: int) -> dict[Chunk, int]:
    """Return where each distinct chunk that is sent begins in the publication, in order."""
    chunks = sorted({step.chunk for step in _sends(plan, number)}, key=lambda c: (c.buffer, c.start, c.stop))
    places: dict[Chunk, int] = {}
    start = 0
    for chunk in chunks:
        places[chunk] = start
        start += chunk.count
    return places
