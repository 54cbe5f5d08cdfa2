"""Reduction ops: those of MPI, and those that a program makes of a function."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_buffers import buffer, simple_region
from syncvar.compat.mpi4py.mpi_datatypes import Datatype
from syncvar.compat.mpi4py.mpi_errors import MpiException, reduced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from syncvar.compat.mpi4py.mpi_buffers import Region

    Bytes = NDArray[np.uint8]

_NUMBERS = frozenset("bhilqBHILQefd")
_WITH_COMPLEX = _NUMBERS | frozenset("FD")
_INTEGERS = frozenset("bhilqBHILQ")


class Op:
    """A reduction op.

    Args:
        op: Op to refer to; None for a null op.
    """

    _name = "OP_NULL"
    _function: Callable[[Any, Any], Any] | None = None  # of two Python objects
    _ufunc: Callable[[Any, Any], Any] | None = None  # of two arrays
    _user: Callable[..., Any] | None = None
    _is_commutative = True
    core_name = ""  # op of sv.all_reduce that does the same
    core_dtypes: frozenset[str] = frozenset()  # characters of the dtypes for which it does

    def __new__(cls, op: Op | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if op is not None:
            if not isinstance(op, Op):
                raise TypeError(f"{op!r} is no Op")
            self.__dict__.update(op.__dict__)
        return self

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Op:
        """Return an op of a function of two buffers and a datatype.

        The function combines element i of both: `inout[i] = in[i] op inout[i]`.
        """
        op = cls()
        op._name, op._user, op._is_commutative = "user", function, bool(commute)
        return op

    def Free(self) -> None:
        """Make this a null op."""
        if self.is_predefined and self._name != "OP_NULL":
            raise MpiException(const.ERR_OP, "a predefined op cannot be freed")
        self.__dict__.clear()

    def free(self) -> None:
        """Make this a null op, unless it is predefined."""
        if not self.is_predefined:
            self.__dict__.clear()

    def Is_commutative(self) -> bool:
        """Return whether the operands may change places."""
        return self._is_commutative

    is_commutative = property(Is_commutative)

    @property
    def is_predefined(self) -> bool:
        """Whether the op is one of MPI's, or null."""
        return self._user is None

    def __call__(self, x: Any, y: Any) -> Any:
        """Combine two Python objects."""
        if self._user is not None:
            return self._user(x, y, None)
        if self._function is None:
            raise ValueError("the op is OP_NULL")
        return self._function(x, y)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two buffers of this rank into the second one."""
        one, other = simple_region(inbuf), simple_region(inoutbuf)
        if one.count != other.count or one.layout is not other.layout:
            raise ValueError("message: both buffers need the same count and datatype")
        other.fill(self.combined(one, one.packed(), other.packed().copy()))

    def combined(self, region: Region, left: Bytes, right: Bytes) -> Bytes:
        """Return left op right for packed elements; may write to `right`.

        `region` says of which datatype the elements are.
        """
        if self._user is not None:
            return self._by_user(region, left, right)
        if self._ufunc is None:
            raise MpiException(const.ERR_OP, "the op is OP_NULL")
        with np.errstate(all="ignore"):
            try:
                result = self._ufunc(region.values(left), region.values(right))
            except TypeError as error:
                raise MpiException(const.ERR_OP, f"{self._name}: {error}") from None
        dtype = region.layout.dtype
        if dtype is None:
            raise MpiException(const.ERR_OP, f"{self._name} does not take this datatype")
        values: NDArray[Any] = np.ascontiguousarray(result, dtype)
        return values.view(np.uint8)

    def _by_user(self, region: Region, left: Bytes, right: Bytes) -> Bytes:
        datatype = Datatype()
        datatype._layout = layout = region.layout
        if layout.is_dense:
            inout = right if right.flags.writeable else right.copy()
            self._user(buffer(left), buffer(inout), datatype)  # type: ignore[misc]
            return inout
        sides = []
        low, high = layout.span(region.count)
        for packed in (left, right):
            side = np.zeros(max(high, 0) - min(low, 0), np.uint8)
            layout.unpack(packed, side, -min(low, 0))
            sides.append(side)
        self._user(buffer(sides[0]), buffer(sides[1]), datatype)  # type: ignore[misc]
        return layout.pack(sides[1], -min(low, 0), region.count)

    def folded(self, region: Region, parts: Iterable[Bytes]) -> Bytes | None:
        """Combine the packed elements of several ranks in their order; None without ranks."""
        result: Bytes | None = None
        for part in parts:
            result = part if result is None else self.combined(region, result, part.copy())
        return result

    def folded_objects(self, values: Iterable[Any]) -> Any:
        """Combine the Python objects of several ranks in their order."""
        return fold_objects(self, values)

    @property
    def handle(self) -> int:
        """A number of the op."""
        return hash((self._name, self._user))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Op):
            return NotImplemented
        return (self._name, self._user) == (other._name, other._user)

    def __hash__(self) -> int:
        return hash((self._name, self._user))

    def __bool__(self) -> bool:
        return self._name != "OP_NULL"

    def __reduce__(self) -> Any:
        if self._user is not None:
            raise ValueError("cannot pickle an op of the program")
        return reduced(self, self._name)

    def __repr__(self) -> str:
        return f"<Op {self._name}>"


def fold_objects(function: Callable[[Any, Any], Any], values: Iterable[Any]) -> Any:
    """Combine Python objects from left to right."""
    iterator = iter(values)
    result = next(iterator)
    for value in iterator:
        result = function(result, value)
    return result


def _logical_and(x: Any, y: Any) -> bool:
    return bool(x) & bool(y)


def _logical_or(x: Any, y: Any) -> bool:
    return bool(x) | bool(y)


def _logical_xor(x: Any, y: Any) -> bool:
    return bool(x) ^ bool(y)


def _greater(x: Any, y: Any) -> Any:
    return max(x, y)


def _less(x: Any, y: Any) -> Any:
    return min(x, y)


def _greater_at(x: Any, y: Any) -> Any:
    (value, place), (other, other_place) = x, y
    if value == other:
        return value, min(place, other_place)
    return (value, place) if value > other else (other, other_place)


def _less_at(x: Any, y: Any) -> Any:
    (value, place), (other, other_place) = x, y
    if value == other:
        return value, min(place, other_place)
    return (value, place) if value < other else (other, other_place)


def _second(_: Any, y: Any) -> Any:
    return y


def _first(x: Any, _: Any) -> Any:
    return x


def _locate(first: NDArray[Any], second: NDArray[Any], *, is_max: bool) -> NDArray[Any]:
    """Combine arrays of (value, index) pairs; of equal values the lowest index counts."""
    if not first.dtype.names:
        raise MpiException(const.ERR_OP, "MAXLOC and MINLOC take a pair, such as DOUBLE_INT")
    value, index = first.dtype.names
    better = first[value] > second[value] if is_max else first[value] < second[value]
    same = first[value] == second[value]
    result = np.where(better, first, second)
    result[index] = np.where(same, np.minimum(first[index], second[index]), result[index])
    return result


def _maximum_at(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    return _locate(first, second, is_max=True)


def _minimum_at(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    return _locate(first, second, is_max=False)


def _op(
    name: str,
    function: Callable[[Any, Any], Any],
    ufunc: Callable[[Any, Any], Any],
    core_name: str = "",
    core_dtypes: frozenset[str] = frozenset(),
) -> Op:
    op = Op()
    op._name, op._function, op._ufunc = name, function, ufunc
    op.core_name, op.core_dtypes = core_name, core_dtypes
    op._is_commutative = name not in ("REPLACE", "NO_OP")
    return op


_BOOL = frozenset("?")
OPS = {
    op._name: op
    for op in (
        _op("MAX", _greater, np.maximum, "max", _NUMBERS),
        _op("MIN", _less, np.minimum, "min", _NUMBERS),
        _op("SUM", operator.add, np.add, "sum", _WITH_COMPLEX),
        _op("PROD", operator.mul, np.multiply, "prod", _WITH_COMPLEX),
        _op("LAND", _logical_and, np.logical_and, "and", _BOOL),
        _op("BAND", operator.and_, np.bitwise_and, "and", _INTEGERS),
        _op("LOR", _logical_or, np.logical_or, "or", _BOOL),
        _op("BOR", operator.or_, np.bitwise_or, "or", _INTEGERS),
        _op("LXOR", _logical_xor, np.logical_xor, "xor", _BOOL),
        _op("BXOR", operator.xor, np.bitwise_xor, "xor", _INTEGERS),
        _op("MAXLOC", _greater_at, _maximum_at),
        _op("MINLOC", _less_at, _minimum_at),
        _op("REPLACE", _second, _second),
        _op("NO_OP", _first, _first),
    )
}
OP_NULL = Op()
SUM = OPS["SUM"]
