"""A persistent call that is started: its caller publishes it at once, and goes on with it in `wait` where the others come soon.

The engine hears of it where they do not, where another call is queued after it, and from time to time.
"""

import gc
import itertools
import threading
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar._native import AsyncCall, missing_reason
from syncvar.bootstrap.process import current, use
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import progress
from syncvar.runtime.progress import ProgressEngine
from syncvar.testing import run_ranks
from tests.support.harness import caught, everywhere

CONFIG = RuntimeConfig(collective_timeout_s=50.0, shutdown_timeout_s=1.0)
SOON_S = 50.0
NATIVE = not missing_reason()
KERNELS = ["c", "python"] if NATIVE else ["python"]


def worlds(size, fn, kernel="auto", **config):
    return everywhere(size, fn, shared=True, config=CONFIG.replaced(call_runner=kernel, **config))


def value(step):
    return np.full(3, 10.0 * step + sv.rank())


def total(step):
    size = sv.world_size()
    return [size * 10.0 * step + size * (size - 1) / 2] * 3


def prepare():
    for step in range(3):
        assert sv.all_reduce(value(step)).tolist() == total(step)


def start(step, **options):
    return sv.all_reduce(value(step), async_op=True, **options)


def await_news(has_come):
    """Compute, in no call, until the engine has heard something."""
    engine, pause = current().engine, threading.Event()
    until = time.monotonic() + SOON_S
    while not has_come(engine):
        assert time.monotonic() < until
        pause.wait(0.01)


def await_end(work):
    """Wait for a call by `done` alone."""
    until = time.monotonic() + SOON_S
    while not work.done():
        assert time.monotonic() < until
        time.sleep(0.0001)


@pytest.fixture
def started(monkeypatch):
    """The calls that an engine has been given."""
    calls = []
    start_it = ProgressEngine.start

    def counted(self, request, *arguments):
        calls.append(request.label)
        start_it(self, request, *arguments)

    monkeypatch.setattr(ProgressEngine, "start", counted)
    return calls


def test_no_engine_where_the_others_come_soon(started, monkeypatch):
    # Else the engine takes over what stands still for a tenth of a second, as on a busy machine.
    monkeypatch.setattr(progress, "_PERSISTENT_OWN_S", 1_000.0)
    met = threading.Barrier(2)

    def fn():
        prepare()
        out = np.empty(3)
        met.wait(SOON_S)
        started.clear()
        met.wait(SOON_S)
        for step in range(40):
            x = value(step)
            options = {"out": out} if step % 2 else {}
            work = sv.all_reduce(x, async_op=True, **options)
            x[:] = -1.0
            met.wait(SOON_S)
            assert not NATIVE or isinstance(work._async_call, AsyncCall)
            if step % 3 == 0:
                await_end(work)
            made = work.wait(SOON_S)
            assert (made.tolist(), made is out) == (total(step), step % 2 == 1)
            assert work.wait() is made
            assert work.exception() is None
        return len(started)

    seen = worlds(2, fn)
    assert max(seen) < 10 if NATIVE else min(seen) > 30


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [2, 3])
def test_several_are_waited_for_in_any_order_whoever_is_late(kernel, size):
    orders = list(itertools.permutations(range(3)))
    met = threading.Barrier(size)

    def fn():
        rank = sv.rank()
        prepare()
        for turn, order in enumerate(orders):
            late = turn % size
            if rank == late:
                met.wait(SOON_S)  # the others have started all of theirs, and found nobody
            works = [start(turn + number) for number in range(3)]
            if rank != late:
                met.wait(SOON_S)
            mine = order if rank == 0 else order[::-1]
            made = {number: works[number].wait().tolist() for number in mine}
            assert [made[number] for number in range(3)] == [
                total(turn + number) for number in range(3)
            ]
            assert all(work.done() for work in works)

    worlds(size, fn, kernel)


