"""The process group of the backend "syncvar": calls of torch.distributed as calls of syncvar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from syncvar.collectives.all_reduce import all_reduce
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.gather import all_gather, gather
from syncvar.collectives.reduce import reduce, reduce_scatter
from syncvar.collectives.scatter import all_to_all, scatter
from syncvar.collectives.send_recv import recv, recv_any, send
from syncvar.core.errors import ConfigError, TransportError
from syncvar.runtime.work import Work
from syncvar.torch.dynamo_skips import skip_methods
from syncvar.torch.tensor_memory import PinnedMemory, TensorBuffer
from syncvar.torch.torch_deliveries import (
    DeliverBuffers,
    DeliverMessage,
    DeliverParts,
    DeliverSparse,
)
from syncvar.torch.torch_reductions import torch_reduction
from syncvar.torch.torch_rendezvous import TorchJob, install_handler, make_group
from syncvar.torch.torch_work import NO_TURN, CallFuture, CallWork, GroupTurn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from syncvar.collectives.groups import Group
    from syncvar.torch.tensor_memory import DeviceMemory
    from syncvar.torch.torch_reductions import TorchReduction
    from syncvar.torch.torch_work import ResultDelivery

NAME = "syncvar"
_DEVICES = ("cpu", "cuda", "xpu")


def register() -> None:
    """Register the backend and its way to meet under launchers; idempotent."""
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001  (no public look-up)
        skip_methods(SyncvarProcessGroup, CallWork, CallFuture, GroupTurn)
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(_DEVICES))
    install_handler()


def _create(options: Any, _backend_options: Any) -> SyncvarProcessGroup:
    """Return the process group that torch asks for; see `Backend.register_backend`."""
    group, job = make_group(options)
    return SyncvarProcessGroup(group, options, job)


def _seconds(timeout: timedelta | None) -> float | None:
    """Return the seconds of a timeout; None for the default."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None


class SyncvarProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Process group of the backend "syncvar"; `torch.distributed` makes it and calls it.

    Tensors may be on the CPU or on a GPU, of any dtype. Calls may come from several threads, which
    take turns. Ranks whose threads take turns in different orders get MismatchError.
    """

    def __init__(
        self, group: Group, options: Any, job: TorchJob, memory: DeviceMemory | None = None
    ) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._store = options.store
        self._name, self._description = str(options.group_id), ""
        self.group = group
        self._job = job
        self._timeout_s = _default_timeout(options.timeout)
        self._memory = PinnedMemory() if memory is None else memory
        self._turn = GroupTurn()
        self._coalesced: list[CallWork] | None = None

    # -- what torch asks -----------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name of the backend."""
        return NAME

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """Name by which torch finds the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What torch says of the group."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name by which torch finds the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what torch says of the group."""
        return self._description

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, _device: Any) -> SyncvarProcessGroup:
        return self

    @property
    def supports_splitting(self) -> bool:
        """Whether a communicator can be split from this one: not needed."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Whether calls can be collected between `_start_coalescing` and `_end_coalescing`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of calls."""
        self._timeout_s = _default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group, and after the default group the job, if this backend has joined it."""
        self.group.destroy()
        self._job.leave()

    def abort(self) -> None:
        """Leave the group."""
        self.shutdown()

    def __repr__(self) -> str:
        return f"SyncvarProcessGroup(rank={self.rank()}, size={self.size()})"

    # -- making calls --------------------------------------------------------------------------

    def _options(self, opts: Any) -> dict[str, Any]:
        """Return group, timeout and kind of a call; a call that torch waits for is made at once."""
        return {
            "group": self.group,
            "timeout": _seconds(getattr(opts, "timeout", None)) or self._timeout_s,
            "async_op": getattr(opts, "asyncOp", True),
        }

    def _buffers(self, tensors: Sequence[Any], *, reads: bool = True) -> list[TensorBuffer]:
        return [TensorBuffer(tensor, self._memory, reads=reads) for tensor in tensors]

    def _work(
        self,
        results: Sequence[Any],
        tensors: list[Any],
        delivery: ResultDelivery | None = None,
        *,
        takes_turn: bool = True,
    ) -> CallWork:
        """Return the work of calls; what calls have returned that have ended is delivered now."""
        calls = [one for one in results if isinstance(one, Work)]
        if not calls and delivery is not None:
            delivery.deliver(list(results))
            delivery = None
        work = CallWork(calls, tensors, delivery, self._turn if takes_turn else NO_TURN)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, _device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any = None) -> CallWork:
        works, self._coalesced = self._coalesced or [], None
        return CallWork.joined(works)

    # -- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, **_others: Any) -> CallWork:
        """Reduce each tensor in place."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(tensor.is_sparse for tensor in listed):
            return self._allreduce_sparse(listed, opts)
        op = _op_of(opts)
        reduction = torch_reduction(op, listed[0].dtype)
        buffers = self._buffers(listed)
        options = self._options(opts)
        if reduction.factor is not None:
            options["prescale"] = float(reduction.factor)
        with self._turn:
            results = [
                all_reduce(buffer.array, reduction.name, out=buffer.array, **options)
                for buffer in buffers
            ]
        return self._work(results, listed, self._delivered(buffers, reduction))

    def _delivered(
        self, buffers: list[TensorBuffer], reduction: TorchReduction | None = None
    ) -> DeliverBuffers | None:
        """Return the delivery of outputs; None if the calls write to the tensors themselves."""
        divisor = 1 if reduction is None else self._divisor(reduction)
        if divisor == 1 and all(buffer.is_direct for buffer in buffers):
            return None
        return DeliverBuffers(buffers, divisor)

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> CallWork:
        """Reduce tensors in place, in one transfer."""
        reduction = torch_reduction(_op_of(opts), tensors[0].dtype)
        if reduction.factor is not None or len({tensor.dtype for tensor in tensors}) > 1:
            return self.allreduce(tensors, opts)
        buffers = self._buffers(tensors)
        arrays = [buffer.array for buffer in buffers]
        with self._turn:
            result = all_reduce(arrays, reduction.name, out=arrays, **self._options(opts))
        return self._work([result], list(tensors), self._delivered(buffers, reduction))

    def _allreduce_sparse(self, tensors: list[Any], opts: Any) -> CallWork:
        """Add sparse tensors, by gathering their elements."""
        if len(tensors) != 1 or torch_reduction(_op_of(opts), tensors[0].dtype).name != "sum":
            raise ConfigError("the backend syncvar reduces one sparse tensor at a time, by SUM")
        sparse = tensors[0].coalesce()
        indices, values = sparse.indices().contiguous(), sparse.values().contiguous()
        count = np.array([indices.shape[1]], np.int64)
        parts = (count, *(buffer.array for buffer in self._buffers([indices, values])))
        with self._turn:
            results = [all_gather(part, **self._options(opts)) for part in parts]
        return self._work(results, tensors, DeliverSparse(tensors[0]))

    def reduce(self, tensors: list[Any], opts: Any = None) -> CallWork:
        """Reduce a tensor to the root; other ranks keep theirs."""
        reduction = torch_reduction(_op_of(opts), tensors[0].dtype)
        buffers = self._buffers(tensors)
        options, root = self._options(opts), 0 if opts is None else opts.rootRank
        array = _scaled(buffers[0].array, reduction)
        out = buffers[0].array if root == self.rank() else None
        with self._turn:
            result = reduce(array, reduction.name, root, out=out, **options)
        delivery = None if out is None else self._delivered(buffers, reduction)
        return self._work([result], tensors, delivery)

    def reduce_scatter(
        self, outputs: list[Any], inputs: list[list[Any]], opts: Any = None
    ) -> CallWork:
        """Reduce lists of tensors; each rank gets the tensor with its number."""
        works = [
            self._reduce_parts(output, parts, opts)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return works[0] if len(works) == 1 else CallWork.joined(works)

    def _reduce_parts(self, output: Any, parts: list[Any], opts: Any) -> CallWork:
        flats = [buffer.array for buffer in self._buffers(parts)]
        whole = np.concatenate(flats)
        if len({flat.size for flat in flats}) == 1:
            return self._reduce_scatter(output, whole, opts)
        # Of unlike lengths: all ranks get the whole, and keep their part.
        reduction = torch_reduction(_op_of(opts), output.dtype)
        whole = _scaled(whole, reduction)
        start = sum(flat.size for flat in flats[: self.rank()])
        buffers = self._buffers([output], reads=False)
        with self._turn:
            result = all_reduce(whole, reduction.name, out=whole, **self._options(opts))
        part = whole[start : start + buffers[0].array.size]
        return self._work([result], [output], DeliverParts(part, buffers, self._divisor(reduction)))

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any = None) -> CallWork:
        """Reduce a tensor; each rank gets its part along the first axis."""
        return self._reduce_scatter(output, self._buffers([whole])[0].array, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], inputs: list[Any], opts: Any = None
    ) -> CallWork:
        """Make `reduce_scatter_single` of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, whole, opts) for output, whole in pairs]
        return CallWork.joined(works)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _divisor(self, reduction: TorchReduction) -> int:
        return self.size() if reduction.truncates else 1

    def _reduce_scatter(self, output: Any, whole: Any, opts: Any) -> CallWork:
        reduction = torch_reduction(_op_of(opts), output.dtype)
        whole = _scaled(whole, reduction)
        buffers = self._buffers([output], reads=False)
        out, options = buffers[0].array, self._options(opts)
        if np.may_share_memory(out, whole):  # torch lets the output be a part of the input
            whole = whole.copy()
        with self._turn:
            result = reduce_scatter(whole, reduction.name, out=out, **options)
        return self._work([result], [output], self._delivered(buffers, reduction))

    # -- moves ---------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, **others: Any) -> CallWork:
        """Give every rank the root's tensors."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else others.get("root", getattr(opts, "rootRank", 0))
        is_root = root == self.rank()
        buffers = self._buffers(listed, reads=is_root)
        options = self._options(opts)
        with self._turn:
            results = [
                broadcast(buffer.array, root, out=buffer.array, **options) for buffer in buffers
            ]
        return self._work(results, listed, None if is_root else self._delivered(buffers))

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> CallWork:
        """Gather tensors on every rank, into lists."""
        works = []
        for parts, mine in zip(outputs, inputs, strict=True):
            buffers = self._buffers(parts, reads=False)
            array = self._buffers([mine])[0].array
            with self._turn:
                result = all_gather(array, **self._options(opts))
            works.append(self._work([result], list(parts), DeliverParts(None, buffers)))
        return works[0] if len(works) == 1 else CallWork.joined(works)

    def allgather_coalesced(
        self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None
    ) -> CallWork:
        """Gather several tensors; list r of the outputs is of rank r."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Any, mine: Any, opts: Any = None) -> CallWork:
        """Gather tensors of one shape into one tensor."""
        buffers = self._buffers([output], reads=False)
        out, array = buffers[0].array, self._buffers([mine])[0].array
        if np.may_share_memory(out, array):  # torch lets the input be a part of the output
            array = array.copy()
        with self._turn:
            result = all_gather(array, out=out, **self._options(opts))
        return self._work([result], [output], self._delivered(buffers))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Any], inputs: list[Any], opts: Any = None
    ) -> CallWork:
        """Make `all_gather_single` of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.all_gather_single(output, mine, opts) for output, mine in pairs]
        return CallWork.joined(works)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> CallWork:
        """Gather tensors on the root."""
        root = 0 if opts is None else opts.rootRank
        array = self._buffers([inputs[0]])[0].array
        with self._turn:
            result = gather(array, root, **self._options(opts))
        if root != self.rank():
            return self._work([result], [])
        buffers = self._buffers(outputs[0], reads=False)
        return self._work([result], list(outputs[0]), DeliverParts(None, buffers))

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any = None) -> CallWork:
        """Give each rank its tensor of the root's list."""
        root = 0 if opts is None else opts.rootRank
        buffers = self._buffers([outputs[0]], reads=False)
        parts = None
        if root == self.rank():
            parts = [buffer.array for buffer in self._buffers(inputs[0])]
        with self._turn:
            result = scatter(parts, root, **self._options(opts))
        return self._work([result], [outputs[0]], DeliverParts(None, buffers))

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> CallWork:
        """Send tensor d to rank d, and receive one from each rank."""
        parts = [buffer.array for buffer in self._buffers(inputs)]
        buffers = self._buffers(outputs, reads=False)
        with self._turn:
            result = all_to_all(parts, **self._options(opts))
        counts = [buffer.array.size for buffer in buffers]
        delivery = DeliverParts(None, buffers, counts=counts)
        return self._work([result], list(outputs), delivery)

    def all_to_all_single(
        self,
        output: Any,
        whole: Any,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> CallWork:
        """Send part d of a tensor to rank d, and receive a part from each rank."""
        buffers = self._buffers([output], reads=False)
        array = self._buffers([whole])[0].array
        parts = self._parts(array, whole, input_splits)
        places = self._parts(buffers[0].array, output, output_splits)
        with self._turn:
            result = all_to_all(parts, **self._options(opts))
        counts = [place.size for place in places]
        return self._work([result], [output], DeliverParts(None, buffers, counts=counts))

    alltoall_base = all_to_all_single

    def _parts(self, array: Any, tensor: Any, splits: list[int] | None) -> list[Any]:
        """Cut an array at rows of its tensor, evenly or as `splits` says."""
        rows, size = (tensor.shape[0] if tensor.dim() else 1), self.size()
        if splits:
            counts = list(splits)
        elif rows % size:
            raise ConfigError(f"{rows} rows cannot be split evenly among {size} ranks")
        else:
            counts = [rows // size] * size
        if len(counts) != size or sum(counts) != rows:
            raise ConfigError(f"split sizes {counts} do not cut {rows} rows among {size} ranks")
        row = array.size // rows if rows else 0
        ends = np.cumsum(counts) * row
        return [array[end - count * row : end] for end, count in zip(ends, counts, strict=True)]

    # -- waits and messages --------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> CallWork:
        """Wait until all ranks have come."""
        with self._turn:
            return self._work([barrier(**self._options(opts))], [])

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
    ) -> None:
        """Wait until all ranks have come; RuntimeError names those that have not in time.

        After that the job is broken, as after every missed deadline.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        if seconds is not None and seconds <= 0:
            raise RuntimeError(f"Rank {self.rank()} timed out in monitoredBarrier after 0 ms")
        try:
            with self._turn:
                barrier(group=self.group, timeout=seconds)
        except TransportError as error:
            raise RuntimeError(self._late_text(error, wait_all_ranks=wait_all_ranks)) from error

    def _late_text(self, error: TransportError, *, wait_all_ranks: bool) -> str:
        """Return the text of torch's monitored_barrier, and that of the error."""
        missing = [self.group.ranks.index(one) for one in getattr(error, "missing", ())]
        if self.rank() or not missing:
            text = (
                f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0"
            )
        elif wait_all_ranks:
            text = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier"
        else:
            text = f"Rank {min(missing)} failed to pass monitoredBarrier"
        return f"{text}: {error}"

    def send(self, tensors: list[Any], dst: int, tag: int = 0) -> CallWork:
        """Send a tensor."""
        (buffer,) = self._buffers(tensors)
        result = send(buffer.array, dst, tag=tag, **self._options(None))
        return self._work([result], list(tensors), takes_turn=False)

    def recv(self, tensors: list[Any], src: int, tag: int = 0) -> CallWork:
        """Receive a tensor."""
        buffers = self._buffers(tensors, reads=False)
        result = recv(src, tag=tag, out=buffers[0].array, **self._options(None))
        work = self._work([result], list(tensors), self._delivered(buffers), takes_turn=False)
        work.source = src
        return work

    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> CallWork:
        """Receive a tensor from any rank; the work tells from which."""
        buffers = self._buffers(tensors, reads=False)
        result = recv_any(tag=tag, out=buffers[0].array, **self._options(None))
        delivery = DeliverMessage(buffers)
        work = self._work([result], list(tensors), delivery, takes_turn=False)
        delivery.work = work
        return work


def _scaled(array: Any, reduction: TorchReduction) -> Any:
    """Return the input of a reduction: the array, or a new one with the factor of PREMUL_SUM."""
    factor = reduction.factor
    return array if factor is None else array * array.dtype.type(float(factor))


def _op_of(opts: Any) -> Any:
    """Return the op of a call: torch passes options, or the op alone, or nothing."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _default_timeout(timeout: timedelta | None) -> float | None:
    """Return the seconds of calls; None, syncvar's setting, for torch's own default."""
    return None if timeout == dist.default_pg_timeout else _seconds(timeout)
