"""Totals of all calls of this rank, for `--stats`: the ring of the recorder keeps the last ones only.

Where nobody asks for totals nothing of this is there, and a call costs what it always did.
"""

from __future__ import annotations

import math
import re
from collections import deque
from typing import TYPE_CHECKING, Any

from syncvar.core.rank_text import rank_spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.runtime.flight_recorder.call_record import CallInfo

__all__ = ["Totals", "size_class", "size_of"]

_FOLD_AT = 256
_KINDS_MAX = 4096
_ARRAY = re.compile(r"([a-z]+)(\d*)\[([\d, ]*)\]")
_BYTES = re.compile(r"(\d+) bytes")
_CLASSES = tuple(16**power for power in range(1, 9))


def size_class(nbytes: int) -> int:
    """Return the upper end of the class of a size: 0, 16 B, 256 B, 4 KiB, 64 KiB, 1 MiB and so on.

    Example:
        >>> [size_class(nbytes) for nbytes in (0, 8, 16, 18, 5000)]
        [0, 16, 16, 256, 65536]
    """
    return (
        next((end for end in _CLASSES if nbytes <= end + end // 16), _CLASSES[-1]) if nbytes else 0
    )  # a header is no matter


def size_of(told: CallInfo, nbytes: int) -> int:
    """Return the size by which a call is rated, as nccl-tests counts it; -1 where it is not known.

    Args:
        told: The call; where its words name the array, that is the size.
        nbytes: What was recorded.

    Example:
        >>> from syncvar.runtime.flight_recorder.call_record import CallInfo
        >>> size_of(CallInfo("all_reduce(sum, float32[10, 10])", 0, (0, 1), 0, 0, "shm"), 1200)
        400
    """
    array = _ARRAY.search(told.what)
    if array is not None:
        bits = int(array[2] or 8)  # of a bool
        return (
            math.prod(int(length) for length in array[3].split(",") if length.strip()) * bits // 8
        )
    said = _BYTES.search(told.what)
    if said is not None:
        return int(said[1])
    if told.path == "hosts":  # several plans were run, on parts of it
        return -1
    # A persistent call, which tells bytes beforehand, has the block of one rank.
    return (
        nbytes * len(told.members)
        if told.nbytes and told.what.startswith("all_gather(")
        else nbytes
    )


class Totals:
    """Counts calls while the ring takes them.

    Args:
        append: Adds to the ring.

    Cost: 0.25 us for each call of the prepared way, on top of the 0.2 us that the ring costs.
    """

    def __init__(self, append: Callable[[Any], None]) -> None:
        self._append = append
        self._prepared: dict[int, list[Any]] = {}  # by identity of what is told: [told, calls, ns]
        self._others: deque[Any] = deque()
        self._fold_at = _FOLD_AT
        self._rows: dict[tuple[str, int, tuple[int, ...], int], list[int]] = {}

    def add(self, item: Any) -> None:
        """Add an operation to the ring and to the totals."""
        self._append(item)
        if type(item) is tuple:
            told, _, began, ended, _ = item
            cell = self._prepared.get(id(told))
            if cell is None:
                if len(self._prepared) >= _KINDS_MAX:
                    self._fold()
                cell = self._prepared[id(told)] = [told, 0, 0]
            cell[1] += 1
            cell[2] += ended - began
        else:
            self._others.append(item)
            if len(self._others) >= self._fold_at:
                self._fold()

    def rows(self) -> list[dict[str, Any]]:
        """Return the totals, as plain data."""
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
        for told, calls, ns in prepared.values():
            self._count(told, calls, told.nbytes, ns)
        for _ in range(len(self._others)):
            entry = self._others.popleft()
            if entry.state == "started":
                self._others.append(entry)  # its end is still to come
            elif entry.told.members:
                is_done = entry.state == "done"
                self._count(
                    entry.told, 1, entry.nbytes, entry.ended - entry.began, failed=not is_done
                )
        self._fold_at = _FOLD_AT + 2 * len(
            self._others
        )  # those that have not ended are not looked at again with each call

    def _count(
        self, told: CallInfo, calls: int, nbytes: int, ns: int, *, failed: bool = False
    ) -> None:
        size = size_of(told, nbytes)
        row = self._rows.setdefault(
            (_call(told.what), told.group, told.members, size_class(max(0, size))), [0, 0, 0, 0]
        )
        row[0] += calls
        row[1] = row[1] + size * calls if size >= 0 and row[1] >= 0 else -1
        row[2] += ns
        row[3] += failed


def _call(what: str) -> str:
    """Return what is counted together: the collective, with its op."""
    name, _, rest = what.partition("(")
    op = rest.partition(",")[0]
    return (
        f"{name}({op})" if re.fullmatch("[a-z]+", op) and "," in rest and name in _WITH_OP else name
    )


_WITH_OP = ("all_reduce", "all_reduce_shards", "reduce", "reduce_scatter", "scan", "exscan")
