"""Chooses and caches the schedules of a group's calls, and runs them in shared memory.

In shared memory each round is a publication, of which the other ranks take their parts. A short
first publication goes into slots with phase 0. Everything else goes through cells, window by
window, on two sides in turn. Window k of a call is its k-th phase. Invariant: a rank publishes the
next phase only after it has taken this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar._native.constants import MemoryKind
from syncvar.algorithms.builders import SCHEDULES, WorkLayout, build, build_all, folds_vectors
from syncvar.algorithms.compile_schedule import (
    LinkSchedule,
    Publication,
    compile_for_links,
    publications,
)
from syncvar.algorithms.cost_model import BY_RULES
from syncvar.algorithms.hierarchical import COMPOSED, stages
from syncvar.algorithms.schedule import Buffer, Copy, RecvReduce, ScheduleArgs
from syncvar.algorithms.selection import choose, suited
from syncvar.runtime.arithmetic import Arithmetic
from syncvar.runtime.compile_reduce import EVERYWHERE, ResultPlacement
from syncvar.runtime.instructions import (
    Await,
    Combine,
    CopyInstruction,
    Instruction,
    Memory,
    Program,
    Publish,
    Span,
    assemble,
)
from syncvar.runtime.program_runner import agreed, open_code, run_code
from syncvar.shm.channel_table import SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.algorithms.compile_schedule import Take
    from syncvar.algorithms.hierarchical import HostStages
    from syncvar.algorithms.schedule import Chunk, Schedule
    from syncvar.core.reduce_ops import Combiner
    from syncvar.runtime.instructions import CompiledProgram
    from syncvar.shm.group_channel import GroupChannel

_PLANS_MAX = 512
_IDLE = LinkSchedule((), 0, 0, "idle")
_MEMORIES = {Buffer.WORK: Memory(MemoryKind.TARGET), Buffer.SCRATCH: Memory(MemoryKind.SCRATCH)}


class Published(NamedTuple):
    """A schedule compiled for shared memory."""

    reduces: bool  # all inputs are combined, by each rank or by owners; `shm_reduce` runs it
    rounds: tuple[Publication, ...]  # publications of any other schedule
    algorithm: str = ""  # algorithm of the schedule
    ends: ResultPlacement = EVERYWHERE  # which ranks get which result, if it reduces
    codes: dict[tuple[int, bool], CompiledProgram] = {}  # noqa: RUF012  (without rounds it stays empty)

    def code(self, rank: int, itemsize: int, *, begins: bool) -> CompiledProgram:
        """Return the rounds as a program; if it `begins`, phase 0 may carry a short publication."""
        key = itemsize, begins
        if key not in self.codes:
            small = SMALL_BYTES // itemsize if begins else 0
            program = lower_rounds(self.rounds, rank, SEGMENT_BYTES // itemsize, small)
            self.codes[key] = assemble(program)
        return self.codes[key]


SIDE_BY_SIDE = Published(reduces=False, rounds=(), algorithm="side by side")
"""Schedule of a stage that has a movement."""


def compile_published(plans: Sequence[Schedule], rank: int, root: int | None = None) -> Published:
    """Compile the schedules of all ranks for shared memory, on one rank.

    Of a reduction by "direct" or "owners" only the algorithm and `ends` stay: `shm_reduce` makes
    its program by `reduce_code`. Other schedules keep their rounds. Without a `root` the schedules
    are a stage of a larger call, and keep their rounds too.
    """
    mine = plans[rank]
    if root is not None and folds_vectors(mine.collective, mine.algorithm):
        ends = ResultPlacement(mine.collective, root)
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
    """Run a schedule on a flat array; yield the needs.

    `opening` is (call, check) if phase 0 is still to be published, else None.
    """
    code = plan.code(channel.rank, work.itemsize, begins=opening is not None)
    if code.uses_cells:
        channel.reserve_segments()
    arithmetic, arrays, slots = Arithmetic(ufunc, work.dtype, work.dtype), ((), (work,)), None
    if opening is not None:
        call, check = opening
        open_code(channel, code, arithmetic, arrays, channel.side ^ 1)
        yield from agreed(channel, check, channel.begin(call, check))
        slots = channel.slots_now(0)
        first = channel.next_parity()
    else:
        first = channel.next_parity()
        open_code(channel, code, arithmetic, arrays, first)
        yield channel.publish()
    if code.last_side is not None:
        channel.tail = first ^ code.last_side
    yield from run_code(channel, code, arithmetic, arrays, (first,) * channel.size, slots)


class _CompiledStage(NamedTuple):
    """A compiled stage for elements [start, stop) of the collective's buffer, or nothing."""

    start: int
    stop: int
    plan: LinkSchedule | Published | None


