"""Seconds that a job of 4 workers loses when one is killed: `python bench/elastic_recovery.py`.

One of 4 workers kills itself by signal 9 after some steps. The script prints the seconds from the
signal to the end of the first step that all workers have made again, as medians of several jobs:

* survivors: the other 3 go on;
* spare: a spare worker takes the place of the lost one, so a step has 4 workers again;
* restarted: the launcher starts the worker again, so a step has 4 workers again;
* horovod: the other 3 go on, by Horovod's `elastic.run` over gloo, whose calls wait 30 s for a peer;
* horovod, 3 s: the same, with `--gloo-timeout-seconds 3`;
* torchrun: `--max-restarts` over gloo starts all 4 again, which read a checkpoint of each step.

The jobs of all rows alternate. A step averages 100 kB, and takes 10 ms more. `--torch PYTHON` and
`--horovod PYTHON` are interpreters that have torch, and Horovod's binding of it. Without them their
rows are missing. bench/README.md says how to build Horovod.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

_WORKERS, _KILLED, _STEP, _ELEMENTS, _PAUSE_S = 4, 2, 30, 25_000, 0.01
_STEPS_AFTER_S = 1.0  # how long the job goes on after the measured step
_LIMIT_S = 120.0
_LAUNCH = [sys.executable, "-m", "syncvar_launcher", "--timeout", str(_LIMIT_S)]
_ROWS = {
    "survivors": (3, [*_LAUNCH, "--workers", "3:4"]),
    "spare": (4, [*_LAUNCH, "--workers", "4:4", "--spares", "1"]),
    "restarted": (4, [*_LAUNCH, "--workers", "3:4", "--max-restarts", "1"]),
}
# Else the workers that torch 2.13 starts again find the addresses of those before, and fail.
_TORCH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
_TORCHRUN += ["--nproc-per-node", "4", "--max-restarts", "1"]
# Horovod no longer uses a host on which a worker was lost: so each worker has a name of this host.
_HOSTS = r"printf 'localhost:1\n127.0.0.1:1\n127.1:1\n127.0.1:1\n'"
_HOROVODRUN = ["--gloo", "--network-interfaces", "lo", "-np", "4", "--min-np", "2"]
_HOROVODRUN += ["--max-np", "4", "--host-discovery-script", _HOSTS]


class Notes:
    """What a worker notes, for the process that has started the job.

    Args:
        folder: The folder of the job.
        size: Workers that a step must have after the kill, to end the measurement.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self._size = folder, size
        self._file = (folder / f"notes-{os.getpid()}.jsonl").open("a", buffering=1)
        self._killed = folder / "killed"
        self._until = float("inf")

    def kill(self) -> None:
        """Note the time, and kill this process."""
        self._killed.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self, step: int, size: int) -> None:
        """Note the end of a step."""
        if step > _STEP and size == self._size:
            self._file.write(json.dumps([time.monotonic(), step]) + "\n")
            self._until = min(self._until, time.monotonic() + _STEPS_AFTER_S)

    def is_over(self) -> bool:
        """Return whether there are enough steps."""
        return time.monotonic() > self._until

    def is_new(self) -> bool:
        """Return whether no worker has been killed yet."""
        return not self._killed.exists()


def train_syncvar(notes: Notes) -> None:
    """Train as a worker of an elastic job."""
    import numpy as np

    import syncvar as sv

    strategy = sv.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.zeros(_ELEMENTS, np.float32), aggregation="MEAN")
    state = sv.elastic.State(w=w, step=0, has_ended=False)
    is_victim = os.environ["SYNCVAR_RANK"] == str(_KILLED)

    @sv.elastic.run
    def train(state: Any) -> None:
        gradient = np.ones(_ELEMENTS, np.float32)
        while not state.has_ended:
            if is_victim and state.step == _STEP and notes.is_new():
                notes.kill()
            state.w.assign_add(gradient)
            state.step += 1
            time.sleep(_PAUSE_S)
            state.has_ended = bool(sv.all_reduce(int(notes.is_over()), "max"))
            state.commit()
            notes.step(state.step, sv.world_size())

    train(state)


