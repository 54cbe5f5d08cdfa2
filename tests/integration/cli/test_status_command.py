"""What the ranks do, as `syncvar status` and `syncvar top` show it, for real jobs."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from syncvar.cli.commands import main
from syncvar.cli.status import _TITLES, _aligned
from tests.support.launching import PATIENT, await_true

OFTEN = {**PATIENT, "SYNCVAR_OBSERVE_INTERVAL_S": "0.2"}

UNEQUAL = """
import os, time
import numpy as np
import probe, syncvar as sv

strategy = sv.MultiWorkerMirroredStrategy()
gate = os.path.join(probe.FOLDER, "gate-end")


def step():
    time.sleep(0.1 if probe.RANK == 2 else 0.005)
    return sv.all_reduce(np.full(100, os.path.exists(gate)), op="or")


sv.barrier()
probe.note("ready")
while not strategy.run(step)[0]:
    pass
"""

LATE = r"rank 2 on \S+ is late: each other rank waited for it \d+ % of the last \d+ s \(\d+ % of all waiting\)"


@pytest.fixture
def status(capsys, jobs_of_this_test):
    """Run a command in this process; return its exit code and what it prints."""

    def run(*arguments):
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        return code, capsys.readouterr().out

    return run


def answer_of(status, job):
    code, text = status("status", "--json", job.process.pid)
    return json.loads(text) if code == 0 else None


def test_a_slow_rank_is_seen_and_named(launch, status):
    job = launch(UNEQUAL, workers=3, env=OFTEN)
    job.await_events("ready", 3)

    def seen():
        answer = answer_of(status, job)
        waits = [rank["waits"] for rank in answer["ranks"]]
        are_late = all(max(one, key=one.get, default="") == "2" for one in waits[:2])
        have_steps = all(rank["steps_per_s"] > 0 for rank in answer["ranks"])
        return are_late and have_steps and answer["stragglers"] and answer

    answer = await_true(seen, what="the ranks wait for rank 2")
    assert answer["format"] == "syncvar status 1"
    first, _, slow = answer["ranks"]
    assert first["wait_share"] > slow["wait_share"]
    assert first["pid"] in job.pids().values()
    assert first["rss_bytes"] > 1 << 20
    assert first["calls"] > first["steps"] > 0
    assert first["call"].startswith("all_reduce(or, bool[100]) (call ")
    assert [one["rank"] for one in answer["stragglers"]] == [2]
    kinds = {one["call"]: one for one in answer["calls"]}
    assert kinds["all_reduce(or)"]["path"].startswith("shm")
    assert kinds["all_reduce(or)"]["bytes_per_s"] > 0
    code, text = status("status", job.process.pid)
    assert code == 0
    assert re.search(r"^rank +host +state +call +age +waits +for rank", text, re.MULTILINE), text
    assert re.search(r"^0 .* 2 \((\d+ %|now)\)", text, re.MULTILINE), text
    assert re.search(rf"^{LATE}$", text, re.MULTILINE), text
    code, once = status("top", job.process.pid)  # its output is no terminal
    assert (code, once.count("job ")) == (0, 1)
    await_true(lambda: re.search(f"^syncvar: {LATE}$", job.report, re.MULTILINE))
    job.open_gate("end")
    assert job.wait() == 0, str(job)
    assert len(re.findall(LATE, job.report)) == 1, "the console has it once"


def test_links_of_two_hosts_and_the_bytes_of_calls_between_them(launch, status):
    script = """
    import os, time
    import numpy as np
    import probe, syncvar as sv
    gate = os.path.join(probe.FOLDER, "gate-end")
    while not sv.all_reduce(np.full(1000, float(os.path.exists(gate))))[0]:
        time.sleep(0.01)
    """
    job = launch(script, workers=4, options=["--fake-hosts", "2"], env=OFTEN)

    def seen():
        answer = answer_of(status, job)
        is_seen = answer and answer["links"] and any(one["calls_per_s"] for one in answer["calls"])
        return is_seen and answer

    answer = await_true(seen, what="bytes go over links")
    assert {one["path"] for one in answer["links"]} == {"tcp"}
    assert {(one["rank"] < 2, one["peer"] < 2) for one in answer["links"]} == {
        (True, False),
        (False, True),
    }
    (calls,) = [one for one in answer["calls"] if one["call"] == "all_reduce(sum)"]
    assert calls["path"].startswith("hosts")
    assert calls["bytes_per_s"] / calls["calls_per_s"] == pytest.approx(8000), "of the array"
    job.open_gate("end")
    assert job.wait() == 0, str(job)


def test_a_narrow_terminal_keeps_the_ranks():
    row = "0|node1|waiting at train.py:8 in step|all_reduce(sum, float64[1000])|156 ms|66 %|1 (now)|2 %"
    row = [*row.split("|"), "35.1 MiB", "3.3", "25 kB", "-"]
    whole, narrow = _aligned([_TITLES, row]), _aligned([_TITLES, row], 80)
    assert all(title in whole[0] for title in _TITLES)
    assert max(map(len, narrow)) <= 80
    assert narrow[0].split() == ["rank", "host", "state", "call", "age", "waits", "for", "rank"]
    assert narrow[1].startswith("0     node1  waiting a")
    assert "all_reduce(sum" in narrow[1]


def test_a_stopped_rank_and_the_ranks_that_wait_for_it(launch, status):
    script = """
    import probe, syncvar as sv
    sv.barrier()
    probe.note("ready")
    if probe.RANK == 1:
        probe.gate("go")
    sv.barrier()
    """
    job = launch(script, workers=2, env={**PATIENT, "SYNCVAR_OBSERVE_INTERVAL_S": "0"})
    job.await_events("ready", 2)
    os.kill(job.pids()[1], signal.SIGSTOP)

    def seen():
        answer = answer_of(status, job)
        states = [rank["state"] for rank in answer["ranks"]]
        return states == ["waiting", "stopped"] and answer

    waiting, _ = await_true(seen, what="one waits and one is stopped")["ranks"]
    assert waiting["waits_for"] == [1]
    assert re.fullmatch(r"script\.py:\d+ in <module>", waiting["site"])
    assert waiting["call"] == "barrier (call 2)"
    assert waiting["is_in_call"]
    _, text = status("status", job.process.pid)
    assert re.search(
        r"^0 .* waiting at script\.py:\d+ in <module> .* 1 \(now\)", text, re.MULTILINE
    )
    assert re.search(r"^1 .* stopped ", text, re.MULTILINE), text
    os.kill(job.pids()[1], signal.SIGCONT)
    job.open_gate("go")
    assert job.wait() == 0, str(job)


@pytest.mark.slow
def test_top_renews_its_screen_until_the_job_ends(launch):
    job = launch(UNEQUAL, workers=3, env=OFTEN)
    job.await_events("ready", 3)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "syncvar", "top", "--interval", "0.5", str(job.process.pid)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    top = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environ, close_fds=True
    )
    os.close(follower)
    shown = b""

    def read_until(pattern):
        nonlocal shown
        until = time.monotonic() + 60
        while not re.search(pattern, shown):
            assert time.monotonic() < until, shown
            if select.select([leader], [], [], 0.1)[0]:
                try:
                    shown += os.read(leader, 65536)
                except OSError:  # its other end is closed
                    break

    try:
        read_until(rb"is late(.|\n)*is late")
        job.open_gate("end")
        assert job.wait() == 0, str(job)
        read_until(rb"the job has ended")
        assert top.wait(60) == 0
    finally:
        top.kill()
        top.wait()
        os.close(leader)
    assert b"\x1b[?1049l" in shown, "the screen from before is back"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["status"], "no job of yours is running"),
        (["top", "--interval", "0.1"], "--interval 0.1 is below 0.5 seconds"),
    ],
)
def test_wrong_questions(status, capsys, arguments, reason):
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err
