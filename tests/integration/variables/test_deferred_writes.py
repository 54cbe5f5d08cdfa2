"""Deferred writes wait in a queue: who reads gets all of them, whoever else reads; what travels, and what goes wrong."""

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.testing import run_ranks
from syncvar.variables import deferred_writes as queue_module
from syncvar.variables.deferred_writes import QueuePrefix, common_prefix


@pytest.fixture(params=["links", "shm"])
def ranks(request):
    def run(size, fn, *, may_fail=False):
        results = run_ranks(size, fn, shared=request.param == "shm", timeout_s=120)
        for result in results:
            if isinstance(result, BaseException) and not may_fail:
                raise result
        return results

    return run


def deferred(strategy, value, aggregation="SUM", **options):
    with strategy.scope():
        variable = sv.Variable(value, aggregation=aggregation, **options)
    variable.pin("deferred")
    return variable


def rounds(strategy):
    """How often the queue's group has met in the block of calls that runs, or ran last."""
    return strategy.queue.calls.next_call % 10**6


# -- random programs -------------------------------------------------------------------------------


def program_of(seed):
    """Return (replicas, reproducible, steps): writes by all, reads and barriers by some, in runs."""
    choose = random.Random(seed)
    size = choose.choice((2, 2, 3, 4))
    steps = []
    for _ in range(choose.randint(5, 40)):
        kind = choose.choices(
            ("add", "sub", "assign", "read", "barrier", "reduce", "run"), (8, 4, 1, 5, 1, 1, 2)
        )[0]
        readers = [rank for rank in range(size) if choose.random() < 0.5]
        steps.append(
            (
                kind,
                choose.randrange(4),
                choose.randint(-9, 9),
                readers,
                choose.choice(("read_value", "local_value", "sync")),
            )
        )
    return size, choose.random() < 0.5, steps


def predicted(size, steps):
    """Return what each rank's reads must give, by the meaning of a write: every one had finished at once."""
    values = [np.zeros(2), np.zeros(3), np.zeros(()), np.zeros(1)]
    seen = [[] for _ in range(size)]
    for kind, number, amount, readers, how in steps:
        together = sum(amount + rank for rank in range(size))
        together = together / size if number == 1 else together
        if kind == "add":
            values[number] = values[number] + together
        elif kind == "sub":
            values[number] = values[number] - together
        elif kind == "assign":
            values[number] = np.zeros_like(values[number]) + together
        elif kind == "read":
            for rank in range(size) if how == "sync" else readers:
                seen[rank].append(values[number].tolist())
    for one in seen:
        one.append([value.tolist() for value in values])
    return seen


def executed(reproducible, steps):
    rank = sv.rank()
    strategy = sv.MultiWorkerMirroredStrategy(reproducible=reproducible)
    shapes, seen = ((2,), (3,), (), (1,)), []
    with strategy.scope():
        variables = [
            sv.Variable(np.zeros(shape), aggregation="MEAN" if number == 1 else "SUM")
            for number, shape in enumerate(shapes)
        ]
    for variable in variables[:3]:  # the last one is eager
        variable.pin("deferred")

    def run(block):
        for kind, number, amount, readers, how in block:
            variable = variables[number]
            x = np.full(variable.shape, float(amount + rank))
            if kind in ("add", "sub", "assign"):
                getattr(variable, {"assign": "assign"}.get(kind, f"assign_{kind}"))(x)
                x += 1000  # the caller may go on with its array
            elif kind == "read" and (how == "sync" or rank in readers):
                seen.append(getattr(variable, how)().tolist())
            elif kind == "barrier":
                sv.barrier()
            elif kind == "reduce":
                assert sv.all_reduce(np.ones(3)).tolist() == [sv.world_size()] * 3

    block = []
    for step in [*steps, ("run", 0, 0, [], "")]:
        if step[0] == "run":
            strategy.run(run, args=(block,))
            block = []
        else:
            block.append(step)
    seen.append([variable.numpy().tolist() for variable in variables])
    return seen


