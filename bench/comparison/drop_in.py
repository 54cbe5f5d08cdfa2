"""Programs of other libraries over syncvar: DistributedDataParallel beside gloo, and mpi4py's calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from comparison.bounds import Verdict, judge
from comparison.part import Part, Setting, failures
from comparison.processes import run
from comparison.table import grid

__all__ = ["drop_in"]

BENCH = Path(__file__).resolve().parents[1]
BOUNDS = {"ResNet-50": "drop-in resnet50", "MLP": "drop-in mlp"}
WHAT = {
    "calls": "the all-reduces of DDP's buckets",
    "backward": "a whole backward pass without computation, for reference",
}


def drop_in(setting: Setting) -> Part:
    """Measure DistributedDataParallel over both backends, and the layer for mpi4py.

    In each script the compared calls alternate. Both scripts need the interpreter that runs this: torch, if it has it, and syncvar.
    """
    workers = str(setting.workers[0])
    problems: dict[str, str] = {}
    verdicts: list[Verdict] = []
    rows: list[dict[str, Any]] = []
    found = _lines("torch_ddp.py", ["--json", "--workers", workers], setting, problems)
    for row in found:
        rows.append(row)
        if row["kind"] == "calls":
            what = f"DDP over syncvar against gloo, {row['case']}, {WHAT['calls']}"
            verdicts.append(judge(BOUNDS[row["case"]], row["gloo_ms"] / row["syncvar_ms"], what))
    if not found:
        verdicts += [judge(name, None, "DDP over syncvar against gloo") for name in BOUNDS.values()]
    layer = _lines("mpi4py_layer.py", ["--workers", workers], setting, problems)
    added = layer[0]["added"] if layer else None
    verdicts.append(judge("mpi4py layer", added, "what mpi4py's layer adds to an 8-byte Allreduce"))
    body = [
        [
            f"{row['gloo_ms'] / row['syncvar_ms']:.2f}",
            f"{row['gloo_ms']:.2f}",
            f"{row['syncvar_ms']:.2f}",
            row["case"],
            WHAT[row["kind"]],
        ]
        for row in rows
    ]
    head = ["gloo / syncvar", "gloo ms", "syncvar ms", "gradients", "what"]
    lines = [f"torch's DistributedDataParallel, {workers} workers; medians of the slowest rank"]
    lines += grid(head, body, left=2)
    if layer:
        times = ", ".join(f"{name} {us:.2f} us" for name, us in layer[0].items())
        lines += ["", f"8 bytes, {workers} workers: {times}"]
    report = {"workers": setting.workers[0], "torch": rows, "mpi4py": layer, "problems": problems}
    return Part(report, [*lines, *failures(problems)], verdicts, "mpi4py_layer.py" in problems)


def _lines(
    name: str, arguments: list[str], setting: Setting, problems: dict[str, str]
) -> list[dict[str, Any]]:
    """Return what a script prints as JSON, one object a line; record why it failed."""
    command = [sys.executable, str(BENCH / name), *arguments]
    done = run(command, timeout=setting.effort.timeout)
    if done.failure:
        problems[name] = done.failure
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
