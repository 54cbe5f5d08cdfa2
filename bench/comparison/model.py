"""One fused synchronization of ResNet-50's gradients beside torch's DistributedDataParallel over gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

from comparison.bounds import judge
from comparison.libraries import MPI, script
from comparison.part import Part, Setting, failures
from comparison.rounds import interleave, turn
from comparison.table import Spread, grid, number, spread

__all__ = ["resnet50"]

SCRIPTS = {
    "syncvar": "model_syncvar.py",
    "openmpi": "model_mpi.py",
    "mpich": "model_mpi.py",
    "torch": "model_torch.py",
}
MEANINGS = {
    ("syncvar", "private"): "sv.all_reduce(list, 'mean', out=list), ordinary arrays",
    ("syncvar", "resident"): "the same, arrays of sv.empty",
    ("syncvar", "variable"): "sv.assign_add_all of 161 MEAN variables",
    ("torch", "ddp"): "DDP: a backward pass with given gradients, default buckets",
    ("torch", "backward"): "the same pass under no_sync",
    ("torch", "flat"): "dist.all_reduce of one vector (sum), for reference",
    **{(name, "each"): "Allreduce of each array in place (sum), for reference" for name in MPI},
    **{(name, "flat"): "Allreduce of one vector in place (sum), for reference" for name in MPI},
}


def resnet50(setting: Setting) -> Part:
    """Time the synchronization with each library, in turns, with the first number of workers.

    The bound compares with what synchronization adds to the backward pass: the time of "ddp" less
    that of "backward", taken within each round.
    """
    workers, effort = setting.workers[0], setting.effort
    arguments = ["--seconds", str(effort.seconds)]
    turns = {
        name: partial(turn, one, workers, arguments, effort.timeout, script(SCRIPTS[name]))
        for name, one in setting.present.items()
        if name in SCRIPTS
    }
    results, problems = interleave(f"{workers} workers, ResNet-50", turns, effort.rounds)
    times = _times(results)
    net = times.get("torch ddp - backward")
    body = []
    for name, value in times.items():
        library, kind = name.split(" ", 1)
        meaning = MEANINGS.get((library, kind), "what DDP's synchronization adds to the pass")
        ratio = f"{net[1] / value[1]:.2f}" if net else "-"
        low, middle, high = map(number, value)
        body.append([f"{middle} ({low}-{high})", ratio, setting.present[library].label, meaning])
    title = f"ResNet-50, 161 gradients of 25,557,032 float32, {workers} workers: one synchronization; median us (quartiles over rounds)"
    lines = [title, *grid(["us", "ddp / it", "library", "what"], body, left=2), *failures(problems)]
    verdicts = []
    for kind in ("private", "resident", "variable"):
        own = times.get(f"syncvar {kind}")
        what = f"ResNet-50's gradients, {workers} workers, {MEANINGS['syncvar', kind]}, against DDP over gloo"
        verdicts.append(judge("resnet50", net[1] / own[1] if net and own else None, what))
    report = {"workers": workers, "us": times, "problems": problems}
    return Part(report, lines, verdicts, "syncvar" in problems)


def _times(results: dict[str, list[dict[str, Any]]]) -> dict[str, Spread]:
    times = {}
    for name, found in results.items():
        rows = [{row["kind"]: row["median_us"] for row in one["results"]} for one in found]
        if rows:
            times.update({f"{name} {kind}": spread(row[kind] for row in rows) for kind in rows[0]})
        if rows and name == "torch":
            times["torch ddp - backward"] = spread(row["ddp"] - row["backward"] for row in rows)
    return times
