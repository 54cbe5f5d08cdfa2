"""What programs write in every step is prepared once: in plain code as in `run`, with a timeout, of numbers; deadlines hold."""

import re
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar._native import missing_reason
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import persistent_reduce, persistent_transfer
from syncvar.runtime.communicator import Communicator
from syncvar.testing import run_ranks
from syncvar.variables import deferral_tuner
from syncvar.variables.registry import VariableRegistry
from syncvar.variables.variable import Variable
from tests.support.harness import caught, everywhere

SUM, MEAN = sv.VariableAggregation.SUM, sv.VariableAggregation.MEAN
ON_WRITE, AUTO, ON_READ = (
    sv.VariableSynchronization.ON_WRITE,
    sv.VariableSynchronization.AUTO,
    sv.VariableSynchronization.ON_READ,
)
ONES = np.ones(3)


def writes():
    """The calls that a rank makes in every step, by name; the variables belong to this world."""
    eager = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM)
    mean = sv.Variable(0.0, synchronization=ON_WRITE, aggregation=MEAN)
    auto = sv.Variable(np.zeros(3), aggregation=SUM)
    auto.pin("eager")
    strategy = sv.MirroredStrategy(timeout=20.0)
    strategy.check_every = sv.get_strategy().check_every = 0
    with strategy.scope():
        hasty = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM)
    return {
        "assign": lambda: eager.assign(ONES),
        "assign_add": lambda: eager.assign_add(ONES),
        "assign_sub of float32": lambda: eager.assign_sub(np.ones(3, np.float32)),
        "assign_add of a list": lambda: eager.assign_add([1.0, 2.0, 3.0]),
        "assign_add of a number": lambda: mean.assign_add(0.5),
        "assign_add of an int": lambda: mean.assign_add(2),
        "AUTO": lambda: auto.assign_add(ONES),
        "in run, with a timeout": lambda: strategy.run(lambda: hasty.assign_add(ONES)),
        "in run of the default strategy": lambda: sv.get_strategy().run(
            lambda: eager.assign_add(ONES)
        ),
    }


def entered(strategy, fn):
    with strategy.scope():
        return fn()


def values():
    strategy = sv.MirroredStrategy(timeout=20.0)
    own = sv.Variable(ONES, synchronization=ON_READ, aggregation=SUM)
    with strategy.scope():
        mean = sv.Variable(np.ones(40_000), synchronization=ON_READ, aggregation=MEAN)
    return {
        "reading ON_READ": own.read_value,
        "reading a long ON_READ in a scope": lambda: entered(strategy, mean.numpy),
        "sync of ON_READ in run": lambda: strategy.run(mean.sync),
        "reduce of a number": lambda: strategy.reduce("SUM", 0.5, axis=None),
        "reduce of a dict": lambda: strategy.reduce(
            sv.ReduceOp.MEAN, {"loss": 0.5, "acc": ONES}, axis=None
        ),
        "all_reduce in the context": lambda: strategy.run(
            lambda: sv.get_replica_context().all_reduce("MEAN", 0.5)
        ),
        "a float": lambda: sv.all_reduce(1.0),
        "an int": lambda: sv.all_reduce(3, "max"),
        "NumPy's scalar": lambda: sv.all_reduce(np.float32(2)),
        "a list": lambda: sv.all_reduce([1.0, 2.0, 3.0], "mean"),
        "a dict": lambda: sv.all_reduce({"loss": 0.5, "acc": np.ones(2)}, "mean"),
        "all_reduce in time": lambda: sv.all_reduce(ONES, timeout=20.0),
        "a long all_reduce in time": lambda: sv.all_reduce(np.ones(300_000), timeout=20),
        "broadcast of a number": lambda: sv.broadcast(7, root=1),
        "all_gather of a number": lambda: sv.all_gather(7.0),
        "barrier in time": lambda: sv.barrier(timeout=20.0),
        "broadcast in time": lambda: sv.broadcast(ONES, timeout=20.0),
        "all_gather in time": lambda: sv.all_gather(ONES, timeout=20.0),
        "all_to_all in time": lambda: sv.all_to_all(np.ones(4), timeout=20.0),
        "reduce_scatter in time": lambda: sv.reduce_scatter(np.ones(4), timeout=20.0),
    }


