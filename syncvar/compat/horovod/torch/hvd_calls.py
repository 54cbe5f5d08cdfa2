"""Collective calls with tensors, as operations of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncvar.collectives.all_reduce import all_reduce
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.gather import all_gather
from syncvar.collectives.object_collectives import all_gather_object, broadcast_object
from syncvar.collectives.reduce import reduce_scatter
from syncvar.collectives.scatter import all_to_all
from syncvar.compat.horovod.torch.operation_queue import HorovodInternalError, operations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.compat.horovod.torch.operation_queue import QueuedOperation
    from syncvar.compat.horovod.torch.process_sets import ProcessSet

Average, Sum, Adasum, Min, Max, Product = range(6)
_OP_NAMES = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "prod"}


class ScaledOp(NamedTuple):
    """An op of Horovod, with factors before and after it."""

    op: int = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    def checked(self) -> ScaledOp:
        """Return this, or raise if syncvar has no such op."""
        if self.op == Adasum:
            raise NotImplementedError(
                "syncvar has no Adasum: use op=hvd.Average, and scale the learning rate"
            )
        if self.op not in _OP_NAMES:
            raise ValueError(f"op must be one of Average, Sum, Min, Max and Product, not {self.op}")
        return self

    def call_name(self, tensors: Sequence[Any]) -> str:
        """Return the name of the op in syncvar: the mean, if all tensors have fractions."""
        if self.op == Average and all(map(has_fractions, tensors)):
            return "mean"  # rounds half types once, and does not overflow
        return _OP_NAMES[self.op]

    @property
    def is_sum(self) -> bool:
        """Whether ranks that have joined can add zeros."""
        return self.op in (Average, Sum)

    def before(self, tensor: Any) -> Any:
        """Return the scaled input."""
        return scaled(tensor, self.prescale_factor)

    def after(self, tensor: Any, size: int, call_name: str) -> Any:
        """Return the scaled result, divided by `size` ranks if the call has not done so."""
        if self.op == Average and call_name != "mean":
            mode = None if has_fractions(tensor) else "trunc"
            tensor = torch.div(tensor, size, rounding_mode=mode)
        return scaled(tensor, self.postscale_factor)


def has_fractions(tensor: Any) -> bool:
    """Return whether the dtype of a tensor has fractions."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex  # type: ignore[no-any-return]


def scaled(tensor: Any, factor: float) -> Any:
    """Return a tensor times a factor; integers are multiplied as float64 and truncated."""
    if factor == 1.0:
        return tensor
    if has_fractions(tensor):
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def in_host_memory(tensor: Any) -> Any:
    """Return a tensor in the memory of the host, without gradient."""
    return tensor.detach().cpu()


