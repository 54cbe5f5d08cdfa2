"""How a process ends: exit codes, their meaning, and the records of a worker for its launcher.

A status is an exit code of at least 0, or minus the number of a signal, as in `subprocess`. The
launcher's own codes follow sysexits where possible. A failed rank's own exit code has precedence.

A worker sends records over an inherited pipe (`StatusPipe`): how its script ended, and that it
handles SIGTERM as a notice. `send_status` does nothing if there is no launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from enum import IntEnum

from syncvar.core.errors import error_line

USAGE = 2
RENDEZVOUS = 69
INTERNAL = 70
LIMITS = 71
CHECKPOINT = 74
LOST_FILE = CHECKPOINT  # one code for all files that cannot be read or written
PREEMPTED = 75
MISMATCH = 76
KEY = 77
CONFIGURATION = 78
TIMEOUT = 124
# Two SIGTERM within this time count as one: a scheduler that signals every process also signals the
# launcher or an agent, which passes the signal on.
NOTICE_ECHO_S = 1.0

MEANINGS: dict[int, str] = {
    USAGE: "wrong command line",
    RENDEZVOUS: "not all ranks joined, or a host cannot be reached",
    INTERNAL: "a rank was lost, or an internal error",
    LIMITS: "a limit of the system is too low",
    CHECKPOINT: "a checkpoint, or another requested file, cannot be read or written",
    PREEMPTED: "preempted after saving: run it again",
    MISMATCH: "the ranks disagree about a call, or the protocol was broken",
    KEY: "the key of the job was refused",
    CONFIGURATION: "wrong configuration",
    TIMEOUT: "the time limit of the job passed",
}


class Severity(IntEnum):
    """How likely a failure is a cause and not a consequence: the lowest wins, then the first."""

    OWN = 0
    DISAGREEMENT = 1
    CONSEQUENCE = 2


_ERROR_CODES = {
    "PeerLost": INTERNAL,
    "GroupBroken": INTERNAL,
    "DeadlineExceeded": INTERNAL,
    "InternalError": INTERNAL,
    "RendezvousError": RENDEZVOUS,
    "CheckpointError": CHECKPOINT,
    "NotFound": CHECKPOINT,
    "Corrupt": CHECKPOINT,
    "MismatchError": MISMATCH,
    "HandshakeError": MISMATCH,
}

_SEVERITIES = {
    "DeadlineExceeded": Severity.DISAGREEMENT,
    "MismatchError": Severity.DISAGREEMENT,
    "RendezvousError": Severity.DISAGREEMENT,
    "PeerLost": Severity.CONSEQUENCE,
    "GroupBroken": Severity.CONSEQUENCE,
}
ERRORS_ABOUT_OTHERS = tuple(_SEVERITIES)  # names of errors that are about other ranks


def severity_of(error: str) -> Severity:
    """Return how likely an exception, by its name, is the cause of other failures."""
    return _SEVERITIES.get(error, Severity.OWN)


def error_exit_code(error: BaseException) -> int:
    """Return the exit code of a process that this exception ends; 1 for foreign exceptions."""
    kind = type(error)
    return _ERROR_CODES.get(kind.__name__, 1) if kind.__module__ == "syncvar.core.errors" else 1


def is_interactive() -> bool:
    """Return whether a user works at a prompt of this process, now or after an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


def signal_name(number: int) -> str:
    """Return the name of a signal, or an empty text if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def describe_exit(status: int) -> str:
    """Return a text that says how a process ended, from its status."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal_name(-status)
    return f"was killed by signal {-status}" + (f" ({name})" if name else "")


def exit_code_of(status: int) -> int:
    """Return the exit code of a status as shells count it: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def exit_error_text() -> str:
    """Return the exception that ends this process, as text for other ranks, or an empty text."""
    error = getattr(sys, "last_value", None)
    return f"uncaught {error_line(error)}"[:2000] if is_failing() and error is not None else ""


def is_failing() -> bool:
    """Return whether an exception ends this process; none does at a prompt."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


# -- records of a worker for its launcher ----------------------------------------------------------

STARTED = "begun"  # first record: the process runs Python and starts its script next
RUN_ENDED = "run_ended"  # record of an elastic job: the function has returned on all members

_TEXT_MAX = 200_000


class StatusPipe:
    """The write end of the pipe: a descriptor, or -1 without a launcher."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = os.getpid()
        self._has_failed = False
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)  # noqa: FBT003  (its parameters have no names)

    @property
    def is_open(self) -> bool:
        """Whether an agent reads the pipe, as far as this process knows."""
        return self._descriptor >= 0

    def announce_start(self) -> None:
        """Report that this process runs Python and starts its script next."""
        self.send({"event": STARTED})

    def announce_end(self) -> None:
        """Report that the script ended normally; does nothing after a failure."""
        if not self._has_failed:
            self.send({"event": "goodbye"})

    def announce_failure(
        self,
        error: str,
        message: str,
        text: str,
        exit_code: int,
        *,
        code: str = "",
        brief: str = "",
        written: str = "",
    ) -> None:
        """Report how the script failed, before the error is written to standard error.

        `code` is that of an exception of syncvar. `brief` is the traceback without frames of no
        use to the script's author, by default all. `written` follows on standard error, so the
        launcher need not show it twice.
        """
        self._has_failed = True
        record: dict[str, str | int] = {
            "event": "failed",
            "error": error,
            "code": code,
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
