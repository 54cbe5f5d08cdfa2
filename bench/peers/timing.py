"""What the workers of all libraries share: their arguments, how a call is verified and timed, the result.

A library gives a `Team` (who am I, how do we agree) and one `Case` for each call; everything that
could make one library look better than another by accident is here, once. The values are in
`values`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import numpy as np
from values import Values

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Case",
    "Refused",
    "Team",
    "argument_parser",
    "arguments",
    "array_case",
    "finish",
    "measure",
    "measure_all",
    "show_versions",
    "timed",
]

MOST_CALLS = 100_000
FEWEST_CALLS = 3


class Refused(Exception):
    """The library cannot make this call; every rank finds so."""


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of a job.

    Args:
        rank: This process.
        world: How many there are.
        barrier: Waits for all.
        agree: Gives every rank the number of rank 0.
        largest: Gives every rank the largest number of all.
    """

    rank: int
    world: int
    barrier: Callable[[], object]
    agree: Callable[[int], int]
    largest: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Case:
    """One call to be timed.

    Args:
        fill: Makes given numbers, or one number everywhere, what this rank brings.
        call: The call.
        result: What this rank has after a call.
        in_place: Whether calls add to what earlier calls left, so that only zeros can be added
            without end.
        within: Runs the measuring, for calls that need a context.
    """

    fill: Callable[[Any], object]
    call: Callable[[], object]
    result: Callable[[], np.ndarray[Any, Any]]
    in_place: bool = False
    within: Callable[[Callable[[], Any]], Any] | None = None


def array_case(
    x: np.ndarray[Any, Any],
    call: Callable[[], object],
    out: np.ndarray[Any, Any] | None = None,
    **more: Any,
) -> Case:
    """Return the case of a call that brings the array `x`; its result is in `out`, or in `x` itself."""
    result = x if out is None else out
    return Case(
        lambda numbers: np.copyto(x, numbers, casting="unsafe"), call, lambda: result, **more
    )


def argument_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every worker script is told."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each call and size")
    parser.add_argument("--result", help="file for the JSON of rank 0; without it, standard output")
    return parser


def arguments(text: str | None) -> argparse.Namespace:
    """Read the command line of a worker script of collectives."""
    parser = argument_parser(text)
    parser.add_argument(
        "--measure",
        action="append",
        type=_work,
        metavar="COLLECTIVE/KIND/SIZES",
        help="calls to measure, sizes in bytes; may be given again [all_reduce/private/8,4096,65536,1048576]",
    )
    parser.add_argument("--dtype", default="float32", help="of the elements [float32]")
    parser.add_argument(
        "--versions", action="store_true", help="print the versions as JSON and end"
    )
    parser.add_argument(
        "--busy-thread", action="store_true", help="keep one Python thread busy (syncvar only)"
    )
    chosen = parser.parse_args()
    chosen.measure = chosen.measure or [_work("all_reduce/private/8,4096,65536,1048576")]
    return chosen


def _work(text: str) -> tuple[str, str, list[int]]:
    collective, kind, sizes = text.split("/")
    return collective, kind, [int(size) for size in sizes.split(",")]


def show_versions(**versions: str) -> None:
    """Print the versions of a library, with those of Python and NumPy, as one line of JSON."""
    print(json.dumps({**versions, "Python": platform.python_version(), "NumPy": np.__version__}))


def measure_all(
    team: Team, chosen: argparse.Namespace, make: Callable[[str, Values], Case]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure everything that was asked for; `make(kind, values)` gives the case or raises `Refused`.

    Returns:
        One entry for each collective, kind and size; and for collectives that the library refuses,
        why.
    """
    results: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for collective, kind, sizes in chosen.measure:
        for size in sizes:
            if collective in refused:
                break
            values = Values.sized(collective, chosen.dtype, size, team.rank, team.world)
            try:
                case = make(kind, values)
            except Refused as problem:
                refused[collective] = str(problem)
                break
            times = measure(team, case, values, chosen.seconds)
            results.append({"collective": collective, "kind": kind, "size": size, **times})
    return results, refused


def measure(team: Team, case: Case, values: Values, seconds: float) -> dict[str, Any]:
    """Verify one call, warm up, then time calls one by one and as a batch, half the time for each.

    Returns:
        Of this rank: number of calls; median and quartiles of single calls, and a batch's time by
        its calls, in us. Of a broadcast, whose root need not wait for the others, each is the
        largest of all ranks.
    """
    timing = partial(_measure, team, case, values, seconds)
    found: dict[str, Any] = timing() if case.within is None else case.within(timing)
    return found


def _measure(team: Team, case: Case, values: Values, seconds: float) -> dict[str, Any]:
    _verify(team, case, values)
    if case.in_place:
        case.fill(0)
    times = timed(team, case.call, seconds)
    if values.collective != "broadcast":
        return times
    return {
        name: time if name == "calls" else team.largest(round(time * 1e3)) / 1e3
        for name, time in times.items()
    }


def timed(team: Team, call: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Warm up, then time calls one by one and as a batch; returns as `measure` does, of this rank."""
    calls, took = 1, 0.0
    team.barrier()
    while team.agree(int(took < seconds / 10)):  # warm-up, and how long a warm call takes
        calls *= 2
        took = _batch(call, calls)
    wanted = int(seconds / 2 * calls / took)
    calls = team.agree(max(FEWEST_CALLS, min(MOST_CALLS, wanted)))
    team.barrier()
    single = _one_by_one(call, calls)
    team.barrier()
    batch = _batch(call, calls)
    team.barrier()
    low, median, high = quantiles(single, n=4, method="inclusive")
    times = {
        "median_us": median / 1e3,
        "low_us": low / 1e3,
        "high_us": high / 1e3,
        "batch_us": batch / calls * 1e6,
    }
    return {"calls": calls, **times}


def finish(
    team: Team, chosen: argparse.Namespace, results: list[dict[str, Any]], **more: Any
) -> None:
    """Write the result of rank 0."""
    if team.rank:
        return
    text = json.dumps({"workers": team.world, "results": results, **more})
    if chosen.result is None:
        print(text)
        return
    with open(chosen.result, "w", encoding="utf-8") as file:
        file.write(text)


def _verify(team: Team, case: Case, values: Values) -> None:
    """Make one call with numbers that say where they come from, and look at every element of the result."""
    case.fill(values.brought())
    team.barrier()
    case.call()
    expected = values.expected()
    result = case.result()
    if not np.array_equal(result, expected):
        wrong = (
            int(np.count_nonzero(result != expected)) if result.shape == expected.shape else "all"
        )
        sys.exit(
            f"rank {team.rank}: {wrong} of {expected.size} elements of {values.collective} are "
            "wrong"
        )


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
