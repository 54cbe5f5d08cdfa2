"""The context of this process, and its rank, size and host.

`init` or the first call that needs it creates the context, `shutdown` ends it.

There is one context per process. Threads of an in-process test world have contexts of their own,
bound by `use`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar._native import call_dispatch, message_dispatch, note_change
from syncvar.core.environment import environment_of
from syncvar.core.errors import ConfigError, SyncvarError, UsageError, error_line
from syncvar.core.exit_status import exit_error_text
from syncvar.core.fork_cleanup import register_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping, Sequence

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.bootstrap.kv_store import KeyValueStore
    from syncvar.bootstrap.launch_env import LaunchInfo
    from syncvar.core.environment import RankEnvironment
    from syncvar.core.stack_dump import StackFrame
    from syncvar.runtime.call_ledger import Ledger


_LOOK_S = 0.01


class _ProcessState:
    """The default context of the process, and contexts of threads in test worlds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.default: ProcessContext | None = None
        self.thread = threading.local()
        self.is_bound = False  # a thread has had its own context
        self.forked: UsageError | None = None
        self.generations = 0
        self.is_exit_registered = False
        # environment variables that identify this process
        self.environ: MutableMapping[str, str] = os.environ
        self.joiners: list[Callable[[ProcessContext], None]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        note_change()


_state = _ProcessState()


def init(*, alone: bool = False) -> None:
    """Join the job. Does nothing if this process has joined already.

    A process without launcher becomes a world of one. Processes of srun, mpirun, torchrun or an
    Indexed Job of Kubernetes join each other by the variables of that launcher. If the variables
    name other processes but not how to meet them, `init` raises ConfigError: each process would
    compute results of its own. After `shutdown`, `init` joins again, together with all other ranks.

    Args:
        alone: Be a world of one, whatever other launchers say; as SYNCVAR_WORLD_SIZE=1 does.

    Raises:
        RendezvousError: Not all ranks came in time; the message names the missing ranks.
        ConfigError: The environment or a setting is wrong; launchers contradict each other; a
            launcher has started several processes and does not say how they meet; or `alone`
            contradicts `syncvar-launch` or an earlier `init`.

    Example:
        >>> import syncvar as sv
        >>> sv.init()
        >>> sv.rank(), sv.world_size()
        (0, 1)
    """
    context = current(alone=alone)
    if alone and context.world_size > 1:
        raise ConfigError(
            f"sv.init(alone=True), but this process has joined already: as rank {context.rank} of "
            f"{context.world_size}"
        )


def shutdown() -> None:
    """Leave the job. Not a barrier; later calls of other ranks that need this rank raise PeerLost.

    Idempotent.

    Raises:
        SyncvarError: An asynchronous call that was not waited for had failed.

    Example:
        >>> import syncvar as sv
        >>> sv.init()
        >>> sv.shutdown()
        >>> sv.is_initialized()
        False
    """
    with _state.lock:
        context = joined()
        if context is None:
            return
        if context is _state.default:
            _state.default = None
        context.close(orderly=True)


def is_initialized() -> bool:
    """Return whether this process has joined and not left.

    Example:
        >>> import syncvar as sv
        >>> sv.init()
        >>> sv.is_initialized()
        True
    """
    return joined() is not None


def rank() -> int:
    """Return this process's rank in the world; 0 without a launcher.

    Example:
        >>> import syncvar as sv
        >>> sv.rank()
        0
    """
    return current().rank


def world_size() -> int:
    """Return the number of ranks in the world; 1 without a launcher.

    Example:
        >>> import syncvar as sv
        >>> sv.world_size()
        1
    """
    return current().world_size


def local_rank() -> int:
    """Return this process's rank among those of its host.

    Example:
        >>> import syncvar as sv
        >>> sv.local_rank()
        0
    """
    return current().local_rank


def local_world_size() -> int:
    """Return the number of ranks on this host.

    Example:
        >>> import syncvar as sv
        >>> sv.local_world_size()
        1
    """
    return current().local_world_size


def host_index() -> int:
    """Return the index of this host, 0 for the first.

    Example:
        >>> import syncvar as sv
        >>> sv.host_index()
        0
    """
    return current().host_index


def host_count() -> int:
    """Return the number of hosts.

    Example:
        >>> import syncvar as sv
        >>> sv.host_count()
        1
    """
    return current().host_count


def restart_count() -> int:
    """Return how often this job's workers have been restarted; 0 in the first run.

    Equal on all ranks.

    `syncvar-launch --max-restarts` restarts all workers when one fails. So do torchrun, a requeue
    of Slurm and a JobSet. Only checkpoints survive a restart. An Indexed Job of Kubernetes does not
    count its restarts, so the number stays 0.

    Example:
        >>> import syncvar as sv
        >>> sv.restart_count()
        0
    """
    return current().restarts


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Count this rank's calls in a `with` block, by variable and program line.

    Each rank counts its own calls, and sends nothing. `Ledger.merge` combines the ledgers of
    several ranks. Blocks may be nested. A started call belongs to the block in which it has ended.

    Returns:
        A context manager that gives the `Ledger`, which can be read inside the block and after it.

    Cost:
        About 1 us for each call in the block, and nothing outside.

    Example:
        >>> import numpy as np
        >>> import syncvar as sv
        >>> w = sv.Variable(np.zeros(1000), aggregation="SUM", name="counted")
        >>> with sv.ledger() as ledger:
        ...     for _ in range(3):
        ...         written = w.assign_add(np.ones(1000))
        >>> row = ledger.rows[0]
        >>> row.variable, row.collective, row.calls, row.nbytes
        ('counted', 'assign_add(sum)', 3, 24000)
    """
    from syncvar.runtime.call_ledger import Ledger

    recorder = current().recorder
    result = Ledger([recorder.identity.rank])
    recorder.attach(result.counter)
    try:
        yield result
    finally:
        recorder.detach(result.counter)


def joined() -> ProcessContext | None:
    """Return the context of this thread or process, or None; does not join."""
    context: ProcessContext | None = getattr(_state.thread, "context", None) or _state.default
    return None if context is None or context.is_closed else context


def environment_here() -> RankEnvironment | None:
    """Return the identity that a launcher has given this process, without joining."""
    return environment_of(_state.environ)


def on_join(listener: Callable[[ProcessContext], None]) -> None:
    """Call `listener(context)` whenever this process joins a job from now on."""
    _state.joiners.append(listener)


def current(*, alone: bool = False) -> ProcessContext:
    """Return the context of this thread or process; join first if necessary."""
    context = getattr(_state.thread, "context", None) or _state.default
    if context is not None and not context.is_closed:
        return context
    return _join(alone=alone)


def join_as(info: LaunchInfo, kv_store: KeyValueStore) -> None:
    """Join a job of which the program gives the identity; the ranks meet by `kv_store`.

    Raise UsageError if this process has joined a job already, and the errors of `init`.
    """
    with _state.lock:
        if _state.forked is not None:
            raise _state.forked
        if joined() is not None:
            raise UsageError("this process has joined a job already: call sv.shutdown() before")
        from syncvar.bootstrap.connect import connect_as

        _adopt(connect_as(info, _state.environ, kv_store))


def process_environ() -> MutableMapping[str, str]:
    """Return the environment variables that identify this process."""
    return _state.environ


def leave_generation() -> None:
    """Leave the present membership at once; the process may join another one with `replace`."""
    with _state.lock:
        context, _state.default = _state.default, None
        if context is not None and not context.is_closed:
            is_broken = context.engine is not None and context.engine.failure is not None
            with contextlib.suppress(SyncvarError):
                context.close(orderly=not is_broken, reason="the generation has ended")


def is_broken(within_s: float) -> bool:
    """Return whether the present membership is broken; wait for such news for a while."""
    context = _state.default
    engine = None if context is None else context.engine
    until = time.monotonic() + within_s
    while engine is not None and engine.failure is None and time.monotonic() < until:
        engine.poll()
        time.sleep(_LOOK_S)
    return engine is not None and engine.failure is not None


def replace(connects: Callable[[], ProcessContext]) -> ProcessContext:
    """Join another membership of the same job, and return its context."""
    with _state.lock:
        if _state.forked is not None:
            raise _state.forked
        context = connects()
        _adopt(context)
        return context


def dispatch_calls(function: Any, **arguments: Any) -> Any:
    """Return a function whose persistent calls C runs; see `call_dispatch`."""
    return call_dispatch(function, _state, **arguments)


def dispatch_messages(function: Any, *, is_sending: bool) -> Any:
    """Return the same for `send` and `recv`; see `message_dispatch`."""
    return message_dispatch(function, _state, is_sending=is_sending)


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
    """Leave the job at once before this process ends with an error, for the flight record."""
    context = _state.default
    if context is not None and context.process == os.getpid():
        _state.default = None
        context.close(orderly=False, reason=reason, stack=stack)


@contextlib.contextmanager
def member(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Use a mapping instead of the environment variables in a block, and leave the job after it.

    For processes that live before and after they are a rank: actors of Ray, workers of Dask. A
    block that raises leaves the job at once.
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

        abandon(error_line(error)[:2000], frames_before(error.__traceback__))
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
        # Imported late: only a process that joins needs sockets and shared memory.
        from syncvar.bootstrap.connect import connect

        _adopt(connect(_state.environ, _state.generations, alone=alone))
        _state.generations += 1
        assert _state.default is not None
        return _state.default


def _adopt(context: ProcessContext) -> None:
    """Make a new context that of the process; the caller holds the lock."""
    _state.default = context
    for listener in _state.joiners:
        listener(context)
    if not _state.is_exit_registered:
        _state.is_exit_registered = True
        register_exit(_at_exit)


def _forked() -> None:
    _state.lock = threading.RLock()  # a thread that does not exist in the child may have held it
    if _state.default is not None:
        _state.forked = _state.default.disown()
        _state.default = None


def _at_exit() -> None:
    context = _state.default
    if context is None or context.process != os.getpid():
        return
    _state.default = None
    failure = exit_error_text()
    with contextlib.suppress(SyncvarError):
        if failure:
            context.close(orderly=False, reason=failure)
        else:
            context.close(orderly=True)


os.register_at_fork(after_in_child=_forked)
