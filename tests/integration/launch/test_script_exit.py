"""How a script ends and what the launcher makes of it: exit codes, tracebacks, what is written where."""

import re
import signal

import pytest

from tests.support.launching import PATIENT, await_true, check_bound, state

CASES = {
    # name: (script, exit code, words of the report or None where there is none)
    "end": ("import syncvar as sv; sv.all_reduce(1)", 0, None),
    "end without syncvar": ("print('hello')", 0, None),
    "typo": (
        "import syncvar as sv\nsv.al_reduce(1)",
        1,
        "AttributeError: module 'syncvar' has no attribute 'al_reduce'",
    ),
    "name": ("pritn(1)", 1, "NameError: name 'pritn' is not defined"),
    "missing module": (
        "import no_such_module",
        1,
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "syntax": ("import os\nif True print(1)\n", 1, "SyntaxError"),
    "keyboard": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "exit 3": ("import sys; sys.exit(3)", 3, "exited with status 3"),
    "exit 256": ("import sys; sys.exit(256)", 1, "sys.exit(256): an exit code has 8 bits"),
    "exit 0": ("import sys; sys.exit(0)", 0, None),
    "exit none": ("import sys; sys.exit()", 0, None),
    "exit text": ("import sys; sys.exit('out of luck')", 1, "out of luck"),
    "exit in one rank": (
        "import sys, syncvar as sv\nif sv.rank() == 1: sys.exit(4)\nsv.all_reduce(1)",
        4,
        "rank 1 on",
    ),
    "abort": ("import os; os.abort()", 128 + signal.SIGABRT, "SIGABRT"),
    "segmentation": ("import ctypes; ctypes.string_at(0)", 128 + signal.SIGSEGV, "SIGSEGV"),
    "own error": (
        "import syncvar as sv; sv.all_reduce(1, 'sun')",
        1,
        "ConfigError: op must be one of",
    ),
    "mismatch": (
        "import syncvar as sv; sv.all_reduce(1, 'max' if sv.rank() else 'sum')",
        76,
        "MismatchError",
    ),
    "unicode": (
        "raise ValueError('\u00e4\u20ac\U0001f600 \\x1b[31m')",
        1,
        "ValueError: \u00e4\u20ac\U0001f600 \\x1b[31m",
    ),
}


FORKED = ("end", "name", "syntax", "keyboard", "exit 3", "exit none", "exit text", "segmentation")
ENDS = [
    (name, how) for how in ("spawn", "fork") for name in CASES if how == "spawn" or name in FORKED
]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(*end, marks=pytest.mark.slow if end[0] in FORKED and end[1] == "spawn" else ())
        for end in ENDS
    ],
    ids=[f"{name.replace(' ', '-')}-{how}" for name, how in ENDS],
)
def test_a_script_that_ends(launch, name, how):
    script, code, words = CASES[name]
    job = launch(script, workers=2, start=how, env=PATIENT)
    assert job.wait() == code, str(job)
    if words is None:
        assert job.report.strip() == "", str(job)
        return
    assert words in job.report, str(job)
    assert job.report.count("syncvar: rank ") == 1, f"one block for all ranks\n{job}"
    if "Error" in words:
        if how == "spawn":  # the others wait for a server that imports NumPy
            check_bound(f"traceback of {name}", job.ended - job.began, 2.0)
        assert "worker_main.py" not in job.err, f"frames of ours\n{job}"
        assert "fork_server.py" not in job.err, f"frames of ours\n{job}"
        assert "runpy" not in job.err, f"frames of ours\n{job}"


IN_OUR_CODE = """
import sys
import probe
import syncvar as sv

strategy = sv.MirroredStrategy()

def make(context):
    print("told by the script", file=sys.stderr)
    sv.barrier()
    probe.note("out")
    probe.gate("raise")  # else a rank that is still in the barrier hears of the first one's end instead
    return 1 + "a"

strategy.distribute_datasets_from_function(make)
"""


