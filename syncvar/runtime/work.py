"""Handles of asynchronous calls, waits for several of them, and checks of `timeout`."""

from __future__ import annotations

import contextlib
import logging
import math
import reprlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import AsyncCall
from syncvar.core.errors import ConfigError, SyncvarError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.block_transfer import NO_RESULT
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.state import send_queued

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import Callable, Generator, Iterable

    from syncvar.runtime.progress import ProgressEngine
    from syncvar.runtime.request import Request

_log = logging.getLogger("syncvar")


def checked_timeout(timeout: Any) -> float:
    """Return a timeout in seconds; raise ConfigError if it is not a positive number."""
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float | np.integer | np.floating)
        or not timeout > 0
    ):
        raise ConfigError(f"timeout must be a positive number of seconds or None, not {timeout!r}")
    try:
        return float(timeout)
    except OverflowError:  # an int above every float
        return math.inf


def is_seconds(timeout: Any) -> bool:
    """Return whether `checked_timeout` surely accepts a timeout; in doubt the slow path decides.

    Example:
        >>> is_seconds(5), is_seconds(0.5), is_seconds(0), is_seconds(True), is_seconds("5")
        (True, True, False, False, False)
    """
    return type(timeout) in (float, int) and timeout > 0


class DoneCallbacks:
    """The done-callbacks of a call: each is called once, in the order of addition."""

    def __init__(self) -> None:
        self.functions: list[Callable[[Work], object]] = []
        self._running = threading.Lock()

    def run(self, work: Work) -> None:
        """Call all functions of a call that is over; another thread that does so continues."""
        while self.functions and self._running.acquire(blocking=False):
            try:
                while self.functions:
                    _call(self.functions.pop(0), work)
            finally:
                self._running.release()


def _call(function: Callable[[Work], object], work: Work) -> None:
    try:
        function(work)
    except KeyboardInterrupt:  # of a thread that adds a callback to a call that is over
        raise
    except BaseException:  # the caller of the callback has another job
        _log.exception("the done-callback %r raised an exception", function)


