"""An exception inside a call on one rank: the others are told at once, alike in shared memory, over links and over hosts.

Before anything of the call has been said the others raise MismatchError and the next call works; later than that the
generation is broken for all.
"""

import re
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.collectives import reduce_args
from syncvar.core.errors import ConfigError, GroupBroken, MismatchError, PeerLost
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from tests.support.harness import caught

PATHS = {"shm": {"shared": True}, "links": {}, "two hosts": {"shared": True, "hosts": 2}}
SOON = RuntimeConfig(
    collective_timeout_s=60.0, report_after_s=0.05, shutdown_timeout_s=1.0
)  # nothing here waits for it
SIZE, LONG = 4, 40_000
CALLS = {
    "all_reduce": lambda x: sv.all_reduce(x, "fragile"),
    "reduce": lambda x: sv.reduce(x, "fragile", root=1),
    "reduce_scatter": lambda x: sv.reduce_scatter(x, "fragile"),
    "scan": lambda x: sv.scan(x, "fragile"),
}


@pytest.fixture(params=PATHS)
def ranks(request):
    return lambda fn, odd: run_ranks(
        SIZE, lambda: fn(sv.rank() == odd), config=SOON, timeout_s=120, **PATHS[request.param]
    )


@pytest.fixture
def fragile():
    """An op that raises on the ranks that have said so."""
    broken = set()

    def combine(left, right):
        if current().rank in broken:
            raise ValueError("planted")
        return left + right

    sv.register_op("fragile", combine, replace=True)
    return broken


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan"])
def test_before_anything_has_been_said(ranks, fragile, name, odd):  # noqa: ARG001  (such an op has no persistent calls, which need no plan)
    def fn(is_odd):
        sv.barrier()
        world = current().world
        if is_odd:

            def plan(*_, **__):
                world.plan = planner
                raise MemoryError("planted")

            plan.forced = world.plan.forced
            planner, world.plan = world.plan, plan
        first = caught(CALLS[name], np.ones(LONG), of=Exception)
        return first, float(sv.all_reduce(np.ones(3))[0])

    for rank, (error, after) in enumerate(ranks(fn, odd)):
        assert after == SIZE
        if rank == odd:
            assert isinstance(error, MemoryError)
        else:
            assert isinstance(error, MismatchError), repr(error)
            assert f"rank {odd} refused its own call" in str(error)
            assert "MemoryError: planted" in str(error)


@pytest.mark.parametrize("count", [SIZE, LONG])
@pytest.mark.parametrize("name", CALLS)
def test_in_the_middle(ranks, fragile, name, count):
    odd = 0 if name == "all_reduce" else 1  # it combines in the call
    out_of_it = threading.Barrier(SIZE)

    def fn(is_odd):
        CALLS[name](np.ones(count))
        out_of_it.wait(20)
        if is_odd:
            fragile.add(current().rank)
        # Who is not needed any more may be told in the next call.
        return caught(lambda: [CALLS[name](np.ones(count)), sv.barrier()], of=Exception), caught(
            sv.barrier
        )

    for rank, (first, then) in enumerate(ranks(fn, odd)):
        assert isinstance(then, GroupBroken), repr(then)
        if rank == odd:
            assert isinstance(first, ConfigError | ValueError), repr(first)
        else:
            assert isinstance(first, PeerLost), repr(first)
            assert (first.rank, name in first.reason) == (odd, True)
            assert re.match(r"interrupted by (Config|Value)Error in ", first.reason)


def test_at_the_end(ranks, fragile, monkeypatch):  # noqa: ARG001  (what is prepared ends elsewhere)
    finish = reduce_args.finish
    odd = 2
    broken = set()

    def finished(how, total, count):
        if current().rank in broken:
            raise MemoryError("planted")
        return finish(how, total, count)

    monkeypatch.setattr(reduce_args, "finish", finished)

    out_of_it = threading.Barrier(SIZE)

    def fn(is_odd):
        sv.barrier()
        out_of_it.wait(20)
        if is_odd:
            broken.add(current().rank)
        first = caught(lambda: [CALLS["scan"](np.ones(3)), sv.barrier()], of=Exception)
        return first, caught(sv.barrier)

    for rank, (first, then) in enumerate(ranks(fn, odd)):
        assert isinstance(then, GroupBroken), repr(then)
        assert isinstance(first, MemoryError if rank == odd else PeerLost), repr(first)


def test_a_rank_that_waits_for_one_call_ends_with_the_error_of_another(ranks, fragile):
    """Its thread drives all calls, also those of other groups that have been started."""
    odd = 0
    others_have_started = threading.Barrier(SIZE)

    def fn(is_odd):
        group = sv.new_group(range(SIZE))
        sv.all_reduce(np.ones(SIZE), "fragile")
        sv.barrier()
        if is_odd:
            others_have_started.wait(20)
            fragile.add(current().rank)
        work = sv.all_reduce(np.ones(SIZE), "fragile", async_op=True)
        if not is_odd:
            others_have_started.wait(20)
        waited = caught(
            lambda: [sv.barrier(group=group), work.wait(), sv.barrier(group=group)], of=Exception
        )
        return waited, caught(work.wait, of=Exception)

    for rank, (waited, own) in enumerate(ranks(fn, odd)):
        assert isinstance(
            waited, ConfigError | ValueError | GroupBroken if rank == odd else PeerLost
        ), repr(waited)
        assert isinstance(own, ConfigError | ValueError if rank == odd else PeerLost | None), repr(
            own
        )
