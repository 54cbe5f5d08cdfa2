"""Requests: operations that have begun, and waits for one or several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_errors import PARTITIONED, MpiException, UnsupportedByLayer, reduced
from syncvar.compat.mpi4py.mpi_messages import MESSAGES
from syncvar.compat.mpi4py.mpi_operations import Operation, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def wait_first(operations: Sequence[Operation]) -> int:
    """Wait until one of several operations has ended; return its index."""
    for index, operation in enumerate(operations):
        if operation.test():
            return index
    return MESSAGES.wait_first(operations)


class MpiRequest:
    """A request.

    Args:
        request: Request to refer to; None for a null request.
    """

    __qualname__ = "Request"
    __module__ = "syncvar.compat.mpi4py.mpi_namespace"

    _operation: Operation | None = None
    _call: RestartableCall | None = None

    def __new__(cls, request: MpiRequest | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if request is not None:
            if not isinstance(request, MpiRequest):
                raise TypeError(f"{request!r} is no Request")
            self._operation, self._call = request._operation, request._call
        return self

    @classmethod
    def of(cls, operation: Operation) -> MpiRequest:
        """Return the request of an operation."""
        request = cls.__new__(cls)
        request._operation = operation
        return request

    @property
    def active(self) -> Operation | None:
        """The operation that a wait would wait for, if there is one."""
        return self._operation if self._call is None else self._call.operation

    def finish(self, status: Status | None) -> Any:
        """Take the result of an operation that has ended; the request becomes null."""
        operation = self.active
        if operation is None:
            if status is not None:
                status.assign(Status())
            return None
        self._settle()
        if status is not None:
            status.assign(operation.status)
            status._is_cancelled = operation.is_cancelled
        operation.forget()
        if operation.error is not None:
            raise operation.error
        return operation.value

    def _settle(self) -> None:
        """Forget the operation, which has ended."""
        if self._call is None:
            self._operation = None
        else:
            self._call.operation = None

    # -- one request

    def wait(self, status: Status | None = None) -> Any:
        """Wait for the end; return the object of a receive."""
        return self._waited(status)

    def _waited(self, status: Status | None) -> Any:
        if self.active is not None:
            self.active.wait()
        return self.finish(status)

    def Wait(self, status: Status | None = None) -> bool:
        """Wait for the end."""
        self._waited(status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether the operation has ended, and the object of a receive."""
        return self._tested(status)

    def _tested(self, status: Status | None) -> tuple[bool, Any]:
        if self.active is not None and not self.active.test():
            return False, None
        return True, self.finish(status)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the operation has ended."""
        return self._tested(status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the operation has ended; the request stays."""
        operation = self.active
        if operation is None or operation.test():
            if status is not None:
                status.assign(Status() if operation is None else operation.status)
                status._is_cancelled = operation is not None and operation.is_cancelled
            return True
        return False

    get_status = Get_status

    def Cancel(self) -> None:
        """Give up a receive that has found no message; a send always completes."""
        if self.active is not None:
            self.active.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Make this a null request; the operation continues."""
        if not self:
            raise MpiException(const.ERR_REQUEST, "the request is REQUEST_NULL")
        operation = self.active
        self._operation = self._call = None
        if operation is not None:
            operation.forget()

    def free(self) -> None:
        """Make this a null request if it is not."""
        if self:
            self.Free()

    # -- any of several

    @classmethod
    def waitany(
        cls, requests: Sequence[MpiRequest], status: Status | None = None
    ) -> tuple[int, Any]:
        """Wait until one has ended; return its index, or UNDEFINED, and its object."""
        running = _running(requests)
        if not running:
            _empty(status)
            return const.UNDEFINED, None
        index = running[wait_first([_active(requests[one]) for one in running])]
        return index, requests[index].finish(status)

    @classmethod
    def Waitany(cls, requests: Sequence[MpiRequest], status: Status | None = None) -> int:
        """Wait until one has ended; return its index, or UNDEFINED."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def testany(
        cls, requests: Sequence[MpiRequest], status: Status | None = None
    ) -> tuple[int, bool, Any]:
        """Return the index of one that has ended, whether there is one, and its object."""
        running = _running(requests)
        if not running:
            _empty(status)
            return const.UNDEFINED, True, None
        for index in running:
            if _active(requests[index]).test():
                return index, True, requests[index].finish(status)
        return const.UNDEFINED, False, None

    @classmethod
    def Testany(
        cls, requests: Sequence[MpiRequest], status: Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of one that has ended, and whether there is one."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def Get_status_any(
        cls, requests: Sequence[MpiRequest], status: Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of one that has ended, and whether there is one; the requests stay."""
        running = _running(requests)
        if not running:
            _empty(status)
            return const.UNDEFINED, True
        for index in running:
            if requests[index].Get_status(status):
                return index, True
        return const.UNDEFINED, False

    get_status_any = Get_status_any

    # -- all of several

    @classmethod
    def waitall(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> list[Any]:
        """Wait for all; return their objects."""
        for request in requests:
            if request.active is not None:
                request.active.wait()
        return _finish_all(requests, range(len(requests)), statuses)

    @classmethod
    def Waitall(cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None) -> bool:
        """Wait for all."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def testall(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return whether all have ended, and their objects."""
        if not cls.Get_status_all(requests):
            return False, None
        return True, _finish_all(requests, range(len(requests)), statuses)

    @classmethod
    def Testall(cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None) -> bool:
        """Return whether all have ended."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def Get_status_all(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> bool:
        """Return whether all have ended; the requests stay."""
        ended = [request.active is None or request.active.test() for request in requests]
        if all(ended) and statuses is not None:
            for request, status in zip(requests, _sized(statuses, len(ended)), strict=True):
                request.Get_status(status)
        return all(ended)

    get_status_all = Get_status_all

    # -- some of several

    @classmethod
    def waitsome(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Wait until some have ended; return their indices and objects."""
        running = _running(requests)
        if running:
            wait_first([_active(requests[index]) for index in running])
        return cls.testsome(requests, statuses)

    @classmethod
    def Waitsome(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> list[int] | None:
        """Wait until some have ended; return their indices."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return the indices and objects of those that have ended."""
        running = _running(requests)
        if not running:
            return None, None
        ended = [index for index in running if _active(requests[index]).test()]
        return ended, _finish_all(requests, ended, statuses)

    @classmethod
    def Testsome(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> list[int] | None:
        """Return the indices of those that have ended."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def Get_status_some(
        cls, requests: Sequence[MpiRequest], statuses: list[Status] | None = None
    ) -> list[int] | None:
        """Return the indices of those that have ended; the requests stay."""
        running = _running(requests)
        if not running:
            return None
        ended = [index for index in running if _active(requests[index]).test()]
        for index, status in zip(ended, _sized(statuses, len(ended)), strict=True):
            requests[index].Get_status(status)
        return ended

    get_status_some = Get_status_some

    # -- identity

    @property
    def handle(self) -> int:
        """A number of the operation, by which `fromhandle` finds it."""
        target = self._target()
        if target is None:
            return 0
        _handles[id(target)] = target
        return id(target)

    def _target(self) -> Any:
        """Return what makes two requests equal."""
        return self._operation if self._call is None else self._call

    @classmethod
    def fromhandle(cls, handle: int) -> MpiRequest:
        """Return a request by its number."""
        request = cls.__new__(cls)
        target = _handles[handle] if handle else None
        if isinstance(target, RestartableCall):
            request._call = target
        else:
            request._operation = target
        return request

    def toint(self) -> int:
        """Return -1: requests of this layer are no integers."""
        return -1

    py2f = toint

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MpiRequest):
            return NotImplemented
        return self._target() is other._target()

    def __hash__(self) -> int:
        return id(self._target())

    def __bool__(self) -> bool:
        return self._target() is not None

    def __reduce__(self) -> Any:
        if self:
            raise ValueError("cannot pickle a request")
        return reduced(self, "REQUEST_NULL")


_handles: dict[int, Any] = {}


def _active(request: MpiRequest) -> Operation:
    operation = request.active
    assert operation is not None
    return operation


def _running(requests: Sequence[MpiRequest]) -> list[int]:
    return [index for index, request in enumerate(requests) if request.active is not None]


def _empty(status: Status | None) -> None:
    if status is not None:
        status.assign(Status())


def _sized(statuses: Any, count: int) -> list[Status | None]:
    """Return the list of statuses in the length of the requests; a list is filled up in place."""
    if statuses is None:
        return [None] * count
    if not isinstance(statuses, list):  # a program may pass a tuple
        return [*statuses, *[None] * count][:count]
    statuses.extend(Status() for _ in range(count - len(statuses)))
    del statuses[count:]
    return list(statuses)


def _finish_all(
    requests: Sequence[MpiRequest], indices: Sequence[int], statuses: list[Status] | None
) -> list[Any]:
    """Take the results of several requests; raise the first error after all have been finished."""
    values: list[Any] = []
    errors: list[MpiException] = []
    for index, status in zip(indices, _sized(statuses, len(indices)), strict=True):
        try:
            values.append(requests[index].finish(status))
        except MpiException as error:
            if status is not None:
                status.error = error.Get_error_code()
            errors.append(error)
    if errors:
        raise errors[0]
    return values


class RestartableCall:
    """Arguments of a persistent request, and its operation while it runs."""

    __slots__ = ("begin", "operation")

    def __init__(self, begin: Callable[[], Operation]) -> None:
        self.begin = begin
        self.operation: Operation | None = None


class Prequest(MpiRequest):
    """A persistent request: `Start` begins it, a wait ends it, and it can start again.

    Args:
        request: Request to refer to; None for a null request.
    """

    def __new__(cls, request: MpiRequest | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        if request is not None and not isinstance(request, Prequest):
            raise TypeError(f"{request!r} is no Prequest")
        return super().__new__(cls, request)

    @classmethod
    def to(cls, begin: Callable[[], Operation]) -> Prequest:
        """Return the request of a function that begins an operation."""
        request = cls.__new__(cls)
        request._call = RestartableCall(begin)
        return request

    def Start(self) -> None:
        """Begin the operation."""
        if self._call is None:
            raise MpiException(const.ERR_REQUEST, "the request is REQUEST_NULL")
        if self._call.operation is not None:
            raise MpiException(const.ERR_REQUEST, "the request runs already")
        self._call.operation = self._call.begin()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Begin several operations."""
        for request in requests:
            request.Start()

    def Pready(self, partition: int) -> None:
        """Raise: the layer has no partitioned messages."""
        raise UnsupportedByLayer("Pready", PARTITIONED)


class _GeneralOperation(Operation):
    """An operation of the program, which says when it has ended."""

    def __init__(self, functions: Sequence[Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self._query, self._free, self._cancel = functions
        self._args, self._kwargs = tuple(args or ()), dict(kwargs or {})
        self.is_complete = self._is_forgotten = False

    def test(self) -> bool:
        """Return whether the operation has ended, after a little progress."""
        if self.is_complete and self._query is not None:
            self._query(self.status, *self._args, **self._kwargs)
        return self.is_complete

    def wait(self) -> None:
        """Wait for the end."""
        MESSAGES.wait_first([self])

    def cancel(self) -> None:
        """Let the program give up the operation."""
        if self._cancel is not None:
            self._cancel(self.is_complete, *self._args, **self._kwargs)

    def complete(self) -> None:
        """Note that the operation has ended."""
        self.is_complete = True
        if self._is_forgotten:
            self.forget()

    def forget(self) -> None:
        """Call the program's function for that once, and not before the end."""
        self._is_forgotten = True
        free, args, kwargs = self._free, self._args, self._kwargs
        if self.is_complete and free is not None:
            self._free = None
            free(*args, **kwargs)


class Grequest(MpiRequest):
    """A generalized request: the program says when it has ended."""

    def __new__(cls, request: MpiRequest | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        if request is not None and not isinstance(request, Grequest):
            raise TypeError(f"{request!r} is no Grequest")
        return super().__new__(cls, request)

    @classmethod
    def Start(
        cls,
        query_fn: Any = None,
        free_fn: Any = None,
        cancel_fn: Any = None,
        args: Any = None,
        kwargs: Any = None,
    ) -> Grequest:
        """Return a new request."""
        request = cls.__new__(cls)
        request._operation = _GeneralOperation((query_fn, free_fn, cancel_fn), args, kwargs)
        return request

    def Complete(self) -> None:
        """Declare the operation ended."""
        if isinstance(self._operation, _GeneralOperation):
            self._operation.complete()

    def complete(self, obj: Any = None) -> None:
        """Declare the operation ended, with an object as its result."""
        if self._operation is not None:
            self._operation.value = obj
        self.Complete()


REQUEST_NULL = MpiRequest()
