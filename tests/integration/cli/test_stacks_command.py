"""Why does it hang: the stacks of ranks that run on, that are interrupted, and that lose one of them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest

from syncvar.bootstrap.job_private import MEETING, JobDirectory
from syncvar.cli.commands import main
from syncvar.core.fork_cleanup import libc
from syncvar.core.stack_dump import ALL_THREADS, END, MAIN_THREAD
from tests.support.launching import await_true, line_of

ENDLESS = {
    "SYNCVAR_SUSPECT_AFTER_S": "100",
    "SYNCVAR_LOST_AFTER_S": "100",
    "SYNCVAR_COLLECTIVE_TIMEOUT_S": "100",
    "SYNCVAR_HANDSHAKE_TIMEOUT_S": "100",
    "SYNCVAR_TERM_GRACE_S": "5",  # stacks of ranks in C come some time after the others
    "SYNCVAR_STALL_WARNING_S": "0.3",
}

HANGS = """
import ctypes, faulthandler, os, signal, sys, threading, time
import numpy as np
import probe, syncvar as sv

mutex = ctypes.create_string_buffer(64)


def busy(depth):
    if depth:
        return busy(depth - 1)
    while True: pass  # busy


def forever(library):
    lock = library.pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # forever


def listen_too():
    # the signals that belong to the program, and a thread
    signal.signal(signal.SIGUSR1, lambda *_: probe.note("own handler"))
    faulthandler.register(signal.SIGUSR2, open(os.path.join(probe.FOLDER, "own.txt"), "w"))
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def hang(rank):
    if rank == 0:
        sv.all_reduce(np.ones(3))  # waits
    elif rank == 1:
        busy(2)
    elif rank == 2:
        listen_too()
        time.sleep(1000)  # sleeps
    elif rank == 3:
        matrix = np.random.default_rng(0).random((100, 100))
        while True:
            np.linalg.svd(matrix)  # computes
    elif rank == 4:
        forever(ctypes.PyDLL(None))  # holding the GIL
    elif rank == 5:
        forever(ctypes.CDLL(None))  # without it
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


