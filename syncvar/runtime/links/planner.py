"""Chooses and compiles the schedule for each kind of call of a group, and caches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.algorithms.builders import build, build_all
from syncvar.algorithms.compile_schedule import LinkSchedule, compile_for_links
from syncvar.algorithms.hierarchical import COMPOSED, stages
from syncvar.algorithms.schedule import ScheduleArgs
from syncvar.algorithms.selection import choose, suited
from syncvar.runtime.programs.round_runner import prepare_published

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar.algorithms.hierarchical import StagePart
    from syncvar.runtime.programs.round_runner import Published

_PLANS_MAX = 512
_IDLE = LinkSchedule((), 0, 0, "idle")


class _Ready(NamedTuple):
    """A compiled stage for the elements [start, stop) of the collective's buffer; plan None.

    Nothing to do.
    """

    start: int
    stop: int
    plan: LinkSchedule | Published | None


class PreparedStages(NamedTuple):
    """The compiled stages of a collective over several hosts.

    Args:
        stages: In order, as many on every rank.
        algorithm: Name for the flight recorder.
    """

    stages: tuple[_Ready, ...]
    algorithm: str = "hierarchical"


class Planner:
    """The schedules of a group.

    Args:
        members: World ranks, in the group's order.
        rank: This process in the group; None if it is not a member.
        forced: Algorithms that the job's setting demands, by collective.
        is_shared: Whether all members share memory.
        host_sizes: Ranks on each host, for a group that spans several with shared memory; else
            None.
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
        self._plans: dict[tuple[Any, ...], LinkSchedule | Published | PreparedStages] = {}

    def __call__(
        self,
        collective: str,
        counts: int | tuple[int, ...] | tuple[tuple[int, ...], ...],
        itemsize: int = 1,
        *,
        root: int = 0,
        reproducible: bool = False,
        algorithm: str | None = None,
    ) -> LinkSchedule | Published | PreparedStages:
        """Choose an algorithm and return this rank's compiled schedule, from the cache if possible.

        Args:
            collective: For instance "all_reduce".
            counts: Elements of the vector, of each rank's block, or from each rank to each
                (all_to_all).
            itemsize: Bytes of an element.
            root: Rank of the group that is the root.
            reproducible: Sum by the tree.
            algorithm: Algorithm forced by the caller; it precedes the job's setting.
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
    ) -> LinkSchedule | Published | PreparedStages:
        rank, size = self._rank, self._size
        sizes: dict[str, Any] = {"count": counts}
        total: Any = counts
        is_even = True
        if isinstance(counts, tuple):
            is_matrix = collective == "all_to_all"
            sizes = {"matrix" if is_matrix else "counts": counts}
            rows: Any = counts if is_matrix else (counts,)
            is_even = len({count for row in rows for count in row}) == 1
            total = sum(map(sum, rows)) // size if is_matrix else sum(counts)
        args = ScheduleArgs(rank, size, root=root, **sizes)
        wanted = algorithm or suited(
            collective, self.forced.get(collective), size, even=is_even, reproducible=reproducible
        )
        if wanted is None and self._host_sizes is not None and collective in COMPOSED:
            parts = stages(
                collective, self._host_sizes, args, itemsize=itemsize, reproducible=reproducible
            )
            if parts is not None:
                return _prepare_stages(parts, self._members)
        chosen = choose(
            collective,
            total * itemsize,
            size,
            reproducible=reproducible,
            forced=wanted,
            shared=self._is_shared,
            even=is_even,
        ).algorithm
        if self._is_shared:
            return prepare_published(
                build_all(collective, chosen, size, root=root, **sizes), rank, root
            )
        return compile_for_links(build(collective, chosen, args), self._members)


def _prepare_stages(parts: Sequence[StagePart], members: Sequence[int]) -> PreparedStages:
    """Compile the stages of this rank; `members` are the world ranks of the group."""
    compiled = []
    for part in parts:
        plan: LinkSchedule | Published | None = None
        if part.plan is not None and part.on_host:
            plan = prepare_published(part.plans, part.plan.rank)
        elif part.plan is not None:
            plan = compile_for_links(part.plan, [members[rank] for rank in part.members])
        elif not part.on_host:
            # stages between hosts are numbered in frames, so idle ranks count them too
            plan = _IDLE
        compiled.append(_Ready(part.chunk.start, part.chunk.stop, plan))
    return PreparedStages(tuple(compiled))
