"""Saves of two ranks that end by SIGKILL before or after one step; run by test_checkpoint_processes.py, prints a line for each.

Every save runs in a fresh process, whose threads are the ranks; when it is killed, both are. python killed_saves.py FOLDER
"""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np

import syncvar as sv
from syncvar.checkpoint.folder import Disk
from syncvar.testing import run_ranks

STEPS = ("create", "write", "sync", "close", "rename", "sync_folder")
FILES = (("shard", 0), ("shard", 1), ("manifest", 0))


def save(path, value):
    def fn():
        v = sv.Variable(np.full(4096, value), name="v")
        own = sv.Variable(value + sv.rank(), name="own", synchronization="NONE")
        sv.Checkpoint(v=v, own=own).save(path)

    for result in run_ranks(2, fn, timeout_s=120.0):
        if isinstance(result, BaseException):
            raise result


def read(path):
    """Return the values that three replicas restore."""

    def fn():
        v = sv.Variable(np.zeros(4096), name="v")
        own = sv.Variable(-1.0, name="own", synchronization="NONE")
        sv.Checkpoint(v=v, own=own).restore(path)
        return [*{*v.numpy().tolist()}], float(own)

    return run_ranks(3, fn, timeout_s=120.0)


def kill_at(step, when, file, rank):
    """Let the process be killed at one step of one rank's file."""
    original = getattr(Disk, step)
    current = {}

    def killed(*arguments):
        mine = (
            threading.current_thread().name == f"syncvar-rank-{rank}" and current.get(rank) == file
        )
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        made = original(*arguments)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    def create(folder, name, original=Disk.create):
        if threading.current_thread().name == f"syncvar-rank-{rank}":
            current[rank] = name.partition("-")[0].partition(".")[0]
        if step == "create":
            return killed(folder, name)
        return original(folder, name)

    if step != "create":
        setattr(Disk, step, staticmethod(killed))
    Disk.create = staticmethod(create)


def forked(fn, *arguments):
    """Run a function in a process of its own; return (status, what it returned)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        code = 1
        try:
            os.write(writing, json.dumps(fn(*arguments)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    return os.waitpid(pid, 0)[1], json.loads(text) if text else None


def doomed(path, step, when, file, rank):
    kill_at(step, when, file, rank)
    save(path, 2.0)


def look_and_save(path):
    found = read(path)
    save(path, 3.0)
    return found, read(path)


def main(folder):
    old = folder / "old"
    assert forked(save, str(old), 1.0)[0] == 0
    for file, rank in FILES:
        for step in (
            (*STEPS, "remove") if file == "manifest" else STEPS
        ):  # the shards of the checkpoint before
            for when in ("before", "after"):
                path = folder / "case"
                shutil.copytree(old, path)
                status = forked(doomed, str(path), step, when, file, rank)[0]
                left = len(os.listdir(path))
                found, after = forked(look_and_save, str(path))[1]
                print(
                    json.dumps(
                        {
                            "file": file,
                            "rank": rank,
                            "step": step,
                            "when": when,
                            "status": status,
                            "found": found,
                            "left": left,
                            "after": after,
                            "names": len(os.listdir(path)),
                        }
                    ),
                    flush=True,
                )
                shutil.rmtree(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
