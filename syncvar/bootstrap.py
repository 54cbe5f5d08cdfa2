"""What a worker runs first: `python -m syncvar.bootstrap script.py …` or `… -m module …`.

It runs the user's script as `__main__` and sees to it that the launcher always learns how the script ended: in order,
by an exception (with its traceback), or by exit. It joins nothing: the script does, when it first uses syncvar.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn

from syncvar.word import Word, adopt

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["folder_of", "main"]

_RUNPY = (runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
_CONSEQUENCES = ("PeerLost", "GroupBroken")
_EXIT_CODES = {
    "PeerLost": 70,
    "GroupBroken": 70,
    "DeadlineExceeded": 70,
    "InternalError": 70,
    "RendezvousError": 69,
    "CheckpointError": 74,
    "NotFound": 74,
    "Corrupt": 74,
    "MismatchError": 76,
    "HandshakeError": 76,
}


def main() -> None:
    """Run the script or module that the arguments name."""
    word = Word(int(os.environ.pop("SYNCVAR_STATUS_FD", "-1")))
    adopt(word)
    process = os.getpid()
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    atexit.register(word.goodbye)  # registered first, so it runs last: after the user's handlers and after shutdown
    try:
        _run(sys.argv[1:])
    except SystemExit as request:
        code = request.code
        if code is None or code == 0:
            return
        if os.getpid() == process:
            _let_go(f"SystemExit: {code}")
            number = code if isinstance(code, int) else 1
            word.failed("SystemExit", str(code), "" if isinstance(code, int) else str(code), number & 0xFF)
        raise
    except BaseException as error:  # noqa: BLE001  (the last frame that sees it)
        if os.getpid() != process:
            raise
        _fail(word, error)


def folder_of(arguments: list[str]) -> str:
    """Return the first folder in which a script or module finds what it imports.

    Example:
        >>> folder_of(["/a/b/train.py", "--lr", "0.1"])
        '/a/b'
    """
    if arguments and arguments[0] == "-m":
        return os.getcwd()  # noqa: PTH109
    return os.path.dirname(os.path.realpath(arguments[0]))  # noqa: PTH120


def _run(arguments: list[str]) -> None:
    sys.path[0] = folder_of(arguments)
    if arguments and arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _let_go(reason: str) -> None:
    context = sys.modules.get("syncvar.runtime.context")
    if context is not None:
        try:
            context.abandon(reason)
        except Exception as error:  # noqa: BLE001  (the script's own failure is what matters now)
            sys.stderr.write(f"syncvar: leaving the job failed: {error}\n")


def _fail(word: Word, error: BaseException) -> NoReturn:
    name = type(error).__name__
    code = 130 if isinstance(error, KeyboardInterrupt) else _EXIT_CODES.get(name, 1) if _is_ours(error) else 1
    text = _traceback_text(error)
    word.failed(name, str(error), text, code)
    _let_go(f"uncaught {name}: {error}"[:2000])
    if _is_ours(error) and name in _CONSEQUENCES:
        # Every survivor would print the same traceback; the launcher shows the cause once, and this line for each.
        sys.stderr.write(f"{name}: {error}\n")
    else:
        sys.stderr.write(text)
    sys.stderr.flush()
    raise SystemExit(code)


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__ == "syncvar.errors"


def _traceback_text(error: BaseException) -> str:
    """Return the traceback as the user should see it: without our frames around theirs.

    Frames of the package and of runpy at the top go always. Frames of the package at the bottom go when the error is
    one of ours that speaks of the user's call; those of an InternalError stay, because they are what a report needs.
    """
    whole = traceback.TracebackException.from_exception(error)
    name = type(error).__name__
    if os.environ.get("SYNCVAR_FULL_TRACEBACK") or name in ("InternalError", "PlanError"):
        return "".join(whole.format())
    level: traceback.TracebackException | None = whole
    while level is not None:
        frames = list(level.stack)
        is_syntax = level.exc_type is not None and issubclass(level.exc_type, SyntaxError)
        keep = 0 if is_syntax else 1  # a SyntaxError tells its own place
        while len(frames) > keep and (frames[0].filename in _RUNPY or _is_inside(frames[0].filename)):
            del frames[0]
        if level.exc_type is not None and level.exc_type.__module__ == "syncvar.errors":
            while len(frames) > 1 and _is_inside(frames[-1].filename):
                del frames[-1]
        level.stack = traceback.StackSummary.from_list(frames)
        level = level.__cause__ or level.__context__
    return "".join(whole.format())


def _is_inside(filename: str) -> bool:
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120
    return filename.startswith(package) and not filename.startswith(package + "examples" + os.sep)


if __name__ == "__main__":
    main()
