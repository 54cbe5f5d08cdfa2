"""The ledger: for each variable and call site its calls, their bytes and their time.

A `Ledger` counts the calls of one rank while `sv.ledger` has it open, or holds those of a file. It
sends nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from syncvar.core.errors import ConfigError
from syncvar.core.process_ids import rank_list, rank_spans
from syncvar.runtime.call_record import CallCounter, CallInfo, is_ours, site_of, size_of
from syncvar.shm.segment_file import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import CodeType, FrameType


FORMAT = "syncvar ledger 1"
SIZE_UNKNOWN = -1
VIEWS = ("variable", "site", "call")
_ENTRIES_MAX = 10_000
_LARGEST = 64 << 20  # bytes of a file
_ROWS_SHOWN = 30
_own_frame = sys._getframe  # noqa: SLF001  (the documented way to the caller's frame)


class LedgerRow(NamedTuple):
    """The calls of one kind from one line of the program.

    In a row of `Ledger.by` or `Ledger.totals`, texts that differ among its calls are empty.

    Example:
        >>> import syncvar as sv
        >>> with sv.ledger() as ledger:
        ...     sv.barrier()
        >>> ledger.rows[0].collective, ledger.totals().collective
        ('barrier', '')
    """

    variable: str  # name of the variable, "w, b and 2 more" for several, or empty for none
    collective: str  # for instance "all_reduce(sum)", or an access such as "assign_add(mean)"
    site: str  # "train.py:49 in step"; for a started call the line that started it
    function: str  # name of the function at the site
    ranks: str  # ranks of the group, for instance "0-3"
    calls: int
    nbytes: int  # bytes of the arrays, as nccl-tests counts them
    seconds: float  # time from the begin to the end of the calls
    waiting_s: float | None  # the part of it that was waiting, see `Ledger`; None if unknown
    failed: int  # calls that raised an error


class LedgerChange(NamedTuple):
    """A number of two ledgers, for the calls of a variable, collective and function."""

    variable: str
    collective: str
    function: str
    site: str  # in the new ledger, or in the old one if the calls are gone
    unit: str  # "calls" or "bytes"
    old: int
    new: int

    def describe(self) -> str:
        """Return the change in words."""
        subject = f"variable {self.variable!r}, " if self.variable else ""
        return f"{subject}{self.collective} at {self.site}: {self.old} -> {self.new} {self.unit}"


class _CallKind(NamedTuple):
    """What calls have in common that take the same time when nobody waits."""

    variable: str
    collective: str
    ranks: str
    size: int


class _CallPlace(NamedTuple):
    """A line of the program."""

    site: str
    function: str


_NO_PLACE = _CallPlace("", "")


class _CallSums:
    """The calls of one kind from one place."""

    __slots__ = ("calls", "failed", "fastest", "nbytes", "ns")

    def __init__(self, calls: int = 0, nbytes: int = 0, ns: int = 0) -> None:
        self.calls, self.nbytes, self.ns = calls, nbytes, ns
        self.fastest = 0  # nanoseconds of the fastest successful call; 0 for none
        self.failed = 0

    def add(self, other: _CallSums) -> None:
        self.calls += other.calls
        self.nbytes += other.nbytes
        self.ns += other.ns
        self.failed += other.failed
        self.fastest = min(filter(None, (self.fastest, other.fastest)), default=0)


_LedgerEntries = dict[tuple[_CallKind, _CallPlace], _CallSums]
COLUMNS = (*_CallKind._fields, *_CallPlace._fields, "calls", "nbytes", "ns", "fastest_ns", "failed")


class SiteCounter(CallCounter):
    """Counts calls by kind and program line; about 1 us for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: _LedgerEntries = {}  # what `folded` has brought up to date
        self._sums: dict[tuple[Any, ...], _CallSums] = {}  # the calls since then
        # By identity of the code: the code, which keeps the identity, and whether it is ours
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self._places: dict[tuple[int, int], _CallPlace] = {}

    def add(self, item: Any) -> None:
        """Record a call in the ring, and count it."""
        self.append(item)
        if type(item) is not tuple:
            self._add_other(item, *(item.place or self._caller()))
            return
        code, instruction = self._caller() if len(item) == 5 else item[5:]
        info, ns = item[0], item[3] - item[2]
        key = id(info), id(code), instruction
        cell = self._cached.get(key) or self._new_cell(key, info, code, instruction, ns)
        cell[1] += 1
        cell[2] += ns
        if ns < cell[5]:  # noqa: PLR1730  (hot path)
            cell[5] = ns

    def _caller(self) -> tuple[Any, int | None]:
        """Return the code and the instruction of the innermost frame outside of syncvar."""
        codes, frame = self._codes, cast("FrameType | None", _own_frame(2))
        while frame is not None:
            code = frame.f_code
            known = codes.get(id(code))
            if known is None:
                known = codes[id(code)] = code, is_ours(frame)
            if not known[1]:
                return code, frame.f_lasti
            frame = frame.f_back
        return None, None

    def folded(self) -> _LedgerEntries:
        """Return all calls that have ended."""
        self._fold()
        counted, self._sums = self._sums, {}
        for (variable, name, members, size, code_id, instruction), sums in counted.items():
            kind = _CallKind(variable, name, rank_spans(members), size)
            key = kind, self._place(code_id, instruction)
            self.entries.setdefault(key, _CallSums()).add(sums)
        return self.entries

    def _count(
        self, info: CallInfo, calls: int, nbytes: int, ns: int, *more: Any, failed: bool = False
    ) -> None:
        code, instruction, *fastest = more
        spec = info.spec
        if not (info.members or spec.variable):
            return
        size = known if (known := size_of(info, nbytes)) >= 0 else nbytes
        moved = size * calls
        if len(self.entries) + len(self._sums) >= _ENTRIES_MAX:
            size = SIZE_UNKNOWN  # calls of ever new sizes
        if instruction is not None and id(code) not in self._codes:
            self._codes[id(code)] = code, False
        # Codes with the same content are equal, also those of two files.
        key = spec.variable, spec.kind, info.members, size, id(code), instruction
        sums = self._sums.get(key) or self._sums.setdefault(key, _CallSums())
        sums.calls += calls
        sums.nbytes += moved
        sums.ns += ns
        sums.failed += failed
        if not failed:
            quick = max(1, fastest[0] if fastest else ns)
            sums.fastest = min(sums.fastest or quick, quick)

    def _place(self, code_id: int, instruction: int | None) -> _CallPlace:
        if instruction is None:
            return _NO_PLACE
        key = code_id, instruction
        place = self._places.get(key)
        if place is None:
            code = self._codes[code_id][0]
            name = code.co_filename
            with contextlib.suppress(OSError):  # the working directory has been removed
                relative = os.path.relpath(name)
                name = name if relative.startswith("..") else relative
            place = self._places[key] = _CallPlace(site_of(code, instruction, name), code.co_name)
        return place


