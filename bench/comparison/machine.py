"""What a reader must know of the host to judge the numbers."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison.processes import run

__all__ = ["BUSY_LOAD_PER_CORE", "cores", "describe", "lines"]

BUSY_LOAD_PER_CORE = 0.5


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, Any]:
    """Return date, machine, load, source revision and command line."""
    load = os.getloadavg()
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.orig_argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": [round(one, 2) for one in load],
        "busy": load[0] > BUSY_LOAD_PER_CORE * cores(),
        "revision": _revision(),
        "command": shlex.join(["python", *words]),
    }


def lines(machine: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return the header of a report."""
    load = " ".join(map(str, machine["load"]))
    found = [
        f"date      {machine['date']}",
        f"command   {machine['command']}",
        f"machine   {machine['cpu']}, {machine['cores']} usable cores, {machine['system']}",
        f"load      {load} (1, 5, 15 minutes) at the start",
        f"source    {machine['revision']}",
        *(f"library   {label}: {version}" for label, version in versions.items()),
    ]
    if machine["busy"]:
        found.append(
            f"BUSY      the load is above {BUSY_LOAD_PER_CORE} per core: these numbers are rough"
        )
    return found


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _revision() -> str:
    """Return the commit of the checkout that this script is part of, and whether files differ from it."""
    here = str(Path(__file__).parent)
    commit = run(["git", "-C", here, "rev-parse", "--short", "HEAD"], timeout=20)
    if commit.failure:
        return "no git checkout"
    changed = run(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"], timeout=20)
    return f"commit {commit.stdout.strip()}" + (
        " with changed files" if changed.stdout.strip() else ""
    )
