"""Values that each replica has one of, as one process holds them: its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from syncvar.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class DistributedValues:
    """Base of values that every replica has one of.

    Args:
        value: This process's part.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def values(self) -> tuple[Any, ...]:
        """This process's part, as a tuple of one."""
        return (self._value,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._value!r})"


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        raise UsageError(
            f"{what} of a PerReplica has no single meaning, since every replica holds another "
            "value. Pass it to strategy.run(fn, args=(x,)), combine it with "
            "strategy.reduce('SUM', x, axis=None), or take this process's part with "
            "strategy.experimental_local_results(x)"
        )

    return refuse


class PerReplica(DistributedValues):
    """This process's part of a value that may differ between replicas.

    Pass it to `run`, `reduce`, `gather` or `experimental_local_results`; using it as a number is
    refused.

    Example:
        >>> import syncvar as sv
        >>> x = sv.PerReplica(3.0)
        >>> sv.get_strategy().experimental_local_results(x)
        (3.0,)
        >>> x + 1
        Traceback (most recent call last):
        ...
        syncvar.core.errors.UsageError: arithmetic of a PerReplica has no single meaning, ...
    """

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refused("arithmetic")
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _refused(
        "arithmetic"
    )
    __rmatmul__ = __neg__ = __pos__ = __abs__ = __iadd__ = __isub__ = __imul__ = _refused(
        "arithmetic"
    )
    __itruediv__ = __and__ = __or__ = __xor__ = __invert__ = _refused("arithmetic")
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused("comparison")
    __getitem__ = __setitem__ = _refused("indexing")
    __iter__ = __len__ = __contains__ = _refused("iteration")
    __float__ = __int__ = __bool__ = __complex__ = __index__ = _refused("conversion")
    __array__ = __array_ufunc__ = __array_function__ = _refused("a NumPy function")


class Mirrored(DistributedValues, NDArrayOperatorsMixin):
    """A value that is the same on all replicas; acts as its array.

    Example:
        >>> import syncvar as sv
        >>> float(sv.Mirrored(2.0) + 1)
        3.0
    """

    __hash__ = object.__hash__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self._value, dtype=dtype)
        return array.copy() if copy and array is self._value else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [one.__array__() if isinstance(one, Mirrored) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self._value)[key]

    def __len__(self) -> int:
        return len(np.asarray(self._value))

    def __iter__(self) -> Any:
        return iter(np.asarray(self._value))

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self._value), spec) if spec else str(self)

    def __float__(self) -> float:
        return float(np.asarray(self._value))

    def __int__(self) -> int:
        return int(np.asarray(self._value))

    def __bool__(self) -> bool:
        return bool(np.asarray(self._value))
