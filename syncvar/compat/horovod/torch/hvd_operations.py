"""Horovod's collective functions: blocking, asynchronous (`_async`), and in place (`_`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from syncvar.compat.horovod.torch.gradient_compression import Compression
from syncvar.compat.horovod.torch.hvd_calls import (
    AlltoallCall,
    Average,
    BarrierCall,
    GatherCall,
    HvdBroadcast,
    ReduceCall,
    ReduceScatterCall,
    ScaledOp,
    Sum,
    zeros_for,
)
from syncvar.compat.horovod.torch.operation_queue import JoinCall, operations
from syncvar.compat.horovod.torch.process_sets import (
    ProcessSet,
    global_process_set,
    rank,
    require_init,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended."""
    return operations.poll(handle)


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation and return its result; a handle serves once."""
    return handle() if callable(handle) else operations.synchronize(handle)


def _reduction(op: int | None, average: Any, pre: float, post: float) -> ScaledOp:
    """Return the reduction; `average` is the argument of old programs."""
    if average is not None:
        if op is not None:
            raise ValueError("pass op only: average is its old form")
        op = Average if average else Sum
    return ScaledOp(Average if op is None else op, pre, post).checked()


def _sum_call(
    tensors: Sequence[Any],
    outputs: Sequence[Any] | None,
    name: str | None,
    reduction: ScaledOp,
    process_set: ProcessSet,
) -> ReduceCall:
    require_init()
    names = None if name is None else [name]
    return ReduceCall(tensors, outputs, names, reduction, process_set)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to average or combine a tensor of all ranks; return a handle."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return operations.submit(_sum_call([tensor], None, name, reduction, process_set))


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to average or combine a tensor of all ranks in place; return a handle."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return operations.submit(_sum_call([tensor], [tensor], name, reduction, process_set))


class AllreduceFunction(torch.autograd.Function):  # type: ignore[misc]
    """All-reduce whose gradient is an all-reduce."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        reduction: ScaledOp,
        process_set: ProcessSet,
        *tensors: Any,
    ) -> Any:
        """Make the call."""
        ctx.reduction, ctx.process_set = reduction, process_set
        require_init()
        names = None if name is None else group_names(name, tensors)
        call = ReduceCall(tensors, None, names, reduction, process_set, is_group=True)
        return tuple(operations.call(call))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Combine the gradients the same way."""
        call = ReduceCall(gradients, None, None, ctx.reduction, ctx.process_set, is_group=True)
        return None, None, None, *operations.call(call)


def _compressed(
    function: Any,
    name: str | None,
    reduction: ScaledOp,
    process_set: ProcessSet,
    compression: Any,
    tensors: Sequence[Any],
) -> list[Any]:
    """Compress tensors, combine them by a function with gradients, and decompress the results."""
    pairs = [compression.compress(one) for one in tensors]
    results = function.apply(name, reduction, process_set, *(one for one, _ in pairs))
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def group_names(name: str, tensors: Sequence[Any]) -> list[str]:
    """Return the names of the tensors of a call: its own, with numbers if there are several."""
    if len(tensors) == 1:
        return [name]
    return [f"{name}.{place}" for place in range(len(tensors))]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the average, or another combination, of a tensor of all ranks.

    Args:
        tensor: Tensor of one shape and dtype on all ranks.
        average: Old form of `op`.
        name: Name that the calls of the ranks must share.
        compression: `Compression.none` or `Compression.fp16`.
        op: Average, Sum, Min, Max or Product; None averages.
        prescale_factor: Factor of the input.
        postscale_factor: Factor of the result.
        process_set: Ranks that take part.

    Returns:
        A new tensor. Gradients flow through it.
    """
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    (result,) = _compressed(AllreduceFunction, name, reduction, process_set, compression, [tensor])
    return result


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Average or combine a tensor of all ranks in place, and return it."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return operations.call(_sum_call([tensor], [tensor], name, reduction, process_set))


