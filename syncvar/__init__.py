"""Synchronized variables over real processes.

`import syncvar as sv`, then start the script with `syncvar-launch --workers N script.py`. Names are loaded when they
are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from syncvar.loading import attributes_of

if TYPE_CHECKING:
    from syncvar import data, engines, optimizers, partitioners
    from syncvar.checkpoint import Checkpoint, CheckpointManager, PendingSave, load, save

    # mypy mistakes a name for the submodule of that name where it checks the package later, so it is imported from there.
    from syncvar.collectives import (
        Group,
        Mesh,
        all_gather_object,
        broadcast_object,
        exscan,
        gather_object,
        new_group,
        recv,
        recv_object,
        register_op,
        scatter_object,
        send,
        send_object,
        sendrecv,
    )
    from syncvar.collectives.all_gather import all_gather
    from syncvar.collectives.all_reduce import all_reduce
    from syncvar.collectives.all_reduce_shards import all_reduce_shards
    from syncvar.collectives.all_to_all import all_to_all
    from syncvar.collectives.barrier import barrier
    from syncvar.collectives.broadcast import broadcast
    from syncvar.collectives.gather import gather
    from syncvar.collectives.mesh import mesh
    from syncvar.collectives.reduce import reduce
    from syncvar.collectives.reduce_scatter import reduce_scatter
    from syncvar.collectives.scan import scan
    from syncvar.collectives.scatter import scatter
    from syncvar.collectives.tree_sum import tree_sum
    from syncvar.engine.waiting import wait_all, wait_any
    from syncvar.engine.work import Work
    from syncvar.errors import (
        ArenaFull,
        ArenaUnavailable,
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
        SyncvarError,
        TransportError,
        UsageError,
    )
    from syncvar.identity import (
        host_count,
        host_index,
        local_rank,
        local_world_size,
        rank,
        restart_count,
        world_size,
    )
    from syncvar.joining.process import init, is_initialized, shutdown
    from syncvar.launching import run
    from syncvar.memory_in_common import shared_array
    from syncvar.resident import empty, zeros
    from syncvar.strategies import (
        CentralStorageStrategy,
        ClusterCoordinator,
        DistributedDataset,
        DistributedIterator,
        InputContext,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        ParameterServerStrategy,
        ReduceOp,
        RemoteValue,
        ReplicaContext,
        ShardedVariable,
        Strategy,
        Uneven,
        ValueContext,
        Variable,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from syncvar.strategies.uneven import uneven
    from syncvar.variables import (
        DistributedValues,
        Explanation,
        Mirrored,
        PerReplica,
        ShardInfo,
        VariableAggregation,
        VariableSynchronization,
        assign_add_all,
        assign_all,
        assign_sub_all,
        check_equal,
    )

__version__ = "0.1.0"

_HOMES = {
    "syncvar.checkpoint": ("Checkpoint", "CheckpointManager", "PendingSave", "load", "save"),
    "syncvar.collectives": (
        "Group", "Mesh", "all_gather", "all_gather_object", "all_reduce", "all_reduce_shards", "all_to_all", "barrier",
        "broadcast", "broadcast_object", "exscan", "gather", "gather_object", "mesh", "new_group", "recv", "recv_object", "reduce",
        "reduce_scatter", "register_op", "scan", "scatter", "scatter_object", "send", "send_object", "sendrecv", "tree_sum",
    ),
    "syncvar.errors": (
        "ArenaFull", "ArenaUnavailable", "CheckpointError", "ConfigError", "Corrupt", "DeadlineExceeded", "GroupBroken",
        "HandshakeError", "HostUnreachable", "InternalError", "LaunchError", "MismatchError", "NoAggregation", "NotFound",
        "PeerLost", "PlanError", "RankFailed", "RendezvousError", "RowOutOfRange", "SyncvarError", "TransportError",
        "UsageError",
    ),
    "syncvar.identity": ("host_count", "host_index", "local_rank", "local_world_size", "rank", "restart_count", "world_size"),
    "syncvar.joining.process": ("init", "is_initialized", "shutdown"),
    "syncvar.launching": ("run",),
    "syncvar.memory_in_common": ("shared_array",),
    "syncvar.resident": ("empty", "zeros"),
    "syncvar.engine.waiting": ("wait_all", "wait_any"),
    "syncvar.engine.work": ("Work",),
    "syncvar.strategies": (
        "CentralStorageStrategy", "ClusterCoordinator", "DistributedDataset", "DistributedIterator", "InputContext", "MirroredStrategy",
        "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "ReduceOp", "RemoteValue", "ReplicaContext", "ShardedVariable", "Strategy", "Uneven", "ValueContext", "Variable", "get_replica_context",
        "get_strategy", "has_strategy", "in_cross_replica_context", "uneven",
    ),
    "syncvar.variables": (
        "DistributedValues", "Explanation", "Mirrored", "PerReplica", "ShardInfo", "VariableAggregation", "VariableSynchronization",
        "assign_add_all", "assign_all", "assign_sub_all", "check_equal",
    ),
}  # fmt: skip
_ROOMS = ("data", "engines", "optimizers", "partitioners")
_found = attributes_of(__name__, {name: home for home, names in _HOMES.items() for name in names})

__all__ = [
    "ArenaFull",
    "ArenaUnavailable",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterCoordinator",
    "ConfigError",
    "Corrupt",
    "DeadlineExceeded",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Explanation",
    "Group",
    "GroupBroken",
    "HandshakeError",
    "HostUnreachable",
    "InputContext",
    "InternalError",
    "LaunchError",
    "Mesh",
    "Mirrored",
    "MirroredStrategy",
    "MismatchError",
    "MultiWorkerMirroredStrategy",
    "NoAggregation",
    "NotFound",
    "ParameterServerStrategy",
    "PeerLost",
    "PendingSave",
    "PerReplica",
    "PlanError",
    "RankFailed",
    "ReduceOp",
    "RemoteValue",
    "RendezvousError",
    "ReplicaContext",
    "RowOutOfRange",
    "ShardInfo",
    "ShardedVariable",
    "Strategy",
    "SyncvarError",
    "TransportError",
    "Uneven",
    "UsageError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_shards",
    "all_to_all",
    "assign_add_all",
    "assign_all",
    "assign_sub_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check_equal",
    "data",
    "empty",
    "engines",
    "exscan",
    "gather",
    "gather_object",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "host_count",
    "host_index",
    "in_cross_replica_context",
    "init",
    "is_initialized",
    "load",
    "local_rank",
    "local_world_size",
    "mesh",
    "new_group",
    "optimizers",
    "partitioners",
    "rank",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "register_op",
    "restart_count",
    "run",
    "save",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "shared_array",
    "shutdown",
    "tree_sum",
    "uneven",
    "wait_all",
    "wait_any",
    "world_size",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"syncvar.{name}")
    if name not in __all__ and not name.startswith("_") and not _is_module(name):
        from syncvar.foreign_names import missing

        raise missing("sv", name, __all__)
    return _found(name)


def _is_module(name: str) -> bool:
    """Return whether a module of this package is asked for before it is imported, as `from syncvar import testing` does."""
    return any(
        os.path.exists(os.path.join(folder, name + ending))
        for folder in __path__
        for ending in ("", ".py")
    )


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
