"""Every algorithm and every collective under thousands of schedules, in one thread: the executor against symbols."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.algorithms.builders import ALGORITHMS, build, sums_by_the_tree
from syncvar.algorithms.compile_schedule import compile_for_links
from syncvar.algorithms.schedule import Buffer, Chunk, Recv, Reduce, Schedule, ScheduleArgs, Send
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.request import Stage
from syncvar.testing import Simulation
from tests.verification.schedules.collective_contracts import contract_of

SIMULATED = ("all_reduce", "all_gather", "broadcast", "barrier", "header_exchange")
PAIRS = [
    (collective, algorithm) for collective in SIMULATED for algorithm in ALGORITHMS[collective]
]
UNKNOWN = -1


class Symbols:
    """Expressions as numbers, so that the executor moves and combines them in ordinary arrays."""

    def __init__(self):
        self.expressions = []
        self.numbers = {}

    def number(self, expression):
        if expression not in self.numbers:
            self.numbers[expression] = len(self.expressions)
            self.expressions.append(expression)
        return self.numbers[expression]

    def combine(self, left, right, out):
        out[...] = [self.number((int(a), int(b))) for a, b in zip(left, right, strict=True)]

    def expression(self, number):
        one = self.expressions[number]
        return one if isinstance(one, int) else (self.expression(one[0]), self.expression(one[1]))


def contributors(expression):
    return (
        [expression]
        if isinstance(expression, int)
        else [*contributors(expression[0]), *contributors(expression[1])]
    )


def case_of(draw, collective, algorithm, n):
    if collective == "barrier":
        return {}
    count = int(draw.choice([0, 1, n - 1, n, n + 1, 2 * n + 3]))
    if collective in {"all_gather", "header_exchange"} and algorithm != "dissemination":
        return {"counts": tuple(int(one) for one in draw.integers(0, 4, n))}
    return (
        {"count": count, "root": int(draw.integers(n))}
        if collective == "broadcast"
        else {"count": count}
    )


def simulate_symbols(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 10))
    collective, algorithm = PAIRS[seed % len(PAIRS)]
    if (collective, algorithm) == ("all_gather", "doubling"):
        n = 1 << (n.bit_length() - 1)  # it needs a power of two
    case = case_of(draw, collective, algorithm, n)
    tree = collective == "all_reduce" and sums_by_the_tree(collective, algorithm, n)
    contract = contract_of(collective, n, tree=tree, **case)
    symbols = Symbols()
    works = [np.full(count, UNKNOWN, np.int64) for count in contract.work_counts]
    for rank, work in enumerate(works):
        before = contract.before[rank]
        work[before.start : before.stop] = symbols.number(rank)

    brought = [work.copy() for work in works] if draw.integers(2) else None

    class SymbolicCall(CheckedCall):
        def __init__(self, rank, group):
            super().__init__(CollectiveSpec(f"{collective} by {algorithm}"))
            self.rank = rank

        def stages(self):
            rank = self.rank
            input_count = sum(case["matrix"][rank]) if "matrix" in case else None
            plan = compile_for_links(
                build(collective, algorithm, ScheduleArgs(rank, n, **case)), range(n), input_count
            )
            if brought is None or plan.in_place is None:
                yield Stage(plan, works[rank], symbols.combine)
            elif input_count is not None:
                received, sent = works[rank][input_count:], brought[rank][:input_count]
                works[rank][:input_count] = UNKNOWN
                yield Stage(plan, received, symbols.combine, send_buffer=sent)
            else:
                works[rank][...] = UNKNOWN
                yield Stage(plan, works[rank], symbols.combine, send_buffer=brought[rank])

    world = Simulation(
        n,
        seed,
        overtake_max=int(draw.choice([0, 3])),
        segment_bytes=int(draw.choice([8, 16, 1 << 20])),
    )
    world.call(SymbolicCall)
    world.run()
    for rank, wanted_of_rank in enumerate(contract.after):
        for wanted in wanted_of_rank:
            for number in works[rank][wanted.chunk.start : wanted.chunk.stop]:
                expression = symbols.expression(int(number))
                assert sorted(contributors(expression)) == sorted(wanted.contributors)
                assert wanted.expression is None or expression == wanted.expression
    if collective == "all_reduce":
        assert all(
            (work == works[0]).all() for work in works
        )  # the same expressions, so the same bytes
    return world.steps


def block(rank, count, dtype):
    return (np.arange(count) % 3 + rank % 4 + 1).astype(dtype)


def simulate_collectives(seed):
    """Several public calls in a row, some in flight together."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 7))
    world = Simulation(
        n,
        seed,
        overtake_max=int(draw.choice([0, 0, 4])),
        segment_bytes=int(draw.choice([32, 256, 1 << 20])),
        async_depth=int(draw.integers(1, 4)),
    )
    expected = []
    for _ in range(int(draw.integers(2, 5))):
        count = int(draw.choice([0, 1, n - 1, n, n + 1, 3 * n + 2]))
        dtype = draw.choice(["int32", "float64", "complex64", "float16", "uint8"])
        root = int(draw.integers(n))
        blocks = [block(rank, count, dtype) for rank in range(n)]
        kind = int(draw.integers(8))
        if kind == 0:
            world.call(lambda rank, group, b=blocks: sv.all_reduce(b[rank], group=group))
            expected.append([sum(blocks).astype(dtype)] * n)
        elif kind == 1:
            world.call(
                lambda rank, group, b=blocks: sv.all_reduce(b[rank], group=group, reproducible=True)
            )
            expected.append([sum(blocks).astype(dtype)] * n)
        elif kind == 2:
            uneven = [one[: (rank * 2 + 1) % (count + 1)] for rank, one in enumerate(blocks)]
            world.call(lambda rank, group, b=uneven: sv.all_gather(b[rank], group=group))
            expected.append([np.concatenate(uneven)] * n)
        elif kind == 3:
            world.call(
                lambda rank, group, b=blocks, r=root: sv.broadcast(
                    b[r] if rank == r else None, root=r, group=group
                )
            )
            expected.append([blocks[root]] * n)
        elif kind == 4:
            world.call(lambda rank, group: sv.barrier(group=group))
            expected.append([None] * n)
        elif kind == 5:
            objects = [{"rank": rank, "more": ["x" * rank, (1 << 70) + rank]} for rank in range(n)]
            world.call(lambda rank, group, o=objects: sv.all_gather_object(o[rank], group=group))
            expected.append([objects] * n)
        elif kind == 6:
            parts = [("part", rank) for rank in range(n)]
            world.call(
                lambda rank, group, p=parts, r=root: sv.scatter_object(
                    p if rank == r else None, r, group=group
                )
            )
            expected.append(parts)
        else:
            op = "sum" if blocks[0].dtype.kind == "c" else "max"
            world.call(
                lambda rank, group, b=blocks, o=op: sv.all_reduce(
                    {"a": b[rank], "b": [float(rank)]}, o, group=group
                )
            )
            fold = sum if op == "sum" else max
            first = sum(blocks) if op == "sum" else np.max(blocks, axis=0)
            expected.append(
                [{"a": first.astype(dtype), "b": np.array([float(fold(range(n)))])}] * n
            )
    for results, wanted in zip(world.run(), expected, strict=True):
        for result, want in zip(results, wanted, strict=True):
            assert_same(result, want)
    return world.steps


