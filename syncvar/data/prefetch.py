"""Reading ahead in a thread that is bounded, ends with its reader, and passes on exceptions."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from syncvar.data.stream_sources import Stream

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.data.stream_sources import Source

_END = object()
_JOIN_S = 5.0  # the thread may be in the user's function, which nothing can interrupt


class Prefetched(Stream):
    """Elements that a thread reads ahead, from the first read until the consumer stops."""

    def __init__(self, inner: Source, size: int) -> None:
        super().__init__(inner.count, inner.seeds, is_endless=inner.is_endless)
        self._inner, self._size = inner, size

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements."""
        ahead = _ReadAhead(self._inner.read(epoch, start), self._size)
        try:
            while (element := ahead.next()) is not _END:
                yield element
        finally:
            ahead.stop()


class _ReadAhead:
    """State that the thread and its consumer share."""

    def __init__(self, elements: Generator[Any, None, None], size: int) -> None:
        self._waiting: deque[Any] = deque()
        self._size = size
        self._changed = threading.Condition()
        self._is_over = self._is_stopped = False
        self._error: BaseException | None = None
        work = partial(self._work, elements)
        self._thread = threading.Thread(target=work, name="syncvar-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """Return the next element, or _END; raise the thread's exception."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._waiting:
                element = self._waiting.popleft()
                self._changed.notify_all()
                return element
            error, self._error = self._error, None
        if error is None:
            return _END
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def stop(self) -> None:
        """End the thread, also between elements."""
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():  # the garbage collector may run in it
            self._thread.join(_JOIN_S)

    def _work(self, elements: Generator[Any, None, None]) -> None:
        error: BaseException | None = None
        try:
            with closing(elements):
                for element in elements:
                    if not self._offer(element):
                        break
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error, self._is_over = error, True
            self._changed.notify_all()

    def _offer(self, element: Any) -> bool:
        """Pass an element to the consumer once there is room; return whether it wants more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._waiting) < self._size)
            if self._is_stopped:
                return False
            self._waiting.append(element)
            self._changed.notify_all()
            return True
