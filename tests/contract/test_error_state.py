"""What the caller has told NumPy about overflow and the like changes no result and breaks no call, on any path."""

import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks

PATHS = {"arena": {"shared": True}, "links": {}, "two hosts": {"shared": True, "hosts": 2}}
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
        return np.resize(np.array([high, -high, low, np.inf, np.nan, 1.0, 0.0]).astype(dtype), count)


def everything(count):
    """Make every call that combines or casts; return the bytes of all results."""
    made = []

    def keep(result):
        made.extend(np.asarray(one).tobytes() for one in (result if isinstance(result, tuple) else (result,)) if one is not None)

    for dtype, op in itertools.product(DTYPES, OPS if count < 100 else OPS[:2]):
        if np.dtype(dtype).kind == "c" and op not in ("sum", "mean", "prod"):
            continue
        x = values(dtype, count)
        for call in (sv.all_reduce, sv.reduce, sv.scan, *([] if op.endswith("loc") else [sv.exscan, sv.reduce_scatter])):
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
        return [np.isinf(sv.all_reduce(np.full(count, 3e38, np.float32))).all() for count in (3, 200_000)], everything(7)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for infinite, _ in ranks(fn):
            assert infinite == [True, True]


def test_a_world_of_one():
    with np.errstate(all="ignore"):
        wanted = everything(9)
    with np.errstate(all="raise"):
        assert everything(9) == wanted
