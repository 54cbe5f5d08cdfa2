"""Synchronized variables over real processes.

`import syncvar as sv`, then start the script with `syncvar-launch --workers N script.py`.
A name is loaded when it is first used, so importing the package is cheap.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from syncvar.core.lazy_import import attributes_of

if TYPE_CHECKING:
    from syncvar import data, elastic, optimizers
    from syncvar.bootstrap.process import (
        host_count,
        host_index,
        init,
        is_initialized,
        ledger,
        local_rank,
        local_world_size,
        rank,
        restart_count,
        shutdown,
        world_size,
    )
    from syncvar.checkpoint.checkpoint import Checkpoint
    from syncvar.checkpoint.manager import CheckpointManager
    from syncvar.checkpoint.save import PendingSave
    from syncvar.checkpoint.single_file import load, save
    from syncvar.collectives import compressors
    from syncvar.collectives.all_reduce import all_reduce
    from syncvar.collectives.barrier import barrier
    from syncvar.collectives.broadcast import broadcast
    from syncvar.collectives.gather import all_gather, gather
    from syncvar.collectives.groups import Group, Mesh, mesh, new_group
    from syncvar.collectives.neighbor import neighbor_all_gather, neighbor_all_to_all
    from syncvar.collectives.object_collectives import (
        all_gather_object,
        broadcast_object,
        gather_object,
        scatter_object,
    )
    from syncvar.collectives.persistent import PersistentCollective, persistent
    from syncvar.collectives.reduce import exscan, reduce, reduce_scatter, scan
    from syncvar.collectives.scatter import all_to_all, scatter
    from syncvar.collectives.send_recv import (
        probe,
        recv,
        recv_any,
        recv_object,
        send,
        send_object,
        sendrecv,
    )
    from syncvar.collectives.sharded_sums import all_reduce_shards, tree_sum
    from syncvar.collectives.shm_arrays import empty, shared_array, zeros
    from syncvar.core.errors import (
        CheckpointError,
        ConfigError,
        Corrupt,
        DeadlineExceeded,
        GroupBroken,
        HandshakeError,
        HostUnreachable,
        InternalError,
        LaunchError,
        MismatchError,
        NoAggregation,
        NotFound,
        PeerLost,
        PlanError,
        RankFailed,
        RendezvousError,
        RowOutOfRange,
        SharedMemoryFull,
        SharedMemoryUnavailable,
        SyncvarError,
        TransportError,
        UsageError,
    )
    from syncvar.core.reduce_ops import register_op
    from syncvar.parameter_server.server_variables import ShardedVariable
    from syncvar.parameter_server.strategy import ParameterServerStrategy
    from syncvar.parameter_server.task_coordinator import ClusterCoordinator, RemoteValue
    from syncvar.protocol.object_codec import register_object
    from syncvar.runner import engines
    from syncvar.runner.local import run
    from syncvar.runtime.call_ledger import Ledger, LedgerRow
    from syncvar.runtime.p2p_mailbox import AnyMessage, MessageInfo
    from syncvar.runtime.work import Work, wait_all, wait_any
    from syncvar.strategies.base import Strategy
    from syncvar.strategies.contexts import (
        ReplicaContext,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from syncvar.strategies.distributed_dataset import (
        DistributedDataset,
        DistributedIterator,
        InputContext,
    )
    from syncvar.strategies.join_uneven import Uneven, uneven
    from syncvar.strategies.mirrored import (
        CentralStorageStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
    )
    from syncvar.strategies.value_reduction import ReduceOp, ValueContext
    from syncvar.variables import partitioners
    from syncvar.variables.create import ShardInfo
    from syncvar.variables.grouped_writes import assign_add_all, assign_all, assign_sub_all
    from syncvar.variables.policy import VariableAggregation, VariableSynchronization
    from syncvar.variables.replica_check import check_equal
    from syncvar.variables.values import DistributedValues, Mirrored, PerReplica
    from syncvar.variables.variable import Explanation, Variable

__version__ = "0.1.0"

_HOMES = {
    "syncvar.checkpoint.single_file": ("load", "save"),
    "syncvar.checkpoint.checkpoint": ("Checkpoint",),
    "syncvar.checkpoint.manager": ("CheckpointManager",),
    "syncvar.checkpoint.save": ("PendingSave",),
    "syncvar.collectives.gather": ("all_gather", "gather"),
    "syncvar.collectives.all_reduce": ("all_reduce",),
    "syncvar.collectives.sharded_sums": ("all_reduce_shards", "tree_sum"),
    "syncvar.collectives.scatter": ("all_to_all", "scatter"),
    "syncvar.collectives.barrier": ("barrier",),
    "syncvar.collectives.broadcast": ("broadcast",),
    "syncvar.collectives.persistent": ("PersistentCollective", "persistent"),
    "syncvar.collectives.groups": ("Group", "Mesh", "mesh", "new_group"),
    "syncvar.collectives.neighbor": ("neighbor_all_gather", "neighbor_all_to_all"),
    "syncvar.collectives.object_collectives": (
        "all_gather_object", "broadcast_object", "gather_object", "scatter_object",
    ),
    "syncvar.collectives.send_recv": (
        "probe", "recv", "recv_any", "recv_object", "send", "send_object", "sendrecv",
    ),
    "syncvar.runtime.call_ledger": ("Ledger", "LedgerRow"),
    "syncvar.runtime.p2p_mailbox": ("AnyMessage", "MessageInfo"),
    "syncvar.protocol.object_codec": ("register_object",),
    "syncvar.collectives.reduce": ("exscan", "reduce", "reduce_scatter", "scan"),
    "syncvar.collectives.shm_arrays": ("empty", "shared_array", "zeros"),
    "syncvar.runtime.work": ("Work", "wait_all", "wait_any"),
    "syncvar.core.errors": (
        "SharedMemoryFull", "SharedMemoryUnavailable", "CheckpointError", "ConfigError", "Corrupt",
        "DeadlineExceeded", "GroupBroken", "HandshakeError", "HostUnreachable", "InternalError",
        "LaunchError", "MismatchError", "NoAggregation", "NotFound", "PeerLost", "PlanError",
        "RankFailed", "RendezvousError", "RowOutOfRange", "SyncvarError", "TransportError",
        "UsageError",
    ),
    "syncvar.bootstrap.process": (
        "host_count", "host_index", "local_rank", "local_world_size", "rank", "restart_count",
        "world_size", "init", "is_initialized", "ledger", "shutdown",
    ),
    "syncvar.runner.local": ("run",),
    "syncvar.core.reduce_ops": ("register_op",),
    "syncvar.strategies.base": ("Strategy",),
    "syncvar.strategies.contexts": (
        "ReplicaContext", "get_replica_context", "get_strategy", "has_strategy",
        "in_cross_replica_context",
    ),
    "syncvar.parameter_server.task_coordinator": ("ClusterCoordinator", "RemoteValue"),
    "syncvar.strategies.distributed_dataset": (
        "DistributedDataset", "DistributedIterator", "InputContext",
    ),
    "syncvar.strategies.value_reduction": ("ReduceOp", "ValueContext"),
    "syncvar.strategies.mirrored": (
        "CentralStorageStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy",
    ),
    "syncvar.parameter_server.strategy": ("ParameterServerStrategy",),
    "syncvar.parameter_server.server_variables": ("ShardedVariable",),
    "syncvar.strategies.join_uneven": ("Uneven", "uneven"),
    "syncvar.variables.create": ("ShardInfo",),
    "syncvar.variables.replica_check": ("check_equal",),
    "syncvar.variables.grouped_writes": ("assign_add_all", "assign_all", "assign_sub_all"),
    "syncvar.variables.policy": ("VariableAggregation", "VariableSynchronization"),
    "syncvar.variables.values": ("DistributedValues", "Mirrored", "PerReplica"),
    "syncvar.variables.variable": ("Explanation", "Variable"),
}  # fmt: skip
_MODULES = {
    "compressors": "syncvar.collectives.compressors",
    "data": "syncvar.data",
    "elastic": "syncvar.elastic",
    "engines": "syncvar.runner.engines",
    "optimizers": "syncvar.optimizers",
    "partitioners": "syncvar.variables.partitioners",
}
_found = attributes_of(__name__, {name: home for home, names in _HOMES.items() for name in names})

__all__ = [
    "AnyMessage", "CentralStorageStrategy", "Checkpoint", "CheckpointError", "CheckpointManager",
    "ClusterCoordinator", "ConfigError", "Corrupt", "DeadlineExceeded", "DistributedDataset",
    "DistributedIterator", "DistributedValues", "Explanation", "Group", "GroupBroken",
    "HandshakeError", "HostUnreachable", "InputContext", "InternalError", "LaunchError", "Ledger",
    "LedgerRow", "Mesh", "MessageInfo", "Mirrored", "MirroredStrategy", "MismatchError",
    "MultiWorkerMirroredStrategy", "NoAggregation", "NotFound", "ParameterServerStrategy",
    "PeerLost", "PendingSave", "PerReplica", "PersistentCollective", "PlanError", "RankFailed",
    "ReduceOp", "RemoteValue", "RendezvousError", "ReplicaContext", "RowOutOfRange", "ShardInfo",
    "ShardedVariable", "SharedMemoryFull", "SharedMemoryUnavailable", "Strategy", "SyncvarError",
    "TransportError", "Uneven", "UsageError", "ValueContext", "Variable", "VariableAggregation",
    "VariableSynchronization", "Work", "all_gather", "all_gather_object", "all_reduce",
    "all_reduce_shards", "all_to_all", "assign_add_all", "assign_all", "assign_sub_all", "barrier",
    "broadcast", "broadcast_object", "check_equal", "compressors", "data", "elastic", "empty",
    "engines", "exscan", "gather", "gather_object", "get_replica_context", "get_strategy",
    "has_strategy", "host_count", "host_index", "in_cross_replica_context", "init",
    "is_initialized", "ledger", "load", "local_rank", "local_world_size", "mesh",
    "neighbor_all_gather", "neighbor_all_to_all", "new_group", "optimizers", "partitioners",
    "persistent", "probe", "rank", "recv", "recv_any", "recv_object", "reduce", "reduce_scatter",
    "register_object", "register_op", "restart_count", "run", "save", "scan", "scatter",
    "scatter_object", "send", "send_object", "sendrecv", "shared_array", "shutdown", "tree_sum",
    "uneven", "wait_all", "wait_any", "world_size", "zeros",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in __all__ and not name.startswith("_") and not _is_module(name):
        from syncvar.core.migration_hints import missing_attribute

        raise missing_attribute("sv", name, __all__)
    return _found(name)


def _is_module(name: str) -> bool:
    """Return whether a name is a module not imported yet, as in `from syncvar import data`."""
    return any(
        os.path.exists(os.path.join(folder, name + ending))
        for folder in __path__
        for ending in ("", ".py")
    )


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
