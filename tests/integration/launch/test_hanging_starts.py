"""A start that stands still says where, without `-v`, and ends at its own deadline: a start held in each of its phases."""

import os
import re
import signal

import pytest

from tests.support.launching import await_true

SHORT = {"SYNCVAR_MISSING_REPORT_S": "0.4", "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "6"}
STILL = r"the start has made no progress for \d+ s"
JOB = "import syncvar as sv\nprint(sv.all_reduce(1))"


@pytest.fixture
def held(tmp_path, launch):
    """Start a job in which the interpreter runs a text first, in each process whose command line has a word."""

    def start(word, text, script=JOB, limits=SHORT, **keywords):
        folder = tmp_path / "held"
        folder.mkdir()
        lines = [f"    {line}" for line in text.splitlines()]
        first = f"import os, signal, sys, time\nif {word!r} in sys.orig_argv:\n"
        (folder / "sitecustomize.py").write_text(first + "\n".join(lines) + "\n")
        return launch(script, env={"PYTHONPATH": str(folder), **limits}, **keywords)

    return start


def check_end(job, *words):
    assert job.wait() == 69, str(job)
    assert re.search(f"{STILL}:", job.report), str(job)
    for one in words:
        assert re.search(one, job.report), f"{one}:\n{job}"


@pytest.mark.slow
def test_the_process_that_ranks_are_forked_from_is_not_ready(held):
    job = held("syncvar.bootstrap.fork_server", "time.sleep(600)")
    server = r"the process that workers are forked from \(process \d+, state S\) has not imported NumPy and syncvar"
    check_end(
        job,
        rf"{STILL}: ranks 0, 1 have not reached their script \({server}\)",
        f"{STILL}, and is given up: ranks 0, 1",
    )


STOPS = "own = os.fork\ndef fork():\n    os.kill(os.getpid(), signal.SIGSTOP)\n    return own()\nos.fork = fork"


@pytest.mark.slow
def test_the_process_that_ranks_are_forked_from_stops_while_it_forks(held):
    job = held("syncvar.bootstrap.fork_server", STOPS)
    check_end(
        job,
        rf"{STILL}: the launcher starts rank 0 \(",
        r"\(process \d+, state T\) has not answered for \d+ s",
    )


def test_a_start_that_waits_for_a_fork_ends_on_a_signal(held):
    job = held("syncvar.bootstrap.fork_server", STOPS, limits={"SYNCVAR_MISSING_REPORT_S": "0.5"})
    await_true(lambda: "the launcher starts rank 0" in job.report, what="the line of the start")
    job.send(signal.SIGTERM)
    assert job.wait() == 143, str(job)
    assert "interrupted by SIGTERM" in job.report


@pytest.mark.slow
def test_a_forked_rank_does_not_come_to_lead_its_session(held):
    job = held("syncvar.bootstrap.fork_server", "os.setsid = lambda: time.sleep(600)")
    check_end(
        job,
        rf"{STILL}: the launcher releases the ranks that the process",
        r"has not answered for \d+ s",
    )


@pytest.mark.slow
def test_a_rank_does_not_reach_python(held):
    job = held(
        "syncvar.bootstrap.worker_main",
        "if os.environ['SYNCVAR_RANK'] == '1': time.sleep(600)",
        start="spawn",
    )
    words = (
        r"rank 1 has not reached its script \(rank 1: process \d+ \(state S\)\)(; rank 0 waits)?"
    )
    check_end(
        job,
        f"{STILL}: {words}",
        r"rank 1: process \d+ \(state S\), has not reached its script|and is given up: rank 1",
    )


@pytest.mark.slow
def test_a_server_does_not_reach_python(held):
    job = held(
        "syncvar.parameter_server.server_main",
        "time.sleep(600)",
        script="import time; time.sleep(60)",
        options=("--servers", "1"),
    )
    check_end(
        job, f"{STILL}: server 0 has not reached its script", f"{STILL}, and is given up: server 0"
    )


@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_named_with_what_it_does(launch):
    script = """
        import os, time
        import syncvar as sv
        if os.environ["SYNCVAR_RANK"] == "1":
            time.sleep(600)  # here
        sv.barrier()
    """
    job = launch(script, env=SHORT)
    assert job.wait() == 69, str(job)
    doing = r"rank 1: process \d+ \(state S\), in user code, script\.py:5"
    assert re.search(
        rf"waiting for rank 1 to join after \d s \(joined: 1 of 2\); {doing}", job.report
    ), str(job)
    assert re.search(rf"rank 1 did not join within 6 s .*; {doing}", job.report), str(job)


@pytest.fixture
def stuck(tmp_path, launch):
    """Start jobs whose launcher stands still while it reads its options: of a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "settings")
    return lambda limits: launch(JOB, config=tmp_path / "settings", env=limits)


@pytest.mark.slow
def test_a_launcher_that_reads_its_options_for_ever_says_so_and_ends(stuck):
    job = stuck(SHORT)
    assert job.wait() == 69, str(job)
    assert re.search(rf"{STILL}: the launcher reads its options \(\w+\.py:\d+\)\n", job.err), str(
        job
    )
    assert re.search(rf"{STILL}, and is given up: the launcher reads its options", job.err), str(
        job
    )


def test_a_launcher_that_reads_its_options_for_ever_ends_on_a_signal(stuck):
    job = stuck({"SYNCVAR_MISSING_REPORT_S": "0.5"})
    await_true(lambda: "the launcher reads its options" in job.err, what="the line of the start")
    job.send(signal.SIGTERM)
    assert job.wait() == 143, str(job)


@pytest.mark.slow
def test_a_program_that_is_not_python_is_not_waited_for(launch):
    job = launch(target=["--no-python", "sleep", "8"], env=SHORT)
    assert job.wait() == 0, str(job)
    assert "given up" not in job.err


@pytest.mark.slow
def test_a_script_that_does_not_use_syncvar_is_not_waited_for(launch):
    job = launch("import time; time.sleep(8)", env=SHORT)
    assert job.wait() == 0, str(job)
    assert "given up" not in job.err
