"""Compression of gradients while they travel."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Base of the compressions; this one does nothing."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor that has been received, in its former dtype."""
        del ctx
        return tensor


class HalfCompressor(Compressor):
    """Send floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16, and its dtype."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        return tensor.to(ctx)


class Compression:
    """The compressions by name."""

    none = Compressor
    fp16 = HalfCompressor
