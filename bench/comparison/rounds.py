"""The interleaved turns: every round starts each library once."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from comparison.processes import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comparison.libraries import Library

__all__ = ["Plan", "Times", "measure", "turn"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        sizes: Bytes.
        kinds: Kinds of syncvar's calls; a peer has the kind "private" only.
        seconds: Time for each size and kind in a turn.
        rounds: How often each library is started.
        timeout: Longest time of a turn, in seconds.
    """

    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    seconds: float
    rounds: int
    timeout: float


@dataclass(slots=True)
class Times:
    """What was measured with one number of workers.

    Args:
        workers: How many.
        rows: One entry for each round, library, kind and size.
        problems: Library -> why it is not, or no longer, in the rows.
        skipped: Kind -> why syncvar has no times of it.
    """

    workers: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def of(self, library: str, kind: str, size: int, value: str = "median_us") -> dict[int, float]:
        """Return a library's value of each round."""
        key = (library, kind, size)
        return {row["round"]: row[value] for row in self.rows if (row["library"], row["kind"], row["size"]) == key}


def turn(
    library: Library, workers: int, arguments: Sequence[str], timeout: float, script: str | None = None
) -> tuple[dict[str, Any] | None, str]:
    """Start a library's worker script once; give what it wrote and "", or None and why it failed."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        result = os.path.join(folder, "result.json")
        command = [*library.start(workers), script or library.script, *arguments, "--result", result]
        done = run(command, timeout=timeout, env=library.environment(workers), cwd=folder)
        if done.failure:
            return None, done.failure
        try:
            with open(result, encoding="utf-8") as file:
                return json.load(file), ""
        except OSError:
            return None, "it ended without a result"


def measure(libraries: Sequence[Library], workers: int, plan: Plan, missing: dict[str, str]) -> Times:
    """Run all rounds; a library that fails is left out of the later ones."""
    times = Times(workers, problems=dict(missing))
    for number in range(1, plan.rounds + 1):
        for library in libraries:
            if library.name in times.problems:
                continue
            print(f"  {workers} workers, round {number} of {plan.rounds}: {library.label}", file=sys.stderr, flush=True)
            kinds = plan.kinds if library.name == "syncvar" else ("private",)
            arguments = ["--kinds", ",".join(kinds), "--sizes", ",".join(map(str, plan.sizes))]
            found, problem = turn(library, workers, [*arguments, "--seconds", str(plan.seconds)], plan.timeout)
            if found is None:
                times.problems[library.name] = f"failed in round {number}: {problem}"
                continue
            times.skipped.update(found.get("skipped", {}))
            times.rows += [{"round": number, "library": library.name, **row} for row in found["results"]]
    return times
