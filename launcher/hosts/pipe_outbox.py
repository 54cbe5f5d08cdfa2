"""The queue of bytes for a pipe that takes only so many at once."""

from __future__ import annotations

import os
from collections import deque


class PipeOutbox:
    """The bytes that wait for a pipe. It never blocks: its owner polls the descriptor.

    Args:
        descriptor: The end of the pipe, non-blocking.

    Attributes:
        nbytes: The number of bytes that wait.
    """

    def __init__(self, descriptor: int) -> None:
        self.nbytes = 0
        self._descriptor = descriptor
        self._unwritten: deque[memoryview] = deque()

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [self._descriptor] if self._unwritten else []

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._unwritten.append(memoryview(data))
        self.nbytes += len(data)

    def flush(self) -> bool:
        """Write as much as the pipe takes; return whether it still has a reader."""
        while self._unwritten:
            first = self._unwritten[0]
            try:
                count = os.write(self._descriptor, first)
            except BlockingIOError:
                return True
            except OSError:
                self.clear()
                return False
            self.nbytes -= count
            if count < len(first):
                self._unwritten[0] = first[count:]
            else:
                self._unwritten.popleft()
        return True

    def clear(self) -> None:
        """Forget the bytes that wait."""
        self._unwritten.clear()
        self.nbytes = 0
