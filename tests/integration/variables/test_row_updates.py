"""Rows given by indices, against a plain loop."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError, MismatchError, NoAggregation, RowOutOfRange, UsageError
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


KINDS = ("add", "sub", "mul", "div", "min", "max", "update")
LOOP = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "min": min,
    "max": max,
    "update": lambda a, b: b,
}


def rows_of(rank):
    return [0, 2, 0] if rank == 0 else [rank % 4] * rank, np.arange(
        1.0, 4.0
    ) if rank == 0 else np.full(rank, rank + 2.0)


def looped(kind, start, ranks, scale=1.0):
    value = list(start)
    for rank in ranks:
        for row, x in zip(*rows_of(rank), strict=True):
            value[row] = LOOP[kind](value[row], x * scale)
    return value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_run(kind, size):
    def program():
        strategy = sv.MirroredStrategy()
        start = np.full(4, 8.0)
        with strategy.scope():
            total, mean, first = (
                sv.Variable(start, aggregation=name)
                for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
            )
            nothing = sv.Variable(start)
            own = sv.Variable(start, synchronization="ON_READ", aggregation="MEAN")

        def step(v):
            getattr(v, f"scatter_{kind}")(*rows_of(sv.rank()))

        strategy.run(step, args=(first,))
        assert first.numpy().tolist() == looped(kind, start, [0])
        strategy.run(step, args=(own,))
        assert own.local_value().tolist() == looped(kind, start, [sv.rank()])
        with pytest.raises(NoAggregation):
            strategy.run(step, args=(nothing,))
        if kind in ("mul", "div", "update"):
            for v in (total, mean):
                with pytest.raises(UsageError, match="ONLY_FIRST_REPLICA"):
                    strategy.run(step, args=(v,))
            return
        strategy.run(step, args=(total,))
        assert total.numpy().tolist() == looped(kind, start, range(size))
        strategy.run(step, args=(mean,))
        scale = 1 / size if kind in ("add", "sub") else 1.0
        assert mean.numpy().tolist() == looped(kind, start, range(size), scale)

    everywhere(size, program)


@pytest.mark.parametrize("kind", KINDS)
def test_in_cross(kind):
    def program():
        strategy = sv.MirroredStrategy()
        start = np.full(4, 8.0)
        with strategy.scope():
            plain = sv.Variable(start)
            split = sv.Variable(start, synchronization="ON_READ", aggregation="SUM")
            for v in (plain, split):
                getattr(v, f"scatter_{kind}")(*rows_of(0))
                assert v.numpy().tolist() == looped(kind, start, [0])
            with pytest.raises(MismatchError, match="pass different"):
                plain.scatter_add([sv.rank()], [1.0])
            with pytest.raises(UsageError, match="reduce it first"):
                plain.scatter_add(sv.PerReplica([0]), sv.PerReplica([1.0]))

    everywhere(3, program)


def test_a_row_out_of_range_changes_no_copy():
    def program():
        v = sv.Variable(np.zeros((3, 2)), aggregation="SUM", name="v")
        for row in (3, -1):
            if sv.rank() == 1:
                with pytest.raises(RowOutOfRange, match=f"row {row} is outside") as info:
                    v.scatter_add([0, row], np.ones((2, 2)))
                assert isinstance(info.value, IndexError)
            else:
                with pytest.raises(MismatchError, match="variable 'v'"):
                    v.scatter_add([0, 1], np.ones((2, 2)))
        for indices, values in (
            ([0.5], [[1.0, 1.0]]),
            ([0], [1.0, 1.0]),
            ([[0]], np.ones((1, 2))),
            ([0], None),
        ):
            with pytest.raises(ConfigError):
                v.scatter_add(indices, values)
        assert not v.numpy().any()
        return v.scatter_add([[0, 0], [1, 1]], np.ones((2, 2, 2))).numpy().tolist()

    assert everywhere(2, program) == [[[4.0, 4.0], [4.0, 4.0], [0.0, 0.0]]] * 2


def test_integer_division_truncates_toward_zero():
    v = sv.Variable([-7, 7, -7, 7], synchronization="NONE")
    assert v.scatter_div([0, 1, 2, 3], [2, 2, -2, -2]).numpy().tolist() == [-3, 3, 3, -3]


def test_scalars_and_bools():
    with pytest.raises(ConfigError, match="a scalar has no rows"):
        sv.Variable(1.0, synchronization="NONE").scatter_add([0], [1.0])
    flags = sv.Variable([True, False], synchronization="NONE")
    with pytest.raises(ConfigError, match="bool"):
        flags.scatter_add([0], [True])
    assert flags.scatter_max([1], [True]).numpy().tolist() == [True, True]


def test_empty_rows_and_half_types():
    def program():
        v = sv.Variable(np.full(2, 2048, np.float16), aggregation="SUM")
        v.scatter_add(
            [0] if sv.rank() < 4 else [], np.full(1 if sv.rank() < 4 else 0, 0.5, np.float16)
        )
        return v.numpy().tolist()

    assert everywhere(5, program) == [[2050.0, 2048.0]] * 5
