"""One line on a terminal for work of ours that takes longer than a second.

The line changes in place, and it is gone when the work is done. Nothing of it reaches a pipe or a
file. The setting `progress` turns it off. The launcher turns it on for its ranks if its own
standard error is a terminal: there the launcher shows the line of a rank at the bottom.

Nothing runs in the background. The loop that does the work asks `is_due`, and calls `show`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

VARIABLE = "SYNCVAR_PROGRESS"
_AFTER_S = 1.0  # shorter work shows nothing
_EVERY_S = 0.2
_NAMES_MAX = 4


def can_move_cursor(stream: Any, environ: Mapping[str, str]) -> bool:
    """Return whether a stream is a terminal that can write over a line."""
    return bool(stream.isatty()) and environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def size_text(done: int, total: int) -> str:
    """Return a number of bytes beside the number of all bytes.

    Example:
        >>> size_text(3 << 20, 12 << 20), size_text(100, 2048)
        ('3.0 of 12.0 MiB (25 %)', '0.1 of 2.0 KiB (4 %)')
    """
    unit, name = (1 << 20, "MiB") if total >= 1 << 20 else (1 << 10, "KiB")
    share = 100 * done // max(1, total)
    return f"{done / unit:.1f} of {total / unit:.1f} {name} ({share} %)"


def missing_text(missing: Iterable[str]) -> str:
    """Return the names of what is missing, at most four.

    Example:
        >>> missing_text(["a", "b", "c", "d", "e", "f"])
        'missing: a, b, c, d and 2 more'
    """
    names = list(missing)
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return f"missing: {', '.join(names[:_NAMES_MAX])}{more}"


class ProgressLine:
    """A line that shows how far some work is; use it as a context manager.

    Args:
        write: Replaces the text of the line; "" clears it. None shows nothing.
        after_s: Seconds from the start of the work until the line appears.

    Example:
        >>> with ProgressLine(print, after_s=0.0) as line:
        ...     if line.is_due():
        ...         line.show("copying: 1 of 2 files")
        copying: 1 of 2 files
        <BLANKLINE>
    """

    def __init__(self, write: Callable[[str], None] | None, after_s: float = _AFTER_S) -> None:
        self._write = write
        self._next = time.monotonic() + after_s
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def due_s(self) -> float:
        """Return the seconds until `show` has an effect; infinite if it never has."""
        return float("inf") if self._write is None else max(0.0, self._next - time.monotonic())

    def is_due(self) -> bool:
        """Return whether to call `show` now."""
        return self._write is not None and time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """Replace the text of the line."""
        if self._write is not None:
            self._next = time.monotonic() + _EVERY_S
            self._is_shown = True
            self._write(text)

    def close(self) -> None:
        """Clear the line. Idempotent."""
        if self._write is not None and self._is_shown:
            self._is_shown = False
            self._write("")


def terminal_line(chosen: str, after_s: float = _AFTER_S) -> ProgressLine:
    """Return a line on the standard error of this process, which shows nothing without a reader.

    A background thread shows nothing either: its line would mix with what the program writes.
    `chosen` is the setting `progress`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return ProgressLine(_StandardError().write if is_main and is_watched(chosen) else None, after_s)


def work_line(member_rank: int) -> ProgressLine:
    """Return the line of a call that all ranks of a group make: the first rank shows it."""
    chosen = os.environ.get(VARIABLE, "auto") if member_rank == 0 else "off"
    return terminal_line(chosen)


def is_watched(chosen: str) -> bool:
    """Return whether a person may watch the standard error of this process."""
    if chosen != "auto":
        return chosen == "on"
    return sys.stderr is not None and can_move_cursor(sys.stderr, os.environ)


class _StandardError:
    """The line on the standard error: a terminal, or the pipe to a launcher that has one."""

    def __init__(self) -> None:
        self._width = 0

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            room = 0
            with contextlib.suppress(OSError):
                room = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            # A name of a file or host must not move the cursor.
            line = "".join(one if one.isprintable() else "?" for one in f"syncvar: {text}")
            line = line if text else ""
            if room > 0:
                line = line[:room]
            # Spaces clear a longer line: a launcher drops them, unlike a control sequence.
            sys.stderr.write(f"\r{line:<{self._width}}" + ("" if text else "\r"))
            sys.stderr.flush()
            self._width = len(line)
