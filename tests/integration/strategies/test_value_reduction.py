"""Reducing and gathering values, and the containers of distributed values."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError, MismatchError, UsageError
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", list(sv.ReduceOp))
def test_elementwise(op, size):
    def program():
        x = np.array([sv.rank() + 1.0, 2.0])
        strategy = sv.MirroredStrategy()
        made = [
            strategy.reduce(op, x, axis=None),
            strategy.run(lambda: sv.get_replica_context().all_reduce(op.name, x)),
        ]
        made.append(sv.get_strategy().reduce(op.name.lower(), sv.PerReplica(x), axis=None))
        made.append(sv.get_replica_context().all_reduce(op, x))
        return [one.tolist() for one in made]

    rows = np.array([[rank + 1.0, 2.0] for rank in range(size)])
    expected = getattr(np, op.name.lower())(rows, axis=0).tolist()
    assert everywhere(size, program) == [[expected] * 4] * size


@pytest.mark.parametrize("op", list(sv.ReduceOp))
@pytest.mark.parametrize("axis", [0, -1, (0, 1), (1,)])
def test_along_axes_with_uneven_and_empty_parts(op, axis):
    def part(rank):
        shape = (rank, 3) if axis == 0 else (2, 3) if axis != (0, 1) else (rank + 1, rank)
        return np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape) + rank

    def program():
        return sv.MirroredStrategy().reduce(op, part(sv.rank()), axis=axis).tolist()

    if axis == 0:
        expected = getattr(np, op.name.lower())(
            np.concatenate([part(rank) for rank in range(3)]), axis=0
        )
    elif axis == (0, 1):
        expected = getattr(np, op.name.lower())(
            np.concatenate([part(rank).reshape(-1) for rank in range(3)])
        )
    else:
        expected = getattr(np, op.name.lower())(
            np.concatenate([part(rank) for rank in range(3)], axis=1), axis=1
        )
    for result in everywhere(3, program):
        assert np.allclose(result, expected, rtol=1e-14)


def test_structures_dtypes_and_kinds_of_values():
    def program():
        rank = sv.rank()
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            same = sv.Variable(3.0, dtype="float64")
            apart = sv.Variable(0.0, synchronization="ON_READ", dtype="float64")
        strategy.run(lambda: apart.assign(rank))
        value = {
            "array": np.arange(2) + rank,
            "same": same,
            "apart": apart,
            "list": [sv.PerReplica(rank), sv.Mirrored(1.0)],
        }
        total = strategy.reduce("SUM", value, axis=None)
        mean = strategy.reduce("MEAN", value, axis=None)
        assert mean["array"].dtype == np.float64
        assert total["array"].dtype == np.int64
        small = strategy.reduce("SUM", np.ones((3, 2), np.int8), axis=0)
        assert (small.dtype, small.tolist()) == (np.int8, [6, 6])
        whole = strategy.reduce("MEAN", np.arange(4, dtype=np.int32), axis=0)
        assert (whole.dtype, float(whole)) == (np.float64, 1.5)
        flat = lambda made: [
            made["array"].tolist(),
            float(made["same"]),
            float(made["apart"]),
            [float(x) for x in made["list"]],
        ]
        return flat(total), flat(mean)

    expected = ([[1, 3], 6.0, 1.0, [1.0, 2.0]], [[0.5, 1.5], 3.0, 0.5, [0.5, 1.0]])
    assert everywhere(2, program) == [expected] * 2


def test_wrong_arguments_and_a_group_that_stays_usable():
    def program():
        strategy = sv.MirroredStrategy()
        for value, axis, op in (
            (1.0, 0, "SUM"),
            ([1.0], 1, "SUM"),
            ([1.0], "batch", "SUM"),
            ([1.0], True, "SUM"),
            ([[1.0]], (0, 0), "SUM"),
            (True, None, "SUM"),
            (True, None, "MEAN"),
            ("text", None, "SUM"),
            (None, None, "SUM"),
            (1.0, None, "MEDIAN"),
            (1j, None, "MAX"),
            ({"a": None}, None, "SUM"),
        ):
            with pytest.raises(ConfigError):
                strategy.reduce(op, value, axis=axis)
        for value in (1.0, {"a": 1.0}):
            with pytest.raises(ConfigError):
                strategy.gather(value, axis=0)
        rank = sv.rank()
        for value in (
            np.zeros(rank + 1),
            np.zeros(2, [np.int32, np.float32][rank]),
            [{"a": 1.0}, {"b": 1.0}][rank],
        ):
            with pytest.raises(MismatchError):
                strategy.reduce("SUM", value, axis=None)
        with pytest.raises(MismatchError):
            strategy.gather(np.zeros((2, rank + 1)), axis=0)
        with pytest.raises(ConfigError if rank == 0 else MismatchError):
            strategy.reduce("SUM", None if rank == 0 else 1.0, axis=None)
        return float(strategy.reduce("SUM", 1.0, axis=None))

    assert everywhere(2, program) == [2.0, 2.0]


def test_gather():
    def program():
        rank = sv.rank()
        strategy = sv.MirroredStrategy()
        rows = np.full((rank, 2), rank)
        made = strategy.gather(rows, axis=0)
        turned = strategy.run(lambda: sv.get_replica_context().all_gather({"x": rows.T}, axis=-1))[
            "x"
        ]
        assert np.array_equal(made, turned.T)
        flags = strategy.gather(sv.PerReplica(np.array([rank == 1])), axis=0)
        with strategy.scope():
            v = sv.Variable([0.0], synchronization="ON_READ")
        strategy.run(lambda: v.assign([rank]))
        return made.tolist(), flags.tolist(), strategy.gather(v, axis=0).tolist()

    expected = ([[1, 1], [2, 2], [2, 2]], [False, True, False], [0.0, 1.0, 2.0])
    assert everywhere(3, program) == [expected] * 3


def test_a_per_replica_is_no_number():
    x = sv.PerReplica(np.ones(2))
    assert isinstance(x, sv.DistributedValues)
    assert x.values[0].tolist() == [1, 1]
    assert [x].index(x) == 0
    assert {x: 1}[x] == 1
    for wrong in (
        lambda: x + 1,
        lambda: 1 + x,
        lambda: x[0],
        lambda: list(x),
        lambda: len(x),
        lambda: float(x),
        lambda: bool(x),
        lambda: np.asarray(x),
        lambda: np.add(x, 1),
        lambda: np.sum(x),
        lambda: x < 1,
        lambda: -x,
        lambda: np.ones(2) * x,
        lambda: x == 1,
        lambda: x != 1,
        lambda: np.ones(2) == x,
        lambda: np.float64(1) == x,
        lambda: [x].index(1),
    ):
        with pytest.raises(UsageError, match=r"strategy\.reduce"):
            wrong()


def test_a_mirrored_value_acts_as_its_array():
    x = sv.Mirrored(np.array([1.0, 2.0]))
    assert (x + x).tolist() == [2, 4]
    assert np.sum(x) == 3
    assert (x[1], len(x), list(x)) == (2, 2, [1, 2])
    assert (float(sv.Mirrored(2)), int(sv.Mirrored(2)), bool(sv.Mirrored(0))) == (2, 2, False)
    assert repr(sv.Mirrored(3)) == "Mirrored(3)"


def test_reproducible_sums_are_the_tree():
    parts = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)

    def program():
        share = 4 // sv.world_size()
        mine = list(parts[sv.rank() * share : (sv.rank() + 1) * share])
        strategy = sv.MirroredStrategy(reproducible=True)
        with strategy.scope():
            v = sv.Variable(np.zeros(50, np.float32), aggregation="SUM")
        strategy.run(lambda: v.assign(sv.tree_sum(mine)))
        return v.numpy().tobytes()

    expected = sv.tree_sum(list(parts)).tobytes()
    for size in (1, 2, 4):
        assert everywhere(size, program) == [expected] * size
