"""The engine of a process over in-process worlds: credit, early frames, poison, mismatch, deadlines, ends, epochs."""

import gc
import random
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import (
    ConfigError,
    DeadlineExceeded,
    GroupBroken,
    MismatchError,
    PeerLost,
    UsageError,
)
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.coordinator import Coordinator
from syncvar.runtime.active_requests import RunningRequests
from syncvar.runtime.call_record import CallInfo, PendingRecord
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall, Communicator
from syncvar.runtime.progress import ProgressEngine
from syncvar.runtime.recorder import Recorder, RecordIdentity
from syncvar.runtime.request import Request, Stage
from syncvar.testing import Faults, run_ranks
from syncvar.transports.in_memory import MemoryControl, MemoryNetwork, MemoryTransport
from tests.support.harness import caught, everywhere
from tests.support.launching import await_true

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.02, shutdown_timeout_s=1.0)


def results(world_size, fn, **more):
    """Run ranks of which none may fail."""
    return everywhere(world_size, fn, **{"config": SOON, **more})


# -- frames that come before their call ------------------------------------------------------------


class Pair:
    """Two engines of one bare network, driven by hand: their progress threads find nothing to do."""

    def __init__(self, config=SOON):
        self.network = MemoryNetwork(2, coordinator=Coordinator(2, "j", config))
        self.engines = [
            ProgressEngine(
                Recorder(RecordIdentity(rank, 2)),
                MemoryTransport(self.network, rank),
                MemoryControl(self.network, rank),
                config,
                {},
            )
            for rank in range(2)
        ]

    def __enter__(self):
        return self.engines

    def __exit__(self, *_):
        for engine in self.engines:
            engine.failure = engine.failure or UsageError("the test is over")
            engine.stop()


def barrier_request(engine, call):
    from syncvar.algorithms.builders import build
    from syncvar.algorithms.compile_schedule import compile_for_links
    from syncvar.algorithms.schedule import ScheduleArgs

    class NumberedBarrier(CheckedCall):
        def stages(self):
            yield Stage(
                compile_for_links(
                    build("barrier", "dissemination", ScheduleArgs(engine.rank, 2)), (0, 1)
                ),
                np.empty(0, np.uint8),
            )
            return call

    return Communicator(0, (0, 1), engine.recorder, engine).request_of(
        call, NumberedBarrier(CollectiveSpec(f"barrier {call}"))
    )


def test_frames_that_come_between_the_numbering_of_a_call_and_its_start_are_kept():
    with Pair() as (zero, one):
        zero.book.announce(0, 0)
        one.book.announce(0, 0)
        theirs = barrier_request(one, 0)
        one.start(
            theirs, None
        )  # its frame is on the way to rank 0, which has numbered call 0 but not started it
        for _ in range(3):
            zero.poll()
        mine = barrier_request(zero, 0)
        zero.start(mine, None)
        assert zero.wait(mine) == 0
        assert one.wait(theirs) == 0


def test_frames_of_calls_that_were_passed_over_are_dropped_and_their_credit_is_given_back():
    with Pair() as (zero, one):
        one.start(barrier_request(one, 0), None)
        zero.poll()
        zero.book.announce(0, 5)
        zero.poll()
        assert not zero.book.early
        later = [barrier_request(zero, 5), barrier_request(one, 5)]
        zero.start(later[0], None)
        one.start(later[1], None)
        assert zero.wait(later[0]) == 5
        assert one.wait(later[1]) == 5


# -- ends ------------------------------------------------------------------------------------------


def test_what_a_call_over_links_has_made_goes_with_its_last_reference():
    def fn():
        work = sv.all_reduce(np.ones(1000), async_op=True)
        made = weakref.ref(work.wait())
        del work
        until = time.monotonic() + 50.0
        while made() is not None and time.monotonic() < until:  # whoever drives may still be at it
            time.sleep(0.01)
        return made() is None

    gc.disable()
    try:
        assert results(2, fn) == [True, True]
    finally:
        gc.enable()


