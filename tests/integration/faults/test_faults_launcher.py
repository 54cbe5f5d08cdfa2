"""The launcher is killed, interrupted or told to end: F12, F13, F14, and the graces after a failure."""

import os
import signal
import time
from pathlib import Path

import pytest

import syncvar as sv
from tests.support.launching import PATIENT, await_true, check_bound, state

PHASES = """
import subprocess, sys, time
import probe

phase, how = sys.argv[1], sys.argv[2]
if "children" in how:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    probe.note("child", child=child.pid)


def body():
    if phase == "S":
        probe.note("ready")
        time.sleep(60)
    import numpy as np
    import syncvar as sv

    if phase == "R":
        if probe.RANK == 1:
            probe.note("ready")
            time.sleep(60)
        probe.note("ready")
    sv.init()
    assert sv.all_reduce(1) == 2
    if phase == "C":
        probe.note("ready")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            np.ones(1000).sum()
    if phase == "X":
        if probe.RANK == 1:
            probe.note("ready")
            time.sleep(60)
        probe.note("ready")
        sv.all_reduce(np.ones(1000))
    if phase == "K":
        from syncvar.checkpoint.folder import Disk

        own = sv.Variable(np.full(1000, float(probe.RANK)), name="own", synchronization="NONE")
        checkpoint = sv.Checkpoint(n=1, own=own)
        checkpoint.save("checkpoint")
        checkpoint.n = 2
        Disk.write = staticmethod(lambda *_: (probe.note("ready"), time.sleep(60)))
        checkpoint.save("checkpoint")
    if phase == "E":
        sv.shutdown()
        probe.note("ready")
        time.sleep(60)


try:
    body()
except BaseException as error:
    probe.raised(error)
    raise
finally:
    probe.note("cleaned")
"""