def test_an_error_of_all_ranks_is_told_once_without_our_frames(launch):
    job = launch(IN_OUR_CODE, workers=8, options=["--log-dir", "logs"])
    job.await_events("out", 8)
    job.open_gate("raise")
    assert job.wait() == 1, str(job)
    lines = job.err.splitlines()
    assert sum("told by the script" in line for line in lines) == 8, (
        "what the script says itself is shown"
    )
    assert len(job.out.splitlines() + lines) - 8 <= 25, str(job)
    assert [line for line in lines if line.startswith("evidence: traceback")] == [
        "evidence: traceback of ranks 0-7"
    ], str(job)
    assert job.err.count("Traceback") == 1, str(job)
    assert job.err.count("unsupported operand") == 2, f"in the headline and in the traceback\n{job}"
    assert "others:" not in job.report, str(job)
    assert re.search(
        r"\n    \[\d+ frames of syncvar\]\n    File .*script\.py\", line 13, in make\n", job.err
    ), str(job)
    assert "syncvar/strategies/" not in job.err, str(job)
    for rank in range(8):
        text = (job.folder / "logs" / f"rank-{rank}.err").read_text()
        assert text.startswith("told by the script\nTraceback (most recent call last):\n"), text
        assert "syncvar/strategies/" in text, "the whole of it"
        assert text.endswith("TypeError: unsupported operand type(s) for +: 'int' and 'str'\n"), (
            text
        )


def test_a_rank_raises_its_own_error_though_another_rank_has_failed_before(launch):
    job = launch(
        """
        import probe
        import syncvar as sv

        strategy = sv.MirroredStrategy()

        def make(context):
            if sv.rank() == 1:
                raise ValueError("of rank 1")
            while True:
                try:
                    sv.barrier()
                except sv.PeerLost:
                    raise KeyError("of rank 0") from None
                except sv.MismatchError:
                    pass

        try:
            strategy.distribute_datasets_from_function(make)
        except BaseException as error:
            probe.note("own", error=type(error).__name__)
            raise
        """
    )
    assert job.wait() == 1, str(job)
    assert {event["rank"]: event["error"] for event in job.events("own")} == {
        0: "KeyError",
        1: "ValueError",
    }, str(job)


@pytest.mark.slow
def test_all_frames_are_shown_where_more_is_asked_for(launch):
    job = launch(IN_OUR_CODE, workers=2, options=["-v"])
    job.await_events("out", 2)
    job.open_gate("raise")
    assert job.wait() == 1, str(job)
    assert "syncvar/strategies/" in job.report, str(job)
    assert "frames of syncvar" not in job.err, str(job)
    assert job.err.count("Traceback") == 1, str(job)


def test_what_follows_from_an_error_is_told_in_its_block_alone(launch):
    job = launch(
        """
        import syncvar as sv
        sv.barrier()
        if sv.rank() == 1:
            raise ValueError("planted \\udc80")
        sv.barrier()
        """,
        workers=3,
    )
    assert job.wait() == 1, str(job)
    assert not [line for line in job.err.splitlines() if line.startswith("[")], str(job)
    assert "evidence: traceback of rank 1\n" in job.report, str(job)
    assert "  ValueError: planted \\udc80\n" in job.report, str(job)
    assert job.report.count("; then PeerLost\n") in (1, 2), str(job)


def test_an_error_before_an_interruption_is_told_with_it(launch):
    job = launch(
        """
        import time, probe
        if probe.RANK == 1:
            raise ValueError("planted")
        probe.note("there")
        time.sleep(60)
        """,
        env={"SYNCVAR_ABORT_GRACE_S": "30"},
    )
    job.await_events("there", 1)
    job.await_events("began", 2)
    await_true(lambda: not state(job.pids()[1]), what="the end of rank 1")
    job.send(signal.SIGINT)
    assert job.wait() == 130, str(job)
    assert "evidence: traceback of rank 1\n" in job.report, str(job)
    assert job.err.count("ValueError: planted") in (1, 2), str(job)
    assert "  ValueError: planted\n" in job.report, str(job)


def test_a_script_that_is_not_there(launch):
    job = launch(workers=2, target=["no_such_script.py"])
    assert job.wait() == 2, str(job)
    assert "there is no script no_such_script.py" in job.report, str(job)
    assert "Traceback" not in job.err, str(job)


def test_the_time_limit(launch):
    job = launch("import time; time.sleep(60)", options=["--timeout", "1"])
    assert job.wait() == 124, str(job)
    check_bound("--timeout 1", job.ended - job.began, 1.5)
    assert "time limit of 1 s" in job.report, str(job)


ANSWERS = """
import os, time
import probe, syncvar as sv

sv.init()
probe.note("there")
try:
    time.sleep(60)
except SystemExit:
    probe.note("told")
    if probe.RANK == 0:
        raise ValueError("while ending") from None
    os._exit(3)
"""


