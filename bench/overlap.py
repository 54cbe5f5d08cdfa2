"""How much of an all-reduce between processes hides behind NumPy work: `syncvar-launch --workers 2 bench/overlap.py`.

Over links (SYNCVAR_TRANSPORT=zmq) ZeroMQ's own threads move bytes and the progress thread reduces
while the program computes. Rank 0 prints, for each size: the all-reduce alone, the computation
alone, both one after the other, both at once (started with async_op, waited for after the
computation), and the share of the shorter one that was hidden.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", default="1048576,16777216,67108864", help="bytes, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if sv.rank() == 0:
        print(
            f"{sv.world_size()} ranks, {current().transport}; medians of {chosen.rounds} rounds, ms"
        )
        print(
            f"{'bytes':>10} {'reduce':>9} {'compute':>9} {'in turn':>9} {'at once':>9} "
            f"{'hidden':>7}"
        )
    for size in map(int, chosen.sizes.split(",")):
        x = np.ones(size // 4, np.float32)
        out = np.empty_like(x)
        a = np.random.default_rng(0).random((400, 400))
        repeats = max(1, size // 1_500_000)

        def compute(a: np.ndarray = a, repeats: int = repeats) -> None:
            for _ in range(repeats):
                a @ a

        def at_once(
            x: np.ndarray = x, out: np.ndarray = out, compute: Callable[[], None] = compute
        ) -> None:
            work = sv.all_reduce(x, out=out, async_op=True)
            compute()
            work.wait()

        def alone(x: np.ndarray = x, out: np.ndarray = out) -> None:
            sv.all_reduce(x, out=out)

        def in_turn(
            alone: Callable[[], None] = alone, compute: Callable[[], None] = compute
        ) -> None:
            alone()
            compute()

        times: list[list[float]] = [[], [], [], []]
        for _ in range(chosen.rounds + 1):
            for action, into in zip((alone, compute, in_turn, at_once), times, strict=True):
                sv.barrier()
                begin = time.perf_counter()
                action()
                into.append((time.perf_counter() - begin) * 1e3)
        reduce_ms, compute_ms, turn_ms, once_ms = (median(one[1:]) for one in times)
        hidden = max(0.0, turn_ms - once_ms) / min(reduce_ms, compute_ms)
        if sv.rank() == 0:
            print(
                f"{size:>10} {reduce_ms:>9.2f} {compute_ms:>9.2f} {turn_ms:>9.2f} {once_ms:>9.2f} "
                f"{hidden:>7.0%}"
            )


if __name__ == "__main__":
    main()
