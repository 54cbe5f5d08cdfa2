"""Nobody reads what the launcher writes: F03, F13, F14, F55 and the time limit with a full pipe, a stalled terminal, a full
standard error. What a reader takes late is whole and in order.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import pytest

from tests.support.launching import await_true, check_bound, state

PATIENCE_S = 1.0  # half of the grace of the test profile

FULL = """
import os, select, signal, sys, time
import probe, syncvar as sv

stream, how = int(sys.argv[1]), sys.argv[2]
if how == "stubborn":
    signal.signal(signal.SIGTERM, lambda *_: probe.note("ignored"))
sv.all_reduce(1)
try:
    if probe.RANK == 0:
        room = select.poll()
        room.register(stream, select.POLLOUT)
        while room.poll(300):
            os.write(stream, b"x" * 4095 + b"\\n")
        probe.note("full")
        while True:
            os.write(stream, b"x" * 4095 + b"\\n")
    probe.note("quiet")
    if probe.RANK == 2:
        probe.gate("never", 60)
    if how != "stubborn":
        sv.all_reduce(1)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.05)
except BaseException as error:
    probe.raised(error)
    raise
finally:
    probe.note("cleaned")
"""


@contextlib.contextmanager
def unread(kind, folder):
    """Give the redirections of a shell for a launcher whose output nobody reads, and the end that would read it."""
    if kind == "terminal":
        reader, terminal = os.openpty()
        path, redirections = os.ttyname(terminal), '>"$0" 2>&1'
        os.close(terminal)
    else:
        path = folder / f"unread-{kind}"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        redirections = '>"$0"' if kind == "pipe" else '2>"$0"'
    try:
        yield ("sh", "-c", f'exec "$@" {redirections}', str(path)), reader
    finally:
        os.close(reader)


def start(launch, prefix, kind, how="plain", workers=2, options=(), env=None):
    """Start a job and wait until rank 0 cannot write any more."""
    arguments = ["2" if kind == "error" else "1", how]
    options = ("--start-method", "fork", *options)
    job = launch(
        FULL, workers=workers, arguments=arguments, options=options, prefix=prefix, env=env
    )
    job.await_events("full", rank=0)
    job.await_events("quiet", workers - 1)
    return job


def kinds(*in_the_default_run):
    return [
        kind if kind in in_the_default_run else pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("pipe", "terminal", "error")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_f03_rank_killed_while_nobody_reads(launch, tmp_path, kind):
    with unread(kind, tmp_path) as (prefix, _):
        job = start(launch, prefix, kind, workers=3)
        killed = job.kill_rank(2)
        (lost,) = job.await_events("raised", rank=1)
        assert (lost["error"], lost["lost"]) == ("PeerLost", 2), str(job)
        check_bound(f"F03-{kind} full", lost["at"] - killed, 0.5)
        assert job.wait() == 137, str(job)
        check_bound(f"F03-{kind} full, end", job.ended - killed, 0.5 + 2.0)
        assert {event["rank"] for event in job.events("cleaned")} == {0, 1}, (
            "rank 0 ends in order, once its output is dropped"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [(kind, number) for kind in ("pipe", "terminal", "error") for number in (15, 2)],
)
def test_f13_launcher_told_to_end_while_nobody_reads(launch, tmp_path, kind, number):
    with unread(kind, tmp_path) as (prefix, _):
        # Rank 0 ends when half of the grace is over, and needs some of the other half.
        job = start(launch, prefix, kind, env={"SYNCVAR_TERM_GRACE_S": "8"})
        sent = job.send(number)
        assert job.wait() == 128 + number, str(job)
        check_bound(f"F13-{signal.Signals(number).name}-{kind} full", job.ended - sent, 3.0)
        assert {event["rank"] for event in job.events("cleaned")} == {0, 1}, str(job)


@pytest.mark.parametrize("kind", kinds("terminal"))
def test_f14_second_interrupt_while_nobody_reads(launch, tmp_path, kind):
    with unread(kind, tmp_path) as (prefix, _):
        job = start(launch, prefix, kind, "stubborn", options=("--grace", "60"))
        job.send(signal.SIGINT)
        job.await_events("ignored", 2)
        assert job.process.poll() is None
        sent = job.send(signal.SIGINT)
        assert job.wait() == 130, str(job)
        check_bound(f"F14-{kind} full", job.ended - sent, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds("error"))
def test_the_time_limit_passes_while_nobody_reads(launch, tmp_path, kind):
    with unread(kind, tmp_path) as (prefix, _):
        job = start(launch, prefix, kind, options=("--timeout", "4"))
        assert job.wait() == 124, str(job)
        check_bound(f"time limit-{kind} full", job.ended - job.began, 4.0 + PATIENCE_S + 1.0)


@pytest.mark.parametrize("kind", kinds())
def test_f12_launcher_killed_while_nobody_reads(launch, tmp_path, kind, nothing_left_behind):
    with unread(kind, tmp_path) as (prefix, _):
        job = start(launch, prefix, kind)
        killed = job.send(signal.SIGKILL)
        job.process.wait(120)
        await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of all processes")
        check_bound(f"F12-{kind} full", time.monotonic() - killed, 2.0)


MANY = """
import sys
import probe, syncvar as sv

sv.all_reduce(1)
probe.note("begins")
for number in range(int(sys.argv[1])):
    sys.stdout.write("%07d %s\\n" % (number, "x" * 91))
