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
