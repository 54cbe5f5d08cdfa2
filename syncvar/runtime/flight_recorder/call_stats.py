"""Totals of all calls of this rank, for `--stats`.

The ring of the recorder keeps the last calls only.

`Recorder` creates `Totals` only if the launcher asks for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from syncvar.core.process_ids import rank_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncvar.runtime.flight_recorder.call_record import CallFields, CallInfo

_FOLD_AT = 256
_KINDS_MAX = 4096
_CLASSES = tuple(16**power for power in range(1, 9))


def size_class(nbytes: int) -> int:
    """Return the upper limit of a size's class: 0, 16 B, 256 B, 4 KiB, 64 KiB, 1 MiB and so on.

    A size may exceed the limit by a sixteenth, for headers.

    Example:
        >>> [size_class(nbytes) for nbytes in (0, 8, 16, 18, 5000)]
        [0, 16, 16, 256, 65536]
    """
    return (
        next((end for end in _CLASSES if nbytes <= end + end // 16), _CLASSES[-1]) if nbytes else 0
    )


def size_of(info: CallInfo, nbytes: int) -> int:
    """Return the bytes by which a call is rated, as nccl-tests counts them; -1 if unknown.

    Args:
        info: The call.
        nbytes: Bytes that were recorded; used if the call does not know its size.
    """
    fields = info.fields
    if fields.size >= 0:
        return fields.size
    if info.path == "hosts":  # several schedules ran, on parts of the data
        return -1
    # A persistent call records the bytes of one rank in advance.
    is_block = info.nbytes and fields.collective == "all_gather"
    return nbytes * len(info.members) if is_block else nbytes


class Totals:
    """Counts calls as the ring records them.

    Cost: 0.25 us for each cached call, on top of the 0.2 us of the ring.
    """

    def __init__(self, append: Callable[[Any], None]) -> None:
        self._append = append
        self._prepared: dict[int, list[Any]] = {}  # by identity of the CallInfo: [info, calls, ns]
        self._others: deque[Any] = deque()
        self._fold_at = _FOLD_AT
        self._rows: dict[tuple[str, int, tuple[int, ...], int], list[int]] = {}

    def add(self, item: Any) -> None:
        """Record an operation in the ring and in the totals."""
        self._append(item)
        if type(item) is tuple:
            info, _, began, ended, _ = item
            cell = self._prepared.get(id(info))
            if cell is None:
                if len(self._prepared) >= _KINDS_MAX:
                    self._fold()
                cell = self._prepared[id(info)] = [info, 0, 0]
            cell[1] += 1
            cell[2] += ended - began
        else:
            self._others.append(item)
            if len(self._others) >= self._fold_at:
                self._fold()

    def rows(self) -> list[dict[str, Any]]:
        """Return the totals as plain data."""
        self._fold()
        return [
            {
                "call": call,
                "group": group,
                "ranks": rank_spans(members),
                "size": len(members),
                "class": end,
                "calls": calls,
                "nbytes": nbytes,
                "ns": ns,
                "failed": failed,
            }
            for (call, group, members, end), (calls, nbytes, ns, failed) in self._rows.items()
        ]

    def _fold(self) -> None:
        prepared, self._prepared = self._prepared, {}
        for info, calls, ns in prepared.values():
            self._count(info, calls, info.nbytes, ns)
        for _ in range(len(self._others)):
            entry = self._others.popleft()
            if entry.state == "started":
                self._others.append(entry)  # still running
            elif entry.info.members:
                is_done = entry.state == "done"
                self._count(
                    entry.info, 1, entry.nbytes, entry.ended - entry.began, failed=not is_done
                )
        # Running ones are not checked again at every call.
        self._fold_at = _FOLD_AT + 2 * len(self._others)

    def _count(
        self, info: CallInfo, calls: int, nbytes: int, ns: int, *, failed: bool = False
    ) -> None:
        size = size_of(info, nbytes)
        row = self._rows.setdefault(
            (_row_name(info.fields), info.group, info.members, size_class(max(0, size))),
            [0, 0, 0, 0],
        )
        row[0] += calls
        row[1] = row[1] + size * calls if size >= 0 and row[1] >= 0 else -1
        row[2] += ns
        row[3] += failed


def _row_name(fields: CallFields) -> str:
    """Return the collective, with its op where calls with different ops differ in cost."""
    name, op = fields.collective, fields.op
    return f"{name}({op})" if name in _WITH_OP and op.isalpha() and op.islower() else name


_WITH_OP = ("all_reduce", "all_reduce_shards", "reduce", "reduce_scatter", "scan", "exscan")


# Factor by its formula; n is the number of ranks.
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "2(n-1)/n": lambda size: 2 * (size - 1) / size,
    "(n-1)/n": lambda size: (size - 1) / size,
    "1": lambda _: 1.0,
}

_FORMULAS = {
    **dict.fromkeys(("all_reduce", "all_reduce_shards"), "2(n-1)/n"),
    **dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"), "(n-1)/n"),
    **dict.fromkeys(("reduce", "broadcast", "scan", "exscan", "send", "recv"), "1"),
}


def bus_factor(collective: str, size: int) -> float:
    """Return a collective's factor; 0 if it is unknown or moves no bytes."""
    formula = _FORMULAS.get(collective)
    return BUS_FACTORS[formula](size) if formula is not None and size > 0 else 0.0