probe.note("written")
"""
MANY_LINES = 30_000  # 3 MB of each rank, far more than all queues and pipes hold


def test_f55_a_late_reader_gets_every_line_in_order_and_the_launcher_stays_small(launch, tmp_path):
    with unread("pipe", tmp_path) as (prefix, reader):
        job = launch(
            MANY,
            workers=2,
            arguments=[str(MANY_LINES)],
            prefix=prefix,
            options=("--start-method", "fork"),
        )
        job.await_events("begins", 2)
        pipe_full(reader)
        time.sleep(0.5)  # longer, and the launcher would read on
        assert not job.events("written"), "the ranks wait in print"
        most = int(
            Path(f"/proc/{job.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        )
        assert most < 64 << 10, f"the launcher has used {most} KiB"
        seen = [0, 0]
        for line in lines_of(reader):
            rank = line[1] - ord("0")
            assert line == b"[%d] %07d %s" % (rank, seen[rank], b"x" * 91)
            seen[rank] += 1
        assert seen == [MANY_LINES] * 2
        assert job.wait() == 0, str(job)


FEW = """
import probe, syncvar as sv

sv.all_reduce(1)
print("x" * 99 + "\\n" + "y" * 400_000)
"""


STOPS_AFTER_A_POLL = """
import os, signal, sys

if "syncvar_launcher" in sys.orig_argv:
    import zmq

    class Poller(zmq.Poller):
        def poll(self, *arguments):
            ready = super().poll(*arguments)
            if os.path.exists("gate-stop"):
                os.unlink("gate-stop")
                os.kill(os.getpid(), signal.SIGSTOP)
            return ready

    zmq.Poller = Poller
"""


@pytest.mark.parametrize(
    "stops", [pytest.param("anywhere", marks=pytest.mark.slow), "after a poll"]
)
def test_told_to_end_just_when_the_last_rank_ends_the_launcher_waits_for_no_reader(
    launch, tmp_path, stops
):
    (tmp_path / "sitecustomize.py").write_text(STOPS_AFTER_A_POLL)
    with unread("pipe", tmp_path) as (prefix, _):
        job = launch(
            FEW + "probe.note('written')\nprobe.gate('end')",
            workers=1,
            prefix=prefix,
            env={"PYTHONPATH": str(tmp_path)},
        )
        job.await_events("written")
        if stops == "anywhere":
            job.send(signal.SIGSTOP)
        else:
            job.open_gate("stop")
        await_true(lambda: state(job.process.pid) == "T", what="the launcher, to stop")
        job.open_gate("end")
        await_true(lambda: not state(job.pids()[0]), what="the end of the rank")
        job.send(signal.SIGTERM)
        sent = job.send(signal.SIGCONT)  # now it learns of both at once
        assert job.wait() == 143, str(job)
        check_bound("F13-TERM with the ranks' end", job.ended - sent, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["read", "TERM", "time limit"])
def test_ranks_that_have_ended_in_order_wait_for_the_reader_until_somebody_ends_it(
    launch, tmp_path, end, nothing_left_behind
):
    with unread("pipe", tmp_path) as (prefix, reader):
        options = ("--start-method", "fork", *(("--timeout", "3") if end == "time limit" else ()))
        job = launch(FEW, workers=1, prefix=prefix, options=options)
        pids = await_true(job.pids)
        await_true(lambda: not Path(f"/proc/{pids[0]}").exists(), what="the end of the rank")
        time.sleep(PATIENCE_S + 0.5 if end == "read" else 0.0)
        if end == "read":
            assert job.process.poll() is None, "a pager may wait for its user"
            assert (
                b"".join(line.partition(b" ")[2] for line in lines_of(reader))
                == b"x" * 99 + b"y" * 400_000
            )
        elif end == "TERM":
            sent = job.send(signal.SIGTERM)
        assert job.wait() == {"read": 0, "TERM": 143, "time limit": 124}[end], str(job)
        if end == "TERM":
            check_bound("F13-TERM after the ranks' end", job.ended - sent, 0.5)


@pytest.mark.slow
def test_a_reader_that_comes_back_while_the_job_ends_gets_the_report(launch, tmp_path):
    with unread("terminal", tmp_path) as (prefix, reader):
        job = start(launch, prefix, "terminal", options=("--grace", "60"))
        job.kill_rank(1)
        job.await_events("raised", 0)
        text = b"\n".join(lines_of(reader))
        assert job.wait() == 137, str(job)
        assert b"rank 1 on" in text
        assert b"was killed by signal 9" in text


def test_a_folder_of_logs_that_holds_a_pipe_blocks_nobody(launch, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    os.mkfifo(logs / "rank-0.out")
    job = launch("print('x' * 99)", workers=2, options=["--log-dir", str(logs)])
    assert job.wait() == 74, str(job)  # a file is lost
    assert "rank-0.out" in job.report, str(job)
    assert (logs / "rank-1.out").read_text() == "x" * 99 + "\n"


def pipe_full(reader):
    """Wait until a pipe takes nothing more: its pages may be in use, and not all of them full."""

    def is_full():
        end = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return not select.select([], [end], [], 0)[1]
        finally:
            os.close(end)

    await_true(is_full, what="a full pipe")


def lines_of(reader):
    """Read to the end; each read waits for at most 20 s."""
    rest = b""
    while True:
        assert select.select([reader], [], [], 20)[0], "nothing comes any more"
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # the other side of a terminal is closed
            data = b""
        if not data:
            break
        *lines, rest = (rest + data.replace(b"\r\n", b"\n")).split(b"\n")
        yield from lines
    if rest:
        yield rest
