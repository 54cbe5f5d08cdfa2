"""The choice of an algorithm by the rules of the collective.

The choice uses only what is equal on all ranks: the collective, sizes, the number of ranks,
settings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from syncvar.algorithms.builders import (
    SCHEDULES,
    Combination,
    check_algorithm,
    sums_by_the_tree,
    unsuited,
)
from syncvar.core.errors import ConfigError


class AlgorithmChoice(NamedTuple):
    """A chosen algorithm."""

    algorithm: str  # its name, for `build`
    reason: str  # the reason in one sentence


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
    known = SCHEDULES[collective]
    by_tree = reproducible and known.combines is Combination.ALL
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
    for rule in known.shm_rules if shared else known.link_rules:
        algorithm = rule.algorithm
        if (
            rule.fits(nbytes, world_size)
            and (not by_tree or sums_by_the_tree(collective, algorithm, world_size))
            and unsuited(collective, algorithm, world_size, even=even) is None
        ):
            reason = f"{algorithm}: {nbytes} bytes on {world_size} ranks: {rule.reason}"
            if by_tree:
                reason += "; it sums by the tree, as the caller demands"
            return AlgorithmChoice(algorithm, reason)
    raise AssertionError(f"the rules of {collective} have no last one")


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
    by_tree = reproducible and SCHEDULES[collective].combines is Combination.ALL
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
