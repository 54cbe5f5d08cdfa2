"""A coordinator: one worker hands functions to the others, which run them beside the variables on the servers."""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.lazy_import import object_named
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.parameter_server.strategy import ParameterServerStrategy
from syncvar.protocol.exception_codec import pack_exception, unpack_exception
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from syncvar.parameter_server.client.request_client import Ticket

_BOARD = 0  # the server that has the tasks
_FOR_EVER_S = 1e9
_DATASET = "syncvar per-worker dataset"
_REMEDY = (
    "Move the line with sv.ClusterCoordinator below the functions and variables that scheduled "
    "functions use, just above the first create_per_worker_dataset or schedule."
)


class RemoteValue:
    """What a scheduled function will have returned; made by `ClusterCoordinator.schedule`."""

    def __init__(self, wait: Callable[[int, float | None], tuple[bool, Any]], task: int) -> None:
        self._wait, self._task = wait, task
        self._outcome: tuple[bool, Any] | None = None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it.

        Args:
            timeout: Seconds; None means the job's default.

        Raises:
            Exception: What the function raised.
            UsageError: It was taken back, because another function had failed.
            DeadlineExceeded: It was not over in time; ask again later.
        """
        if self._outcome is None:
            self._outcome = self._wait(self._task, timeout)
        failed, value = self._outcome
        if failed:
            raise value
        return value


class PerWorkerDataset:
    """A dataset of which each worker has its own iterator; made by `ClusterCoordinator.create_per_worker_dataset`.

    Passed to `schedule` as an argument, the function gets the iterator of the worker that runs it.
    `iter(dataset)` gives another iterator on each worker, from the start.
    """

    def __init__(self, name: list[str], numbers: Iterator[int]) -> None:
        self._name, self._numbers = name, numbers
        self._number = next(numbers)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._name, self._numbers)

    @property
    def _sent(self) -> dict[str, Any]:
        """What travels of it."""
        return {"is": _DATASET, "number": self._number, "fn": self._name}


class PerWorkerIterator(PerWorkerDataset):
    """An iterator on each worker, an argument of `schedule`; made by `iter(dataset)`."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise UsageError(
            "each worker has an iterator of its own, and the coordinator has none: write "
            "coordinator.schedule(fn, args=(iterator,)) and next(iterator) in fn"
        )


