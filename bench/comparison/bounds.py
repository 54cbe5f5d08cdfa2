"""What must be reached and what is aimed at, as data, and the judgement of what was measured.

The bounds of the comparison are ratios of medians, for float32 sums; the others are numbers of
their own. A bound of which nothing was measured, because a library is missing or a part failed, is
shown as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from comparison.libraries import MPI, PEERS
from comparison.table import grid, size_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Bound", "Verdict", "judge", "judge_rows", "lines", "short"]

KI, MI = 1 << 10, 1 << 20
MOVING = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")


class Bound(NamedTuple):
    """A bound on one number.

    Args:
        must: What must be reached.
        aim: What is aimed at; None where nothing more is.
        unit: Of both.
        at_most: Whether smaller is better.
    """

    must: float
    aim: float | None = None
    unit: str = "x"
    at_most: bool = False


class Compared(NamedTuple):
    """A bound on rows of the comparison.

    Args:
        collectives: Which.
        kind: Of syncvar's calls.
        workers: How many.
        low: Smallest size that it holds for.
        high: Largest.
        against: Name of the rivals.
        bound: On the best rival's time divided by syncvar's; where at most, on syncvar's divided by
            the rival's.
    """

    collectives: tuple[str, ...]
    kind: str
    workers: int
    low: int
    high: int
    against: str
    bound: Bound


LONGER_KNOWN = tuple(name for name in PEERS if name != "intelmpi")
RIVALS = {
    "best peer": PEERS,
    "best peer but Intel MPI": LONGER_KNOWN,
    "best MPI but Intel's": tuple(name for name in MPI if name in LONGER_KNOWN),
    "gloo": ("torch",),
    "TensorFlow": ("tensorflow",),
}
ALL_REDUCE = ("all_reduce",)
WITHOUT_END = 1 << 62


def _by_size(kind: str, workers: int, bounds: dict[int, Bound]) -> list[Compared]:
    """Return the bounds of an all-reduce at single sizes, against whoever is fastest."""
    return [
        Compared(ALL_REDUCE, kind, workers, size, size, "best peer", bound)
        for size, bound in bounds.items()
    ]


COMPARED = (
    *_by_size(
        "private",
        2,
        {
            8: Bound(1.3, 2),
            4 * KI: Bound(1.8, 3),
            64 * KI: Bound(1.4, 1.8),
            1 * MI: Bound(1.15, 1.35),
            16 * MI: Bound(1.2, 1.5),
            64 * MI: Bound(1.4, 1.7),
        },
    ),
    *_by_size(
        "private",
        4,
        {
            8: Bound(1.3, 2),
            4 * KI: Bound(1.6, 2.2),
            64 * KI: Bound(1.6, 2.2),
            1 * MI: Bound(1.2, 1.4),
            16 * MI: Bound(1.3, 1.8),
            64 * MI: Bound(1.3, 1.8),
        },
    ),
    *_by_size(
        "resident", 2, {1 * MI: Bound(2, 2.5), 16 * MI: Bound(2.6, 4), 64 * MI: Bound(2.6, 3.5)}
    ),
    *_by_size("resident", 4, {1 * MI: Bound(2), 16 * MI: Bound(2.6), 64 * MI: Bound(2.6)}),
    *(
        Compared(ALL_REDUCE, "private", workers, 8, 16 * MI, "best peer", Bound(1, 1.3))
        for workers in (8, 16)
    ),
    *(
        Compared(MOVING, "private", workers, 1, WITHOUT_END, "best peer", Bound(0.8, 1))
        for workers in (2, 4)
    ),
    Compared(ALL_REDUCE, "private", 2, 64 * KI, 64 * MI, "best peer but Intel MPI", Bound(1.3, 2)),
    Compared(ALL_REDUCE, "private", 4, 64 * KI, 64 * MI, "best peer but Intel MPI", Bound(1.5, 3)),
    Compared(
        ALL_REDUCE,
        "private",
        2,
        8,
        8,
        "best MPI but Intel's",
        Bound(4, 1.5, "x its time", at_most=True),
    ),
    Compared(
        ALL_REDUCE,
        "private",
        2,
        4 * KI,
        4 * KI,
        "best MPI but Intel's",
        Bound(2.5, 1.5, "x its time", at_most=True),
    ),
    Compared(ALL_REDUCE, "private", 4, 8, 8, "best MPI but Intel's", Bound(1)),
    Compared(ALL_REDUCE, "private", 4, 4 * KI, 4 * KI, "best MPI but Intel's", Bound(1)),
    Compared(ALL_REDUCE, "resident", 2, 1 * MI, 1 * MI, "best peer but Intel MPI", Bound(4, 10)),
    Compared(ALL_REDUCE, "resident", 2, 16 * MI, 16 * MI, "best peer but Intel MPI", Bound(5, 10)),
    Compared(ALL_REDUCE, "resident", 2, 64 * MI, 64 * MI, "best peer but Intel MPI", Bound(7, 10)),
    Compared(ALL_REDUCE, "resident", 4, 1 * MI, 64 * MI, "best peer but Intel MPI", Bound(3, 6)),
    Compared(ALL_REDUCE, "variable", 2, 1 * MI, 64 * MI, "best MPI but Intel's", Bound(1.3, 4)),
    Compared(ALL_REDUCE, "variable", 4, 1 * MI, 64 * MI, "best MPI but Intel's", Bound(1.5, 4)),
    Compared(
        ALL_REDUCE, "plain variable", 2, 1 * MI, 64 * MI, "best MPI but Intel's", Bound(1.3, 4)
    ),
    Compared(
        ALL_REDUCE, "plain variable", 4, 1 * MI, 64 * MI, "best MPI but Intel's", Bound(1.5, 4)
    ),
    Compared(ALL_REDUCE, "private", 2, 1, 64 * KI, "TensorFlow", Bound(200)),
    Compared(ALL_REDUCE, "private", 4, 1, 64 * KI, "TensorFlow", Bound(200)),
    Compared(ALL_REDUCE, "private", 2, 1, 4 * KI, "gloo", Bound(30)),
    Compared(ALL_REDUCE, "private", 4, 1, 4 * KI, "gloo", Bound(30)),
    Compared(MOVING, "private", 2, 64 * KI, WITHOUT_END, "best MPI but Intel's", Bound(1, 1.5)),
    Compared(MOVING, "private", 4, 64 * KI, WITHOUT_END, "best MPI but Intel's", Bound(1, 1.5)),
)

SINGLE = {
    "half": Bound(1.2, None, "x float32's time", at_most=True),
    "resnet50": Bound(3, 8),
    "drop-in resnet50": Bound(2),
    "drop-in mlp": Bound(4),
    "mpi4py layer": Bound(1, None, "us", at_most=True),
    "grouped transfers": Bound(10, None, "transfers", at_most=True),
    "grouped zmq": Bound(0.1, None, "x the time of the calls", at_most=True),
    "grouped shared memory": Bound(0.3, None, "x the time of the calls", at_most=True),
    "grouped python": Bound(5, None, "us", at_most=True),
    "everyday run": Bound(5, None, "us", at_most=True),
    "launch mpirun": Bound(0.8, None, "x its time", at_most=True),
    "launch spawn": Bound(1.5, None, "x its time", at_most=True),
    "launch torchrun": Bound(0.2, None, "x its time", at_most=True),
    "joined launcher": Bound(2, 1.2, "x its time", at_most=True),
    "joined gloo": Bound(2, 1, "x its time", at_most=True),
    "hosts small": Bound(1, None, "gloo / ours"),
    "hosts large": Bound(0.95, None, "gloo / ours"),
    "hosts gloo": Bound(1, None, "gloo / ours"),
    "hosts 8 B": Bound(40, 20, "us", at_most=True),
    "hosts 64 KiB": Bound(180, None, "us", at_most=True),
    "hosts 1 MiB": Bound(1.3, 1, "ours / Intel MPI", at_most=True),
    "hosts 16 MiB": Bound(1.2, 1, "ours / Intel MPI", at_most=True),
    "hosts encrypted 8 B": Bound(60, None, "us", at_most=True),
    "hosts encrypted 16 MiB": Bound(1.6, None, "ours / unencrypted", at_most=True),
    "hosts two workers": Bound(1.15, None, "2x2 / 2x1", at_most=True),
    "hosts line": Bound(0.9, None, "share of the line"),
    "hosts links": Bound(1.1, 1, "ours / links", at_most=True),  # 0.1 is noise
    "hosts bytes": Bound(1.1, None, "x the vector", at_most=True),
    "launch hosts": Bound(1.5, None, "x its time", at_most=True),
    "import": Bound(60, None, "ms", at_most=True),
    "crowd seconds": Bound(30, None, "s", at_most=True),
    "training tensorflow": Bound(3),
    "training torch": Bound(1.5),
    "training accuracy": Bound(0.5, None, "points", at_most=True),
    "crowd memory": Bound(60, None, "MiB", at_most=True),
}


class Verdict(NamedTuple):
    """One number beside its bound; no number where it was not measured."""

    what: str
    value: float | None
    bound: Bound

    def reaches(self, limit: float | None) -> bool:
        """Whether the number is as good as a limit."""
        if self.value is None or limit is None:
            return False
        return self.value <= limit if self.bound.at_most else self.value >= limit

    @property
    def word(self) -> str:
        """Return the verdict in a word.

        Example:
            >>> Verdict("it", 1.7, Bound(1.5, 2)).word, Verdict("it", 3, Bound(2, at_most=True)).word
            ('reached', 'MISSED')
        """
        if self.value is None:
            return "not measured"
        return (
            "aim"
            if self.reaches(self.bound.aim)
            else "reached"
            if self.reaches(self.bound.must)
            else "MISSED"
        )


def judge(name: str, value: float | None, what: str) -> Verdict:
    """Return the verdict on a number that has a bound of its own."""
    return Verdict(what, value, SINGLE[name])


def judge_rows(rows: Iterable[dict[str, Any]], dtype: str) -> list[Verdict]:
    """Return the verdicts on the rows of a comparison, as `table.compare` makes them."""
    if dtype != "float32":
        return []
    found = []
    for row in rows:
        for one in COMPARED:
            is_meant = row["collective"] in one.collectives and row["kind"] == one.kind
            if (
                not is_meant
                or row["workers"] != one.workers
                or not one.low <= row["size"] <= one.high
            ):
                continue
            place = (
                f"{row['collective']} {one.kind}, {one.workers} workers, {size_name(row['size'])}"
            )
            found.append(
                Verdict(f"{place}, against {one.against}", _ratio(row["us"], one), one.bound)
            )
    return found


def _ratio(times: dict[str, Any], one: Compared) -> float | None:
    theirs = [times[peer][1] for peer in RIVALS[one.against] if peer in times]
    if not theirs or "syncvar" not in times:
        return None
    ratio: float = min(theirs) / times["syncvar"][1]
    return 1 / ratio if one.bound.at_most else ratio


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the table of the verdicts and their count."""
    if not verdicts:
        return []
    body = []
    for one in verdicts:
        value = "-" if one.value is None else _text(one.value)
        sign = "<=" if one.bound.at_most else ">="
        aim = "-" if one.bound.aim is None else f"{sign} {one.bound.aim:g}"
        body.append([value, f"{sign} {one.bound.must:g}", aim, one.word, one.bound.unit, one.what])
    words = [one.word for one in verdicts]
    done = words.count("aim") + words.count("reached")
    count = f"bounds: {done} of {len(words)} reached, {words.count('aim')} of them the aim too"
    missed = f"; {words.count('MISSED')} missed, {words.count('not measured')} not measured"
    return [
        "Bounds",
        *grid(["measured", "must", "aim", "verdict", "unit", "what"], body, left=2),
        count + missed,
    ]


def short(one: Verdict) -> str:
    """Return a number beside its bound in a few words; a dagger marks one that misses it."""
    if one.value is None:
        return f"{one.bound.unit}: not measured"
    sign, mark = "≤" if one.bound.at_most else "≥", " †" if one.word == "MISSED" else ""
    return f"{one.bound.unit} {_text(one.value)} {sign} {one.bound.must:g}{mark}"


def _text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
