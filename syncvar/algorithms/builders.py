"""The registry of algorithms: builds the schedule of a rank by the algorithm's name.

Each entry has a builder in this room, which yields the rounds of one rank. Its Order line gives the
order of a reduction, and its Source line the paper and a figure. The tests prove and count the
schedules of all entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms import direct, pairwise, recursive_doubling, ring, tree
from syncvar.algorithms.schedule import Buffer, Copy, Reduce, Schedule, ScheduleArgs
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from syncvar.algorithms.schedule import Round

OF_BLOCKS = frozenset({"all_gather", "header_exchange", "gather", "scatter", "reduce_scatter"})
"""Collectives with a block per rank; their WORK is all blocks in rank order."""

REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
"""Collectives that combine the contributions of all ranks to one value."""


_BUILDERS: Mapping[str, Mapping[str, Callable[[ScheduleArgs], Iterator[Round]]]] = {
    "all_reduce": {
        "direct": direct.direct_all_reduce,
        "owners": direct.owners_all_reduce,
        "tree": tree.binomial_all_reduce,
        "doubling": recursive_doubling.doubling_all_reduce,
        "halving": recursive_doubling.halving_all_reduce,
        "ring": ring.ring_all_reduce,
        "reproducible": ring.reproducible_all_reduce,
    },
    "all_gather": {
        "direct": direct.direct_all_gather,
        "ring": ring.ring_all_gather,
        "doubling": recursive_doubling.doubling_all_gather,
        "dissemination": pairwise.dissemination_all_gather,
    },
    "broadcast": {
        "direct": direct.direct_broadcast,
        "tree": tree.binomial_broadcast,
        "scatter_gather": tree.scattered_broadcast,
        "double_tree": tree.double_tree_broadcast,
    },
    "reduce": {
        "direct": direct.direct_reduce,
        "owners": direct.owners_reduce,
        "tree": tree.binomial_reduce,
        "double_tree": tree.double_tree_reduce,
    },
    "gather": {"direct": direct.direct_gather, "tree": tree.binomial_gather},
    "scatter": {"direct": direct.direct_scatter, "tree": tree.binomial_scatter},
    "reduce_scatter": {
        "direct": direct.direct_reduce_scatter,
        "pairwise": pairwise.pairwise_reduce_scatter,
    },
    "all_to_all": {
        "direct": direct.direct_all_to_all,
        "pairwise": pairwise.pairwise_all_to_all,
        "bruck": pairwise.bruck_all_to_all,
    },
    "scan": {"direct": direct.direct_scan, "doubling": recursive_doubling.doubling_scan},
    "exscan": {"direct": direct.direct_exscan, "doubling": recursive_doubling.doubling_exscan},
    "barrier": {"direct": direct.direct_barrier, "dissemination": pairwise.dissemination_barrier},
    "header_exchange": {
        "direct": direct.direct_all_gather,
        "dissemination": pairwise.dissemination_all_gather,
    },
}

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    collective: tuple(names) for collective, names in _BUILDERS.items()
}
"""The names of the algorithms of each collective."""

_BY_THE_TREE = frozenset({"direct", "owners", "tree", "pairwise", "reproducible"})
_BY_THE_TREE_IN_A_POWER_OF_TWO = frozenset({"doubling", "halving"})
_EQUAL_BLOCKS = frozenset({"dissemination", "bruck"})


def sums_by_the_tree(collective: str, algorithm: str, world_size: int) -> bool:
    """Return whether an algorithm sums every element by the tree T(0, world_size).

    Example:
        >>> sums_by_the_tree("all_reduce", "tree", 5), sums_by_the_tree("all_reduce", "ring", 5)
        (True, False)
        >>> [sums_by_the_tree("all_reduce", "halving", n) for n in (8, 5)]
        [True, False]
    """
    if collective not in REDUCTIONS:
        return False
    return algorithm in _BY_THE_TREE or (
        algorithm in _BY_THE_TREE_IN_A_POWER_OF_TWO and world_size & (world_size - 1) == 0
    )


def unsuited(collective: str, algorithm: str, world_size: int, *, even: bool) -> str | None:
    """Return why an algorithm cannot do a call, or None if it can.

    Example:
        >>> unsuited("all_gather", "doubling", 6, even=True)
        "all_gather by 'doubling' needs a power of two of ranks, not 6"
    """
    if collective == "all_gather" and algorithm == "doubling" and world_size & (world_size - 1):
        return f"all_gather by 'doubling' needs a power of two of ranks, not {world_size}"
    if algorithm in _EQUAL_BLOCKS and collective != "barrier" and not even:
        return f"{collective} by {algorithm!r} needs blocks of equal count"
    return None


def build(collective: str, algorithm: str, args: ScheduleArgs) -> Schedule:
    """Build the schedule of one rank; raise ConfigError if the algorithm cannot do this.

    Args:
        collective: A key of `ALGORITHMS`.
        algorithm: One of `ALGORITHMS[collective]`.
        args: The rank, the root and the sizes. Without `counts` and `matrix` all blocks have
            `count` elements.

    Example:
        >>> schedule = build("all_reduce", "ring", ScheduleArgs(rank=0, world_size=4, count=10))
        >>> len(schedule.rounds), schedule.work_count, schedule.scratch_count
        (6, 10, 0)
    """
    check_algorithm(collective, algorithm)
    rank, world_size, count, counts, root, matrix = args
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a group of {world_size}")
    if not 0 <= root < world_size:
        raise ConfigError(f"root {root} is not in a group of {world_size}")
    in_blocks = collective in OF_BLOCKS
    if counts and (not in_blocks or len(counts) != world_size):
        raise ConfigError(f"{collective} on {world_size} ranks cannot take {len(counts)} counts")
    if matrix and (collective != "all_to_all" or {world_size} != {len(matrix), *map(len, matrix)}):
        raise ConfigError(
            f"{collective} on {world_size} ranks cannot take a matrix of {len(matrix)} rows"
        )
    blocks = tuple(counts) or (count,) * world_size
    pairs = tuple(map(tuple, matrix)) or (blocks,) * world_size
    lowest = min(map(min, (blocks, *pairs)))
    if lowest < 0:
        raise ConfigError(f"a count is negative: {lowest}")
    even = len(set(blocks)) == 1 and len({element for row in pairs for element in row}) == 1
    fault = unsuited(collective, algorithm, world_size, even=even)
    if fault is not None:
        raise ConfigError(fault)
    rounds = tuple(_BUILDERS[collective][algorithm](args._replace(counts=blocks, matrix=pairs)))
    if in_blocks:
        work_count = sum(blocks)
    elif collective == "all_to_all":
        work_count = sum(pairs[rank]) + sum(row[rank] for row in pairs)
    else:
        work_count = 0 if collective == "barrier" else count
    counts = work_count, _scratch_count(rounds)
    return Schedule(collective, algorithm, rank, world_size, *counts, rounds)


def build_all(
    collective: str,
    algorithm: str,
    world_size: int,
    *,
    count: int = 0,
    counts: Sequence[int] = (),
    root: int = 0,
    matrix: Sequence[Sequence[int]] = (),
) -> list[Schedule]:
    """Build the schedules of all ranks, in rank order; arguments as for `ScheduleArgs`."""
    sizes = (count, tuple(counts), root, tuple(map(tuple, matrix)))
    return [
        build(collective, algorithm, ScheduleArgs(rank, world_size, *sizes))
        for rank in range(world_size)
    ]


def _scratch_count(rounds: Sequence[Round]) -> int:
    most = 0
    for steps in rounds:
        for step in steps:
            for chunk in (
                (step.source, step.target) if isinstance(step, Copy | Reduce) else (step.chunk,)
            ):
                if chunk.buffer == Buffer.SCRATCH and chunk.stop > most:
                    most = chunk.stop
    return most


def check_algorithm(collective: str, algorithm: str | None = None) -> None:
    """Raise ConfigError for unknown names; the message has the nearest name and the list."""
    _check_name("collective", collective, ALGORITHMS, "")
    if algorithm is not None:
        _check_name("algorithm", algorithm, ALGORITHMS[collective], f" for {collective}")


def _check_name(kind: str, name: str, names: Iterable[str], where: str) -> None:
    if name in names:
        return
    from syncvar.core.settings import nearest  # needed for wrong names only

    known = list(names)
    raise ConfigError(
        f"there is no {kind} {name!r}{where}{nearest(name, known)}. Known: {', '.join(known)}"
    )
