"""Where a program stands: Python stacks, asked for from outside, read, and told in one line.

A worker that syncvar-launch has started answers three real-time signals, in a file in the job's private folder. To the first
two it writes the stack of its main thread, or those of all threads, at the next place between two steps of the program, as
every handler of Python's runs. A rank that stands in a call which does not return to the interpreter never comes there; it
is sent the third, to which the interpreter's own `faulthandler` writes the main thread's stack within the signal's handler,
without running any Python. That may only be done then: while a thread begins or ends calls, the fault handler may follow a
pointer that is not set yet, and end the process.

Real-time signals, because SIGUSR1 and SIGUSR2 belong to the program, SIGTERM and SIGINT mean something, and those which
come twice are delivered twice. Numbers in the middle, because libraries take theirs from either end. A script must not
take these three for itself; where it ignores them, or has closed the file, nothing is asked any more.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.fork_cleanup import handle_signal, register_exit, register_fault_dump
from syncvar.core.process_ids import SERVING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

MAIN_THREAD = signal.SIGRTMIN + 15
ALL_THREADS = signal.SIGRTMIN + 16
WITHOUT_PYTHON = signal.SIGRTMIN + 17
END = "End of stacks"  # the last line of an answer that Python has written

STOPPED = "its process is stopped (state T)"

_COMPUTES = "not waiting in any call"  # the coordinator's words
_CALLERS = 3
_FRAMES_MAX = 100  # of a thread, as the fault handler tells them
_HEADER = re.compile(
    r"(?:(?P<main>Stack|Current thread (?P<current>0x[0-9a-f]+))|Thread (?P<other>0x[0-9a-f]+))[^\n]* \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SERVER = _PACKAGE + os.path.join("parameter_server", "server", "server_main.py")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_AROUND = (
    _PACKAGE + os.path.join("bootstrap", "worker_main.py"),
    _PACKAGE + os.path.join("bootstrap", "prefork", "fork_server.py"),
    _PACKAGE + os.path.join("runner", "remote_call.py"),
    *(_STANDARD + name for name in ("runpy.py", "importlib" + os.sep)),
    "<frozen ",
)


class StackFrame(NamedTuple):
    """One call of a stack.

    Args:
        file: Of the code.
        line: 0 where the interpreter does not know.
        name: Of the function.
    """

    file: str
    line: int
    name: str


class Thread(NamedTuple):
    """One thread of a dump.

    Args:
        ident: Its number, as the dump has it; empty where the dump is of the main thread alone.
        is_main: It is the main thread.
        frames: Its calls, innermost first.
    """

    ident: str
    is_main: bool
    frames: tuple[StackFrame, ...]


# -- in the worker ---------------------------------------------------------------------------------


def stack_path(directory: str, rank: int) -> str:
    """Return the file in which a rank answers."""
    return os.path.join(directory, f"stack-{rank}")


def listen(path: str) -> None:
    """Answer the signals from now on, in a file whose first line is the number of its descriptor here; in the main thread."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)  # stays open: the handlers write to it

    def answer(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(
            Exception
        ):  # it runs anywhere in the program, which must not see it
            os.write(descriptor, _dump(_of_program(frame), all_threads=number == ALL_THREADS))

    for number in (MAIN_THREAD, ALL_THREADS):
        handle_signal(number, answer)
        signal.siginterrupt(number, False)  # noqa: FBT003  (system calls of libraries go on)
    register_fault_dump(WITHOUT_PYTHON, descriptor)
    register_exit(
        _be_deaf
    )  # the interpreter's end would give the signals back their default, which is to end the process
    os.write(descriptor, b"%d\n" % descriptor)


def _of_program(frame: FrameType | None) -> FrameType | None:
    """Return the frame that runs the program; a signal may come while the answer to the one before is being written."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _of_no_answer(frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
    """Return the calls without those that answer a signal, in which the fault handler may have found the thread."""
    last = max((at for at, frame in enumerate(frames) if frame.file == __file__), default=-1)
    return frames[last + 1 :]


def _be_deaf() -> None:
    for number in (MAIN_THREAD, ALL_THREADS):
        handle_signal(number, signal.SIG_IGN)


def _dump(frame: FrameType | None, *, all_threads: bool) -> bytes:
    """Return stacks as the fault handler writes them."""
    if not all_threads:
        lines = ["Stack (most recent call first):", *_lines(frame)]
    else:
        lines, main = [], threading.get_ident()
        found = current_frames()
        for ident in sorted(found, key=main.__eq__):
            who = "Current thread" if ident == main else "Thread"
            lines += [
                f"{who} 0x{ident:016x} (most recent call first):",
                *_lines(frame if ident == main else found[ident]),
            ]
    return "\n".join([*lines, END, ""]).encode("ascii", "backslashreplace")


def _lines(frame: FrameType | None) -> list[str]:
    told = [
        f'  File "{one.file}", line {one.line or "???"} in {one.name}'
        for one in frames_of(frame)[:_FRAMES_MAX]
    ]
    return [line.replace("\n", "?") for line in told]


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread that runs.

    sys._current_frames holds the interpreter's lock of thread states while it makes objects. In Python 3.11 before 3.11.9 a
    garbage collection may begin there: it lets other threads run, and one of those that starts or ends waits for that
    lock while it holds the GIL. Then the process stands still for ever (cpython issue 106883), so that the collector
    is off meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001
    finally:
        if collects:
            gc.enable()


def frames_of(frame: FrameType | None) -> list[StackFrame]:
    """Return the calls of a frame and of those around it, innermost first."""
    found = []
    while frame is not None:
        found.append(
            StackFrame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        )
        frame = frame.f_back
    return found


def frames_before(trace: TracebackType | None) -> list[StackFrame]:
    """Return the calls that an exception has left, innermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(StackFrame(code.co_filename, trace.tb_lineno or 0, code.co_name))
        trace = trace.tb_next
    return found[::-1]


# -- what a worker has written ---------------------------------------------------------------------


def dumps_of(text: str) -> list[Thread]:
    r"""Read what the interpreter's fault handler has written; lines that are not its own are left out.

    Example:
        >>> dumps_of('Stack (most recent call first):\n  File "a.py", line 3 in f\n')
        [Thread(ident='', is_main=True, frames=(StackFrame(file='a.py', line=3, name='f'),))]
    """
    threads: list[Thread] = []
    frames: list[StackFrame] = []
    for line in text.split("\n"):
        if header := _HEADER.fullmatch(line):
            frames = []
            threads.append(
                Thread(header["current"] or header["other"] or "", header["main"] is not None, ())
            )
        elif threads and (found := _FRAME.fullmatch(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            frames.append(StackFrame(_unescaped(found["file"]), number, _unescaped(found["name"])))
            threads[-1] = threads[-1]._replace(frames=tuple(frames))
    return threads


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[0].lstrip("\\xuU"), 16)), text)


