"""Many more workers than cores: whether they meet, how long it takes, and what memory each needs."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from comparison.bounds import judge
from comparison.libraries import script
from comparison.part import Part, Setting, failure
from comparison.rounds import interleave, turn

__all__ = ["crowd"]

MIB = 1 << 20


def crowd(setting: Setting) -> Part:
    """Start the workers once a round; the time is that of the whole command."""
    arguments: tuple[Any, ...] = (
        setting.syncvar,
        setting.crowd,
        [],
        setting.effort.timeout,
        script("crowd_syncvar.py"),
    )

    def timed() -> tuple[dict[str, Any] | None, str]:
        begin = time.monotonic()
        found, problem = turn(*arguments)
        return (
            None if found is None else {**found, "command_s": time.monotonic() - begin}
        ), problem

    results, problems = interleave(
        f"{setting.crowd} workers", {"syncvar": partial(timed)}, setting.effort.rounds
    )
    what = f"{setting.crowd} workers"
    names = (
        f"{what}: start, barrier, all-reduce of 1 MiB, end",
        f"{what}: own memory of the largest",
    )
    if problems:
        return failure(
            what,
            problems,
            judge("crowd seconds", None, names[0]),
            judge("crowd memory", None, names[1]),
        )
    found = results["syncvar"]
    seconds = median(one["command_s"] for one in found)
    own = max(max(one["own_bytes"]) for one in found) / MIB
    lines = [
        f"{what}: medians of {len(found)} rounds",
        f"  {seconds:8.2f} s    the whole command",
        f"  {median(one['joined_s'] for one in found):8.2f} s    init and barrier, of rank 0",
        (
            f"  {1e3 * median(one['all_reduce_s'] for one in found):8.2f} ms   the first all-reduce of "
            "1 MiB, every element verified"
        ),
        f"  {own:8.1f} MiB  own memory of the largest worker (resident pages of private mappings)",
        (
            f"  {max(max(one['pss_bytes']) for one in found) / MIB:8.1f} MiB  its proportional share "
            "of everything, shared memory with it"
        ),
    ]
    verdicts = [judge("crowd seconds", seconds, names[0]), judge("crowd memory", own, names[1])]
    return Part({"workers": setting.crowd, "rounds": found}, lines, verdicts)
