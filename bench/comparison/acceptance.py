"""Two questions asked of syncvar alone: what a wait costs, and what a busy thread costs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from comparison.libraries import script
from comparison.part import Part, failure
from comparison.rounds import Times, interleave, turn
from comparison.table import grid, size_name, spread

if TYPE_CHECKING:
    from comparison.libraries import Library
    from comparison.rounds import Effort, Plan

__all__ = ["busy_thread", "slow_peer"]

SLEEP_S = 10


def slow_peer(syncvar: Library, effort: Effort) -> Part:
    """Let one of two workers come late; give the CPU time of the other's wait as shares of a core."""
    arguments = ["--sleep", str(SLEEP_S)]
    waiting = partial(
        turn, syncvar, 2, arguments, effort.timeout + SLEEP_S, script("peer_syncvar_wait.py")
    )
    results, problems = interleave("slow peer", {"syncvar": waiting}, effort.rounds)
    if problems:
        return failure("slow peer", problems)
    found = results["syncvar"]
    values: dict[str, Any] = {name: spread(one[name] for one in found) for name in found[0]}
    most = max(one["after"] for one in found)
    lines = [
        (
            f"one of 2 workers calls all_reduce {SLEEP_S} s late; CPU time (user + system) of the "
            "waiting process,"
        ),
        f"as a share of one core, median of {len(found)} rounds:",
        f"  in the first second     {values['first_second'][1]:.2%}",
        f"  after it                {values['after'][1]:.2%} (largest {most:.2%})",
        f"  the waiting call ends   {values['woken_after_us'][1]:.0f} us after the late one begins",
    ]
    return Part({**values, "after_largest": most}, lines)


def busy_thread(syncvar: Library, workers: int, plan: Plan) -> Part:
    """Measure without and with one busy Python thread in each worker, in turns; give the slowdown."""
    arguments = plan.arguments("syncvar")
    turns = {
        "alone": partial(turn, syncvar, workers, arguments, plan.effort.timeout),
        "beside": partial(
            turn, syncvar, workers, [*arguments, "--busy-thread"], plan.effort.timeout
        ),
    }
    results, problems = interleave("busy thread", turns, plan.effort.rounds)
    if problems:
        return failure("busy thread", problems)
    times = {name: Times(workers) for name in turns}
    for name, found in results.items():
        for number, result in enumerate(found, 1):
            times[name].take("syncvar", number, result)
    skipped = times["alone"].skipped
    rows: list[dict[str, Any]] = []
    for work in plan.works:
        for size in work.sizes if work.kind not in skipped else ():
            without, beside = (
                spread(one.of("syncvar", work, size).values()) for one in times.values()
            )
            values = {"without_us": without, "with_us": beside, "slowdown": beside[1] / without[1]}
            rows.append({"kind": work.kind, "size": size, **values})
    lines = [
        (
            f"{workers} workers, each with one thread in `while True: pass`; median us of "
            f"{plan.effort.rounds} rounds:"
        )
    ]
    body = []
    for row in rows:
        cells = [
            f"{row['without_us'][1]:.0f}",
            f"{row['with_us'][1]:.0f}",
            f"{row['slowdown']:.2f}",
        ]
        body.append([row["kind"], size_name(row["size"]), *cells])
    lines += grid(["kind", "size", "without", "with", "slowdown"], body)
    lines += [f"  {kind} not measured: {why}" for kind, why in skipped.items()]
    return Part({"workers": workers, "rows": rows}, lines)