def _group_call(
    tensors: Sequence[Any],
    outputs: Sequence[Any] | None,
    name: str | None,
    reduction: ScaledOp,
    process_set: ProcessSet,
) -> ReduceCall:
    require_init()
    names = None if name is None else group_names(name, tensors)
    return ReduceCall(tensors, outputs, names, reduction, process_set, is_group=True)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to average or combine several tensors by one call; return a handle."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return operations.submit(_group_call(tensors, None, name, reduction, process_set))


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to average or combine several tensors in place by one call; return a handle."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return operations.submit(_group_call(tensors, tensors, name, reduction, process_set))


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the averages, or other combinations, of several tensors, made by one call."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return _compressed(AllreduceFunction, name, reduction, process_set, compression, tensors)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Average or combine several tensors in place by one call, and return them."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    call = _group_call(tensors, tensors, name, reduction, process_set)
    return operations.call(call)  # type: ignore[no-any-return]


class SparseResult:
    """The result of a sparse all-reduce, once its two parts have come."""

    def __init__(self, tensor: Any, parts: tuple[int, int], divisor: int) -> None:
        self._tensor = tensor
        self._parts = parts
        self._divisor = divisor

    def __call__(self) -> Any:
        """Wait, and return the tensor."""
        indices, values = map(synchronize, self._parts)
        if self._divisor != 1:
            values = values / self._divisor
        shape = self._tensor.shape
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)