class ClusterCoordinator:
    """Rank 0 hands functions to the other workers: `schedule`, `join`, `fetch`.

    All workers run the same script. On rank 0 constructing returns the coordinator. On the others it runs the functions that they
    are given, until rank 0 has ended, and then ends the process in order: what stands below it is
    rank 0's. So define above it the functions and variables that scheduled functions use. With one
    worker functions run where they are scheduled.

    A function travels by its name, never as code: it is a function at the top level of the script or of a module. What it gets
    and returns are numbers, texts, arrays and structures of these. It reads and writes the strategy's variables. If its worker
    dies, another one runs it again; so what it pushed before may be there twice, unless it is one transaction with a count.

    Args:
        strategy: With staleness None: the workers have no common steps.

    Raises:
        ConfigError: Another strategy, or one with a bound of staleness.
        UsageError: The script defines below this line what its scheduled functions need.

    Example:
        >>> import operator, syncvar as sv
        >>> coordinator = sv.ClusterCoordinator(sv.ParameterServerStrategy(staleness=None))
        >>> value = coordinator.schedule(operator.add, (1, 2))
        >>> coordinator.join()
        >>> value.fetch(), coordinator.done()
        (3, True)
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy) or strategy.staleness is not None:
            raise ConfigError(
                f"ClusterCoordinator needs sv.ParameterServerStrategy(staleness=None), not {strategy!r:.80}: functions go to any "
                f"worker, so workers have no steps that others could wait for"
            )
        self._strategy = strategy
        self._tasks = 0
        self._numbers = itertools.count(1)  # of per-worker iterators
        self._cancelled: set[int] = set()
        self._reported: set[int] = set()
        self._iterators: dict[int, Iterator[Any]] = {}
        self._alone: dict[int, tuple[bool, Any]] | None = (
            {} if strategy.num_replicas_in_sync == 1 else None
        )
        self._place = _checked_order(sys._getframe(1))  # noqa: SLF001
        if strategy.replica_id != 0:
            self._serve()
        if self._alone is None:
            register_exit(self._close)

    def schedule(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> RemoteValue:
        """Let a worker call `fn(*args, **kwargs)`; returns at once.

        Raises:
            ConfigError: `fn` has no importable name, or an argument cannot travel.
            Exception: What an earlier function raised, once; those that had not begun are taken back.
        """
        self._raise_first()
        if not isinstance(args, tuple | list):
            raise ConfigError(
                f"args must be a tuple or list, not {type(args).__name__}: write args=(x,)"
            )
        positional = [_sendable(one) for one in args]
        named = {key: _sendable(one) for key, one in dict(kwargs or {}).items()}
        call = pack_object([_name_of(fn), positional, named])
        self._tasks += 1
        if self._alone is not None:
            self._alone[self._tasks] = self._called(call)
        else:
            asking = RequestBuilder()
            asking.put(_BOARD, self._tasks, np.frombuffer(call, np.uint8))
            self._strategy.servers.push(asking, "schedule")
        return RemoteValue(self._outcome_of, self._tasks)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions are over.

        Raises:
            Exception: What one of them raised, once; those that had not begun are taken back.
            DeadlineExceeded: They were not over in time.
        """
        if self._alone is None:
            asking = RequestBuilder()
            asking.drained(_BOARD)
            self._ask(asking, "join", timeout)
        self._raise_first()

    def done(self) -> bool:
        """Return whether all scheduled functions are over, without waiting for them."""
        return self._alone is not None or bool(self._progress()["drained"])

    def fetch(self, values: Any, timeout: float | None = None) -> Any:
        """Return a structure with each RemoteValue in it replaced by its result."""
        if isinstance(values, RemoteValue):
            return values.fetch(timeout)
        if isinstance(values, dict):
            return {key: self.fetch(one, timeout) for key, one in values.items()}
        if isinstance(values, list | tuple):
            return type(values)([self.fetch(one, timeout) for one in values])
        return values

    def create_per_worker_dataset(self, fn: Callable[[], Any]) -> PerWorkerDataset:
        """Return a dataset whose iterator each worker makes for itself: iter(fn()), when it first needs it.

        Raises:
            ConfigError: `fn` has no importable name.
        """
        return PerWorkerDataset(_name_of(fn), self._numbers)

    def _outcome_of(self, task: int, timeout: float | None) -> tuple[bool, Any]:
        """Wait for a task; returns whether it failed, and its result or error."""
        if self._alone is not None:
            self._reported.add(task)
            return self._alone.pop(task)
        if task not in self._cancelled:
            asking = RequestBuilder()
            at = asking.outcome(_BOARD, task)
            ticket = self._ask(asking, "fetch", timeout)
            told = ticket.results[_BOARD][at[1]]
            if not told["cancelled"]:
                value = unpack_object(ticket.array(*at).tobytes())
                self._reported.add(task)
                asking = RequestBuilder()
                asking.forget(_BOARD, [task])
                self._strategy.servers.push(asking, "fetch")
                return (True, _error_of(*value)) if told["failed"] else (False, value)
            self._cancelled.add(task)
        return True, UsageError(
            "the function was taken back before it began, because another one had failed"
        )

    # -- inside ------------------------------------------------------------------------------------

    def _ask(self, asking: RequestBuilder, what: str, timeout: float | None = None) -> Ticket:
        session = self._strategy.here.session
        return session.wait(
            session.request(asking.parts()),
            what,
            self._strategy.timeout if timeout is None else timeout,
        )

    def _progress(self) -> dict[str, Any]:
        asking = RequestBuilder()
        at = asking.progress(_BOARD)
        return self._ask(asking, "asking for functions").results[_BOARD][at[1]]

    def _raise_first(self) -> None:
        """Raise what the first function has raised of which nobody was told, and take back those that have not begun."""
        failed = (
            [task for task, (bad, _) in self._alone.items() if bad]
            if self._alone is not None
            else self._progress()["failed"]
        )
        task = min((one for one in failed if one not in self._reported), default=None)
        if task is None:
            return
        if self._alone is None:
            asking = RequestBuilder()
            asking.cancel(_BOARD)
            self._strategy.servers.push(asking, "cancel")
        _, error = self._outcome_of(task, None)
        self._reported.update(failed)
        raise error

    def _close(self) -> None:
        with contextlib.suppress(SyncvarError):
            asking = RequestBuilder()
            asking.close(_BOARD)
            self._ask(asking, "ending the workers")

    def _serve(self) -> NoReturn:
        """Run what this worker is given until there is no more, then end the process."""
        outcome: tuple[int, bool, bytes] | None = None
        while True:
            asking = RequestBuilder()
            if outcome is not None:
                task, failed, value = outcome
                asking.finish(_BOARD, task, np.frombuffer(value, np.uint8), failed=failed)
            asking.ask_for_task(_BOARD)
            at = asking.task(_BOARD)
            ticket = self._ask(asking, "waiting for a function", _FOR_EVER_S)
            told = ticket.results[_BOARD][at[1]]
            if told["closed"]:
                raise SystemExit(0)
            failed, value = self._called(ticket.array(*at).tobytes())
            self._strategy.here.settle("a scheduled function", self._strategy.timeout)
            outcome = told["task"], *_packed(value, failed=failed)

    def _called(self, call: bytes) -> tuple[bool, Any]:
        """Make a call; returns whether it failed, and its result or its error."""
        name, positional, named = unpack_object(call)
        try:
            arguments = [self._received(one) for one in positional]
            keywords = {key: self._received(one) for key, one in named.items()}
            function = self._function(name)
            with self._strategy.servers.as_one():
                return False, function(*arguments, **keywords)
        except SyncvarError as error:
            if self._strategy.here.session.client.broken is not None:
                raise
            return True, error
        except Exception as error:  # the function's own: rank 0 is told
            return True, error

    def _received(self, argument: Any) -> Any:
        """Return an argument as the function gets it."""
        if not isinstance(argument, dict) or argument.get("is") != _DATASET:
            return argument
        number = argument["number"]
        if number not in self._iterators:
            self._iterators[number] = iter(self._function(argument["fn"])())
        return self._iterators[number]

    def _function(self, name: list[str]) -> Callable[..., Any]:
        """Return a function by its name.

        Raises:
            MissingFunctionError: This worker does not have it.
        """
        try:
            function: Callable[..., Any] = object_named(*name)
        except (ImportError, AttributeError):
            from syncvar.parameter_server.script_order import line_of

            module, path = name
            place = line_of(module, path.partition(".")[0])
            raise MissingFunctionError(
                f"{path}{f', {place},' if place else ''} does not exist on rank "
                f"{self._strategy.here.rank}, which has run the script down to "
                f"sv.ClusterCoordinator, {self._place}. {_REMEDY}"
            ) from None
        return function


