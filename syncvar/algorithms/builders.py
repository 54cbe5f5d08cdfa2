"""The registry of schedules: one record per collective, with its algorithms and their rules.

`build` builds the schedule of a rank by the algorithm's name. Each algorithm has a builder in this
room, which yields the rounds of one rank. Its Order line gives the order of a reduction, and its
Source line the paper and a figure. The tests prove and count the schedules of all algorithms.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms import direct, pairwise, recursive_doubling, ring, tree
from syncvar.algorithms.schedule import Buffer, Copy, Reduce, Schedule, ScheduleArgs
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from syncvar.algorithms.schedule import Round

SMALL = 64 * 1024  # up to this size rounds cost more than bytes
LONG = 256 * 1024  # from this size a second copy of the vector costs more than some rounds
HUGE = 4 * 1024 * 1024  # from this size a pipeline pays for its messages
_MIB = 1024 * 1024

# Reasons of several rules, for `syncvar plan`.
_BLOCK_ONCE = "each block is sent once, in one round"
_BLOCK_PAIRS = "each block is sent once, to one rank at a time"
_FEW_BYTES = "for a long vector the number of bytes decides"
_FEW_ROUNDS = "for a small vector the number of rounds decides"
_ONE_ROUND = "a small vector on few ranks takes one round"
_OWNERS = "each rank reduces a part of a long vector"
_PIPELINE = "a pipeline of pieces keeps all links busy"
_SHM_SMALL = "each rank publishes a small vector once and reduces all vectors"
_SMALL_BLOCKS = "small equal blocks travel together in few rounds"
_TOGETHER = "small blocks travel together"


class WorkLayout(Enum):
    """The contents of a collective's WORK buffer."""

    NOTHING = "nothing"
    VECTOR = "a vector"
    BLOCKS = "a block per rank, in rank order"
    PAIRS = "a block for each rank, then a block from each rank"


class Combination(Enum):
    """The contributions that a collective combines."""

    NONE = "none"
    ALL = "those of all ranks, to one value"
    PREFIX = "those of the lower ranks, to a value for each rank"


class Rule(NamedTuple):
    """A rule for the choice of an algorithm; the first one that fits decides."""

    algorithm: str  # the algorithm that the rule chooses
    reason: str  # the reason for `syncvar plan`
    nbytes_max: int | None = None  # largest size in bytes; None for no limit
    ranks: tuple[int, int | None] = (1, None)  # fewest and most ranks; None for no limit
    power_of_two: bool = False  # whether the number of ranks must be a power of two

    def fits(self, nbytes: int, world_size: int) -> bool:
        """Return whether the rule is about a call of this size on so many ranks."""
        fewest, most = self.ranks
        return (
            (self.nbytes_max is None or nbytes <= self.nbytes_max)
            and fewest <= world_size
            and (most is None or world_size <= most)
            and not (self.power_of_two and world_size & (world_size - 1))
        )


class CollectiveSchedules(NamedTuple):
    """The schedules of a collective, and the choice between them.

    The limits of the rules over links follow `syncvar.cli.plan.predicted_seconds` with its LINKS
    constants, rounded; a test keeps them near the best prediction. Ties go to fewer copies, then
    less scratch, then fewer bytes through one rank.
    """

    builders: Mapping[str, Callable[[ScheduleArgs], Iterator[Round]]]  # by name of the algorithm
    link_rules: tuple[Rule, ...]
    shm_rules: tuple[Rule, ...] = (
        Rule("direct", "in shared memory a rank publishes its data once for all others"),
    )
    work: WorkLayout = WorkLayout.VECTOR
    combines: Combination = Combination.NONE
    has_root: bool = False
    bus: str = "1"  # key of `syncvar.runtime.call_record.BUS_FACTORS`; "" if no bytes move


_ROOTED_RULES = (
    Rule("tree", _TOGETHER, _MIB, (4, None)),
    Rule("tree", _TOGETHER, HUGE, (16, None)),
    Rule("direct", "each block goes directly to or from the root"),
)
_SCAN_RULES = (
    Rule("direct", "each rank sends its vector once to each higher rank", None, (1, 3)),
    Rule("doubling", "each round doubles the summed blocks of ranks"),
)

