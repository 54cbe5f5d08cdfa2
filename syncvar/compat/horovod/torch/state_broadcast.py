"""Make parameters, states of optimizers, and objects equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from syncvar.compat.horovod.torch.hvd_calls import ObjectBroadcastCall, ObjectGatherCall
from syncvar.compat.horovod.torch.hvd_operations import (
    broadcast_async_,
    part_name,
    synchronize,
)
from syncvar.compat.horovod.torch.operation_queue import operations
from syncvar.compat.horovod.torch.process_sets import (
    ProcessSet,
    global_process_set,
    rank,
    require_init,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters by the root's.

    Args:
        params: A dict such as `model.state_dict()`, or a list of tensors or of (name, tensor).
        root_rank: Rank whose parameters are sent.
        process_set: Ranks that take part.

    Raises:
        ValueError: `params` is something else.
    """
    if hasattr(params, "items"):
        pairs = sorted(params.items())
    elif isinstance(params, str | torch.Tensor) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    handles = [
        broadcast_async_(tensor, root_rank, part_name(name, "value"), process_set)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Any,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's state of an optimizer: its options and its tensors.

    Args:
        optimizer: Optimizer of PyTorch, or one that `DistributedOptimizer` has made.
        root_rank: Rank whose state is sent.
        model: Ignored.
        process_set: Ranks that take part.

    Raises:
        ValueError: The optimizer is LBFGS.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")  # noqa: TRY004  (as Horovod)
    state = optimizer.state_dict() if rank() == root_rank else None
    state = broadcast_object(state, root_rank, process_set=process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all ranks.

    Args:
        obj: Plain data, which may hold tensors and arrays. Nothing is pickled.
        root_rank: Rank whose object is sent.
        name: Ignored.
        process_set: Ranks that take part.
    """
    del name
    require_init()
    return operations.call(ObjectBroadcastCall(obj, root_rank, process_set))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order; they are plain data as in `broadcast_object`.

    Args:
        obj: Plain data.
        name: Ignored.
        process_set: Ranks that take part.
    """
    del name
    require_init()
    return operations.call(ObjectGatherCall(obj, process_set))  # type: ignore[no-any-return]
