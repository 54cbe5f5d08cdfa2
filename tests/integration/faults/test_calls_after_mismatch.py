"""After a call on which the ranks did not agree, a program that is right from there on goes on, whatever was counted meanwhile.

It has no part in a deadlock: reports of waits that have ended count no more. The same holds for ranks with several threads.
"""

import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.coordinator import Coordinator
from syncvar.testing import run_ranks

WRITES = """
import random, sys
import numpy as np
import probe, syncvar as sv

rank, size, wrong = sv.rank(), sv.world_size(), sys.argv[1]
draw = random.Random(5)  # the same on all ranks
first, second = [sv.Variable(np.zeros(shape), aggregation="SUM", name=name) for name, shape in (("first", 3), ("second", (2, 2)))]
optimizer = sv.optimizers.SGD(1.0)
weights = sv.Variable(np.zeros(4), aggregation="MEAN", name="weights")
ones, fours, made = np.ones(3), np.ones((2, 2)), [0, 0, 0]


def write(kind):
    if kind == 0:
        first.assign_add(ones)
    elif kind == 1:
        sv.assign_add_all([(first, ones), (second, fours)])
    elif kind == 2:
        second.assign_add(fours)
    else:
        optimizer.apply_gradients([(np.ones(4), weights)])


def counted(kind):
    made[0] += kind in (0, 1)
    made[1] += kind in (1, 2)
    made[2] += kind == 3


errors = 0
for step in range(400):
    kind = draw.choice([0, 0, 0, 1, 2, 3])
    if draw.random() < 0.15:
        odd = draw.randrange(size)
        try:
            if rank != odd:
                write(kind)
            elif wrong == "barrier":
                sv.barrier()
            elif wrong == "other":
                write((kind + 1) % 4)
            elif wrong == "argument":
                first.assign_add("text")
            else:
                sv.all_reduce("text")
        except (sv.MismatchError, sv.ConfigError):
            errors += 1
        else:
            raise AssertionError(f"step {step}: kind {kind} went well")
    write(kind)
    counted(kind)
values = [float(variable.numpy().ravel()[0]) for variable in (first, second, weights)]
probe.note("over", errors=errors, values=values, wanted=[made[0] * size, made[1] * size, -float(made[2])])
"""