@pytest.mark.parametrize("shared", [False, True], ids=["links", "shm"])
def test_random_programs_in_which_some_replicas_read(shared):
    for seed in range(12 if shared else 60):
        size, reproducible, steps = program_of(seed)
        found = run_ranks(size, executed, reproducible, steps, shared=shared, timeout_s=120)
        assert found == predicted(size, steps), f"seed {seed}: {steps}"


# -- what travels ----------------------------------------------------------------------------------


def test_the_writes_of_a_step_are_one_transfer(ranks, monkeypatch):
    monkeypatch.setattr(
        queue_module, "_PATIENCE_S", 30.0
    )  # threads that share an interpreter are never at one place

    def fn():
        strategy = sv.MirroredStrategy()
        first, second = deferred(strategy, [0.0, 0.0]), deferred(strategy, 0.0, "MEAN")

        def step():
            before = rounds(strategy)
            for number in range(20):
                first.assign_add([1.0, number])
                second.assign_sub(float(sv.rank()))
            assert rounds(strategy) == before
            read = first.numpy().tolist(), float(second)
            return read, rounds(strategy) - before

        strategy.run(step)
        read, transfers = strategy.run(step)
        numbers = first.explain().numbers
        return read, transfers, numbers["writes"], numbers["collectives"]

    assert ranks(2, fn) == [(([80.0, 760.0], -20.0), 1, 40, 2)] * 2


def test_a_full_bucket_is_sent(ranks, monkeypatch):
    monkeypatch.setattr(queue_module, "BUCKET_BYTES", 100)
    monkeypatch.setattr(queue_module, "_PATIENCE_S", 30.0)

    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, np.zeros(5))  # 40 bytes: three writes fill a bucket

        def step():
            seen = []
            for _ in range(7):
                v.assign_add(np.ones(5))
                seen.append(rounds(strategy))
            return seen

        return strategy.run(step), v.numpy().tolist()

    assert ranks(2, fn) == [([0, 0, 1, 1, 1, 2, 2], [14.0] * 5)] * 2


@pytest.mark.parametrize(
    ("dtype", "aggregation"),
    [
        ("float32", "SUM"),
        ("float32", "MEAN"),
        ("float16", "SUM"),
        ("float16", "MEAN"),
        ("int32", "SUM"),
    ],
)
def test_reproducible_bits_are_those_of_eager_writes(ranks, dtype, aggregation):
    def fn():
        strategy = sv.MultiWorkerMirroredStrategy(reproducible=True)
        with strategy.scope():
            eager = sv.Variable(
                np.zeros(9, dtype), dtype=dtype, aggregation=aggregation, synchronization="ON_WRITE"
            )
        late = deferred(strategy, np.zeros(9, dtype), aggregation, dtype=dtype)
        random = np.random.default_rng(sv.rank())

        def step():
            for number in range(6):
                x = (random.normal(size=9) * 100).astype(dtype)
                for variable in (eager, late):
                    (variable.assign_sub if number % 3 == 1 else variable.assign_add)(x)

        strategy.run(step)
        return eager.numpy().tobytes(), late.numpy().tobytes()

    found = ranks(3, fn)
    assert len({*found}) == 1
    assert found[0][0] == found[0][1]


def test_increments_wrap_and_round_once(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        wraps = deferred(strategy, np.array([250, 0], np.uint8))
        half = deferred(strategy, np.float16(2048))

        def step():
            wraps.assign_add(np.array([3, 0], np.uint8)).assign_sub(np.array([0, 1], np.uint8))
            for _ in range(4):
                half.assign_add(np.float16(0.25))  # lost if each were rounded by itself

        strategy.run(step)
        return wraps.numpy().tolist(), float(half)

    assert ranks(2, fn) == [([0, 254], 2050.0)] * 2


def test_assignments_scatters_and_refusals_come_after_what_waits(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, np.zeros(2))

        def step():
            v.assign_add([1.0, 1.0])
            v.assign([5.0, 6.0])  # the sum of both replicas
            v.assign_add([1.0, 1.0])
            v.scatter_add([0], [10.0])
            v.assign_add([0.5, 0.5])

        strategy.run(step)
        with strategy.scope():
            v.assign_add([1.0, 1.0])
        copied = v.__deepcopy__({})
        v.pin("eager")
        return v.numpy().tolist(), copied.numpy().tolist()

    assert ranks(2, fn) == [([34.0, 16.0], [34.0, 16.0])] * 2


def test_one_replica_is_never_deferred():
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, 0.0)
        strategy.run(lambda: v.assign_add(2.0))
        return float(v), strategy.queue

    assert run_ranks(1, fn) == [(2.0, None)]


