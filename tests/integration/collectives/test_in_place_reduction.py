"""All-reduces over links read what a rank brings where it lies, and of two ranks work where the result goes."""

import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.algorithms.builders import ALGORITHMS, build
from syncvar.algorithms.compile_schedule import compile_for_links
from syncvar.algorithms.schedule import ScheduleArgs
from syncvar.core.errors import MismatchError
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import caught, everywhere

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, shutdown_timeout_s=1.0)
COUNT = 40_011  # longer than what is exchanged whole
ALONE = [(2, "halving"), (4, "halving"), (3, "ring"), (5, "ring")]


def values(rank, dtype="float32"):
    return np.random.default_rng(rank).standard_normal(COUNT).astype(dtype)


def plainly(size, algorithm, brought, ufunc=np.add):
    """Return what the plan makes when it is run on whole copies, round by round, without any of our engine."""
    works = [one.copy() for one in brought]
    plans = [
        build("all_reduce", algorithm, ScheduleArgs(rank, size, count=COUNT)).rounds
        for rank in range(size)
    ]
    for number in range(len(plans[0])):
        before = [work.copy() for work in works]
        for rank, plan in enumerate(plans):
            for step in plan[number]:
                chunk = slice(step.chunk.start, step.chunk.stop)
                match type(step).__name__:
                    case "Recv":
                        works[rank][chunk] = before[step.peer][chunk]
                    case "RecvReduce":
                        pair = before[step.peer][chunk], before[rank][chunk]
                        works[rank][chunk] = ufunc(*(pair if step.incoming_left else pair[::-1]))
    return works


def test_the_algorithms_of_long_vectors_have_rounds_for_what_lies_apart():
    for algorithm in ALGORITHMS["all_reduce"]:
        for size in range(2, 10):
            plan = compile_for_links(
                build("all_reduce", algorithm, ScheduleArgs(0, size, count=1000)), range(size)
            )
            is_power = size & (size - 1) == 0
            if (algorithm, is_power) in (("halving", True), ("ring", True), ("ring", False)):
                assert plan.in_place is not None, (algorithm, size)
            if plan.in_place is not None:
                assert [len(one.sends) for one in plan.in_place] == [
                    len(one.sends) for one in plan.rounds
                ]


@pytest.mark.parametrize(("size", "algorithm"), ALONE)
def test_the_bytes_are_those_of_the_plan_and_what_is_brought_stays(size, algorithm):
    wanted = plainly(size, algorithm, [values(rank) for rank in range(size)])

    def fn():
        x = values(sv.rank())
        out = np.full(COUNT, np.nan, np.float32)
        first = sv.all_reduce(x, out=out, algorithm=algorithm)
        assert first is out
        assert (x == values(sv.rank())).all()
        made = sv.all_reduce(x, algorithm=algorithm)
        assert made is not x
        started = sv.all_reduce(x, algorithm=algorithm, async_op=True)
        x[...] = np.nan  # the value is that of when the call was made
        later = started.wait()
        x[...] = values(sv.rank())
        assert sv.all_reduce(x, out=x, algorithm=algorithm) is x
        return [first, made, later, x]

    for rank, found in enumerate(everywhere(size, fn, config=SOON)):
        for one in found:
            assert one.tobytes() == wanted[rank].tobytes()


def test_arrays_that_overlap_are_other_views_or_have_other_dtypes():
    def fn():
        rank, ones = sv.rank(), np.arange(COUNT, dtype=np.float64)
        room = np.zeros(2 * COUNT)
        room[:COUNT] = ones
        assert (sv.all_reduce(room[:COUNT], out=room[1 : COUNT + 1]) == 2 * ones).all()
        wide = np.zeros((COUNT, 2))
        assert (sv.all_reduce(ones, out=wide[:, 1]) == 2 * ones).all()
        assert not wide[:, 0].any()
        turned = np.zeros((3, COUNT // 3))
        assert (sv.all_reduce(np.asfortranarray(turned + 1), out=turned) == 2).all()
        assert (sv.all_reduce(ones, "mean", out=np.empty(COUNT)) == ones).all()
        assert (sv.all_reduce(ones, "mean", out=ones) == np.arange(COUNT)).all()
        half = sv.all_reduce(np.full(COUNT, 0.5, np.float16), out=np.empty(COUNT, np.float16))
        assert half.dtype == np.float16
        assert (half == 1).all()
        frozen = np.full(COUNT, 1.0 + rank)
        frozen.flags.writeable = False
        assert (sv.all_reduce(frozen, "max") == 2).all()
        pairs, places = sv.all_reduce(frozen, "minloc")
        assert (pairs == 1).all()
        assert not places.any()

    everywhere(2, fn, config=SOON)


@pytest.mark.parametrize("size", [2, 3])
def test_where_ranks_disagree_out_is_as_it_was(size):
    def fn():
        x, out = values(sv.rank()), np.full(COUNT, 7, np.float32)
        error = caught(lambda: sv.all_reduce(x, "max" if sv.rank() == size - 1 else "sum", out=out))
        assert isinstance(error, MismatchError)
        assert (out == 7).all()
        assert (x == values(sv.rank())).all()
        assert (sv.all_reduce(np.ones(COUNT), out=np.empty(COUNT)) == size).all()

    everywhere(size, fn, config=SOON)


def test_no_copy_of_a_long_vector_is_made(monkeypatch):
    """It passes through no buffer of our own: neither on the way in nor, of two ranks, on the way out."""
    module = sys.modules["syncvar.collectives.buckets"]
    copied = []
    for plain in (module.contribution, module.outcome):
        monkeypatch.setattr(
            module,
            plain.__name__,
            lambda *args, plain=plain: (copied.append(args), plain(*args))[1],
        )

    def fn():
        x = values(sv.rank())
        for out in (np.empty(COUNT, np.float32), x):
            sv.all_reduce(x, out=out)
        assert not copied
        sv.all_reduce(x, "mean", out=x)

    everywhere(2, fn, config=SOON)
    assert copied, "a mean is made apart"
