"""Random calls over real processes of one host, for long; ranks that are killed, stopped or slow in the middle of them.

The default run makes 1 200 calls on 2 ranks and 500 on 4, and kills 3 ranks; the slow tests make 20 000 calls, and the
nightly ones 40 000 more and 200 kills.
"""

import contextlib
import random
import signal
import time

import pytest

from tests.support.launching import await_true, check_bound, last_exception
from tests.support.paths import RANK_SCRIPTS

SOAK = (RANK_SCRIPTS / "soak.py").read_text()
LOST_S = 3.0
CALLS = 10_000
KILLS = 200


def soaked(launch, workers, seed, calls, limit_s, transport="auto"):
    job = launch(
        SOAK,
        workers=workers,
        arguments=[str(seed), str(calls)],
        env={"SYNCVAR_TRANSPORT": transport},
    )
    assert job.wait(limit_s) == 0, str(job)
    assert [event["calls"] for event in job.events("done")] == [calls] * workers, str(job)


@pytest.mark.parametrize(("workers", "calls"), [(2, 1_200), (4, 500)])
def test_random_calls(launch, workers, calls):
    soaked(launch, workers, 70 + workers, calls, 90)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_calls_over_links(launch, workers):
    soaked(launch, workers, 70 + workers, 300, 60, "zmq")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))]
)
@pytest.mark.parametrize("workers", [2, 4])
def test_many_random_calls(launch, workers, seed):
    soaked(launch, workers, seed, CALLS, 300)


def kill_in_the_middle(launch, started, workers, seed):
    draw = random.Random(seed)
    job = launch(SOAK, workers=workers, arguments=[str(seed), "1", "for-ever"])
    job.await_events("ready", workers)
    time.sleep(draw.random() * 0.2)
    victim = draw.randrange(workers)
    others = [rank for rank in range(workers) if rank != victim]
    killed = job.kill_rank(victim)
    assert job.wait() == 137, f"seed {seed}: {job}"
    last, raised = last_exception(job, others)
    for rank in others:
        assert (raised[rank]["error"], raised[rank]["lost"]) == ("PeerLost", victim), (
            f"seed {seed}: {job}"
        )
    assert f"rank {victim} on" in job.report, f"seed {seed}: {job}"
    check_bound(f"killed in the middle, {workers} ranks, seed {seed}", last - killed, LOST_S)
    await_true(lambda: not started.own_processes(), 60, "the end of all processes")


@pytest.mark.parametrize(("workers", "times"), [(2, 2), (4, 1)])
def test_killed_at_any_moment(launch, nothing_left_behind, workers, times):
    for seed in range(times):
        kill_in_the_middle(launch, nothing_left_behind, workers, seed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [2, 4])
def test_killed_very_often(launch, nothing_left_behind, workers):
    for seed in range(1000, 1000 + KILLS // 2):
        kill_in_the_middle(launch, nothing_left_behind, workers, seed)


@pytest.mark.slow
def test_stopped_and_continued(launch):
    """0.3 s is below what makes a rank suspect: nobody may notice."""
    job = launch(SOAK, workers=2, arguments=["5", "1500"])
    job.await_events("ready", 2)
    with contextlib.suppress(ProcessLookupError):  # they are through already
        for turn in range(3):
            job.kill_rank(turn % 2, signal.SIGSTOP)
            time.sleep(0.3)
            job.kill_rank(turn % 2, signal.SIGCONT)
            time.sleep(0.05)
    assert job.wait(120) == 0, str(job)
    assert [event["calls"] for event in job.events("done")] == [1500] * 2, str(job)


WAITING = """
import sys, threading, time
import numpy as np
import probe, syncvar as sv

x = np.ones(int(sys.argv[1]))
for _ in range(20):
    sv.all_reduce(x)
sv.barrier()
if sv.rank() == 1:
    probe.gate("measured")
    time.sleep(2.0)
    sv.all_reduce(x)
else:
    work = sv.all_reduce(x, async_op=True) if "started" in sys.argv else None
    cpu = []
    def measure(*_):
        cpu.append((time.monotonic(), time.process_time()))
        probe.open_gate("measured")
    threading.Timer(0.5, measure).start()
    if work is not None:
        work.wait()
    else:
        sv.all_reduce(x)
    measure()
    (began, before), (ended, after) = cpu
    probe.note("share", share=(after - before) / (ended - began), seconds=ended - began)
"""


@pytest.mark.slow
def test_a_rank_that_waits_long_sleeps(launch):
    ways = (["3"], ["300000"], ["3", "started"])
    jobs = [launch(WAITING, workers=2, arguments=arguments) for arguments in ways]
    for job in jobs:
        assert job.wait() == 0, str(job)
        (event,) = job.events("share")
        assert event["seconds"] > 1.5, str(job)
        # A hundredth is usual; a rank that spins takes all that it gets.
        assert event["share"] < 0.25, str(job)
