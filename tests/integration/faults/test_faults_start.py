"""A job that cannot start as it should, or starts in an odd place: ranks that differ (F34), ranks claimed twice (F35), clocks that jump (F37), ports that
are taken (F38), runtime directories that cannot be used (F39), a hangup (F15), two jobs with one folder of checkpoints (F49),
and a failure while ranks meet again (F60).
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.fault_table import bound_s
from tests.support.launching import PATIENT, await_true, check_bound, free_ports, last_exception

# -- F34 -------------------------------------------------------------------------------------------

DIFFER = """
import os, sys
import probe, syncvar as sv

if probe.RANK == 2:
    sv.__version__ = "9.9\\x1b[2J"
    os.environ["SYNCVAR_CHECK_EVERY"] = "7"
probe.note("differs")
try:
    sv.init()
except sv.HandshakeError as error:
    probe.raised(error)
    raise
"""


def test_f34_ranks_that_differ_in_what_all_must_have_alike(launch):
    job = launch(DIFFER, workers=3, options=["--fake-hosts", "3", "--max-restarts", "1"])
    assert job.wait() == 76, str(job)
    last, events = last_exception(job, {0, 1, 2})
    check_bound(
        "F34-differ", last - max(event["at"] for event in job.events("differs")), bound_s("F34")
    )
    for event in events.values():
        assert event["text"].splitlines()[1:3] == [
            "  syncvar: '0.1.0' (ranks 0, 1), '9.9\\x1b[2J' (rank 2)",
            "  check_every: 100 (ranks 0, 1), 7 (rank 2)",
        ]
    assert "check_every: 100 (ranks 0, 1), 7 (rank 2)" in job.report, str(job)
    assert "would come again" in job.report, "a restart changes nothing"


# -- F35 -------------------------------------------------------------------------------------------

CLAIM = """
import os, subprocess, sys
import probe, syncvar as sv

sv.all_reduce(1)
if probe.RANK == 0:
    claims = {"again": {}, "twice": {"SYNCVAR_RANK": "1", "SYNCVAR_LOCAL_RANK": "1"}, "too many": {"SYNCVAR_RANK": "2", "SYNCVAR_LOCAL_RANK": "2"}}
    line = [sys.executable, "-c", "import syncvar as sv; sv.init()"]
    strangers = {name: value for name, value in os.environ.items() if name != "SYNCVAR_PROCESS"}  # which only children of a rank have
    begun = {name: subprocess.Popen(line, env={**strangers, **more}, stderr=subprocess.PIPE, text=True) for name, more in claims.items()}
    for name, process in begun.items():
        _, text = process.communicate(timeout=120)
        probe.note("claimed", how=name, code=process.returncode, text=text)
assert sv.all_reduce(1, timeout=60) == 2
"""


def test_f35_a_process_that_claims_a_rank_is_refused_and_the_job_goes_on(launch):
    job = launch(CLAIM, workers=2)
    assert job.wait() == 0, str(job)
    claimed = {event["how"]: event for event in job.events("claimed")}
    assert set(claimed) == {"again", "twice", "too many"}, str(job)
    for how, rank in (("again", 0), ("twice", 1)):
        assert "RendezvousError" in claimed[how]["text"], str(job)
        assert f"rank {rank}" in claimed[how]["text"], str(job)
        assert "taken" in claimed[how]["text"], str(job)
    assert "ConfigError" in claimed["too many"]["text"], str(job)
    assert all(event["code"] != 0 for event in claimed.values()), str(job)


# -- F37 -------------------------------------------------------------------------------------------

JUMPING = """
import os, random, time

_draw = random.Random(os.getpid())
_plain, _plain_ns = time.time, time.time_ns
time.time = lambda: _plain() + _draw.choice((-3600.0, -300.0, 0.0, 3600.0))
time.time_ns = lambda: _plain_ns() + int(_draw.choice((-3600.0, -300.0, 0.0, 3600.0)) * 1e9)
"""

PHASES = """
import time
import numpy as np
import probe, syncvar as sv

assert any(abs(time.time() - time.time()) > 100 for _ in range(50)), "the clock jumps"
sv.init()  # R
for _ in range(50):
    np.ones(1000).sum()  # C
    assert sv.all_reduce(np.ones(1000))[0] == sv.world_size()  # X
checkpoint = sv.Checkpoint(n=1, own=sv.Variable(np.ones(100), name="own", synchronization="NONE"))
with sv.CheckpointManager(checkpoint, "checkpoints", keep=2) as manager:  # K
    for step in range(2):
        checkpoint.n = step
        manager.save(step)
    assert manager.restore_latest().endswith("step-0000000001")
