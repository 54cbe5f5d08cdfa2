"""Two questions asked of syncvar alone: what a wait costs, and what a busy thread costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.rounds import Plan, Times, turn
from comparison.table import grid, size_name, spread

if TYPE_CHECKING:
    from comparison.libraries import Library

__all__ = ["busy_thread", "slow_peer"]

SLEEP_S = 10


def slow_peer(syncvar: Library, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Let one of two workers come late; give the CPU time of the other's wait as shares of a core."""
    script = str(Path(syncvar.script).with_name("peer_syncvar_wait.py"))
    found: list[dict[str, float]] = []
    for number in range(1, plan.rounds + 1):
        print(f"  slow peer, round {number} of {plan.rounds}", file=sys.stderr, flush=True)
        result, problem = turn(syncvar, 2, ["--sleep", str(SLEEP_S)], plan.timeout + SLEEP_S, script)
        if result is None:
            return {"problem": problem}, [f"slow peer: failed: {problem}"]
        found.append(result)
    values = {name: spread(one[name] for one in found) for name in found[0]}
    most = max(one["after"] for one in found)
    lines = [
        f"one of 2 workers calls all_reduce {SLEEP_S} s late; CPU time (user + system) of the waiting process,",
        f"as a share of one core, median of {len(found)} rounds:",
        f"  in the first second     {values['first_second'][1]:.2%}",
        f"  after it                {values['after'][1]:.2%} (largest {most:.2%})",
        f"  the waiting call ends   {values['woken_after_us'][1]:.0f} us after the late one begins",
    ]
    return {**values, "after_largest": most}, lines


def busy_thread(syncvar: Library, workers: int, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Measure without and with one busy Python thread in each worker, in turns; give the slowdown."""
    times = {False: Times(workers), True: Times(workers)}
    arguments = ["--kinds", ",".join(plan.kinds), "--sizes", ",".join(map(str, plan.sizes))]
    for number in range(1, plan.rounds + 1):
        for busy, into in times.items():
            print(f"  busy thread: {busy}, round {number} of {plan.rounds}", file=sys.stderr, flush=True)
            flags = ["--seconds", str(plan.seconds), *(["--busy-thread"] if busy else [])]
            found, problem = turn(syncvar, workers, [*arguments, *flags], plan.timeout)
            if found is None:
                return {"problem": problem}, [f"busy thread ({busy}): failed: {problem}"]
            into.skipped.update(found["skipped"])
            into.rows += [{"round": number, "library": "syncvar", **row} for row in found["results"]]
    rows: list[dict[str, Any]] = []
    for kind in plan.kinds:
        for size in plan.sizes:
            if kind not in times[False].skipped:
                without, beside = (spread(times[one].of("syncvar", kind, size).values()) for one in (False, True))
                values = {"without_us": without, "with_us": beside, "slowdown": beside[1] / without[1]}
                rows.append({"kind": kind, "size": size, **values})
    lines = [f"{workers} workers, each with one thread in `while True: pass`; median us of {plan.rounds} rounds:"]
    body = []
    for row in rows:
        cells = [f"{row['without_us'][1]:.0f}", f"{row['with_us'][1]:.0f}", f"{row['slowdown']:.2f}"]
        body.append([row["kind"], size_name(row["size"]), *cells])
    lines += grid(["kind", "size", "without", "with", "slowdown"], body)
    lines += [f"  {kind} not measured: {why}" for kind, why in times[False].skipped.items()]
    return {"workers": workers, "rows": rows}, lines