SCHEDULES: Mapping[str, CollectiveSchedules] = {
    "all_reduce": CollectiveSchedules(
        {
            "direct": direct.direct_all_reduce, "owners": direct.owners_all_reduce,
            "tree": tree.binomial_all_reduce, "doubling": recursive_doubling.doubling_all_reduce,
            "halving": recursive_doubling.halving_all_reduce, "ring": ring.ring_all_reduce,
            "reproducible": ring.reproducible_all_reduce,
        },
        link_rules=(
            Rule("direct", _ONE_ROUND, 16 * 1024, (1, 3)),
            Rule("doubling", _FEW_ROUNDS, SMALL),
            Rule("tree", _FEW_ROUNDS, SMALL),
            Rule(
                "halving", "ranks exchange halves in few rounds, and send no more than on a ring",
                power_of_two=True,
            ),
            Rule("halving", "on many ranks a ring needs too many rounds", _MIB, (9, None)),
            Rule("ring", _FEW_BYTES),
            Rule("reproducible", _FEW_BYTES),
        ),
        shm_rules=(
            Rule("direct", _SHM_SMALL, 64 * 1024, (1, 4)),
            Rule("direct", _SHM_SMALL, 16 * 1024, (1, 16)),
            Rule("direct", _SHM_SMALL, 4 * 1024),
            Rule("owners", "in shared memory each rank reduces its own part for all"),
        ),
        combines=Combination.ALL, bus="2(n-1)/n",
    ),
    "all_gather": CollectiveSchedules(
        {
            "direct": direct.direct_all_gather, "ring": ring.ring_all_gather,
            "doubling": recursive_doubling.doubling_all_gather,
            "dissemination": pairwise.dissemination_all_gather,
        },
        link_rules=(
            Rule("direct", _ONE_ROUND, 32 * 1024, (1, 3)),
            Rule("doubling", "each round doubles the known blocks", HUGE, (4, None)),
            Rule("dissemination", _SMALL_BLOCKS, _MIB, (4, None)),
            Rule("direct", _ONE_ROUND, 32 * 1024, (1, 8)),
            Rule("ring", "for long blocks or many ranks each rank uses two links only"),
        ),
        work=WorkLayout.BLOCKS, bus="(n-1)/n",
    ),
    "broadcast": CollectiveSchedules(
        {
            "direct": direct.direct_broadcast, "tree": tree.binomial_broadcast,
            "scatter_gather": tree.scattered_broadcast, "double_tree": tree.double_tree_broadcast,
        },
        link_rules=(
            Rule("tree", "the tree reaches all ranks in the fewest rounds", LONG),
            Rule("tree", "there is one message to send", None, (1, 2)),
            Rule("double_tree", _PIPELINE, None, (32, None)),
            Rule("scatter_gather", "ranks pass on parts of a long vector", HUGE),
            Rule("double_tree", _PIPELINE),
        ),
        has_root=True,
    ),
    "reduce": CollectiveSchedules(
        {
            "direct": direct.direct_reduce, "owners": direct.owners_reduce,
            "tree": tree.binomial_reduce, "double_tree": tree.double_tree_reduce,
        },
        link_rules=(
            Rule("tree", _FEW_ROUNDS, LONG),
            Rule("double_tree", _PIPELINE, None, (16, None)),
            Rule("owners", _OWNERS, HUGE),
            Rule("owners", _OWNERS, None, (1, 2)),
            Rule("double_tree", _PIPELINE),
            Rule("owners", _OWNERS),
        ),
        combines=Combination.ALL, has_root=True,
    ),
    "gather": CollectiveSchedules(
        {"direct": direct.direct_gather, "tree": tree.binomial_gather},
        _ROOTED_RULES, work=WorkLayout.BLOCKS, has_root=True, bus="(n-1)/n",
    ),
    "scatter": CollectiveSchedules(
        {"direct": direct.direct_scatter, "tree": tree.binomial_scatter},
        _ROOTED_RULES, work=WorkLayout.BLOCKS, has_root=True, bus="(n-1)/n",
    ),
    "reduce_scatter": CollectiveSchedules(
        {"direct": direct.direct_reduce_scatter, "pairwise": pairwise.pairwise_reduce_scatter},
        link_rules=(Rule("direct", _BLOCK_ONCE, LONG), Rule("pairwise", _BLOCK_PAIRS)),
        shm_rules=(Rule("direct", "in shared memory each rank reduces its own block"),),
        work=WorkLayout.BLOCKS, combines=Combination.ALL, bus="(n-1)/n",
    ),
    "all_to_all": CollectiveSchedules(
        {
            "direct": direct.direct_all_to_all, "pairwise": pairwise.pairwise_all_to_all,
            "bruck": pairwise.bruck_all_to_all,
        },
        link_rules=(
            Rule("bruck", _SMALL_BLOCKS, SMALL, (4, None)),
            Rule("bruck", _SMALL_BLOCKS, LONG, (12, None)),
            Rule("direct", _BLOCK_ONCE, _MIB),
            Rule("pairwise", _BLOCK_PAIRS),
        ),
        work=WorkLayout.PAIRS, bus="(n-1)/n",
    ),
    "scan": CollectiveSchedules(
        {"direct": direct.direct_scan, "doubling": recursive_doubling.doubling_scan},
        _SCAN_RULES, combines=Combination.PREFIX,
    ),
    "exscan": CollectiveSchedules(
        {"direct": direct.direct_exscan, "doubling": recursive_doubling.doubling_exscan},
        _SCAN_RULES, combines=Combination.PREFIX,
    ),
    "barrier": CollectiveSchedules(
        {"direct": direct.direct_barrier, "dissemination": pairwise.dissemination_barrier},
        link_rules=(Rule("dissemination", "it reaches all ranks in the fewest rounds"),),
        shm_rules=(Rule("direct", "in shared memory each rank reads the words of all others"),),
        work=WorkLayout.NOTHING, bus="",
    ),
    "header_exchange": CollectiveSchedules(
        {"direct": direct.direct_all_gather, "dissemination": pairwise.dissemination_all_gather},
        link_rules=(Rule("dissemination", _SMALL_BLOCKS),), work=WorkLayout.BLOCKS, bus="",
    ),
}  # fmt: skip
"""All that this room knows about each collective."""

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    collective: tuple(one.builders) for collective, one in SCHEDULES.items()
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
    if SCHEDULES[collective].combines is not Combination.ALL:
        return False
    return algorithm in _BY_THE_TREE or (
        algorithm in _BY_THE_TREE_IN_A_POWER_OF_TWO and world_size & (world_size - 1) == 0
    )


