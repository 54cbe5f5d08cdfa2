"""What remains to be done when the calls of syncvar have ended, for each call of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncvar.core.errors import ConfigError
from syncvar.torch.tensor_memory import flat_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.torch.tensor_memory import TensorBuffer
    from syncvar.torch.torch_work import CallWork


class DeliverBuffers:
    """Copies buffers to their tensors, after an optional truncating division."""

    def __init__(self, buffers: Sequence[TensorBuffer], divisor: int = 1) -> None:
        self._buffers = buffers
        self._divisor = divisor

    def deliver(self, results: list[Any]) -> None:
        """Copy the elements; the calls have written to the buffers."""
        for buffer in self._buffers:
            if self._divisor != 1:  # as torch.div(…, rounding_mode="trunc")
                host = torch.from_numpy(buffer.array)
                host.div_(self._divisor, rounding_mode="trunc")
            buffer.deliver()


class DeliverParts:
    """Copies parts of flat arrays, one after another, to buffers.

    Args:
        whole: The array that the calls have written; None if it is the first result, an array or a
            list of arrays.
        buffers: Buffers in the order of the parts.
        divisor: As for `DeliverBuffers`.
        counts: How many elements the caller expects from each rank; None if only the sum counts.
    """

    def __init__(
        self,
        whole: NDArray[Any] | None,
        buffers: Sequence[TensorBuffer],
        divisor: int = 1,
        *,
        counts: list[int] | None = None,
    ) -> None:
        self._whole = whole
        self._buffers = buffers
        self._divisor = divisor
        self._counts = counts

    def deliver(self, results: list[Any]) -> None:
        """Cut the array and copy the parts."""
        whole = results[0] if self._whole is None else self._whole
        if isinstance(whole, list | tuple):
            sent = [part.size for part in whole]
            if self._counts is not None and sent != self._counts:
                raise ConfigError(
                    f"the ranks sent {sent} elements, and the output expects {self._counts}"
                )
            whole = np.concatenate([part.reshape(-1) for part in whole])
        start = 0
        for buffer in self._buffers:
            buffer.array[...] = whole[start : start + buffer.array.size]
            start += buffer.array.size
        if start != whole.size:
            raise ConfigError(
                f"the ranks sent {whole.size} elements, and the output tensors hold {start}"
            )
        DeliverBuffers(self._buffers, self._divisor).deliver([])


class DeliverMessage:
    """Copies a message of any rank to its tensor, and notes the rank in the work."""

    work: CallWork | None = None

    def __init__(self, buffers: Sequence[TensorBuffer]) -> None:
        self._buffers = buffers

    def deliver(self, results: list[Any]) -> None:
        """Copy the elements; the call has written to the buffer."""
        assert self.work is not None
        self.work.source = results[0].source
        for buffer in self._buffers:
            buffer.deliver()


class DeliverSparse:
    """Makes the sum of sparse tensors from the gathered indices, values and counts."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def deliver(self, results: list[Any]) -> None:
        """Add the tensors in rank order, as gloo does."""
        counts, indices, values = results
        like = self._tensor.coalesce()
        inner, rows = like.values().shape[1:], like.indices().shape[0]
        total, start = None, 0
        for count in map(int, counts):
            place = torch.from_numpy(indices[start * rows : (start + count) * rows].copy())
            width = inner.numel()
            flat = torch.empty((count, *inner), dtype=like.dtype)
            flat_array(flat)[...] = values[start * width : (start + count) * width]
            part = torch.sparse_coo_tensor(
                place.view(rows, count), flat, like.shape, check_invariants=False
            )
            total = part if total is None else total.add_(part)
            start += count
        assert total is not None
        with torch.no_grad():
            self._tensor.copy_(total.coalesce())
