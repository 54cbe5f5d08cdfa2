"""Horovod's interface for PyTorch over syncvar: `import syncvar.compat.horovod.torch as hvd`.

Functions have Horovod's names, arguments and defaults; docs/migration/horovod.md lists the
differences. All ranks submit operations in the same order; if not, they raise an error with the
calls of all ranks.
"""

from __future__ import annotations

from typing import NoReturn

from syncvar.core.errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"syncvar.compat.horovod.torch needs PyTorch, which cannot be imported ({error}): "
        "pip install 'syncvar[torch]'"
    ) from error

from syncvar.compat.horovod.torch import elastic
from syncvar.compat.horovod.torch.distributed_optimizer import DistributedOptimizer
from syncvar.compat.horovod.torch.gradient_compression import Compression
from syncvar.compat.horovod.torch.hvd_calls import Adasum, Average, Max, Min, Product, Sum
from syncvar.compat.horovod.torch.hvd_operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from syncvar.compat.horovod.torch.operation_queue import HorovodInternalError
from syncvar.compat.horovod.torch.process_sets import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_absent,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from syncvar.compat.horovod.torch.state_broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from syncvar.compat.horovod.torch.sync_batch_norm import SyncBatchNorm

mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = is_absent
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = is_absent


def start_timeline(*_arguments: object, **_options: object) -> NoReturn:
    """Refuse to begin a timeline: an environment variable does it.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        "the timeline of syncvar begins with the job: write SYNCVAR_TRACE=traces "
        "syncvar-launch ..., then `syncvar trace merge traces -o trace.json`"
    )


stop_timeline = start_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
