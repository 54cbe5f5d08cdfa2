"""Lines at the bottom of a terminal that change in place: the progress of each rank.

`LiveLines` decides which bytes draw and erase these lines; it writes nothing. `split_nested` finds
the updates of bars below the first one, as tqdm writes them with `position=1` or in nested loops.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# While these lines are written, the terminal cuts long lines instead of wrapping them.
_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_LAST = 1 << 40  # sorts the launcher's own line after those of all ranks

_NESTED = re.compile(rb"(?<!\n)(\n+)\r([^\n]*?)((?:\x1b\[A)+)")
_PARTIAL = re.compile(rb"\n+(?:\r[^\r\n\x1b]*){0,2}(?:\x1b\[A)*(?:\x1b\[?)?\Z")
_UP = b"\x1b[A"
_PARTIAL_UP = (b"", b"\x1b", b"\x1b[")


class LineKey(NamedTuple):
    """The place of a live line; lines stand in the order of their keys."""

    rank: int
    stream: str
    position: int  # 0 for the first bar of the stream, 1 for the one below it


STATUS = LineKey(_LAST, "err", 0)
"""The place of the launcher's own line."""


class LiveLines:
    r"""The lines, and how many of them the terminal shows now.

    After `draw` the cursor stands at the start of the last line. `erase` returns to the first line
    and clears all.

    Example:
        >>> lines = LiveLines()
        >>> lines.set(LineKey(1, "err", 0), b"[1] 20%")
        >>> lines.set(LineKey(0, "err", 0), b"[0] 30%")
        >>> lines.draw(24)
        b'\x1b[?7l\r[0] 30%\x1b[K\n[1] 20%\x1b[K\x1b[?7h\r'
        >>> lines.erase()
        b'\r\x1b[A\x1b[J'
    """

    def __init__(self) -> None:
        self.has_changed = False  # whether `draw` would show something else
        self._lines: dict[LineKey, bytes] = {}
        self._shown = 0

    @property
    def is_missing(self) -> bool:
        """Whether there are lines, and the terminal shows none of them."""
        return bool(self._lines) and not self._shown

    def set(self, key: LineKey, text: bytes) -> None:
        """Set the text of a line, without control characters; no text removes the line."""
        if text == self._lines.get(key, b""):
            return
        self.has_changed = True
        if text:
            self._lines[key] = text
        else:
            del self._lines[key]

    def remove(self, rank: int, stream: str) -> None:
        """Remove all lines of a stream."""
        for key in [one for one in self._lines if one[:2] == (rank, stream)]:
            self.set(key, b"")

    def shift(self, rank: int, stream: str) -> None:
        """Note that a stream has ended its first line: the lines below it move up."""
        own = sorted(key for key in self._lines if key[:2] == (rank, stream))
        below = {key.position - 1: self._lines[key] for key in own if key.position > 1}
        self.remove(rank, stream)
        for position, text in below.items():
            self.set(LineKey(rank, stream, position), text)

    def draw(self, rows: int) -> bytes:
        """Return the bytes that show all lines, in at most half of the rows of a terminal."""
        keys = sorted(self._lines)
        room = max(1, rows // 2)
        shown = [self._lines[key] for key in keys[:room]]
        if len(keys) > room:
            shown[-1] = f"... and {len(keys) - room + 1} more lines".encode()
            if keys[-1] == STATUS:
                shown[-1] = self._lines[STATUS]
        self.has_changed = False
        start, less = self._to_first(), len(shown) < self._shown
        self._shown = len(shown)
        if not shown:
            return start + b"\x1b[J" if less else b""
        body = b"\n".join(line + b"\x1b[K" for line in shown)
        return _CUT + start + body + (b"\x1b[J" if less else b"") + _WRAP + b"\r"

    def erase(self) -> bytes:
        """Return the bytes that clear the shown lines; the next text takes their place."""
        if not self._shown:
            return b""
        start, self._shown = self._to_first(), 0
        return start + (b"\x1b[J" if start != b"\r" else b"\x1b[K")

    def _to_first(self) -> bytes:
        return b"\r" + _UP * (self._shown - 1)


def update_start(data: bytes) -> int:
    r"""Return where an update of a bar below the first one may begin; the length if nowhere.

    Example:
        >>> update_start(b"outer\n\r 2"), update_start(b"outer\ntext")
        (5, 10)
    """
    end = data.rfind(b"\n") + 1
    start = len(data[:end].rstrip(b"\n"))
    return start if _PARTIAL.match(data, start) else len(data)


def split_nested(data: bytes, *, is_last: bool = False) -> tuple[list[tuple[int, bytes]], bytes]:
    r"""Split the bytes of a stream into updates of bars below the first one, and all others.

    An update moves down by line feeds, and up again by as many sequences. Line feeds before these
    end a line. With `is_last` nothing follows soon.

    Returns:
        The parts in order, each with the position of its bar, or 0 for other bytes; and the last
        bytes, if they may be the beginning of another update.

    Example:
        >>> split_nested(b"\r outer\n\r 20%\x1b[A\r outer 2\n")
        ([(0, b'\r outer'), (1, b' 20%'), (0, b'\r outer 2')], b'\n')
    """
    parts = []
    at = 0
    for match in _NESTED.finditer(data):
        downs, ups = len(match[1]), len(match[3]) // len(_UP)
        if ups < downs and not is_last and data[match.end() :] in _PARTIAL_UP:
            break
        position = min(downs, ups)
        parts.append((0, data[at : match.end(1) - position]))
        parts.append((position, match[2].rpartition(b"\r")[2]))
        at = match.end()
    rest = data[at:]
    start = len(rest) if is_last else update_start(rest)
    parts.append((0, rest[:start]))
    return [one for one in parts if one[0] or one[1]], rest[start:]
