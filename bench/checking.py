"""What the replica checker costs at its default, on models of 1, 16 and 100 MiB: `python bench/checking.py`.

Two workers make steps of SGD on ResNet-50's 161 variables, scaled to a size: in `strategy.run`,
outside runs, and outside runs with a write of each variable by itself. Each begins with the
multiplications that a batch of 32 needs in dense layers with so many weights (6 a weight and
example), which is little: convolutions have more. `--batch 0` leaves them out. Processor time
inside the comparisons is told as a share of that of the rest, so that the machine's load, which
slows both, matters less. Also printed: the most that comparing took in one step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.variables.registry import VariableRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZES = Path(__file__).parent / "sizes" / "resnet50.toml"
_MIB = 1 << 20
_SIDE = 256  # of the matrices that are multiplied
_WAYS = ("run", "spmd", "spmd, one by one")


class Spent:
    """The time inside the comparisons of one process."""

    def __init__(self) -> None:
        self.now = 0.0

    def watch(self, name: str) -> None:
        """Take the time of a method of the registry."""
        method = getattr(VariableRegistry, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.now += thread_time() - begin

        setattr(VariableRegistry, name, timed)


def step_of(way: str, mib: int, batch: int) -> Callable[[], None]:
    """Return one step of a model."""
    shapes = [
        tuple(one["shape"]) for one in tomllib.loads(_SIZES.read_text(encoding="utf-8"))["tensors"]
    ]
    scale = mib * _MIB / 4 / sum(map(prod, shapes))
    counts = [max(1, round(prod(shape) * scale)) for shape in shapes]
    strategy = sv.MirroredStrategy() if way == "run" else sv.get_strategy()
    mode = {"aggregation": "SUM", "synchronization": "ON_WRITE"}
    if way == "run":
        with strategy.scope():
            made = [sv.Variable(np.zeros(count, np.float32), **mode) for count in counts]
    else:
        made = [sv.Variable(np.zeros(count, np.float32), **mode) for count in counts]
    gradients = [np.full(v.shape, 1e-3, np.float32) for v in made]
    optimizer = sv.optimizers.SGD(0.01)
    optimizer.build(made)

    matrix = np.ones((_SIDE, _SIDE), np.float32)
    products = round(6 * batch * sum(counts) / (2 * _SIDE**3) + 0.5) if batch else 0

    def compute() -> None:
        for _ in range(products):
            matrix @ matrix

    def step() -> None:
        optimizer.apply_gradients(zip(gradients, made, strict=True))

    def one_by_one() -> None:
        compute()
        for v, gradient in zip(made, gradients, strict=True):
            v.assign_add(gradient)

    def in_run() -> None:
        compute()
        strategy.run(step)

    def outside() -> None:
        compute()
        step()

    return {"run": in_run, "spmd": outside, "spmd, one by one": one_by_one}[way]


def work(mib: int, way: str, steps: int, batch: int) -> None:
    """Measure, as one of two workers; rank 0 prints."""
    spent = Spent()
    spent.watch("before_write")
    spent.watch("end_run")
    step = step_of(way, mib, batch)
    for _ in range(10):
        step()
    whole = longest = checking = 0.0
    for _ in range(steps):
        spent.now = 0.0
        begin = thread_time()
        step()
        whole += thread_time() - begin
        checking += spent.now
        longest = max(longest, spent.now)
    if sv.rank() == 0:
        share = checking / (whole - checking) * 100
        step_ms, longest_ms = whole / steps * 1e3, longest * 1e3
        spent_ms = f"comparing {share:5.2f} %  at most {longest_ms:6.2f} ms in one step"
        print(f"{mib:4} MiB  {way:17} {step_ms:8.2f} ms a step  {spent_ms}")


def main() -> int:
    """Run the workers, or work as one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="a multiple of 100 [200]")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 100], metavar="MIB")
    parser.add_argument("--batch", type=int, default=32, help="examples of a step [32]")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args()
    if chosen.worker:
        work(chosen.sizes[0], chosen.worker, chosen.steps, chosen.batch)
        return 0
    line = [sys.executable, "-m", "syncvar_launcher", "--workers", "2", "--bind", "auto"]
    worst = 0
    for mib in chosen.sizes:
        for way in _WAYS:
            given = [
                "--worker",
                way,
                "--steps",
                str(chosen.steps),
                "--sizes",
                str(mib),
                "--batch",
                str(chosen.batch),
            ]
            worst = max(worst, subprocess.run([*line, __file__, *given], check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