def sparse_allreduce_async(
    tensor: Any,
    name: str | None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """Begin to sum or average a sparse tensor; return a function that waits for the result."""
    parts = (
        allgather_async(tensor._indices().t(), part_name(name, "indices"), process_set),  # noqa: SLF001  (torch's only way to uncoalesced parts)
        allgather_async(tensor._values(), part_name(name, "values"), process_set),  # noqa: SLF001  (likewise)
    )
    divisor = (process_set.size() or 1) if op in (None, Average) else 1
    return SparseResult(tensor, parts, divisor)


def part_name(name: str | None, part: str) -> str | None:
    """Return the name of a part of an operation."""
    return None if name is None else f"{name}.{part}"


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to concatenate the tensors of all ranks along the first dimension; return a handle."""
    require_init()
    return operations.submit(GatherCall([tensor], name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin the same for several tensors; return a handle."""
    require_init()
    return operations.submit(GatherCall(tensors, name, process_set, is_group=True))


class AllgatherFunction(torch.autograd.Function):  # type: ignore[misc]
    """All-gather whose gradient is this rank's rows of the averaged gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        """Make the call."""
        require_init()
        ctx.rows = [one.shape[0] if one.dim() else 1 for one in tensors]
        ctx.process_set = process_set
        return tuple(operations.call(GatherCall(tensors, name, process_set, is_group=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Average the gradients, and take the rows of this rank."""
        process_set = ctx.process_set
        call = ReduceCall(gradients, None, None, ScaledOp(), process_set, is_group=True)
        averages = operations.call(call)
        rows = operations.call(GatherCall([torch.tensor([ctx.rows])], None, process_set))
        starts = rows[: process_set.rank()].sum(dim=0).tolist()
        return (
            None,
            None,
            *(
                one.narrow(0, start, length)
                for one, start, length in zip(averages, starts, ctx.rows, strict=True)
            ),
        )


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the tensors of all ranks, concatenated along the first dimension.

    Args:
        tensor: Tensor; its first dimension may differ between ranks.
        name: Name for errors.
        process_set: Ranks that take part.

    Returns:
        A new tensor. Gradients flow through it.
    """
    (result,) = AllgatherFunction.apply(name, process_set, tensor)
    return result


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the same for each of several tensors."""
    return list(AllgatherFunction.apply(name, process_set, *tensors))


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send the root's tensor to all ranks; return a handle."""
    require_init()
    return operations.submit(HvdBroadcast(tensor, None, root_rank, name, process_set))


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to overwrite a tensor by the root's; return a handle."""
    require_init()
    return operations.submit(HvdBroadcast(tensor, tensor, root_rank, name, process_set))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite a tensor by the root's, and return it."""
    require_init()
    return operations.call(HvdBroadcast(tensor, tensor, root_rank, name, process_set))


class BroadcastFunction(torch.autograd.Function):  # type: ignore[misc]
    """Broadcast whose gradient is the average of the gradients on the root, zero elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        """Make the call."""
        require_init()
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return operations.call(HvdBroadcast(tensor, None, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Average the gradients."""
        average = operations.call(_sum_call([gradient], None, None, ScaledOp(), ctx.process_set))
        return average if rank() == ctx.root_rank else torch.zeros_like(average), None, None, None


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor on all ranks; gradients flow through it."""
    return BroadcastFunction.apply(tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send rows to all ranks; the handle gives (tensor, rows from each rank)."""
    require_init()
    return operations.submit(AlltoallCall(tensor, splits, name, process_set))


class AlltoallFunction(torch.autograd.Function):  # type: ignore[misc]
    """All-to-all whose gradient goes back the same way."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        """Make the call."""
        require_init()
        result, lengths = operations.call(AlltoallCall(tensor, splits, name, process_set))
        ctx.lengths, ctx.process_set = lengths, process_set
        ctx.mark_non_differentiable(lengths)
        return result, lengths

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        """Return the gradient of each row to the rank that sent it."""
        call = AlltoallCall(gradient, ctx.lengths, None, ctx.process_set)
        return operations.call(call)[0], None, None, None


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of a tensor to all ranks, and concatenate the rows that arrive.

    Args:
        tensor: Tensor, cut along its first dimension.
        splits: How many rows go to each rank; None cuts equally.
        name: Name for errors.
        process_set: Ranks that take part.

    Returns:
        The tensor; with `splits` also how many rows came from each rank.
    """
    result, lengths = AlltoallFunction.apply(tensor, splits, name, process_set)
    return result if splits is None else (result, lengths)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to combine a tensor of all ranks and keep this rank's rows; return a handle."""
    require_init()
    reduction = ScaledOp(op, prescale_factor, postscale_factor)
    return operations.submit(ReduceScatterCall([tensor], name, reduction, process_set))


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin the same for several tensors; return a handle."""
    require_init()
    reduction = ScaledOp(op, prescale_factor, postscale_factor)
    call = ReduceScatterCall(tensors, name, reduction, process_set, is_group=True)
    return operations.submit(call)


class ReducescatterFunction(torch.autograd.Function):  # type: ignore[misc]
    """Reduce-scatter whose gradient is the all-gather of the gradients, scaled as Horovod does."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        reduction: ScaledOp,
        process_set: ProcessSet,
        *tensors: Any,
    ) -> Any:
        """Make the call."""
        require_init()
        ctx.reduction, ctx.process_set = reduction, process_set
        call = ReduceScatterCall(tensors, name, reduction, process_set, is_group=True)
        return tuple(operations.call(call))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gather the gradients."""
        reduction, size = ctx.reduction, ctx.process_set.size()
        factor = reduction.prescale_factor * reduction.postscale_factor
        factor *= size if reduction.op == Sum else 1
        scaled_gradients = [one * factor for one in gradients]
        call = GatherCall(scaled_gradients, None, ctx.process_set, is_group=True)
        return None, None, None, *operations.call(call)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the average, or another combination, of a tensor of all ranks."""
    reduction = ScaledOp(op, prescale_factor, postscale_factor)
    arguments = name, reduction, process_set, compression
    (result,) = _compressed(ReducescatterFunction, *arguments, [tensor])
    return result


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return the same for each of several tensors."""
    reduction = ScaledOp(op, prescale_factor, postscale_factor)
    return _compressed(ReducescatterFunction, name, reduction, process_set, compression, tensors)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a set have come."""
    require_init()
    operations.call(BarrierCall(process_set))


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Meanwhile this rank adds zeros to the sums of the others, which divide averages by the number of
    all ranks, as Horovod does. They get an error for other collectives.

    Args:
        device: Ignored.

    Returns:
        The rank that joined last.
    """
    del device
    require_init()
    return operations.call(JoinCall(zeros_for))  # type: ignore[no-any-return]
