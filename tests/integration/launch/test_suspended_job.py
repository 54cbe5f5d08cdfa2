"""Ctrl-Z and fg: F16. All ranks stop with the launcher, all go on with it, and nobody is blamed for the time between."""

import os
import signal
import sys
import time

import pytest

from tests.support.launching import await_true, state
from tests.support.paths import PROFILE

SHELL = """
import os, signal, sys, time

terminal, folder = sys.argv[1:3]
os.setsid()
os.close(os.open(terminal, os.O_RDWR))  # it controls this session from now on
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
here = os.open(terminal, os.O_RDWR)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(here, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    for number in range(3):
        os.dup2(here, number)
    os.execv(sys.argv[3], sys.argv[3:])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    os.tcsetpgrp(here, os.getpgrp())
    with open(os.path.join(folder, "stopped.part"), "w") as file:
        file.write(f"{job} {os.WSTOPSIG(status)}")
    os.rename(os.path.join(folder, "stopped.part"), os.path.join(folder, "stopped"))
    while not os.path.exists(os.path.join(folder, "fg")):
        time.sleep(0.01)
    os.tcsetpgrp(here, job)
    os.killpg(job, signal.SIGCONT)
"""

SCRIPT = """
import subprocess, sys
import probe, syncvar as sv

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], process_group=0)
sv.all_reduce(1)
probe.note("ready", child=child.pid)
if sys.argv[1] == "computing" or probe.RANK == 1:
    probe.gate("go", 60)
assert sv.all_reduce(1) == 2
probe.note("done")
"""


class Terminal:
    """A terminal with somebody at it who reads."""

    def __init__(self, folder):
        self.folder = folder
        self.end, terminal = os.openpty()
        self.name = os.ttyname(terminal)
        os.close(terminal)
        os.set_blocking(self.end, False)
        (folder / "shell.py").write_text(SHELL)
        self.text = b""

    def prefix(self):
        return (sys.executable, str(self.folder / "shell.py"), self.name, str(self.folder))

    def read(self):
        try:
            while data := os.read(self.end, 65536):
                self.text += data
        except OSError:  # nothing now, or nobody there
            pass
        return self.text


@pytest.fixture
def terminal(tmp_path):
    one = Terminal(tmp_path)
    yield one
    os.close(one.end)


def stopped(job, terminal):
    """Press Ctrl-Z when all are ready; return the launcher, the signal that stopped it, and all that must stop with it."""
    ready = job.await_events("ready", 2)
    os.write(terminal.end, b"\x1a")
    place = terminal.folder / "stopped"
    await_true(place.exists, what="a stopped job")
    launcher, number = map(int, place.read_text().split())
    everybody = [*(event["pid"] for event in ready), *(event["child"] for event in ready)]
    assert state(launcher) == "T"
    await_true(
        lambda: {state(pid) for pid in everybody} == {"T"}, what="all stopped"
    )  # who is on a core stops a moment later
    return launcher, number, everybody


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("waiting", "fork"),
        pytest.param("computing", "fork", marks=pytest.mark.slow),
        pytest.param("waiting", "spawn", marks=pytest.mark.slow),
    ],
)
def test_f16_stopped_and_continued(launch, terminal, phase, how):
    job = launch(
        SCRIPT,
        workers=2,
        arguments=[phase],
        prefix=terminal.prefix(),
        options=("--start-method", how),
        env={"SYNCVAR_LOST_AFTER_S": "4"},
    )
    _, number, everybody = stopped(job, terminal)
    assert number == signal.SIGTSTP
    time.sleep(5.0)  # lost_after_s is 4
    assert {state(pid) for pid in everybody} == {"T"}
    (terminal.folder / "fg").touch()
    await_true(lambda: "T" not in {state(pid) for pid in everybody}, what="all going on")
    job.open_gate("go")
    assert job.wait() == 0, f"{job}\n{terminal.read().decode()}"
    assert len(job.events("done")) == 2
    text = terminal.read().decode()
    assert "suspect" not in text, text
    assert "lost" not in text, text


def test_f16_told_to_end_while_it_is_stopped(launch, terminal):
    job = launch(
        SCRIPT,
        workers=2,
        arguments=["waiting"],
        prefix=terminal.prefix(),
        options=("--start-method", "fork"),
    )
    launcher, _, everybody = stopped(job, terminal)
    os.kill(launcher, signal.SIGTERM)
    (terminal.folder / "fg").touch()  # a shell continues what it ends
    assert job.wait() == 143, f"{job}\n{terminal.read().decode()}"
    await_true(lambda: not any(map(state, everybody)), what="the end of all processes")


def test_f16_killed_while_it_is_stopped(launch, terminal, nothing_left_behind):
    job = launch(
        SCRIPT,
        workers=2,
        arguments=["waiting"],
        prefix=terminal.prefix(),
        options=("--start-method", "fork"),
    )
    launcher, _, _ = stopped(job, terminal)
    os.kill(launcher, signal.SIGKILL)
    (terminal.folder / "fg").touch()
    job.process.wait(120)
    await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of all processes")


def test_f16_without_a_shell_to_continue_it_nothing_stops(launch):
    """In a session of its own nobody could say fg; the system does not stop the launcher there, and it stops no rank."""
    job = launch(SCRIPT, workers=2, arguments=["computing"], prefix=("setsid",), config=PROFILE)
    job.await_events("ready", 2)
    job.send(signal.SIGTSTP)
    job.open_gate("go")
    assert job.wait() == 0, str(job)


@pytest.mark.slow
def test_f16_ignored_from_the_start_stays_ignored(launch):
    job = launch(
        SCRIPT,
        workers=2,
        arguments=["computing"],
        prefix=("sh", "-c", 'trap "" TSTP; exec "$@"', "sh"),
    )
    ready = job.await_events("ready", 2)
    job.send(signal.SIGTSTP)
    job.open_gate("go")
    assert job.wait() == 0, str(job)
    assert len(ready) == 2