def test_spmd_writes_wait_for_the_next_call(ranks):
    def fn():
        v = sv.Variable(0.0, aggregation="SUM")
        v.pin("deferred")
        for _ in range(3):
            v.assign_add(1.0)
        waiting = len(v.strategy.queue)
        sv.all_reduce(np.ones(2))
        return waiting, len(v.strategy.queue), float(v)

    assert ranks(2, fn) == [(3, 0, 6.0)] * 2


def test_a_prepared_collective_sends_what_waits_first(ranks):
    def fn():
        v = sv.Variable(0.0, aggregation="SUM")
        v.pin("deferred")
        x = np.ones(4)
        for _ in range(3):
            sv.all_reduce(x)
        v.assign_add(1.0)
        sv.all_reduce(x)
        return len(v.strategy.queue), float(v)

    assert ranks(2, fn) == [(0, 2.0)] * 2


def test_a_rank_that_ends_sends_what_waits(ranks):
    def fn():
        v = sv.Variable(0.0, aggregation="SUM")
        v.pin("deferred")
        v.assign_add(1.0)
        return float(v) if sv.rank() else None

    assert ranks(2, fn) == [None, 2.0]


# -- who waits for whom ----------------------------------------------------------------------------


def test_a_reader_is_served_by_one_that_goes_on_writing(ranks):
    is_read = threading.Event()

    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, 0.0)

        def step():
            v.assign_add(1.0)
            if sv.rank() == 0:
                value = float(v)
                is_read.set()
                return value
            until = time.monotonic() + 50
            while not is_read.is_set() and time.monotonic() < until:
                v.assign_add(0.0)
            return None

        return strategy.run(step)

    value, error = ranks(2, fn, may_fail=True)
    assert value == 2.0
    assert is_read.is_set()
    assert isinstance(
        error, sv.PeerLost | sv.MismatchError
    )  # the reader ended without the writes that followed


def test_a_replica_that_waits_for_an_earlier_call_serves_a_reader(ranks):
    def fn():
        other = sv.new_group(range(sv.world_size()))
        v = sv.Variable(0.0, aggregation="SUM")
        v.pin("deferred")
        if sv.rank() == 0:
            work = sv.all_reduce(np.ones(2), group=other, async_op=True)
            v.assign_add(1.0)
            work.wait()
        else:
            v.assign_add(1.0)
            assert float(v) == 2.0
            sv.all_reduce(np.ones(2), group=other)
        return float(v)

    assert ranks(2, fn) == [2.0, 2.0]


def test_queues_of_several_groups_are_sent_in_any_order(ranks):
    def fn():
        strategies = [sv.MirroredStrategy() for _ in range(3)]
        variables = [deferred(strategy, 0.0) for strategy in strategies]
        with strategies[0].scope():
            pass
        default = sv.Variable(0.0, aggregation="SUM")
        default.pin("deferred")
        default.assign_add(1.0)
        for strategy, variable in zip(strategies, variables, strict=True):
            queue = queue_module.queue_of(strategy)
            queue.add(
                variable._state,
                sv.variables.policy.AccessKind.ASSIGN_ADD,
                "sum",
                5,
                np.float32(1.0).reshape(()),
            )
        order = variables if sv.rank() else variables[::-1]
        return [float(one) for one in order], float(default)

    assert ranks(2, fn) == [([2.0] * 3, 2.0)] * 2


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_refused_increment_is_told_to_the_others_and_no_copy_changes(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, [0.0, 0.0])

        def step():
            v.assign_add([1.0, 1.0])
            try:
                v.assign_add([1.0, 2.0] if sv.rank() != 1 else [1.0, 2.0, 3.0])
                mine = "written"
            except sv.ConfigError:
                mine = "refused"
            v.assign_add([0.0, 1.0])
            try:
                read = v.numpy().tolist()
            except sv.MismatchError as error:
                read = dict(error.table)[1], "assign_add of variable" in str(error)
            return mine, read, v.numpy().tolist(), sv.all_reduce(1)

        found = strategy.run(step)
        strategy.run(lambda: v.assign_add([1.0, 0.0]))
        return (*found[:2], found[2], int(found[3]), v.numpy().tolist())

    first, second, third = ranks(3, fn)
    assert second == ("refused", [3.0, 6.0], [3.0, 6.0], 3, [6.0, 6.0])
    for one in (first, third):
        assert one[0] == "written"
        assert "(3,)" in one[1][0]
        assert one[1][1]
        assert one[2:] == ([3.0, 6.0], 3, [6.0, 6.0])


