"""What the flight recorder costs: `python bench/recorder.py`.

First the time of one entry, on the short way of a call and on the long way, with and without an
open ledger, and of one answer to `syncvar status`. Then an 8-byte all-reduce of two workers in
shared memory: without the recorder, with it, and with a ledger too. They take turns within one run,
so that a machine that drifts drifts for all. Each turn makes a group of its own, whose calls either
have the recorder or one that keeps nothing.
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
from syncvar.protocol.control_messages import pack_message
from syncvar.runtime import persistent_call
from syncvar.runtime.call_ledger import Ledger
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.call_summary import CallSummary
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.recorder import RING, Recorder

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
    for name, body, is_ledger in (
        ("short way", _short, False),
        ("long way", _long, False),
        ("short way with a ledger", _short, True),
        ("long way with a ledger", _long, True),
    ):
        times = []
        for _ in range(5):
            recorder = Recorder()
            if is_ledger:
                recorder.attach(Ledger().counter)
            begin = time.perf_counter()
            body(recorder, count)
            middle = time.perf_counter()
            _nothing(Recorder(), count)
            times.append((2 * middle - begin - time.perf_counter()) / count * 1e9)
        print(f"one entry, {name}: {median(times):.0f} ns")


def question(count: int) -> None:
    """Print the time of the answer to the launcher's question, with a full ring."""
    recorder = Recorder()
    _short(recorder, RING)
    times = []
    for _ in range(count):
        summary = CallSummary(recorder)  # the first question: all entries are new
        begin = time.perf_counter()
        fields = summary.fields({"number": 0, "offset_ns": 0, "error_ns": 0}, {0: RING}, {})
        pack_message("observation", **fields)
        times.append((time.perf_counter() - begin) * 1e6)
    low, middle, high = quantiles(times, n=4)
    print(f"answer to syncvar status, {RING} new calls: {middle:.0f} us ({low:.0f} - {high:.0f})")


def _ignore(_entry: Any) -> None:
    """Keep nothing."""


def paired(rounds: int, calls: int) -> None:
    """Print the median time of a call in each mode; run by each of two workers."""
    recorder = current().recorder
    x = np.ones(1)
    out = np.empty_like(x)
    keep = recorder.add
    real = persistent_call.monotonic_ns, persistent_call.get_ident
    times: dict[str, list[float]] = {"on": [], "off": [], "on, with a ledger": []}
    modes = list(times)
    for turn in range(3 * rounds):
        # None is always first.
        mode = (modes if turn // 3 % 2 else modes[::-1])[turn % 3]
        counter = Ledger().counter
        if mode == "on, with a ledger":
            recorder.attach(counter)
        elif mode == "off":
            recorder.replace_add(_ignore)
        if mode == "off":  # the clock and the thread's number are asked for the recorder alone
            persistent_call.monotonic_ns, persistent_call.get_ident = _zero, _zero
        group = sv.new_group(range(sv.world_size()))
        for _ in range(50):
            sv.all_reduce(x, out=out, group=group)
        begin = time.perf_counter()
        for _ in range(calls):
            sv.all_reduce(x, out=out, group=group)
        times[mode].append((time.perf_counter() - begin) / calls * 1e9)
        persistent_call.monotonic_ns, persistent_call.get_ident = real
        if mode == "on, with a ledger":
            recorder.detach(counter)
        recorder.replace_add(keep)
    if sv.rank() == 0:
        for name, values in times.items():
            low, middle, high = quantiles(values, n=4)
            print(f"8-byte all-reduce, recorder {name}: {middle:.0f} ns ({low:.0f} - {high:.0f})")
        for name, more, less in (
            ("the recorder", "on", "off"),
            ("the ledger", "on, with a ledger", "on"),
        ):
            pairs = zip(times[more], times[less], strict=True)
            low, middle, high = quantiles([one - other for one, other in pairs], n=4)
            print(
                f"difference by pair, {name}: {middle:.0f} ns ({low:.0f} - {high:.0f}), {rounds} "
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
    question(200)
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
