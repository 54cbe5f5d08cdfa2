"""What an exit status means, the statuses of the launcher itself, and which of several failures is the cause.

A status is written as `subprocess` writes it: an exit code of at least 0, or minus the number of a signal.
The launcher's own codes follow sysexits where that list has a word for it; a rank's own code always goes first.
"""

from __future__ import annotations

import signal
import sys
from enum import IntEnum

USAGE = 2
RENDEZVOUS = 69
INTERNAL = 70
LIMITS = 71
CHECKPOINT = 74
LOST_FILE = CHECKPOINT  # one code for files that are missing; EX_IOERR of sysexits
PREEMPTED = 75
MISMATCH = 76
KEY = 77
CONFIGURATION = 78
TIMEOUT = 124

MEANINGS: dict[int, str] = {
    USAGE: "wrong command line",
    RENDEZVOUS: "the ranks did not all meet, or a host cannot be reached",
    INTERNAL: "a rank was lost, or an internal error",
    LIMITS: "a limit of the system is too low",
    CHECKPOINT: "a checkpoint, or another file that was asked for, cannot be read or written",
    PREEMPTED: "preempted after saving: run it again",
    MISMATCH: "the ranks disagree about a call, or the protocol was broken",
    KEY: "the key of the job was refused",
    CONFIGURATION: "wrong configuration",
    TIMEOUT: "the time limit of the job passed",
}


class Severity(IntEnum):
    """How likely a failure is the cause of the others; the lowest wins, then the first."""

    OWN = 0
    DISAGREEMENT = 1
    CONSEQUENCE = 2


_OF_ERRORS = {
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

_WEIGHTS = {
    "DeadlineExceeded": Severity.DISAGREEMENT,
    "MismatchError": Severity.DISAGREEMENT,
    "RendezvousError": Severity.DISAGREEMENT,
    "PeerLost": Severity.CONSEQUENCE,
    "GroupBroken": Severity.CONSEQUENCE,
}
OF_OTHERS = tuple(_WEIGHTS)
"""Names of the errors that speak of other ranks."""


def weight_of(error: str) -> Severity:
    """Return how likely an exception is the cause of others, by its name.

    Example:
        >>> weight_of("ValueError"), weight_of("PeerLost")
        (<Severity.OWN: 0>, <Severity.CONSEQUENCE: 2>)
    """
    return _WEIGHTS.get(error, Severity.OWN)


def error_exit_code(error: BaseException) -> int:
    """Return the exit code of a process that an exception ends; 1 if it is none of syncvar's own.

    Example:
        >>> error_exit_code(ValueError("x"))
        1
    """
    kind = type(error)
    return _OF_ERRORS.get(kind.__name__, 1) if kind.__module__ == "syncvar.core.errors" else 1


def is_interactive() -> bool:
    """Return whether somebody works at a prompt of this process, now or after an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


def signal_name(number: int) -> str:
    """Return the name of a signal, or an empty text where it has none.

    Example:
        >>> signal_name(9)
        'SIGKILL'
        >>> signal_name(99)
        ''
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def describe_exit(status: int) -> str:
    """Say in words how a process ended.

    Args:
        status: An exit code of at least 0, or minus the number of a signal.

    Example:
        >>> describe_exit(3)
        'exited with status 3'
        >>> describe_exit(-9)
        'was killed by signal 9 (SIGKILL)'
    """
    if status >= 0:
        return f"exited with status {status}"
    name = signal_name(-status)
    return f"was killed by signal {-status}" + (f" ({name})" if name else "")


def exit_code_of(status: int) -> int:
    """Return the exit code that stands for a status, as shells count: 128 + n for signal n.

    Example:
        >>> exit_code_of(3), exit_code_of(-15)
        (3, 143)
    """
    return status if status >= 0 else 128 - status


def failure_in_words() -> str:
    """Return which exception this process ends with, for other ranks; empty where it ends with none."""
    if not is_failing():
        return ""
    error = sys.last_value
    try:
        text = str(error)
    except Exception:  # the user's own error may do anything here
        text = "<exception str() failed>"
    return f"uncaught {type(error).__name__}: {text}"[:2000]


def is_failing() -> bool:
    """Return whether this process ends because of an exception; one that a user saw at a prompt has ended nothing."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
