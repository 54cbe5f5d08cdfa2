"""Ways between hosts are cut, deaf, reset, narrow and long, in each phase, over and over; the sums are right or nobody has one."""

import contextlib
import sys
import time
from pathlib import Path

import pytest
from host_faults import (
    DEFAULTS,
    begin,
    bounded,
    check_old_checkpoint,
    check_survivors,
    grace_s,
    over_and_over,
    phases,
)
from launching import await_true, check_bound

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))
from fault_table import ROWS  # noqa: E402

pytestmark = pytest.mark.slow

SUMS = """
import os, sys, time
import numpy as np
import probe
import syncvar as sv

count = int(sys.argv[3])
try:
    mine = np.arange(float(count)) * (sv.rank() + 1)
    whole = np.arange(float(count)) * 10
    turn = 0
    while not sv.all_reduce(int(os.path.exists(os.path.join(probe.FOLDER, "gate-stop")))):
        assert (sv.all_reduce(mine) == whole).all(), turn
        turn += 1
        if sys.argv[1] == "C":  # most of the time nobody is in a call
            time.sleep(0.2)
        probe.note("ready" if turn == 1 else "sum", turn=turn)
except BaseException as error:
    probe.raised(error)
    raise
"""


def cut_off(hosts, index):
    """Return when nothing of a job runs on a host any more, that nobody can reach."""
    await_true(lambda: not any("syncvar" in words or "script.py" in words for words in hosts.processes(index).values()), 60, "the cut-off host's end")
    return time.monotonic()


@contextlib.contextmanager
def cut(hosts):
    hosts.set_link(2, "down")
    try:
        yield time.monotonic()
    finally:
        hosts.set_link(2, "up")


@contextlib.contextmanager
def deaf(hosts):
    """Let what the last host sends vanish."""
    hosts.set_deaf(2, (0, 1))
    try:
        yield time.monotonic()
    finally:
        hosts.set_deaf(2, (0, 1), is_deaf=False)


@contextlib.contextmanager
def dumb(hosts):
    """Let what is sent to the last host vanish."""
    for one in (0, 1):
        hosts.set_deaf(one, (2,))
    try:
        yield time.monotonic()
    finally:
        for one in (0, 1):
            hosts.set_deaf(one, (2,), is_deaf=False)


def check_cut(hosts, job, injected, name, phase, bound, lost):
    """Check both sides of a cut, while it lasts."""
    assert job.wait(60) == 70, job
    ended = cut_off(hosts, 2)
    check_survivors(job, injected, name, phase, bound, lost=lost)
    check_bound(f"{name} to the end of the host that is cut off", ended - injected, bounded(phase, bound) + grace_s(phase))
    for event in job.events("raised"):
        if event["rank"] in (2, 3):
            assert event["error"] in ("PeerLost", "SystemExit"), job


@pytest.mark.parametrize("phase", phases("RCXK"))
def test_f20_the_link_is_down(hosts, tmp_path, phase):
    for job in over_and_over(hosts, tmp_path, phase, "RCXK"):
        with cut(hosts) as injected:
            check_cut(hosts, job, injected, f"F20-{phase}", phase, ROWS["F20"].bound, (2, 3))
        assert f"its host {hosts.names[2]} is gone: nothing has come from it for" in job.report, job
        if phase == "K":
            check_old_checkpoint(job)


@pytest.mark.parametrize("phase", "CX")
@pytest.mark.parametrize("way", [deaf, dumb])
def test_f21_one_direction_is_lost(hosts, tmp_path, phase, way):
    for job in over_and_over(hosts, tmp_path, phase, "CCXX"):
        with way(hosts) as injected:
            # Who hears nobody and is still heard says that the others are lost, and may say it first.
            check_cut(hosts, job, injected, f"F21-{phase}-{way.__name__}", phase, ROWS["F21"].bound, range(4))


@pytest.mark.parametrize("phase", phases("CX"))
def test_f22_the_link_is_down_for_half_of_the_time_that_is_allowed(hosts, tmp_path, phase):
    """When the link is up again, TCP goes on with its next try: it doubles its pauses, from 0.2 s on."""
    lost_after_s = 15.0 if phase == DEFAULTS else 4.5
    env = {} if phase == DEFAULTS else {"SYNCVAR_LOST_AFTER_S": str(lost_after_s)}
    job = begin(hosts, tmp_path / "job", phase, SUMS, ["1000"], env=env | {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"})
    try:
        for _ in range(1 if phase == DEFAULTS else 5):
            with cut(hosts):
                time.sleep(lost_after_s / 2)
            before = max(last_turns(job).values())
            await_true(lambda before=before: job.process.poll() is not None or min(last_turns(job).values()) > before + 1, 30, "sums after the cut")
        job.open_gate("stop")
        assert job.wait(60) == 0, job
    finally:
        job.close()


def last_turns(job):
    """Return how many sums each rank has got."""
    turns = dict.fromkeys(range(4), 0)
    for event in job.events("sum"):
        turns[event["rank"]] = event["turn"]
    return turns


def test_f23_connections_are_reset_in_the_middle_of_a_frame(hosts, tmp_path):
    hosts.set_rate(2, 400)
    try:
        for number in range(10):
            job = begin(hosts, tmp_path / f"job{number}", "X", SUMS, ["2000000"])
            try:
                job.await_events("sum", 4 + number)
                time.sleep(0.01 * number)
                injected = time.monotonic()
                assert hosts.reset(2) > 2
                assert job.wait(60) == 70, job
            finally:
                job.close()
            check_survivors(job, injected, "F23-X", "X", ROWS["F23"].bound, ranks=range(4), lost=range(4))
            left = hosts.await_quiet()
            assert not left, (left, job)
    finally:
        hosts.set_rate(2, None)


def test_f24_ten_megabits_a_second(hosts, tmp_path):
    hosts.set_rate(2, 10)
    try:
        job = begin(hosts, tmp_path / "job", "X", SUMS, ["250000"])
        try:
            job.await_events("sum", 40, limit_s=120)
            job.open_gate("stop")
            assert job.wait(60) == 0, job
            assert "suspect" not in job.err, job
        finally:
            job.close()
    finally:
        hosts.set_rate(2, None)


def test_f25_everything_arrives_later(hosts, tmp_path):
    with hosts.delayed(2, 0.2):
        for number in range(4):
            job = begin(hosts, tmp_path / f"job{number}", "X", SUMS, ["1000"])
            try:
                job.await_events("sum", 40, limit_s=60)
                job.open_gate("stop")
                assert job.wait(60) == 0, job
                assert "suspect" not in job.err, job
            finally:
                job.close()
            left = hosts.await_quiet()
            assert not left, (left, job)
