"""Which algorithm, and why: the one table through which every plan is chosen and built.

The choice uses only what is the same on every rank: the collective, the size, the number of ranks, fixed settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from syncvar.errors import ConfigError
from syncvar.plans.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_all_to_all,
    direct_barrier,
    direct_broadcast,
    direct_exscan,
    direct_gather,
    direct_reduce,
    direct_reduce_scatter,
    direct_scan,
    direct_scatter,
)
from syncvar.plans.dissemination import dissemination_all_gather, dissemination_barrier
from syncvar.plans.model import Buffer, Copy, Plan, Reduce
from syncvar.plans.owners import owners_all_reduce
from syncvar.plans.reproducible import reproducible_all_reduce
from syncvar.plans.ring import ring_all_gather, ring_all_reduce
from syncvar.plans.tree import binomial_all_reduce, binomial_broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from syncvar.plans.model import Round

__all__ = ["ALGORITHMS", "Choice", "build", "build_all", "choose", "sums_by_the_tree"]

DIRECT_ALL_REDUCE_NBYTES_MAX = 16 * 1024
DIRECT_ALL_REDUCE_WORLD_SIZE_MAX = 4
TREE_ALL_REDUCE_NBYTES_MAX = 64 * 1024
SHARED_DIRECT_LIMITS = ((64 * 1024, 4), (16 * 1024, 16), (4 * 1024, None))  # bytes, ranks
DIRECT_ALL_GATHER_NBYTES_MAX = 32 * 1024
DIRECT_ALL_GATHER_WORLD_SIZE_MAX = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen algorithm.

    Args:
        algorithm: Its name, for `build`.
        reason: Why, in one sentence.
    """

    algorithm: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a builder, for one rank."""

    rank: int
    world_size: int
    count: int
    counts: tuple[int, ...]
    root: int
    matrix: tuple[tuple[int, ...], ...]


def _dissemination_blocks(call: _Call) -> Iterator[Round]:
    if len(set(call.counts)) > 1:
        raise ConfigError(
            f"the dissemination all-gather needs blocks of equal count, not {list(call.counts)}; use 'ring' or 'direct'"
        )
    return dissemination_all_gather(call.rank, call.world_size, call.counts[0])


_BUILDERS: Mapping[str, Mapping[str, Callable[[_Call], Iterator[Round]]]] = {
    "all_reduce": {
        "direct": lambda call: direct_all_reduce(call.rank, call.world_size, call.count),
        "owners": lambda call: owners_all_reduce(call.rank, call.world_size, call.count),
        "tree": lambda call: binomial_all_reduce(call.rank, call.world_size, call.count),
        "ring": lambda call: ring_all_reduce(call.rank, call.world_size, call.count),
        "reproducible": lambda call: reproducible_all_reduce(call.rank, call.world_size, call.count),
    },
    "all_gather": {
        "direct": lambda call: direct_all_gather(call.rank, call.world_size, call.counts),
        "ring": lambda call: ring_all_gather(call.rank, call.world_size, call.counts),
        "dissemination": _dissemination_blocks,
    },
    "broadcast": {
        "direct": lambda call: direct_broadcast(call.rank, call.world_size, call.count, call.root),
        "tree": lambda call: binomial_broadcast(call.rank, call.world_size, call.count, call.root),
    },
    "reduce": {
        "direct": lambda call: direct_reduce(call.rank, call.world_size, call.count, call.root),
    },
    "gather": {
        "direct": lambda call: direct_gather(call.rank, call.world_size, call.counts, call.root),
    },
    "scatter": {
        "direct": lambda call: direct_scatter(call.rank, call.world_size, call.counts, call.root),
    },
    "reduce_scatter": {
        "direct": lambda call: direct_reduce_scatter(call.rank, call.world_size, call.counts),
    },
    "all_to_all": {
        "direct": lambda call: direct_all_to_all(call.rank, call.world_size, call.matrix),
    },
    "scan": {
        "direct": lambda call: direct_scan(call.rank, call.world_size, call.count),
    },
    "exscan": {
        "direct": lambda call: direct_exscan(call.rank, call.world_size, call.count),
    },
    "barrier": {
        "direct": lambda call: direct_barrier(call.rank, call.world_size),
        "dissemination": lambda call: dissemination_barrier(call.rank, call.world_size),
    },
    "header_exchange": {
        "direct": lambda call: direct_all_gather(call.rank, call.world_size, call.counts),
        "dissemination": _dissemination_blocks,
    },
}

_OF_BLOCKS = frozenset({"all_gather", "header_exchange", "gather", "scatter", "reduce_scatter"})

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    collective: tuple(names) for collective, names in _BUILDERS.items()
}
"""The names of the algorithms of each collective."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One row of the table of choices; None is no limit. `shared`: in memory that all ranks see, else over links."""

    collective: str
    algorithm: str
    nbytes_max: int | None
    world_size_max: int | None
    why: str
    shared: bool = False