class Ledger:
    """The calls of one or more ranks, by variable, collective and program line.

    `print(ledger)` shows them as a table, most bytes first. `sv.ledger` opens one.

    A rank cannot know how long a call would take if all were there. So a ledger takes the fastest
    call of the same variable, collective, group and size in place of it. The waiting time of the
    others is what they take longer. That is a lower bound where even the fastest call had to
    wait, and contains all other delays, such as those of a busy machine. It is unknown for a kind
    with one call. In a merged ledger the fastest call of all ranks counts: the rank that comes last
    does not wait, so this is close to the truth.

    Pushes to parameter servers, which no rank waits for, are not in it.

    Args:
        ranks: Ranks whose calls it contains.

    Example:
        >>> import numpy as np
        >>> import syncvar as sv
        >>> with sv.ledger() as ledger:
        ...     for _ in range(3):
        ...         total = sv.all_reduce(np.ones(1000))
        >>> [(row.collective, row.calls, row.nbytes) for row in ledger.rows]
        [('all_reduce(sum)', 3, 24000)]
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(ranks)
        self.counter = SiteCounter()

    @property
    def rows(self) -> list[LedgerRow]:
        """The calls by variable, collective, line and group; most bytes first.

        While the ledger is open, they are those so far, without calls that have not ended.
        """
        return self._grouped(lambda kind, place: (*kind[:2], *place, kind.ranks))

    def by(self, view: str) -> list[LedgerRow]:
        """Return the rows by one property alone.

        Args:
            view: "variable", "site" or "call".

        Raises:
            ConfigError: There is no such view.
        """
        if view == "variable":
            return self._grouped(lambda kind, _: (kind.variable, "", "", "", ""))
        if view == "site":
            return self._grouped(lambda _, place: ("", "", *place, ""))
        if view == "call":
            return self._grouped(lambda kind, _: ("", kind.collective, "", "", ""))
        raise ConfigError(f"there is no view {view!r} of a ledger: take one of {', '.join(VIEWS)}")

    def totals(self) -> LedgerRow:
        """Return the sum of all rows."""
        rows = self._grouped(lambda *_: ("",) * 5)
        return rows[0] if rows else LedgerRow("", "", "", "", "", 0, 0, 0.0, None, 0)

    def merge(self, *others: Ledger) -> Ledger:
        """Return a ledger with the calls of this one and of others, as of other ranks.

        Example:
            >>> import syncvar as sv
            >>> with sv.ledger() as ledger:
            ...     sv.barrier()
            >>> everyone = sv.all_gather_object(ledger.to_data())
            >>> merged = sv.Ledger().merge(*map(sv.Ledger.from_data, everyone))
            >>> merged.ranks, merged.totals().calls
            ((0,), 1)
        """
        every = (self, *others)
        result = Ledger(sorted({rank for one in every for rank in one.ranks}))
        for one in every:
            for key, entry in one.counter.folded().items():
                result.counter.entries.setdefault(key, _CallSums()).add(entry)
        return result

    def _grouped(self, name: Any) -> list[LedgerRow]:
        entries = self.counter.folded()
        kinds: dict[_CallKind, _CallSums] = {}
        for (kind, _), entry in entries.items():
            kinds.setdefault(kind, _CallSums()).add(entry)
        rows: dict[tuple[str, ...], tuple[_CallSums, list[float]]] = {}
        for (kind, place), entry in entries.items():
            total, waits = rows.setdefault(name(kind, place), (_CallSums(), []))
            total.add(entry)
            same = kinds[kind]
            if same.fastest and same.calls > 1 and kind.size != SIZE_UNKNOWN:
                waits.append(max(0, entry.ns - same.fastest * entry.calls) / 1e9)
        found = [
            LedgerRow._make(
                (
                    *texts,
                    one.calls,
                    one.nbytes,
                    one.ns / 1e9,
                    sum(waits) if waits else None,
                    one.failed,
                )
            )
            for texts, (one, waits) in rows.items()
        ]
        return sorted(found, key=lambda row: (-row.nbytes, -row.seconds))

    # -- files -------------------------------------------------------------------------------------

    def to_data(self) -> dict[str, Any]:
        """Return the ledger as plain data, for `from_data`, JSON and `sv.gather_object`."""
        return {
            "format": FORMAT,
            "ranks": list(self.ranks),
            "columns": list(COLUMNS),
            "entries": [
                [*kind, *place, one.calls, one.nbytes, one.ns, one.fastest, one.failed]
                for (kind, place), one in self.counter.folded().items()
            ],
        }

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Return the ledger of `to_data`; ValueError if the data are none."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
            result = cls(map(int, data["ranks"]))
            places = [data["columns"].index(column) for column in COLUMNS]
            for row in data["entries"]:
                *texts, size, site, function = [row[place] for place in places[:6]]
                calls, nbytes, ns, fastest, failed = (int(row[place]) for place in places[6:])
                kind = _CallKind._make((*map(str, texts), int(size)))
                entry = _CallSums(calls, nbytes, ns)
                entry.fastest, entry.failed = fastest, failed
                result.counter.entries[kind, _CallPlace(str(site), str(function))] = entry
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return result

    def text(self) -> str:
        """Return the ledger as JSON, one line for each entry."""
        import json  # only a ledger that is written needs it

        data = self.to_data()
        lines = ",\n  ".join(json.dumps(one) for one in sorted(data.pop("entries")))
        return f'{json.dumps(data)[:-1]},\n "entries": [\n  {lines}\n ]}}\n'

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the ledger to a file, as JSON.

        Args:
            file: Path of the file, which is replaced.

        Example:
            >>> import tempfile
            >>> import syncvar as sv
            >>> with sv.ledger() as ledger:
            ...     sv.barrier()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ledger.save(f"{folder}/ledger.json")
            ...     sv.Ledger.load(f"{folder}/ledger.json").rows == ledger.rows
            True
        """
        from syncvar.core.output_files import REQUESTED, write_file

        folder, name = os.path.split(os.path.abspath(file))
        write_file(folder, name, self.text(), REQUESTED)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Read a ledger from a file.

        Args:
            file: Path of a file that `save` or `SYNCVAR_LEDGER` wrote.

        Raises:
            ConfigError: The file is missing, or is no ledger.
        """
        import json

        path = os.fspath(file)
        try:
            if os.path.getsize(path) > _LARGEST:
                raise ConfigError(f"{path} is too large for a ledger")
            with open(path, encoding="utf-8") as opened:
                return cls.from_data(json.load(opened))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not a ledger: {error}") from error

    # -- tables ------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return ledger_table(self, self.rows)

    def __repr__(self) -> str:
        return f"<Ledger of {_ranks_text(self)}: {self.totals().calls} calls>"


def ledger_table(ledger: Ledger, rows: Sequence[LedgerRow]) -> str:
    """Return rows as a table, with a line about the whole ledger."""
    total = ledger.totals()
    head = f"ledger of {_ranks_text(ledger)}: {total.calls} calls, {format_bytes(total.nbytes)}"
    head += f", {total.seconds:.3f} s in calls" + (f", {total.failed} failed" * bool(total.failed))
    titles = [name for name in ("variable", "collective", "site", "ranks") if _is_used(rows, name)]
    table = [(*titles, "calls", "bytes", "seconds", "waiting")]
    for row in rows[:_ROWS_SHOWN]:
        waiting = "-" if row.waiting_s is None else f"{row.waiting_s:.3f}"
        numbers = str(row.calls), format_bytes(row.nbytes), f"{row.seconds:.3f}", waiting
        table.append((*(getattr(row, name) or "-" for name in titles), *numbers))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [head]
    for line in table:
        cells = [
            text.ljust(width) if index < len(titles) else text.rjust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    if len(rows) > _ROWS_SHOWN:
        lines.append(f"  {len(rows) - _ROWS_SHOWN} more rows")
    whom = "all these ranks" if len(ledger.ranks) > 1 else "this rank, a lower bound"
    lines.append(f"  waiting: seconds beyond the fastest call of the same kind and size on {whom}")
    return "\n".join(lines)


def _is_used(rows: Sequence[LedgerRow], name: str) -> bool:
    return any(getattr(row, name) for row in rows)


def _ranks_text(ledger: Ledger) -> str:
    return rank_list(ledger.ranks) if ledger.ranks else "no rank"


# -- comparisons -----------------------------------------------------------------------------------


def compare_ledgers(old: Ledger, new: Ledger) -> list[LedgerChange]:
    """Return the calls and bytes of both ledgers, by variable, collective and function.

    Lines of a program move, so their numbers are not compared.
    """
    before, after = _by_function(old), _by_function(new)
    changes = []
    for key in before | after:
        was, now = before.get(key), after.get(key)
        site = (now or was)[0]  # type: ignore[index]
        for index, unit in enumerate(("calls", "bytes"), 1):
            numbers = (one[index] if one else 0 for one in (was, now))
            changes.append(LedgerChange(*key, site, unit, *numbers))  # type: ignore[arg-type]
    return changes


def _by_function(ledger: Ledger) -> dict[tuple[str, str, str], tuple[str, int, int]]:
    result: dict[tuple[str, str, str], tuple[str, int, int]] = {}
    for row in ledger.rows:
        key = row.variable, row.collective, row.function
        site, calls, nbytes = result.get(key, (row.site, 0, 0))
        result[key] = site, calls + row.calls, nbytes + row.nbytes
    return result
