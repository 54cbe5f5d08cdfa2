"""What ranks on other engines do in tests; a module of the caller's, which workers import by its name."""

import contextlib
import io
import os
import signal
import threading
import time

import numpy as np

import syncvar as sv


def who(scale):
    total = sv.all_reduce(np.arange(3.0) * scale)
    return (
        sv.rank(),
        sv.world_size(),
        sv.local_rank(),
        sv.host_index(),
        sv.host_count(),
        total.tolist(),
        os.getpid(),
    )


def fails(rank):
    sv.barrier()
    if sv.rank() == rank:
        raise ValueError("of its own")
    sv.barrier()


def is_killed(rank, folder):
    try:
        sv.barrier()
        if sv.restart_count() == 0:
            if sv.rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            sv.barrier()
    except sv.PeerLost as error:
        with open(f"{folder}/lost-{sv.rank()}", "w") as file:
            file.write(f"{error.rank} {error}")
        raise
    return sv.restart_count()


def computes_on_and_on(folder):
    sv.barrier()
    open(f"{folder}/began-{os.getpid()}", "w").close()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass


def digits():
    """The example, unchanged: what it writes on rank 0."""
    from syncvar.examples import digits

    with contextlib.redirect_stdout(io.StringIO()) as written:
        digits.main(["--epochs", "2"])
    return written.getvalue()


def is_main_thread():
    return threading.current_thread() is threading.main_thread()