def test_a_failure_from_another_thread_ends_a_call_that_is_in_a_step():
    began, goes_on = threading.Event(), threading.Event()

    def steps():
        began.set()
        assert goes_on.wait(50)
        yield 1

    operation = Request(
        PendingRecord(CallInfo(CollectiveSpec("a call"), 0, (0, 1), 11), 0, 0), steps()
    )
    driver = threading.Thread(target=operation.advance)
    driver.start()
    assert began.wait(50)
    failure = GroupBroken("it broke")
    operation.fail(failure)
    goes_on.set()
    driver.join(50)
    assert not driver.is_alive()
    assert operation.is_over
    assert operation.error is failure
    assert operation.result is None


# -- credit ----------------------------------------------------------------------------------------

TINY = RuntimeConfig(window_bytes=8192, segment_bytes=1024, collective_timeout_s=250.0)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_large_arrays_pass_a_tiny_window_which_is_never_exceeded(world_size, monkeypatch):
    from syncvar.runtime.link_exchange import Flow

    most = []
    send = Flow._send

    def watched(self, credit, nbytes, *rest):
        send(self, credit, nbytes, *rest)
        most.append(credit.outstanding)

    monkeypatch.setattr(Flow, "_send", watched)

    def fn():
        rank = sv.rank()
        odd = sv.new_group(range(world_size))
        x = np.arange(40_000, dtype=np.int64) + rank
        works = [sv.all_reduce(x, group=group, async_op=True) for group in (None, odd, None, odd)]
        sums = [work.wait() for work in works]
        gathered = sv.all_gather(x[: 5000 * (rank + 1)])
        sent = sv.broadcast(x if rank == world_size - 1 else None, root=world_size - 1)
        return [[*one[:3], int(one.sum())] for one in (*sums, gathered, sent)]

    out = results(world_size, fn, config=TINY)
    assert all(one == out[0] for one in out)
    base = np.arange(40_000)
    total = sum(base + rank for rank in range(world_size))
    assert out[0][0] == [*total[:3], int(total.sum())]
    assert max(most) <= 8192


def test_a_rank_that_starts_many_calls_at_once_does_not_block_one_that_makes_them_one_by_one():
    """Frames of later calls fill the window of a peer that has not made them; the call it waits for must get through."""

    def fn():
        x = np.arange(20_000, dtype=np.float64)
        if sv.rank() == 0:
            works = [sv.all_reduce(x + number, async_op=True) for number in range(12)]
            return [float(work.wait()[0]) for work in works]
        return [float(sv.all_reduce(x + number)[0]) for number in range(12)]

    wide = RuntimeConfig(window_bytes=8192, segment_bytes=1 << 20, collective_timeout_s=250.0)
    for world_size, config in ((2, TINY), (3, TINY), (2, wide), (3, wide)):
        out = results(world_size, fn, config=config)
        assert out == [[float(world_size * number) for number in range(12)]] * world_size


def test_a_window_smaller_than_a_segment_lets_one_frame_after_the_other_pass():
    small = RuntimeConfig(window_bytes=4096, segment_bytes=1 << 20, collective_timeout_s=250.0)

    def fn():
        sv.barrier()
        works = [sv.all_reduce(np.full(50_000, number), async_op=True) for number in range(5)]
        return [int(work.wait()[7]) for work in works]

    assert results(3, fn, config=small) == [[0, 3, 6, 9, 12]] * 3


def test_frames_for_a_group_that_a_rank_has_not_made_yet_wait_for_it():
    def fn():
        rank = sv.rank()
        with sv_group_without_meeting((0, 1)) as group:
            if rank == 1:
                time.sleep(0.2)  # rank 0 has sent by now
            return int(sv.all_reduce(rank + 1, group=group()))

    assert results(2, fn) == [3, 3]


class sv_group_without_meeting:
    """A group whose communicator is made when it is first used."""

    def __init__(self, members):
        self.members = members

    def __enter__(self):
        from syncvar.collectives.groups import Group

        return lambda: Group(current().communicator(4711, self.members))

    def __exit__(self, *_):
        pass


# -- words to the launcher -------------------------------------------------------------------------


def test_only_the_driver_uses_the_control_channel():
    """ZeroMQ sockets are not thread-safe: whoever speaks to the launcher holds the engine's lock."""
    alone = []

    class Watched:
        def __init__(self, engine):
            self.engine, self.control = engine, engine.control

        def send(self, data):
            alone.append(self.engine.lock.locked())
            self.control.send(data)

        def receive(self):
            alone.append(self.engine.lock.locked())
            return self.control.receive()

        def close(self, linger_s):
            self.control.close(linger_s)

    def fn():
        engine = current().engine
        engine.control = Watched(engine)
        sv.barrier()
        caught(lambda: sv.all_reduce(1.0, "nonsense" if sv.rank() == 0 else "sum"))
        communicator = current().world
        communicator.begin_epoch()
        communicator.leave_epoch(ValueError("an exception"))
        sv.barrier()

    results(2, fn)
    assert alone
    assert all(alone)


