"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from syncvar.compat.horovod.torch.hvd_calls import Sum
from syncvar.compat.horovod.torch.hvd_operations import allreduce
from syncvar.compat.horovod.torch.process_sets import size


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]  # noqa: SLF001  (torch's own base)
    """Batch normalization whose mean and variance are those of the batches of all ranks."""

    def _check_input_dim(self, input: Any) -> None:  # noqa: A002  (torch's signature)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Any) -> Any:  # noqa: A002  (torch's signature)
        """Normalize a batch of shape (rows, channels, ...)."""
        self._check_input_dim(input)
        if not self.training or size() == 1:
            return super().forward(input)
        dtype = input.dtype
        if dtype in (torch.float16, torch.bfloat16):
            input = input.float()  # noqa: A001  (sums and counts do not fit half types)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        rows = torch.full((1,), input.numel() / input.shape[1], dtype=input.dtype)
        sums = allreduce(torch.cat([input.sum(axes), rows.to(input.device)]), op=Sum)
        mean, count = sums[:-1] / sums[-1], sums[-1].detach()
        centered = input - mean.view(shape)
        variance = allreduce((centered**2).sum(axes), op=Sum) / count
        self._update(mean.detach(), variance.detach(), float(count))
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(dtype)

    def _update(self, mean: Any, variance: Any, count: float) -> None:
        """Update the running statistics, as one process would with the whole batch."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1 / float(self.num_batches_tracked)
        variance = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