class MissingFunctionError(UsageError):
    """A worker does not have a function that it was to call."""


def _checked_order(frame: FrameType) -> str:
    """Return where the script has arrived: "train.py line 7".

    Raises:
        UsageError: It binds below this line what its scheduled functions need.
    """
    from syncvar.parameter_server.script_order import RunningModule, late_names, running_modules

    modules = running_modules(frame)
    for module in modules:
        if late := late_names(module):
            names = "; ".join(str(one) for one in late)
            raise UsageError(
                f"{PurePath(module.file).name} makes sv.ClusterCoordinator in line {module.line}, "
                f"above what its scheduled functions need: {names}. The other workers run the "
                f"script down to this line, and nothing below it. {_REMEDY}"
            )
    here = modules[0] if modules else RunningModule(frame.f_code.co_filename, frame.f_lineno, "")
    return f"{PurePath(here.file).name} line {here.line}"


def _sendable(argument: Any) -> Any:
    """Return what travels of an argument.

    Raises:
        ConfigError: It is a RemoteValue.
    """
    if isinstance(argument, RemoteValue):
        raise ConfigError("a RemoteValue cannot be an argument of schedule: pass value.fetch()")
    return argument._sent if isinstance(argument, PerWorkerDataset) else argument  # noqa: SLF001


def _name_of(fn: Any) -> list[str]:
    """Return module and qualified name of a function.

    Raises:
        ConfigError: It is not found by them.
    """
    module, name = getattr(fn, "__module__", "") or "", getattr(fn, "__qualname__", "")
    try:
        found = object_named(module, name) if module and name else None
    except (ImportError, AttributeError):
        found = None
    if found is not fn:
        raise ConfigError(
            f"schedule takes a function that the workers find by its name, not {fn!r:.80}: define it with def at the top level of the "
            f"script, and pass what it needs as arguments"
        )
    return [module, name]


def _packed(value: Any, *, failed: bool) -> tuple[bool, bytes]:
    """Return whether a function has failed, and its packed result or error.

    A result that cannot travel is an error.
    """
    if failed:
        if isinstance(value, MissingFunctionError):  # its text says all there is to say
            return True, pack_object([pack_exception(UsageError(str(value))), ""])
        where = "".join(traceback.format_exception(value))
        return True, pack_object([pack_exception(value), where])
    try:
        return False, pack_object(value)
    except ConfigError as error:
        refusal = ConfigError(f"what the function returned cannot travel: {error}")
        return True, pack_object([pack_exception(refusal), ""])


def _error_of(packed: bytes, where: str) -> BaseException:
    """Return the error that a function has raised elsewhere."""
    error = unpack_exception(packed)
    if where:
        error.add_note(f"raised by a worker:\n{where}")
    return error
