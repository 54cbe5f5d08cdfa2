"""Calls of several threads and of signals' handlers that overlap, and calls by the thousand that nobody waits for: what is refused leaves no trace."""

import pytest

TAGS = """
import numpy as np
import probe, syncvar as sv

rank, got = sv.rank(), []


def pass_on(value, tag=0, count=4):
    if rank == 0:
        sv.send(np.full(count, float(value)), 1, tag=tag)
        return
    got.append(float(sv.recv(0, tag=tag)[0]))


for value in range(4):
    pass_on(value)
sv.barrier()
for tag in range(1, 140):  # more than are kept in mind: what is known of tag 0 is let go of
    pass_on(tag, tag)
sv.barrier()
pass_on(50, count=7)  # a shape that has not gone before
for value in range(100, 104):
    pass_on(value)
sv.barrier()
if rank == 1:
    probe.note("got", all=got)
"""


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_messages_of_a_tag_that_has_rested_come_all_and_in_order(launch, kernel):
    job = launch(TAGS, env={"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {})
    assert job.wait(120) == 0, str(job)
    assert [event["all"] for event in job.events("got")] == [
        [*range(4), *range(1, 140), 50, 100, 101, 102, 103]
    ]


GROUPED = """
import threading, time
import numpy as np
import probe, syncvar as sv
from syncvar.bootstrap.process import current

rank = sv.rank()
variables = [sv.Variable(np.zeros(7_000), aggregation="SUM", dtype="float64", synchronization="ON_WRITE") for _ in range(10)]
one, other, told = np.ones(7_000), np.full(7_000, 1000.0), []
for _ in range(4):
    sv.assign_add_all([(v, one) for v in variables])
sv.barrier()
busy = current().world.busy


def second():
    while not busy.locked():  # until the first write has begun
        time.sleep(0.01)
    told.append(probe.failure(lambda: sv.assign_add_all([(v, other) for v in variables])))
    probe.open_gate("refused")


thread = threading.Thread(target=second)
if rank == 0:
    thread.start()
else:
    probe.gate("refused")  # the first write of rank 0 waits for this one
sv.assign_add_all([(v, one) for v in variables])
if rank == 0:
    thread.join(60)
probe.note("written", told=[type(error).__name__ for error in told], values=sorted({float(value) for v in variables for value in v.numpy()}))
"""


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_a_refused_write_of_several_variables_brings_nothing_into_that_of_another_thread(
    launch, kernel
):
    job = launch(GROUPED, env={"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {})
    assert job.wait(120) == 0, str(job)
    seen = {event["rank"]: (event["told"], event["values"]) for event in job.events("written")}
    assert seen == {0: (["UsageError"], [10.0]), 1: ([], [10.0])}, str(job)


MOVING = """
import ctypes, sys
import numpy as np
import probe, syncvar as sv
import syncvar.variables.storage as storages

v = sv.Variable(np.zeros(16), aggregation="SUM", dtype="float64", synchronization="ON_WRITE")
one, told, plain, is_armed = np.ones(16), [], storages._count, [False]
sv.get_strategy().check_every = 0
for _ in range(5):
    v.assign_add(one)


def count(value):
    if is_armed[0] and sys._getframe(1).f_code.co_name == "_go_to":
        is_armed[0] = False
        told.append(probe.failure(lambda: v.assign_add(one)))  # what another thread, or a signal's handler, does at this moment
    return plain(value)


storages._count = count
held = v.numpy()
is_armed[0] = True
v.assign_add(one)  # with a view alive: the copy moves
del held
lying = [np.full(16, 7.0) for _ in range(3_000)]
for _ in range(5):
    v.assign_add(one)
probe.note("written", told=[type(error).__name__ for error in told], value=float(v.numpy()[0]), others=sum(float(one.sum()) for one in lying))
"""


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_a_write_is_refused_while_the_copy_goes_to_other_memory(launch, kernel):
    job = launch(MOVING, env={"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {})
    assert job.wait(120) == 0, str(job)
    assert [
        (event["told"], event["value"], event["others"]) for event in job.events("written")
    ] == [(["UsageError"], 22.0, 3_000 * 16 * 7.0)] * 2, str(job)


HANDLER = """
import signal, threading, time
import numpy as np
import probe, syncvar as sv

rank, x, long, told, is_sending = sv.rank(), np.ones(4), np.ones(1 << 18), [], threading.Event()
for _ in range(3):
    sv.send(long, 1) if rank == 0 else sv.recv(0)
    sv.all_reduce(x)
sv.barrier()


def ring(*_):
    told.append(probe.failure(lambda: sv.all_reduce(x)))
    probe.open_gate("told")


def alarm():
    is_sending.wait()
    time.sleep(0.5)  # the main thread has come into the call
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


signal.signal(signal.SIGALRM, ring)
if rank == 0:
    threading.Thread(target=alarm).start()
else:
    probe.gate("told")
is_sending.set()
sv.send(long, 1) if rank == 0 else sv.recv(0)
probe.note("went", told=[str(error) for error in told], sum=float(sv.all_reduce(x)[0]))
"""


@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_a_prepared_call_of_a_signals_handler_is_refused_and_the_call_beneath_goes_on(
    launch, kernel
):
    job = launch(HANDLER, env={"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {})
    assert job.wait(120) == 0, str(job)
    seen = {event["rank"]: event for event in job.events("went")}
    assert [seen[rank]["sum"] for rank in (0, 1)] == [2.0, 2.0], str(job)
    assert len(seen[0]["told"]) == 1
    assert "a signal's handler has interrupted this thread" in seen[0]["told"][0]


DROPPED = """
import numpy as np
import probe, syncvar as sv

x, count = np.ones(8), 3_000
for _ in range(count):
    sv.all_reduce(x, async_op=True)
sv.barrier()
probe.note("over", sum=float(sv.all_reduce(x)[0]))
"""


@pytest.mark.slow
def test_thousands_of_calls_that_nobody_waits_for_end(launch):
    job = launch(DROPPED, env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"})
    assert job.wait(120) == 0, str(job)
    assert [event["sum"] for event in job.events("over")] == [2.0, 2.0]


STARTED_MEANWHILE = """
import sys, time
import numpy as np
import syncvar as sv

sys.setswitchinterval(1e-6)
for _ in range(40):
    if sv.rank():
        time.sleep(0.02)
    works = [sv.all_reduce(np.full(3 + number % 50, float(number)), async_op=True) for number in range(200)]
    assert [float(work.wait()[0]) for work in works] == [2.0 * number for number in range(200)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "python"])
def test_calls_started_while_the_progress_thread_looks_at_the_earlier_ones(launch, kernel):
    job = launch(STARTED_MEANWHILE, env={"SYNCVAR_CALL_RUNNER": kernel} if kernel != "auto" else {})
    assert job.wait(120) == 0, str(job)
