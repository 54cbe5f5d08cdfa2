"""Which algorithm, and why: the one table through which every plan is chosen and built.

The choice uses only what is the same on every rank: the collective, the size, the number of ranks,
fixed settings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from syncvar.algorithms.builders import REDUCTIONS, check_algorithm, sums_by_the_tree, unsuited
from syncvar.core.errors import ConfigError

SMALL = 64 * 1024  # bytes up to which rounds cost more than bytes
LONG = 256 * 1024  # bytes from which a second copy of the vector costs more than some rounds
HUGE = 4 * 1024 * 1024  # bytes from which pieces of a pipeline are worth their messages
SHARED_DIRECT_LIMITS = ((64 * 1024, 4), (16 * 1024, 16), (4 * 1024, None))  # bytes, ranks


class AlgorithmChoice(NamedTuple):
    """A chosen algorithm.

    Args:
        algorithm: Its name, for `build`.
        reason: Why, in one sentence.
    """

    algorithm: str
    reason: str


class _Rule(NamedTuple):
    """One row of the table of choices: the first that fits is taken.

    Args:
        collective: Which collective.
        algorithm: What is taken.
        why: The reason, in words.
        nbytes_max: Bytes up to which it fits; None is no limit.
        ranks: Fewest and most ranks; None is no limit.
        power_of_two: It fits only powers of two of ranks.
        shared: For memory that all ranks see, else for links.
    """

    collective: str
    algorithm: str
    why: str
    nbytes_max: int | None = None
    ranks: tuple[int, int | None] = (1, None)
    power_of_two: bool = False
    shared: bool = False

    def fits(self, nbytes: int, world_size: int) -> bool:
        fewest, most = self.ranks
        return (
            (self.nbytes_max is None or nbytes <= self.nbytes_max)
            and fewest <= world_size
            and (most is None or world_size <= most)
            and not (self.power_of_two and world_size & (world_size - 1))
        )


_PUBLISHED = "in shared memory a rank publishes once what all others take"
_ONE_ROUND = "few ranks exchange what is small in a single round"
_FEWEST_ROUNDS = "what is small needs few rounds more than few bytes"
_BALANCED = "a long vector needs few bytes more than few rounds"
_PIPELINE = "a long vector goes in pieces, which all ranks pass on at once"

# Over links the borders follow `syncvar.cli.plan_cost.predicted_seconds` with its constants of
# LINKS, rounded to few numbers; a test keeps the table near the best of the predictions. What the
# model does not know decides between equals: fewer copies, less scratch, fewer bytes through one
# rank.
_RULES = (
    _Rule("all_reduce", "direct", _ONE_ROUND, 16 * 1024, (1, 3)),
    _Rule("all_reduce", "doubling", _FEWEST_ROUNDS, SMALL),
    _Rule("all_reduce", "tree", _FEWEST_ROUNDS, SMALL),
    _Rule("all_reduce", "halving", "halves are exchanged in few rounds, and no rank sends more than on a ring", power_of_two=True),
    _Rule("all_reduce", "halving", "on many ranks the rounds of a ring cost more than the folding of some", 1024 * 1024, (9, None)),
    _Rule("all_reduce", "ring", _BALANCED),
    _Rule("all_reduce", "reproducible", "a long vector moves as few bytes as on a ring"),
    _Rule("all_gather", "direct", _ONE_ROUND, 32 * 1024, (1, 3)),
    _Rule("all_gather", "doubling", "what is known doubles in each round", HUGE, (4, None)),
    _Rule("all_gather", "dissemination", "small equal blocks reach all ranks in the fewest rounds", 1024 * 1024, (4, None)),
    _Rule("all_gather", "direct", _ONE_ROUND, 32 * 1024, (1, 8)),
    _Rule("all_gather", "ring", "long blocks or many ranks use two links per rank"),
    _Rule("broadcast", "tree", "the tree reaches all ranks in the fewest rounds", LONG),
    _Rule("broadcast", "tree", "there is one message to send", None, (1, 2)),
    _Rule("broadcast", "double_tree", _PIPELINE, None, (32, None)),
    _Rule("broadcast", "scatter_gather", "a long vector is cut, and all ranks pass on the parts", HUGE),
    _Rule("broadcast", "double_tree", _PIPELINE),
    _Rule("reduce", "tree", _FEWEST_ROUNDS, LONG),
    _Rule("reduce", "double_tree", _PIPELINE, None, (16, None)),
    _Rule("reduce", "owners", "a long vector is cut, and each rank sums a part", HUGE),
    _Rule("reduce", "owners", "each rank sums a half", None, (1, 2)),
    _Rule("reduce", "double_tree", _PIPELINE),
    _Rule("reduce", "owners", "a long vector is cut, and each rank sums a part"),
    *(
        rule
        for collective in ("gather", "scatter")
        for rule in (
            _Rule(collective, "tree", "blocks that are small together travel together", 1024 * 1024, (4, None)),
            _Rule(collective, "tree", "blocks that are small together travel together", HUGE, (16, None)),
            _Rule(collective, "direct", "each block is sent once, by or to the root"),
        )
    ),
    _Rule("reduce_scatter", "direct", "each block is sent once, in a single round", LONG),
    _Rule("reduce_scatter", "pairwise", "each block is sent once, to one rank at a time"),
    _Rule("all_to_all", "bruck", "small equal blocks travel together in few rounds", SMALL, (4, None)),
    _Rule("all_to_all", "bruck", "small equal blocks travel together in few rounds", LONG, (12, None)),
    _Rule("all_to_all", "direct", "each block is sent once, in a single round", 1024 * 1024),
    _Rule("all_to_all", "pairwise", "each block is sent once, to one rank at a time"),
    *(
        rule
        for collective in ("scan", "exscan")
        for rule in (
            _Rule(collective, "direct", "each vector is sent once to each rank above", None, (1, 3)),
            _Rule(collective, "doubling", "the sums of blocks of ranks double in each round"),
        )
    ),
    _Rule("barrier", "dissemination", "every rank hears of every rank in the fewest rounds"),
    _Rule("header_exchange", "dissemination", "small equal blocks reach all ranks in the fewest rounds"),
    *(
        _Rule("all_reduce", "direct", "a small vector is published once, and everyone sums", nbytes, (1, most), shared=True)
        for nbytes, most in SHARED_DIRECT_LIMITS
    ),
    _Rule("all_reduce", "owners", "in shared memory each rank sums the chunk it owns, once for all", shared=True),
    _Rule("reduce_scatter", "direct", "in shared memory each rank sums the block it owns, once for all", shared=True),
    _Rule("barrier", "direct", "in shared memory each rank looks at the words of all", shared=True),
    *(
        _Rule(collective, "direct", _PUBLISHED, shared=True)
        for collective in (
            "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "scan", "exscan", "header_exchange",
        )
    ),
)  # fmt: skip


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
    """Choose the algorithm of a call.

    Example:
        >>> choose("all_reduce", 1 << 20, 6).algorithm
        'ring'
        >>> choose("all_reduce", 512, 2).reason
        'direct: 512 bytes on 2 ranks: few ranks exchange what is small in a single round'
    """
    check_algorithm(collective, forced)
    by_tree = reproducible and collective in REDUCTIONS
    if forced is not None:
        fault = unsuited(
            collective, forced, world_size, even=True
        )  # uneven blocks are known when the plan is built
        if fault is not None:
            raise ConfigError(fault)
        if by_tree and not sums_by_the_tree(collective, forced, world_size):
            raise ConfigError(
                f"algorithm {forced!r} contradicts reproducible=True; leave one of them out"
            )
        return AlgorithmChoice(forced, f"{forced}: the caller demands it")
    for rule in _RULES:
        if (
            rule.collective == collective
            and rule.shared == shared
            and rule.fits(nbytes, world_size)
            and (not by_tree or sums_by_the_tree(collective, rule.algorithm, world_size))
            and unsuited(
                collective, rule.algorithm, world_size, even=even or collective == "header_exchange"
            )
            is None
        ):
            why = rule.why + ("; it sums by the tree, as the caller demands" if by_tree else "")
            return AlgorithmChoice(
                rule.algorithm, f"{rule.algorithm}: {nbytes} bytes on {world_size} ranks: {why}"
            )
    raise AssertionError(f"the table has no last row for {collective}")


def suited(
    collective: str, wanted: str | None, world_size: int, *, even: bool, reproducible: bool
) -> str | None:
    """Return the algorithm that a job demands, or None for calls that it cannot serve: these choose for themselves.

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
    """Read the setting that demands algorithms for a whole job.

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
            raise ConfigError(
                f"two algorithms are demanded for {collective}: {forced[collective]!r} and {algorithm!r}"
            )
        forced[collective] = algorithm
    return forced