sv.barrier()
probe.note("ready")
probe.gate("hang")  # all have left the barrier
hang(probe.RANK)
"""


def places():
    """Return rank -> pattern of the line that tells where it is in HANGS."""
    at = {name: line_of(HANGS, name) for name in ("busy", "forever", "waits", "sleeps", "computes")}
    user = r"rank {}: in user code, script.py:{} < script.py:\d+.*"
    return {
        0: rf"rank 0: waiting in all_reduce\(sum, float64\[3\]\) \(call 2\) at script.py:{at['waits']} in hang",
        1: user.format(1, at["busy"]),
        2: user.format(2, at["sleeps"]),
        3: rf"rank 3: in numpy/\S+:\d+, called at script.py:{at['computes']} < script.py:\d+",
        4: user.format(4, at["forever"]),
        5: user.format(5, at["forever"]),
        6: r"rank 6: not waiting in any call; its process is stopped \(state T\)",
    }


@pytest.fixture
def stacks(capsys, jobs_of_this_test):
    """Run `syncvar stacks` in this process; return its exit code, what it says of each rank, of the job, and of errors."""

    def run(*arguments):
        capsys.readouterr()
        code = main(["stacks", *map(str, arguments)])
        said = capsys.readouterr()
        about, *blocks = re.split(r"^(?=ranks? )", said.out, flags=re.MULTILINE)
        return code, {block.split(":", 1)[0]: block for block in blocks}, about, said.err

    return run


def hanging(launch, stacks, **keywords):
    """Return a job whose ranks all hang, each in its own way, and what `syncvar stacks` told then."""
    job = launch(HANGS, workers=7, **{"env": ENDLESS, **keywords})
    job.await_events("ready", 7)
    job.open_gate("hang")
    told = []

    def are_there():
        told[:] = stacks(job.process.pid)
        return all(
            re.match(f"{line}\n", told[1].get(f"rank {rank}", ""))
            for rank, line in places().items()
        )

    try:
        await_true(are_there, what="all ranks hang")
    except AssertionError as error:
        raise AssertionError(f"{told}\n{job}") from error
    return job, told


def check_stall(job):
    """The stall line names last call, age and place of the late ranks, and comes again."""
    start = rf"syncvar: rank 0 has been waiting \d+ s in all_reduce\(sum, float64\[3\]\) \(call 2\) at script.py:{line_of(HANGS, 'waits')} in hang: "
    await_true(lambda: len(stall_lines(job)) > 1, what="the stall is told of again")
    first, second = stall_lines(job)[:2]
    for told in (first, second):
        assert re.match(start, told), told
        for rank in (1, 2, 5):
            place = places()[rank].removeprefix(f"rank {rank}: ").removesuffix(".*")
            assert re.search(
                rf"; rank {rank}: last call barrier \(call 1\), \d+ s ago, now {place}", told
            ), f"{told}\n{job}"
    silent = rf"syncvar: rank 4: no Python thread answers since \d+ s, CPU idle \(state S\), {places()[4].removeprefix('rank 4: ')}"
    assert re.search(silent, job.report), str(job)


def stall_lines(job):
    return [
        line
        for line in job.report.split("\n")
        if line.startswith("syncvar: rank 0 has been waiting ")
    ]


@pytest.mark.slow
def test_ranks_tell_where_they_are_whatever_they_do(launch, stacks):
    job, (code, told, about, errors) = hanging(launch, stacks)
    assert (code, errors) == (0, "")
    name = re.match(
        rf"job (\w+): 7 ranks, launcher {job.process.pid}, since \d+ s: syncvar-launch --config ",
        about,
    )[1]
    assert told["rank 1"].count("script.py:") > 4, "the whole stack stands below its line"
    assert "runpy" not in str(told)
    threads = r"  thread 0x\w+:\n.*  main thread:\n    \S*script.py:"
    await_true(
        lambda: re.search(threads, stacks("--all-threads", name)[1].get("rank 2", ""), re.DOTALL),
        what="an answer in time with all threads of rank 2",
    )
    check_stall(job)
    # What the program does with signals goes on working.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        libc.tgkill(
            job.pids()[2], job.pids()[2], number
        )  # to the main thread: no other wakes Python's sleep
    job.await_events("own handler", rank=2)
    await_true(
        lambda: "script.py" in (job.folder / "own.txt").read_text(),
        what="its own fault handler has written",
    )
    # A second job, newer, which is no Python.
    other = launch(target=["--no-python", "sleep", "1000"], workers=1)
    code, (line,), about, errors = await_true(lambda: named(stacks(), other))
    assert (code, line) == (
        0,
        "rank 0: not joined yet; it is no Python program of ours (--no-python)\n",
    )
    assert f"2 jobs are running; this is the newest. The others: {name}: 7 ranks" in errors, str(
        job
    )
    code, _, _, errors = stacks("nobody")
    assert (code, errors.count(", launcher ")) == (2, 2), errors
    # And when it is interrupted it says the same at its end.
    other.send(signal.SIGTERM)
    job.send(signal.SIGINT)
    assert (job.wait(), other.wait()) == (130, 143), f"{job}\n{other}"
    said = job.report.split("interrupted by SIGINT; all ranks have ended\nwhere they were:\n")[
        1
    ].split("\n")
    assert [
        rank for rank, line in places().items() if not re.fullmatch(f"  {line}", said[rank])
    ] == [], str(job)
    assert stacks()[0] == 2


def named(answer, job):
    """Return an answer, if it is of this job."""
    code, told, about, errors = answer
    return (
        (code, list(told.values()), about, errors)
        if f"launcher {job.process.pid}," in about
        else None
    )


LOST = """
import os, signal, time
import numpy as np
import probe, syncvar as sv


def load():
    probe.note("ready")
    time.sleep(1000)  # loads


sv.barrier()
if probe.RANK == 1:
    probe.gate("die")
    os.kill(os.getpid(), signal.SIGKILL)
elif probe.RANK == 2:
    sv.all_reduce(np.ones(3))  # waits
