"""Public collectives: each file checks the arguments of one and starts the call.

All collectives have these arguments:

* `group`: The ranks that take part, from `sv.new_group` or `split`. None means the world.
* `async_op`: Return a `Work` at once. You may change the input as soon as the call returns.
* `timeout`: Seconds. None means the default of the job (setting `collective_timeout_s`).
* `algorithm`: An algorithm that `syncvar plan NAME` shows, the same on every rank. None lets
  syncvar choose.

All collectives raise these errors:

* ConfigError: An argument is wrong. The other ranks raise MismatchError. The group stays usable.
* MismatchError: The ranks do not make the same call. The group stays usable.
* PeerLost: A rank has failed.
* DeadlineExceeded: The call did not finish within `timeout`.

Two phrases in the costs mean the same everywhere. "Links" are connections between hosts. "One
direct copy" means that a rank copies a block straight from the memory of another one. Small blocks,
with the C extension all blocks below 4 MiB, take two copies instead: one into shared memory and one
out of it. So do all blocks where a rank may not read the memory of the others.

A collective has a public function and two private ones. The form function returns the input that a
persistent call takes, or None for the slow path. The request function checks the arguments before
anything is sent, and returns a `TransferArgs` or a `ReduceArgs`. `dispatch.make_call` does the
rest.

This package imports all of them at once. A signal handler may make any call, also while another one
is imported.
"""

from __future__ import annotations

from syncvar.collectives.all_reduce import all_reduce
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.gather import all_gather, gather
from syncvar.collectives.groups import Group, Mesh, mesh, new_group
from syncvar.collectives.object_collectives import (
    all_gather_object,
    broadcast_object,
    gather_object,
    scatter_object,
)
from syncvar.collectives.reduce import exscan, reduce, reduce_scatter, scan
from syncvar.collectives.scatter import all_to_all, scatter
from syncvar.collectives.send_recv import recv, recv_object, send, send_object, sendrecv
from syncvar.collectives.sharded_sums import all_reduce_shards, tree_sum
from syncvar.core.reduce_ops import register_op

__all__ = [
    "Group",
    "Mesh",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_shards",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "exscan",
    "gather",
    "gather_object",
    "mesh",
    "new_group",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "register_op",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "tree_sum",
]
