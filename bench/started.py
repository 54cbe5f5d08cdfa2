"""What starting a call and waiting for it costs: `syncvar-launch --workers 2 bench/started.py`.

Each collective is measured twice in each round: as a blocking call, and with `async_op=True` and
`wait` at once. Printed are the median times of the slowest rank in microseconds, and their ratio,
by bytes of the input.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTS = (1, 512, 8 << 10, 128 << 10, 2 << 20)  # elements of float64
_ROUNDS = 7
_PER_ROUND = 400_000  # elements that all calls of a round move
_ROOTED = ("reduce", "broadcast", "gather")


def call_of(name: str, x: Any) -> Callable[..., Any]:
    """Return a function that makes a call; it takes `async_op`."""
    function = getattr(sv, name)
    options = {"root": 0} if name in _ROOTED else {}
    return lambda **started: function(*x, **options, **started)


def seconds(call: Callable[[], Any], repetitions: int) -> float:
    """Return the seconds that a call takes on the slowest rank."""
    sv.barrier()
    begin = perf_counter()
    for _ in range(repetitions):
        call()
    spent = (perf_counter() - begin) / repetitions
    return float(sv.all_reduce(spent, "max"))


def measure(name: str, count: int) -> None:
    """Measure a collective; rank 0 prints."""
    x = () if name == "barrier" else (np.ones(count - count % sv.world_size() or sv.world_size()),)
    call = call_of(name, x)
    repetitions = max(2, min(400, _PER_ROUND // count))
    blocking, started = [], []
    for number in range(_ROUNDS + 1):
        both = (
            seconds(call, repetitions),
            seconds(lambda: call(async_op=True).wait(), repetitions),
        )
        if number:  # the first warms up
            blocking.append(both[0])
            started.append(both[1])
    if sv.rank() == 0:
        first, second = median(blocking) * 1e6, median(started) * 1e6
        print(
            f"{name:15}{8 * count:10}{first:11.2f}{second:11.2f}{second / first:8.2f}", flush=True
        )


def main() -> None:
    """Measure all collectives."""
    if sv.rank() == 0:
        print(f"{'collective':15}{'bytes':>10}{'blocking':>11}{'started':>11}{'ratio':>8}")
    measure("barrier", 1)
    for count in _COUNTS:
        for name in (
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "gather",
            "reduce_scatter",
            "all_to_all",
            "scan",
            "exscan",
        ):
            measure(name, count)


if __name__ == "__main__":
    main()