class Work(MigrationHintsMixin):
    """An asynchronous collective or message.

    `await work` in a coroutine returns what `wait` returns, and other tasks run meanwhile. Several
    tasks, event loops and threads may wait for one call. If you cancel a task that awaits it, the
    call continues, because the other ranks take part in it. The deadline is that of the call; a
    `timeout` of asyncio only ends the wait.

    Example:
        >>> import asyncio, numpy as np, syncvar as sv
        >>> work = sv.all_reduce(np.ones(2), async_op=True)
        >>> work.wait()
        array([1., 1.])
        >>> async def both():
        ...     works = [sv.all_reduce(x, async_op=True) for x in (1.0, 2.0)]
        ...     return await asyncio.gather(*works)
        >>> asyncio.run(both())
        [array(1.), array(2.)]
    """

    _async_call: AsyncCall | None = None  # while the engine does not know the call
    _callbacks: DoneCallbacks
    _finish: Callable[[Any], Any] | None = None
    _request: Request

    def __init__(
        self, engine: ProgressEngine | None, request: Request | AsyncCall, *, sends: bool = False
    ) -> None:
        self._engine = engine
        self._sends = sends  # this call sends deferred writes
        if isinstance(request, AsyncCall):
            self._async_call = request
        else:
            self._request = request

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Apply `finish` to the result, after earlier functions; return this work."""
        self._finish = finish if self._finish is None else partial(_both, self._finish, finish)
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Args:
            timeout: Seconds from now; None keeps the deadline of the call. If the time passes, the
                call has failed as one that misses its deadline, and the group is broken. To poll,
                use `done`.

        Raises:
            SyncvarError: The error of the collective.
        """
        async_call = self._async_call
        if async_call is not None:
            result = self._take_result(async_call, waits=True)
            if result is not None:
                return self._finished(result)
        return self._outcome(self._request, timeout, sends=not self._sends)

    def __await__(self) -> Generator[Any, None, Any]:
        request = self._continued()
        if request is None:
            return self.wait()  # has ended: does not wait
        if not request.is_over:
            import asyncio  # loaded, because a loop runs

            loop = asyncio.get_running_loop()
            future = loop.create_future()
            request.when_over(partial(_wake, loop, future))
            yield from future
        return self._outcome(request, None, sends=False)

    def _outcome(self, request: Request, timeout: float | None, *, sends: bool) -> Any:
        """Wait for the result; `sends` sends deferred writes first."""
        if self._engine is None:
            if request.error is not None:
                raise request.error
            return self._finished(request.result)
        try:
            result = self._wait(request, self._engine, timeout, sends=sends)
        except SyncvarError as error:
            note = f"the call was started at {request.site}"
            if request.site and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise
        return self._finished(result)

    def _finished(self, result: Any) -> Any:
        """Return what the caller gets."""
        if result is NO_RESULT:
            result = None
        return result if self._finish is None else self._finish(result)

    def _wait(
        self, request: Request, engine: ProgressEngine, timeout: float | None, *, sends: bool
    ) -> Any:
        if engine.queues and sends:
            send_queued(engine.queues)
        if timeout is not None and not request.is_over:
            allowed = checked_timeout(timeout)
            until = time.monotonic() + allowed
            if until < request.deadline:
                request.deadline, request.timeout_s = until, allowed
        return engine.wait(request)

    def _take_result(self, async_call: AsyncCall, *, waits: bool) -> Any:
        """Return the result of a call unknown to the engine; None if the engine continues it."""
        result = async_call.end(waits)
        if result is None:
            assert self._engine is not None
            request = self._engine.request_of(async_call)
            if request is None:
                return async_call.end(waits)  # the call has ended meanwhile
            # set before `_async_call`: another thread may wait for the same call
            self._request = request
            self._async_call = None
        return result

    def done(self) -> bool:
        """Return whether the collective has ended, with or without error.

        Makes a little progress.
        """
        async_call = self._async_call
        if async_call is not None and self._take_result(async_call, waits=False) is not None:
            return True
        request = self._request
        if self._engine is not None and not request.is_over:
            self._begin_queued(self._engine)
            self._engine.poll()
        return request.is_over

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended with an error; False while it runs.

        Example:
            >>> import syncvar as sv
            >>> sv.barrier(async_op=True).has_failed
            False
        """
        return self._async_call is None and self._request.error is not None

    def _begin_queued(self, engine: ProgressEngine) -> None:
        """Start to send deferred writes, without waiting for them."""
        if engine.queues and not self._sends:
            for queue in list(engine.queues):
                queue.begin_beside()

    def _continued(self) -> Request | None:
        """Let the engine continue the call while no thread waits; None if it needs no engine."""
        async_call, engine = self._async_call, self._engine
        if async_call is not None and self._take_result(async_call, waits=False) is not None:
            return None
        request = self._request
        if engine is not None and not request.is_over:
            engine.require_own()
            self._begin_queued(engine)
            engine.transport.wake()  # the progress thread continues it
        return request

    def add_done_callback(self, function: Callable[[Work], object]) -> None:
        """Call `function(work)` when the call has ended, with or without error.

        The callbacks of all calls run in a thread of syncvar, `syncvar-callbacks-RANK`, one after
        another. Those of one call run in the order of addition. If the call has ended already, the
        function is called at once, in this thread. So is that of a message to this rank itself, in
        the thread that sends it.

        A callback may use syncvar. While it waits for a call, other callbacks wait too, so a
        callback that waits for another callback never returns. An exception in a callback is
        logged and has no other effect.

        Args:
            function: Called with this work; `work.wait()` then returns or raises at once.

        Cost: a switch to the thread of the callbacks, which starts with the first one.
        Source: concurrent.futures.Future.add_done_callback.

        Example:
            >>> import syncvar as sv
            >>> work = sv.all_reduce(2.0, async_op=True)
            >>> work.add_done_callback(lambda work: print("sum", work.wait()))
            sum 2.0
        """
        request, engine = self._continued(), self._engine
        callbacks: DoneCallbacks = self.__dict__.setdefault("_callbacks", DoneCallbacks())
        callbacks.functions.append(function)
        run = partial(callbacks.run, self)
        if request is None or request.is_over:
            run()
        elif engine is None:
            request.when_over(run)
        else:
            engine.callbacks.start()
            request.when_over(partial(engine.callbacks.post, run))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error, or None."""
        try:
            self.wait(timeout)
        except Exception as error:  # returned, as asked
            return error
        return None


def _both(first: Callable[[Any], Any], second: Callable[[Any], Any], result: Any) -> Any:
    return second(first(result))


