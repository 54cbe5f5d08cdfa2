"""Calls over several hosts: which are measured, the bounds on them, and their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from comparison.bounds import SINGLE, Verdict, judge
from comparison.table import size_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["COLUMNS", "SCENES", "Cell", "Scene", "judge_call", "tables"]

KI, MI = 1 << 10, 1 << 20
SIZES = (8, 4 * KI, 64 * KI, MI, 16 * MI)
LINE_SIZES = (8, 64 * KI, MI, 4 * MI, 16 * MI)
ARRAYS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
CALLS = (*ARRAYS, "barrier")
COLUMNS = {
    "unencrypted": "syncvar, unencrypted",
    "syncvar": "syncvar, encrypted",
    "links": "syncvar, ZeroMQ links",
    "torch": "gloo",
    "openmpi": "Open MPI",
    "intelmpi": "Intel MPI",
}


class Scene(NamedTuple):
    """Hosts, the workers on each, and the rate of a host's link in Mbit/s; None for no limit."""

    hosts: int
    each: int
    mbit: int | None

    @property
    def name(self) -> str:
        """Return it for people.

        Example:
            >>> Scene(2, 1, 10_000).name, Scene(2, 2, None).name
            ('2 x 1, 10 Gbit/s', '2 x 2, unlimited')
        """
        rate = "unlimited" if self.mbit is None else f"{self.mbit / 1000:g} Gbit/s"
        return f"{self.hosts} x {self.each}, {rate}"

    @property
    def columns(self) -> list[str]:
        """Return what is measured; the links that lanes have replaced only where the wire is slow."""
        return [one for one in COLUMNS if one != "links" or self.mbit == ONE.mbit]

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Return the collectives and sizes that are measured."""
        sizes = LINE_SIZES if self.mbit == TEN.mbit else SIZES
        return [*((one, size) for one in ARRAYS for size in sizes), ("barrier", SIZES[0])]


PAIR, CROWDED = Scene(2, 1, None), Scene(2, 2, None)
TEN, ONE, THREE = Scene(2, 1, 10_000), Scene(2, 1, 1000), Scene(3, 1, 1000)
SCENES = {
    "2x1": PAIR,
    "2x2": CROWDED,
    "2x1@10": TEN,
    "2x1@1": ONE,
    "3x1@1": THREE,
}


class Cell(NamedTuple):
    """One time: where it was measured, the call, and a key of `COLUMNS`."""

    scene: Scene
    collective: str
    size: int
    column: str


class Rule(NamedTuple):
    """A bound on some calls.

    Args:
        scene: Where.
        collectives: Which.
        sizes: Which.
        bound: Its name in `SINGLE`.
        column: Of `COLUMNS`, the time that it is on.
        rival: What that is compared with: another column, "line" or "2x1"; empty for a bound in
            microseconds.
    """

    scene: Scene
    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    bound: str
    column: str
    rival: str


REDUCE = ("all_reduce",)
OPEN, SECURE = "unencrypted", "syncvar"
RULES = (
    Rule(PAIR, CALLS, SIZES, "hosts gloo", OPEN, "torch"),
    Rule(PAIR, REDUCE, (8,), "hosts 8 B", OPEN, ""),
    Rule(PAIR, REDUCE, (64 * KI,), "hosts 64 KiB", OPEN, ""),
    Rule(PAIR, REDUCE, (MI,), "hosts 1 MiB", OPEN, "intelmpi"),
    Rule(PAIR, REDUCE, (16 * MI,), "hosts 16 MiB", OPEN, "intelmpi"),
    Rule(PAIR, REDUCE, (8,), "hosts encrypted 8 B", SECURE, ""),
    Rule(PAIR, REDUCE, (16 * MI,), "hosts encrypted 16 MiB", SECURE, OPEN),
    Rule(CROWDED, CALLS, SIZES, "hosts two workers", OPEN, "2x1"),
    Rule(TEN, ARRAYS, (4 * MI, 16 * MI), "hosts line", OPEN, "line"),
    Rule(ONE, REDUCE, (8, 64 * KI, MI), "hosts small", SECURE, "torch"),
    Rule(ONE, REDUCE, (16 * MI,), "hosts large", SECURE, "torch"),
    Rule(ONE, CALLS, SIZES, "hosts links", SECURE, "links"),
    Rule(THREE, CALLS, SIZES, "hosts links", SECURE, "links"),
)
SENT = {"all_reduce": 1.0, "broadcast": 1.0}
"""What one of two hosts must send at least, as a share of the size; half of it for the others."""


def judge_call(scene: Scene, collective: str, size: int, us: Mapping[Cell, float]) -> list[Verdict]:
    """Return the verdicts on a call, of the medians of all calls."""
    found = []
    for rule in RULES:
        if rule.scene != scene or collective not in rule.collectives or size not in rule.sizes:
            continue
        where = f"{collective}, {size_name(size)}, {scene.name}: {SINGLE[rule.bound].unit}"
        column = "encrypted" if rule.column == SECURE else rule.column
        found.append(judge(rule.bound, _value(rule, collective, size, us), f"{where}, {column}"))
    return found


def _value(rule: Rule, collective: str, size: int, us: Mapping[Cell, float]) -> float | None:
    ours, rival = us.get(Cell(rule.scene, collective, size, rule.column)), None
    match rule.rival:
        case "":
            return ours
        case "line":
            rival = size * SENT.get(collective, 0.5) * 8 / (rule.scene.mbit or 1)
        case "2x1":
            rival = us.get(Cell(PAIR, collective, size, rule.column))
        case column:
            rival = us.get(Cell(rule.scene, collective, size, column))
    if ours is None or rival is None:
        return None
    return ours / rival if SINGLE[rule.bound].at_most else rival / ours


def tables(
    rows: Iterable[Mapping[str, Any]],
) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Return title, head and body of each scene's table, of the rows that `compare.py --json` writes."""
    bodies: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        times = [row["us"].get(column, [0, 0, 0])[1] for column in COLUMNS]
        cells = [f"{time:,.{0 if time >= 10 else 1}f}" if time else "-" for time in times]
        bounds = "; ".join(one["text"] for one in row["bounds"])
        call = [row["collective"], size_name(row["size"]), *cells, bounds]
        bodies.setdefault(row["scene"], []).append(call)
    head = ["us of a call", "size", *COLUMNS.values(), "bounds"]
    return [(scene, head, body) for scene, body in bodies.items()]