# -- in words --------------------------------------------------------------------------------------


def where(frames: Sequence[StackFrame], folder: str) -> str:
    """Say in one line where a stack stands: the innermost place of the program, and from where that was called.

    Frames of syncvar, of other libraries and of the interpreter's own start are left out, but for the innermost. Empty where
    the program has not begun, or is over. Of a server, which runs no program, it is what it does.

    Args:
        frames: Innermost first.
        folder: Paths below it are told relative to it.

    Example:
        >>> where([StackFrame("/a/load.py", 9, "read"), StackFrame("/a/train.py", 49, "<module>")], "/a")
        'in user code, load.py:9 < train.py:49'
        >>> where([StackFrame("/lib/site-packages/numpy/linalg.py", 7, "svd"), StackFrame("/a/train.py", 49, "<module>")], "/a")
        'in numpy/linalg.py:7, called at train.py:49'
    """
    kept = shown(frames)
    if not kept:
        return ""
    at = _loop_of_server(frames)
    if at is not None:
        return (
            "waiting for requests"
            if at == 0 or frames[at - 1].name == "wait"
            else f"at a request, in {_place(frames[0], folder)}"
        )
    users = [frame for frame in kept if not _is_library(frame.file)] or [
        frame for frame in kept if not _is_ours(frame.file)
    ]
    places: list[str] = []
    for frame in users:
        place = _place(frame, folder)
        if not places or places[-1] != place:  # a function that calls itself stands in one place
            places.append(place)
    chain = " < ".join([*places[:_CALLERS], *["…"][: len(places) > _CALLERS]])
    if not users or kept[0] is users[0]:
        return f"in user code, {chain}" if users else f"in {_place(kept[0], folder)}"
    return f"in {_place(kept[0], folder)}, called at {chain}"


def doing(position: str, place: str) -> str:
    """Say what a rank did, by what the coordinator knows of it and by where its main thread stood.

    Example:
        >>> doing("not waiting in any call; no Python thread answers since 3 s", "in user code, train.py:49")
        'in user code, train.py:49; no Python thread answers since 3 s'
        >>> doing("waiting in barrier (call 3) at train.py:12 in main", "in syncvar/runtime/progress.py:9, called at train.py:12")
        'waiting in barrier (call 3) at train.py:12 in main'
    """
    if place == STOPPED:
        return f"{position.partition('; ')[0]}; {STOPPED}"  # which is why no thread answers
    if position == SERVING:
        return place or position
    if not place or position.startswith(("waiting in ", "finished")):
        return position
    return (
        place + position.removeprefix(_COMPUTES)
        if position.startswith(_COMPUTES)
        else f"{position}; {place}"
    )


def shown(frames: Sequence[StackFrame]) -> list[StackFrame]:
    """Return a stack without what started the program, and with one frame for each call into syncvar or an import.

    That of a server is all of syncvar's, and is shown as it is.
    """
    if _loop_of_server(frames) is not None:
        return [frame for frame in frames if not frame.file.startswith(_AROUND)]
    kept: list[StackFrame] = []
    for frame in _of_no_answer(frames):
        is_repeated = bool(kept) and _is_ours(frame.file) and _is_ours(kept[-1].file)
        if not is_repeated and not frame.file.startswith(_AROUND):
            kept.append(frame)
    while kept and _is_ours(kept[-1].file):
        del kept[-1]
    return kept


def _loop_of_server(frames: Sequence[StackFrame]) -> int | None:
    return next(
        (at for at, frame in enumerate(frames) if frame.file == _SERVER and frame.name == "run"),
        None,
    )


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.startswith(_PACKAGE + "examples" + os.sep)


def _is_library(file: str) -> bool:
    return _is_ours(file) or file.startswith(_STANDARD) or _INSTALLED.match(file) is not None


def _place(frame: StackFrame, folder: str) -> str:
    file = frame.file
    installed = _INSTALLED.match(file)
    if file.startswith(_PACKAGE):
        file = "syncvar/" + file.removeprefix(_PACKAGE)
    elif installed is not None:
        file = file[installed.end() :]
    elif file.startswith(_STANDARD):
        file = file.removeprefix(_STANDARD)
    elif folder and file.startswith(folder.rstrip("/") + "/"):
        file = file[len(folder.rstrip("/")) + 1 :]
    return f"{file}:{frame.line or '?'}"
