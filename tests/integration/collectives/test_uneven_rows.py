"""A rank without rows takes part in every collective like any other: rank r brings r rows, and rank 0 none."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks

OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor", "minloc", "maxloc")
WORLDS = [
    (size, shared) for size in (1, 2, 4) for shared in (False, True) if size > 1 or not shared
]


def everywhere(size, fn, *, shared):
    results = run_ranks(size, fn, timeout_s=120, shared=shared)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def rows(rank):
    """Return r rows of three numbers; none for rank 0."""
    return np.arange(100.0 * rank, 100 * rank + 3 * rank).reshape(rank, 3)


@pytest.mark.parametrize(("size", "shared"), WORLDS)
def test_lengths_that_differ_and_are_zero(size, shared):
    def program():
        rank, mine, strategy = sv.rank(), rows(sv.rank()), sv.MirroredStrategy()
        found = [
            sv.all_gather(mine),
            sv.all_gather({"a": [mine]})["a"][0],
            sv.all_gather(mine.T, axis=1).T,
        ]
        found += [strategy.gather(mine, axis=0), strategy.gather({"a": mine.T}, axis=-1)["a"].T]
        found.append(strategy.run(lambda: sv.get_replica_context().all_gather(mine, axis=0)))
        found.append(np.concatenate(sv.all_gather_object(mine)))
        on_root = sv.gather(mine, root=size - 1)
        assert (on_root is None) == (rank != size - 1)
        found += [on_root] if on_root is not None else []
        parts = [rows(place) for place in range(size)]
        assert sv.scatter(parts if rank == 0 else None).tolist() == mine.tolist()
        assert [part.tolist() for part in sv.all_to_all(parts)] == [mine.tolist()] * size
        assert [part.tolist() for part in sv.all_to_all([mine] * size)] == [
            part.tolist() for part in parts
        ]
        assert sv.reduce_scatter(np.ones((6, 2)), lengths=[6] + [0] * (size - 1)).shape == (
            (6, 2) if rank == 0 else (0, 2)
        )
        sv.send(mine, (rank + 1) % size)
        assert sv.recv((rank - 1) % size).tolist() == rows((rank - 1) % size).tolist()
        return found

    whole = np.concatenate([rows(rank) for rank in range(size)]).tolist()
    for found in everywhere(size, program, shared=shared):
        assert [one.tolist() for one in found] == [whole] * len(found)


@pytest.mark.parametrize(("size", "shared"), WORLDS)
def test_arrays_without_elements_everywhere(size, shared):
    def program():
        nothing = np.empty((0, 3), np.float32)
        for op in OPS:
            x = nothing.astype(np.int32) if op in ("and", "or", "xor") else nothing
            calls = [sv.all_reduce, sv.reduce, sv.reduce_scatter, sv.scan]
            for call in calls if op in ("minloc", "maxloc") else [*calls, sv.exscan]:
                made = call(x, op)
                values = made if isinstance(made, tuple) else [] if made is None else [made]
                assert [one.shape for one in values] == [(0, 3)] * len(values), (call, op)
                assert not values or values[0].dtype == (
                    np.float64 if op == "mean" and x.dtype.kind == "i" else x.dtype
                )
        assert sv.all_reduce(nothing, reproducible=True).shape == (0, 3)
        assert [one.shape for one in sv.all_reduce([nothing, np.ones(2)], "mean")] == [(0, 3), (2,)]
        assert sv.broadcast(nothing).shape == sv.scatter(nothing).shape == (0, 3)
        assert [part.shape for part in sv.all_to_all(nothing)] == [(0, 3)] * size
        assert sv.all_gather(nothing).dtype == np.float32
        v = sv.Variable(nothing, aggregation="SUM")
        assert v.assign_add(nothing).read_value().shape == (0, 3)
        sv.barrier()

    everywhere(size, program, shared=shared)


@pytest.mark.parametrize(("size", "shared"), WORLDS)
def test_reductions_along_an_axis_weigh_by_row(size, shared):
    def program():
        strategy, mine = sv.get_strategy(), rows(sv.rank())
        return {
            (op.name, axis): strategy.reduce(op, {"x": mine, "n": mine.astype(np.int16)}, axis=axis)
            for op in sv.ReduceOp
            for axis in (0, (0, 1))
        }

    whole = np.concatenate([rows(rank) for rank in range(size)])
    for found in everywhere(size, program, shared=shared):
        for (op, axis), made in found.items():
            if not len(whole):  # nobody has a row: the identity of the op, and NaN for a mean
                expected = {"SUM": 0, "MEAN": np.nan, "MIN": np.inf, "MAX": -np.inf, "PROD": 1}[op]
                assert np.array_equal(
                    made["x"], np.full(() if axis != 0 else 3, float(expected)), equal_nan=True
                )
                continue
            assert np.allclose(made["x"], getattr(np, op.lower())(whole, axis=axis), rtol=1e-14)
            if op != "PROD":
                assert np.allclose(made["n"], getattr(np, op.lower())(whole, axis=axis), rtol=1e-14)


@pytest.mark.parametrize(("size", "shared"), WORLDS)
def test_a_weighted_mean_counts_rows(size, shared):
    def program():
        mine = rows(sv.rank() + 1)[: sv.rank()] if size > 1 else rows(1)
        mean = mine.mean(axis=0) if len(mine) else np.zeros(3)
        return sv.all_reduce(mean, "mean", weight=float(len(mine)))

    parts = [rows(rank + 1)[:rank] for rank in range(size)] if size > 1 else [rows(1)]
    expected = np.concatenate(parts).mean(axis=0)
    for made in everywhere(size, program, shared=shared):
        assert np.allclose(made, expected, rtol=1e-14)


@pytest.mark.parametrize(("size", "shared"), WORLDS)
def test_rows_of_a_variable_are_updated_by_those_who_have_some(size, shared):
    def program():
        strategy, mine = sv.MirroredStrategy(), rows(sv.rank())
        made = []
        with strategy.scope():
            variables = [
                sv.Variable(np.zeros((size, 3)), dtype=np.float64, aggregation=aggregation)
                for aggregation in ("SUM", "MEAN")
            ]
        for v in variables:
            strategy.run(lambda v=v: v.scatter_add(np.arange(len(mine)), mine))
            made.append(v.numpy())
            strategy.run(lambda v=v: v.scatter_max(np.arange(len(mine)), mine))
            made.append(v.numpy())
        return made

    total, largest = np.zeros((size, 3)), np.full((size, 3), -np.inf)
    for rank in range(size):
        total[:rank] += rows(rank)
        largest[:rank] = np.maximum(largest[:rank], rows(rank))
    mean = total / size
    for made in everywhere(size, program, shared=shared):
        for got, expected in zip(
            made, (total, np.maximum(total, largest), mean, np.maximum(mean, largest)), strict=True
        ):
            assert np.allclose(got, expected, rtol=1e-14)