class CompiledStages(NamedTuple):
    """The compiled stages of a collective over several hosts."""

    stages: tuple[_CompiledStage, ...]  # in order, as many on every rank
    room: int = 0  # elements behind the collective's buffer that the stages share
    algorithm: str = "hierarchical"  # name for the flight recorder


class Planner:
    """The schedules of a group.

    Args:
        members: World ranks, in the group's order.
        rank: This process in the group; None if it is not a member.
        forced: Algorithms that the job's setting demands, by collective.
        is_shared: Whether all members share memory.
        host_sizes: Ranks on each host of a group that spans several with shared memory; else None.

    Attributes:
        between: Chooses between the hosts of the group.
        has_one_rank_per_host: Whether each member is on a host of its own.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        rank: int | None,
        forced: Mapping[str, str],
        *,
        is_shared: bool,
        host_sizes: tuple[int, ...] | None,
    ) -> None:
        self.forced = forced
        self._members = members
        self._size = len(members)
        self._rank = -1 if rank is None else rank
        self._is_shared = is_shared
        self._host_sizes = host_sizes
        self.between = BY_RULES
        self.has_one_rank_per_host = False
        self._plans: dict[tuple[Any, ...], LinkSchedule | Published | CompiledStages] = {}

    def __call__(
        self,
        collective: str,
        counts: int | tuple[int, ...] | tuple[tuple[int, ...], ...],
        itemsize: int = 1,
        *,
        root: int = 0,
        reproducible: bool = False,
        algorithm: str | None = None,
    ) -> LinkSchedule | Published | CompiledStages:
        """Choose an algorithm and return this rank's compiled schedule, from the cache if possible.

        `counts` are the elements of the vector, of each rank's block, or from each rank to each.
        The caller's `algorithm` precedes the job's setting.
        """
        key = (collective, counts, itemsize, root, reproducible, algorithm)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            found = self._plans[key] = self._compile(
                collective, counts, itemsize, root, algorithm, reproducible=reproducible
            )
        return found

    def forget(self) -> None:
        """Clear the cache."""
        self._plans.clear()

    def _compile(
        self,
        collective: str,
        counts: Any,
        itemsize: int,
        root: int,
        algorithm: str | None,
        *,
        reproducible: bool,
    ) -> LinkSchedule | Published | CompiledStages:
        rank, size = self._rank, self._size
        sizes: dict[str, Any] = {"count": counts}
        total: Any = counts
        is_even = True
        if isinstance(counts, tuple):
            is_matrix = SCHEDULES[collective].work is WorkLayout.PAIRS
            sizes = {"matrix" if is_matrix else "counts": counts}
            rows: Any = counts if is_matrix else (counts,)
            is_even = len({count for row in rows for count in row}) == 1
            total = sum(map(sum, rows)) // size if is_matrix else sum(counts)
        args = ScheduleArgs(rank, size, root=root, **sizes)
        wanted = algorithm or suited(
            collective, self.forced.get(collective), size, even=is_even, reproducible=reproducible
        )
        if wanted is None and self._host_sizes is not None and collective in COMPOSED:
            found = stages(
                collective,
                self._host_sizes,
                args,
                itemsize=itemsize,
                reproducible=reproducible,
                between=self.between,
            )
            if found is not None:
                return _compile_stages(found, self._members)
        case = {"even": is_even, "reproducible": reproducible}
        if wanted is None and self.has_one_rank_per_host:
            return self._compile_between_hosts(collective, total * itemsize, args, case)
        case["shared"] = self._is_shared
        chosen = choose(collective, total * itemsize, size, forced=wanted, **case).algorithm
        if self._is_shared:
            schedules = build_all(collective, chosen, size, root=root, **sizes)
            return compile_published(schedules, rank, root)
        return _compile_for_links(collective, chosen, args, self._members)

    def _compile_between_hosts(
        self, collective: str, nbytes: int, args: ScheduleArgs, case: Mapping[str, bool]
    ) -> LinkSchedule:
        """Compile the schedule of a group that has one member on each host."""
        choice = self.between.choose(collective, nbytes, self._size, root=args.root, **case)
        order = choice.order
        args = args._replace(rank=order.index(args.rank), root=order.index(args.root))
        members = [self._members[host] for host in order]
        return _compile_for_links(collective, choice.algorithm, args, members)


def _compile_for_links(
    collective: str, algorithm: str, args: ScheduleArgs, members: Sequence[int]
) -> LinkSchedule:
    is_matrix = SCHEDULES[collective].work is WorkLayout.PAIRS
    input_count = sum(args.matrix[args.rank]) if is_matrix else None
    return compile_for_links(build(collective, algorithm, args), members, input_count)


def _compile_stages(found: HostStages, members: Sequence[int]) -> CompiledStages:
    """Compile the stages of this rank; `members` are the world ranks of the group."""
    compiled = []
    on_host: dict[int, Published] = {}  # by identity of the schedules; stages may share them
    for part in found.parts:
        plan: LinkSchedule | Published | None = None
        if part.plan is not None and part.on_host:
            key = id(part.plans)
            if key not in on_host:
                on_host[key] = compile_published(part.plans, part.plan.rank)
            plan = on_host[key]
        elif part.plan is not None:
            plan = compile_for_links(part.plan, [members[rank] for rank in part.members])
        elif not part.on_host:
            # stages between hosts are numbered in frames, so idle ranks count them too
            plan = _IDLE
        compiled.append(_CompiledStage(part.chunk.start, part.chunk.stop, plan))
    return CompiledStages(tuple(compiled), found.room)


def lower_rounds(rounds: Sequence[Publication], rank: int, window: int, small: int = 0) -> Program:
    """Return a rank's program of a schedule, through cells of `window` elements.

    The first publication, up to `small` elements, goes into slots with phase 0. With `small` = 0
    phase 0 has been published: the opening writes the first window, and the steps begin after all
    ranks have published it.

    Example:
        >>> from syncvar.algorithms.builders import build_all
        >>> from syncvar.algorithms.compile_schedule import publications
        >>> plan = publications(build_all("all_reduce", "owners", 2, count=6), 0)
        >>> [type(step).__name__ for step in lower_rounds(plan, 0, 100).steps]
        ['CopyInstruction', 'Combine', 'CopyInstruction', 'Publish', 'Await', 'CopyInstruction']
    """
    opening: list[CopyInstruction] = []
    steps: list[Instruction] = []
    windows = 0
    for number, publication in enumerate(rounds):
        if number == 0 and small and publication.longest <= small:
            slot = Memory(MemoryKind.SLOT, rank)
            opening = _put(publication.ranges, slot, 0, publication.length)
            for take in publication.takes:
                whole = Span(Memory(MemoryKind.SLOT, take.peer), take.start, take.target.count)
                steps += _take_steps(take, whole, 0)
        elif publication.longest:
            for low in range(0, publication.longest, window):
                cells, high = Memory(MemoryKind.CELLS, rank, windows & 1), low + window
                put = _put(publication.ranges, cells, low, min(publication.length, high))
                if small or windows:
                    steps += [*put, Publish(), Await()]
                else:
                    opening = put
                steps += _takes_between(publication, low, low + window, windows & 1)
                windows += 1
        else:
            steps += [Publish(), Await()] if small or windows else []
            windows += 1
        for step in publication.local:
            source, target = _span(step.source), _span(step.target)
            if isinstance(step, Copy):
                steps.append(CopyInstruction(source, target))
            else:
                steps.append(_combined(source, target, is_left=step.source_left))
    return Program(tuple(opening), tuple(steps), (windows - 1) & 1 if windows else None)


def _takes_between(
    publication: Publication, low: int, high: int, side: int
) -> Iterable[Instruction]:
    """Yield the steps that take elements [low, high) of the publications of other ranks."""
    for take in publication.takes:
        start, stop = max(low, take.start), min(high, take.start + take.target.count)
        if stop > start:
            part = Span(Memory(MemoryKind.CELLS, take.peer, side), start - low, stop - start)
            yield from _take_steps(take, part, start - take.start)


def _put(ranges: Iterable[Chunk], into: Memory, low: int, high: int) -> list[CopyInstruction]:
    """Return the copies of elements [low, high) of a publication to the start of a memory."""
    copies, begin = [], 0
    for chunk in ranges:
        start, stop = max(low, begin), min(high, begin + chunk.count)
        if stop > start:
            source = _span(chunk).cut(start - begin, stop - begin)
            copies.append(CopyInstruction(source, Span(into, start - low, stop - start)))
        begin += chunk.count
    return copies


def _take_steps(take: Take, part: Span, first: int) -> list[Instruction]:
    """Return the steps for a part of a take, whose element `first` is the start of the part."""
    target = _span(take.target).cut(first, first + part.length)
    if not part.length:
        return []
    if isinstance(take.step, RecvReduce):
        return [_combined(part, target, is_left=take.step.incoming_left)]
    return [CopyInstruction(part, target)]


def _combined(source: Span, target: Span, *, is_left: bool) -> Combine:
    return Combine((source, target) if is_left else (target, source), target)


def _span(chunk: Chunk) -> Span:
    return Span(_MEMORIES[chunk.buffer], chunk.start, chunk.count)
