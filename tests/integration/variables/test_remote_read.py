"""Reading another replica's copy without its taking part."""

import threading
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, DeadlineExceeded, PeerLost, UsageError
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import progress as engine_module
from syncvar.testing import run_ranks
from syncvar.transports.in_memory import Faults


def everywhere(size, fn, **options):
    results = run_ranks(size, fn, timeout_s=120, **options)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


@pytest.fixture
def soon_missing(monkeypatch):
    """Give a replica less time to make a variable that another one asks for: here it never does."""
    monkeypatch.setattr(engine_module, "_APPEAR_S", 0.3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["NONE", "ON_READ"])
@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_every_copy_can_be_read_from_everywhere(size, mode, aggregation):
    def program():
        v = sv.Variable(np.zeros((2, 3)), synchronization=mode, aggregation=aggregation)
        v.assign(np.full((2, 3), sv.rank()))
        sv.barrier()
        seen = [v.read_from(rank) for rank in range(size)]
        sv.barrier()
        assert not any(copy.flags.writeable for copy in seen)
        return [(copy.shape, copy.dtype.name, float(copy[1, 2])) for copy in seen]

    assert (
        everywhere(size, program)
        == [[((2, 3), "float64", float(rank)) for rank in range(size)]] * size
    )


def test_on_write_reads_the_value_and_sends_nothing():
    def program():
        v = sv.Variable(5.0, aggregation="SUM")
        sent = current().engine.frames_sent
        seen = [float(v.read_from(rank)) for rank in (0, 1)]
        return seen, current().engine.frames_sent - sent

    assert everywhere(2, program) == [([5.0, 5.0], 0)] * 2


def test_none_sends_nothing_in_ten_thousand_writes_and_one_question_when_it_is_read():
    def program():
        v = sv.Variable(0.0, synchronization="NONE")
        engine = current().engine
        counts = []
        if sv.rank() == 0:
            for number in range(10_000):
                v.assign(float(number))
            float(v)
            v.read_from(0)
            counts.append(engine.frames_sent)
            v.read_from(1)
            counts.append(engine.frames_sent)
        sv.barrier()
        return counts

    assert everywhere(2, program) == [[0, 1], []]


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "float32", "complex128", "bfloat16"]
)
def test_any_dtype_travels(dtype):
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)

    def program():
        v = sv.Variable(np.asarray([0, 1, sv.rank()], kind), synchronization="NONE")
        sv.barrier()
        copy = v.read_from(1)
        sv.barrier()
        return copy.dtype == kind, copy.astype(
            float
        ).tolist() if kind.kind != "c" else copy.real.tolist()

    assert everywhere(2, program) == [(True, [0.0, 1.0, 1.0])] * 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (300_000,)])
def test_any_size_travels_in_as_many_frames_as_it_needs_in_any_order(shape):
    def program():
        mine = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape) * (
            sv.rank() + 1
        )
        v = sv.Variable(np.array(mine, order="F"), synchronization="NONE")
        sv.barrier()
        copy = v.read_from(1 - sv.rank())
        sv.barrier()
        expected = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape) * (
            2 - sv.rank()
        )
        return copy.shape == shape and np.array_equal(copy, expected)

    faults = Faults(seed=3, delay_max=3, reorder=0.5)
    assert everywhere(2, program, faults=faults, config=RuntimeConfig(segment_bytes=65_536)) == [
        True,
        True,
    ]


@pytest.mark.usefixtures("soon_missing")
def test_shapes_dtypes_and_existence_may_differ_by_rank_under_none():
    def program():
        made = {0: np.zeros(3, np.float32), 1: np.ones((2, 2), np.int64)}[sv.rank()]
        v = sv.Variable(made, synchronization="NONE", name="own")
        only = sv.Variable(1.0, synchronization="NONE", name=f"only{sv.rank()}")
        sv.barrier()
        copy = v.read_from(1)
        with pytest.raises(UsageError, match="has no variable of this name"):
            only.read_from(1 - sv.rank())
        sv.barrier()
        return copy.shape, copy.dtype.name

    assert everywhere(2, program) == [((2, 2), "int64")] * 2


def test_a_variable_that_another_replica_makes_a_little_later_is_found():
    def program():
        if sv.rank() == 1:
            time.sleep(0.2)
        v = sv.Variable(float(sv.rank()), synchronization="NONE")
        seen = float(v.read_from(1))
        sv.barrier()
        return seen

    assert everywhere(2, program) == [1.0, 1.0]