# -- poison and mismatch ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_refused_call_is_told_to_all_and_the_group_goes_on_fifty_times(world_size):
    def fn():
        draw = random.Random(world_size)
        rank = sv.rank()
        seen = []
        for number in range(50):
            culprit = draw.randrange(world_size)
            error = caught(
                lambda: sv.all_reduce(np.ones(3), "nonsense" if rank == culprit else "sum")  # noqa: B023
            )
            if rank == culprit:
                assert isinstance(error, ConfigError)
            else:
                assert isinstance(error, MismatchError)
                assert f"rank {culprit} refused its own call" in str(error)
                assert "nonsense" in error.table[culprit]
            seen.append(int(sv.all_reduce(number)))
        return seen

    assert results(world_size, fn) == [[world_size * number for number in range(50)]] * world_size


MISMATCHES = {
    "op": lambda rank: sv.all_reduce(np.ones(3), "max" if rank == 1 else "sum"),
    "dtype": lambda rank: sv.all_reduce(np.ones(3, "f4" if rank == 1 else "f8")),
    "shape": lambda rank: sv.all_reduce(np.ones((3, 1) if rank == 1 else (1, 3))),
    "count": lambda rank: sv.all_reduce(np.ones(4 if rank == 1 else 3)),
    "order": lambda rank: sv.all_reduce(np.ones(3), reproducible=rank == 1),
    "root": lambda rank: sv.broadcast(np.ones(3), root=int(rank == 1)),
    "collective": lambda rank: sv.barrier() if rank == 1 else sv.all_reduce(1.0),
    "structure": lambda rank: sv.all_reduce({"a": 1.0} if rank == 1 else {"b": 1.0}),
    "brought dtype": lambda rank: sv.broadcast(np.ones(3, "f4" if rank == 1 else "f8")),
    "brought shape": lambda rank: sv.all_gather(np.ones((2, 3) if rank == 1 else (2, 4))),
    "dimensions": lambda rank: sv.all_gather(np.ones((2, 3) if rank == 1 else (2,)), axis=-1),
    "group": lambda rank: sv.new_group([0, 1] if rank == 1 else [0, 2]),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree_are_all_told_with_a_table_and_the_group_goes_on(what):
    def fn():
        rank = sv.rank()
        errors = [caught(lambda: MISMATCHES[what](rank)) for _ in range(2)]
        return errors, int(sv.all_reduce(rank))

    for errors, after in results(3, fn):
        assert after == 3
        for error in errors:
            assert isinstance(error, MismatchError), repr(error)
            assert set(error.table) == {0, 1, 2}
            assert error.table[0] != error.table[1]


@pytest.mark.parametrize("big", [False, True])
def test_a_wrong_out_on_one_rank_does_not_stop_the_others(big):
    count = 200_000 if big else 3

    def fn():
        rank = sv.rank()
        value = np.arange(count) if rank == 0 else None
        for bad in range(3):
            out = np.empty(5) if rank == bad else None
            error = caught(lambda: sv.broadcast(value, out=out))  # noqa: B023
            assert (error is None) == (rank != bad)
        return int(sv.broadcast(value)[2])

    assert results(3, fn) == [2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: sv.new_group(["x"] if bad else [0, 1]),
        lambda bad: sv.new_group(None if bad else [0, 1]),
        lambda bad: sv.new_group([0.5, 1] if bad else [0, 1]),
        lambda bad: sv.new_group([0, 1, 2]).split("red" if bad else 1),
        lambda bad: sv.new_group([0, 1, 2]).split(1, 0.5 if bad else 0),
    ],
)
def test_a_bad_argument_of_a_group_is_told_to_the_others(call):
    def fn():
        error = caught(lambda: call(sv.rank() == 1))
        return type(error).__name__, int(sv.all_reduce(1))

    assert results(3, fn) == [("MismatchError", 3), ("ConfigError", 3), ("MismatchError", 3)]


