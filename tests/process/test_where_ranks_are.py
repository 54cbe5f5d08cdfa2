"""Why does it hang: the stacks of ranks that are interrupted, that lose a rank, and that run on."""

import re
import signal

from launching import await_true, state

ENDLESS = {
    "SYNCVAR_SUSPECT_AFTER_S": "100", "SYNCVAR_LOST_AFTER_S": "100", "SYNCVAR_COLLECTIVE_TIMEOUT_S": "100",
    "SYNCVAR_TERM_GRACE_S": "0.5",
}  # fmt: skip

HANGS = """
import ctypes, os, signal, sys, threading, time
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


def hang(rank):
    if rank == 0:
        sv.all_reduce(np.ones(3))  # waits
    elif rank == 1:
        busy(2)
    elif rank == 2:
        time.sleep(1000)  # sleeps
    elif rank == 3:
        matrix = np.random.default_rng(0).random((300, 300))
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
hang(probe.RANK)
"""


def line_of(text, comment):
    """Return the number of the line of a script that ends with a comment."""
    (number,) = [number for number, line in enumerate(text.split("\n"), 1) if line.endswith(f"# {comment}")]
    return number


def test_an_interrupted_job_says_where_each_rank_was(launch):
    job = launch(HANGS, workers=7, env=ENDLESS)
    job.await_events("ready", 7)
    pids = job.pids()
    await_true(lambda: state(pids[6]) == "T", what="rank 6 is stopped")
    await_true(lambda: "rank 0 waits since" in job.report, what="rank 0 has waited")
    job.send(signal.SIGINT)
    assert job.wait() == 130, str(job)
    said = job.report.split("interrupted by SIGINT; all ranks have ended\nwhere they were:\n")[1].split("\n")
    at = {name: line_of(HANGS, name) for name in ("busy", "forever", "waits", "sleeps", "computes")}
    assert re.fullmatch(rf"  rank 0: waiting in all_reduce\(sum, float64\[3\]\) \(call 1\) at script.py:{at['waits']} in hang", said[0])
    assert said[1].startswith(f"  rank 1: in user code, script.py:{at['busy']} < script.py:{at['busy'] - 1} < script.py:"), str(job)
    assert said[2].startswith(f"  rank 2: in user code, script.py:{at['sleeps']} < script.py:")
    assert re.match(rf"  rank 3: in numpy/linalg/\S+:\d+, called at script.py:{at['computes']} < script.py:", said[3])
    for rank in (4, 5):
        assert said[rank].startswith(f"  rank {rank}: in user code, script.py:{at['forever']} < script.py:"), str(job)
    assert said[6] == "  rank 6: not waiting in any call; its process is stopped (state T)"
