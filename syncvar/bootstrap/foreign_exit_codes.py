"""The exit codes of processes that another launcher has started: those of syncvar-launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.exit_codes import error_exit_code, is_interactive
from syncvar.core.fork_cleanup import hook_exceptions

if TYPE_CHECKING:
    from types import TracebackType

    from syncvar.core.fork_cleanup import ExceptionHook

__all__ = ["give_exit_codes"]

_before: list[ExceptionHook] = []  # at most one


def give_exit_codes() -> None:
    """Give this process the exit code of an error of syncvar that ends it, by `sys.excepthook`.

    The hook that was there before runs first.
    """
    if not _before:
        _before.append(hook_exceptions(_end))


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _before[0](kind, error, trace)
    code = error_exit_code(error)
    if code != 1 and not is_interactive():
        raise SystemExit(code)  # the interpreter takes the code and writes nothing
