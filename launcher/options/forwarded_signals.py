"""The signals that the launcher can forward to ranks, and why it keeps others."""

from __future__ import annotations

import signal

from syncvar.core.errors import ConfigError
from syncvar.core.exit_status import signal_name
from syncvar.core.stack_dump import ALL_THREADS, MAIN_THREAD, WITHOUT_PYTHON

DEFAULT = "USR1,USR2,CONT"

_END = "it ends the job: the launcher sees to it that all ranks end"
_FAULT = "it tells a fault of the process that gets it"
_NOT_PASSED_ON: dict[int, str] = {
    signal.SIGKILL: "no process can handle it",
    signal.SIGSTOP: "no process can handle it",
    signal.SIGCHLD: "the system tells the launcher with it that a rank has ended",
    signal.SIGINT: _END,
    signal.SIGTERM: _END,
    signal.SIGHUP: _END,
    signal.SIGPIPE: "it tells that nobody reads what the launcher writes, which ends the job",
    signal.SIGTSTP: "it stops the launcher, which stops all ranks",
    signal.SIGTTIN: "it stops who reads from a terminal in the background",
    signal.SIGTTOU: "it stops who writes to a terminal in the background",
    **dict.fromkeys(
        (MAIN_THREAD, ALL_THREADS, WITHOUT_PYTHON), "a rank writes its Python stack when it gets it"
    ),
    **dict.fromkeys(
        (
            signal.SIGSEGV,
            signal.SIGBUS,
            signal.SIGILL,
            signal.SIGFPE,
            signal.SIGABRT,
            signal.SIGTRAP,
            signal.SIGSYS,
        ),
        _FAULT,
    ),
}


def parse_signals(text: str) -> tuple[int, ...]:
    """Return the numbers of the signals to forward.

    `text` has names, with or without SIG, and numbers, with commas; or is "none".

    Example:
        >>> parse_signals("USR1,SIGUSR2,18"), parse_signals("none")
        ((10, 12, 18), ())
    """
    return (
        ()
        if text == "none"
        else tuple(dict.fromkeys(_number(one.strip()) for one in text.split(",")))
    )


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 4:
        number = int(text)
    else:
        named = signal.Signals.__members__.get("SIG" + text.upper().removeprefix("SIG"))
        number = 0 if named is None else int(named)
    if number not in signal.valid_signals():
        raise ConfigError(
            f"{text!r} is no signal: give names or numbers, such as {DEFAULT}, or none"
        )
    if number in _NOT_PASSED_ON:
        raise ConfigError(
            f"{signal_name(number) or number} cannot be passed on: {_NOT_PASSED_ON[number]}"
        )
    return number
