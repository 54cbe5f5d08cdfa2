"""`await work` and done-callbacks: of calls in the engine, in C, of messages, with late ranks, errors, many threads."""

import asyncio
import gc
import logging
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar._native import missing_reason
from syncvar.bootstrap.process import current, use
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import caught, everywhere

CONFIG = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
SOON_S = 30.0
WORLDS = {"links": {}, "shm": {"shared": True}, "hosts": {"shared": True, "hosts": 2}}
RUNNERS = ["python"] if missing_reason() else ["c", "python"]


@pytest.fixture(params=WORLDS)
def world(request):
    def run(size, fn):
        return everywhere(size, fn, config=CONFIG, **WORLDS[request.param])

    return run


def shared_world(size, fn, runner="auto"):
    return everywhere(size, fn, shared=True, config=CONFIG.replaced(call_runner=runner))


def started(value=1.0, **options):
    return sv.all_reduce(np.full(3, value), async_op=True, **options)


def prepare():
    for _ in range(3):
        sv.all_reduce(np.ones(3))


async def until(condition):
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def test_several_kinds_are_gathered(world):
    async def main():
        rank, other = sv.rank(), 1 - sv.rank()
        works = [
            started(rank),
            sv.broadcast(np.arange(4.0), root=1, async_op=True),
            sv.barrier(async_op=True),
            sv.all_gather(np.full(2, rank), async_op=True),
            sv.all_gather_object({"rank": rank}, async_op=True),
            sv.send(np.full(2, rank), other, async_op=True),
            sv.recv(other, async_op=True),
            sv.send_object([rank], other, tag=1, async_op=True),
            sv.recv_object(other, tag=1, async_op=True),
            sv.send(np.full(200_000, rank), other, tag=2, async_op=True),
            sv.recv(other, tag=2, async_op=True),
        ]
        (
            total,
            sent,
            nothing,
            gathered,
            objects,
            _,
            message,
            _,
            plain,
            _,
            long,
        ) = await asyncio.gather(*works)
        assert total.tolist() == [1.0] * 3
        assert sent.tolist() == [0, 1, 2, 3]
        assert nothing is None
        assert gathered.tolist() == [0, 0, 1, 1]
        assert objects == [{"rank": 0}, {"rank": 1}]
        assert (message.tolist(), plain, long[-1]) == ([other] * 2, [other], other)
        assert (await works[0]) is total  # again

    world(2, lambda: asyncio.run(main()))


@pytest.mark.parametrize("runner", RUNNERS)
def test_other_tasks_run_while_a_rank_is_late(runner):
    may_come, turns = threading.Event(), []

    async def main():
        if sv.rank() == 1:
            await until(may_come.is_set)
            return (await started()).tolist()

        async def others():
            for turn in range(20):
                turns.append(turn)
                await asyncio.sleep(0.001)
            may_come.set()

        other = asyncio.create_task(others())
        result = await started()
        await other
        return result.tolist()

    def fn():
        prepare()
        return asyncio.run(main())

    assert shared_world(2, fn, runner) == [[2.0] * 3] * 2
    assert turns == list(range(20))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_cancelled_task_does_not_cancel_the_call(runner):
    cancelled = threading.Event()

    async def main():
        if sv.rank() == 1:
            await until(cancelled.is_set)
            return (await started()).tolist()
        work = started()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.05)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.done()
        cancelled.set()
        return (await asyncio.wait_for(work, SOON_S)).tolist()

    def fn():
        prepare()
        return asyncio.run(main())

    assert shared_world(2, fn, runner) == [[2.0] * 3] * 2


@pytest.mark.parametrize("place", WORLDS)
def test_the_deadline_of_the_call_ends_an_await(place):
    failed = threading.Event()

    async def main():
        if sv.rank() == 1:
            await until(failed.is_set)
            return None
        seen = []
        work = started(timeout=0.2)
        work.add_done_callback(lambda work: seen.append(work.exception()))
        with pytest.raises(sv.DeadlineExceeded, match=r"did not finish within 0\.2 s") as error:
            await work
        assert any("started at" in note for note in error.value.__notes__)
        await until(lambda: seen)
        assert seen == [error.value]
        failed.set()
        return error.value.missing

    results = everywhere(2, lambda: asyncio.run(main()), config=CONFIG, **WORLDS[place])
    assert results == [(1,), None]


def test_a_mismatch_reaches_tasks_and_callbacks(world):
    async def main():
        ended = []
        work = started() if sv.rank() else sv.barrier(async_op=True)
        work.add_done_callback(ended.append)
        with pytest.raises(sv.MismatchError):
            await work
        await until(lambda: ended)
        assert ended == [work]
        assert (await started()).tolist() == [2.0] * 3

    world(2, lambda: asyncio.run(main()))