@pytest.fixture
def counted(monkeypatch):
    """How often a rank has gone the long way, and has prepared a call, by (rank, which)."""
    found = {}

    def count(place, name, which):
        plain = getattr(place, name)

        def counting(*arguments, **options):
            key = sv.rank(), which
            found[key] = found.get(key, 0) + 1
            return plain(*arguments, **options)

        monkeypatch.setattr(place, name, counting)

    count(Communicator, "perform", "long way")
    count(persistent_reduce, "PersistentCall", "prepared")
    count(persistent_transfer, "PersistentCall", "prepared")
    return found


@pytest.mark.parametrize("calls", [writes, values])
def test_a_call_is_prepared_once_and_then_never_goes_the_long_way(counted, calls):
    """A write in plain code made its short way anew in every call, and threw it away."""

    def fn():
        rank, wrong = sv.rank(), {}
        for name, call in calls().items():
            call()
            call()
            before = [counted.get((rank, which), 0) for which in ("long way", "prepared")]
            for _ in range(20):
                call()
            after = [counted.get((rank, which), 0) for which in ("long way", "prepared")]
            if after != before:
                wrong[name] = [now - then for now, then in zip(after, before, strict=True)]
            sv.barrier()
        return wrong

    assert everywhere(2, fn, shared=True) == [{}, {}]
    assert {(rank, which) for rank in (0, 1) for which in ("long way", "prepared")} <= set(
        counted
    )  # what is counted happens


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"shared": True, "hosts": 2},
        {"shared": True, "config": RuntimeConfig(check_finite="warn")},
    ],
)
def test_where_nothing_can_be_prepared_nothing_is_made(monkeypatch, world):
    made = []
    for module in (persistent_reduce, persistent_transfer):
        monkeypatch.setattr(module, "PersistentCall", lambda *_: made.append(1))

    def fn():
        for call in [*writes().values(), *values().values()]:
            call()
            call()

    everywhere(2, fn, **world)
    assert not made


def test_a_gradient_that_is_a_list_is_looked_at_as_an_array_is():
    """With `check_finite` every list of gradients raised AttributeError."""

    def fn():
        v = sv.Variable([1.0, 2.0])
        optimizer = sv.optimizers.SGD(1.0)
        optimizer.apply_gradients([([1.0, 1.0], v)])
        error = caught(
            lambda: optimizer.apply_gradients([([float("nan") if sv.rank() else 1.0, 1.0], v)])
        )
        return type(error), v.numpy().tolist()

    config = RuntimeConfig(check_finite="raise")
    assert everywhere(2, fn, config=config) == [
        (sv.MismatchError, [0.0, 1.0]),
        (sv.ConfigError, [0.0, 1.0]),
    ]


def missing_rank(call, *, prepares):
    """Make a persistent call that rank 1 does not come to; return rank 0's error and how long it took.

    `call` returns a function of the deadline.
    """
    gone = threading.Event()

    def fn():
        current().world.keeps_persistent = prepares
        made = call()
        for _ in range(3):
            made(50.0)
        if sv.rank():
            gone.wait(120)
            return None
        begin = time.monotonic()
        error = caught(made, 0.3)
        took = time.monotonic() - begin
        gone.set()
        return error, took

    return run_ranks(2, fn, shared=True, timeout_s=60)[0]


def in_time(call):
    return lambda: lambda timeout: call(timeout=timeout)


def hasty_write():
    v = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM)

    def write(timeout):
        v.strategy.timeout = timeout
        v.assign_add(ONES)

    return write