@pytest.mark.parametrize(
    ("workers", "kernel", "every", "wrong"),
    [
        (2, "auto", "7", "barrier"),
        (3, "python", "3", "other"),
        *(
            pytest.param(*how, wrong, marks=pytest.mark.slow)
            for how in ((2, "auto", "1"), (2, "auto", "7"), (3, "python", "3"), (3, "auto", "100"))
            for wrong in ("barrier", "other", "argument", "refused")
        ),
    ],
)
def test_the_copies_are_compared_at_the_same_writes_after_calls_that_failed(
    launch, workers, kernel, every, wrong
):
    env = {"SYNCVAR_CHECK_EVERY": every, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "20"} | (
        {"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {}
    )
    job = launch(WRITES, workers=workers, arguments=[wrong], env=env)
    assert job.wait(120) == 0, str(job)
    for event in job.events("over"):
        assert event["errors"] > 20
        assert event["values"] == event["wanted"], str(job)


# -- deadlocks, and what is none -------------------------------------------------------------------

_QUICK = RuntimeConfig(report_after_s=0.02)


class Seen:
    """The reports that the coordinator has judged."""

    def __init__(self):
        self._changed = threading.Condition()
        self._reports = []
        self.unfinished = set()  # (rank, call) without a "wait_end"

    def add(self, rank, message):
        with self._changed:
            key = rank, message["group"], message["call"]
            if message["kind"] == "wait_report":
                self._reports.append((rank, message["description"]))
                self.unfinished.add(key)
            else:
                self.unfinished.remove(key)
            self._changed.notify_all()

    def wait_for(self, rank, text):
        """Wait until a rank has reported that it waits in a call with this text."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(one == rank and text in words for one, words in self._reports), 30
            ), (rank, text, self._reports)


@pytest.fixture
def seen(monkeypatch):
    """What the coordinators of this test have seen."""
    found, handle = Seen(), Coordinator.message

    def message(self, rank, fields, now):
        actions = handle(self, rank, fields, now)
        if fields["kind"] in ("wait_report", "wait_end"):
            found.add(rank, fields)
        return actions

    monkeypatch.setattr(Coordinator, "message", message)
    return found


def error_of(call):
    """Return the class and text of a call's error; "" for none."""
    try:
        call()
    except sv.SyncvarError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def later_reports(seconds):
    """Let this rank report the calls that it begins from now on after so many seconds."""
    engine = current().engine
    engine.config = RuntimeConfig(report_after_s=seconds)


@pytest.mark.parametrize("shared", [True, False])
def test_a_call_that_failed_because_of_a_skipped_one_waits_no_more(seen, shared):
    def skipped_merge():
        strategy, later, rank = sv.MirroredStrategy(), sv.new_group([0, 1]), sv.rank()

        def step():
            if rank == 0:  # rank 1 leaves `run` and waits in the next call
                seen.wait_for(1, "reduce")
                later_reports(30.0)
                sv.get_replica_context().merge_call(lambda _: None)

        def both():
            strategy.run(step)
            strategy.reduce("SUM", 1.0, axis=None)

        first = error_of(both)
        if rank == 1:
            seen.wait_for(0, "broadcast")
        later_reports(0.02)
        return first, error_of(lambda: sv.broadcast(np.ones(2), group=later, root=1))

    results = run_ranks(2, skipped_merge, config=_QUICK, shared=shared)
    assert not any(isinstance(one, BaseException) for one in results), results
    for first, then in results:
        assert first.startswith("MismatchError")
        assert then == ""
    assert not seen.unfinished


def test_a_deadlock_beside_a_started_call(seen):
    def cross_waits():
        first, second, third = (sv.new_group([0, 1]) for _ in range(3))
        rank = sv.rank()
        if rank == 0:
            work = sv.all_reduce(1.0, group=first, async_op=True)
            seen.wait_for(0, "all_reduce")
        errors = [error_of(lambda: sv.barrier(group=(second, third)[rank]))]
        if rank == 0:
            errors.append(str(work.wait()))
        else:
            errors.append(str(sv.all_reduce(1.0, group=first)))
        return errors

    for error, total in run_ranks(2, cross_waits, config=_QUICK.replaced(collective_timeout_s=30)):
        assert "MismatchError" in error
        assert "deadlock" in error
        assert total == "2.0"
    assert not seen.unfinished


def test_a_deadlock_of_a_started_call_that_is_waited_for_late(seen):
    def cross_waits():
        first, second, rank = sv.new_group([0, 1]), sv.new_group([0, 1]), sv.rank()
        if rank == 1:
            return error_of(lambda: sv.barrier(group=second))
        work = sv.all_reduce(1.0, group=first, async_op=True)
        seen.wait_for(0, "all_reduce")
        return error_of(work.wait)

    errors = run_ranks(2, cross_waits, config=_QUICK.replaced(collective_timeout_s=30))
    assert all("deadlock" in error for error in errors), errors
    assert not seen.unfinished


@pytest.mark.parametrize("shared", [True, False])
def test_a_deadlock_of_a_rank_that_sends_deferred_writes_before_its_call(shared):
    def one_writes():
        strategy, group = sv.MirroredStrategy(), sv.new_group([0, 1])
        with strategy.scope():
            variable = sv.Variable(0.0, aggregation="SUM")
        variable.pin("deferred")
        sv.barrier(group=group)

        def step():
            if sv.rank() == 1:
                variable.assign_add(1.0)
            sv.barrier(group=group)

        return error_of(lambda: strategy.run(step))

    config = _QUICK.replaced(collective_timeout_s=30)
    errors = run_ranks(2, one_writes, config=config, shared=shared)
    assert all("deadlock" in str(error) for error in errors), errors


THREADS = """
import _thread, threading, time
import probe, syncvar as sv

rank = sv.rank()
first, second, third = (sv.new_group([0, 1]) for _ in range(3))


def attempt(case, call):
    try:
        call()
        probe.note("ended", case=case, error="")
    except sv.SyncvarError as error:
        probe.note("ended", case=case, error=f"{type(error).__name__}: {error}")


def beside(body):
    thread = threading.Thread(target=body)
    thread.start()
    return thread


# A thread of rank 1 computes between its calls, while another one waits.
def wait_compute_wait():
    attempt("compute", lambda: sv.barrier(group=second))
    time.sleep(0.5)
    attempt("compute", lambda: sv.all_reduce(1, group=second))


if rank == 1:
    thread = beside(wait_compute_wait)
    time.sleep(0.2)
    attempt("compute", lambda: sv.barrier(group=first))
    thread.join()
else:
    time.sleep(0.5)
    attempt("compute", lambda: sv.barrier(group=second))
    attempt("compute", lambda: sv.all_reduce(1, group=second))
    attempt("compute", lambda: sv.barrier(group=first))
sv.barrier()


# A thread that threading does not know waits, and the main thread computes.
def wait_unknown(over=threading.Event()):
    attempt("unknown", lambda: sv.barrier(group=first))
    probe.open_gate("unknown")


if rank == 1:
    _thread.start_new_thread(wait_unknown, ())
    time.sleep(0.5)
    attempt("unknown", lambda: sv.barrier(group=second))
    probe.gate("unknown")
else:
    attempt("unknown", lambda: sv.barrier(group=second))
    attempt("unknown", lambda: sv.barrier(group=first))
sv.barrier()

# All threads wait.
if rank == 1:
    thread = beside(lambda: attempt("all", lambda: sv.barrier(group=second)))
    attempt("all", lambda: sv.barrier(group=first))
    thread.join()
else:
    attempt("all", lambda: sv.barrier(group=third))
sv.barrier()

# The thread that did not wait ends.
if rank == 1:
    thread = beside(lambda: time.sleep(0.3))
    attempt("last", lambda: sv.barrier(group=first))
    thread.join()
else:
    attempt("last", lambda: sv.barrier(group=third))
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "zmq"])
def test_deadlocks_of_ranks_with_several_threads(launch, path):
    env = {"SYNCVAR_TRANSPORT": path, "SYNCVAR_REPORT_AFTER_S": "0.02"}
    job = launch(THREADS, workers=2, env=env | {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"})
    assert job.wait() == 0, str(job)
    for case, count, text in (
        ("compute", 6, ""),
        ("unknown", 4, ""),
        ("all", 3, "deadlock"),
        ("last", 2, "deadlock"),
    ):
        errors = [event["error"] for event in job.events("ended") if event["case"] == case]
        assert len(errors) == count, str(job)
        assert all(text in error if text else not error for error in errors), f"{case}: {errors}"
