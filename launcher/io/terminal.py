"""The launcher's standard input, for a rank on another host: rank 0, or the debugged rank.

The debugged rank gets a terminal of its own on its host, which edits and echoes lines. Meanwhile
the terminal here forwards key by key. Ctrl-C and Ctrl-Z reach the launcher as signals, as on one
host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK = 1 << 16
_UNFED_MAX = 1 << 20
_NO_SIZE = (0, 0)


class Input:
    """The launcher's standard input. It never blocks: its owner polls the descriptors.

    Args:
        descriptor: The descriptor of the input.
        screen: The descriptor of the rank's output.
        is_debugged: Whether the rank that reads is debugged; it has a terminal if both descriptors
            are one.

    Attributes:
        size: Rows and columns of the rank's terminal, or None.
        unfed: The number of bytes that were read, and that the rank has not taken.
    """

    def __init__(self, descriptor: int, screen: int, *, is_debugged: bool) -> None:
        self.unfed = 0
        self._descriptor = descriptor
        self._is_over = False
        self._before: list[int | list[bytes | int]] | None = None
        self.size = (
            _size(descriptor)
            if is_debugged and os.isatty(descriptor) and os.isatty(screen)
            else None
        )

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return (
            [self._descriptor]
            if not self._is_over and self.unfed < _UNFED_MAX and self._is_ours()
            else []
        )

    def is_at(self, descriptor: int) -> bool:
        """Return whether to read from this descriptor."""
        return descriptor == self._descriptor and not self._is_over

    def read(self) -> bytes | None:
        """Return new bytes: empty at the end, None if there are none."""
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO and os.isatty(
                self._descriptor
            ):  # the shell has the terminal again
                return None
            data = b""
        self.unfed += len(data)
        self._is_over = not data
        return data

    def fed(self, count: int) -> None:
        """Note that the rank has taken so many bytes."""
        self.unfed = max(0, self.unfed - max(0, count))

    def take(self) -> tuple[int, int] | None:
        """Forward key by key when the terminal is ours; return its size after a change."""
        if self.size is None or self._is_over or not self._is_ours():
            return None
        with contextlib.suppress(termios.error):
            if self._before is None:
                before = termios.tcgetattr(self._descriptor)
                keys = list(before)
                keys[0] &= ~termios.ICRNL
                keys[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, keys)
                self._before = before
        before_size, self.size = self.size, _size(self._descriptor)
        return self.size if self.size != before_size else None

    def let_go(self) -> None:
        """Restore the terminal. Idempotent."""
        before, self._before = self._before, None
        if before is not None and self._is_ours():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)

    def close(self) -> None:
        """Read no more, and restore the terminal. Idempotent."""
        self._is_over = True
        self.let_go()

    def _is_ours(self) -> bool:
        """Return whether we may read: the terminal belongs to the foreground process group."""
        try:
            return not os.isatty(self._descriptor) or os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False


def open_terminal(size: Sequence[int]) -> tuple[int, int]:
    """Return the two ends of a new terminal with these rows and columns: ours, and the rank's."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.ONLCR  # the launcher's terminal does that
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    resize(ours, size)
    return ours, theirs


def resize(terminal: int, size: Sequence[int]) -> None:
    """Set rows and columns of a terminal."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(
            terminal,
            termios.TIOCSWINSZ,
            struct.pack("HHHH", *(max(0, min(one, 0xFFFF)) for one in size[:2]), 0, 0),
        )


def _size(terminal: int) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(terminal)
        return rows, columns
    return _NO_SIZE
