"""Status records from a worker to its launcher or agent, over an inherited pipe.

They report how the script ended, and that it handles SIGTERM as a notice. `send_status` does
nothing if there is no launcher.
"""

from __future__ import annotations

import os

STARTED = "begun"  # first record: the process runs Python and starts its script next

_TEXT_MAX = 200_000


class StatusPipe:
    """Write end of the pipe, a descriptor or -1."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = os.getpid()
        self._has_failed = False
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)

    @property
    def is_open(self) -> bool:
        """Whether an agent reads the pipe, as far as this process knows."""
        return self._descriptor >= 0

    def announce_start(self) -> None:
        """Report that this process runs Python and starts its script next."""
        self.send({"event": STARTED})

    def goodbye(self) -> None:
        """Report that the script ended normally; does nothing after a failure."""
        if not self._has_failed:
            self.send({"event": "goodbye"})

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
        """Report how the script failed, before the error is written to standard error.

        Args:
            error: Name of the exception.
            message: Its text.
            text: Its traceback.
            exit_code: Exit code that the process will have.
            brief: Traceback without frames of no use to the script's author; by default all.
            written: Text that follows on standard error, which the launcher need not show twice.
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
        self.send(record)

    def send(self, record: dict[str, str | int]) -> bool:
        """Send a record, except in a forked child; return whether the agent gets it."""
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
    """Return a text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_pipes: list[StatusPipe] = []  # at most one, because the descriptor belongs to the process


def set_status_pipe(pipe: StatusPipe) -> None:
    """Make this the pipe of the process; bootstrap calls it once."""
    _pipes[:] = [pipe]


def send_status(event: str, **fields: str | int) -> bool:
    """Send an event, for instance "takes_notice"; return whether an agent gets it."""
    return any(pipe.send({"event": event, **fields}) for pipe in _pipes)
