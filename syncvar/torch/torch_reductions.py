"""ReduceOp of torch.distributed as reductions of syncvar."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncvar.core.errors import ConfigError
from syncvar.torch.tensor_memory import can_combine

_KINDS = dist.ReduceOp.RedOpType
_NAMES = {
    _KINDS.SUM: "sum",
    _KINDS.AVG: "mean",
    _KINDS.PRODUCT: "prod",
    _KINDS.MIN: "min",
    _KINDS.MAX: "max",
    _KINDS.BAND: "and",
    _KINDS.BOR: "or",
    _KINDS.BXOR: "xor",
    _KINDS.PREMUL_SUM: "sum",
}
_OF_BOOL = {"sum": "or", "max": "or", "prod": "and", "min": "and"}  # as NCCL does


class TorchReduction(NamedTuple):
    """A reduction of tensors of one dtype.

    Args:
        name: Name of syncvar's op.
        factor: Factor of each input (PREMUL_SUM), or None.
        truncates: Whether the result is divided by the number of ranks and truncated: the average
            of integers.
    """

    name: str
    factor: Any = None
    truncates: bool = False


def torch_reduction(op: Any, dtype: Any) -> TorchReduction:
    """Return the reduction of an op for tensors of a dtype; raise ConfigError if there is none."""
    kind = op if type(op) is _KINDS else op.op
    name = _NAMES.get(kind)
    if name is None:
        raise ConfigError(f"the backend syncvar has no reduction {op}")
    if not can_combine(dtype):
        raise ConfigError(f"tensors of {dtype} can be moved, but not reduced")
    if kind == _KINDS.PREMUL_SUM:
        return TorchReduction(name, op.__getstate__()[1])
    if dtype is torch.bool:
        return TorchReduction(_OF_BOOL.get(name, name))
    if name == "mean" and not dtype.is_floating_point and not dtype.is_complex:
        return TorchReduction("sum", truncates=True)
    return TorchReduction(name)
