"""The choice of an algorithm: one table of rules, and the reason of each.

The choice uses only what is equal on all ranks: the collective, sizes, the number of ranks,
settings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from syncvar.algorithms.builders import REDUCTIONS, check_algorithm, sums_by_the_tree, unsuited
from syncvar.core.errors import ConfigError

SMALL = 64 * 1024  # up to this size rounds cost more than bytes
LONG = 256 * 1024  # from this size a second copy of the vector costs more than some rounds
HUGE = 4 * 1024 * 1024  # from this size a pipeline pays for its messages
SHARED_DIRECT_LIMITS = ((64 * 1024, 4), (16 * 1024, 16), (4 * 1024, None))  # bytes, ranks


class AlgorithmChoice(NamedTuple):
    """A chosen algorithm."""

    algorithm: str  # its name, for `build`
    reason: str  # the reason in one sentence


class _Rule(NamedTuple):
    """One row of a table of rules; the first row that fits decides."""

    collective: str  # a key of `ALGORITHMS`
    algorithm: str  # the algorithm that the rule chooses
    reason: str  # the reason for `syncvar plan`
    nbytes_max: int | None = None  # largest size in bytes; None for no limit
    ranks: tuple[int, int | None] = (1, None)  # fewest and most ranks; None for no limit
    power_of_two: bool = False  # whether the number of ranks must be a power of two

    def fits(self, nbytes: int, world_size: int) -> bool:
        fewest, most = self.ranks
        return (
            (self.nbytes_max is None or nbytes <= self.nbytes_max)
            and fewest <= world_size
            and (most is None or world_size <= most)
            and not (self.power_of_two and world_size & (world_size - 1))
        )


# Reasons that `syncvar plan` shows.
_BARRIER = "it reaches all ranks in the fewest rounds"
_BLOCK_ONCE = "each block is sent once, in one round"
_BLOCK_PAIRS = "each block is sent once, to one rank at a time"
_DOUBLES = "each round doubles the known blocks"
_FEW_BYTES = "for a long vector the number of bytes decides"
_FEW_ROUNDS = "for a small vector the number of rounds decides"
_HALVES = "ranks exchange halves in few rounds, and send no more than on a ring"
_MANY_RANKS = "on many ranks a ring needs too many rounds"
_ONE_MESSAGE = "there is one message to send"
_ONE_ROUND = "a small vector on few ranks takes one round"
_OWNERS = "each rank reduces a part of a long vector"
_PARTS = "ranks pass on parts of a long vector"
_PIPELINE = "a pipeline of pieces keeps all links busy"
_PUBLISHED = "in shared memory a rank publishes its data once for all others"
_ROOT = "each block goes directly to or from the root"
_SCAN_DIRECT = "each rank sends its vector once to each higher rank"
_SCAN_DOUBLING = "each round doubles the summed blocks of ranks"
_SHM_BARRIER = "in shared memory each rank reads the words of all others"
_SHM_BLOCK = "in shared memory each rank reduces its own block"
_SHM_OWNERS = "in shared memory each rank reduces its own part for all"
_SHM_SMALL = "each rank publishes a small vector once and reduces all vectors"
_SMALL_BLOCKS = "small equal blocks travel together in few rounds"
_TOGETHER = "small blocks travel together"
_TREE = "the tree reaches all ranks in the fewest rounds"
_TWO_LINKS = "for long blocks or many ranks each rank uses two links only"

_MIB = 1024 * 1024

# The limits over links follow `syncvar.cli.plan.predicted_seconds` with its LINKS constants,
# rounded; a test keeps the table near the best prediction. Ties go to fewer copies, then less
# scratch, then fewer bytes through one rank.
_LINK_RULES = (
    _Rule("all_reduce", "direct", _ONE_ROUND, 16 * 1024, (1, 3)),
    _Rule("all_reduce", "doubling", _FEW_ROUNDS, SMALL),
    _Rule("all_reduce", "tree", _FEW_ROUNDS, SMALL),
    _Rule("all_reduce", "halving", _HALVES, power_of_two=True),
    _Rule("all_reduce", "halving", _MANY_RANKS, _MIB, (9, None)),
    _Rule("all_reduce", "ring", _FEW_BYTES),
    _Rule("all_reduce", "reproducible", _FEW_BYTES),
    _Rule("all_gather", "direct", _ONE_ROUND, 32 * 1024, (1, 3)),
    _Rule("all_gather", "doubling", _DOUBLES, HUGE, (4, None)),
    _Rule("all_gather", "dissemination", _SMALL_BLOCKS, _MIB, (4, None)),
    _Rule("all_gather", "direct", _ONE_ROUND, 32 * 1024, (1, 8)),
    _Rule("all_gather", "ring", _TWO_LINKS),
    _Rule("broadcast", "tree", _TREE, LONG),
    _Rule("broadcast", "tree", _ONE_MESSAGE, None, (1, 2)),
    _Rule("broadcast", "double_tree", _PIPELINE, None, (32, None)),
    _Rule("broadcast", "scatter_gather", _PARTS, HUGE),
    _Rule("broadcast", "double_tree", _PIPELINE),
    _Rule("reduce", "tree", _FEW_ROUNDS, LONG),
    _Rule("reduce", "double_tree", _PIPELINE, None, (16, None)),
    _Rule("reduce", "owners", _OWNERS, HUGE),
    _Rule("reduce", "owners", _OWNERS, None, (1, 2)),
    _Rule("reduce", "double_tree", _PIPELINE),
    _Rule("reduce", "owners", _OWNERS),
    *(
        rule
        for collective in ("gather", "scatter")
        for rule in (
            _Rule(collective, "tree", _TOGETHER, _MIB, (4, None)),
            _Rule(collective, "tree", _TOGETHER, HUGE, (16, None)),
            _Rule(collective, "direct", _ROOT),
        )
    ),
    _Rule("reduce_scatter", "direct", _BLOCK_ONCE, LONG),
    _Rule("reduce_scatter", "pairwise", _BLOCK_PAIRS),
    _Rule("all_to_all", "bruck", _SMALL_BLOCKS, SMALL, (4, None)),
    _Rule("all_to_all", "bruck", _SMALL_BLOCKS, LONG, (12, None)),
    _Rule("all_to_all", "direct", _BLOCK_ONCE, _MIB),
    _Rule("all_to_all", "pairwise", _BLOCK_PAIRS),
    *(
        rule
        for collective in ("scan", "exscan")
        for rule in (
            _Rule(collective, "direct", _SCAN_DIRECT, None, (1, 3)),
            _Rule(collective, "doubling", _SCAN_DOUBLING),
        )
    ),
    _Rule("barrier", "dissemination", _BARRIER),
    _Rule("header_exchange", "dissemination", _SMALL_BLOCKS),
)
_PUBLISHING = (
    *("all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
    *("scan", "exscan", "header_exchange"),
)
_SHM_RULES = (
    *(
        _Rule("all_reduce", "direct", _SHM_SMALL, nbytes, (1, most))
        for nbytes, most in SHARED_DIRECT_LIMITS
    ),
    _Rule("all_reduce", "owners", _SHM_OWNERS),
    _Rule("reduce_scatter", "direct", _SHM_BLOCK),
    _Rule("barrier", "direct", _SHM_BARRIER),
    *(_Rule(collective, "direct", _PUBLISHED) for collective in _PUBLISHING),
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
    even: bool = False,
) -> AlgorithmChoice:
    """Choose the algorithm of a call; raise ConfigError if `forced` is unknown or unsuitable.

    `nbytes` are those of the vector or of all blocks; in an all-to-all, the mean that a rank sends.
    `even`: all blocks have the same count. `shared`: all ranks share memory.

    Example:
        >>> choose("all_reduce", 1 << 20, 6).algorithm
        'ring'
        >>> choose("all_reduce", 512, 2).reason
        'direct: 512 bytes on 2 ranks: a small vector on few ranks takes one round'
    """
    check_algorithm(collective, forced)
    by_tree = reproducible and collective in REDUCTIONS
    if forced is not None:
        fault = unsuited(collective, forced, world_size, even=True)  # `build` checks the blocks
        if fault is not None:
            raise ConfigError(fault)
        if by_tree and not sums_by_the_tree(collective, forced, world_size):
            raise ConfigError(
                f"algorithm {forced!r} contradicts reproducible=True; leave one of them out"
            )
        return AlgorithmChoice(forced, f"{forced}: the caller demands it")
    even = even or collective == "header_exchange"
    for rule in _SHM_RULES if shared else _LINK_RULES:
        algorithm = rule.algorithm
        if (
            rule.collective == collective
            and rule.fits(nbytes, world_size)
            and (not by_tree or sums_by_the_tree(collective, algorithm, world_size))
            and unsuited(collective, algorithm, world_size, even=even) is None
        ):
            reason = f"{algorithm}: {nbytes} bytes on {world_size} ranks: {rule.reason}"
            if by_tree:
                reason += "; it sums by the tree, as the caller demands"
            return AlgorithmChoice(algorithm, reason)
    raise AssertionError(f"the table has no last row for {collective}")


def suited(
    collective: str, wanted: str | None, world_size: int, *, even: bool, reproducible: bool
) -> str | None:
    """Return the algorithm that the job demands, or None if it does not suit the call.

    Example:
        >>> suited("all_reduce", "ring", 4, even=True, reproducible=False)
        'ring'
        >>> suited("all_reduce", "ring", 4, even=True, reproducible=True)
    """
    if wanted is None or unsuited(collective, wanted, world_size, even=even):
        return None
    by_tree = reproducible and collective in REDUCTIONS
    return None if by_tree and not sums_by_the_tree(collective, wanted, world_size) else wanted


def parse_forced(text: str) -> dict[str, str]:
    """Parse the setting that demands algorithms: comma-separated "collective:algorithm" items.

    Example:
        >>> parse_forced("all_reduce:ring, broadcast:tree")
        {'all_reduce': 'ring', 'broadcast': 'tree'}
    """
    forced: dict[str, str] = {}
    for item in text.split(",") if text.strip() else ():
        collective, colon, algorithm = (part.strip() for part in item.partition(":"))
        if not (collective and colon and algorithm):
            raise ConfigError(
                f"an algorithm is demanded as collective:algorithm, not {item.strip()!r}"
            )
        check_algorithm(collective, algorithm)
        if collective in forced:
            both = f"{forced[collective]!r} and {algorithm!r}"
            raise ConfigError(f"two algorithms are demanded for {collective}: {both}")
        forced[collective] = algorithm
    return forced
