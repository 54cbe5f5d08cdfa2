"""Handlers and hooks of syncvar, which forked children undo; and children that end with a parent.

A child that the program forks (`os.fork`, `multiprocessing` with "fork") behaves as under plain
`python`: syncvar's signal and exit handlers and its fault handler are off. So syncvar sets all of
these through this module only.

A signal may reach a child before the child has undone anything. The interpreter would drop it, or
call the parent's handler. So the forking thread blocks these signals from before the fork until
the child has undone its copies. The hooks that do so are C functions: the interpreter runs no
signal handler between them, so the parent loses no signal either.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_PR_SET_PDEATHSIG = 1
_SIGSET_BYTES = 128  # sizeof(sigset_t) on Linux
_STDERR = 2

libc = ctypes.CDLL(None, use_errno=True)

# (signal, our handler, handler before), oldest first
_handlers: list[tuple[int, Any, Any]] = []
_exit_handlers: list[Callable[..., None]] = []
_exception_hooks: list[tuple[ExceptionHook, ExceptionHook]] = []  # ours, and the one before
_fault_dumps: list[int] = []  # signals to which the fault handler writes stacks


class _Stderr:
    """File for the fault handler; as long as it lives, nobody else has set the fault handler."""

    def fileno(self) -> int:
        return _STDERR

    def flush(self) -> None:
        pass


_fault_file: weakref.ref[_Stderr] | None = None


def handle_signal(number: int, handler: Any) -> Any:
    """Set a handler as `signal.signal` does, but undo it in forked children."""
    before = signal.signal(number, handler)
    if number not in (one[0] for one in _handlers):
        libc.sigaddset(_ours, number)
    _handlers.append((number, handler, before))
    return before


def release_signal(number: int, handler: Any) -> None:
    """Restore the handler before `handler`, unless other code has set the signal since."""
    entry = next((one for one in reversed(_handlers) if one[:2] == (number, handler)), None)
    if entry is not None:
        _handlers.remove(entry)
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL if entry[2] is None else entry[2])


def register_exit(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function at exit as `atexit.register` does, but not in forked children."""
    atexit.register(function, *arguments)
    _exit_handlers.append(function)


def unregister_exit(function: Callable[..., None]) -> None:
    """Undo `register_exit`."""
    atexit.unregister(function)
    if function in _exit_handlers:
        _exit_handlers.remove(function)


def hook_exceptions(hook: ExceptionHook) -> ExceptionHook:
    """Set `sys.excepthook` except in forked children; return the hook before."""
    before = sys.excepthook
    sys.excepthook = hook
    _exception_hooks.append((hook, before))
    return before


def enable_fault_handler() -> None:
    """Have the interpreter write a stack if this process crashes, unless that is on already."""
    global _fault_file  # noqa: PLW0603  (one per process, as the fault handler)
    if not faulthandler.is_enabled():
        file = _Stderr()
        faulthandler.enable(file)  # it uses fileno and flush only
        _fault_file = weakref.ref(file)


def register_fault_dump(number: int, descriptor: int) -> None:
    """Have the fault handler write the main thread's stack at a signal; not in forked children."""
    faulthandler.register(number, descriptor, all_threads=False)
    _fault_dumps.append(number)


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, or exit now if that has happened."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above took effect
        os._exit(1)


def _undo_signal(number: int) -> None:
    current = now = signal.getsignal(number)
    for _, handler, before in (one for one in reversed(_handlers) if one[0] == number):
        if now == handler:
            now = before
    if now != current:
        signal.signal(number, signal.SIG_DFL if now is None else now)


def _undo() -> None:
    """Undo in a forked child the settings that it has inherited."""
    for number in {one[0] for one in _handlers}:
        _undo_signal(number)
    for hook, earlier in reversed(_exception_hooks):
        if sys.excepthook is hook:
            sys.excepthook = earlier
    for number in _fault_dumps:
        faulthandler.unregister(number)
    if _fault_file is not None and _fault_file() is not None:
        faulthandler.disable()
    for function in _exit_handlers:
        atexit.unregister(function)
    for entries in (_handlers, _fault_dumps, _exit_handlers, _exception_hooks):
        entries.clear()


_ours = ctypes.create_string_buffer(_SIGSET_BYTES)
_saved = ctypes.create_string_buffer(_SIGSET_BYTES)
_forking = threading.RLock()  # one thread forks at a time: `_saved` is its mask
_restore = functools.partial(libc.pthread_sigmask, int(signal.SIG_SETMASK), _saved, None)

libc.sigemptyset(_ours)
# "before" hooks run in reverse order of registration, the others in order.
os.register_at_fork(
    before=functools.partial(libc.pthread_sigmask, int(signal.SIG_BLOCK), _ours, _saved)
)
os.register_at_fork(before=_forking.acquire, after_in_child=_undo)
os.register_at_fork(after_in_child=_restore, after_in_parent=_restore)
os.register_at_fork(after_in_child=_forking.release, after_in_parent=_forking.release)
