"""Plans in shared memory: made ready once as programs, and run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.algorithms.shm_rounds import Publication, publications
from syncvar.runtime.programs.arithmetic import Arithmetic
from syncvar.runtime.programs.compile_reduce import EVERYWHERE, ResultPlacement
from syncvar.runtime.programs.compile_rounds import lower_rounds
from syncvar.runtime.programs.instructions import assemble
from syncvar.runtime.programs.program_runner import agreed, open_code, run_code
from syncvar.shm.channel_table import SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.algorithms.schedule import Schedule
    from syncvar.core.reduce_ops import Combiner
    from syncvar.runtime.programs.instructions import CompiledProgram
    from syncvar.shm.group_channel import Channel

__all__ = ["SIDE_BY_SIDE", "Published", "prepare_published", "run_rounds"]


class Published(NamedTuple):
    """A plan made ready for shared memory.

    Args:
        reduces: It combines what all bring, each rank for itself or its part: `reductions` does that.
        rounds: The publications of any other.
        algorithm: Of the plans.
        ends: Where it reduces, which ranks end with what.
    """

    reduces: bool
    rounds: tuple[Publication, ...]
    algorithm: str = ""
    ends: ResultPlacement = EVERYWHERE
    codes: dict[tuple[int, bool], CompiledProgram] = {}  # noqa: RUF012  (of a plan that has no rounds nothing is ever put there)

    def code(self, rank: int, itemsize: int, *, begins: bool) -> CompiledProgram:
        """Return the rounds as a program.

        Args:
            rank: This process in the group.
            itemsize: Of an element, in bytes.
            begins: Phase 0 has not been published: what is short goes with it.
        """
        key = itemsize, begins
        if key not in self.codes:
            small = SMALL_BYTES // itemsize if begins else 0
            self.codes[key] = assemble(
                lower_rounds(self.rounds, rank, SEGMENT_BYTES // itemsize, small)
            )
        return self.codes[key]


SIDE_BY_SIDE = Published(reduces=False, rounds=(), algorithm="side by side")
"""Stands for the plan of a stage that has a movement."""


def prepare_published(plans: Sequence[Schedule], rank: int, root: int | None = None) -> Published:
    """Make the plans of a group ready to run on a rank, in shared memory.

    Args:
        plans: Of all ranks.
        rank: This process in the group.
        root: Of a call of the group's; None for a part of a larger call, which keeps to the plans' rounds but for all-reduces.
    """
    mine = plans[rank]
    reduces = ("all_reduce",) if root is None else ("all_reduce", "reduce", "scan", "exscan")
    if mine.collective in reduces and mine.algorithm in ("direct", "owners"):
        return Published(
            reduces=True,
            rounds=(),
            algorithm=mine.algorithm,
            ends=ResultPlacement(mine.collective, root or 0),
        )
    rounds = publications(plans, rank)
    return Published(reduces=False, rounds=rounds, algorithm=mine.algorithm, codes={})


def run_rounds(
    channel: Channel,
    opening: tuple[int, int] | None,
    plan: Published,
    work: NDArray[Any],
    ufunc: Combiner | None,
) -> Iterator[int]:
    """Run a plan of publications; yields the words to wait for.

    Args:
        channel: This rank's end of the channels of those who take part.
        opening: (call, check) where phase 0 is still to be published, else None.
        plan: What is published and taken.
        work: What it works on: a flat array of as many elements as the plan has.
        ufunc: Combines two operands; None for plans that only move.
    """
    code = plan.code(channel.rank, work.itemsize, begins=opening is not None)
    if code.uses_cells:
        channel.reserve_segments()
    how, arrays, slots = Arithmetic(ufunc, work.dtype, work.dtype), ((), (work,)), None
    if opening is not None:
        call, check = opening
        open_code(channel, code, how, arrays, channel.side ^ 1)
        yield from agreed(channel, check, channel.begin(call, check))
        slots = channel.slots_now(0)
        first = channel.next_parity()
    else:
        first = channel.next_parity()
        open_code(channel, code, how, arrays, first)
        yield channel.publish()
    if code.last_side is not None:
        channel.tail = first ^ code.last_side
    yield from run_code(channel, code, how, arrays, (first,) * channel.size, slots)
