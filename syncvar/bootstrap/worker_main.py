"""Main program of a worker; its arguments are `script.py …` or `-m module …`.

It runs the user's script as `__main__`, and reports to the launcher how the script ended: normally,
by an exception (with its traceback), or by exit. The script itself joins the job when it first uses
syncvar.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import itertools
import os
import pkgutil
import re
import runpy
import signal
import sys
import threading
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from syncvar.core import stack_dump
from syncvar.core.environment import claim_rank
from syncvar.core.errors import code_of, error_message
from syncvar.core.exit_status import StatusPipe, error_exit_code, set_status_pipe
from syncvar.core.fork_cleanup import enable_fault_handler, handle_signal, register_exit
from syncvar.core.process_ids import server_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, TracebackType

_FINDERS = (
    runpy.__file__,
    importlib.util.__file__,
    "<frozen runpy>",
    "<frozen importlib.util>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)
_MARK = "<frames of syncvar>"
_FOLD = re.compile(rf'  File "{_MARK}", line (\d+), in folded\n')
_CONSEQUENCES = ("PeerLost", "GroupBroken")


def main() -> None:
    """Run the script or module of the arguments, in a fresh process."""
    add_folder(sys.argv[1:])
    work()


def work(run: Callable[[list[str]], None] | None = None) -> None:
    """Run the script or module of the arguments; its folder is on the path already."""
    pipe = StatusPipe(int(os.environ.pop("SYNCVAR_STATUS_FD", "-1")))
    set_status_pipe(pipe)
    process = os.getpid()
    claim_rank(os.environ)
    enable_fault_handler()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        handle_signal(signal.SIGTERM, _terminate)
        directory = os.environ.get("SYNCVAR_HOST_DIRECTORY", "")
        if pipe.is_open and directory:
            with contextlib.suppress(OSError):  # then the launcher cannot request its stack
                rank = int(os.environ["SYNCVAR_RANK"])
                stack_dump.answer_signals(
                    stack_dump.stack_path(directory, rank if run is None else server_number(rank))
                )
    pipe.announce_start()
    # Registered first, so it runs last, after the user's handlers and shutdown.
    register_exit(pipe.announce_end)
    try:
        _run_to_end(run or _run)
    except SystemExit as request:
        if os.getpid() == process:
            failure = failure_of(request)
            _abandon_job(f"SystemExit: {failure.message}", request)
            message, text, written = (
                failure.message,
                failure.text,
                failure.text and f"{failure.text}\n",
            )
            pipe.announce_failure("SystemExit", message, text, failure.exit_code, written=written)
            if isinstance(request.code, int) and failure.text:
                sys.stderr.write(written)
                raise SystemExit(failure.exit_code) from None
        raise
    except BaseException as error:  # noqa: BLE001  (the last frame that sees it)
        if os.getpid() != process:
            raise
        _fail(pipe, error)


def _run_to_end(run: Callable[[list[str]], None]) -> None:
    """Run to the end; a normal end includes that pushes to servers have arrived."""
    try:
        run(sys.argv[1:])
    except SystemExit as request:
        if request.code is not None and request.code != 0:
            raise
    sessions = sys.modules.get("syncvar.parameter_server.worker_session")
    if sessions is not None:
        sessions.settle_all()


def add_folder(arguments: list[str]) -> None:
    """Put the folder of a script or module on the module path, as Python does."""
    if not sys.flags.safe_path:  # not with PYTHONSAFEPATH
        sys.path.insert(0, _folder_of(arguments))


def remove_folder(arguments: list[str]) -> None:
    """Take back what `add_folder` has put on the module path for another program."""
    if not sys.flags.safe_path:
        sys.path.remove(_folder_of(arguments))


def _folder_of(arguments: list[str]) -> str:
    is_module = arguments[0] == "-m"
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0]))


def _run(arguments: list[str]) -> None:
    """Run the script or module as the module `__main__`; it stays for threads and exit handlers."""
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        code, spec = _module_code(arguments[1])
        sys.argv[0] = spec.origin or arguments[1]
        origin = {
            "__spec__": spec,
            "__loader__": spec.loader,
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__package__": spec.parent,
        }
    else:
        sys.argv[:] = arguments
        path = arguments[0]
        if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
            runpy.run_path(path, run_name="__main__")
            return
        code = _script_code(path)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        origin = {
            "__spec__": None,
            "__loader__": loader,
            "__file__": path,
            "__cached__": None,
            "__package__": None,
        }
    main = ModuleType("__main__")
    vars(main).update(origin)
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102  (the user's own script)


def _script_code(path: str) -> CodeType:
    with io.open_code(os.path.abspath(path)) as file:  # noqa: PTH100
        code: CodeType | None = pkgutil.read_code(file)
        if code is None:
            file.seek(0)
            code = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def _module_code(name: str) -> tuple[CodeType, importlib.machinery.ModuleSpec]:
    """Return the code that `python -m` would run; for a package, that of its module `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
    except (AttributeError, TypeError, ValueError) as error:
        raise ImportError(
            f"Error while finding the module {name!r} ({type(error).__name__}: {error})"
        ) from error
    if spec is None or spec.loader is None:
        raise ImportError(f"No module named {name}")
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            raise ImportError("Cannot use package as __main__ module")
        return _module_code(f"{name}.__main__")
    code: CodeType | None = getattr(spec.loader, "get_code", lambda _: None)(name)
    if code is None:
        raise ImportError(f"No code object available for {name}")
    return code, spec


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _abandon_job(reason: str, error: BaseException) -> None:
    process = sys.modules.get("syncvar.bootstrap.process")
    if process is not None:
        try:
            process.abandon(reason, stack_dump.frames_before(error.__traceback__))
        except Exception as another:  # noqa: BLE001  (the script's own failure is what matters now)
            sys.stderr.write(f"syncvar: leaving the job failed: {another}\n")


class WorkerFailure(NamedTuple):
    """An exception as it affects the process that it ends.

    `text` is the traceback for the author of the script; in `brief` the frames of syncvar are
    folded.
    """

    error: str
    message: str
    text: str
    brief: str
    exit_code: int


def failure_of(error: BaseException) -> WorkerFailure:
    """Return what an exception of a script means for its process, which ends soon."""
    name = type(error).__name__
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = "" if error.code is None or isinstance(error.code, int) else str(error.code)
        status = code & 0xFF
        if code and not status:
            status = 1
            text = (
                f"sys.exit({code}): an exit code has 8 bits, and the lowest 8 of this number are "
                "0; it counts as 1. Use 1 to 255"
            )
        return WorkerFailure(name, str(error.code), text, text, status)
    code = 130 if isinstance(error, KeyboardInterrupt) else error_exit_code(error)
    text, brief = _traceback_texts(error)
    return WorkerFailure(name, error_message(error), text, brief, code)


def _fail(pipe: StatusPipe, error: BaseException) -> NoReturn:
    name, message, text, brief, code = failure_of(error)
    written = text
    if sys.excepthook is not sys.__excepthook__:
        written = ""  # the script's own hook writes something unknown
    elif _is_ours(error) and name in _CONSEQUENCES:
        written = f"{name}: {error}\n"  # every surviving rank has the same traceback
    pipe.announce_failure(
        name, message, text, code, code=code_of(error), brief=brief, written=written
    )
    _abandon_job(f"uncaught {name}: {message}"[:2000], error)
    if sys.excepthook is not sys.__excepthook__:
        _call_hook(error)
    else:
        sys.stderr.write(written)
    sys.stderr.flush()
    raise SystemExit(code)


def _call_hook(error: BaseException) -> None:
    """Call the script's `sys.excepthook`, as the interpreter would."""
    try:
        sys.excepthook(type(error), error, _own_part(error.__traceback__))
    except Exception as another:  # noqa: BLE001  (likewise)
        sys.stderr.write(
            f"Error in sys.excepthook:\n{_traceback_texts(another)[0]}\nOriginal exception "
            f"was:\n{_traceback_texts(error)[0]}"
        )


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of syncvar before those of the script."""
    while trace and trace.tb_next and _is_around(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__ == "syncvar.core.errors"


def _traceback_texts(error: BaseException) -> tuple[str, str]:
    """Return the traceback without outer frames of syncvar, and the same with inner ones folded.

    Outer frames of the package and of runpy always go. Inner frames of the package go for errors
    about the user's call. Those of an InternalError stay, because a bug report needs them.
    """
    whole = traceback.TracebackException.from_exception(error)
    name = type(error).__name__
    if os.environ.get("SYNCVAR_FULL_TRACEBACK") or name in ("InternalError", "PlanError"):
        text = "".join(whole.format())
        return text, text
    levels = [whole]
    while (level := levels[-1].__cause__ or levels[-1].__context__) is not None:
        levels.append(level)
    for level in levels:
        frames = list(level.stack)
        is_syntax = level.exc_type is not None and issubclass(level.exc_type, SyntaxError)
        keep = 0 if is_syntax else 1  # a SyntaxError contains its own location
        while len(frames) > keep and _is_around(frames[0].filename):
            del frames[0]
        if level.exc_type is not None and level.exc_type.__module__ == "syncvar.core.errors":
            while len(frames) > 1 and _is_inside(frames[-1].filename):
                del frames[-1]
        level.stack = traceback.StackSummary.from_list(frames)
    text = "".join(whole.format())
    for level in levels:
        level.stack = _folded(level.stack)
    return text, _FOLD.sub(_fold_text, "".join(whole.format()))


def _folded(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Replace adjacent frames of syncvar by one mark, except for the innermost frame."""
    frames: list[traceback.FrameSummary] = []
    for is_ours, run in itertools.groupby(stack[:-1], lambda frame: _is_inside(frame.filename)):
        together = list(run)
        if is_ours:
            together = [traceback.FrameSummary(_MARK, len(together), "folded", line="")]
        frames += together
    return traceback.StackSummary.from_list([*frames, *stack[-1:]])


def _fold_text(match: re.Match[str]) -> str:
    count = int(match[1])
    return f"  [{count} frame{'s' * (count > 1)} of syncvar]\n"


def _is_around(filename: str) -> bool:
    return filename in _FINDERS or _is_inside(filename)


def _is_inside(filename: str) -> bool:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
    return filename.startswith(package) and not filename.startswith(package + "examples" + os.sep)