@pytest.mark.parametrize(
    "call",
    [
        in_time(lambda timeout: sv.all_reduce(ONES, timeout=timeout)),
        in_time(lambda timeout: sv.all_reduce(2.0, "mean", timeout=timeout)),
        in_time(lambda timeout: sv.all_reduce({"loss": 1.0, "n": 2.0}, timeout=timeout)),
        in_time(lambda timeout: sv.all_reduce(np.ones(300_000), timeout=timeout)),
        in_time(lambda timeout: sv.barrier(timeout=timeout)),
        in_time(lambda timeout: sv.all_gather(ONES, timeout=timeout)),
        hasty_write,
    ],
    ids=["array", "number", "dict", "long", "barrier", "all_gather", "write"],
)
def test_the_deadline_of_a_prepared_call_is_that_of_the_long_way(call):
    prepared, took = missing_rank(call, prepares=True)
    plain, _ = missing_rank(call, prepares=False)
    assert isinstance(prepared, sv.DeadlineExceeded)
    assert 0.3 <= took < 60
    texts = [
        re.sub(r"waited \d+\.\d s", "waited so long", str(error)) for error in (prepared, plain)
    ]
    assert (texts[0], prepared.timeout_s, prepared.missing) == (texts[1], 0.3, (1,))
    assert "waited so long" in texts[0]
    assert "within 0.3 s" in str(prepared)


@pytest.mark.parametrize("timeout", [0, -1.0, True, "5", float("nan"), np.float64(-1)])
def test_a_wrong_timeout_of_a_prepared_call_is_refused_and_told(timeout):
    def fn():
        for _ in range(3):
            sv.all_reduce(ONES, timeout=5.0)
        error = caught(lambda: sv.all_reduce(ONES, timeout=timeout if sv.rank() else 5.0))
        return type(error), float(sv.all_reduce(1.0, timeout=5.0))

    assert everywhere(2, fn, shared=True) == [(sv.MismatchError, 2.0), (sv.ConfigError, 2.0)]


@pytest.mark.parametrize(
    "odd",
    [
        [1.0, 10**400, 2.0],
        10**400,
        [1.0, 10**30, 2.0],
        np.str_("x"),
        {"loss": "x"},
        {"loss": None},
        {"a": 1.0, 2: 1.0},
    ],
)
def test_numbers_that_are_none_are_refused_and_told_after_the_call_was_prepared(odd):
    """The others raised nothing and waited, had the conversion failed outside of the call."""

    def fn():
        plain = (
            {"loss": 1.0}
            if isinstance(odd, dict)
            else [1.0, 2.0, 3.0]
            if isinstance(odd, list)
            else 1.0
        )
        for _ in range(3):
            sv.all_reduce(plain)
        try:
            sv.all_reduce(odd if sv.rank() else plain, timeout=20.0)
        except Exception as error:
            kind = sv.MismatchError if isinstance(error, sv.MismatchError) else "refused"
        return kind, float(sv.all_reduce(1.0))

    assert everywhere(2, fn, shared=True) == [(sv.MismatchError, 2.0), ("refused", 2.0)]


@pytest.mark.parametrize(
    ("dtype", "operand"),
    [
        ("float32", 1e39),
        ("float16", 70_000),
        ("int8", 300),
        ("int64", 1 << 64),
        ("int64", 0.5),
        ("float32", 1j),
        ("float64", None),
        ("float64", ONES),
    ],
)
def test_numbers_that_a_variable_does_not_hold_are_refused_after_the_write_was_prepared(
    dtype, operand
):
    def fn():
        v = sv.Variable(1, dtype=dtype, synchronization=ON_WRITE, aggregation=SUM)
        for _ in range(3):
            v.assign_add(1)
        with np.errstate(all="raise"):
            error = caught(lambda: v.assign_add(operand if sv.rank() else 1))
            return type(error), v.assign_add(1).numpy().tolist()

    assert everywhere(2, fn, shared=True) == [(sv.MismatchError, 9), (sv.ConfigError, 9)]


def test_all_that_a_number_may_be_goes_in_by_the_prepared_way_as_by_the_long_one():
    def fn():
        seen = []
        for dtype, numbers in (
            ("float16", [65504, -1, 0.1, 1e-30, float("inf"), float("nan")]),
            (ml_dtypes.bfloat16, [1, 0.1, 3e38]),
            ("float32", [16_777_217, 1e-300, 0.1, -2.5, float("inf")]),
            ("float64", [2**53 + 1, 2**63, 0.1]),
            ("int8", [127, -128, True]),
            ("uint64", [2**64 - 1]),
            ("complex64", [0.1, 2, 1 + 2j]),
        ):
            for number in numbers:
                if sv.rank():
                    number = 0  # so that nothing overflows
                v = sv.Variable(np.zeros((), dtype), synchronization=ON_WRITE, aggregation=SUM)
                with np.errstate(all="raise"):
                    one, two, three = (v.assign(number).numpy().tobytes() for _ in range(3))
                seen.append(one == two == three)
        return seen

    assert all(map(all, everywhere(2, fn, shared=True)))