class ReduceCall:
    """The all-reduce of one or several tensors, in one call.

    Args:
        outputs: Tensors to write to; None for new ones.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        outputs: Sequence[Any] | None,
        names: Sequence[str] | None,
        reduction: ScaledOp,
        process_set: ProcessSet,
        *,
        is_group: bool = False,
    ) -> None:
        self.name = None if names is None else names[0]
        self.is_global = process_set.group is None
        self._tensors = list(tensors)
        self._outputs = outputs
        self._names = names
        self._reduction = reduction.checked()
        self._group = process_set.required()
        self._size = process_set.size() or 1
        self._is_group = is_group

    def description(self) -> dict[str, Any]:
        """Return names, shapes and dtypes."""
        return {
            "kind": "allreduce",
            "is_sum": self._reduction.is_sum,
            "op": self._reduction.op,
            "names": None if self._names is None else list(self._names),
            "shapes": [list(one.shape) for one in self._tensors],
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in self._tensors],
            "is_group": self._is_group,
        }

    def run(self) -> Any:
        """Make the call. The names are keys of a dict, and so a part of the call."""
        inputs = [self._reduction.before(in_host_memory(one)) for one in self._tensors]
        op = self._reduction.call_name(inputs)
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        if self._names is not None:
            x = dict(zip(self._names, inputs, strict=True))
        is_in_place = self._outputs is not None and all(map(shares, inputs, self._outputs))
        found = all_reduce(x, op, out=x if is_in_place else None, group=self._group)
        if self._names is not None:
            found = [found[name] for name in self._names]
        sums = [found] if isinstance(found, torch.Tensor) else found
        results = [self._reduction.after(one, self._size, op) for one in sums]
        results = delivered(results, self._tensors, self._outputs)
        return results if self._is_group else results[0]


def shares(tensor: Any, other: Any) -> bool:
    """Return whether two tensors are the same memory."""
    return tensor.data_ptr() == other.data_ptr()  # type: ignore[no-any-return]


def delivered(
    results: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any] | None
) -> list[Any]:
    """Return results on the devices of the inputs, in the outputs if there are any."""
    if outputs is None:
        return [one.to(like.device) for one, like in zip(results, inputs, strict=True)]
    with torch.no_grad():
        for one, output in zip(results, outputs, strict=True):
            if not shares(one, output):
                output.detach().copy_(one)
    return list(outputs)


def zeros_for(description: dict[str, Any]) -> QueuedOperation | None:
    """Return the call of a rank that has joined: the sum of zeros with the others' tensors."""
    from syncvar.compat.horovod.torch.process_sets import global_process_set

    tensors = [
        torch.zeros(shape, dtype=getattr(torch, dtype))
        for shape, dtype in zip(description["shapes"], description["dtypes"], strict=True)
    ]
    reduction = ScaledOp(description["op"])
    names, is_group = description["names"], description["is_group"]
    return ReduceCall(tensors, None, names, reduction, global_process_set, is_group=is_group)


class TensorsCall:
    """Another collective of one or several tensors; `make` is called for each.

    Args:
        kind: Name for errors.
    """

    kind = ""

    def __init__(
        self,
        tensors: Sequence[Any],
        name: str | None,
        process_set: ProcessSet,
        *,
        is_group: bool = False,
    ) -> None:
        self.name = name
        self.is_global = process_set.group is None
        self._tensors = [in_host_memory(one).contiguous() for one in tensors]
        self._devices = [one.device for one in tensors]
        self._group = process_set.required()
        self._set = process_set
        self._is_group = is_group

    def description(self) -> dict[str, Any]:
        """Return the kind: ranks that have joined cannot follow."""
        return {"kind": self.kind, "name": self.name}

    def run(self) -> Any:
        """Make a call for each tensor."""
        results = [
            self.moved(self.make(tensor), device)
            for tensor, device in zip(self._tensors, self._devices, strict=True)
        ]
        return results if self._is_group else results[0]

    def moved(self, result: Any, device: Any) -> Any:
        """Return a result on a device."""
        return result.to(device)

    def make(self, tensor: Any) -> Any:
        """Make the call for one tensor."""
        raise NotImplementedError


class GatherCall(TensorsCall):
    """All-gather along the first dimension, whose length may differ."""

    kind = "allgather"

    def make(self, tensor: Any) -> Any:
        """Make the call."""
        return all_gather(tensor, group=self._group)


class ReduceScatterCall(TensorsCall):
    """Reduce, and give each rank its piece of the first dimension; the first pieces are longer."""

    kind = "reducescatter"

    def __init__(
        self,
        tensors: Sequence[Any],
        name: str | None,
        reduction: ScaledOp,
        process_set: ProcessSet,
        *,
        is_group: bool = False,
    ) -> None:
        self._reduction = reduction.checked()
        for one in tensors:
            if one.dim() == 0:
                raise HorovodInternalError(
                    "reducescatter cuts the first dimension, and a scalar has none: reshape it"
                )
        super().__init__(tensors, name, process_set, is_group=is_group)

    def make(self, tensor: Any) -> Any:
        """Make the call."""
        reduction = self._reduction
        op = reduction.call_name([tensor])
        piece = reduce_scatter(reduction.before(tensor), op, group=self._group)
        return reduction.after(piece, self._set.size() or 1, op)