@pytest.mark.parametrize("size", [1, 2])
def test_a_message_to_this_rank_itself(size):
    async def main():
        rank, seen = sv.rank(), []
        work = sv.recv(rank, tag=3, async_op=True)
        work.add_done_callback(lambda work: seen.append(work.wait().tolist()))
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        assert not task.done()
        sv.send([4.0], rank, tag=3)
        assert seen == [[4.0]]
        assert (await task).tolist() == [4.0]
        wrong = sv.recv_object(rank, tag=4, async_op=True)
        sv.send([4.0], rank, tag=4)
        with pytest.raises(sv.ConfigError, match="is an array"):
            await wrong
        assert await sv.all_reduce(2.0, async_op=True) == 2.0 * size

    everywhere(size, lambda: asyncio.run(main()), config=CONFIG)


def test_tensors_are_converted():
    class Array:
        """An array of another library, by DLPack."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    async def main():
        work = sv.all_reduce(Array(np.ones(3)), async_op=True)
        assert np.asarray(await work).tolist() == np.asarray(work.wait()).tolist() == [2.0] * 3

    everywhere(2, lambda: asyncio.run(main()), config=CONFIG)


@pytest.mark.parametrize("runner", RUNNERS)
def test_loops_and_threads_share_a_call(runner):
    waiting, threads = threading.Semaphore(0), 6

    def fn():
        prepare()
        if sv.rank() == 1:
            for _ in range(threads):
                assert waiting.acquire(timeout=SOON_S)
            return started().wait().tolist()
        context, work, results = current(), started(), []

        async def awaited():
            waiting.release()
            return await work

        def take(number):
            with use(context):
                if number % 2:
                    results.append(asyncio.run(awaited()).tolist())
                else:
                    waiting.release()
                    results.append(work.wait(SOON_S).tolist())

        takers = [threading.Thread(target=take, args=(number,)) for number in range(threads)]
        for one in takers:
            one.start()
        for one in takers:
            one.join(SOON_S)
        assert results == [[2.0] * 3] * threads
        return results[0]

    shared_world(2, fn, runner)


def test_a_loop_that_is_closed_is_no_harm(caplog):
    closed = threading.Event()

    def fn():
        if sv.rank() == 1:
            assert closed.wait(SOON_S)
            return sv.all_reduce(1.0)
        work, loop = sv.all_reduce(1.0, async_op=True), asyncio.new_event_loop()

        async def main():
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        loop.run_until_complete(main())
        loop.close()
        closed.set()
        return work.wait()

    assert everywhere(2, fn, config=CONFIG) == [2.0, 2.0]
    assert not caplog.records


@pytest.mark.parametrize("runner", RUNNERS)
def test_callbacks_run_in_order_once_each(runner):
    may_come = threading.Event()

    def fn():
        prepare()
        if sv.rank() == 1:
            assert may_come.wait(SOON_S)
            return started().wait().tolist()
        seen, ended, names, late = [], threading.Event(), set(), []
        work = started()
        for number in range(10):
            work.add_done_callback(lambda _, number=number: seen.append(number))

        def last(one):
            assert one is work
            names.add(threading.current_thread().name)
            one.add_done_callback(lambda _: seen.append("nested"))
            ended.set()

        work.add_done_callback(last)
        assert not seen
        may_come.set()
        assert ended.wait(SOON_S)
        result = work.wait()
        work.add_done_callback(lambda _: late.append(threading.get_ident()))
        assert names == {"syncvar-callbacks-0"}
        current().engine.callbacks.stop()  # waits for all that have been posted
        assert seen == [*range(10), "nested"]
        assert len(late) == 1
        return result.tolist()

    assert shared_world(2, fn, runner) == [[2.0] * 3] * 2


def test_a_callback_of_a_call_that_has_ended_runs_at_once():
    def fn():
        work, seen = sv.all_reduce(1.0, async_op=True), []
        work.wait()
        work.add_done_callback(lambda work: seen.append((work.wait(), threading.get_ident())))
        assert seen == [(2.0, threading.get_ident())]

    everywhere(2, fn, config=CONFIG)


def test_an_exception_in_a_callback_is_logged(caplog):
    may_come = threading.Event()

    def wrong(_):
        raise SystemExit("of the callback")

    def fn():
        if sv.rank() == 1:
            assert may_come.wait(SOON_S)
            return started().wait()[0]
        work, ended = started(), threading.Event()
        work.add_done_callback(wrong)
        work.add_done_callback(lambda _: ended.set())
        may_come.set()
        assert ended.wait(SOON_S)
        work.add_done_callback(wrong)
        return work.wait()[0]

    with caplog.at_level(logging.ERROR, "syncvar"):
        assert everywhere(2, lambda: (fn(), sv.barrier())[0], config=CONFIG) == [2.0, 2.0]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert all("done-callback" in text and "wrong" in text for text in texts)
    assert "of the callback" in caplog.text


def test_a_callback_makes_calls_while_its_rank_waits_in_another(world):
    """The callback of one rank makes the call for which the other rank waits, and that one is before the first call."""

    def fn():
        rank = sv.rank()
        of_callbacks = sv.new_group([0, 1])
        ended, results = threading.Event(), []

        def follow(work):
            results.append(sv.all_reduce(work.wait(), group=of_callbacks).tolist())
            ended.set()

        work = started()
        if rank == 0:
            work.add_done_callback(follow)
        else:
            follow(work)  # rank 0 waits in the barrier meanwhile
        sv.barrier()
        assert ended.wait(SOON_S)
        return results

    assert world(2, fn) == [[[4.0] * 3]] * 2


def test_deferred_writes_are_sent_by_an_await():
    def fn():
        variable = sv.Variable(
            np.zeros(2), synchronization=sv.VariableSynchronization.AUTO, aggregation="SUM"
        )

        async def main():
            variable.assign_add(np.ones(2))
            assert (await started()).tolist() == [2.0] * 3

        asyncio.run(main())
        return variable.numpy().tolist()

    assert shared_world(2, fn) == [[2.0, 2.0]] * 2


def test_a_call_whose_wait_was_interrupted_has_ended():
    ended = threading.Event()

    class Interruption(BaseException):
        pass

    def fn():
        if sv.rank() == 1:
            assert ended.wait(SOON_S)
            return type(caught(sv.barrier)).__name__
        engine, me, seen = current().engine, threading.get_ident(), []
        look = engine.look

        def interrupted(until=None):
            if threading.get_ident() == me:
                raise Interruption
            look(until)

        work = sv.barrier(async_op=True)
        work.add_done_callback(lambda work: (seen.append(work.exception()), ended.set()))
        engine.look = interrupted
        assert caught(work.wait, of=Interruption) is not None
        del engine.look
        assert ended.wait(SOON_S)
        assert "interrupted by Interruption" in str(seen[0])
        assert work.done()
        assert caught(work.wait) is seen[0]
        return type(seen[0]).__name__

    assert everywhere(2, fn, config=CONFIG)[0] == "GroupBroken"


def test_a_call_that_nobody_ends_ends_with_the_job():
    seen, ended = [], threading.Event()

    def fn():
        if sv.rank() == 1:
            assert ended.wait(SOON_S)
            return
        work = sv.recv(1, async_op=True)
        work.add_done_callback(lambda work: (seen.append(work.exception()), ended.set()))
        current().close(orderly=False)

    everywhere(2, fn, config=CONFIG)
    assert "left the job before recv(from rank 1, tag 0) had ended" in str(seen[0])


@pytest.mark.parametrize("place", ["links", "shm"])
def test_registration_races_with_the_end(place):
    steps, threads, each = 60, 4, 3

    def fn():
        context, counts = current(), []
        for step in range(steps):
            work, lock, calls = started(step), threading.Lock(), []

            def note(number, work=work, lock=lock, calls=calls):
                assert work.done()
                with lock:
                    calls.append(number)

            def add(first, work=work, note=note):
                with use(context):
                    for number in range(first, first + each):
                        work.add_done_callback(lambda _, number=number: note(number))

            adders = [
                threading.Thread(target=add, args=(each * number,)) for number in range(threads)
            ]
            for one in adders:
                one.start()
            work.wait(SOON_S)
            for one in adders:
                one.join(SOON_S)
            end = time.monotonic() + SOON_S
            while len(calls) < threads * each:
                assert time.monotonic() < end
                time.sleep(0.0001)
            counts.append(calls)
        current().engine.callbacks.stop()
        for calls in counts:
            assert sorted(calls) == list(range(threads * each))  # each once
            for first in range(0, threads * each, each):  # in the order of each thread
                mine = [number for number in calls if first <= number < first + each]
                assert mine == sorted(mine)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        everywhere(2, fn, config=CONFIG, **WORLDS[place])
    finally:
        sys.setswitchinterval(before)


def test_a_call_is_not_held_after_its_callbacks():
    def fn():
        work, ended = started(), threading.Event()
        work.add_done_callback(lambda _: ended.set())
        work.wait()
        assert ended.wait(SOON_S)
        current().engine.callbacks.stop()
        kept = weakref.ref(work)
        del work
        gc.collect()
        assert kept() is None

    everywhere(2, fn, config=CONFIG)


def test_a_call_that_ends_while_a_callback_is_added():
    """Another thread ends the call after the first look, and before the engine knows the callback."""

    class EndsFirst(list):
        def append(self, listener):
            request.complete("result")  # finds no listener
            super().append(listener)

    work = sv.recv(0, tag=77, async_op=True)
    request, seen = work._request, []
    request._listeners = EndsFirst()
    work.add_done_callback(lambda work: seen.append(work.wait()))
    assert seen == ["result"]
    sv.send(1.0, 0, tag=77)  # for the receive, which still expects it
