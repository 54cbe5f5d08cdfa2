"""What the caller has told NumPy about overflow and the like changes no result and breaks no call, on any path."""

import contextvars
import gc
import itertools
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.core.reduce_ops import quiet_caller
from syncvar.testing import run_ranks

PATHS = {"shm": {"shared": True}, "links": {}, "two hosts": {"shared": True, "hosts": 2}}
SIZE = 3
OPS = ("sum", "mean", "prod", "min", "max", "minloc", "maxloc")
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.int32)


def values(dtype, count):
    """Numbers that overflow, underflow and have no value when they are combined."""
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        return np.resize(np.array([2**31 - 1, -(2**31), 3], dtype), count)
    high = {"float16": 6e4, "bfloat16": 3e38, "float64": 1.5e308}.get(dtype.name, 3e38)
    low = {"float16": 6e-8, "bfloat16": 1e-38, "float64": 5e-324}.get(dtype.name, 1e-45)
    with np.errstate(all="ignore"):
        return np.resize(
            np.array([high, -high, low, np.inf, np.nan, 1.0, 0.0]).astype(dtype), count
        )


def everything(count):
    """Make every call that combines or casts; return the bytes of all results."""
    made = []

    def keep(result):
        made.extend(
            np.asarray(one).tobytes()
            for one in (result if isinstance(result, tuple) else (result,))
            if one is not None
        )

    for dtype, op in itertools.product(DTYPES, OPS if count < 100 else OPS[:2]):
        if np.dtype(dtype).kind == "c" and op not in ("sum", "mean", "prod"):
            continue
        x = values(dtype, count)
        for call in (
            sv.all_reduce,
            sv.reduce,
            sv.scan,
            *([] if op.endswith("loc") else [sv.exscan, sv.reduce_scatter]),
        ):
            keep(call(x, op))
        if op in ("sum", "mean", "prod") and x.dtype.kind in "fV":
            keep(sv.all_reduce(x, op, prescale=1e30, postscale=1e30))
            keep(sv.all_reduce(x, op, reproducible=True))
            into = x.copy()
            keep(sv.all_reduce(into, op, out=into))
            keep(sv.all_reduce([x, x[:1]], op)[1])
        if op == "mean" and x.dtype.kind in "fV":
            keep(sv.all_reduce(x, op, weight=0.0))
        keep(sv.all_reduce(x, op, async_op=True).wait())
    strategy = sv.MultiWorkerMirroredStrategy()
    for dtype in DTYPES[:4]:
        x = values(dtype, count)
        keep(sv.tree_sum([x, x, x]))
        for op in ("SUM", "MEAN"):
            keep(strategy.reduce(op, x, axis=0))
            keep(strategy.reduce(op, x, axis=None))
        keep(strategy.reduce("MEAN", x[:0], axis=0))
    return made


@pytest.fixture(params=PATHS)
def ranks(request):
    def run(fn):
        results = run_ranks(SIZE, fn, **PATHS[request.param])
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return results

    return run


@pytest.mark.parametrize("count", [6, 30_000])
def test_numpy_told_to_raise_gives_the_same_bytes(ranks, count):
    def fn():
        with np.errstate(all="ignore"):
            wanted = everything(count)
        with np.errstate(all="raise"):
            return wanted == everything(count)

    assert ranks(fn) == [True] * SIZE


def test_warnings_that_are_errors_are_none(ranks):
    def fn():
        return [
            np.isinf(sv.all_reduce(np.full(count, 3e38, np.float32))).all()
            for count in (3, 200_000)
        ], everything(7)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for infinite, _ in ranks(fn):
            assert infinite == [True, True]


def everyday(size):
    """Make the calls of a training step often enough that most go the prepared way."""
    strategy = sv.MultiWorkerMirroredStrategy()
    sign = 1 if sv.rank() else -1
    for dtype in DTYPES:
        kind, x = np.dtype(dtype).kind, values(dtype, 2 * size)
        with np.errstate(all="ignore"):
            signed = x * np.asarray(sign, dtype)
        with strategy.scope():
            summed = sv.Variable(np.zeros(x.shape, dtype), aggregation="SUM")
            mean = sv.Variable(
                np.zeros(x.shape, dtype), aggregation="SUM" if kind in "ic" else "MEAN"
            )
            own = sv.Variable(
                np.zeros(x.shape, dtype), synchronization="ON_READ", aggregation="SUM"
            )
        for _, op in itertools.product(range(3), ("sum", "mean", "prod", "min", "max")):
            if kind != "c" or op not in ("min", "max"):
                for value in (x, x[0], {"a": x[:1], "b": x[1:3]}, [x, x[1]], signed):
                    sv.all_reduce(value, op)
                sv.all_reduce(
                    x,
                    op,
                    out=np.empty_like(x, np.float64 if kind == "i" and op == "mean" else None),
                )
                sv.reduce_scatter(x, op)
        for _ in range(3):
            strategy.run(
                lambda all_of=(summed, mean, own), x=x: [
                    write(x) for v in all_of for write in (v.assign, v.assign_add, v.assign_sub)
                ]
            )
            own.numpy()
            strategy.reduce("SUM", x, axis=None)
        for v in (summed, mean):
            v.assign(x)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("policy", ["always", "error"])
def test_calls_that_are_prepared_tell_no_more_of_overflow_than_the_first_one(size, policy):
    def fn():
        with np.errstate(all="raise" if policy == "error" else "warn"):
            everyday(size)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter(policy)
        assert run_ranks(size, fn, shared=True) == [None] * size
    assert [str(one.message) for one in told] == []


def test_what_makes_calls_quiet_keeps_nothing_of_the_program_alive():
    class Held:
        pass

    held = Held()
    seen = weakref.ref(held)
    variable = contextvars.ContextVar("variable")
    token = variable.set(held)
    call = quiet_caller()
    variable.reset(token)
    del held, token
    gc.collect()
    assert seen() is None
    with np.errstate(all="raise"):
        assert call(np.add, np.float32(3e38), np.float32(3e38)) == np.inf
        assert call(np.geterr) == dict.fromkeys(np.geterr(), "ignore")
        assert np.geterr()["over"] == "raise"


def test_a_world_of_one():
    with np.errstate(all="ignore"):
        wanted = everything(9)
    with np.errstate(all="raise"):
        assert everything(9) == wanted


def test_a_mean_of_one_input_is_that_input_on_every_path(ranks):
    """NumPy divides a complex infinity by 1 to inf+nanj, so no path may divide."""

    def fn():
        x = np.resize(np.array([np.inf, 1 + 2j], np.complex64), 6)
        first = [sv.scan(x, "mean").tobytes() for _ in range(4)]
        first += [sv.scan(x, "mean", async_op=True).wait().tobytes() for _ in range(3)]
        return [one == x.tobytes() for one in first] if sv.rank() == 0 else []

    assert ranks(fn)[0] == [True] * 7