# -- deadlock --------------------------------------------------------------------------------------

DEADLOCK = """
import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks

def fn():
    one, two = sv.new_group([0, 1]), sv.new_group([1, 0])
    first, second = (one, two) if sv.rank() == 0 else (two, one)
    try:
        sv.barrier(group=first)
        sv.barrier(group=second)
    except sv.MismatchError as error:
        return str(error)

for text in run_ranks(2, fn, config=RuntimeConfig(collective_timeout_s=250.0)):
    assert "deadlock" in text and "rank 0: waits in" in text and "rank 1: waits in" in text, text
print("found")
"""


def test_ranks_that_wait_for_one_another_in_two_groups_are_told_at_once():
    done = subprocess.run(
        [sys.executable, "-c", DEADLOCK], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("found", "")


def test_calls_of_two_groups_started_in_another_order_are_no_deadlock():
    def fn():
        one, two = sv.new_group([0, 1]), sv.new_group([1, 0])
        first, second = (one, two) if sv.rank() == 0 else (two, one)
        works = [sv.all_reduce(2, group=group, async_op=True) for group in (first, second)]
        return [int(work.wait()) for work in works]

    assert results(2, fn) == [[4, 4], [4, 4]]


# -- deadline, loss, interruption, ends ------------------------------------------------------------


def test_a_missed_deadline_names_the_missing_rank_on_all_and_breaks_every_group():
    release = threading.Event()

    def fn():
        rank = sv.rank()
        group = sv.new_group([0, 2])
        sv.barrier()
        if rank == 1:
            release.wait(50)
            return caught(sv.barrier), caught(sv.barrier), None
        errors = (
            caught(lambda: sv.all_reduce(1.0, timeout=0.3 if rank == 0 else None)),
            caught(sv.barrier),
        )
        more = caught(lambda: sv.barrier(group=group)) if rank != 1 else None
        release.set()
        return (*errors, more)

    out = results(3, fn)
    for rank in (0, 2):
        first, later, other = out[rank]
        assert isinstance(first, DeadlineExceeded), repr(first)
        assert first.missing == (1,)
        assert "rank 1" in str(first)
        assert isinstance(later, GroupBroken)
        assert later.cause is first
        assert isinstance(other, GroupBroken)
    assert "0.3 s" in str(out[0][0])
    assert isinstance(out[1][0], DeadlineExceeded | PeerLost)


def test_a_cut_link_is_told_to_both_ends_and_to_everybody():
    def fn():
        sv.barrier()
        return caught(lambda: [sv.all_reduce(np.ones(50_000), algorithm="ring") for _ in range(20)])

    out = run_ranks(4, fn, config=SOON, faults=Faults(cut=(1, 2, 9)))
    assert all(isinstance(one, PeerLost) for one in out), out
    assert out[1].rank == 2
    assert out[2].rank == 1
    assert all(out[rank].rank in (1, 2) for rank in (0, 3)), out


def test_a_loss_is_told_to_the_launcher_once():
    said = []

    def fn():
        engine = current().engine
        sv.barrier()
        error = caught(sv.barrier)
        tell, engine.send_control = engine.send_control, lambda kind, **_: said.append(kind)
        with engine.lock:
            for number in range(3):
                engine.timers(time.monotonic() + number)
        engine.send_control = tell
        return error

    run_ranks(2, fn, config=SOON, faults=Faults(cut=(0, 1, 1)))
    assert said == []


def test_a_rank_that_fails_is_lost_for_all_others_with_its_reason():
    def fn():
        sv.barrier()
        if sv.rank() == 1:
            raise ValueError("my own fault")
        return caught(sv.barrier)

    zero, one, two = run_ranks(3, fn, config=SOON)
    assert isinstance(one, ValueError)
    for error in (zero, two):
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert "my own fault" in error.reason


INTERRUPTED = """
import signal, sys, threading, time
import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.core.environment import RankEnvironment
from syncvar.bootstrap.context import ProcessContext
from syncvar.bootstrap.process import use
from syncvar.transports.in_memory import MemoryControl, MemoryNetwork, MemoryTransport
from syncvar.protocol.coordinator import Coordinator

class Alarm(BaseException): pass
def ring(*_): raise Alarm
config = RuntimeConfig(collective_timeout_s=250.0, shutdown_timeout_s=0.5)
network = MemoryNetwork(2, coordinator=Coordinator(2, "j", config))
def context(rank):
    me = RankEnvironment(rank, 2, rank, 2, 0, 1, 0, "memory://", "j")
    return ProcessContext(me, config, MemoryTransport(network, rank), MemoryControl(network, rank))
seen = []
def other():
    made = context(1)
    with use(made):
        try:
            sv.barrier()
            sv.all_reduce(1.0, group=sv.new_group([0, 1]))
        except sv.PeerLost as error:
            seen.append((error.rank, error.reason))
    made.close(orderly=True)
def interrupt():
    while not mine.world.busy.locked():
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
thread = threading.Thread(target=other)
thread.start()
mine = context(0)
signal.signal(signal.SIGALRM, ring)
with use(mine):
    sv.barrier()
    group = sv.new_group([0, 1])
    time.sleep(0.2)
    alarm = threading.Thread(target=interrupt)
    alarm.start()
    try:
        sv.barrier()  # rank 1 waits in another group
    except Alarm:
        print("passed on")
    alarm.join()
    for again in range(2):
        try:
            sv.barrier()
        except sv.GroupBroken as error:
            print("broken:", error)
thread.join(50)
mine.close(orderly=True)
print(seen)
"""


def test_an_alarm_that_interrupts_a_wait_is_passed_on_breaks_the_group_and_is_told_to_the_peers():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "passed on"
    assert all(
        line.startswith("broken:") and "interrupted by Alarm" in line for line in lines[1:3]
    ), lines
    assert "(0, 'interrupted by Alarm in barrier" in lines[3]


def test_an_exception_that_interrupts_the_start_of_a_call_breaks_the_group_too(monkeypatch):
    class Alarm(BaseException):
        pass

    def fn():
        sv.barrier()
        engine = current().engine
        if sv.rank() == 0:
            post = engine.flow.post

            def ring(*_):
                engine.flow.post = post
                raise Alarm

            engine.flow.post = ring
            with pytest.raises(Alarm):
                sv.barrier()
            return caught(sv.barrier)
        return caught(sv.barrier)

    zero, one = run_ranks(2, fn, config=SOON)
    assert isinstance(zero, GroupBroken)
    assert isinstance(one, PeerLost)
    assert "interrupted by Alarm" in one.reason


def test_a_call_to_a_rank_that_has_finished_fails_and_calls_it_made_do_not():
    def fn():
        sv.barrier()
        if sv.rank() == 1:
            return None
        await_true(lambda: 1 in current().engine.book.left, 50.0)
        return caught(sv.barrier), caught(sv.barrier)

    out = results(3, fn)
    for rank in (0, 2):
        for error in out[rank]:
            assert isinstance(error, PeerLost)
            assert (error.rank, error.reason) == (1, "finished")


def test_a_started_call_that_nobody_waited_for_is_finished_before_a_rank_leaves():
    kept = []

    def fn():
        work = sv.all_reduce(np.full(100_000, sv.rank() + 1.0), async_op=True)
        kept.append(work)
        if sv.rank() == 1:
            time.sleep(0.1)

    results(3, fn)
    assert [float(work.wait()[0]) for work in kept] == [6.0, 6.0, 6.0]


def test_a_call_that_waits_to_be_started_is_finished_before_a_rank_leaves():
    kept = []

    def fn():
        engine = current().engine
        sv.barrier()
        if sv.rank() == 0:
            with engine.lock:  # another thread drives just now, so that the call can only be queued
                kept.append(sv.all_reduce(5, async_op=True))
        else:
            kept.append(sv.all_reduce(5, async_op=True))

    results(2, fn)
    assert [int(work.wait()) for work in kept] == [10, 10]


# -- epochs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_before", [0, 1, 3])
def test_a_rank_that_leaves_a_block_early_is_told_and_the_next_block_is_aligned(calls_before):
    def fn():
        communicator = current().world
        rank = sv.rank()
        seen = []
        for number in range(5):
            communicator.begin_epoch()
            try:
                for _ in range(calls_before):
                    sv.barrier()
                if rank == number % 3:
                    raise KeyError("mine")
                for _ in range(4):
                    sv.barrier()
                communicator.begin_epoch()
            except (KeyError, MismatchError) as error:
                communicator.leave_epoch(error)
                seen.append(type(error).__name__)
        return seen, int(sv.all_reduce(rank))

    for rank, (seen, total) in enumerate(results(3, fn)):
        assert seen == [
            "KeyError" if number % 3 == rank else "MismatchError" for number in range(5)
        ]
        assert total == 3


def test_frames_of_a_block_that_was_left_are_not_taken_for_those_of_the_next():
    def fn():
        communicator = current().world
        rank = sv.rank()
        for number in range(30):
            communicator.begin_epoch()
            works = [sv.all_reduce(np.full(3, number), async_op=True)] if rank == 0 else []
            error = caught(lambda: [work.wait() for work in works]) if works else ConfigError()  # noqa: B023
            communicator.leave_epoch(ValueError("left"))
            assert error is not None
            assert list(sv.all_reduce(np.full(3, number))) == [2 * number] * 3

    results(2, fn)


# -- joining anew, threads -------------------------------------------------------------------------


def test_all_ranks_can_leave_and_join_anew_in_the_next_generation():
    from syncvar.bootstrap.context import ProcessContext
    from syncvar.bootstrap.process import use
    from syncvar.core.environment import RankEnvironment

    network = MemoryNetwork(3, coordinator=Coordinator(3, "j", SOON))
    seen = [[] for _ in range(3)]

    def body(rank):
        me = RankEnvironment(rank, 3, rank, 3, 0, 1, 0, "memory://", "j")
        for generation in range(3):
            transport, control = MemoryTransport(network, rank), MemoryControl(network, rank)
            context = ProcessContext(me, SOON, transport, control, generation)
            with use(context):
                seen[rank].append((context.generation, int(sv.all_reduce(rank + generation))))
                group = sv.new_group([0, 1, 2])
            context.close(orderly=True)
            with pytest.raises(UsageError):
                sv.barrier(group=group)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert seen == [[(0, 3), (1, 6), (2, 9)]] * 3


def test_two_threads_of_a_rank_use_two_groups_at_the_same_time():
    def fn():
        from syncvar.bootstrap.process import use

        context = current()
        groups = [sv.new_group([0, 1, 2]) for _ in range(2)]
        out = [[], []]

        def calls(which):
            with use(context):
                for number in range(60):
                    out[which].append(int(sv.all_reduce(number + which, group=groups[which])))

        thread = threading.Thread(target=calls, args=(1,))
        thread.start()
        for number in range(60):
            out[0].append(int(sv.all_reduce(number, group=groups[0])))
        thread.join(50)
        return out

    wanted = [[3 * number for number in range(60)], [3 * (number + 1) for number in range(60)]]
    assert results(3, fn) == [wanted] * 3


def test_a_second_thread_on_the_same_group_is_refused_and_disturbs_nothing():
    def fn():
        from syncvar.bootstrap.process import use

        context = current()
        sv.barrier()
        errors = []
        if sv.rank() == 0:

            def intrude():
                with use(context):
                    await_true(context.world.busy.locked, 40.0)
                    errors.append(caught(sv.barrier))
                has_intruded.set()

            thread = threading.Thread(target=intrude)
            thread.start()
            total = int(sv.all_reduce(1))
            thread.join(50)
        else:
            assert has_intruded.wait(50)
            total = int(sv.all_reduce(1))
        return total, [type(one).__name__ for one in errors], int(sv.all_reduce(2))

    has_intruded = threading.Event()
    assert results(2, fn) == [(2, ["UsageError"], 4), (2, [], 4)]


def test_who_has_heard_of_an_error_leaves_though_the_call_is_let_go_of_later(monkeypatch):
    """The thread that ends a call may be held up before it lets go of it; the one that waits has gone on, and leaves."""
    retire = RunningRequests.retire

    def late(self, operation):
        if operation.error is not None:
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                time.sleep(0.01)
        retire(self, operation)

    monkeypatch.setattr(RunningRequests, "retire", late)

    def fn():
        failed = sv.all_reduce(np.ones(2 + sv.rank()), async_op=True)
        until = time.monotonic() + 50
        while not failed.done():
            assert time.monotonic() < until
            time.sleep(0.001)
        with pytest.raises(sv.MismatchError):
            failed.wait()
        return True

    assert results(2, fn, shared=True) == [True, True]
