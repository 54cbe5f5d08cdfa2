"""A worker's own words to its agent, over an inherited pipe: how its script ended, and that it takes SIGTERM as a notice.

Whoever in this process has something to say calls `tell`; where no launcher listens, it does nothing.
"""

from __future__ import annotations

import os

BEGUN = "begun"
"""The name of the first record: the process runs Python, and comes to its script next."""

_TEXT_MAX = 200_000


class StatusPipe:
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

    def announce_start(self) -> None:
        """Say that this process runs Python, and comes to its script next."""
        self.tell({"event": BEGUN})

    def goodbye(self) -> None:
        """Say that the script ended in order; nothing after a failure."""
        if not self._has_failed:
            self.tell({"event": "goodbye"})

    def failed(
        self,
        error: str,
        message: str,
        text: str,
        exit_code: int,
        *,
        brief: str = "",
        written: str = "",
    ) -> None:
        """Say how the script failed, before that is written to the standard error.

        Args:
            error: Name of the exception.
            message: Its text.
            text: Its traceback.
            exit_code: That of the process to come.
            brief: The traceback without what is of no use to the script's author; the whole one by default.
            written: What comes next on the standard error, and need not be shown there by who is told here.
        """
        self._has_failed = True
        record: dict[str, str | int] = {
            "event": "failed",
            "error": error,
            "message": _sendable(message)[:2000],
            "traceback": _sendable(text)[-_TEXT_MAX:],
            "brief": _sendable(brief or text)[-_TEXT_MAX:],
            "written": _sendable(written) if len(written) <= _TEXT_MAX else "",
            "exit_code": exit_code,
        }
        self.tell(record)

    def tell(self, record: dict[str, str | int]) -> bool:
        """Say anything; nothing in a forked copy of the worker. Return whether the agent gets it."""
        if self._descriptor < 0 or os.getpid() != self._process:
            return False
        import msgpack

        data = msgpack.packb(record, use_bin_type=True)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self._descriptor = -1  # the agent is gone, and this process is about to be
        return self._descriptor >= 0


def _sendable(text: str) -> str:
    """Return a text as the standard error would have it: lone surrogates cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_words: list[
    StatusPipe
] = []  # at most one: the descriptor belongs to the process, as its standard output does


def adopt(word: StatusPipe) -> None:
    """Make this the process's word; called by bootstrap, once."""
    _words[:] = [word]


def tell(event: str, **fields: str | int) -> bool:
    """Say something to the agent, if there is one.

    Args:
        event: What it is, for instance "takes_notice".
        fields: More about it.

    Returns:
        Whether an agent gets it.
    """
    return any(word.tell({"event": event, **fields}) for word in _words)
