"""The interleaved turns: every round starts each contestant once."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from comparison.processes import run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from comparison.libraries import Library

__all__ = [
    "Effort",
    "Found",
    "Plan",
    "Times",
    "Turn",
    "Work",
    "interleave",
    "measure",
    "turn",
    "written_by",
]

Turn: TypeAlias = "Callable[[], tuple[dict[str, Any] | None, str]]"
"""Starts one contestant once; gives what it found and "", or None and why it failed."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured.

    Args:
        seconds: Time for each call and size in a turn.
        rounds: How often each contestant is started.
        timeout: Longest time of a turn, in seconds.
    """

    seconds: float
    rounds: int
    timeout: float


class Work(NamedTuple):
    """Calls to measure: a collective, a kind of syncvar's calls (a peer has the kind "private" only), bytes."""

    collective: str
    kind: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how long.

    Args:
        works: The calls.
        dtype: Of the elements.
        effort: How long.
        largest: Largest size of libraries that are not measured at all sizes.
    """

    works: tuple[Work, ...]
    dtype: str
    effort: Effort
    largest: Mapping[str, int] = field(default_factory=dict)

    def arguments(self, library: str) -> list[str]:
        """Return what a library's worker script is told."""
        works = self.works
        if library != "syncvar":  # its calls of all kinds are the same
            sizes: dict[str, dict[int, None]] = {}
            for work in works:
                kept = (size for size in work.sizes if size <= self.largest.get(library, size))
                sizes.setdefault(work.collective, {}).update(dict.fromkeys(kept))
            works = tuple(
                Work(name, "private", tuple(found)) for name, found in sizes.items() if found
            )
        words = [
            f"{work.collective}/{work.kind}/{','.join(map(str, work.sizes))}" for work in works
        ]
        told = [word for one in words for word in ("--measure", one)]
        return [*told, "--dtype", self.dtype, "--seconds", str(self.effort.seconds)]


@dataclass(slots=True)
class Times:
    """What was measured with one number of workers.

    Args:
        workers: How many.
        rows: One entry for each round, library, collective, kind and size.
        problems: Library -> why it is not, or no longer, in the rows.
        skipped: Kind -> why syncvar has no times of it.
        refused: Library -> collective -> why it cannot do it.
    """

    workers: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, library: str, work: Work, size: int, value: str = "median_us") -> dict[int, float]:
        """Return a library's value of each round."""
        kind = work.kind if library == "syncvar" else "private"
        key = (library, work.collective, kind, size)
        return {
            row["round"]: row[value]
            for row in self.rows
            if (row["library"], row["collective"], row["kind"], row["size"]) == key
        }

    def take(self, library: str, number: int, found: dict[str, Any]) -> None:
        """Add what a library found in a round."""
        self.skipped.update(found.get("skipped", {}))
        if found["refused"]:
            self.refused[library] = found["refused"]
        self.rows += [{"round": number, "library": library, **row} for row in found["results"]]


class Found(NamedTuple):
    """What the contestants found: by name, one entry for each round; and why one failed, which ends its rounds."""

    results: dict[str, list[dict[str, Any]]]
    problems: dict[str, str]


def turn(
    library: Library,
    workers: int,
    arguments: Sequence[str],
    timeout: float,
    script: str | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any] | None, str]:
    """Start a library's worker script once; give what it wrote and "", or None and why it failed."""
    command = [*library.start(workers), script or library.script, *arguments]
    return written_by(command, timeout, {**library.environment(workers), **(env or {})})


def written_by(
    command: Sequence[str], timeout: float, env: Mapping[str, str]
) -> tuple[dict[str, Any] | None, str]:
    """Run a command that takes `--result FILE`; give the JSON that it wrote and "", or None and why it failed."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        result = os.path.join(folder, "result.json")
        done = run([*command, "--result", result], timeout=timeout, env=env, cwd=folder)
        if done.failure:
            return None, done.failure
        try:
            with open(result, encoding="utf-8") as file:
                return json.load(file), ""
        except OSError:
            return None, "it ended without a result"


def interleave(what: str, turns: Mapping[str, Turn], rounds: int) -> Found:
    """Let each contestant have its turn in every round; one that fails is left out of the later ones."""
    found = Found({name: [] for name in turns}, {})
    for number in range(1, rounds + 1):
        for name, one in turns.items():
            if name in found.problems:
                continue
            begin = time.monotonic()
            result, problem = one()
            took = f"{time.monotonic() - begin:.1f} s"
            print(
                f"  {what}, round {number} of {rounds}: {name}, {took}", file=sys.stderr, flush=True
            )
            if result is None:
                found.problems[name] = f"failed in round {number}: {problem}"
            else:
                found.results[name].append(result)
    return found


def measure(
    libraries: Sequence[Library], workers: int, plan: Plan, missing: Mapping[str, str]
) -> Times:
    """Run all rounds of a comparison of libraries."""
    turns = {
        one.name: partial(turn, one, workers, plan.arguments(one.name), plan.effort.timeout)
        for one in libraries
        if one.name not in missing
    }
    found = interleave(f"{workers} workers", turns, plan.effort.rounds)
    times = Times(workers, problems={**missing, **found.problems})
    for name, results in found.results.items():
        for number, result in enumerate(results, 1):
            times.take(name, number, result)
    return times
