"""Python stacks of a worker, on request from outside: write, parse, show in one line.

A worker answers three real-time signals in a file in the job's private folder:

* `MAIN_THREAD`, `ALL_THREADS`: Python signal handlers write stacks, at the next bytecode boundary.
* `WITHOUT_PYTHON`: `faulthandler` writes the main thread's stack inside the signal handler, for a
  rank in a call that does not return to the interpreter. The launcher sends it only then: while
  threads start or end calls, the fault handler may follow an unset pointer and crash.

SIGUSR1 and SIGUSR2 belong to the program. Real-time signals are queued, so none is dropped. The
numbers are in the middle, because libraries use both ends of the range. If a script ignores these
signals or closes the file, it gets no more requests.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
from sys import _current_frames  # documented in spite of its name
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.fork_cleanup import handle_signal, register_exit, register_fault_dump
from syncvar.core.process_ids import SERVING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

MAIN_THREAD = signal.SIGRTMIN + 15
ALL_THREADS = signal.SIGRTMIN + 16
WITHOUT_PYTHON = signal.SIGRTMIN + 17
END = "End of stacks"  # last line of an answer that Python has written

STOPPED = "its process is stopped (state T)"

_COMPUTES = "not waiting in any call"  # text of `Coordinator.position`
_CALLERS = 3
_FRAMES_MAX = 100  # per thread, as in the fault handler
_HEADER = re.compile(
    r"(?:(?P<main>Stack|Current thread (?P<current>0x[0-9a-f]+))|Thread (?P<other>0x[0-9a-f]+))"
    r"[^\n]* \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SERVER = _PACKAGE + os.path.join("parameter_server", "server_main.py")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_AROUND = (
    _PACKAGE + os.path.join("bootstrap", "worker_main.py"),
    _PACKAGE + os.path.join("bootstrap", "fork_server.py"),
    _PACKAGE + os.path.join("runner", "remote_call.py"),
    *(_STANDARD + name for name in ("runpy.py", "importlib" + os.sep)),
    "<frozen ",
)


class StackFrame(NamedTuple):
    """One call of a stack; `line` is 0 if unknown."""

    file: str
    line: int
    name: str


class Thread(NamedTuple):
    """One thread of a dump, innermost frame first; without identifier if it is the only one."""

    ident: str
    is_main: bool
    frames: tuple[StackFrame, ...]


# -- in the worker ---------------------------------------------------------------------------------


def stack_path(directory: str, rank: int) -> str:
    """Return the file into which a rank writes its stacks."""
    return os.path.join(directory, f"stack-{rank}")


def answer_signals(path: str) -> None:
    """Answer the signals in a new file; call it in the main thread.

    The first line of the file is the number of its descriptor in this process.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)  # stays open: the handlers write to it

    def answer(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):  # it interrupts the program, which must not notice
            os.write(descriptor, _dump(_program_frame(frame), all_threads=number == ALL_THREADS))

    for number in (MAIN_THREAD, ALL_THREADS):
        handle_signal(number, answer)
        # System calls of libraries restart.
        signal.siginterrupt(number, False)  # noqa: FBT003  (its parameters have no names)
    register_fault_dump(WITHOUT_PYTHON, descriptor)
    # At exit the interpreter restores the default action, which would end the process.
    register_exit(_ignore_signals)
    os.write(descriptor, b"%d\n" % descriptor)


def _program_frame(frame: FrameType | None) -> FrameType | None:
    """Return the program's frame; a signal may interrupt the answer to an earlier one."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _without_handler(frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
    """Return a stack without frames of this module: the fault handler may interrupt an answer."""
    last = max((i for i, frame in enumerate(frames) if frame.file == __file__), default=-1)
    return frames[last + 1 :]


def _ignore_signals() -> None:
    for number in (MAIN_THREAD, ALL_THREADS):
        handle_signal(number, signal.SIG_IGN)


def _dump(frame: FrameType | None, *, all_threads: bool) -> bytes:
    """Return stacks in the format of the fault handler."""
    if not all_threads:
        lines = ["Stack (most recent call first):", *_lines(frame)]
    else:
        lines, main = [], threading.get_ident()
        found = current_frames()
        for ident in sorted(found, key=main.__eq__):
            name = "Current thread" if ident == main else "Thread"
            lines.append(f"{name} 0x{ident:016x} (most recent call first):")
            lines += _lines(frame if ident == main else found[ident])
    return "\n".join([*lines, END, ""]).encode("ascii", "backslashreplace")


def _lines(frame: FrameType | None) -> list[str]:
    return [
        f'  File "{one.file}", line {one.line or "???"} in {one.name}'.replace("\n", "?")
        for one in frames_of(frame)[:_FRAMES_MAX]
    ]


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each running thread, without a deadlock in old Pythons.

    `sys._current_frames` holds the interpreter's lock of thread states while it allocates. Before
    Python 3.11.9 a garbage collection may start there and let other threads run. A thread that
    starts or ends then waits for that lock with the GIL held: a deadlock (cpython issue 106883).
    So the collector is off meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _current_frames()
    finally:
        if collects:
            gc.enable()


def frames_of(frame: FrameType | None) -> list[StackFrame]:
    """Return the calls of a frame and its callers, innermost first."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(StackFrame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found


