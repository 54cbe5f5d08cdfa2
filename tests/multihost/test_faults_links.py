"""Ways between hosts are cut, deaf, reset, narrow and long, in each phase, over and over; the sums are right or nobody has one."""

import contextlib
import os
import secrets
import subprocess
import sys
import time

import pytest

from tests.support.fault_table import ROWS
from tests.support.host_faults import (
    DEFAULTS,
    PATHS,
    TIMES,
    begin,
    bounded,
    check_old_checkpoint,
    check_survivors,
    grace_s,
    over_and_over,
    path_of,
    phases,
    silence_s,
)
from tests.support.launching import await_true, check_bound
from tests.support.paths import PROFILE

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

ELSEWHERE = """
import sys, time
import syncvar as sv
try:
    sv.barrier()
    alone = sv.new_group([2])
    print("met", flush=True)
    while sv.rank() == 2:  # computes; a call that needs nobody tells it of the loss
        sv.barrier(group=alone)
        time.sleep(0.01)
    sv.recv(2)
except sv.SyncvarError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


def cut_off(hosts, index):
    """Return when nothing of a job runs on a host any more, that nobody can reach."""
    await_true(
        lambda: (
            not any(
                "syncvar" in words or "script.py" in words
                for words in hosts.processes(index).values()
            )
        ),
        60,
        "the cut-off host's end",
    )
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
    assert job.wait(120) == 70, job
    ended = cut_off(hosts, 2)
    check_survivors(job, injected, name, phase, bound, lost=lost)
    check_bound(
        f"{name} to the end of the host that is cut off",
        ended - injected,
        bounded(phase, bound) + grace_s(phase),
    )
    for event in job.events("raised"):
        if event["rank"] in (2, 3):
            assert event["error"] in ("PeerLost", "SystemExit"), job


@pytest.mark.parametrize("phase", phases("RCXK"))
def test_f20_the_link_is_down(hosts, tmp_path, phase):
    for job in over_and_over(hosts, tmp_path, phase, "RCXK", lost_after_s=silence_s(phase)):
        with cut(hosts) as injected:
            check_cut(hosts, job, injected, f"F20-{phase}", phase, ROWS["F20"].bound, (2, 3))
        assert f"its host {hosts.names[2]} is gone: nothing has come from it for" in job.report, job
        if phase == "K":
            check_old_checkpoint(job)


@pytest.mark.parametrize("phase", "RX")
def test_f20_the_link_is_down_where_no_launcher_is(hosts, tmp_path, phase):
    """Rank 0 keeps the roll there, and serves the others until they have left: a rank that is lost has left."""
    for number in range(TIMES // 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "script.py").write_text(ELSEWHERE)
        key, ranks = (
            secrets.token_hex(32),
            range(3) if phase == "X" else (0, 2),
        )  # the rendezvous waits for rank 1
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(started_elsewhere(hosts, folder, rank, key, path_of(number)))
                for rank in ranks
            ]
            word = "met" if phase == "X" else "joined: 2 of 3"
            needed = ranks if phase == "X" else [0]
            await_true(
                lambda: all(word in (folder / f"out{rank}").read_text() for rank in needed),  # noqa: B023
                60,
                word,
            )
            with cut(hosts) as injected:
                codes = [one.wait(120) for one in running]
                lasted_s = time.monotonic() - injected
            told = [(folder / f"out{rank}").read_text() for rank in ranks]
        assert codes == [3] * len(ranks), told
        assert all("PeerLost rank" in one for one in told), told
        assert all(": silent for " in one for one in told), told
        check_bound(
            f"F20-{phase} without a launcher, to the end", lasted_s, ROWS["F20"].bound[1] + 2
        )
        assert not hosts.await_quiet()


@contextlib.contextmanager
def started_elsewhere(hosts, folder, rank, key, path):
    """Start one process of three as torchrun would, each on a host of its own."""
    settings = dict(
        line.split(" = ")
        for line in PROFILE.read_text().partition("[runtime]")[2].splitlines()
        if " = " in line
    )
    told = {
        "RANK": rank,
        "WORLD_SIZE": 3,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": 3,
        "MASTER_ADDR": hosts.names[0],
        "MASTER_PORT": 29500,
        "SYNCVAR_KEY": key,
        "XDG_RUNTIME_DIR": hosts.temporary(rank),
        **{f"SYNCVAR_{name.upper()}": value for name, value in settings.items()},
        "SYNCVAR_RENDEZVOUS_TIMEOUT_S": 300,
        "SYNCVAR_SUSPECT_AFTER_S": 2,
        "SYNCVAR_LOST_AFTER_S": 5,
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": 60,
        **path,
    }
    with (folder / f"out{rank}").open("wb") as out:
        one = subprocess.Popen(
            ["ip", "netns", "exec", hosts.spaces[rank], sys.executable, str(folder / "script.py")],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=os.environ | {name: str(value) for name, value in told.items()},
        )
    try:
        yield one
    finally:
        one.kill()
        one.wait(120)


@pytest.mark.parametrize("phase", "CX")
@pytest.mark.parametrize("way", [deaf, dumb])
def test_f21_one_direction_is_lost(hosts, tmp_path, phase, way):
    for job in over_and_over(hosts, tmp_path, phase, "CCXX", lost_after_s=silence_s(phase)):
        with way(hosts) as injected:
            # Who hears nobody and is still heard says that the others are lost, and may say it first.
            check_cut(
                hosts,
                job,
                injected,
                f"F21-{phase}-{way.__name__}",
                phase,
                ROWS["F21"].bound,
                range(4),
            )


@pytest.mark.nightly
@pytest.mark.parametrize("phase", phases("C"))  # the last one is inside calls
def test_f22_the_link_is_down_for_half_of_the_time_that_is_allowed(hosts, tmp_path, phase):
    """When the link is up again, TCP goes on with its next try: it doubles its pauses, from 0.2 s on."""
    lost_after_s = (
        15.0 if phase == DEFAULTS else 4.5
    )  # shorter, and what a busy machine takes matters more than TCP's pauses
    for number, path in enumerate(PATHS[:1] if phase == DEFAULTS else PATHS):
        env = path
        if phase != DEFAULTS:
            env = {**path, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"}
        job = begin(
            hosts,
            tmp_path / f"job{number}",
            phase,
            SUMS,
            ["1000"],
            lost_after_s=lost_after_s,
            path=env,
        )
        try:
            for _ in range(1 if phase == DEFAULTS else -(-TIMES // (2 * len(PATHS)))):
                with cut(hosts):
                    time.sleep(lost_after_s / 2)
                before = max(last_turns(job).values())
                await_true(
                    lambda job=job, before=before: (
                        job.process.poll() is not None or min(last_turns(job).values()) > before + 1
                    ),
                    60,
                    "sums after the cut",
                )
            job.open_gate("stop")
            assert job.wait(120) == 0, job
        finally:
            job.close()


def last_turns(job):
    """Return how many sums each rank has got."""
    turns = dict.fromkeys(range(4), 0)
    for event in job.events("sum"):
        turns[event["rank"]] = event["turn"]
    return turns


@pytest.mark.parametrize(
    ("path", "times"), list(zip(PATHS, (10, 2, 2), strict=True)), ids=["tls", "plain", "zmq"]
)
def test_f23_connections_are_reset_in_the_middle_of_a_frame(hosts, tmp_path, path, times):
    hosts.set_rate(2, 400)
    try:
        for number in range(times):
            job = begin(hosts, tmp_path / f"job{number}", "X", SUMS, ["2000000"], path=path)
            try:
                job.await_events("sum", 4 + number)
                time.sleep(0.01 * number)
                injected = time.monotonic()
                assert hosts.reset(2) > 2
                assert job.wait(120) == 70, job
            finally:
                job.close()
            check_survivors(
                job, injected, "F23-X", "X", ROWS["F23"].bound, ranks=range(4), lost=range(4)
            )
            left = hosts.await_quiet()
            assert not left, (left, job)
    finally:
        hosts.set_rate(2, None)


def check_sums(hosts, folder, elements, limit_s, *, path, events):
    """Let ranks sum on hosts as they are now: all sums are right, and nobody is suspected."""
    job = begin(hosts, folder, "X", SUMS, [elements], path=path)
    try:
        job.await_events("sum", events, limit_s=limit_s)
        job.open_gate("stop")
        assert job.wait(120) == 0, job
        assert "suspect" not in job.err, job
    finally:
        job.close()
    left = hosts.await_quiet()
    assert not left, (left, job)


@pytest.mark.nightly
def test_f24_ten_megabits_a_second(hosts, tmp_path):
    hosts.set_rate(2, 10)
    try:
        for number, path in enumerate(PATHS):
            check_sums(hosts, tmp_path / f"job{number}", "250000", 120, path=path, events=16)
    finally:
        hosts.set_rate(2, None)


@pytest.mark.nightly
def test_f25_everything_arrives_later(hosts, tmp_path):
    with hosts.delayed(2, 0.2):
        for number in range(4):
            check_sums(
                hosts, tmp_path / f"job{number}", "1000", 60, path=path_of(number), events=40
            )