_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_SUM_BY_THE_TREE = frozenset({"direct", "owners", "tree", "reproducible"})

_PUBLISHED = "in shared memory a rank publishes once what all others take"

_RULES = (
    _Rule(
        "all_reduce",
        "direct",
        DIRECT_ALL_REDUCE_NBYTES_MAX,
        DIRECT_ALL_REDUCE_WORLD_SIZE_MAX,
        "a small vector on few ranks is exchanged in a single round",
    ),
    _Rule(
        "all_reduce",
        "tree",
        TREE_ALL_REDUCE_NBYTES_MAX,
        None,
        "a small vector needs few rounds more than few bytes",
    ),
    _Rule("all_reduce", "ring", None, None, "a long vector needs few bytes more than few rounds"),
    _Rule("all_reduce", "reproducible", None, None, "a long vector moves as few bytes as on a ring"),
    _Rule(
        "all_gather",
        "direct",
        DIRECT_ALL_GATHER_NBYTES_MAX,
        DIRECT_ALL_GATHER_WORLD_SIZE_MAX,
        "small blocks on few ranks are exchanged in a single round",
    ),
    _Rule("all_gather", "ring", None, None, "long blocks or many ranks use two links per rank"),
    _Rule("broadcast", "tree", None, None, "the tree reaches all ranks in the fewest rounds"),
    *(
        _Rule(collective, "direct", None, None, "each block or vector is sent once, in a single round")
        for collective in ("reduce", "gather", "scatter", "reduce_scatter", "all_to_all", "scan", "exscan")
    ),
    _Rule("barrier", "dissemination", None, None, "every rank hears of every rank in the fewest rounds"),
    _Rule(
        "header_exchange",
        "dissemination",
        None,
        None,
        "small equal blocks reach all ranks in the fewest rounds",
    ),
    *(
        _Rule("all_reduce", "direct", nbytes, world_size, "a small vector is published once, and everyone sums", shared=True)
        for nbytes, world_size in SHARED_DIRECT_LIMITS
    ),
    _Rule("all_reduce", "owners", None, None, "in shared memory each rank sums the chunk it owns, once for all", shared=True),
    _Rule("all_gather", "direct", None, None, _PUBLISHED, shared=True),
    *(
        _Rule(collective, "direct", None, None, _PUBLISHED, shared=True)
        for collective in (
            "broadcast", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all", "scan", "exscan",
        )
    ),
    _Rule("barrier", "direct", None, None, "in shared memory each rank looks at the words of all", shared=True),
    _Rule("header_exchange", "direct", None, None, _PUBLISHED, shared=True),
)


def sums_by_the_tree(collective: str, algorithm: str, world_size: int) -> bool:
    """Return whether an algorithm sums every element by the tree T(0, world_size); the checker proves it.

    Args:
        collective: Any; only reductions sum to one value for all.
        algorithm: One of `ALGORITHMS[collective]`.
        world_size: Ranks of the group.

    Example:
        >>> sums_by_the_tree("all_reduce", "tree", 5), sums_by_the_tree("all_reduce", "ring", 5)
        (True, False)
    """
    return collective in _REDUCTIONS and (algorithm in _SUM_BY_THE_TREE or world_size <= 2)


@lru_cache(maxsize=4096)
def choose(
    collective: str,
    nbytes: int,
    world_size: int,
    *,
    reproducible: bool = False,
    forced: str | None = None,
    shared: bool = False,
) -> Choice:
    """Choose the algorithm of a call.

    Args:
        collective: A key of `ALGORITHMS`.
        nbytes: Bytes of the vector, or of all blocks together; of an all-to-all, of the blocks of all ranks together.
        world_size: Ranks of the group.
        reproducible: Whether a reduction must sum by the tree T(0, world_size). A scan always sums by trees, and the
            other collectives sum nothing.
        forced: An algorithm that the user demands, or None.
        shared: All ranks see the same memory (the arena of one host); else frames travel over links.

    Returns:
        The algorithm and a sentence with the reason.

    Raises:
        ConfigError: There is no such collective or algorithm, or `forced` contradicts `reproducible`.

    Example:
        >>> choose("all_reduce", 1 << 20, 8).algorithm
        'ring'
        >>> choose("all_reduce", 512, 2).reason
        'direct: 512 bytes on 2 ranks: a small vector on few ranks is exchanged in a single round'
    """
    names = _algorithms(collective)
    by_tree = reproducible and collective in _REDUCTIONS
    if forced is not None:
        _check_name("algorithm", forced, names, f" for {collective}")
        if by_tree and not sums_by_the_tree(collective, forced, world_size):
            raise ConfigError(f"algorithm {forced!r} contradicts reproducible=True; leave one of them out")
        return Choice(forced, f"{forced}: the caller demands it")
    for rule in _RULES:
        if (
            rule.collective == collective
            and rule.shared == shared
            and (not by_tree or sums_by_the_tree(collective, rule.algorithm, world_size))
            and (rule.nbytes_max is None or nbytes <= rule.nbytes_max)
            and (rule.world_size_max is None or world_size <= rule.world_size_max)
        ):
            why = rule.why + ("; it sums by the tree, as the caller demands" if by_tree else "")
            return Choice(rule.algorithm, f"{rule.algorithm}: {nbytes} bytes on {world_size} ranks: {why}")
    raise AssertionError(f"the table has no last row for {collective}")


