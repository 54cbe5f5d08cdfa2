"""The timed interpreter against the closed formulas of the papers: equal where they are exact, within them elsewhere."""

from math import ceil, floor, log2

import pytest

from syncvar.algorithms.builders import ALGORITHMS, SCHEDULES, WorkLayout, build_all, unsuited
from syncvar.algorithms.cost_model import LINKS, SHM, CostModel, predicted_seconds
from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Schedule,
    Send,
)
from syncvar.algorithms.tree import PIECES

A, B, G = (
    1000.0,
    1.0,
    0.25,
)  # latency, per byte, per reduced byte: of a size that keeps the terms apart
MODEL = CostModel(latency=A, per_byte=B, per_reduced_byte=G, per_copied_byte=0.0)
POWERS = [1, 2, 4, 8, 16]
OTHERS = [3, 5, 6, 7, 9, 12, 17]
BLOCK = 48  # bytes of a block; m = n * BLOCK bytes in all


def depth(n):
    return ceil(log2(n))


def ring_like(n, m):
    return 2 * (n - 1) * A + 2 * (n - 1) / n * m * B + (n - 1) / n * m * G


def pieces_of_two_trees(n, m, gamma):
    # Sanders, Speck and Träff: 2s pieces of m/(2s) bytes; every rank of a tree of height h = floor(log2(n-1)) + 1, the
    # root's edge included, is at most two rounds behind its parent.
    rounds = 2 * PIECES + 2 * (floor(log2(n - 1)) + 1) if n > 1 else 0
    return rounds * (A + m * (B + gamma) / (2 * PIECES))


# Of n ranks and m bytes in all: exact for powers of two.
EXACT = {
    ("all_reduce", "direct"): lambda n, m: (
        (n - 1) * (A + m * B + m * G)
    ),  # Chan et al. 2007, linear
    ("all_reduce", "owners"): ring_like,
    ("all_reduce", "tree"): lambda n, m: (
        depth(n) * (2 * A + 2 * m * B + m * G)
    ),  # Thakur et al. 2005, 4.2 and 4.4
    ("all_reduce", "doubling"): lambda n, m: (
        depth(n) * (A + m * B + m * G)
    ),  # Thakur et al. 2005, 4.5
    ("all_reduce", "halving"): lambda n, m: (
        2 * depth(n) * A  # Rabenseifner 2004
        + 2 * (n - 1) / n * m * B
        + (n - 1) / n * m * G
    ),
    ("all_reduce", "ring"): ring_like,  # Patarasuk and Yuan 2009
    ("all_reduce", "reproducible"): ring_like,
    ("all_gather", "direct"): lambda n, m: (n - 1) * A + (n - 1) / n * m * B,
    ("all_gather", "ring"): lambda n, m: (n - 1) * A + (n - 1) / n * m * B,
    ("all_gather", "doubling"): lambda n, m: depth(n) * A + (n - 1) / n * m * B,
    ("all_gather", "dissemination"): lambda n, m: (
        depth(n) * A + (n - 1) / n * m * B
    ),  # Bruck et al. 1997
    ("broadcast", "direct"): lambda n, m: (n - 1) * (A + m * B),
    ("broadcast", "tree"): lambda n, m: depth(n) * (A + m * B),
    ("reduce", "direct"): lambda n, m: (n - 1) * (A + m * B + m * G),
    ("reduce", "tree"): lambda n, m: depth(n) * (A + m * B + m * G),
    ("gather", "direct"): lambda n, m: (n - 1) * (A + m / n * B),
    ("gather", "tree"): lambda n, m: depth(n) * A + (n - 1) / n * m * B,
    ("scatter", "direct"): lambda n, m: (n - 1) * (A + m / n * B),
    ("scatter", "tree"): lambda n, m: depth(n) * A + (n - 1) / n * m * B,
    ("reduce_scatter", "direct"): lambda n, m: (n - 1) * A + (n - 1) / n * m * (B + G),
    ("reduce_scatter", "pairwise"): lambda n, m: (n - 1) * A + (n - 1) / n * m * (B + G),
    ("all_to_all", "direct"): lambda n, m: (
        (n - 1) * A + (n - 1) / n * m * B
    ),  # m bytes of each rank
    ("all_to_all", "pairwise"): lambda n, m: (n - 1) * A + (n - 1) / n * m * B,
    ("all_to_all", "bruck"): lambda n, m: depth(n) * (A + m / 2 * B),
    ("scan", "direct"): lambda n, m: (n - 1) * (A + m * B + m * G),
    ("exscan", "direct"): lambda n, m: (n - 1) * (A + m * B) + max(n - 2, 0) * m * G,
    ("barrier", "direct"): lambda n, m: (n - 1) * A,
    ("barrier", "dissemination"): lambda n, m: depth(n) * A,
    ("header_exchange", "direct"): lambda n, m: (n - 1) * A + (n - 1) / n * m * B,
    ("header_exchange", "dissemination"): lambda n, m: depth(n) * A + (n - 1) / n * m * B,
}

