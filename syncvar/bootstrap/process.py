"""What this process is in: its context, made by `init` or by the first call that needs it, and left by `shutdown`.

There is one context per process. Threads of an in-process test world each have their own, which `use` binds to them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from syncvar._native import entrance, message_entrance, note_change
from syncvar.bootstrap.rank_process import environment_of
from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.exit_codes import failure_in_words
from syncvar.core.fork_cleanup import register_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping, Sequence

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.core.environment import RankEnvironment
    from syncvar.core.stack_dump import StackFrame

__all__ = [
    "abandon",
    "current",
    "entered_natively",
    "environment_here",
    "init",
    "is_initialized",
    "joined",
    "member",
    "messages_entered_natively",
    "on_join",
    "shutdown",
    "use",
]


class _ProcessState:
    """The default context of the process, and the one that each thread of a test world has instead."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.default: ProcessContext | None = None
        self.thread = threading.local()
        self.is_bound = False  # some thread has had a context of its own
        self.forked: UsageError | None = None
        self.generations = 0
        self.is_exit_registered = False
        self.environ: MutableMapping[str, str] = os.environ  # what tells this process who it is
        self.joiners: list[Callable[[ProcessContext], None]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        note_change()


_state = _ProcessState()


def init(*, alone: bool = False) -> None:
    """Join the job. Does nothing when this process has joined already.

    A process that no launcher has started becomes a world of one. One that another engine has started, such as srun,
    mpirun, torchrun or an indexed job of Kubernetes, joins the others by what that tells it. One that is told of others and
    not how to meet them is refused: it would compute numbers of its own. After `shutdown`, `init` joins anew, together with
    all other ranks.

    Args:
        alone: Be a world of one on purpose, whatever other launchers say; as the variable SYNCVAR_WORLD_SIZE=1 says it.

    Raises:
        RendezvousError: Not all ranks came in time; the missing ones are named.
        ConfigError: The environment or a setting is wrong, or two launchers contradict each other; or one has started this
            process and others and does not say how they meet, and the message names the variable and what to write; or
            `alone` contradicts `syncvar-launch`, or what this process has joined already.

    Example:
        >>> import syncvar as sv
        >>> sv.init()
        >>> sv.rank(), sv.world_size()
        (0, 1)
    """
    context = current(alone=alone)
    if alone and context.world_size > 1:
        raise ConfigError(
            f"sv.init(alone=True), but this process has joined already: as rank {context.rank} of {context.world_size}"
        )


def shutdown() -> None:
    """Leave the job in order. Not a barrier; later calls to this rank raise PeerLost there. Idempotent.

    Raises:
        SyncvarError: A started call that nobody waited for had failed.
    """
    with _state.lock:
        context = joined()
        if context is None:
            return
        if context is _state.default:
            _state.default = None
        context.close(orderly=True)


def is_initialized() -> bool:
    """Return whether this process has joined and not left."""
    return joined() is not None


def joined() -> ProcessContext | None:
    """Return the context of this thread or process; None where it has not joined, which asking does not change."""
    context: ProcessContext | None = getattr(_state.thread, "context", None) or _state.default
    return None if context is None or context.is_closed else context


def environment_here() -> RankEnvironment | None:
    """Return who a launcher says that this process is, without joining."""
    return environment_of(_state.environ)


def on_join(listener: Callable[[ProcessContext], None]) -> None:
    """Call `listener(context)` whenever this process joins a job from now on."""
    _state.joiners.append(listener)


def current(*, alone: bool = False) -> ProcessContext:
    """Return the context of this thread or process, joining first if need be (`alone`: as a world of one)."""
    context = getattr(_state.thread, "context", None) or _state.default
    if context is not None and not context.is_closed:
        return context
    return _join(alone=alone)


def entered_natively(function: Any, **arguments: Any) -> Any:
    """Return a callable that runs a public function's persistent calls in C where they are of the job of this process; see `entrance`."""
    return entrance(function, _state, **arguments)


def messages_entered_natively(function: Any, *, is_sending: bool) -> Any:
    """Return the same for `send` and `recv`; see `message_entrance`."""
    return message_entrance(function, _state, is_sending=is_sending)


@contextlib.contextmanager
def use(context: ProcessContext) -> Iterator[None]:
    """Bind a context to this thread."""
    _state.is_bound = True
    _state.thread.context = context
    try:
        yield
    finally:
        del _state.thread.context


def abandon(reason: str = "it ends with an error", stack: Sequence[StackFrame] = ()) -> None:
    """Let go of the job without a goodbye: this process is about to end with an error.

    Args:
        reason: Which, for the flight record.
        stack: Where it came up in the main thread, likewise.
    """
    context = _state.default
    if context is not None and context.process == os.getpid():
        _state.default = None
        context.close(orderly=False, reason=reason, stack=stack)


@contextlib.contextmanager
def member(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let a mapping tell this process who it is, in place of its environment, until a block ends; then it leaves the job.

    For processes that are an engine's before and after they are a rank: actors of Ray, workers of Dask. A block that raises
    leaves without a goodbye.

    Raises:
        UsageError: This process is a rank already.
        SyncvarError: A started call that nobody waited for had failed.
    """
    with _state.lock:
        if _state.environ is not os.environ or (
            _state.default is not None and not _state.default.is_closed
        ):
            raise UsageError(
                f"process {os.getpid()} is a rank already: each rank needs a process of its own"
            )
        _state.environ, _state.generations = environ, 0
    try:
        yield
        shutdown()
    except BaseException as error:
        from syncvar.core.stack_dump import frames_before

        abandon(f"{type(error).__name__}: {error}"[:2000], frames_before(error.__traceback__))
        raise
    finally:
        with _state.lock:
            _state.environ = os.environ


def _join(*, alone: bool) -> ProcessContext:
    if getattr(_state.thread, "context", None) is not None:
        raise UsageError("this thread's context has been shut down")
    with _state.lock:
        if _state.forked is not None:
            raise _state.forked
        if _state.default is not None and not _state.default.is_closed:
            return _state.default
        # The engine, shared memory and the sockets: only a process that joins needs them.
        from syncvar.bootstrap.connect import connect

        _state.default = connect(_state.environ, _state.generations, alone=alone)
        for listener in _state.joiners:
            listener(_state.default)
        _state.generations += 1
        if not _state.is_exit_registered:
            _state.is_exit_registered = True
            register_exit(_at_exit)
        return _state.default


def _forked() -> None:
    _state.lock = threading.RLock()  # a thread that the child does not have may have held it
    if _state.default is not None:
        _state.forked = _state.default.disown()
        _state.default = None


def _at_exit() -> None:
    context = _state.default
    if context is None or context.process != os.getpid():
        return
    _state.default = None
    failure = failure_in_words()
    with contextlib.suppress(SyncvarError):
        if failure:
            context.close(orderly=False, reason=failure)
        else:
            context.close(orderly=True)


os.register_at_fork(after_in_child=_forked)
