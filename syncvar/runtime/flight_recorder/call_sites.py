"""The user's program line at which a thread stands, read from its frames on demand."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from syncvar.core.stack_dump import current_frames, frames_of

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from syncvar.core.stack_dump import StackFrame

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Run as `__main__`.
_STARTERS = tuple(
    os.path.join(_PACKAGE, "bootstrap", name)
    for name in ("worker_entry.py", "worker_main.py", "fork_server.py")
)
_looking = threading.Lock()


def call_site(thread: int) -> str:
    """Return file:line and function of a thread's innermost frame outside of syncvar."""
    frame = _users(_innermost(thread))
    if frame is None:
        return "a place unknown"
    path = frame.f_code.co_filename
    relative = os.path.relpath(path)
    return (
        f"{path if relative.startswith('..') else relative}:{frame.f_lineno} in "
        f"{frame.f_code.co_name}"
    )


def own_site() -> str:
    """Return file:line and function of the caller's innermost frame outside of syncvar.

    About 1 us.
    """
    frame = _users(sys._getframe())  # noqa: SLF001
    return (
        ""
        if frame is None
        else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    )


def site_of(code: CodeType, instruction: int) -> str:
    """Return file:line and function of an instruction."""
    line = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line),
        code.co_firstlineno,
    )
    return f"{code.co_filename}:{line} in {code.co_name}"


def main_stack() -> list[StackFrame]:
    """Return the calls of the main thread, innermost first."""
    ident = threading.main_thread().ident
    return frames_of(_innermost(ident)) if ident is not None else []


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None:  # copy.deepcopy calls us on behalf of the user
        module = frame.f_globals.get("__name__", "")
        ours = (
            module == "copy"
            or module.startswith("syncvar.")
            or frame.f_code.co_filename in _STARTERS
        )
        if not ours or module.startswith("syncvar.examples."):
            return frame
        frame = frame.f_back
    return None


def _innermost(thread: int) -> FrameType | None:
    if thread == threading.get_ident():
        return sys._getframe()  # noqa: SLF001
    with _looking:  # otherwise two threads could leave the garbage collector switched off
        return current_frames().get(thread)