assert checkpoint.n == 1
probe.note("ready")
if probe.RANK == 1 and probe.gate("end") is None:
    raise ValueError("planted failure")
try:
    sv.all_reduce(np.ones(1000))
except sv.SyncvarError as error:
    probe.raised(error)
    raise
"""


def test_f37_a_wall_clock_that_jumps_changes_nothing(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    job = launch(PHASES, workers=2, env={"PYTHONPATH": str(tmp_path), **PATIENT})
    job.await_events("ready", 2, limit_s=120)
    assert job.report.strip() == "", str(job)
    job.open_gate("end")
    assert job.wait() == 1, str(job)
    assert "planted failure" in job.report, str(job)
    assert last_exception(job, [0])[1][0]["error"] == "PeerLost", str(job)
    after = float(job.report.split(" after ")[1].split(" s")[0])
    assert 0 < after < 120, "durations are those of another clock"


# -- F38 -------------------------------------------------------------------------------------------

ELSEWHERE = "import syncvar as sv\nsv.init()\nassert sv.all_reduce(1) == 2"


def test_f38_a_port_that_is_taken_is_named(tmp_path):
    key = secrets.token_hex(32)
    port = free_ports()
    with socket.create_server(("127.0.0.1", port)):
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("SYNCVAR_")
        } | {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port - 1),
            "SYNCVAR_KEY": key,
            "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "5",
        }
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode != 0
    assert (
        f"RendezvousError: rank 0 cannot listen on tcp://127.0.0.1:{port}: Address already in use"
        in done.stderr
    ), done.stderr


def test_f38_thousands_of_ports_in_time_wait(launch):
    """Where no port is given, any free one will do, and none has to be free that was used before."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        for _ in range(3000):
            with socket.create_connection(server.getsockname()):
                server.accept()[
                    0
                ].close()  # closed here first: TIME_WAIT stays at the server's port
    job = launch(ELSEWHERE, workers=2, options=["--fake-hosts", "2"])
    assert job.wait() == 0, str(job)


# -- F39 -------------------------------------------------------------------------------------------


def namespace():
    """Return the start of a command that has mounts of its own, or None where nobody may have them."""
    for flags in ("-m", "-rm"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["unshare", flags, "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
                check=True,
                capture_output=True,
                timeout=120,
            )
            return ("unshare", flags)
    return None


@pytest.mark.parametrize("how", ["unwritable", "full", "a file"])
def test_f39_a_runtime_directory_that_cannot_be_used(launch, runtime, how):
    env, prefix = {"XDG_RUNTIME_DIR": ""}, ()
    if how == "unwritable":
        env["TMPDIR"] = "/proc"  # nobody can make a folder there, not even root
    elif how == "a file":
        (runtime / f"syncvar-{os.getuid()}").write_text("")
        env["TMPDIR"] = str(runtime)
    else:
        own = namespace()
        if own is not None:
            env["TMPDIR"] = "/mnt"
            prefix = (
                *own,
                "sh",
                "-c",
                'mount -t tmpfs -o nr_inodes=1 tmpfs /mnt && exec "$@"',
                "sh",
            )
        else:
            env["TMPDIR"] = "/sys"  # no room for a folder there either
    began = time.monotonic()
    job = launch("import syncvar as sv; sv.init()", workers=2, env=env, prefix=prefix)
    assert job.wait() == 78, str(job)
    check_bound(f"F39-{how}", job.ended - began, bound_s("F39"))
    assert "the runtime directory" in job.err, str(job)
    assert "cannot be" in job.err, str(job)
    assert "set XDG_RUNTIME_DIR to a" in job.err, str(job)
    assert "Traceback" not in job.err, str(job)
    assert job.events() == [], "nothing was started"


# -- F15 -------------------------------------------------------------------------------------------

TALKING = """
import sys, time
import probe, syncvar as sv

sv.all_reduce(1)
probe.note("ready")
try:
    if "X" in sys.argv:
        if probe.RANK == 0:
            sv.all_reduce(1)  # rank 1 never comes
    until = time.monotonic() + 60
    while time.monotonic() < until:
        print("x" * 200, flush=True)
        time.sleep(0.01)
except BaseException as error:
    probe.note("ended", how=type(error).__name__)
    raise
"""


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("HUP", "X"),
        ("EPIPE", "C"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("HUP", "C"), ("EPIPE", "X"))),
    ],
)
def test_f15_the_terminal_or_the_reader_is_gone(launch, tmp_path, phase, how):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    prefix = () if how == "HUP" else ("sh", "-c", f'exec "$@" > {pipe}', "sh")
    job = launch(
        TALKING, workers=2, arguments=[phase], prefix=prefix, env={"SYNCVAR_TERM_GRACE_S": "30"}
    )
    if how == "HUP":
        job.await_events("ready", 2)
        gone = job.send(signal.SIGHUP)
    else:
        reader = os.open(pipe, os.O_RDONLY)
        try:
            job.await_events("ready", 2)
            os.read(reader, 100)
        finally:
            gone = time.monotonic()
            os.close(reader)
    assert job.wait() == {"HUP": 129, "EPIPE": 141}[how], str(job)
    check_bound(f"F15-{how}-{phase}", job.ended - gone, bound_s("F15"))
    assert {event["rank"] for event in job.events("ended")} == {0, 1}, str(job)
    assert "Traceback" not in job.err, str(job)


