"""What the flight recorder costs: `python bench/recorder.py`.

First the time of one entry, on the short way of a call and on the long way. Then an 8-byte
all-reduce of two workers in shared memory, with and without the recorder in turns within one run,
so that a machine that drifts drifts for both. Each turn makes a group of its own, whose calls
either have the recorder or one that keeps nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median, quantiles
from threading import get_ident
from time import monotonic_ns
from typing import Any

import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.runtime import persistent_call
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.recorder import Recorder

_TOLD = CallInfo(CollectiveSpec("all_reduce(sum, float64[1])"), 0, (0, 1), 1, 8, "shm small")


def _short(recorder: Recorder, count: int) -> None:
    add = recorder.add
    for number in range(count):
        begin = monotonic_ns()
        add((_TOLD, number, begin, monotonic_ns(), get_ident()))


def _long(recorder: Recorder, count: int) -> None:
    for number in range(count):
        entry = recorder.begin(_TOLD._replace(nbytes=0, path="shm"), number)
        entry.stage("direct", 8)
        entry.end()


def _nothing(_recorder: Recorder, count: int) -> None:
    for _ in range(count):
        pass


def entries(count: int) -> None:
    """Print the time of one entry."""
    for name, body in (("short way", _short), ("long way", _long)):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            body(Recorder(), count)
            middle = time.perf_counter()
            _nothing(Recorder(), count)
            times.append((2 * middle - begin - time.perf_counter()) / count * 1e9)
        print(f"one entry, {name}: {median(times):.0f} ns")


def _ignore(_entry: Any) -> None:
    """Keep nothing."""


def paired(rounds: int, calls: int) -> None:
    """Print the median time of a call with and without the recorder; run by each of two workers."""
    recorder = current().recorder
    x = np.ones(1)
    out = np.empty_like(x)
    keep = recorder.add
    real = persistent_call.monotonic_ns, persistent_call.get_ident
    times: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(2 * rounds):
        is_on = turn % 4 in (0, 3)  # on off off on: neither is always first
        recorder.add = keep if is_on else _ignore
        if not is_on:  # the clock and the thread's number are asked for the recorder alone
            persistent_call.monotonic_ns, persistent_call.get_ident = _zero, _zero
        group = sv.new_group(range(sv.world_size()))
        for _ in range(50):
            sv.all_reduce(x, out=out, group=group)
        begin = time.perf_counter()
        for _ in range(calls):
            sv.all_reduce(x, out=out, group=group)
        times["on" if is_on else "off"].append((time.perf_counter() - begin) / calls * 1e9)
        persistent_call.monotonic_ns, persistent_call.get_ident = real
        recorder.add = keep
    if sv.rank() == 0:
        for name, values in times.items():
            low, middle, high = quantiles(values, n=4)
            print(f"8-byte all-reduce, recorder {name}: {middle:.0f} ns ({low:.0f} - {high:.0f})")
        low, middle, high = quantiles(
            [on - off for on, off in zip(times["on"], times["off"], strict=True)], n=4
        )
        print(
            f"difference by pair: {middle:.0f} ns ({low:.0f} - {high:.0f}), {len(times['on'])} "
            f"pairs of {calls} calls"
        )


_zero = int  # int() is 0, in less time than any function of ours


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of turns")
    parser.add_argument("--calls", type=int, default=5000, help="calls in a turn")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        paired(chosen.rounds, chosen.calls)
        return
    entries(200_000)
    line = [
        "--workers",
        "2",
        __file__,
        "--inside",
        "--rounds",
        str(chosen.rounds),
        "--calls",
        str(chosen.calls),
    ]
    subprocess.run([sys.executable, "-m", "syncvar_launcher", *line], check=True)


if __name__ == "__main__":
    main()