@pytest.mark.slow
def test_the_time_limit_is_named_whatever_ranks_answer(launch):
    job = launch(ANSWERS, options=["--timeout", "8"], env={"SYNCVAR_TERM_GRACE_S": "30"})
    assert job.wait() == 124, str(job)
    assert len(job.events("told")) == 2, str(job)
    first = job.report.split("\n")[0]
    assert re.match(r"syncvar: the job failed after (7|8|9|\d\d)\.", first), str(job)
    assert first.endswith(" s: the time limit of 8 s passed"), str(job)
    assert "evidence: traceback of rank 0\n" in job.report, str(job)
    assert "  ValueError: while ending\n" in job.report, str(job)


SLOW_TO_END = """
import builtins, os, sys, time
from pathlib import Path
import probe, syncvar as sv

class Slow:
    def __del__(self, sleep=time.sleep, where=probe.FOLDER + "/gate-ends", open=open):
        open(where, "w").close()
        sleep(30)

sv.init()
if probe.RANK == 1:
    builtins.kept = Slow()  # goes with the interpreter
    raise TypeError("planted")
probe.gate("ends")
while '"failed"' not in Path(sys.argv[1]).read_text():  # the launcher knows the first error
    time.sleep(0.005)
raise ValueError("another")
"""


def test_an_error_is_told_alone_though_the_signal_that_ends_the_job_comes_while_its_rank_ends(
    launch, tmp_path
):
    events = str(tmp_path / "events")
    job = launch(
        SLOW_TO_END,
        arguments=[events],
        options=["--events", events],
        env={"SYNCVAR_ABORT_GRACE_S": "0.2"},
    )
    assert job.wait() == 1, str(job)
    first = next(line for line in job.report.split("\n") if line.startswith("syncvar: rank "))
    assert first.startswith("syncvar: rank 1 on "), str(job)
    assert " exited with status 1 after " in first, str(job)
    assert first.endswith(": uncaught TypeError: planted"), str(job)
    assert "signal" not in job.report, str(job)


@pytest.mark.slow
def test_missing_ranks_are_named(launch):
    job = launch(
        """
        import time
        import probe, syncvar as sv
        if probe.RANK in (1, 2):
            time.sleep(60)
        probe.note("enter")
        try:
            sv.init()
        except Exception as error:
            probe.note("missing", missing=list(getattr(error, "missing", [])))
            probe.raised(error)
            raise
        """,
        workers=4,
        options=["--start-timeout", "5"],
        env={"SYNCVAR_MISSING_REPORT_S": "1"},
    )
    assert job.wait() == 69, str(job)
    raised = {event["rank"]: event for event in job.events("raised")}
    assert set(raised) == {0, 3}, str(job)
    for event in raised.values():
        assert event["error"] == "RendezvousError", str(job)
        assert "ranks 1, 2 did not join" in event["text"], str(job)
    assert all(event["missing"] == [1, 2] for event in job.events("missing")), str(job)
    calls = [line for line in job.report.split("\n") if "waiting for" in line]
    assert calls, f"each second\n{job}"
    assert re.search(r"ranks 1, 2 to join after \d s \(joined: 2 of 4\)", calls[-1]), str(job)
    check_bound(
        "rendezvous",
        max(e["at"] for e in raised.values()) - min(e["at"] for e in job.events("enter")),
        5.5,
    )


@pytest.mark.parametrize("who", ["before", "after"])
def test_a_rank_that_ends_without_joining(launch, who):
    job = launch(f"""
        import time
        import probe, syncvar as sv
        if probe.RANK == 0:
            time.sleep({0.4 if who == "before" else 0})
            sv.init()
        else:
            time.sleep({0.4 if who == "after" else 0})
    """)
    assert job.wait() == 69, str(job)
    assert "rank 1 finished without joining" in job.report, str(job)
    check_bound("rank that never joins", job.ended - job.began, 2.0)


@pytest.mark.parametrize("prefix", [(), ("nohup",)])
def test_a_hangup_ends_the_job_unless_it_was_ignored_from_the_start(launch, prefix):
    job = launch(
        "import probe\nprobe.note('there')\nprobe.gate('on')\nprint('still there')", prefix=prefix
    )
    job.await_events("there", 2)
    job.process.send_signal(signal.SIGHUP)
    if prefix:
        job.open_gate("on")
    code = job.wait()
    assert (code == 0) == bool(prefix), str(job)
    assert ("still there" in job.out) == bool(prefix), str(job)
