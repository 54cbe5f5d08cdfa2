"""What AUTO and the replica checker cost a training step: `python bench/overhead.py`.

Two workers make steps of a small model: some computation, then an increment of each of its
variables. The same steps are made in turns with variables that are asked as ON_WRITE and never
compared, asked as AUTO and never compared, and asked as ON_WRITE and compared every 100 steps.
Printed are the median times of a step and how much longer the last two take than the first. AUTO
decides for eager here, so what is measured is its counting and deciding; on a busy machine the
differences drown in the noise, which the spread between the rounds shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable

_VARIABLES = 8
_ELEMENTS = 16 << 10
_WAYS = {"ON_WRITE": ("ON_WRITE", 0), "AUTO": ("AUTO", 0), "checker": ("ON_WRITE", 100)}


def steps_of(synchronization: str, check_every: int) -> Callable[[int], None]:
    """Return a function that makes so many steps of a model of its own."""
    strategy = sv.MirroredStrategy()
    strategy.check_every = check_every
    with strategy.scope():
        made = [
            sv.Variable(
                np.zeros(_ELEMENTS, np.float32), synchronization=synchronization, aggregation="SUM"
            )
            for _ in range(_VARIABLES)
        ]
    increment = np.full(_ELEMENTS, 1e-3, np.float32)
    matrix = np.ones((256, 256), np.float32)

    def step() -> None:
        for v in made:
            matrix @ matrix
            v.assign_add(increment)
            v.read_value(copy=False)

    def make(count: int) -> None:
        for _ in range(count):
            strategy.run(step)

    return make


def work(steps: int, rounds: int) -> None:
    """Measure, as one of two workers; rank 0 prints."""
    ways = {name: steps_of(*options) for name, options in _WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, make in ways.items():
            sv.barrier()
            begin = perf_counter()
            make(steps)
            if number:  # the first warms up
                times[name].append((perf_counter() - begin) / steps * 1e6)
    if sv.rank() == 0:
        show(times)


def show(times: dict[str, list[float]]) -> None:
    """Print the medians, and what is added to the first."""
    usual = median(times["ON_WRITE"])
    for name, found in times.items():
        added = (
            "" if name == "ON_WRITE" else f"   overhead {(median(found) / usual - 1) * 100:+.1f} %"
        )
        print(
            f"{name:9} {median(found):9.1f} us a step (rounds {min(found):.1f} to "
            f"{max(found):.1f}){added}"
        )


def main() -> int:
    """Run the workers, or work as one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="in each round [500]")
    parser.add_argument("--rounds", type=int, default=9, help="of each kind, in turns [9]")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args()
    if chosen.worker:
        work(chosen.steps, chosen.rounds)
        return 0
    line = [sys.executable, "-m", "syncvar_launcher", "--workers", "2", "--bind", "auto"]
    given = ["--worker", "--steps", str(chosen.steps), "--rounds", str(chosen.rounds)]
    return subprocess.run([*line, __file__, *given], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
