"""Who has heard of whom when a plan over links ends: the calls of a group rely on it to find that they disagree.

A rank that has heard of all others has made the same call as they. Of a collective in which only one rank has, that
one tells the others (`release_others`); the collectives with neither begin with a header exchange.
"""

from dataclasses import replace

import pytest

from syncvar.algorithms.builders import ALGORITHMS, SCHEDULES, WorkLayout, build_all, unsuited
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify

SIZES = (2, 3, 4, 5, 8, 9)
ALL_HEAR = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "header_exchange")
ONE_HEARS = {"reduce": 0, "scan": -1, "exscan": -1}


def proven(collective, algorithm, size, count, heard_of):
    """Prove that at their end these ranks have heard of these others."""
    by_layout = {WorkLayout.NOTHING: {}, WorkLayout.BLOCKS: {"counts": (count,) * size}}
    sizes = by_layout.get(SCHEDULES[collective].work, {"count": count})
    contract = replace(contract_of(collective, size, **sizes), heard_of=heard_of)
    verify(build_all(collective, algorithm, size, **sizes), contract)


def cases(collectives):
    return [
        (collective, algorithm)
        for collective in collectives
        for algorithm in ALGORITHMS[collective]
    ]


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(("collective", "algorithm"), cases(ALL_HEAR))
def test_all_ranks_have_heard_of_all(collective, algorithm, count):
    for size in SIZES:
        if unsuited(collective, algorithm, size, even=True) is None:
            proven(collective, algorithm, size, count, (tuple(range(size)),) * size)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(("collective", "algorithm"), cases(ONE_HEARS))
def test_the_witness_has_heard_of_all(collective, algorithm, count):
    for size in SIZES:
        witness = range(size)[ONE_HEARS[collective]]
        heard_of = tuple(tuple(range(size)) if rank == witness else () for rank in range(size))
        proven(collective, algorithm, size, count, heard_of)


@pytest.mark.parametrize("algorithm", ALGORITHMS["broadcast"])
def test_an_empty_broadcast_is_heard_by_all(algorithm):
    for size in SIZES:
        if unsuited("broadcast", algorithm, size, even=True) is None:
            proven("broadcast", algorithm, size, 0, ((0,),) * size)