@pytest.mark.usefixtures("soon_missing")
def test_a_variable_that_was_dropped_is_not_found():
    def program():
        v = sv.Variable(1.0, synchronization="NONE", name="v")
        if sv.rank() == 1:
            del v
        sv.barrier()
        if sv.rank() == 0:
            with pytest.raises(UsageError, match="has no variable of this name"):
                v.read_from(1)
        sv.barrier()

    everywhere(2, program)


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0, None, "1"])
@pytest.mark.parametrize("mode", ["NONE", "ON_READ", "ON_WRITE"])
def test_what_is_no_replica_is_refused(rank, mode):
    def program():
        v = sv.Variable(1.0, synchronization=mode)
        with pytest.raises(ConfigError, match="rank must be"):
            v.read_from(rank)

    everywhere(2, program)


def test_replicas_are_numbered_within_the_strategy():
    def program():
        group = sv.new_group([2, 1])
        if group.is_member:
            strategy = sv.MirroredStrategy(group)
            with strategy.scope():
                v = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            strategy.run(lambda: v.assign(float(sv.rank())))
            sv.barrier(group=group)
            seen = [float(v.read_from(0)), float(v.read_from(1))]
        else:
            seen = [2.0, 1.0]
        sv.barrier()
        return seen

    assert everywhere(3, program) == [[2.0, 1.0]] * 3


def test_copies_of_deepcopy_and_of_strategies_with_the_same_ranks_are_kept_apart():
    import copy

    def program():
        strategies = [sv.MirroredStrategy(), sv.MirroredStrategy()]
        made = []
        for number, strategy in enumerate(strategies):
            with strategy.scope():
                made.append(sv.Variable(10.0 * number, synchronization="ON_READ", name="same"))
        made.append(copy.deepcopy(made[0]))
        strategies[0].run(lambda: made[0].assign_add(sv.rank() + 1.0))
        sv.barrier()
        seen = [float(v.read_from(1)) for v in made]
        sv.barrier()
        return seen

    assert everywhere(2, program) == [[2.0, 10.0, 0.0]] * 2


def test_a_copy_is_read_whole_while_its_owner_writes_without_pause():
    def program():
        v = sv.Variable(np.zeros(20_000), synchronization="NONE")
        sv.barrier()
        if sv.rank() == 0:
            last = -1.0
            for _ in range(100):
                copy = v.read_from(1)
                assert copy.min() == copy.max()
                assert copy[0] >= last
                last = copy[0]
            done.set()
        else:
            number = 0
            while not done.is_set():
                number += 1
                v.assign(np.full(20_000, float(number)))
        sv.barrier()

    done = threading.Event()
    everywhere(2, program)


def test_reading_inside_run_and_merge_and_between_collectives_disturbs_no_call():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            own = sv.Variable(0.0, synchronization="NONE")
            total = sv.Variable(0.0, aggregation="SUM")

        def step():
            own.assign(sv.rank() + 1.0)
            total.assign_add(1.0)
            first = float(own.read_from(0))
            merged = sv.get_replica_context().merge_call(lambda _: float(own.read_from(0)))
            total.assign_add(first)
            return first, merged

        seen = [strategy.run(step) for _ in range(5)]
        with strategy.scope():
            seen.append(float(total))
        return seen

    assert everywhere(3, program) == [[(1.0, 1.0)] * 5 + [30.0]] * 3


def test_many_threads_ask_at_once():
    def program():
        v = sv.Variable(float(sv.rank()), synchronization="NONE")
        context, seen = current(), []
        sv.barrier()

        def ask():
            from syncvar.bootstrap.process import use

            with use(context):
                seen.extend(float(v.read_from(1 - sv.rank())) for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sv.barrier()
        return set(seen), len(seen)

    assert everywhere(2, program) == [({1.0}, 80), ({0.0}, 80)]


def test_a_rank_that_has_left_is_lost_to_the_asker():
    def program():
        v = sv.Variable(1.0, synchronization="NONE")
        sv.barrier()
        if sv.rank() == 1:
            return
        until, book = time.monotonic() + 50, current().engine.book
        while 1 not in book.left:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(PeerLost, match="finished"):
            v.read_from(1)

    everywhere(2, program)


def test_without_an_answer_only_the_asking_call_fails():
    def program():
        strategy = sv.MirroredStrategy(timeout=0.3)
        with strategy.scope():
            v = sv.Variable(1.0, synchronization="NONE")
        engine = current().engine
        sv.barrier()
        if sv.rank() == 1:
            with engine.lock:  # nobody drives: as a stopped process
                stopped.set()
                assert asked.wait(50)
        else:
            assert stopped.wait(50)
            with pytest.raises(
                DeadlineExceeded,
                match=r"not answered within 0.3 s by rank 1; the group is not affected",
            ):
                v.read_from(1)
            asked.set()
            strategy.timeout = 50.0
        sv.barrier()
        seen = float(v.read_from(1))
        sv.barrier()
        return seen

    stopped, asked = threading.Event(), threading.Event()
    assert everywhere(2, program) == [1.0, 1.0]
