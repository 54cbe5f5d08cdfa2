"""Tensors as flat NumPy arrays in the memory of the host.

A contiguous tensor on the CPU is the array: nothing is copied. Other tensors have a copy in host
memory, which is pinned for tensors of a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TYPE_TEXTS = {
    getattr(torch, name): np.dtype(name).str
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class DeviceMemory(Protocol):
    """Copies between the memory of a device and that of the host."""

    def is_host(self, tensor: Any) -> bool:
        """Return whether the elements of a tensor are in host memory."""

    def allocate(self, tensor: Any) -> Any:
        """Return an uninitialized contiguous host tensor of the shape and dtype of another one."""

    def fetch(self, tensor: Any, host: Any) -> None:
        """Copy a tensor to the host; return when the copy is complete."""

    def store(self, host: Any, tensor: Any) -> None:
        """Copy a host tensor to the device, before later work of the device."""


class PinnedMemory:
    """Copies through pinned host memory, on the current stream of the tensor's device."""

    def is_host(self, tensor: Any) -> bool:
        """Return whether the elements of a tensor are in host memory."""
        return bool(tensor.is_cpu)

    def allocate(self, tensor: Any) -> Any:
        """Return an uninitialized contiguous tensor in pinned memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not self.is_host(tensor))

    def fetch(self, tensor: Any, host: Any) -> None:
        """Copy a tensor to the host; return when the copy is complete."""
        host.copy_(tensor, non_blocking=True)
        torch.accelerator.current_stream(tensor.device).synchronize()

    def store(self, host: Any, tensor: Any) -> None:
        """Copy a host tensor to the device; the allocator keeps pinned memory until it is read."""
        tensor.copy_(host, non_blocking=True)


class TensorBuffer:
    """The elements of a tensor as a flat array in host memory.

    Args:
        tensor: The tensor, dense.
        memory: Copies of tensors that are not in host memory.
        reads: Whether the call reads the elements; else they are uninitialized in a copy.
    """

    __slots__ = ("_host", "_memory", "array", "tensor")

    def __init__(self, tensor: Any, memory: DeviceMemory, *, reads: bool = True) -> None:
        self.tensor = tensor
        self._memory = memory
        if not memory.is_host(tensor):
            self._host = memory.allocate(tensor)
            if reads:
                memory.fetch(tensor.detach(), self._host)
        elif is_plain(tensor):
            self._host = tensor
        else:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype)
            if reads:
                self._host.copy_(tensor.detach())
        self.array = flat_array(self._host)

    @property
    def is_direct(self) -> bool:
        """Whether the array is the memory of the tensor."""
        return self._host is self.tensor

    def deliver(self) -> None:
        """Copy the elements to the tensor, if the array is not its memory."""
        if self.is_direct:
            return
        with torch.no_grad():
            if self._memory.is_host(self.tensor):
                self.tensor.detach().copy_(self._host)
            else:
                self._memory.store(self._host, self.tensor.detach())


def is_plain(tensor: Any) -> bool:
    """Return whether the memory of a host tensor is its elements in order."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


class _MemoryOfTensor:
    """The memory of a tensor for NumPy, which keeps the tensor alive.

    `Tensor.numpy` would forbid to resize the storage for good, and FSDP does that.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any, count: int, type_text: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (count,),
            "typestr": type_text,
            "version": 3,
        }


def flat_array(tensor: Any) -> NDArray[Any]:
    """Return a flat array on the memory of a plain host tensor.

    A dtype that NumPy does not know becomes bytes, which can be moved and not combined.
    """
    dtype = tensor.dtype
    type_text = _TYPE_TEXTS.get(dtype)
    if type_text is not None:
        return np.asarray(_MemoryOfTensor(tensor, tensor.numel(), type_text))
    if dtype is torch.bfloat16:
        return np.asarray(_MemoryOfTensor(tensor, tensor.numel(), "<u2")).view(_BFLOAT16)
    return np.asarray(_MemoryOfTensor(tensor, tensor.nbytes, "|u1"))


@lru_cache(maxsize=64)
def can_combine(dtype: Any) -> bool:
    """Return whether tensors of a dtype can be reduced."""
    return dtype in _TYPE_TEXTS or dtype is torch.bfloat16
