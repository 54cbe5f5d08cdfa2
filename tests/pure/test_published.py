"""Plans read as publications: the publications of every algorithm, carried out on plain lists, fulfil its contract.

This is what the ranks of one host do in shared memory: in each round all publish, then each takes its part.
"""

import pytest

from syncvar.errors import ConfigError, PlanError
from syncvar.plans import ALGORITHMS, Chunk, Copy, Plan, Recv, build_all, contract_of, publications

UNEVEN = [2, 0, 3, 1, 4]


def carried_out(plans, contract):
    """Return WORK of every rank after the rounds; values are expressions over (rank, element)."""
    size = len(plans)
    memory = []
    for rank, plan in enumerate(plans):
        before = contract.before[rank]
        work = [(rank, place) if before.start <= place < before.stop else None for place in range(contract.work_counts[rank])]
        memory.append((work, [None] * plan.scratch_count))
    rounds = [publications(plans, rank) for rank in range(size)]
    for number in range(max(map(len, rounds))):
        mine = {rank: rounds[rank][number] for rank in range(size) if number < len(rounds[rank])}
        published = {rank: [v for c in one.ranges for v in memory[rank][c.buffer][c.start : c.stop]] for rank, one in mine.items()}
        for rank, one in mine.items():
            assert len(published[rank]) == one.length
            assert one.longest == max(map(len, published.values()))
            for take in one.takes:
                values = published[take.peer][take.start : take.start + take.target.count]
                assert len(values) == take.target.count
                put(memory[rank], take.target, values, take.step, getattr(take.step, "incoming_left", False))
            for step in one.local:
                values = memory[rank][step.source.buffer][step.source.start : step.source.stop]
                put(memory[rank], step.target, values, step, getattr(step, "source_left", False))
    return [work for work, _ in memory]


def put(buffers, chunk, values, step, left):
    held = buffers[chunk.buffer]
    for place, value in enumerate(values, chunk.start):
        if isinstance(step, Recv | Copy):
            held[place] = value
        else:
            assert value is not None
            assert held[place] is not None
            held[place] = (value, held[place]) if left else (held[place], value)


def leaves(value):
    if value is None or isinstance(value[0], int):
        return [value]
    return leaves(value[0]) + leaves(value[1])


def written(expression, element):
    """The contract's expression over ranks as one over (rank, element)."""
    if isinstance(expression, int):
        return (expression, element)
    return written(expression[0], element), written(expression[1], element)


def check(collective, algorithm, size, **arguments):
    plans = build_all(collective, algorithm, size, **arguments)
    contract = contract_of(collective, size, **arguments)
    agreed = {}
    for rank, work in enumerate(carried_out(plans, contract)):
        for wanted in contract.after[rank]:
            shift = 0 if wanted.origin is None else wanted.origin - wanted.chunk.start
            for place in range(wanted.chunk.start, wanted.chunk.stop):
                value, element = work[place], place + shift
                assert sorted(leaves(value)) == [(other, element) for other in sorted(wanted.contributors)]
                assert agreed.setdefault((element, wanted.contributors), value) == value, "the bytes would differ"
                if wanted.expression is not None:
                    assert value == written(wanted.expression, element)


@pytest.mark.parametrize(("collective", "algorithm"), [(c, a) for c, names in ALGORITHMS.items() for a in names])
def test_publications_fulfil_the_contract(collective, algorithm):
    for size in range(1, 6):
        for count in (0, 1, size, 7):
            for root in range(size):
                check(collective, algorithm, size, count=count, root=root)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [(c, a) for c in ("all_gather", "gather", "scatter", "reduce_scatter", "header_exchange") for a in ALGORITHMS[c]],
)
def test_uneven_blocks(collective, algorithm):
    for size in range(1, 6):
        for turn in range(size):
            counts = [*UNEVEN[:size][turn:], *UNEVEN[:size][:turn]]
            try:
                build_all(collective, algorithm, size, counts=counts)
            except ConfigError:  # this one wants even blocks
                continue
            for root in range(size):
                check(collective, algorithm, size, counts=counts, root=root)


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_to_all"])
def test_uneven_exchanges(algorithm):
    for size in range(1, 6):
        matrix = [[(3 * source + 2 * target) % 4 for target in range(size)] for source in range(size)]
        check("all_to_all", algorithm, size, matrix=matrix)


@pytest.mark.parametrize("algorithm", ALGORITHMS["barrier"])
def test_everybody_hears_of_everybody_in_a_barrier(algorithm):
    for size in range(1, 9):
        plans = build_all("barrier", algorithm, size)
        heard = [{rank} for rank in range(size)]
        rounds = [publications(plans, rank) for rank in range(size)]
        for number in range(len(rounds[0])):
            before = [set(one) for one in heard]
            for rank in range(size):
                for take in rounds[rank][number].takes:
                    heard[rank] |= before[take.peer]
        assert heard == [set(range(size))] * size


def test_what_several_ranks_take_is_published_once():
    for rank in range(5):
        (only,) = publications(build_all("all_gather", "direct", 5, counts=UNEVEN), rank)
        assert only.length == UNEVEN[rank]
        assert only.longest == 4


def test_a_receive_without_a_send_is_refused():
    silent = Plan("broadcast", "planted", 0, 2, 3, 0, ((),))
    eager = Plan("broadcast", "planted", 1, 2, 3, 0, ((Recv(0, Chunk(0, 3)),),))
    with pytest.raises(PlanError, match="rank 0 sends nothing to rank 1"):
        publications([silent, eager], 1)