def train_torch(notes: Notes) -> None:
    """Train as a worker of torchrun, with a checkpoint of each step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    saved, rank = notes.folder / "checkpoint.pt", dist.get_rank()
    w, gradient, step = torch.zeros(_ELEMENTS), torch.ones(_ELEMENTS), 0
    if saved.exists():
        w, step = torch.load(saved)
    dist.barrier()
    over = torch.zeros(1)
    while not over.item():
        if rank == _KILLED and step == _STEP and notes.is_new():
            notes.kill()
        total = gradient.clone()
        dist.all_reduce(total)
        w += total / dist.get_world_size()
        step += 1
        time.sleep(_PAUSE_S)
        over[0] = notes.is_over()
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if rank == 0:
            torch.save((w, step), saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        notes.step(step, dist.get_world_size())
    dist.destroy_process_group()


def train_horovod(notes: Notes) -> None:
    """Train as a worker of an elastic job of Horovod."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    state = hvd.elastic.TorchState(w=torch.zeros(_ELEMENTS), step=0, has_ended=False)
    is_victim = hvd.rank() == _KILLED

    @hvd.elastic.run
    def train(state: Any) -> None:
        gradient = torch.ones(_ELEMENTS)
        while not state.has_ended:
            if is_victim and state.step == _STEP and notes.is_new():
                notes.kill()
            state.w = state.w + hvd.allreduce(gradient, op=hvd.Average, name="gradient")
            state.step += 1
            time.sleep(_PAUSE_S)
            over = torch.tensor([float(notes.is_over())])
            state.has_ended = bool(hvd.allreduce(over, op=hvd.Max, name="over").item())
            state.commit()
            notes.step(state.step, hvd.size())

    train(state)


_TRAIN = {"syncvar": train_syncvar, "torchrun": train_torch, "horovod": train_horovod}


def recovery_s(size: int, line: list[str], library: str) -> float:
    """Run a job; return the seconds from the kill to the first step of all workers."""
    with tempfile.TemporaryDirectory() as name:
        work = [__file__, "--work", name, str(size), "--library", library]
        done = subprocess.run(
            [*line, *work],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **_TORCH},
        )
        folder = Path(name)
        if done.returncode:
            raise SystemExit(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr}")
        killed = float((folder / "killed").read_text())
        first = [
            json.loads(path.read_text().split("\n")[0])[0]
            for path in folder.glob("notes-*.jsonl")
            if path.read_text()
        ]
        if len(first) != size:
            raise SystemExit(f"{len(first)} of {size} workers have made a step after the kill")
        return float(max(first)) - killed


def _library_of(row: str) -> str:
    name = row.partition(",")[0]
    return name if name in _TRAIN else "syncvar"


def can_import(python: str, module: str) -> bool:
    """Return whether an interpreter has a module."""
    return not subprocess.run(
        [python, "-c", f"import {module}"], stderr=subprocess.DEVNULL, check=False
    ).returncode


def main() -> None:
    """Start the jobs, or be a worker of one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=5, help="jobs of each row")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--horovod", metavar="PYTHON")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=_TRAIN, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        folder, size = chosen.work
        _TRAIN[chosen.library](Notes(Path(folder), int(size)))
        return
    rows = dict(_ROWS)
    if chosen.horovod and can_import(chosen.horovod, "horovod.torch"):
        run = str(Path(chosen.horovod).parent / "horovodrun")
        for name, more in (("horovod", []), ("horovod, 3 s", ["--gloo-timeout-seconds", "3"])):
            rows[name] = (_WORKERS - 1, [run, *_HOROVODRUN, *more, chosen.horovod])
    if can_import(chosen.torch, "torch"):
        rows["torchrun"] = (_WORKERS, [chosen.torch, *_TORCHRUN])
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(chosen.jobs):
        for name, (size, line) in rows.items():
            found[name].append(recovery_s(size, line, _library_of(name)))
    print(f"{'seconds':14}{'median':>8}{'least':>8}{'most':>8}")
    for name, values in found.items():
        print(f"{name:14}{median(values):8.2f}{min(values):8.2f}{max(values):8.2f}")


if __name__ == "__main__":
    main()