def assert_same(result, want):
    if isinstance(want, np.ndarray):
        assert result.dtype == want.dtype
        assert np.array_equal(result, want)
    elif isinstance(want, dict) and isinstance(next(iter(want.values())), np.ndarray):
        assert list(result) == list(want)
        for key, value in want.items():
            assert_same(result[key], value)
    else:
        assert result == want


@pytest.mark.parametrize("block_of_seeds", range(2))
def test_every_schedule_of_every_algorithm_fulfils_its_contract_in_symbols(block_of_seeds):
    for seed in range(block_of_seeds * 250, block_of_seeds * 250 + 250):
        simulate_symbols(seed)


@pytest.mark.parametrize("block_of_seeds", range(2))
def test_every_schedule_of_the_collectives_gives_the_exact_result(block_of_seeds):
    for seed in range(block_of_seeds * 250, block_of_seeds * 250 + 250):
        simulate_collectives(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block_of_seeds",
    [*range(5), *(pytest.param(block, marks=pytest.mark.nightly) for block in range(5, 20))],
)
def test_many_more_schedules(block_of_seeds):
    for seed in range(500 + block_of_seeds * 500, 1000 + block_of_seeds * 500):
        simulate_symbols(seed)
        simulate_collectives(seed)


def test_the_same_seed_makes_the_same_steps():
    assert [simulate_collectives(seed) for seed in range(20)] == [
        simulate_collectives(seed) for seed in range(20)
    ]


def test_a_plan_that_overwrites_what_it_has_lent_is_found_out():
    """The simulator is strong enough: memory that is changed while a frame of it flies is noticed."""

    class SelfSendingCall(CheckedCall):
        def __init__(self, rank, group):
            super().__init__(CollectiveSpec("sends its own buffer"))
            self.rank = rank

        def stages(self):
            rank = self.rank
            work = np.full(3, rank, np.int64)
            whole, other = Chunk(0, 3), 1 - rank
            steps = (Send(other, whole), Recv(other, Chunk(0, 3, Buffer.SCRATCH)))
            add = Reduce(Chunk(0, 3, Buffer.SCRATCH), whole, source_left=False)
            yield Stage(
                compile_for_links(
                    Schedule("all_reduce", "bad", rank, 2, 3, 3, ((*steps, add),)), range(2)
                ),
                work,
                np.add,
            )
            return work

    wrong = 0
    for seed in range(50):
        world = Simulation(2, seed)
        world.call(SelfSendingCall)
        wrong += any(list(result) != [1, 1, 1] for result in world.run()[0])
    assert wrong
