"""Measure syncvar beside its peers. Libraries take turns.

python bench/compare.py --setup                    once: the peers' virtual environments
python bench/compare.py --workers 2,4 --json FILE  the all-reduce
python bench/compare.py --collective broadcast,all_gather --dtype float64
                                                   other collectives, another dtype
python bench/compare.py --parts launch,import      other parts alone; see --parts
python bench/compare.py --all --json FILE          every part, all collectives, every bound
python bench/compare.py --hosts --json FILE        over several hosts (network namespaces, so root)
python bench/compare.py --slow-peer                CPU time of a wait for a late worker
python bench/compare.py --busy-thread              slowdown beside a busy Python thread

bench/README.md describes the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison import acceptance, bounds, machine, picture
from comparison.crowd import crowd
from comparison.drop_in import drop_in
from comparison.everyday import everyday
from comparison.grouped import grouped
from comparison.halves import halves
from comparison.host_table import SCENES
from comparison.hosts import hosts
from comparison.joined import joined
from comparison.libraries import NAMES, Library, library
from comparison.model import resnet50
from comparison.page import page
from comparison.part import Part, Setting
from comparison.rounds import Effort, Plan, Work, measure
from comparison.setup import set_up
from comparison.starting import importing, launch, launch_over_hosts
from comparison.table import COLLECTIVES, KINDS, compare, tables
from comparison.traffic import traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from comparison.bounds import Verdict

SIZES = {"all_reduce": "8,4K,64K,1M,16M,64M"}
OTHER_SIZES = "64K,1M,16M"
ALL_OTHER_SIZES = "8,4K,64K,1M,16M"
CROWDED, CROWDED_SIZES = (8, 16), "8,4K,64K,1M,16M"
"""Workers on however few cores there are, for --all: the all-reduce of ordinary arrays."""
LARGEST = {"tensorflow": 1 << 20}
"""Of libraries that would take most of the time of a run; with --sizes they are measured at all of them."""
SECONDS, ALL_SECONDS = 0.3, 0.15
ROUNDS, HOSTS_SECONDS, HOSTS_ROUNDS = 5, 0.05, 3
COMPARISON = "comparison"
HOSTS_LAUNCH = "hosts-launch"
PARTS: dict[str, Callable[[Setting], Part]] = {
    "half": halves,
    "resnet50": resnet50,
    "drop-in": drop_in,
    "grouped": grouped,
    "everyday": everyday,
    "launch": launch,
    "import": importing,
    "crowd": crowd,
    "joined": joined,
    "traffic": traffic,
    "hosts": hosts,
    HOSTS_LAUNCH: launch_over_hosts,
}
ITEM_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def main() -> int:
    """Do what the command line asks for."""
    chosen = _arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # what runs now is ended on the way out
    names = [name for name in NAMES if name in chosen.libraries]
    if chosen.setup:
        return 0 if set_up(chosen.peers, names) else 1
    about = machine.describe()
    libraries, missing, versions = _find(names, chosen)
    print("\n".join(machine.lines(about, versions)), flush=True)
    report: dict[str, Any] = {"machine": about, "versions": versions}
    if "syncvar" in missing:
        return 1
    effort = Effort(chosen.seconds, chosen.rounds, chosen.timeout)
    report["seconds"], report["rounds"] = effort.seconds, effort.rounds
    present = {one.name: one for one in libraries if one.name not in missing}
    setting = Setting(present, tuple(chosen.workers), effort, chosen.crowd, chosen.scenes)
    verdicts: list[Verdict] = []
    failed = False
    for name, one in _parts(chosen, setting, libraries, missing):
        part = one()
        print("", *part.lines, sep="\n", flush=True)
        report[name] = [*report.get(name, []), part.report] if name in SEVERAL else part.report
        verdicts += part.verdicts
        failed = failed or part.failed
        _write(chosen.json, report)
    if chosen.png and report.get(COMPARISON):
        rows = [row for one in report[COMPARISON] for row in one["rows"]]
        picture.draw(
            chosen.png,
            f"{chosen.dtype}, {about['cpu']}, {about['cores']} cores, {about['date'][:10]}",
            rows,
        )
    if verdicts:
        print("", *bounds.lines(verdicts), sep="\n", flush=True)
        report["bounds"] = [
            {**one._asdict(), "bound": one.bound._asdict(), "verdict": one.word} for one in verdicts
        ]
        _write(chosen.json, report)
    if chosen.markdown:
        Path(chosen.markdown).write_text("\n".join([*page(report), ""]), encoding="utf-8")
    return int(failed or (chosen.strict and any(one.word == "MISSED" for one in verdicts)))


SEVERAL = (COMPARISON, "busy_thread")
"""What is asked once for each number of workers."""


def _parts(
    chosen: argparse.Namespace, setting: Setting, libraries: list[Library], missing: dict[str, str]
) -> list[tuple[str, Callable[[], Part]]]:
    """Return what was asked for, by name, in order."""
    if chosen.slow_peer or chosen.busy_thread:
        found: list[tuple[str, Callable[[], Part]]] = []
        if chosen.slow_peer:
            found.append(
                ("slow_peer", lambda: acceptance.slow_peer(setting.syncvar, setting.effort))
            )
        if chosen.busy_thread:
            plan = _plan(chosen, setting.effort)
            found += [
                (
                    "busy_thread",
                    lambda workers=workers: acceptance.busy_thread(setting.syncvar, workers, plan),
                )
                for workers in setting.workers
            ]
        return found
    found = []
    if COMPARISON in chosen.parts:
        plan = _plan(chosen, setting.effort)
        found += [
            (COMPARISON, lambda workers=workers: _compared(libraries, workers, plan, missing))
            for workers in setting.workers
        ]
        crowded = Plan(
            (Work("all_reduce", KINDS[0], tuple(_sizes(CROWDED_SIZES))),),
            chosen.dtype,
            setting.effort,
            LARGEST,
        )
        found += [
            (COMPARISON, lambda workers=workers: _compared(libraries, workers, crowded, missing))
            for workers in (CROWDED if chosen.all and not chosen.sizes else ())
            if workers not in setting.workers
        ]
    return found + [
        (name, lambda part=part: part(setting))
        for name, part in PARTS.items()
        if name in chosen.parts
    ]


def _compared(libraries: list[Library], workers: int, plan: Plan, missing: dict[str, str]) -> Part:
    """Compare the libraries with one number of workers."""
    times = measure(libraries, workers, plan, missing)
    rows = compare(times, plan, [one.name for one in libraries if one.name != "syncvar"])
    started = {one.name: one.started_as(workers) for one in libraries}
    report = {
        "workers": workers,
        "dtype": plan.dtype,
        "started_as": started,
        "rows": rows,
        "turns": times.rows,
        "problems": times.problems,
        "skipped": times.skipped,
        "refused": times.refused,
    }
    verdicts = bounds.judge_rows(rows, plan.dtype)
    return Part(report, tables(times, plan, libraries, rows), verdicts, "syncvar" in times.problems)


def _plan(chosen: argparse.Namespace, effort: Effort) -> Plan:
    """Return what to measure of each collective: of all but all_reduce one kind, unless --kinds or --all is given."""
    works = []
    for collective in chosen.collective:
        sizes = chosen.sizes or _sizes(
            "1M"
            if chosen.busy_thread
            else SIZES.get(collective, ALL_OTHER_SIZES if chosen.all else OTHER_SIZES)
        )
        kinds = chosen.kinds or (KINDS if collective == "all_reduce" or chosen.all else KINDS[:1])
        works += [
            Work(collective, kind, tuple(sizes))
            for kind in kinds
            if kind in COLLECTIVES[collective]
        ]
    return Plan(tuple(works), chosen.dtype, effort, {} if chosen.sizes else LARGEST)


def _find(
    names: list[str], chosen: argparse.Namespace
) -> tuple[list[Library], dict[str, str], dict[str, str]]:
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
        text = json.dumps(report, indent=1)
        for innermost in (r"\[\s+[^][{}]*?\s+\]", r"\{\s+[^{}]*?\s+\}"):  # on one line each
            text = re.sub(innermost, lambda found: " ".join(found[0].split()), text)
        Path(path).write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--setup", action="store_true", help="make the peers' environments and end")
    add("--all", action="store_true", help="every part, with all collectives, against every bound")
    parts = (COMPARISON, *PARTS)
    measured = f"what to measure, of {','.join(parts)} [{COMPARISON}]"
    add("--parts", type=_names(parts), default=[COMPARISON], help=measured)
    over_hosts = ["hosts", HOSTS_LAUNCH]
    add(
        "--hosts",
        dest="parts",
        action="store_const",
        const=over_hosts,
        help="the parts over several hosts; needs root",
    )
    scenes = ",".join(SCENES)
    add(
        "--scenes",
        type=_names(SCENES),
        default=list(SCENES),
        help=f"hosts x workers @ Gbit/s [{scenes}]",
    )
    add("--slow-peer", action="store_true", help="measure what a wait costs instead")
    add("--busy-thread", action="store_true", help="measure what a busy thread costs instead")
    add(
        "--peers",
        type=Path,
        default=Path(".peers"),
        help="folder of the peers' environments [.peers]",
    )
    add(
        "--python",
        default=sys.executable,
        help="interpreter that has syncvar [the one running this]",
    )
    add("--collective", type=_names(COLLECTIVES), help=f"of {','.join(COLLECTIVES)} [all_reduce]")
    add("--dtype", default="float32", help="of the elements [float32]")
    add("--workers", type=_numbers, help="numbers of workers [2,4; 2 with --busy-thread]")
    sizes = f"{SIZES['all_reduce']}; {OTHER_SIZES} of other collectives; 1M with --busy-thread"
    add("--sizes", type=_sizes, help=f"bytes of the larger buffer, with K or M [{sizes}]")
    default = f"all of all_reduce; {KINDS[0]} of the others, with --all all"
    add("--kinds", type=_names(KINDS), help=f"of {','.join(KINDS)} [{default}]")
    add("--libraries", type=_names(NAMES), default=list(NAMES), help=f"[{','.join(NAMES)}]")
    add("--crowd", type=int, default=64, help="workers of the part crowd [64]")
    rounds = f"how often each library is started [{ROUNDS}; {HOSTS_ROUNDS} with --hosts]"
    add("--rounds", type=int, help=rounds)
    add(
        "--seconds",
        type=float,
        help=f"time for each size and kind in a turn [{SECONDS}; {ALL_SECONDS} with --all, {HOSTS_SECONDS} with --hosts]",
    )
    add("--timeout", type=float, default=300.0, help="longest time of one turn in seconds [300]")
    add("--json", metavar="FILE", help="write everything that was measured")
    add("--png", metavar="FILE", help="draw time and ratio against size")
    add("--markdown", metavar="FILE", help="write the tables as they stand in bench/results")
    add("--strict", action="store_true", help="end with 1 when a bound is missed")
    chosen = parser.parse_args()
    if chosen.all:
        chosen.parts = list(parts)
    chosen.collective = chosen.collective or (list(COLLECTIVES) if chosen.all else ["all_reduce"])
    usual = (ALL_SECONDS, ROUNDS) if chosen.all else (SECONDS, ROUNDS)
    usual = (HOSTS_SECONDS, HOSTS_ROUNDS) if chosen.parts == over_hosts else usual
    chosen.seconds = usual[0] if chosen.seconds is None else chosen.seconds
    chosen.rounds = usual[1] if chosen.rounds is None else chosen.rounds
    chosen.scenes = tuple(SCENES[name] for name in chosen.scenes)
    chosen.workers = chosen.workers or ([2] if chosen.busy_thread else [2, 4])
    if (chosen.slow_peer or chosen.busy_thread) and "syncvar" in chosen.libraries:
        chosen.libraries = ["syncvar"]
    elif "syncvar" not in chosen.libraries and not chosen.setup:
        parser.error("--libraries without syncvar leaves nothing to compare with")
    if chosen.rounds < 1 or chosen.seconds <= 0 or chosen.timeout <= 0 or chosen.crowd < 1:
        parser.error("--rounds, --seconds, --timeout and --crowd must be positive")
    unit = _itemsize(chosen.dtype)
    if unit is None:
        parser.error(
            f"--dtype {chosen.dtype}: choose a float, bfloat16 or integer type by its NumPy name"
        )
    if chosen.sizes and any(size % unit for size in chosen.sizes):
        parser.error(f"--sizes: each must be whole elements of {chosen.dtype}, {unit} bytes each")
    if chosen.png and picture.missing():
        parser.error(picture.missing())
    chosen.python = os.path.abspath(shutil.which(chosen.python) or chosen.python)
    return chosen


def _itemsize(dtype: str) -> int | None:
    """Return the bytes of an element, None where the name is no such type.

    Example:
        >>> _itemsize("bfloat16"), _itemsize("uint8"), _itemsize("text")
        (2, 1, None)
    """
    known = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
    known |= {f"{sign}int{bits}": size for sign in ("", "u") for bits, size in ITEM_BYTES.items()}
    return known.get(dtype)


def _numbers(text: str) -> list[int]:
    numbers = [int(one) for one in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each number must be at least 1")
    return numbers


def _sizes(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [int(one.rstrip("KM")) * units.get(one[-1:], 1) for one in text.upper().split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text}: sizes are positive")
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