def frames_before(trace: TracebackType | None) -> list[StackFrame]:
    """Return the calls of an exception's traceback, innermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(StackFrame(code.co_filename, trace.tb_lineno or 0, code.co_name))
        trace = trace.tb_next
    return found[::-1]


# -- parse -----------------------------------------------------------------------------------------


def parse_stacks(text: str) -> list[Thread]:
    """Return the threads in an answer; lines of other text are skipped."""
    threads: list[Thread] = []
    frames: list[StackFrame] = []
    for line in text.split("\n"):
        if header := _HEADER.fullmatch(line):
            frames = []
            ident = header["current"] or header["other"] or ""
            threads.append(Thread(ident, header["main"] is not None, ()))
        elif threads and (found := _FRAME.fullmatch(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            frames.append(StackFrame(_unescaped(found["file"]), number, _unescaped(found["name"])))
            threads[-1] = threads[-1]._replace(frames=tuple(frames))
    return threads


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[0].lstrip("\\xuU"), 16)), text)


# -- text ------------------------------------------------------------------------------------------


def stack_text(frames: Sequence[StackFrame], folder: str) -> str:
    """Return in one line where a stack is: its innermost place in the program, and the callers.

    It skips frames of syncvar, libraries and the interpreter's start, except for the innermost.
    Empty before the program starts and after it ends. For a server it is the server's activity.
    Paths below `folder` are shown relative to it.

    Example:
        >>> frames = [StackFrame("/a/load.py", 9, "read"), StackFrame("/a/train.py", 49, "main")]
        >>> stack_text(frames, "/a")
        'in user code, load.py:9 < train.py:49'
    """
    visible = visible_frames(frames)
    if not visible:
        return ""
    innermost = visible[0]
    loop = _loop_of_server(frames)
    if loop is not None:
        if loop == 0 or frames[loop - 1].name == "wait":
            return "waiting for requests"
        return f"at a request, in {_place(frames[0], folder)}"
    users = [frame for frame in visible if not _is_library(frame.file)]
    users = users or [frame for frame in visible if not _is_ours(frame.file)]
    places: list[str] = []
    for frame in users:
        place = _place(frame, folder)
        if not places or places[-1] != place:  # shows recursion once
            places.append(place)
    chain = " < ".join([*places[:_CALLERS], *["…"][: len(places) > _CALLERS]])
    if users and innermost is users[0]:
        return f"in user code, {chain}"
    if users and _is_ours(visible[visible.index(users[0]) - 1].file):
        return f"in syncvar, called at {chain}"
    return f"in {_place(innermost, folder)}" + (f", called at {chain}" if users else "")


def activity_text(position: str, place: str) -> str:
    """Return a rank's activity from the coordinator's text and the place of its main thread."""
    if place == STOPPED:
        return f"{position.partition('; ')[0]}; {STOPPED}"  # this explains why no thread answers
    if position == SERVING:
        return place or position
    if not place or position.startswith(("waiting in ", "finished")):
        return position
    if position.startswith(_COMPUTES):
        return place + position.removeprefix(_COMPUTES)
    return f"{position}; {place}"


def visible_frames(frames: Sequence[StackFrame]) -> list[StackFrame]:
    """Return a stack without frames that start the program; a call into syncvar has one frame.

    The stack of a server consists of syncvar's frames; it is complete.
    """
    if _loop_of_server(frames) is not None:
        return [frame for frame in frames if not frame.file.startswith(_AROUND)]
    visible: list[StackFrame] = []
    for frame in _without_handler(frames):
        is_repeated = bool(visible) and _is_ours(frame.file) and _is_ours(visible[-1].file)
        if not is_repeated and not frame.file.startswith(_AROUND):
            visible.append(frame)
    while visible and _is_ours(visible[-1].file):
        del visible[-1]
    return visible


def _loop_of_server(frames: Sequence[StackFrame]) -> int | None:
    matches = (i for i, one in enumerate(frames) if one.file == _SERVER and one.name == "run")
    return next(matches, None)


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
