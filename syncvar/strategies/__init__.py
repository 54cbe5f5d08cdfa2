"""Strategies: which replicas a variable has, and in which context a program runs.

* `base`: scope, run, reduce, gather. `mirrored`: the strategies with a copy on every replica. `central_storage`: one
  copy on each host. `parameter_server`: variables on servers (`server_variables`, by
  `server_access`); `coordinator`: functions for other workers (`script_order`: what they need).
* `contexts`: asking where the program is; the replica context. `reducing`: values over replicas.
* `uneven`: loops of different lengths; `enrolled`: a group in one, whose calls are those of who still works.
* `inputs`: each replica's batches, and the agreement on steps (`offers`, pure).

`Variable` is offered here too, because a variable needs the default strategy, which this room makes.
"""

from __future__ import annotations

from syncvar.strategies.base import Strategy
from syncvar.strategies.central_storage import CentralStorageStrategy
from syncvar.strategies.contexts import (
    ReplicaContext,
    ValueContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from syncvar.strategies.coordinator import ClusterCoordinator, PerWorkerDataset, RemoteValue
from syncvar.strategies.inputs import DistributedDataset, DistributedIterator, InputContext
from syncvar.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
from syncvar.strategies.parameter_server import ParameterServerStrategy
from syncvar.strategies.reducing import ReduceOp
from syncvar.strategies.server_variables import ShardedVariable
from syncvar.strategies.uneven import Uneven, uneven
from syncvar.variables import Variable

__all__ = [
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PerWorkerDataset",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "ShardedVariable",
    "Strategy",
    "Uneven",
    "ValueContext",
    "Variable",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "uneven",
]
