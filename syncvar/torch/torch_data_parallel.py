"""Data parallelism for a module of PyTorch: gradients are averaged while the backward pass runs."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from syncvar.collectives.all_reduce import all_reduce
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.reduce_args import UNLIMITED, BucketLimits
from syncvar.collectives.shm_arrays import empty
from syncvar.core.errors import ConfigError, SharedMemoryFull, UsageError
from syncvar.torch.tensor_memory import can_combine, flat_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.collectives.groups import Group
    from syncvar.runtime.work import Work

_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel
_FIRST_BUCKET_BYTES = 1 << 20


class GradientBucket:
    """Gradients of one dtype in one flat array, which is averaged by one call.

    Behind them the array has one number for each parameter: 1 if this rank has its gradient. So the
    mean is 0 if no rank has it.
    """

    def __init__(self, parameters: Sequence[Any], group: Group | None) -> None:
        self.parameters = list(parameters)
        self._group = group
        count = sum(parameter.numel() for parameter in parameters)
        self.tensor = _shared_tensor(count + len(parameters), parameters[0].dtype)
        self._array = flat_array(self.tensor)
        self._flags = self.tensor[count:]
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._views: list[Any] = []
        start = 0
        for parameter in parameters:
            self._views.append(_view_like(parameter, self.tensor, start))
            start += parameter.numel()
        self._work: Work | None = None
        self._present: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether all gradients have come."""
        return len(self._present) == len(self.parameters)

    def add(self, parameter: Any) -> None:
        """Take the gradient of a parameter."""
        place = self._places[parameter]
        if place in self._present:
            raise UsageError(
                "a parameter got its gradient twice in one backward pass: use "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        self._present.add(place)
        view, gradient = self._views[place], parameter.grad
        if gradient is not view:
            view.copy_(gradient)
            parameter.grad = view

    def start(self) -> None:
        """Start to average; a gradient that has not come counts as zero, or as an earlier one."""
        with torch.no_grad():
            self._flags.fill_(1)
            for place, parameter in enumerate(self.parameters):
                if place in self._present:
                    continue
                if parameter.grad is None:
                    self._views[place].zero_()
                    self._flags[place] = 0
                else:
                    self.add(parameter)
        self._work = all_reduce(
            self._array, "mean", out=self._array, group=self._group, async_op=True
        )

    def drop(self) -> None:
        """Wait for what a backward pass that raised has started, and forget it."""
        work, self._work = self._work, None
        self._present = set()
        if work is not None:
            work.wait()

    def end(self) -> None:
        """Wait, and give each parameter that has a gradient on any rank the average."""
        work, self._work = self._work, None
        self._present = set()
        if work is None:
            return
        work.wait()
        for parameter, view, flag in zip(
            self.parameters, self._views, self._flags.tolist(), strict=True
        ):
            if flag:
                parameter.grad = view


class DataParallel(nn.Module):  # type: ignore[misc]
    """Averages the gradients of a module over all ranks, while the backward pass runs.

    At the start all ranks take the parameters and buffers of rank 0. In each backward pass
    gradients collect in buckets, in the reverse order of the parameters. A full bucket is averaged
    at once, and the pass continues meanwhile. The first bucket is small, so that averaging begins
    early. When `backward()` returns, all gradients are averaged.

    A parameter that is unused on some ranks gets the mean, with zero for these ranks. One that is
    unused on all ranks keeps its gradient. For loops of different lengths, put the loop in
    `with sv.uneven(model.module, optimizer):`. Then the mean is over the ranks that still work.
    Buffers, such as the statistics of BatchNorm, stay on each rank.

    Args:
        module: Module on the CPU; the same on all ranks.
        bucket_bytes: The most bytes of gradients that travel together. A longer one travels by
            itself.
        first_bucket_bytes: The same for the first bucket.
        group: Ranks that train together; None means the world.

    Raises:
        ConfigError: The module has no parameter that needs a gradient, or one that is not a
            tensor of floating-point numbers on the CPU.
        UsageError: In `backward`: a parameter gets its gradient twice in one pass.
        MismatchError: The modules of the ranks differ.

    Cost: a bucket takes one `all_reduce` in the shared memory of the host, without copies by
        syncvar. Each gradient is copied once into its bucket.
    Order: that of `all_reduce`; the gradients are equal on all ranks.
    Source: torch.nn.parallel.DistributedDataParallel.

    Example:
        >>> import torch
        >>> from syncvar.torch import DataParallel
        >>> model = DataParallel(torch.nn.Linear(2, 1))
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> model.module.bias.grad
        tensor([4.])
    """

    def __init__(
        self,
        module: Any,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        first_bucket_bytes: int = _FIRST_BUCKET_BYTES,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        limits = BucketLimits.checked(bucket_bytes, first_bucket_bytes) or UNLIMITED
        parameters = [one for one in module.parameters() if one.requires_grad]
        _check(parameters)
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(tensor, 0, out=tensor, group=group)
        self._buckets = [GradientBucket(part, group) for part in divided(parameters[::-1], limits)]
        self._bucket_of = {one: bucket for bucket in self._buckets for one in bucket.parameters}
        self._is_synchronized = True
        self._is_in_backward = False
        self._started = 0  # buckets; all ranks start them in this order
        hook = _GradientHook(self)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module."""
        if self._is_in_backward:  # a backward pass that raised left it True
            self._is_in_backward = False
            for bucket in self._buckets:
                bucket.drop()
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block only add to the gradients of this rank.

        The next backward pass after the block averages the sums.
        """
        before, self._is_synchronized = self._is_synchronized, False
        try:
            yield
        finally:
            self._is_synchronized = before

    def take(self, parameter: Any) -> None:
        """Take a gradient that is complete, and start the buckets that are full."""
        if not self._is_synchronized:
            return
        if not self._is_in_backward:
            self._is_in_backward, self._started = True, 0
            for bucket in self._buckets:
                bucket.drop()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # noqa: SLF001
        with torch.no_grad():
            self._bucket_of[parameter].add(parameter)
        while self._started < len(self._buckets) and self._buckets[self._started].is_full:
            self._buckets[self._started].start()
            self._started += 1

    def _finish(self) -> None:
        """Start the other buckets, and wait for all, at the end of a backward pass."""
        self._is_in_backward = False
        for bucket in self._buckets[self._started :]:
            bucket.start()
        self._started = 0
        for bucket in self._buckets:
            bucket.end()


class _GradientHook:
    """Hook of the parameters, which does not keep the module alive: no collector sees torch's."""

    def __init__(self, owner: DataParallel) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, parameter: Any) -> None:
        owner = self._owner()
        if owner is not None:
            owner.take(parameter)


def _check(parameters: Sequence[Any]) -> None:
    if not parameters:
        raise ConfigError("the module has no parameter that needs a gradient")
    for parameter in parameters:
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"DataParallel averages on the CPU, and a parameter is on {parameter.device}: use "
                'DistributedDataParallel with init_process_group("syncvar")'
            )
        if not can_combine(parameter.dtype):
            raise ConfigError(f"gradients of {parameter.dtype} cannot be averaged")


def divided(parameters: Sequence[Any], limits: BucketLimits) -> list[list[Any]]:
    """Return the parameters of each bucket."""
    sizes = ((one.numel() * one.element_size(), one.dtype) for one in parameters)
    return [[parameters[place] for place in places] for places in limits.divide(sizes)]


def _shared_tensor(count: int, dtype: Any) -> Any:
    """Return a flat tensor in the shared memory of the host, or in private memory if it is full."""
    like = torch.empty(0, dtype=dtype)
    nbytes = count * like.element_size()
    try:
        memory = empty(nbytes, np.uint8)
    except SharedMemoryFull:
        memory = np.empty(nbytes, np.uint8)
    return torch.from_numpy(memory).view(dtype)


def _view_like(parameter: Any, flat: Any, start: int) -> Any:
    """Return a view of a part of `flat`, with the shape and, if they are dense, the strides."""
    part = flat[start : start + parameter.numel()]
    if torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)
