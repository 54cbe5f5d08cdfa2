"""What the workers of all libraries share: their arguments, the values, how a call is timed, the result.

A library gives a `Team` (who am I, how do we agree) and one `Case` for each kind and size; everything that could
make one library look better than another by accident is here, once.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Case", "Team", "arguments", "finish", "measure", "measure_all", "show_versions"]

MOST_CALLS = 100_000
FEWEST_CALLS = 3


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of a job.

    Args:
        rank: This process.
        world: How many there are.
        barrier: Waits for all.
        agree: Gives every rank the number of rank 0.
    """

    rank: int
    world: int
    barrier: Callable[[], object]
    agree: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Case:
    """One call to be timed.

    Args:
        x: What this rank contributes; float32.
        call: The call.
        result: Where the sum is after a call.
        in_place: Whether calls add to what earlier calls left, so that only zeros can be added without end.
    """

    x: np.ndarray[Any, Any]
    call: Callable[[], object]
    result: Callable[[], np.ndarray[Any, Any]]
    in_place: bool = False


def arguments(text: str | None) -> argparse.Namespace:
    """Read the command line of a worker script."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--sizes", default="8,4096,65536,1048576", help="bytes, separated by commas")
    parser.add_argument("--kinds", default="private", help="what to measure, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each size and kind")
    parser.add_argument("--result", help="file for the JSON of rank 0; without it, standard output")
    parser.add_argument("--versions", action="store_true", help="print the versions as JSON and end")
    parser.add_argument("--busy-thread", action="store_true", help="keep one Python thread busy (syncvar only)")
    chosen = parser.parse_args()
    chosen.sizes = [int(size) for size in chosen.sizes.split(",")]
    chosen.kinds = chosen.kinds.split(",")
    return chosen


def show_versions(**versions: str) -> None:
    """Print the versions of a library, with those of Python and NumPy, as one line of JSON."""
    print(json.dumps({**versions, "Python": platform.python_version(), "NumPy": np.__version__}))


def measure_all(team: Team, chosen: argparse.Namespace, make: Callable[[str, int], Case]) -> list[dict[str, Any]]:
    """Measure every size and kind; `make(kind, count)` gives the case."""
    return [
        {"kind": kind, "size": size, **measure(team, make(kind, size // 4), chosen.seconds)}
        for size in chosen.sizes
        for kind in chosen.kinds
    ]


def measure(team: Team, case: Case, seconds: float) -> dict[str, Any]:
    """Verify one call, warm up, then time calls one by one and as a batch, half the time for each.

    Returns:
        Of this rank: number of calls; median and quartiles of single calls, and a batch's time by its calls, in us.
    """
    _verify(team, case)
    if case.in_place:
        case.x.fill(0)
    calls, took = 1, 0.0
    team.barrier()
    while team.agree(int(took < seconds / 10)):  # warm-up, and how long a warm call takes
        calls *= 2
        took = _batch(case.call, calls)
    wanted = int(seconds / 2 * calls / took)
    calls = team.agree(max(FEWEST_CALLS, min(MOST_CALLS, wanted)))
    team.barrier()
    single = _one_by_one(case.call, calls)
    team.barrier()
    batch = _batch(case.call, calls)
    team.barrier()
    low, median, high = quantiles(single, n=4, method="inclusive")
    return {
        "calls": calls,
        "median_us": median / 1e3,
        "low_us": low / 1e3,
        "high_us": high / 1e3,
        "batch_us": batch / calls * 1e6,
    }


def finish(team: Team, chosen: argparse.Namespace, results: list[dict[str, Any]], **more: Any) -> None:
    """Write the result of rank 0."""
    if team.rank:
        return
    text = json.dumps({"workers": team.world, "results": results, **more})
    if chosen.result is None:
        print(text)
        return
    with open(chosen.result, "w", encoding="utf-8") as file:
        file.write(text)


def _verify(team: Team, case: Case) -> None:
    """Add distinct values of all ranks up, which float32 can hold exactly, and look at every element."""
    pattern = np.resize(np.arange(1, 1022, dtype=np.float32), case.x.size)
    np.multiply(pattern, team.rank + 1, out=case.x)
    team.barrier()
    case.call()
    pattern *= team.world * (team.world + 1) // 2
    if not np.array_equal(case.result(), pattern):
        wrong = int(np.count_nonzero(case.result() != pattern))
        sys.exit(f"rank {team.rank}: {wrong} of {pattern.size} elements of the sum are wrong")


def _one_by_one(call: Callable[[], object], calls: int) -> list[int]:
    clock = time.perf_counter_ns
    times = [0] * calls
    for index in range(calls):
        begin = clock()
        call()
        times[index] = clock() - begin
    return times


def _batch(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - begin
