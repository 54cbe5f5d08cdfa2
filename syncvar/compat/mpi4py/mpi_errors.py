"""Errors of the mpi4py layer: `Exception`, error classes, error handlers, what is not supported."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Self

from syncvar.compat.mpi4py import mpi_constants as const

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXTS = {const.SUCCESS: "no error"}
_TEXTS.update((const.ERROR_CLASSES[name], text) for name, text in const.ERROR_TEXTS.items())
_NAMES = {number: name for name, number in const.ERROR_CLASSES.items()}


class _UserErrors:
    """Error classes, codes and texts that the program has added."""

    def __init__(self) -> None:
        self.numbers = itertools.count(const.ERR_LASTCODE + 1)
        self.classes: set[int] = set()
        self.class_of_code: dict[int, int] = {}
        self.texts: dict[int, str] = {}


_user = _UserErrors()


class MpiException(RuntimeError):
    """An error of an MPI call.

    Args:
        ierr: Error code; a class of errors is one too.
        detail: Sentence that explains this error.
    """

    __qualname__ = "Exception"
    __module__ = "syncvar.compat.mpi4py.mpi_namespace"

    def __init__(self, ierr: int = const.SUCCESS, detail: str = "") -> None:
        super().__init__(ierr)
        self._code = int(ierr)
        self._detail = detail

    def Get_error_code(self) -> int:
        """Return the error code."""
        return self._code

    def Get_error_class(self) -> int:
        """Return the class of the error code, such as `MPI.ERR_RANK`."""
        return Get_error_class(self._code)

    def Get_error_string(self) -> str:
        """Return the text of the error code."""
        return Get_error_string(self._code)

    @property
    def error_code(self) -> int:
        """The error code."""
        return self._code

    @property
    def error_class(self) -> int:
        """The class of the error code."""
        return self.Get_error_class()

    @property
    def error_string(self) -> str:
        """The text of the error code."""
        return self.Get_error_string()

    def __str__(self) -> str:
        name = _NAMES.get(self._code)
        text = self.Get_error_string()
        shown = text if name is None else f"MPI_{name}: {text}"
        return f"{shown}: {self._detail}" if self._detail else shown

    def __int__(self) -> int:
        return self._code

    def __bool__(self) -> bool:
        return self._code != const.SUCCESS

    def __hash__(self) -> int:
        return hash(self._code)

    def __eq__(self, other: object) -> bool:
        return self._code == (other._code if isinstance(other, MpiException) else other)

    def __lt__(self, other: Any) -> bool:
        return self._code < int(other)

    def __le__(self, other: Any) -> bool:
        return self._code <= int(other)

    def __gt__(self, other: Any) -> bool:
        return self._code > int(other)

    def __ge__(self, other: Any) -> bool:
        return self._code >= int(other)


class UnsupportedByLayer(MpiException, NotImplementedError):
    """The program uses a part of MPI that this layer does not have.

    Args:
        name: The call.
        instead: The call of syncvar, or of Python, that does the same.
    """

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(
            const.ERROR_CLASSES["ERR_UNSUPPORTED_OPERATION"],
            f"{name} is not part of syncvar's mpi4py layer. Instead: {instead}",
        )


FILES = (
    "open a file on each rank and write at its own offset (numpy.memmap, os.pwrite), or save "
    "variables by sv.Checkpoint"
)
SPAWN = "start all ranks with syncvar-launch --workers N, or use sv.run(fn, workers=N)"
INTERCOMM = "make one communicator of both sides, by COMM_WORLD.Split or sv.new_group"
REMOTE = (
    "MPI.Win.Allocate_shared on one host (sv.shared_array), messages, or a parameter server "
    "(sv.ParameterServerStrategy)"
)
PARTITIONED = "send each part as a message of its own"
FAILURES = "syncvar ends all ranks if one fails; --max-restarts starts them again"


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    return _user.class_of_code.get(errorcode, errorcode)


def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    if errorcode in _user.texts:
        return _user.texts[errorcode]
    if errorcode in _user.classes or errorcode in _user.class_of_code:
        return ""
    try:
        return _TEXTS[errorcode]
    except KeyError:
        raise MpiException(const.ERR_ARG, f"{errorcode} is no error code") from None


def Add_error_class() -> int:
    """Return a new class of errors."""
    number = next(_user.numbers)
    _user.classes.add(number)
    return number


def Remove_error_class(errorclass: int) -> None:
    """Remove a class that `Add_error_class` has returned."""
    _user.classes.discard(errorclass)
    _user.texts.pop(errorclass, None)


def Add_error_code(errorclass: int) -> int:
    """Return a new error code of a class."""
    number = next(_user.numbers)
    _user.class_of_code[number] = errorclass
    return number


def Remove_error_code(errorcode: int) -> None:
    """Remove a code that `Add_error_code` has returned."""
    _user.class_of_code.pop(errorcode, None)
    _user.texts.pop(errorcode, None)


def Add_error_string(errorcode: int, string: str) -> None:
    """Set the text of a class or code of the program."""
    if errorcode not in _user.classes and errorcode not in _user.class_of_code:
        raise MpiException(const.ERR_ARG, f"{errorcode} is no error code of the program")
    _user.texts[errorcode] = string


def Remove_error_string(errorcode: int) -> None:
    """Remove the text of a class or code of the program."""
    _user.texts.pop(errorcode, None)


class Errhandler:
    """What happens with the error of a call: raise an `Exception`, end the job, or call a function.

    mpi4py raises for every handler that does not end the process, and so does this layer.
    """

    _name = "ERRHANDLER_NULL"
    _function: Callable[[Any, int], None] | None = None

    def __new__(cls, errhandler: Errhandler | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if errhandler is not None:
            self._name, self._function = errhandler._name, errhandler._function
        return self

    @classmethod
    def of_name(cls, name: str, function: Callable[[Any, int], None] | None = None) -> Errhandler:
        """Return a handler; `function` is called with the object and the error code."""
        handler = cls()
        handler._name, handler._function = name, function
        return handler

    def Free(self) -> None:
        """Make this a null handler."""
        self._name, self._function = "ERRHANDLER_NULL", None

    free = Free

    @property
    def handle(self) -> int:
        """A number of the handler."""
        return hash((self._name, self._function))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Errhandler):
            return NotImplemented
        return (self._name, self._function) == (other._name, other._function)

    def __hash__(self) -> int:
        return hash((self._name, self._function))

    def __bool__(self) -> bool:
        return self._name != "ERRHANDLER_NULL"

    def __reduce__(self) -> Any:
        if self._function is not None:
            raise ValueError("cannot pickle a handler with a function")
        return constant, (self._name,)


ERRHANDLER_NULL = Errhandler()
ERRORS_RETURN = Errhandler.of_name("ERRORS_RETURN")
ERRORS_ABORT = Errhandler.of_name("ERRORS_ABORT")
ERRORS_ARE_FATAL = Errhandler.of_name("ERRORS_ARE_FATAL")


def constant(name: str) -> Any:
    """Return a constant of the namespace `MPI`; pickled constants name it."""
    from syncvar.compat.mpi4py import MPI

    return getattr(MPI, name)


def reduced(handle: Any, name: str) -> Any:
    """Return how pickle makes a handle again: the constant itself, or another reference to it."""
    known = constant(name)
    return (constant, (name,)) if handle is known else (type(handle), (known,))


class HandlerMixin:
    """Error handlers of communicators and windows."""

    _errhandler: Errhandler = ERRORS_RETURN

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        """Return a handler that calls a function with the object and the error code."""
        return Errhandler.of_name("user", errhandler_fn)

    def Get_errhandler(self) -> Errhandler:
        """Return the handler."""
        return Errhandler(self._errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the handler."""
        if not errhandler:
            raise MpiException(const.ERR_ERRHANDLER, "the handler is ERRHANDLER_NULL")
        self._errhandler = Errhandler(errhandler)

    def Call_errhandler(self, errorcode: int) -> None:
        """Do with an error what the handler says."""
        function = self._errhandler._function
        if function is not None:
            function(self, errorcode)
        elif self._errhandler in (ERRORS_ABORT, ERRORS_ARE_FATAL):
            raise SystemExit(f"MPI error {errorcode}: {Get_error_string(errorcode)}")