class HvdBroadcast(TensorsCall):
    """Broadcast to all ranks, to outputs if there are any."""

    kind = "broadcast"

    def __init__(
        self,
        tensor: Any,
        output: Any,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> None:
        super().__init__([tensor], name, process_set)
        self._root = process_set.position_of(root_rank)
        self._output = output

    def make(self, tensor: Any) -> Any:
        """Make the call."""
        if self.name is None:
            return broadcast(tensor, self._root, group=self._group)
        return broadcast({self.name: tensor}, self._root, group=self._group)[self.name]

    def moved(self, result: Any, device: Any) -> Any:
        """Return the output, or the result on a device."""
        if self._output is None:
            return result.to(device)
        with torch.no_grad():
            self._output.detach().copy_(result)
        return self._output


class AlltoallCall(TensorsCall):
    """Send parts of the first dimension to all ranks; the result is (tensor, received lengths)."""

    kind = "alltoall"

    def __init__(self, tensor: Any, splits: Any, name: str | None, process_set: ProcessSet) -> None:
        super().__init__([tensor], name, process_set)
        if tensor.dim() == 0:
            raise ValueError("alltoall cuts the first dimension, and a scalar has none: reshape it")
        self._splits = checked_splits(splits, tensor.shape[0], process_set.size() or 1)

    def make(self, tensor: Any) -> Any:
        """Make the call."""
        rows = tensor[: sum(self._splits)]
        parts = all_to_all(list(torch.split(rows, self._splits)), group=self._group)
        lengths = torch.tensor([len(one) for one in parts], dtype=torch.int32)
        return torch.cat(parts), lengths

    def moved(self, result: Any, device: Any) -> Any:
        """Return the tensor on a device, and the lengths."""
        return result[0].to(device), result[1]


def checked_splits(splits: Any, rows: int, size: int) -> list[int]:
    """Return how many rows go to each rank, or raise ValueError."""
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be split equally among {size} ranks: pass splits")
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype.is_floating_point:
            raise ValueError("splits must be integers")
        splits = splits.tolist()
    lengths = [int(one) for one in splits]
    if len(lengths) != size:
        raise ValueError(f"splits must have one number for each of {size} ranks")
    if sum(lengths) > rows or min(lengths) < 0:
        raise ValueError(f"splits {lengths} do not fit {rows} rows")
    return lengths


class BarrierCall:
    """Wait for all ranks of a set."""

    name: str | None = None

    def __init__(self, process_set: ProcessSet) -> None:
        self.is_global = process_set.group is None
        self._group = process_set.required()

    def description(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "barrier"}

    def run(self) -> None:
        """Make the call."""
        barrier(group=self._group)


class ObjectBroadcastCall:
    """Broadcast plain data."""

    name: str | None = None

    def __init__(self, value: Any, root_rank: int, process_set: ProcessSet) -> None:
        self.is_global = process_set.group is None
        self._value = value
        self._group = process_set.required()
        self._root = process_set.position_of(root_rank)

    def description(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "broadcast_object"}

    def run(self) -> Any:
        """Make the call."""
        return broadcast_object(self._value, self._root, group=self._group)


class ObjectGatherCall:
    """Gather plain data on all ranks."""

    name: str | None = None

    def __init__(self, value: Any, process_set: ProcessSet) -> None:
        self.is_global = process_set.group is None
        self._value = value
        self._group = process_set.required()

    def description(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "allgather_object"}

    def run(self) -> list[Any]:
        """Make the call. A rank that joins at the same time makes the same call of syncvar."""
        found = all_gather_object({**self.description(), "value": self._value}, group=self._group)
        if any("value" not in one for one in found):
            operations.note_joined(found)
            raise HorovodInternalError("a rank has called hvd.join: allgather_object needs all")
        return [one["value"] for one in found]
