"""Writes are all or nothing: bad operands, crossed writes, ranks that leave."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError, MismatchError, NoAggregation, UsageError
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


BAD = (
    None,
    "text",
    np.zeros(3),
    np.zeros((2, 1)),
    1.0,
    np.zeros(2, complex),
    sv.PerReplica(np.zeros(2)),
)


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE"])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_bad_operand_changes_no_copy(aggregation, bad_rank):
    def program():
        v = sv.Variable(np.ones(2), name="v", aggregation=aggregation)
        for bad in BAD:
            for write in (v.assign, v.assign_add):
                if sv.rank() == bad_rank:
                    with pytest.raises((ConfigError, UsageError)):
                        write(bad)
                else:
                    with pytest.raises(MismatchError, match="variable 'v'") as info:
                        write(np.ones(2))
                    assert bad_rank in info.value.table
        untouched = v.local_value().tolist()
        return untouched, v.assign_sub(np.ones(2)).numpy().tolist()

    times = 3 if aggregation == "SUM" else 1
    assert everywhere(3, program) == [([1.0, 1.0], [1.0 - times] * 2)] * 3


def test_all_operands_bad():
    def program():
        v = sv.Variable(1, aggregation="SUM")
        for _ in range(3):
            with pytest.raises(ConfigError, match="same_kind"):
                v.assign(np.float32(2.5))
            with pytest.raises(ConfigError, match="a Python float does not go into int64"):
                v.assign(2.5)
        return int(v.assign_add(np.int8(1)))

    assert everywhere(3, program) == [4] * 3


def test_writes_that_send_nothing_fail_on_their_own_rank_only():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

        def step():
            v.assign_add(None if sv.rank() == 0 else 1.0)

        if sv.rank() == 0:
            with pytest.raises(ConfigError):
                strategy.run(step)
        else:
            strategy.run(step)
        return float(v)

    assert everywhere(3, program) == [2.0] * 3


def test_crossed_writes_name_the_variables():
    def program():
        a, b = (
            sv.Variable(0.0, name="a", aggregation="SUM"),
            sv.Variable(0.0, name="b", aggregation="SUM"),
        )
        for v in (a, b) if sv.rank() == 0 else (b, a):
            with pytest.raises(MismatchError, match="variable 'a'") as info:
                v.assign_add(1.0)
            assert "'b'" in str(info.value)
            assert "test_atomic_writes.py" in info.value.table[0]
        return float(a), float(b), float(a.assign_add(1.0))

    assert everywhere(2, program) == [(0.0, 0.0, 2.0)] * 2


def test_add_against_subtract():
    def program():
        v = sv.Variable(5.0, aggregation="SUM", name="v")
        with pytest.raises(MismatchError):
            (v.assign_add if sv.rank() == 0 else v.assign_sub)(1.0)
        return float(v)

    assert everywhere(2, program) == [5.0, 5.0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_error_on_all_replicas_leaves_the_group_usable(size):
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(0.0)
            w = sv.Variable(0.0, aggregation="SUM")
        for _ in range(3):
            with pytest.raises(NoAggregation):
                strategy.run(lambda: v.assign_add(1.0))
            strategy.run(lambda: w.assign_add(1.0))
            with strategy.scope():
                w.assign_add(1.0)
        return float(w), float(strategy.reduce("SUM", 1.0, axis=None))

    assert everywhere(size, program) == [(3.0 * size + 3.0, float(size))] * size


@pytest.mark.parametrize("size", [2, 3])
def test_an_exception_that_leaves_run_is_told_to_the_peers(size):
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w = sv.Variable(0.0, aggregation="SUM")

        def step(number):
            w.assign_add(1.0)
            if sv.rank() == 0 and number == 1:
                raise KeyError("lost my keys")
            w.assign_add(1.0)
            sv.all_reduce(1.0)

        for number in range(4):
            if number != 1:
                strategy.run(step, args=(number,))
            elif sv.rank() == 0:
                with pytest.raises(KeyError):
                    strategy.run(step, args=(number,))
            else:
                with pytest.raises(MismatchError, match=r"rank 0 left strategy.run: KeyError"):
                    strategy.run(step, args=(number,))
            with strategy.scope():
                w.assign_add(1.0)  # calls after run are aligned again
        return float(w)

    assert everywhere(size, program) == [7.0 * size + 4.0] * size


def test_an_exception_after_the_last_call_of_run_harms_nobody_else():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w = sv.Variable(0.0, aggregation="SUM")

        def step():
            w.assign_add(1.0)
            if sv.rank() == 1:
                raise KeyError("late")

        if sv.rank() == 1:
            with pytest.raises(KeyError):
                strategy.run(step)
        else:
            strategy.run(step)
        with strategy.scope():
            w.assign_add(1.0)
        return float(strategy.run(lambda: w.assign_add(1.0)))

    assert everywhere(3, program) == [7.0] * 3


def test_unequal_numbers_of_calls_in_run():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w = sv.Variable(0.0, aggregation="SUM")

        def step(times):
            for _ in range(times):
                w.assign_add(1.0)

        with pytest.raises(MismatchError):
            strategy.run(step, args=(2 if sv.rank() == 0 else 1,))
            strategy.reduce("SUM", 1.0, axis=None)
        return float(strategy.run(lambda: w.assign_add(1.0)))

    assert everywhere(3, program) == [6.0] * 3


def test_another_runs_variable_is_refused():
    def program():
        one, two = sv.MirroredStrategy(), sv.MirroredStrategy()
        with one.scope():
            v = sv.Variable(1.0, aggregation="SUM")
        step = sv.Variable(0, aggregation="SUM")  # of the default strategy: behaves as in cross
        with two.scope():
            with pytest.raises(UsageError, match="another strategy"):
                v.read_value()
            assert int(step.assign_add(1)) == 1
        two.run(lambda: step.assign_add(1))
        return int(step), float(v)

    assert everywhere(2, program) == [(2, 1.0)] * 2
