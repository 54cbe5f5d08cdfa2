"""The Python and NumPy protocols of a variable: it behaves like the array that reading returns."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


def _refused(symbol: str, instead: str) -> Callable[[Any, Any], NoReturn]:
    def refuse(self: Any, other: Any) -> NoReturn:
        del other
        raise TypeError(
            f"`v {symbol} x` is not supported: it would make the name v an array. Write "
            f"`{instead}` to write to the variable {self.name!r}"
        )

    return refuse


class ArrayProtocol(NDArrayOperatorsMixin):
    """Operators, conversions and NumPy functions on the result of `read_value`."""

    @property
    def name(self) -> str:
        """Return the name."""
        raise NotImplementedError

    def read_value(self, copy: bool = True) -> NDArray[Any]:
        """Return the value; see `Variable.read_value`."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        value = self.read_value()
        if dtype is not None and value.dtype != dtype:
            if copy is False:
                raise ValueError(f"{value.dtype} cannot become {np.dtype(dtype)} without a copy")
            return value.astype(dtype)
        return value.copy() if copy else value

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a copy of the value for another library: `torch.from_dlpack(v)`.

        It is a copy, because the value is read-only and arrays of other libraries may not be.

        Cost: that of reading, and one copy.
        """
        if copy is False:
            raise BufferError(
                f"the value of variable {self.name!r} is given away as a copy only: leave out "
                "copy=False"
            )
        value = self.read_value(copy=False)
        if value.dtype.kind == "V":
            raise BufferError(
                f"NumPy's DLPack does not know {value.dtype}: write np.asarray(v), or "
                "torch.from_numpy(v.numpy().view('int16').copy()).view(torch.bfloat16)"
            )
        options = (
            {"stream": stream}
            if max_version is None
            else {"max_version": max_version, "dl_device": dl_device}
        )
        return value.copy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number for CPU memory."""
        return 1, 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, ArrayProtocol) for one in kwargs.get("out") or ()) or method == "at":
            raise TypeError(
                f"np.{ufunc.__name__} cannot write into a variable; write v.assign(x), "
                "v.assign_add(x) or v.assign_sub(x)"
            )
        plain = [one.read_value() if isinstance(one, ArrayProtocol) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    __iadd__ = _refused("+=", "v.assign_add(x)")
    __isub__ = _refused("-=", "v.assign_sub(x)")
    __imul__ = _refused("*=", "v.assign(v * x)")
    __itruediv__ = _refused("/=", "v.assign(v / x)")
    __ifloordiv__ = _refused("//=", "v.assign(v // x)")
    __imod__ = _refused("%=", "v.assign(v % x)")
    __ipow__ = _refused("**=", "v.assign(v ** x)")
    __imatmul__ = _refused("@=", "v.assign(v @ x)")
    __iand__ = _refused("&=", "v.assign(v & x)")
    __ior__ = _refused("|=", "v.assign(v | x)")
    __ixor__ = _refused("^=", "v.assign(v ^ x)")
    __ilshift__ = _refused("<<=", "v.assign(v << x)")
    __irshift__ = _refused(">>=", "v.assign(v >> x)")

    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"a part of the variable {self.name!r} cannot be assigned by indexing; write "
            "v.scatter_update(rows, values), or v.assign(x)"
        )

    def __len__(self) -> int:
        return len(self.read_value(copy=False))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __format__(self, spec: str) -> str:
        # Without a spec like repr, which never communicates.
        return format(self.read_value(copy=False), spec) if spec else str(self)

    def __float__(self) -> float:
        return float(self.read_value(copy=False))

    def __int__(self) -> int:
        return int(self.read_value(copy=False))

    def __complex__(self) -> complex:
        return complex(self.read_value(copy=False))

    def __bool__(self) -> bool:
        return bool(self.read_value(copy=False))

    def __index__(self) -> int:
        return operator.index(self.read_value(copy=False))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"the variable {self.name!r} cannot be pickled: its copies live in several processes. "
            "Save it with sv.Checkpoint(v=v).save(path), or pickle v.numpy()"
        )
