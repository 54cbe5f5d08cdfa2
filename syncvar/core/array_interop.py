"""Arrays of other libraries: taken as NumPy arrays on the same memory, and given back as what they were.

PyTorch's tensors go by its own two functions (about 1 us each), others by DLPack and the array API's namespaces (about
5 us). No such library is imported here to take an array: the array is the proof that it has been. One is imported where
an array of it comes from another process.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.dtypes import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class Library(NamedTuple):
    """How arrays of a library become NumPy arrays and back.

    Args:
        name: Of the library; "" where it is not known by name, and its arrays cannot be made in another process.
        take: Returns a NumPy array on the memory of an array; raises TypeError, ValueError, BufferError or RuntimeError.
        give: Returns an array of the library on the memory of a NumPy array where that can be, like the one that comes
            second, which may be None where the library has a name; None where the library says no way.
        wrote: Is told that an array has been written to through its memory.
    """

    name: str
    take: Callable[[Any], NDArray[Any]]
    give: Callable[[NDArray[Any], Any], Any] | None
    wrote: Callable[[Any], None]


class UnsupportedLibrary:
    """Stands for an array that could not be taken, where it will be looked at.

    Args:
        reason: How a sentence about it goes on.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def library_of(value: Any) -> Library | None:
    """Return the library whose array a value is; None for NumPy's, this package's, and everything that is no array.

    Example:
        >>> import numpy as np
        >>> library_of(np.ones(2)), library_of(2.0)
        (None, None)
    """
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
    if not array.flags.writeable:  # of which PyTorch has none
        array = array.copy()
    if array.dtype.kind == "V":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except ValueError:  # one element of a record, whose stride it refuses
        return torch.from_numpy(array.copy())


def _wrote_to_torch(tensor: Any) -> None:
    """Have backward refuse what it computed from the values before."""
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def _take_by_dlpack(value: Any) -> NDArray[Any]:
    import numpy as np

    try:
        array = np.from_dlpack(value)
    except (
        RuntimeError,
        BufferError,
        ValueError,
    ):  # NumPy's DLPack knows no bfloat16, and memory of the CPU alone
        _refuse_device(value, None)
        if not hasattr(value, "__array__"):
            raise
        return np.asarray(value)
    if not array.flags.writeable and hasattr(
        value, "__array__"
    ):  # DLPack before 1.0 does not say whether it may be written
        other = np.asarray(value)
        if (
            other.flags.writeable
            and other.__array_interface__["data"][0] == array.__array_interface__["data"][0]
        ):
            return other
    return array


def _give_to_jax(array: NDArray[Any], like: Any) -> Any:
    del like
    return _imported("jax.numpy").asarray(array)


def _imported(name: str) -> Any:
    """Return a library's module.

    Raises:
        ConfigError: It cannot be imported here.
    """
    found = sys.modules.get(name)
    if found is None:
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            library = name.partition(".")[0]
            raise ConfigError(
                f"there are tensors of {library} in it, which cannot be imported here: {error}"
            ) from None
    return found


def _give_by_namespace(array: NDArray[Any], like: Any) -> Any:
    return like.__array_namespace__().asarray(array)


def _refuse_device(value: Any, kind: str | None) -> None:
    """Refuse an array that lies elsewhere than in the memory of the CPU.

    Raises:
        TypeError: It does.
    """
    if kind is None:
        try:
            kind = "cpu" if int(value.__dlpack_device__()[0]) in _HOST_MEMORY else "other"
        except (AttributeError, ValueError, BufferError, RuntimeError, TypeError):
            return
    if kind != "cpu":
        device = getattr(value, "device", value.__dlpack_device__() if kind == "other" else kind)
        remedy = (
            "it has no data at all"
            if kind == "meta"
            else "pass x.cpu(), or a copy of it in the memory of the CPU"
        )
        raise TypeError(
            f"it is on the device {str(device)!r}, and syncvar works in the memory of the CPU: {remedy}"
        )


_HOST_MEMORY = (1, 3, 11, 13)  # DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged
_TORCH = Library("torch", _take_from_torch, _give_to_torch, _wrote_to_torch)
_JAX = Library("jax", _take_by_dlpack, _give_to_jax, lambda _: None)
NAMED = (
    _TORCH,
    _JAX,
)  # on the wire such a library is an index into this table, never a name to import
_ANY = Library("", _take_by_dlpack, _give_by_namespace, lambda _: None)
