"""Gives processes of other launchers the exit codes of syncvar-launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.exit_codes import error_exit_code, is_interactive
from syncvar.core.fork_cleanup import hook_exceptions

if TYPE_CHECKING:
    from types import TracebackType

    from syncvar.core.fork_cleanup import ExceptionHook

_before: list[ExceptionHook] = []  # at most one


def give_exit_codes() -> None:
    """Set the exit code of this process for uncaught errors of syncvar, by `sys.excepthook`.

    The previous hook runs first.
    """
    if not _before:
        _before.append(hook_exceptions(_end))


def _end(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _before[0](error_type, error, trace)
    code = error_exit_code(error)
    if code != 1 and not is_interactive():
        raise SystemExit(code)  # the interpreter takes the code and writes nothing