load()  # called
"""


def test_a_job_that_loses_a_rank_says_where_the_others_were(launch):
    job = launch(
        LOST, workers=4, options=["--log-dir", "logs"], env={"SYNCVAR_STALL_WARNING_S": "0.2"}
    )
    job.await_events("ready", 2)
    waits = re.compile(r"rank 2 has been waiting .*in all_reduce")  # not in the barrier before it
    await_true(lambda: waits.search(job.report), what="rank 2 waits")
    job.open_gate("die")
    assert job.wait() == 137, str(job)
    at = {name: line_of(LOST, name) for name in ("loads", "waits", "called")}
    others = job.report.split("\nothers:\n")[1].split("\n")
    assert (
        others[0]
        == f"  ranks 0, 3: in user code, script.py:{at['loads']} < script.py:{at['called']}"
    ), str(job)
    assert others[1].startswith(
        f"  rank 2: waiting in all_reduce(sum, float64[3]) (call 2) at script.py:{at['waits']} in <module>; then "
    )
    for rank, name in (
        (0, "loads"),
        (2, "waits"),
        (3, "loads"),
    ):  # each record has the stack of its main thread
        (path,) = job.folder.rglob(f"flight-rank{rank}.json")
        stack = json.loads(path.read_text())["stack"]
        assert [
            file
            for file, line, _ in stack
            if (os.path.basename(file), line) == ("script.py", at[name])
        ], stack


def test_nobody_runs_a_job(stacks):
    code, _, _, errors = stacks()
    assert code == 2
    assert "no job of yours is running that syncvar-launch or sv.run has started" in errors
    code, _, _, errors = stacks(os.getpid())
    assert (code, errors) == (
        2,
        f"syncvar: process {os.getpid()} is not the syncvar-launch of a running job; no job of yours is running [SV-101]\n",
    )


def test_a_job_of_another_launcher_is_named_as_one_that_cannot_be_asked(
    stacks, monkeypatch, request
):
    folder = tempfile.TemporaryDirectory(
        prefix="sv-", dir=os.environ["XDG_RUNTIME_DIR"]
    )  # short enough for sockets
    request.addfinalizer(folder.cleanup)
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder.name)
    directory = JobDirectory(os.environ, f"{MEETING}12345678")
    try:
        for asked in ((), (os.getpid(),)):
            code, _, _, errors = stacks(*asked)
            assert code == 2
            assert "another launcher has started 1 that runs here" in errors
            assert (
                f"(first rank: process {os.getpid()}): this command asks syncvar-launch" in errors
            )
    finally:
        directory.remove()
    code, _, _, errors = stacks()
    assert code == 2
    assert "another launcher" not in errors


def test_a_process_of_another_user_is_named(stacks, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    code, _, _, errors = stacks(os.getpid())
    assert code == 2
    assert f"process {os.getpid()} belongs to user " in errors
    assert "who alone can ask about it" in errors


CALLS = """
import json, re, sys, threading
from syncvar.core import stack_dump as stacks

stacks.answer_signals(sys.argv[1])


def deep(depth):
    return deep(depth - 1) + 1 if depth else sum(number for number in range(5))


def work():
    while True:  # into Python from C, and out again, all the time
        deep(30)
        sorted(range(20), key=lambda number: -number)
        re.sub("a", lambda _: "b", "banana")
        json.loads(json.dumps({"a": [1, 2, {"b": 3}]}))
        exec("x = 1")


threading.Thread(target=work, daemon=True).start()
work()
"""


@pytest.mark.parametrize("times", [200, pytest.param(4_000, marks=pytest.mark.slow)])
def test_a_program_survives_that_is_asked_very_often(tmp_path, times):
    answers = tmp_path / "answers"

    def is_answered(end):
        """Return whether a whole answer follows: a signal in the middle of one might get none."""
        with answers.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(END) - 1))
            return size > end and file.read() == f"{END}\n".encode()

    with subprocess.Popen([sys.executable, "-c", CALLS, str(answers)]) as program:
        try:
            await_true(
                lambda: answers.exists() and answers.read_bytes().endswith(b"\n"), what="it listens"
            )
            for number in range(times):
                end = answers.stat().st_size
                os.kill(program.pid, (MAIN_THREAD, ALL_THREADS)[number % 2])
                await_true(lambda: is_answered(end) or program.poll() is not None)  # noqa: B023
                assert program.poll() is None, (
                    f"it ended with {program.poll()} after {number} questions"
                )
        finally:
            program.kill()
    assert answers.read_text().count(f"{END}\n") == times


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords",
    [
        {"start": "spawn"},
        {"options": ["--fake-hosts", "2"]},
        {"env": {**ENDLESS, "SYNCVAR_TRANSPORT": "zmq"}},
    ],
    ids=["spawn", "hosts", "links"],
)
def test_ranks_tell_where_they_are_however_they_began(launch, stacks, keywords):
    check_stall(hanging(launch, stacks, **keywords)[0])
