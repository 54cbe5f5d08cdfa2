"""A worker's own words to its agent, over an inherited pipe: how its script ended, and that it takes SIGTERM as a notice.

Whoever in this process has something to say calls `tell`; where no launcher listens, it does nothing.
"""

from __future__ import annotations

import os

__all__ = ["Word", "adopt", "tell"]

_TEXT_MAX = 200_000


class Word:
    """The pipe.

    Args:
        descriptor: Its write end, or -1 where there is none.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = os.getpid()
        self._has_failed = False
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)

    @property
    def is_open(self) -> bool:
        """Whether an agent listens, as far as this process knows."""
        return self._descriptor >= 0

    def goodbye(self) -> None:
        """Say that the script ended in order; nothing after a failure."""
        if not self._has_failed:
            self.tell({"event": "goodbye"})

    def failed(self, error: str, message: str, text: str, exit_code: int) -> None:
        """Say how the script failed."""
        self._has_failed = True
        record: dict[str, str | int] = {
            "event": "failed",
            "error": error,
            "message": message[:2000],
            "traceback": text[-_TEXT_MAX:],
            "exit_code": exit_code,
        }
        self.tell(record)

    def tell(self, record: dict[str, str | int]) -> None:
        """Say anything; nothing in a forked copy of the worker."""
        if self._descriptor < 0 or os.getpid() != self._process:
            return
        import msgpack

        data = msgpack.packb(record, use_bin_type=True)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self._descriptor = -1  # the agent is gone, and this process is about to be


_words: list[Word] = []  # at most one: the descriptor belongs to the process, as its standard output does


def adopt(word: Word) -> None:
    """Make this the process's word; called by bootstrap, once."""
    _words[:] = [word]


def tell(event: str, **fields: str | int) -> None:
    """Say something to the agent, if there is one.

    Args:
        event: What it is, for instance "takes_notice".
        fields: More about it.
    """
    for word in _words:
        word.tell({"event": event, **fields})
