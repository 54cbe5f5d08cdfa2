"""Children that a rank forks: syncvar leaves nothing in them, and a signal that ends the job ends them too."""

import signal

import pytest

from tests.support.launching import await_true, state

STATE = """
import atexit, faulthandler, json, multiprocessing, os, signal, sys, time

FORK = multiprocessing.get_context("fork")


def handlers():
    return sorted(int(one) for one in signal.valid_signals() if callable(signal.getsignal(one)) and one != signal.SIGINT)


def child(end):
    blocked = sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    end.send([handlers(), int(signal.getsignal(signal.SIGTERM)), faulthandler.is_enabled(), blocked, atexit._ncallbacks()])


def child_state():
    here, there = FORK.Pipe()
    process = FORK.Process(target=child, args=(there,))
    process.start()
    told = here.recv()
    process.join()
    return told
"""
COMPARED = (
    STATE
    + """
callbacks = atexit._ncallbacks()
seen = [child_state()]
if "SYNCVAR_RANK" in os.environ:
    import syncvar as sv
    import threading
    sv.barrier()
    manager = sv.CheckpointManager(sv.Checkpoint(x=sv.Variable(0.0)), "saves", on_preemption=True)
    seen.append(child_state())
    thread = threading.Thread(target=lambda: seen.append(child_state()))
    thread.start()
    thread.join()
    assert handlers(), "the rank itself keeps its handlers"
print(json.dumps(seen))
"""
)
ENDED = """
import multiprocessing, time

context = multiprocessing.get_context("fork")
for _ in range(20):
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -15, child.exitcode
with context.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
print("ended")
"""
KEPT = """
import faulthandler, multiprocessing, signal, sys

faulthandler.enable(open("crash.txt", "w"))
signal.signal(signal.SIGTERM, signal.default_int_handler)


def child():
    assert faulthandler.is_enabled() and signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    sys.exit(5)


process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 5
print("kept")
"""
WAITING = """
import multiprocessing, os, time
import probe

process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))  # not a daemon: the rank's end joins it
process.start()
probe.note("there", child=process.pid)
time.sleep(600)
"""
HOLDING = """
import multiprocessing, time
import probe, syncvar as sv

manager = sv.CheckpointManager(sv.Checkpoint(x=sv.Variable(0.0)), "saves", on_preemption=True)
pool = multiprocessing.get_context("fork").Pool(2)
probe.note("there")
while not manager.should_stop():
    time.sleep(0.05)
probe.gate("go")
assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3], "the children are there until the rank ends them"
pool.terminate()
probe.note("worked")
manager.stop()
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_terminate_ends_a_child_and_a_pool_ends(launch, start):
    job = launch(ENDED, workers=2, start=start)
    assert job.wait() == 0, str(job)
    assert job.out.count("ended") == 2


def test_a_child_has_what_it_has_under_python(launch):
    import json
    import subprocess
    import sys

    job = launch(COMPARED, workers=2)
    assert job.wait() == 0, str(job)
    (plain,) = json.loads(
        subprocess.run(
            [sys.executable, "-c", COMPARED], capture_output=True, check=True, timeout=120
        ).stdout
    )
    for line in job.out.splitlines():
        for told in json.loads(line[line.index("[[") :]):
            assert told[:4] == plain[:4], f"{told} under the launcher, {plain} under python\n{job}"


def test_what_the_program_has_set_itself_stays_in_its_children(launch):
    job = launch(KEPT, workers=2)
    assert job.wait() == 0, str(job)
    assert job.out.count("kept") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_children_of_a_rank(launch, number):
    job = launch(WAITING, workers=2, env={"SYNCVAR_TERM_GRACE_S": "300"})
    children = [event["child"] for event in job.await_events("there", 2)]
    job.send(number)
    assert job.wait() == 128 + number, str(
        job
    )  # long before the grace of 300 s, which ends what a rank leaves behind
    for child in children:
        await_true(lambda pid=child: not state(pid), what="the end of a child")


def test_a_rank_that_takes_notice_keeps_its_children(launch):
    job = launch(HOLDING, workers=2)
    job.await_events("there", 2)
    job.send(signal.SIGTERM)
    (job.folder / "gate-go").touch()
    assert job.wait() == 75, str(job)
    assert len(job.events("worked")) == 2, str(job)
