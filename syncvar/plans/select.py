"""Which algorithm, and why: the one table through which every plan is chosen and built.

The choice uses only what is the same on every rank: the collective, the size, the number of ranks, fixed settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from syncvar.errors import ConfigError
from syncvar.plans.table import REDUCTIONS, check_algorithm, sums_by_the_tree, unsuited

__all__ = ["Choice", "choose", "parse_forced"]

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
class _Rule:
    """One row of the table of choices; None is no limit. `shared`: in memory that all ranks see, else over links."""

    collective: str
    algorithm: str
    nbytes_max: int | None
    world_size_max: int | None
    why: str
    shared: bool = False


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
    check_algorithm(collective, forced)
    by_tree = reproducible and collective in REDUCTIONS
    if forced is not None:
        fault = unsuited(collective, forced, world_size, even=True)  # uneven blocks are known when the plan is built
        if fault is not None:
            raise ConfigError(fault)
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


def parse_forced(text: str) -> dict[str, str]:
    """Read the setting that demands algorithms for a whole job.

    Args:
        text: "collective:algorithm" items, separated by commas; spaces around names do not matter, and nothing
            demands nothing.

    Returns:
        The algorithm of each collective that is named, for `forced` of `choose`.

    Raises:
        ConfigError: An item is not written like this, names what does not exist, or repeats a collective.

    Example:
        >>> parse_forced("all_reduce:ring, broadcast:tree")
        {'all_reduce': 'ring', 'broadcast': 'tree'}
    """
    forced: dict[str, str] = {}
    for item in text.split(",") if text.strip() else ():
        collective, colon, algorithm = (part.strip() for part in item.partition(":"))
        if not (collective and colon and algorithm):
            raise ConfigError(f"an algorithm is demanded as collective:algorithm, not {item.strip()!r}")
        check_algorithm(collective, algorithm)
        if collective in forced:
            raise ConfigError(f"two algorithms are demanded for {collective}: {forced[collective]!r} and {algorithm!r}")
        forced[collective] = algorithm
    return forced
