"""Tensors of a library that is not NumPy, as small as they can be: memory by DLPack, and a namespace that makes more of them."""

import types

import ml_dtypes
import numpy as np


class Tensor:
    """An array of another library; it knows no operation, so nothing passes for a NumPy array by accident."""

    def __init__(self, array, device="cpu"):
        self.array = np.asarray(array)
        self.device = device

    def __dlpack__(self, **options):
        if self.device != "cpu":
            raise BufferError("cannot export")
        if self.array.dtype == ml_dtypes.bfloat16:
            raise RuntimeError("Unsupported dtype in DLTensor.")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0) if self.device == "cpu" else (2, 0)

    def __array_namespace__(self, api_version=None):
        return types.SimpleNamespace(asarray=Tensor)

    def __repr__(self):
        return f"Tensor({self.array!r})"


class TensorOfOldDLPack(Tensor):
    """DLPack as it was before version 1.0, which does not say whether memory may be written."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


class TensorOfAnyDtype(Tensor):
    """One with the array protocol, for the dtypes that NumPy's DLPack does not know."""

    def __array__(self, dtype=None, copy=None):
        return self.array


def fake_torch():
    """Return a module that does what is used of PyTorch, for the tests that run without it; `-m torch` has the real one."""

    class Tensor:
        __module__ = "torch"

        def __init__(self, array, *, requires_grad=False, device="cpu", dtype=None):
            self.array, self.requires_grad, self._version = array, requires_grad, 0
            self.device, self.dtype = types.SimpleNamespace(type=device), dtype or array.dtype.name

        def __dlpack__(self, **_):
            raise BufferError("Can't export tensors that require gradient")

        def detach(self):
            return Tensor(self.array, device=self.device.type, dtype=self.dtype)

        def numpy(self):
            if self.requires_grad:
                raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
            if self.device.type != "cpu" or self.dtype == "bfloat16":
                raise TypeError(f"no array of {self.device.type} or {self.dtype}")
            return self.array

        def view(self, dtype):
            return Tensor(self.array, dtype=dtype)

        def is_inference(self):
            return False

    def increment_version(tensor):
        tensor._version += 1

    def from_numpy(array):
        assert array.flags.writeable
        assert array.dtype.kind in "biufc"
        return Tensor(array)

    graph = types.SimpleNamespace(increment_version=increment_version)
    module = types.ModuleType("torch")
    vars(module).update(
        Tensor=Tensor,
        bfloat16="bfloat16",
        int16="int16",
        from_numpy=from_numpy,
        autograd=types.SimpleNamespace(graph=graph),
    )
    return module