# -- F49 -------------------------------------------------------------------------------------------

SAVING = """
import sys
import probe, syncvar as sv

with sv.CheckpointManager(sv.Checkpoint(n=1), sys.argv[1]) as manager:
    manager.save(int(sys.argv[2]))
    probe.note("holds")
    probe.gate("go")
    manager.save(int(sys.argv[2]) + 1)
"""


@pytest.mark.slow
def test_f49_a_second_job_is_refused_a_folder_that_is_in_use(launch, tmp_path):
    folder = tmp_path / "checkpoints"
    first = launch(SAVING, workers=2, arguments=[str(folder), "1"])
    first.await_events("holds", 2)
    began = time.monotonic()
    second = launch(SAVING, workers=2, arguments=[str(folder), "7"])
    assert second.wait() == 74, str(second)
    assert "is in use: process " in second.report, str(second)
    assert "Two jobs cannot write the same folder" in second.report, str(second)
    assert second.ended - began < 30
    first.open_gate("go")
    assert first.wait() == 0, str(first)
    assert sorted(path.name for path in folder.iterdir()) == ["step-0000000001", "step-0000000002"]


# -- F60 -------------------------------------------------------------------------------------------

AGAIN = """
import os, signal, sys, time
import probe

restarts = int(os.environ["SYNCVAR_RESTARTS"])
probe.note("starts", restarts=restarts)
import syncvar as sv

if restarts == 1 and probe.RANK == 1:
    probe.gate("waiting-0")
    probe.gate("waiting-2")
    time.sleep(0.1)  # the others are in the roll call
    probe.note("dies", restarts=restarts)
    os.kill(os.getpid(), signal.SIGKILL)
if restarts == 1:
    probe.open_gate(f"waiting-{probe.RANK}")
try:
    sv.init()
    assert sv.all_reduce(1) == 3
    if restarts == 0 and probe.RANK == 2:
        probe.note("dies", restarts=restarts)
        os.kill(os.getpid(), signal.SIGKILL)
    sv.barrier()
except Exception as error:
    probe.note("told", restarts=restarts, error=type(error).__name__, lost=getattr(error, "rank", -1))
    raise
probe.note("final")
"""


@pytest.mark.parametrize("most", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_f60_a_rank_is_killed_while_the_ranks_meet_again(launch, most, nothing_left_behind):
    job = launch(AGAIN, workers=3, options=["--max-restarts", str(most)])
    assert job.wait(120) == (0 if most == 2 else 137), str(job)
    dies = {event["restarts"]: event for event in job.events("dies")}
    assert set(dies) == {0, 1}, str(job)
    told = [event for event in job.events("told") if event["restarts"] == 1]
    assert {event["rank"] for event in told} == {0, 2}, str(job)
    assert {(event["error"], event["lost"]) for event in told} == {("PeerLost", 1)}, str(job)
    check_bound("F60", max(event["at"] for event in told) - dies[1]["at"], bound_s("F60"))
    assert {event["restarts"] for event in job.events("starts")} == set(range(most + 1)), str(job)
    assert len(job.events("final")) == (3 if most == 2 else 0), str(job)
    assert f"syncvar: started again {most} time" in job.err, str(job)
    if most == 1:
        assert "not started again: there have been 1 of 1 restarts" in job.err, str(job)
        assert (
            "rank 1 on" in job.report.split("not started again")[0].rsplit("syncvar: rank", 1)[-1]
            or "syncvar: rank 1 on" in job.report
        ), str(job)
    await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of all processes")
