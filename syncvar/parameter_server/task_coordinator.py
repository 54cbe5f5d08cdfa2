"""`ClusterCoordinator`: rank 0 schedules functions, and the other workers run them.

Workers run the script down to `ClusterCoordinator(...)`, and no line below it. `late_names` finds
the names that scheduled functions need and that the script defines too late.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import linecache
import symtable
import sys
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.lazy_import import object_named
from syncvar.parameter_server.request_client import RequestBuilder
from syncvar.parameter_server.strategy import ParameterServerStrategy
from syncvar.protocol.exception_codec import pack_exception, unpack_exception
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from syncvar.parameter_server.request_client import Ticket

_QUEUE = 0  # the server that has the task queue
_FOREVER_S = 1e9
_DATASET = "syncvar per-worker dataset"
_REMEDY = (
    "Move the line with sv.ClusterCoordinator below the functions and variables that scheduled "
    "functions use, just above the first create_per_worker_dataset or schedule."
)
_TAKING_FUNCTIONS = ("schedule", "create_per_worker_dataset")


class RemoteValue:
    """The future result of a scheduled function; `ClusterCoordinator.schedule` returns it.

    Example:
        >>> import operator, syncvar as sv
        >>> coordinator = sv.ClusterCoordinator(sv.ParameterServerStrategy(staleness=None))
        >>> value = coordinator.schedule(operator.mul, (6, 7))
        >>> value.fetch()
        42
    """

    def __init__(self, wait: Callable[[int, float | None], tuple[bool, Any]], task: int) -> None:
        self._wait, self._task = wait, task
        self._outcome: tuple[bool, Any] | None = None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it.

        Args:
            timeout: Seconds; None means the job's default.

        Returns:
            The result of the function.

        Raises:
            Exception: The function raised it.
            UsageError: The coordinator cancelled the task, because another function had failed.
            DeadlineExceeded: The function was not over in time; call again later.
        """
        if self._outcome is None:
            self._outcome = self._wait(self._task, timeout)
        failed, value = self._outcome
        if failed:
            raise value
        return value


class PerWorkerDataset:
    """A dataset with one iterator on each worker; see `create_per_worker_dataset`.

    If you pass it to `schedule`, the function gets the iterator of the worker that runs it.
    `iter(dataset)` gives another iterator on each worker, from the start.
    """

    def __init__(self, name: list[str], numbers: Iterator[int]) -> None:
        self._name, self._numbers = name, numbers
        self._number = next(numbers)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._name, self._numbers)

    @property
    def reference(self) -> dict[str, Any]:
        """The argument that travels in place of the dataset."""
        return {"is": _DATASET, "number": self._number, "fn": self._name}


