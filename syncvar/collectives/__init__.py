"""Operations of whole groups: check the arguments, choose a plan, run it.

One file for each collective. Each public function checks its arguments before anything is sent, and describes the
call by a fingerprint that all ranks must share.
"""

from __future__ import annotations

from syncvar.collectives.all_gather import all_gather
from syncvar.collectives.all_reduce import all_reduce, tree_sum
from syncvar.collectives.all_reduce_shards import all_reduce_shards
from syncvar.collectives.all_to_all import all_to_all
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.gather import gather
from syncvar.collectives.groups import Group, communicator_of, new_group
from syncvar.collectives.mesh import Mesh, mesh
from syncvar.collectives.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from syncvar.collectives.point_to_point import recv, recv_object, send, send_object
from syncvar.collectives.reduce import reduce
from syncvar.collectives.reduce_scatter import reduce_scatter
from syncvar.collectives.scan import exscan, scan
from syncvar.collectives.scatter import scatter
from syncvar.collectives.shared_array import shared_array
from syncvar.execution.kernels import register_op

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
    "communicator_of",
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
    "shared_array",
    "tree_sum",
]
