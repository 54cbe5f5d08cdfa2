"""syncvar's all-reduce beside its peers, on one host, in turns.

python bench/compare.py --setup                    once: the peers' virtual environments (see bench/README.md)
python bench/compare.py --workers 2,4 --json FILE  the comparison
python bench/compare.py --slow-peer                CPU time of a wait for a worker that comes 10 s late
python bench/compare.py --busy-thread              slowdown beside a busy Python thread in each worker
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from comparison import acceptance, machine
from comparison.libraries import NAMES, Library, library
from comparison.rounds import Plan, measure
from comparison.setup import set_up
from comparison.table import KINDS, compare, tables

SIZES = "8,4K,64K,1M,16M,64M"


def main() -> int:
    """Do what the command line asks for."""
    chosen = _arguments()
    names = [name for name in NAMES if name in chosen.libraries]
    if chosen.setup:
        return 0 if set_up(chosen.peers, names) else 1
    about = machine.describe()
    libraries, missing, versions = _find(names, chosen)
    print("\n".join(machine.lines(about, versions)), flush=True)
    report: dict[str, Any] = {"machine": about, "versions": versions}
    if "syncvar" in missing:
        return 1
    if chosen.slow_peer or chosen.busy_thread:
        plan = _plan(chosen, "1M")
        if chosen.slow_peer:
            report["slow_peer"], lines = acceptance.slow_peer(libraries[0], plan)
            print("", *lines, sep="\n", flush=True)
        if chosen.busy_thread:
            report["busy_thread"] = []
            for workers in chosen.workers or [2]:
                found, lines = acceptance.busy_thread(libraries[0], workers, plan)
                report["busy_thread"].append(found)
                print("", *lines, sep="\n", flush=True)
        failed = any("problem" in found for found in [report.get("slow_peer", {}), *report.get("busy_thread", [])])
    else:
        plan = _plan(chosen, SIZES)
        report["seconds"], report["rounds"], report["comparison"] = plan.seconds, plan.rounds, []
        failed = False
        for workers in chosen.workers or [2, 4]:
            times = measure(libraries, workers, plan, missing)
            rows = compare(times, plan, [name for name in names if name != "syncvar"])
            print("", *tables(times, plan, libraries, rows), sep="\n", flush=True)
            started = {one.name: one.started_as(workers) for one in libraries}
            parts = {"rows": rows, "turns": times.rows, "problems": times.problems, "skipped": times.skipped}
            report["comparison"].append({"workers": workers, "started_as": started, **parts})
            failed = failed or "syncvar" in times.problems
            _write(chosen.json, report)
    _write(chosen.json, report)
    return int(failed)


def _plan(chosen: argparse.Namespace, sizes: str) -> Plan:
    """Return what to measure; `sizes` if the command line says nothing of them."""
    found = tuple(chosen.sizes or _sizes(sizes))
    return Plan(found, tuple(chosen.kinds), chosen.seconds, chosen.rounds, chosen.timeout)


def _find(names: list[str], chosen: argparse.Namespace) -> tuple[list[Library], dict[str, str], dict[str, str]]:
    """Return the libraries, why each missing one is missing, and the versions by label."""
    libraries = [library(name, chosen.python, chosen.peers) for name in names]
    missing, versions = {}, {}
    for one in libraries:
        found, problem = one.probe()
        if found is None:
            missing[one.name] = f"MISSING: {problem}"
        versions[one.label] = found or missing[one.name]
    return libraries, missing, versions


def _write(path: str | None, report: dict[str, Any]) -> None:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and end")
    parser.add_argument("--slow-peer", action="store_true", help="measure what a wait costs instead")
    parser.add_argument("--busy-thread", action="store_true", help="measure what a busy thread costs instead")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the peers' environments [.peers]")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has syncvar [the one running this]")
    parser.add_argument("--workers", type=_numbers, help="numbers of workers [2,4; 2 in the other modes]")
    parser.add_argument("--sizes", type=_sizes, help=f"bytes, with K or M [{SIZES}; 1M in the other modes]")
    parser.add_argument("--kinds", type=_names(KINDS), default=list(KINDS), help=f"[{','.join(KINDS)}]")
    parser.add_argument("--libraries", type=_names(NAMES), default=list(NAMES), help=f"[{','.join(NAMES)}]")
    parser.add_argument("--rounds", type=int, default=5, help="how often each library is started [5]")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each size and kind in a turn [0.3]")
    parser.add_argument("--timeout", type=float, default=300.0, help="longest time of one turn in seconds [300]")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    chosen = parser.parse_args()
    if (chosen.slow_peer or chosen.busy_thread) and "syncvar" in chosen.libraries:
        chosen.libraries = ["syncvar"]
    elif "syncvar" not in chosen.libraries and not chosen.setup:
        parser.error("--libraries without syncvar leaves nothing to compare with")
    if chosen.rounds < 1 or chosen.seconds <= 0 or chosen.timeout <= 0:
        parser.error("--rounds, --seconds and --timeout must be positive")
    chosen.python = os.path.abspath(shutil.which(chosen.python) or chosen.python)
    return chosen


def _numbers(text: str) -> list[int]:
    numbers = [int(one) for one in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each number must be at least 1")
    return numbers


def _sizes(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [int(one.rstrip("KM")) * units.get(one[-1:], 1) for one in text.upper().split(",")]
    if min(sizes) < 4 or any(size % 4 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: sizes are whole float32 numbers, 4 bytes each")
    return sizes


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text}: choose of {','.join(known)}")
        return found

    return names


if __name__ == "__main__":
    sys.exit(main())