def _wake(loop: AbstractEventLoop, future: Future[None]) -> None:
    """Let the task continue that waits for a future; its loop may have been closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_complete, future)


def _complete(future: Future[None]) -> None:
    if not future.done():  # else the task has been cancelled
        future.set_result(None)


def wait_any(works: Iterable[Work | None]) -> int:
    """Wait until one of several asynchronous calls has ended, and return its index.

    `works[index].wait()` then returns its result or raises its error at once. The other calls
    continue. If several calls have ended, the function returns the first of them in `works`. Each
    call keeps its own deadline; a call that misses it has ended too.

    Args:
        works: `Work` objects of calls with `async_op=True`; None for a call whose result has been
            taken.

    Returns:
        Index into `works`.

    Raises:
        ConfigError: `works` holds no asynchronous call, or something else.
        UsageError: All calls receive from this rank itself, which has sent nothing.

    Cost: no message. The calling thread sleeps while nothing arrives.
    Source: MPI_Waitany.

    Example:
        >>> import syncvar as sv
        >>> works = [sv.recv(0, tag=11, async_op=True), sv.recv(0, tag=12, async_op=True)]
        >>> sv.send(5.0, 0, tag=12)
        >>> index = sv.wait_any(works)
        >>> index, works[index].wait()
        (1, array(5.))
    """
    listed = _checked("wait_any", works)
    started = [(index, work) for index, work in enumerate(listed) if work is not None]
    if not started:
        raise ConfigError(
            f"wait_any: works holds no started call, but {len(listed)} times None: end the loop "
            "when every call has been waited for"
        )
    for index, work in started:
        if work.done():
            return index
    calls = [(work._engine, work._request) for _, work in started]  # noqa: SLF001  (its own room)
    engine = next((one for one, _ in calls if one is not None), None)
    if engine is None:
        started[0][1].wait()  # raises: only this thread could send the message
    else:
        first = _FirstEnded(engine, [request for _, request in calls])
        engine.wait(first)
        first.entry.end()
    return next(index for index, work in started if work.done())


class _FirstEnded:
    """A wait for the first of several requests, with the attributes that the engine needs."""

    label = "wait_any"
    call = -1
    error = None
    result = None

    def __init__(self, engine: ProgressEngine, requests: list[Request]) -> None:
        self._requests = requests
        self.thread = 0
        path = f"{len(requests)} started calls"
        self.entry = engine.recorder.begin(
            CallInfo(CollectiveSpec(self.label), path=path), self.call
        )

    @property
    def is_over(self) -> bool:
        """Whether one of the requests is over."""
        return any(request.is_over for request in self._requests)

    def look(self) -> bool:
        """Spin for a short while; return whether a request in shared memory can continue."""
        return any(request.needs_looks and request.look() for request in self._requests)


def wait_all(works: Iterable[Work | None]) -> list[Any]:
    """Wait until all of several asynchronous calls have ended, and return their results.

    Each call keeps its own deadline. If one fails, the function waits for the others before it
    raises the error.

    Args:
        works: `Work` objects of calls with `async_op=True`. The result for None is None.

    Returns:
        The results, in the order of `works`.

    Raises:
        ConfigError: Something in `works` is not an asynchronous call.
        SyncvarError: The error of the first call in `works` that failed.

    Cost: no message.
    Source: MPI_Waitall.

    Example:
        >>> import syncvar as sv
        >>> sv.wait_all([sv.all_reduce(1.0, async_op=True), sv.all_reduce(2.0, async_op=True)])
        [array(1.), array(2.)]
    """
    results: list[Any] = []
    errors: list[Exception] = []
    for work in _checked("wait_all", works):
        try:
            results.append(None if work is None else work.wait())
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are waited for first
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _checked(name: str, works: Any) -> list[Work | None]:
    if isinstance(works, Work):
        raise ConfigError(f"{name} takes a list of started calls, not one: write work.wait()")
    try:
        listed = list(works)
    except TypeError:
        raise ConfigError(
            f"{name} takes a list of what calls with async_op=True return, not "
            f"{reprlib.repr(works)}"
        ) from None
    for index, work in enumerate(listed):
        if work is not None and not isinstance(work, Work):
            raise ConfigError(
                f"{name}: works[{index}] must be what a call with async_op=True returns, not "
                f"{reprlib.repr(work)}"
            )
    return listed
