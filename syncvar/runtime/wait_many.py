"""`sv.wait_any` and `sv.wait_all`: wait for several asynchronous calls."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.runtime.flight_recorder.call_record import CallInfo
from syncvar.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncvar.runtime.progress import ProgressEngine
    from syncvar.runtime.request import Request


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
        >>> works = [sv.recv(0, tag=1, async_op=True), sv.recv(0, tag=2, async_op=True)]
        >>> sv.send(5.0, 0, tag=2)
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
    engines = [work._engine for _, work in started]  # noqa: SLF001 - two files of one room
    engine = next((one for one in engines if one is not None), None)
    if engine is None:
        started[0][1].wait()  # raises: only this thread could send the message
    else:
        operations = [work._operation for _, work in started]  # noqa: SLF001
        first = _FirstEnded(engine, operations)
        engine.wait(first)
        first.entry.end()
    return next(index for index, work in started if work.done())


class _FirstEnded:
    """A wait for the first of several operations.

    It has the attributes that the engine's `wait` needs.

    Args:
        engine: Drives the operations.
        operations: At least one.
    """

    what = "wait_any"
    call = -1
    error = None
    result = None

    def __init__(self, engine: ProgressEngine, operations: list[Request]) -> None:
        self._operations = operations
        self.thread = 0
        path = f"{len(operations)} started calls"
        self.entry = engine.recorder.begin(
            CallInfo(self.what, self.call, (), 0, 0, path), self.call
        )

    @property
    def is_over(self) -> bool:
        """Whether one of the operations is over."""
        return any(operation.is_over for operation in self._operations)

    def look(self) -> bool:
        """Spin for a short while; return whether an operation in shared memory can continue."""
        return any(operation.needs_looks and operation.look() for operation in self._operations)


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
