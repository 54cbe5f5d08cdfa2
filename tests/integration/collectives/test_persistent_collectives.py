"""`sv.persistent`: every function that it takes, starts and waits, misuse, and what it refuses."""

import asyncio
import gc
import inspect
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar._native import missing_reason
from syncvar.collectives.collective_registry import COLLECTIVES, Case
from syncvar.collectives.persistent import persistent_functions
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import caught, everywhere

CONFIG = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
WORLDS = {"links": {}, "shm": {"shared": True}}
RUNNERS = ["python"] if missing_reason() else ["c", "python"]

ACCEPTED = persistent_functions()
# The others have a test of their own.
CASES = [name for name in ACCEPTED if name not in {"barrier", "send", "recv", "recv_any"}]


def plain(value):
    if isinstance(value, list | tuple):
        return [float(one) for part in value for one in np.asarray(part).reshape(-1)]
    return None if value is None else np.asarray(value).reshape(-1).tolist()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", WORLDS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_function_is_called_and_started(name, place, runner):
    one = COLLECTIVES[name]

    def fn():
        case = Case(sv.rank(), 2, (4,), "float64", root=1)
        first = one.inputs(case, sv.rank())
        x = np.zeros_like(first)
        bound = one.bound(case, x)
        call = sv.persistent(bound.func, *bound.args, **bound.keywords)
        for step in range(6):
            x[...] = first * step
            if step % 3 == 0:
                result = call()
            else:
                work = call.start()
                assert isinstance(work, sv.Work)
                x[...] = -1.0  # the start has read it
                result = call.wait() if step % 3 == 1 else work.wait()
            wanted = plain(one.wanted(case))
            scaled = wanted and [value * step for value in wanted]
            assert plain(result) == scaled, (name, step)
            assert call.done()

    everywhere(2, fn, config=CONFIG.replaced(call_runner=runner), **WORLDS[place])


@pytest.mark.parametrize("place", WORLDS)
def test_barriers_and_messages(place):
    def fn():
        rank, x, out = sv.rank(), np.zeros(3), np.empty(3)
        meet = sv.persistent(sv.barrier)
        send = sv.persistent(sv.send, x, 1 - rank, tag=2)
        receive = sv.persistent(sv.recv, 1 - rank, tag=2, out=out)
        receive_any = sv.persistent(sv.recv_any, tag=2)
        for step in range(5):
            x[:] = 10 * step + rank
            assert meet() is None
            if step % 2:
                assert sv.wait_all([send.start(), receive.start()])[1] is out
            else:
                receive.start()
                send()
                assert receive.wait() is out
            assert out.tolist() == [10.0 * step + 1 - rank] * 3
            send.start()
            message = receive_any() if step % 2 else receive_any.start().wait()
            assert send.wait() is None
            assert message.source == 1 - rank
            assert message.value.tolist() == out.tolist()
            meet.start()
            assert meet.wait() is None

    everywhere(2, fn, config=CONFIG, **WORLDS[place])


def test_the_functions_are_those_with_arrays_and_async_op():
    public = {
        name
        for name in sv.__all__
        if inspect.isroutine(one := getattr(sv, name)) or type(one).__name__.endswith("Entrance")
        if "async_op" in inspect.signature(one).parameters
    }
    assert {name for name in public if not name.endswith("_object")} == set(ACCEPTED)
    assert all(getattr(sv, name) is one for name, one in ACCEPTED.items())


@pytest.mark.parametrize("function", [sv.all_gather_object, sv.sendrecv, sv.new_group, len, 5])
def test_other_functions_are_refused(function):
    error = caught(sv.persistent, function, 1)
    assert isinstance(error, sv.ConfigError)
    assert getattr(function, "__name__", "5") in str(error)
    assert all(f"sv.{name}" in str(error) for name in ACCEPTED)


def test_async_op_is_refused():
    with pytest.raises(sv.ConfigError, match=r"takes no async_op: write call\.start"):
        sv.persistent(sv.all_reduce, 1.0, async_op=True)


def test_starts_and_waits_alternate():
    out = np.empty(2)

    def fn():
        call = sv.persistent(sv.all_reduce, np.ones(2), "mean")
        text = r"<persistent all_reduce\(float64\[2\], 'mean'\)> has "
        with pytest.raises(sv.UsageError, match=text + "not been started since the last wait"):
            call.wait()
        call.start()
        for again in (call.start, call):
            with pytest.raises(sv.UsageError, match=text + "been started, and nobody has waited"):
                again()
        with pytest.raises(sv.ConfigError, match="timeout must be"):
            call.wait(-1) if not call._work.done() else sv.barrier(timeout=-1)
        assert call.wait().tolist() == [1.0, 1.0]
        with pytest.raises(sv.UsageError, match="not been started"):
            call.wait()
        first = call.start()
        assert first.wait().tolist() == [1.0, 1.0]
        second = call.start()
        first.wait()  # of an earlier start: the second one is still to be waited for
        with pytest.raises(sv.UsageError, match="nobody has waited"):
            call()
        assert second.exception() is None
        assert call().tolist() == [1.0, 1.0]

    everywhere(1, fn, config=CONFIG)
    assert repr(sv.persistent(sv.all_reduce, {"a": 1}, out=out)) == (
        "<persistent all_reduce({'a': 1}, out=float64[2])>"
    )


def test_an_error_ends_a_start():
    def fn():
        x = np.ones(2 + sv.rank())
        call = sv.persistent(sv.all_reduce, x)
        with pytest.raises(sv.MismatchError):
            call()
        call.start()
        with pytest.raises(sv.MismatchError):
            call.wait()
        work = call.start()
        assert isinstance(work.exception(), sv.MismatchError)
        work = call.start()  # the error has ended the start before
        with pytest.raises(sv.MismatchError):
            work.wait()
        wrong = sv.persistent(sv.all_reduce, np.ones(2), "wrong")
        with pytest.raises((sv.ConfigError, sv.MismatchError)):
            wrong.start()
        assert wrong.done()

    everywhere(2, fn, config=CONFIG)


def test_a_start_is_awaited():
    async def main():
        x = np.zeros(2)
        calls = [sv.persistent(sv.all_reduce, x), sv.persistent(sv.all_gather, x)]
        for step in range(3):
            x[:] = step
            total, ranks = await asyncio.gather(*[call.start() for call in calls])
            assert (total.tolist(), ranks.tolist()) == ([2.0 * step] * 2, [step] * 4)

    everywhere(2, lambda: asyncio.run(main()), shared=True, config=CONFIG)


def test_it_holds_its_arrays_and_nothing_holds_it():
    class Input(np.ndarray):
        pass

    x = np.ones(2).view(Input)
    kept = weakref.ref(x)
    call = sv.persistent(sv.all_reduce, x)
    del x
    gc.collect()
    assert kept() is not None
    call.start().wait()
    gc.disable()
    try:
        del call
        assert kept() is None
    finally:
        gc.enable()