def build(
    collective: str,
    algorithm: str,
    rank: int,
    world_size: int,
    *,
    count: int = 0,
    counts: Sequence[int] | None = None,
    root: int = 0,
    matrix: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """Build the plan of one rank.

    Args:
        collective: A key of `ALGORITHMS`.
        algorithm: One of `ALGORITHMS[collective]`.
        rank: The rank in the group, 0 <= rank < world_size.
        world_size: Ranks of the group, >= 1.
        count: Elements of the vector; for collectives of blocks, of each rank's block if `counts` is None; for
            all_to_all, of every block if `matrix` is None. Not used by a barrier.
        counts: Elements of each rank's block, in rank order; for all_gather, header_exchange, gather, scatter and
            reduce_scatter only.
        root: The root of a broadcast, reduce, gather or scatter.
        matrix: matrix[s][d] elements go from rank s to rank d; for all_to_all only.

    Returns:
        The plan, with as much scratch as its chunks reach.

    Raises:
        ConfigError: An argument is out of range, or the algorithm cannot do this.

    Example:
        >>> plan = build("all_reduce", "ring", rank=0, world_size=4, count=10)
        >>> len(plan.rounds), plan.work_count, plan.scratch_count
        (6, 10, 0)
    """
    _check_name("algorithm", algorithm, _algorithms(collective), f" for {collective}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a group of {world_size}")
    if not 0 <= root < world_size:
        raise ConfigError(f"root {root} is not in a group of {world_size}")
    in_blocks = collective in _OF_BLOCKS
    if counts is not None and (not in_blocks or len(counts) != world_size):
        raise ConfigError(f"{collective} on {world_size} ranks cannot take {len(counts)} counts")
    if matrix is not None and (collective != "all_to_all" or {world_size} != {len(matrix), *map(len, matrix)}):
        raise ConfigError(f"{collective} on {world_size} ranks cannot take a matrix of {len(matrix)} rows like these")
    blocks = tuple(counts) if counts is not None else (count,) * world_size
    pairs = tuple(map(tuple, matrix)) if matrix is not None else (blocks,) * world_size
    lowest = min(map(min, (blocks, *pairs)))
    if lowest < 0:
        raise ConfigError(f"a count is negative: {lowest}")
    rounds = tuple(_BUILDERS[collective][algorithm](_Call(rank, world_size, count, blocks, root, pairs)))
    if in_blocks:
        work_count = sum(blocks)
    elif collective == "all_to_all":
        work_count = sum(pairs[rank]) + sum(row[rank] for row in pairs)
    else:
        work_count = 0 if collective == "barrier" else count
    return Plan(collective, algorithm, rank, world_size, work_count, _scratch_count(rounds), rounds)


def build_all(
    collective: str,
    algorithm: str,
    world_size: int,
    *,
    count: int = 0,
    counts: Sequence[int] | None = None,
    root: int = 0,
    matrix: Sequence[Sequence[int]] | None = None,
) -> list[Plan]:
    """Build the plans of all ranks, for the checker and for figures.

    Args:
        collective: As for `build`.
        algorithm: As for `build`.
        world_size: As for `build`.
        count: As for `build`.
        counts: As for `build`.
        root: As for `build`.
        matrix: As for `build`.

    Returns:
        The plans in rank order.

    Raises:
        ConfigError: As for `build`.
    """
    return [
        build(collective, algorithm, rank, world_size, count=count, counts=counts, root=root, matrix=matrix)
        for rank in range(world_size)
    ]


def _scratch_count(rounds: Sequence[Round]) -> int:
    most = 0
    for steps in rounds:
        for step in steps:
            for chunk in (step.source, step.target) if isinstance(step, Copy | Reduce) else (step.chunk,):
                if chunk.buffer == Buffer.SCRATCH and chunk.stop > most:
                    most = chunk.stop
    return most


def _algorithms(collective: str) -> tuple[str, ...]:
    _check_name("collective", collective, ALGORITHMS, "")
    return ALGORITHMS[collective]


def _check_name(kind: str, name: str, names: Iterable[str], where: str) -> None:
    if name in names:
        return
    import difflib  # only a wrong name needs it

    known = list(names)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(
        f"there is no {kind} {name!r}{where}; did you mean {nearest[0]!r}? Known: {', '.join(known)}"
    )