def test_a_write_inside_and_outside_of_run_is_one_prepared_call(counted):
    def fn():
        v = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM)
        strategy = sv.get_strategy()
        v.assign_add(ONES)
        before = counted[sv.rank(), "prepared"]
        for _ in range(3):
            strategy.run(lambda: v.assign_add(ONES))
            v.assign_add(ONES)
            with strategy.scope():
                v.assign_add(ONES)  # the same everywhere: another rule, prepared once as well
        return v.numpy().tolist(), counted[sv.rank(), "prepared"] - before

    assert everywhere(2, fn, shared=True) == [([17.0] * 3, 1)] * 2


def test_auto_decides_at_every_64th_prepared_write_outside_every_scope(monkeypatch):
    monkeypatch.setitem(
        deferral_tuner.COSTS, ("shm", False), deferral_tuner.Costs(5, 8.0, 0.3, 3.3, 2.0, 105.0)
    )  # else nothing is decided in shared memory

    def fn():
        v = sv.Variable(np.zeros(3), aggregation=SUM)
        changed = next(
            (
                count
                for count in range(1, 400)
                if v.assign_add(ONES).explain().reason.startswith("deferred")
            ),
            0,
        )
        return changed, float(v.numpy()[0])

    (changed, total), other = everywhere(2, fn, shared=True)
    assert (changed, total) == other
    assert changed in range(64, 400, 64)
    assert total == 2 * changed


def test_the_checker_looks_before_prepared_writes_outside_runs():
    def fn():
        strategy = sv.get_strategy()
        strategy.check_every = 5
        v = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM)
        for _ in range(7):
            v.assign_add(ONES)
        if sv.rank():
            v._state.storage.array[1] += 1  # a flipped bit, say
        errors = [caught(lambda: v.assign_add(ONES)) for _ in range(3)]
        return [type(error) for error in errors]

    none = type(None)
    assert everywhere(2, fn, shared=True) == [[none, none, sv.MismatchError]] * 2


@pytest.mark.parametrize("way", ["plain", "run"])
def test_a_prepared_write_asks_for_nothing_but_where_a_comparison_is_due(monkeypatch, way):
    """Every write outside runs was counted and looked at by itself, which took longer than its call."""
    asked = {}
    for place, name in ((VariableRegistry, "is_due"), (Variable, "_assign")):
        plain = getattr(place, name)

        def counting(*arguments, plain=plain, name=name):
            key = sv.rank(), name
            asked[key] = asked.get(key, 0) + 1
            return plain(*arguments)

        monkeypatch.setattr(place, name, counting)

    def fn():
        strategy = sv.get_strategy()
        strategy.check_every = 100
        v, w = (
            sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM) for _ in range(2)
        )

        def step():
            for count in range(250):
                v.assign_add(ONES)
                if count % 3 == 0:
                    w.assign_sub(ONES)

        step() if way == "plain" else strategy.run(step)
        return (
            [float(one.numpy()[0]) for one in (v, w)],
            v._state.tally.steps,
            v.explain().numbers["writes"],
            v.explain().numbers["collectives"],
        )

    steps = 250 if way == "plain" else 0
    assert everywhere(2, fn, shared=True) == [([500.0, -168.0], steps, 250, 250)] * 2
    looks = (
        2 + 2 if way == "plain" else 0
    )  # the first write of each, and the 100th and 200th of the one that is written most
    assert asked == {
        (rank, name): count
        for rank in range(2)
        for name, count in (("is_due", looks), ("_assign", max(looks, 2)))
        if count
    }