def test_a_refusal_that_is_told_at_the_beginning_of_run_leaves_the_replicas_aligned(ranks):
    def fn():
        strategy = sv.get_strategy()
        v = sv.Variable([0.0, 0.0], aggregation="SUM")
        v.pin("deferred")
        strategy.run(lambda: None)
        seen = []
        try:
            v.assign_add([1.0, 1.0] if sv.rank() else [1.0])
        except sv.ConfigError:
            seen.append("refused")
        for _ in range(3):
            try:
                strategy.run(lambda: seen.append(float(sv.all_reduce(1.0))))
            except sv.MismatchError as error:
                seen.append(type(error).__name__)
        return seen[-2:], v.numpy().tolist()

    assert ranks(2, fn) == [([2.0, 2.0], [0.0, 0.0])] * 2


def test_different_writes_are_a_mismatch_everywhere_and_nothing_is_written(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v, w = deferred(strategy, 0.0, name="v"), deferred(strategy, 0.0, name="w")

        def step():
            v.assign_add(1.0)
            (v if sv.rank() else w).assign_add(1.0)
            try:
                v.numpy()
            except sv.MismatchError as error:
                return {rank: text.split(" ")[-1] for rank, text in error.table.items()}
            return None

        table = strategy.run(step)
        before = float(v), float(w)
        strategy.run(lambda: v.assign_add(1.0))
        return table, before, float(v)

    assert ranks(2, fn) == [({0: "'w'", 1: "'v'"}, (0.0, 0.0), 2.0)] * 2


def test_a_missing_write_is_a_mismatch_at_the_end_of_run(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, 0.0)

        def step():
            v.assign_add(1.0)
            if sv.rank() == 0:
                v.assign_add(1.0)

        strategy.run(lambda: v.assign_add(1.0))
        errors = []
        try:
            strategy.run(step)
        except sv.MismatchError:
            errors.append("run")
        for _ in range(2):
            try:
                strategy.run(lambda: v.assign_add(1.0))
            except sv.MismatchError:
                errors.append("next")
        return errors

    first, second = ranks(2, fn)
    assert first[0] == "run"
    assert second in ([], ["next"])


def test_writes_before_an_exception_reach_the_others(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, 0.0)

        def step():
            v.assign_add(1.0)
            if sv.rank() == 1:
                raise ValueError("on purpose")
            v.assign_add(1.0)

        strategy.run(lambda: v.assign_add(1.0))
        try:
            strategy.run(step)
            raised = None
        except (ValueError, sv.MismatchError) as error:
            raised = type(error).__name__
        strategy.run(lambda: v.assign_add(0.5))
        return raised, float(v)

    assert ranks(2, fn) == [("MismatchError", 5.0), ("ValueError", 5.0)]


def test_a_lost_replica_ends_the_wait(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, 0.0)
        strategy.run(lambda: v.assign_add(1.0))
        if sv.rank() == 1:
            current().close(orderly=False)
            return None
        return strategy.run(lambda: (v.assign_add(1.0), float(v)))

    first, _ = ranks(2, fn, may_fail=True)
    assert isinstance(first, sv.PeerLost | sv.DeadlineExceeded | sv.GroupBroken)


@pytest.mark.parametrize(
    ("sent", "told", "expected"),
    [
        (0, [(3, 0), (3, 0)], (3, False)),
        (1, [(3, 0), (1, 0)], (1, False)),
        (0, [(3, 2), (3, 0)], (1, False)),
        (1, [(3, 2), (3, 0)], (2, True)),
        (1, [(3, 3), (2, 0)], (2, False)),
        (1, [(3, 2), (3, 2)], (2, True)),
    ],
)
def test_the_common_prefix(sent, told, expected):
    assert (
        common_prefix(sent, [QueuePrefix(made, refused, 0) for made, refused in told]) == expected
    )


def test_after_a_mismatch_outside_run_nothing_is_crossed(ranks):
    """One replica is a write ahead when the replicas find that they differ: what they write then are no pairs."""

    def fn():
        v, w = (sv.Variable(0.0, aggregation="SUM") for _ in range(2))
        for one in (v, w):
            one.pin("deferred")
        outcomes = []
        for one in (w, v, v, v) if sv.rank() else (v, v, v):
            try:
                outcomes.append(float(one.assign_add(1.0)))
            except (sv.MismatchError, sv.GroupBroken) as error:
                outcomes.append(type(error).__name__)
        strategy = sv.get_strategy()
        strategy.run(lambda: v.assign_add(1.0))
        return outcomes, float(v)

    assert ranks(2, fn) == [
        (["MismatchError", "GroupBroken", "GroupBroken"], 2.0),
        (["MismatchError", "GroupBroken", "GroupBroken", "GroupBroken"], 2.0),
    ]


def test_an_exception_after_reads_on_some_replicas_loses_nothing(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        v = deferred(strategy, 0.0)

        def step():
            v.assign_add(1.0)
            if sv.rank() == 0:
                float(v)
            v.assign_add(1.0)
            v.assign_add(1.0)
            raise ValueError

        for _ in range(2):
            with pytest.raises(ValueError):
                strategy.run(step)
        strategy.run(lambda: v.assign_add(1.0))
        return float(v)

    assert ranks(2, fn) == [14.0, 14.0]


def test_threads_with_groups_of_their_own_go_on(ranks):
    def fn():
        v = sv.Variable(0.0, aggregation="SUM")
        group = sv.new_group(range(sv.world_size()))
        v.pin("deferred")
        context, failed = current(), []

        def other():
            with use(context):
                try:
                    for _ in range(30):
                        sv.all_reduce(1.0, group=group)
                except Exception as error:
                    failed.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        for _ in range(30):
            v.assign_add(1.0)
            float(v)
        thread.join(20)
        return float(v), failed

    assert ranks(2, fn) == [(60.0, [])] * 2


def test_done_does_not_wait(ranks):
    def fn():
        v = sv.Variable(0.0, aggregation="SUM")
        group = sv.new_group(range(sv.world_size()))
        v.pin("deferred")
        v.assign_add(1.0)
        work = sv.all_reduce(1.0, group=group, async_op=True)
        v.assign_add(1.0)
        if sv.rank() == 0:
            work.done()  # the other replica is not there yet
            started.set()
        else:
            assert started.wait(50)
        work.wait()
        return float(v)

    started = threading.Event()
    assert ranks(2, fn) == [4.0, 4.0]


def test_a_strategy_that_has_deferred_goes_away():
    def fn():
        left, in_use = [], []
        for _ in range(4):
            for _ in range(5):
                strategy = sv.MirroredStrategy()
                v = deferred(strategy, 0.0)
                strategy.run(lambda v=v: v.assign_add(1.0))
                left.append(weakref.ref(strategy))
                del strategy, v
            sv.barrier()  # one of the ranks collects the garbage of all
            gc.collect()
            sv.barrier()
            in_use.append(current().shm._extents.used_bytes)
        return sum(one() is not None for one in left), in_use[-1] - in_use[1] < 16 << 20

    assert run_ranks(2, fn, shared=True, timeout_s=60) == [(0, True)] * 2