def runtime_folders():
    base = Path(os.environ["XDG_RUNTIME_DIR"], "syncvar")
    return [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []


def check_checkpoint(job, phase):
    """See that a save that was ended in the middle has left the checkpoint before."""
    if phase == "K":
        whole = sv.Checkpoint(n=0)
        whole.restore(job.folder / "checkpoint")
        assert whole.n == 1


def start(launch, phase, how="plain", **keywords):
    patient = {**PATIENT, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60", "SYNCVAR_TERM_GRACE_S": "30"}
    job = launch(PHASES, workers=2, arguments=[phase, how], env=patient, **keywords)
    job.await_events("ready", 2)
    time.sleep(0.1)  # into the wait of R and X
    return job


@pytest.mark.parametrize(
    ("phase", "how"), [*((phase, "spawn") for phase in "SRCXKE"), ("S", "fork"), ("X", "fork")]
)
def test_f12_launcher_killed(launch, phase, how, nothing_left_behind):
    job = start(launch, phase, "children", options=["--start-method", how])
    assert len(runtime_folders()) == 1
    assert len(nothing_left_behind.own_processes()) >= 6, (
        "launcher, guardian, two ranks and a child of each"
    )
    killed = time.monotonic()
    job.process.kill()
    job.process.wait()
    await_true(lambda: not runtime_folders(), 60, "the end of the private directory")
    await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of all processes")
    check_bound(f"F12-{phase}-{how}", time.monotonic() - killed, 2.0)
    check_checkpoint(job, phase)


def test_f12_launcher_and_guardian_killed(launch, nothing_left_behind):
    job = start(launch, "X")
    (guardian,) = [
        pid
        for pid, words in nothing_left_behind.own_processes().items()
        if "process_sessions.py" in words
    ]
    (folder,) = runtime_folders()
    killed = time.monotonic()
    os.kill(guardian, signal.SIGKILL)
    job.process.kill()
    job.process.wait()
    await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of the ranks")
    check_bound("F12-guardian too", time.monotonic() - killed, 2.0)
    assert folder.is_dir(), "nobody was left to remove it"
    second = launch("import syncvar as sv; sv.all_reduce(1)")
    assert second.wait() == 0, str(second)
    assert not runtime_folders(), "the next launch sweeps what no one owns"


def test_f12_guardian_killed(launch, nothing_left_behind):
    job = launch(
        "import probe, syncvar as sv; sv.init(); probe.note('ready'); probe.gate('go'); sv.all_reduce(1)"
    )
    job.await_events("ready", 2)
    (guardian,) = [
        pid
        for pid, words in nothing_left_behind.own_processes().items()
        if "process_sessions.py" in words
    ]
    os.kill(guardian, signal.SIGKILL)
    time.sleep(0.1)
    job.open_gate("go")
    assert job.wait() == 0, str(job)


@pytest.mark.parametrize(
    ("number", "code", "phase"),
    [
        pytest.param(
            number,
            code,
            phase,
            id=f"{name}-{phase}",
            marks=pytest.mark.slow if name == "INT" and phase in "SRCE" else [],
        )
        for name, number, code in (("TERM", signal.SIGTERM, 143), ("INT", signal.SIGINT, 130))
        for phase in "SRCXKE"
    ],
)
def test_f13_launcher_told_to_end(launch, number, code, phase):
    job = start(launch, phase)
    sent = job.send(number)
    assert job.wait() == code, str(job)
    check_bound(f"F13-{number.name}-{phase}", job.ended - sent, 3.0)
    check_checkpoint(job, phase)
    assert {event["rank"] for event in job.events("cleaned")} == {0, 1}, str(job)
    for event in job.events("raised"):
        assert event["error"] in ("SystemExit", "PeerLost"), str(
            job
        )  # the first rank that ends breaks the others' calls
    assert f"interrupted by {number.name}" in job.report, str(job)
    assert "evidence" not in job.report, str(job)


STUBBORN = """
import signal, time
import probe, syncvar as sv

signal.signal(signal.SIGTERM, lambda *_: probe.note("ignored"))
sv.all_reduce(1)
probe.note("ready")
if "X" in __import__("sys").argv and probe.RANK == 0:
    sv.all_reduce(1)
if "K" in __import__("sys").argv:
    from syncvar.checkpoint.folder import Disk

    def write(*_):
        probe.note("writing")
        for _ in range(1200):
            time.sleep(0.05)

    checkpoint = sv.Checkpoint(own=sv.Variable([1.0], name="own", synchronization="NONE"))
    Disk.write = staticmethod(write)
    checkpoint.save("checkpoint")
until = time.monotonic() + 60
while time.monotonic() < until:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("phase", "CXK")
def test_f14_second_interrupt_kills_at_once(launch, phase):
    patient = {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60", "SYNCVAR_TERM_GRACE_S": "50"}
    job = launch(STUBBORN, workers=2, arguments=[phase], env=patient)
    job.await_events("writing" if phase == "K" else "ready", 2)
    job.send(signal.SIGINT)
    job.await_events("ignored", 2)
    said = "syncvar: ending the ranks, up to 50 s; Ctrl-C again kills them\n"
    await_true(lambda: said in job.err, what="what the launcher says at once")
    assert job.process.poll() is None
    sent = job.send(signal.SIGINT)
    assert job.wait() == 130, str(job)
    check_bound(f"F14-{phase}", job.ended - sent, 0.5)


@pytest.mark.slow
def test_f14_without_a_second_interrupt_the_grace_ends_it(launch):
    job = launch(STUBBORN, workers=2)
    job.await_events("ready", 2)
    sent = job.send(signal.SIGTERM)
    assert job.wait() == 143, str(job)
    assert job.ended - sent > 1.9, str(job)
    assert (
        "syncvar: received SIGTERM: ending the ranks, up to 2 s; a second signal kills them\n"
        in job.err
    ), str(job)
    check_bound("F13-ignored SIGTERM", job.ended - sent, 3.0)


SURVIVORS = """
import signal, sys, time
import probe, syncvar as sv

if probe.RANK == 2:
    signal.signal(signal.SIGTERM, lambda *_: probe.note("ignored"))
sv.all_reduce(1)
probe.open_gate(f"done-{probe.RANK}")
if probe.RANK == 1:
    for rank in range(3):  # nobody is still in the first call
        probe.gate(f"done-{rank}")
    probe.note("inject")
    raise ValueError("planted failure")
assert isinstance(probe.failure(sv.all_reduce, 1), sv.PeerLost)
assert isinstance(probe.failure(sv.all_reduce, 1), sv.GroupBroken)
try:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.05)
finally:
    probe.note("cleaned")
"""


@pytest.mark.slow
def test_survivors_that_go_on_are_ended_after_the_graces(launch):
    job = launch(SURVIVORS, workers=3)
    (inject,) = job.await_events("inject")
    assert job.wait() == 1, str(job)
    (cleaned,) = job.events("cleaned")
    assert cleaned["rank"] == 0, "rank 0 honours SIGTERM, rank 2 does not"
    assert cleaned["at"] - inject["at"] > 0.4, str(job)
    check_bound("abort: SIGTERM after abort_grace", cleaned["at"] - inject["at"], 1.0)
    assert job.ended - inject["at"] > 2.3, str(job)
    check_bound("abort: SIGKILL after term_grace", job.ended - inject["at"], 3.0)
    assert job.events("ignored", 2), str(job)


def test_a_rank_that_stops_itself_and_goes_on_is_forgiven(launch):
    job = launch(
        """
        import os, signal
        import probe, syncvar as sv
        if sv.rank() == 1:
            probe.note("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        assert sv.all_reduce(1) == 2
        """,
        env={"SYNCVAR_SUSPECT_AFTER_S": "0.5", "SYNCVAR_LOST_AFTER_S": "60"},
    )
    job.await_events("stops")
    await_true(lambda: "suspect: silent for" in job.report, what="the suspicion")
    job.kill_rank(1, signal.SIGCONT)
    assert job.wait() == 0, str(job)


def test_grandchildren_end_with_their_rank(launch):
    job = launch("""
        import subprocess, sys
        import probe, syncvar as sv
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        probe.note("child", child=child.pid)
        assert sv.all_reduce(1) == 2
    """)
    assert job.wait() == 0, str(job)
    await_true(
        lambda: [state(event["child"]) for event in job.events("child")] == ["", ""],
        60,
        "the end of both",
    )