class PerWorkerIterator(PerWorkerDataset):
    """An iterator on each worker, for an argument of `schedule`; see `PerWorkerDataset`."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise UsageError(
            "each worker has an iterator of its own, and the coordinator has none: write "
            "coordinator.schedule(fn, args=(iterator,)) and next(iterator) in fn"
        )


class ClusterCoordinator:
    """Schedules functions of rank 0 on the other workers: `schedule`, `join`, `fetch`.

    All workers run the same script. On rank 0 the constructor returns the coordinator. On the other
    workers it runs scheduled functions until rank 0 has ended, and then ends the process. Only rank
    0 runs the lines below it. So define the functions and variables that scheduled functions use
    above it. With one worker, `schedule` runs the function at once.

    A function travels by its name, never as code, and must stand at the top level of the script or
    of a module. Its arguments and results are numbers, texts, arrays and pytrees of these. It reads
    and writes the strategy's variables. If its worker dies, another worker runs it again. Its
    earlier pushes may then count twice, unless they are one transaction with a counter.

    Args:
        strategy: ParameterServerStrategy with staleness None: the workers have no common steps.

    Raises:
        ConfigError: `strategy` is another strategy, or has a bound of staleness.
        UsageError: The script defines names below this line that its scheduled functions need.

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
                f"ClusterCoordinator needs sv.ParameterServerStrategy(staleness=None), not "
                f"{strategy!r:.80}: functions go to any worker, so workers have no steps that "
                f"others could wait for"
            )
        self._strategy = strategy
        self._tasks = 0
        self._numbers = itertools.count(1)  # of per-worker iterators
        self._cancelled: set[int] = set()
        self._reported: set[int] = set()
        self._iterators: dict[int, Iterator[Any]] = {}
        # Task -> (failed, result or error) with one worker, which runs functions itself.
        self._local: dict[int, tuple[bool, Any]] | None = None
        if strategy.num_replicas_in_sync == 1:
            self._local = {}
        self._place = _checked_order(inspect.currentframe())
        if strategy.replica_id != 0:
            self._serve()
        if self._local is None:
            register_exit(self._close)

    def schedule(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> RemoteValue:
        """Schedule `fn(*args, **kwargs)` on a worker; returns at once.

        Args:
            fn: Function at the top level of the script or of a module.
            args: Tuple or list of numbers, texts, arrays, pytrees or per-worker datasets.
            kwargs: Dict of such arguments, or None.

        Returns:
            The future result.

        Raises:
            ConfigError: `fn` has no importable name, or an argument cannot travel.
            Exception: An earlier function raised it. Tasks that had not begun are cancelled.
        """
        self._raise_first()
        if not isinstance(args, tuple | list):
            found = type(args).__name__
            raise ConfigError(f"args must be a tuple or list, not {found}: write args=(x,)")
        positional = [_sendable(one) for one in args]
        named = {key: _sendable(one) for key, one in dict(kwargs or {}).items()}
        call = pack_object([_name_of(fn), positional, named])
        self._tasks += 1
        if self._local is not None:
            self._local[self._tasks] = self._run(call)
        else:
            request = RequestBuilder()
            request.put(_QUEUE, self._tasks, np.frombuffer(call, np.uint8))
            self._strategy.servers.push(request, "schedule")
        return RemoteValue(self._outcome_of, self._tasks)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions are over.

        Args:
            timeout: Seconds; None means the job's default.

        Raises:
            Exception: A function raised it. Tasks that had not begun are cancelled.
            DeadlineExceeded: The functions were not over in time.
        """
        if self._local is None:
            self._ask("wait_all", "join", timeout)
        self._raise_first()

    def done(self) -> bool:
        """Return whether all scheduled functions are over, without waiting for them."""
        return self._local is not None or bool(self._progress()["is_drained"])

    def fetch(self, values: Any, timeout: float | None = None) -> Any:
        """Return a dict, list or tuple with results in place of each RemoteValue.

        Args:
            values: RemoteValue, or a nesting of dicts, lists and tuples with some.
            timeout: Seconds for each; None means the job's default.

        Returns:
            The same nesting with results.
        """
        if isinstance(values, RemoteValue):
            return values.fetch(timeout)
        if isinstance(values, dict):
            return {key: self.fetch(one, timeout) for key, one in values.items()}
        if isinstance(values, list | tuple):
            return type(values)([self.fetch(one, timeout) for one in values])
        return values

    def create_per_worker_dataset(self, fn: Callable[[], Any]) -> PerWorkerDataset:
        """Return a dataset with an iterator on each worker: `iter(fn())`, at its first use.

        Args:
            fn: Function at the top level of the script or of a module; returns an iterable.

        Returns:
            The dataset, for arguments of `schedule`.

        Raises:
            ConfigError: `fn` has no importable name.
        """
        return PerWorkerDataset(_name_of(fn), self._numbers)

    def _outcome_of(self, task: int, timeout: float | None) -> tuple[bool, Any]:
        """Wait for a task; return whether it failed, and its result or error."""
        if self._local is not None:
            self._reported.add(task)
            return self._local.pop(task)
        if task not in self._cancelled:
            ticket = self._ask("outcome", "fetch", timeout, task=task)
            outcome = ticket.results[_QUEUE][0]
            if not outcome["is_cancelled"]:
                value = unpack_object(ticket.array(_QUEUE, 0).tobytes())
                self._reported.add(task)
                request = RequestBuilder()
                request.add(_QUEUE, "forget", tasks=[task])
                self._strategy.servers.push(request, "fetch")
                return (True, _error_of(*value)) if outcome["has_failed"] else (False, value)
            self._cancelled.add(task)
        return True, UsageError(
            "the function was cancelled before it began, because another one had failed"
        )

    def _ask(
        self, operation: str, call: str, timeout: float | None = None, **fields: Any
    ) -> Ticket:
        request = RequestBuilder()
        request.add(_QUEUE, operation, **fields)
        return self._send(request, call, timeout)

    def _send(self, request: RequestBuilder, call: str, timeout: float | None) -> Ticket:
        session = self._strategy.here.session
        timeout = self._strategy.timeout if timeout is None else timeout
        return session.wait(session.request(request.parts()), call, timeout)

    def _progress(self) -> dict[str, Any]:
        return self._ask("progress", "asking for functions").results[_QUEUE][0]

    def _raise_first(self) -> None:
        """Raise the first error that no call has raised; cancel the tasks that have not begun."""
        if self._local is not None:
            failures = [task for task, (failed, _) in self._local.items() if failed]
        else:
            failures = self._progress()["failed_tasks"]
        task = min((one for one in failures if one not in self._reported), default=None)
        if task is None:
            return
        if self._local is None:
            request = RequestBuilder()
            request.add(_QUEUE, "cancel")
            self._strategy.servers.push(request, "cancel")
        _, error = self._outcome_of(task, None)
        self._reported.update(failures)
        raise error

    def _close(self) -> None:
        with contextlib.suppress(SyncvarError):
            self._ask("close", "ending the workers")

    def _serve(self) -> NoReturn:
        outcome: tuple[int, bool, bytes] | None = None
        while True:
            request = RequestBuilder()
            if outcome is not None:
                task, failed, value = outcome
                request.finish(_QUEUE, task, np.frombuffer(value, np.uint8), failed=failed)
            request.add(_QUEUE, "request_task")
            ref = request.add(_QUEUE, "task")
            ticket = self._send(request, "waiting for a function", _FOREVER_S)
            found = ticket.results[_QUEUE][ref[1]]
            if found["is_closed"]:
                raise SystemExit(0)
            failed, value = self._run(ticket.array(*ref).tobytes())
            self._strategy.here.settle("a scheduled function", self._strategy.timeout)
            outcome = found["task"], *_packed(value, failed=failed)

    def _run(self, call: bytes) -> tuple[bool, Any]:
        """Run a packed call; return whether it failed, and its result or error."""
        name, positional, named = unpack_object(call)
        try:
            arguments = [self._received(one) for one in positional]
            keywords = {key: self._received(one) for key, one in named.items()}
            function = self._function(name)
            with self._strategy.servers.as_only_worker():
                return False, function(*arguments, **keywords)
        except SyncvarError as error:
            if self._strategy.here.session.client.broken is not None:
                raise
            return True, error
        except Exception as error:  # raised by the function; rank 0 raises it again
            return True, error

    def _received(self, argument: Any) -> Any:
        if not isinstance(argument, dict) or argument.get("is") != _DATASET:
            return argument
        number = argument["number"]
        if number not in self._iterators:
            self._iterators[number] = iter(self._function(argument["fn"])())
        return self._iterators[number]

    def _function(self, name: list[str]) -> Callable[..., Any]:
        """Return a function by its name; raise MissingFunctionError if this worker lacks it."""
        try:
            function: Callable[..., Any] = object_named(*name)
        except (ImportError, AttributeError):
            module, path = name
            line = line_of(module, path.partition(".")[0])
            raise MissingFunctionError(
                f"{path}{f', {line},' if line else ''} does not exist on rank "
                f"{self._strategy.here.rank}, which has run the script down to "
                f"sv.ClusterCoordinator, {self._place}. {_REMEDY}"
            ) from None
        return function


class MissingFunctionError(UsageError):
    """A worker does not have a scheduled function."""


def _checked_order(constructor: FrameType | None) -> str:
    """Return the running line, "train.py line 7"; raise UsageError for names bound below it."""
    frame = constructor.f_back if constructor is not None else None
    assert frame is not None, "CPython has frames, and a constructor has a caller"
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
    if isinstance(argument, RemoteValue):
        raise ConfigError("a RemoteValue cannot be an argument of schedule: pass value.fetch()")
    return argument.reference if isinstance(argument, PerWorkerDataset) else argument


def _name_of(fn: Any) -> list[str]:
    """Return module and qualified name of a function; raise ConfigError if it has none."""
    module, name = getattr(fn, "__module__", "") or "", getattr(fn, "__qualname__", "")
    try:
        found = object_named(module, name) if module and name else None
    except (ImportError, AttributeError):
        found = None
    if found is not fn:
        raise ConfigError(
            f"schedule takes a function that the workers find by its name, not {fn!r:.80}: "
            f"define it with def at the top level of the "
            f"script, and pass what it needs as arguments"
        )
    return [module, name]


def _packed(value: Any, *, failed: bool) -> tuple[bool, bytes]:
    """Return whether a function has failed, and its packed result or error.

    A result that cannot travel is an error.
    """
    if failed:
        if isinstance(value, MissingFunctionError):  # the traceback would add nothing
            return True, pack_object([pack_exception(UsageError(str(value))), ""])
        where = "".join(traceback.format_exception(value))
        return True, pack_object([pack_exception(value), where])
    try:
        return False, pack_object(value)
    except ConfigError as error:
        refusal = ConfigError(f"what the function returned cannot travel: {error}")
        return True, pack_object([pack_exception(refusal), ""])


def _error_of(packed: bytes, where: str) -> BaseException:
    error = unpack_exception(packed)
    if where:
        error.add_note(f"raised by a worker:\n{where}")
    return error


# -- names that the script defines too late -------------------------------------------------------


class RunningModule(NamedTuple):
    """A module whose top level is running: its file, the present line, and the source or ""."""

    file: str
    line: int
    source: str


class LateName(NamedTuple):
    """A name that a scheduled function needs, and that its module binds below the present line."""

    name: str  # the name
    line: int  # first line that binds it
    user: str  # scheduled function that needs it, which may be the name itself

    def __str__(self) -> str:
        used = "" if self.name == self.user else f" (which {self.user} uses)"
        return f"{self.name}{used}, line {self.line}"


def running_modules(frame: FrameType | None) -> list[RunningModule]:
    """Return the modules whose top level calls a frame, innermost first."""
    found = []
    while frame is not None:
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        is_top_level = frame.f_code.co_name == "<module>"
        if is_top_level and getattr(module, "__dict__", None) is frame.f_globals:
            file = frame.f_code.co_filename
            source = "".join(linecache.getlines(file, frame.f_globals))
            found.append(RunningModule(file, frame.f_lineno, source))
        frame = frame.f_back
    return found


def line_of(module: str, name: str) -> str:
    """Return the line where a module's top level binds a name, "train.py line 7", or ""."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None or not file:
        return ""
    bound = _bindings(_parsed("".join(linecache.getlines(file, vars(loaded)))))
    return f"{PurePath(file).name} line {bound[name][0]}" if name in bound else ""


def late_names(module: RunningModule) -> list[LateName]:
    r"""Return the names that scheduled functions need and that a module binds only below its line.

    It leaves out names that the module binds above too, names that a function binds by `global`,
    and variables that hold a scheduled function.
    """
    tree = _parsed(module.source)
    late = {name: lines[0] for name, lines in _bindings(tree).items() if lines[0] > module.line}
    if not late:
        return []
    functions, set_by_functions = _globals_of_functions(module)
    found: dict[str, LateName] = {}
    for user in _scheduled(tree):
        waiting, seen = [user], set()
        while waiting:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            is_needed = name != user or name in functions  # functions travel by their own names
            if name in late and name not in set_by_functions and is_needed:
                found.setdefault(name, LateName(name, late[name], user))
            waiting += functions.get(name, ())
    return list(found.values())


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # the file has changed since the program read it
        return ast.Module([], [])


def _bindings(tree: ast.Module) -> dict[str, list[int]]:
    """Return each name that the top level of a module binds, with its lines in order."""
    bound: dict[str, list[int]] = {}
    for node in _at_top_level(tree):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(one.asname or one.name).partition(".")[0] for one in node.names]
        for name in names:
            bound.setdefault(name, []).append(node.lineno)  # type: ignore[attr-defined]
    return {name: sorted(lines) for name, lines in bound.items()}


def _at_top_level(node: ast.AST) -> Iterator[ast.AST]:
    inside = (
        *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
        *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    )
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, inside):
            yield from _at_top_level(child)


def _scheduled(tree: ast.Module) -> list[str]:
    """Return the functions that a module passes to `schedule` and `create_per_worker_dataset`."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in _TAKING_FUNCTIONS:
            passed = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "fn")]
            found.update({one.id: None for one in passed if isinstance(one, ast.Name)})
    return list(found)


def _globals_of_functions(module: RunningModule) -> tuple[dict[str, list[str]], set[str]]:
    """Return the globals that each function and class uses, and those that any of them sets."""
    used: dict[str, list[str]] = {}
    bound: set[str] = set()

    def look(table: symtable.SymbolTable, names: list[str]) -> None:
        for symbol in table.get_symbols():
            if symbol.is_global():
                names.append(symbol.get_name())
                if symbol.is_assigned():
                    bound.add(symbol.get_name())
        for child in table.get_children():
            look(child, names)

    for child in symtable.symtable(module.source, module.file, "exec").get_children():
        look(child, used.setdefault(child.get_name(), []))
    return used, bound
