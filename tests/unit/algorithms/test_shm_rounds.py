"""Plans as publications, run on numbers: in shared memory they give what the plans give over links."""

import pytest

from syncvar.algorithms.builders import ALGORITHMS, build_all, unsuited
from syncvar.algorithms.compile_schedule import publications
from syncvar.algorithms.schedule import Buffer, Chunk, Copy, Recv, RecvReduce, Reduce, Schedule
from syncvar.core.errors import PlanError
from tests.verification.schedules.collective_contracts import contract_of

CASES = [
    (collective, algorithm, n)
    for collective, names in ALGORITHMS.items()
    for algorithm in names
    for n in (1, 2, 3, 4, 6)
    if unsuited(collective, algorithm, n, even=True) is None
]


def run_in_shared_memory(plans, work):
    """Run all ranks phase by phase: all publish and take, then do their local steps."""
    published = [publications(plans, plan.rank) for plan in plans]
    memory = [
        {Buffer.WORK: list(values), Buffer.SCRATCH: [None] * plan.scratch_count}
        for plan, values in zip(plans, work, strict=True)
    ]
    for number in range(max(map(len, published))):
        # Piece by piece, of one element: what is taken of a piece must not change what is published of the next.
        places = [
            [
                (chunk.buffer, element)
                for chunk in rounds[number].ranges
                for element in range(chunk.start, chunk.stop)
            ]
            for rounds in published
        ]
        for at in range(published[0][number].longest):
            shm = [
                memory[rank][mine[at][0]][mine[at][1]] if at < len(mine) else None
                for rank, mine in enumerate(places)
            ]
            for rank, rounds in enumerate(published):
                for take in rounds[number].takes:
                    if take.start <= at < take.start + take.target.count:
                        cells, element = (
                            memory[rank][take.target.buffer],
                            take.target.start + at - take.start,
                        )
                        match take.step:
                            case Recv():
                                cells[element] = shm[take.peer]
                            case RecvReduce(_, _, True):
                                cells[element] = shm[take.peer] + cells[element]
                            case RecvReduce(_, _, False):
                                cells[element] = cells[element] + shm[take.peer]
        for rank, rounds in enumerate(published):
            mine = memory[rank]

            def put(chunk, values, mine=mine):
                mine[chunk.buffer][chunk.start : chunk.stop] = values

            def get(chunk, mine=mine):
                return mine[chunk.buffer][chunk.start : chunk.stop]

            for step in rounds[number].local:
                match step:
                    case Copy(source, target):
                        put(target, get(source))
                    case Reduce(source, target, left):
                        pairs = zip(get(source), get(target), strict=True)
                        put(target, [a + b if left else b + a for a, b in pairs])
    return [one[Buffer.WORK] for one in memory]


@pytest.mark.parametrize(("collective", "algorithm", "world_size"), CASES)
def test_what_the_contract_wants_is_there(collective, algorithm, world_size):
    # Strings are combined by + in an order that can be seen.
    contract = contract_of(collective, world_size, count=2)
    work = []
    for rank, held in enumerate(contract.before):
        values = [None] * contract.work_counts[rank]
        values[held.start : held.stop] = [
            f"<{rank}:{element}>" for element in range(held.start, held.stop)
        ]
        work.append(values)
    results = run_in_shared_memory(build_all(collective, algorithm, world_size, count=2), work)
    for rank, all_wanted in enumerate(contract.after):
        for wanted in all_wanted:
            for element in range(wanted.chunk.start, wanted.chunk.stop):
                origin = (
                    element
                    if wanted.origin is None
                    else element - wanted.chunk.start + wanted.origin
                )
                parts = results[rank][element].replace("><", "> <").split()
                assert sorted(parts) == sorted(f"<{one}:{origin}>" for one in wanted.contributors)
                if collective in {"scan", "exscan"} or algorithm in {
                    "direct",
                    "tree",
                    "doubling",
                    "halving",
                }:
                    assert parts == [f"<{one}:{origin}>" for one in wanted.contributors]


@pytest.mark.parametrize(
    ("collective", "algorithm", "world_size", "phases"),
    [
        ("all_reduce", "direct", 4, 1),
        ("scan", "direct", 4, 1),
        (
            "exscan",
            "direct",
            4,
            2,
        ),  # its copy may not be left out: a rank takes into the place that it copied
        ("reduce_scatter", "direct", 4, 1),
        ("all_to_all", "direct", 4, 1),
        ("all_to_all", "bruck", 4, 3),  # it packs: what it sends is made of several copies
        ("all_reduce", "owners", 4, 2),
    ],
)
def test_phases_in_shared_memory(collective, algorithm, world_size, phases):
    plans = build_all(collective, algorithm, world_size, count=3)
    assert {len(publications(plans, rank)) for rank in range(world_size)} == {phases}


def test_each_rank_publishes_its_foreign_blocks_once():
    plans = build_all("all_to_all", "direct", 3, matrix=[[1, 2, 3], [4, 5, 6], [0, 8, 9]])
    (first,), (second,), (third,) = (publications(plans, rank) for rank in range(3))
    assert [chunk.count for chunk in first.ranges] == [2, 3]
    assert (second.length, third.length, first.longest) == (10, 8, 10)
    assert [(take.peer, take.start, take.target.count) for take in first.takes] == [
        (2, 0, 0),
        (1, 0, 4),
    ]


def test_a_receive_without_a_send_is_told():
    plans = [
        Schedule("test", "test", rank, 2, 1, 0, rounds)
        for rank, rounds in enumerate([((Recv(1, Chunk(0, 1)),),), ((),)])
    ]
    with pytest.raises(PlanError, match="rank 1 sends nothing to rank 0"):
        publications(plans, 0)
