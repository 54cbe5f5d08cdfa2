"""Schedules in shared memory: compiled once into programs, and run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.algorithms.compile_schedule import Publication, publications
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
    from syncvar.shm.group_channel import GroupChannel


class Published(NamedTuple):
    """A schedule prepared for shared memory.

    Args:
        reduces: All inputs are combined, by each rank or by owners; `shm_reduce` runs it.
        rounds: Publications of any other schedule.
        algorithm: Algorithm of the schedule.
        ends: Which ranks get which result, if it reduces.
    """

    reduces: bool
    rounds: tuple[Publication, ...]
    algorithm: str = ""
    ends: ResultPlacement = EVERYWHERE
    codes: dict[tuple[int, bool], CompiledProgram] = {}  # noqa: RUF012  (without rounds it stays empty)

    def code(self, rank: int, itemsize: int, *, begins: bool) -> CompiledProgram:
        """Return the rounds as a program.

        With `begins`, phase 0 has not been published, and a short first publication goes with it.
        """
        key = itemsize, begins
        if key not in self.codes:
            small = SMALL_BYTES // itemsize if begins else 0
            self.codes[key] = assemble(
                lower_rounds(self.rounds, rank, SEGMENT_BYTES // itemsize, small)
            )
        return self.codes[key]


SIDE_BY_SIDE = Published(reduces=False, rounds=(), algorithm="side by side")
"""Schedule of a stage that has a movement."""


def prepare_published(plans: Sequence[Schedule], rank: int, root: int | None = None) -> Published:
    """Prepare the schedules of all ranks for shared memory, on one rank.

    `root` is the root of a call of the group. None: this is part of a larger call, in which only an
    all-reduce may leave the rounds of the schedule.
    """
    mine = plans[rank]
    reduces = ("all_reduce",) if root is None else ("all_reduce", "reduce", "scan", "exscan")
    if mine.collective in reduces and mine.algorithm in ("direct", "owners"):
        ends = ResultPlacement(mine.collective, root or 0)
        return Published(reduces=True, rounds=(), algorithm=mine.algorithm, ends=ends)
    rounds = publications(plans, rank)
    return Published(reduces=False, rounds=rounds, algorithm=mine.algorithm, codes={})


def run_rounds(
    channel: GroupChannel,
    opening: tuple[int, int] | None,
    plan: Published,
    work: NDArray[Any],
    ufunc: Combiner | None,
) -> Iterator[int]:
    """Run a schedule of publications; yield the publications to wait for.

    `opening` is (call, check) if phase 0 is still to be published, else None. `work` is the flat
    array of the schedule's elements. `ufunc` combines two operands; None for schedules that only
    move.
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