BETWEEN = {
    "the same": lambda: sv.all_reduce(value(7)).tolist() == total(7),
    "a barrier": lambda: sv.barrier() is None,
    "a long one": lambda: sv.all_reduce(np.ones(200_000))[-1] == sv.world_size(),
    "a broadcast": lambda: sv.broadcast(value(5), root=1).tolist() == [51.0] * 3,
    "a structure": lambda: sv.all_reduce({"a": 1, "b": [2.0]})["a"] == sv.world_size(),
    "objects": lambda: sv.all_gather_object(sv.rank()) == list(range(sv.world_size())),
    "run": lambda: sv.get_strategy().run(lambda: sv.all_reduce(value(4)).tolist()) == total(4),
    "a group": lambda: sv.new_group([0, 1]).size == 2,
    "garbage": lambda: gc.collect() >= 0,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_late", [False, True])
def test_other_calls_come_between(kernel, is_late):
    met = threading.Barrier(2)

    def fn():
        prepare()
        variable = sv.Variable(np.zeros(3), aggregation=sv.VariableAggregation.SUM)
        for turn, (name, between) in enumerate(list(BETWEEN.items()) * 2):
            if is_late and sv.rank() == turn % 2:
                met.wait(SOON_S)
            work = start(turn)
            if is_late and sv.rank() != turn % 2:
                met.wait(SOON_S)
            assert between(), name
            variable.assign_add(value(turn))
            assert work.wait().tolist() == total(turn), name
        return variable.numpy().tolist()

    one, other = worlds(2, fn, kernel)
    assert one == other == [sum(20.0 * turn + 1 for turn in range(2 * len(BETWEEN)))] * 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_nobody_waits_for_it(kernel):
    met = threading.Barrier(2)

    def fn():
        prepare()
        for step in range(6):
            start(step)
            if step % 2:
                gc.collect()
            assert sv.all_reduce(value(step)).tolist() == total(step)
        if sv.rank():
            met.wait(SOON_S)
        start(1)
        if not sv.rank():
            met.wait(SOON_S)
        return [
            event.state
            for event in current().recorder.events()
            if event.label.startswith("all_reduce")
        ]

    for states in worlds(2, fn, kernel):
        assert states[:15] == ["done"] * 15


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("how", ["wait", "call", "done"])
def test_a_deadline_passes(kernel, how):
    given_up = threading.Event()

    def fn():
        prepare()
        if sv.rank() == 1:
            assert given_up.wait(SOON_S)  # in no call
            return None
        work = start(1, timeout=0.2 if how != "wait" else 20)
        if how == "done":
            while not work.done():
                pass
        error = caught(lambda: work.wait(0.2 if how == "wait" else None))
        given_up.set()
        assert isinstance(error, sv.DeadlineExceeded)
        assert "did not finish within 0.2 s: rank 0 waited" in str(error)
        assert any(
            "test_async_persistent_calls.py" in note and "in start" in note
            for note in error.__notes__
        )
        return error.missing

    assert worlds(2, fn, kernel) == [(1,), None]


@pytest.mark.parametrize("kernel", KERNELS)
def test_others_make_another_call(kernel):
    def fn():
        prepare()
        work = start(1) if sv.rank() else None
        error = caught(work.wait if work else sv.barrier)
        assert isinstance(error, sv.MismatchError)
        if work:
            assert work.exception() is error
        assert sv.all_reduce(value(2)).tolist() == total(2)
        return sorted(error.table)

    assert worlds(2, fn, kernel) == [[0, 1]] * 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_others_have_ended(kernel):
    def fn():
        prepare()
        kept = start(1)
        if sv.rank() == 1:
            return kept.wait().tolist() == total(1)
        await_news(lambda engine: not engine.is_quiet)
        assert kept.wait().tolist() == total(1)
        error = caught(lambda: start(2).wait())
        assert isinstance(error, sv.PeerLost)
        return "it ended before" in str(error)

    assert worlds(2, fn, kernel) == [True, True]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_engine_sees_that_the_others_are_lost_while_the_program_computes(kernel):
    has_started = threading.Event()

    def fn():
        prepare()
        if sv.rank() == 1:
            assert has_started.wait(SOON_S)
            raise ValueError("planted")
        work = start(1)
        await_news(lambda engine: not engine.async_calls)
        has_started.set()
        await_news(lambda engine: engine.failure is not None)
        return caught(work.wait)

    first, second = run_ranks(
        2, fn, shared=True, config=CONFIG.replaced(call_runner=kernel), timeout_s=60
    )
    assert isinstance(first, sv.PeerLost)
    assert isinstance(second, ValueError)


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_thread_waits(kernel):
    def fn():
        prepare()
        context = current()
        for step in range(4):
            work, made = start(step), []

            def wait(work=work, made=made):
                with use(context):
                    made.append(work.wait().tolist())

            threads = [threading.Thread(target=wait) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON_S)
            assert made == [total(step)] * 2

    worlds(2, fn, kernel)