# Never more than this; what the paper counts and the plan can avoid, or a schedule that is not full in every round.
AT_MOST = {
    ("broadcast", "double_tree"): lambda n, m: pieces_of_two_trees(n, m, 0),
    ("reduce", "double_tree"): lambda n, m: pieces_of_two_trees(n, m, G),
    ("broadcast", "scatter_gather"): lambda n, m: (depth(n) + n - 1) * A + 2 * (n - 1) / n * m * B,
    ("reduce", "owners"): lambda n, m: (
        2 * (n - 1) * A + 2 * (n - 1) / n * m * B + (n - 1) / n * m * G
    ),
    ("scan", "doubling"): lambda n, m: depth(n) * (A + m * B + 2 * m * G),  # MPICH
    ("exscan", "doubling"): lambda n, m: depth(n) * (A + m * B + 2 * m * G),
}

# For other numbers of ranks: the formula with rounded-up logarithms bounds it, and folding adds two whole vectors.
FOLDING = {("all_reduce", "doubling"), ("all_reduce", "halving")}


def seconds(collective, algorithm, n):
    count = BLOCK * (n if SCHEDULES[collective].work is WorkLayout.VECTOR else 1)
    return predicted_seconds(build_all(collective, algorithm, n, count=count), 1, MODEL)


def test_every_algorithm_has_a_formula():
    pairs = {
        (collective, algorithm) for collective, names in ALGORITHMS.items() for algorithm in names
    }
    assert EXACT.keys() | AT_MOST.keys() == pairs
    assert not EXACT.keys() & AT_MOST.keys()


@pytest.mark.parametrize("pair", EXACT)
def test_powers_of_two_take_what_the_paper_says(pair):
    for n in POWERS:
        assert seconds(*pair, n) == pytest.approx(EXACT[pair](n, n * BLOCK)), n


@pytest.mark.parametrize("pair", AT_MOST)
def test_a_bound_holds_and_is_not_far(pair):
    for n in POWERS + OTHERS:
        bound = AT_MOST[pair](n, n * BLOCK)
        assert bound * 0.4 <= seconds(*pair, n) <= bound * (1 + 1e-9), n


@pytest.mark.parametrize("pair", EXACT)
def test_other_numbers_of_ranks_stay_within_the_formula(pair):
    for n in OTHERS:
        if unsuited(*pair, n, even=True):
            continue
        m = n * BLOCK
        bound = EXACT[pair](n, m)
        if pair in FOLDING:
            bound = EXACT[pair](1 << floor(log2(n)), m) + 2 * (A + m * B) + m * G
        if pair == ("all_to_all", "bruck"):  # n/2 blocks at most in each round, if rounded up
            bound = depth(n) * (A + -(-n // 2) * BLOCK * B)
        assert bound * 0.5 <= seconds(*pair, n) <= bound * (1 + 1e-9), n


def one(*rounds_of_ranks):
    return [
        Schedule("test", "test", rank, len(rounds_of_ranks), 9, 9, tuple(rounds))
        for rank, rounds in enumerate(rounds_of_ranks)
    ]


def test_a_message_takes_both_ports_and_directions_do_not_wait_for_each_other():
    chunk = Chunk(0, 8)
    there = [(Send(1, chunk),)], [(Recv(0, chunk),)]
    assert predicted_seconds(one(*there), 2, MODEL) == A + 16 * B
    both = [(Send(1, chunk), Recv(1, chunk))], [(Send(0, chunk), Recv(0, chunk))]
    assert predicted_seconds(one(*both), 2, MODEL) == A + 16 * B
    fan_in = [(Recv(1, chunk), Recv(2, chunk))], [(Send(0, chunk),)], [(Send(0, chunk),)]
    assert predicted_seconds(one(*fan_in), 2, MODEL) == 2 * (A + 16 * B)


def test_a_round_begins_when_the_one_before_has_ended():
    chunk = Chunk(0, 8)
    relay = [(Send(1, chunk),), ()], [(Recv(0, chunk),), (Send(2, chunk),)], [(), (Recv(1, chunk),)]
    assert predicted_seconds(one(*relay), 1, MODEL) == 2 * (A + 8 * B)


def test_reductions_and_copies_count():
    model = CostModel(0.0, 0.0, 2.0, 3.0)
    reducing = [(Send(1, Chunk(0, 4)),)], [(RecvReduce(0, Chunk(0, 4), incoming_left=True),)]
    assert predicted_seconds(one(*reducing), 1, model) == 8
    assert (
        predicted_seconds(one([(Copy(Chunk(0, 4), Chunk(0, 4, Buffer.SCRATCH)),)]), 1, model) == 12
    )


def test_shared_memory_publishes_once_what_several_take():
    model = CostModel(A, B, G, 0.0, shared=True)
    for n in (2, 5, 9):
        plans = build_all("broadcast", "direct", n, count=100)
        assert predicted_seconds(plans, 1, model) == A + 200 * B
    plans = build_all("all_reduce", "owners", 4, count=8)
    assert predicted_seconds(plans, 1, model) == 2 * A + (6 + 6) * B + 6 * G + (2 + 6) * B


def test_a_group_of_one_takes_no_time():
    for model in (LINKS, SHM):
        assert predicted_seconds(build_all("all_reduce", "ring", 1, count=9), 4, model) == 0


def test_the_prediction_does_not_depend_on_the_size_for_its_own_cost():
    plans = build_all("all_reduce", "ring", 8, count=1 << 40)
    assert predicted_seconds(plans, 4, LINKS) > 1000