def test_steps_are_counted_until_the_next_comparison_whatever_changes_meanwhile():
    """A variable that is made, or another `check_every`, brings the next comparison forward."""

    def fn():
        strategy = sv.get_strategy()
        v = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM)

        def found():
            return next(
                (
                    count
                    for count in range(1, 300)
                    if isinstance(caught(lambda: v.assign_add(ONES)), sv.MismatchError)
                ),
                0,
            )

        strategy.check_every = 0
        for _ in range(130):
            v.assign_add(ONES)
        strategy.check_every = 50
        v.assign_add(ONES)
        if sv.rank():
            v._state.storage.array[1] += 1
        first = found()
        v.assign(ONES)
        made = sv.Variable(0.0, synchronization=ON_WRITE, aggregation=SUM)
        strategy.check_every = 7
        if sv.rank():
            made._state.storage.array[...] = 1
        return first, found()

    assert (
        everywhere(2, fn, shared=True) == [(19, 4)] * 2
    )  # the 150th write, which is made at the second attempt, and the 154th


def test_ops_of_structures_may_be_spelled_as_those_of_arrays():
    def fn():
        op = sv.ReduceOp.MEAN if sv.rank() else "MEAN"
        return [float(sv.all_reduce({"loss": float(sv.rank())}, op)["loss"]) for _ in range(3)]

    assert everywhere(2, fn, shared=True) == [[0.5] * 3] * 2


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_a_prepared_read_is_sealed_and_of_its_moment(kernel):
    """What is read never changes and nobody can write to it, also beside a write of this process and in a block that ranks leave."""

    def fn():
        rank, seen = sv.rank(), []
        v = sv.Variable(np.zeros(3), synchronization=ON_READ, aggregation=SUM)
        for step in range(6):
            v.assign(np.full(3, step + rank))
            if step == 3:
                with v._state.storage:  # another thread is seen to write
                    seen.append(v.read_value())
            elif step == 4:
                with sv.uneven():
                    seen.append(v.read_value())
            else:
                seen.append(v.numpy() if step % 2 else v.read_value(copy=False))
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                seen[-1].flags.writeable = True
            assert v.local_value().tolist() == [step + rank] * 3
        assert [one.tolist() for one in seen] == [[2.0 * step + 1] * 3 for step in range(6)]
        return [type(read).__name__ for read in v._state.reading.values()]

    found = everywhere(
        2, fn, shared=True, config=RuntimeConfig(call_runner=kernel, collective_timeout_s=30.0)
    )
    assert found[0] == found[1]
    assert ("Read" in found[0]) == (kernel == "auto" and not missing_reason())


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_a_prepared_read_of_all_copies_is_one_only_where_it_has_to_be(kernel):
    """Inside `run` each replica reads its own copy, and in another strategy's scope the variable is refused, also once reads are prepared."""

    def fn():
        rank, strategy = sv.rank(), sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(np.zeros(3), synchronization=ON_READ, aggregation=SUM)
        strategy.run(lambda: v.assign(np.full(3, 1.0 + rank)))
        before = v._state.tally.reads
        assert [v.numpy().tolist() for _ in range(4)] == [[3.0] * 3] * 4
        assert v._state.tally.reads == before + 4
        with strategy.scope():
            assert [v.numpy().tolist() for _ in range(3)] == [[3.0] * 3] * 3
        for _ in range(3):
            assert strategy.run(v.numpy).tolist() == [1.0 + rank] * 3
            merged = strategy.run(lambda: sv.get_replica_context().merge_call(lambda _: v.numpy()))
            assert merged.tolist() == [3.0] * 3
        with sv.MirroredStrategy().scope(), pytest.raises(sv.UsageError, match="another strategy"):
            v.numpy()
        return type(v._state.look).__name__

    found = everywhere(
        2, fn, shared=True, config=RuntimeConfig(call_runner=kernel, collective_timeout_s=30.0)
    )
    assert (found[0] == "Read") == (kernel == "auto" and not missing_reason())


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_who_reads_alone_by_a_prepared_read_is_told_what_to_write(kernel):
    def fn():
        v = sv.Variable(np.zeros(3), synchronization=ON_READ, aggregation=SUM)
        for _ in range(3):
            v.numpy()
        error = caught(sv.barrier) if sv.rank() else caught(v.numpy)
        return str(error)

    told = everywhere(
        2, fn, shared=True, config=RuntimeConfig(call_runner=kernel, collective_timeout_s=30.0)
    )[0]
    assert "is collective" in told
    assert ".local_value()" in told
