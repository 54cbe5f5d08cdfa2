"""Dtypes that can be communicated, and arrays of other libraries.

In messages a dtype or a library is an index into a table here, never a name to import. PyTorch
tensors use PyTorch's own two functions (about 1 us each), others DLPack and the array API namespace
(about 5 us). Input never imports a library here, because its array proves that it is imported. Only
an array from another process may cause an import.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

DTYPE_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
)
_INDEX = {name: index for index, name in enumerate(DTYPE_NAMES)}
_HOST_MEMORY = (1, 3, 11, 13)  # DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged


@lru_cache(maxsize=64)
def dtype_index(dtype: np.dtype[Any]) -> int:
    """Return the index of a dtype in native byte order, or raise ConfigError."""
    index = _INDEX.get(dtype.name)
    if index is None:
        raise ConfigError(
            f"dtype {dtype} cannot be communicated; use one of {', '.join(DTYPE_NAMES)}"
        )
    return index


@lru_cache(maxsize=64)
def dtype_from_index(index: int) -> np.dtype[Any]:
    """Return the dtype at an index, or raise WireError."""
    import numpy as np

    if not 0 <= index < len(DTYPE_NAMES):
        raise WireError(f"unknown dtype index {index}")
    name = DTYPE_NAMES[index]
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ConfigError(
                "bfloat16 needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return, unused-ignore]
    return np.dtype(name)


class Library(NamedTuple):
    """Conversions between a library's arrays and NumPy arrays.

    Args:
        name: Name of the library; "" if unknown, and then other processes cannot make its arrays.
        take: Returns a NumPy array on the memory of an array; raises TypeError, ValueError,
            BufferError or RuntimeError.
        give: Returns an array of the library, on the memory of a NumPy array if possible. Its
            second argument is an array of the kind wanted; None is fine if the library has a name.
            None if the library offers no way.
        wrote: Called after syncvar has written to the memory of an array.
    """

    name: str
    take: Callable[[Any], NDArray[Any]]
    give: Callable[[NDArray[Any], Any], Any] | None
    wrote: Callable[[Any], None]


class UnsupportedLibrary:
    """Placeholder for an array that could not be converted; the caller that uses it raises.

    `reason` is the rest of the error sentence, after the name of the argument.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def library_of(value: Any) -> Library | None:
    """Return the library of an array; None for NumPy, for syncvar, and for anything else."""
    kind: Any = type(value)
    return _library_of(kind)


@lru_cache(maxsize=256)
def _library_of(kind: Any) -> Library | None:
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if not hasattr(kind, "__dlpack__") or homes & {"numpy", "syncvar"}:
        return None
    if any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__):
        return _TORCH
    if homes & {"jax", "jaxlib"}:
        return _JAX
    return _ANY if hasattr(kind, "__array_namespace__") else _ANY._replace(give=None)


def _bfloat16() -> Any:
    return dtype_from_index(DTYPE_NAMES.index("bfloat16"))


def _take_from_torch(tensor: Any) -> NDArray[Any]:
    torch = sys.modules["torch"]
    try:
        if tensor.dtype is torch.bfloat16:
            return tensor.detach().view(torch.int16).numpy().view(_bfloat16())  # type: ignore[no-any-return]
        return tensor.detach().numpy()  # type: ignore[no-any-return]
    except (RuntimeError, TypeError):
        if tensor.device.type == "cpu" and (tensor.is_conj() or tensor.is_neg()):
            return _take_from_torch(tensor.resolve_conj().resolve_neg())
        _refuse_device(tensor, tensor.device.type)
        raise


def _give_to_torch(array: NDArray[Any], like: Any) -> Any:
    del like
    torch = _imported("torch")
    if not array.flags.writeable:  # PyTorch has no read-only tensors
        array = array.copy()
    if array.dtype.kind == "V":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except ValueError:  # PyTorch refuses the stride of a single element of a record
        return torch.from_numpy(array.copy())


def _wrote_to_torch(tensor: Any) -> None:
    # Makes backward raise if it has saved the values from before.
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def _take_by_dlpack(value: Any) -> NDArray[Any]:
    import numpy as np

    try:
        array = np.from_dlpack(value)
    # NumPy's DLPack knows neither bfloat16 nor memory of devices.
    except (RuntimeError, BufferError, ValueError):
        _refuse_device(value, None)
        if not hasattr(value, "__array__"):
            raise
        return np.asarray(value)
    # DLPack before 1.0 does not say whether an array is writable.
    if not array.flags.writeable and hasattr(value, "__array__"):
        other = np.asarray(value)
        address = array.__array_interface__["data"][0]
        if other.flags.writeable and other.__array_interface__["data"][0] == address:
            return other
    return array


def _give_to_jax(array: NDArray[Any], like: Any) -> Any:
    del like
    return _imported("jax.numpy").asarray(array)


def _imported(name: str) -> Any:
    """Return a library's module, or raise ConfigError if it cannot be imported."""
    found = sys.modules.get(name)
    if found is None:
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            library = name.partition(".")[0]
            raise ConfigError(
                f"the value has tensors of {library}, which cannot be imported here: {error}"
            ) from None
    return found


def _give_by_namespace(array: NDArray[Any], like: Any) -> Any:
    return like.__array_namespace__().asarray(array)


def _refuse_device(value: Any, kind: str | None) -> None:
    """Raise TypeError for an array that is not in the memory of the CPU."""
    if kind is None:
        try:
            kind = "cpu" if int(value.__dlpack_device__()[0]) in _HOST_MEMORY else "other"
        except (AttributeError, ValueError, BufferError, RuntimeError, TypeError):
            return
    if kind != "cpu":
        device = getattr(value, "device", value.__dlpack_device__() if kind == "other" else kind)
        remedy = "it has no data at all" if kind == "meta" else "pass x.cpu(), or a copy on the CPU"
        raise TypeError(
            f"it is on the device {str(device)!r}, and syncvar needs memory of the CPU: {remedy}"
        )


_TORCH = Library("torch", _take_from_torch, _give_to_torch, _wrote_to_torch)
_JAX = Library("jax", _take_by_dlpack, _give_to_jax, lambda _: None)
NAMED = (_TORCH, _JAX)
_ANY = Library("", _take_by_dlpack, _give_by_namespace, lambda _: None)