def folds_vectors(collective: str, algorithm: str) -> bool:
    """Return whether ranks that share memory combine whole vectors, or their parts of them.

    Example:
        >>> folds_vectors("scan", "direct"), folds_vectors("reduce_scatter", "direct")
        (True, False)
    """
    known = SCHEDULES[collective]
    is_vector = known.work is WorkLayout.VECTOR and known.combines is not Combination.NONE
    return is_vector and algorithm in ("direct", "owners")


def unsuited(collective: str, algorithm: str, world_size: int, *, even: bool) -> str | None:
    """Return why an algorithm cannot do a call, or None if it can.

    Example:
        >>> unsuited("all_gather", "doubling", 6, even=True)
        "all_gather by 'doubling' needs a power of two of ranks, not 6"
    """
    if collective == "all_gather" and algorithm == "doubling" and world_size & (world_size - 1):
        return f"all_gather by 'doubling' needs a power of two of ranks, not {world_size}"
    is_empty = SCHEDULES[collective].work is WorkLayout.NOTHING
    if algorithm in _EQUAL_BLOCKS and not even and not is_empty:
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
    work = SCHEDULES[collective].work
    if counts and (work is not WorkLayout.BLOCKS or len(counts) != world_size):
        raise ConfigError(f"{collective} on {world_size} ranks cannot take {len(counts)} counts")
    if matrix and (
        work is not WorkLayout.PAIRS or {world_size} != {len(matrix), *map(len, matrix)}
    ):
        raise ConfigError(
            f"{collective} on {world_size} ranks cannot take a matrix of {len(matrix)} rows"
        )
    blocks = tuple(counts) or (count,) * world_size
    pairs: tuple[tuple[int, ...], ...] = ()
    if work is WorkLayout.PAIRS:
        pairs = tuple(map(tuple, matrix)) or (blocks,) * world_size
    known = set[int]().union(*(pairs or (blocks,)))
    if min(known) < 0:
        raise ConfigError(f"a count is negative: {min(known)}")
    even = len(known) == 1
    fault = unsuited(collective, algorithm, world_size, even=even)
    if fault is not None:
        raise ConfigError(fault)
    rounds = tuple(
        SCHEDULES[collective].builders[algorithm](args._replace(counts=blocks, matrix=pairs))
    )
    if work is WorkLayout.BLOCKS:
        work_count = sum(blocks)
    elif work is WorkLayout.PAIRS:
        work_count = sum(pairs[rank]) + sum(row[rank] for row in pairs)
    else:
        work_count = 0 if work is WorkLayout.NOTHING else count
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
