"""Operations of whole groups: check the arguments, choose a plan, run it.

One file for each collective, by its name; `objects` has those of plain data, and `point_to_point` what goes from one rank to
another. Each public function checks its arguments before anything is sent, and describes the call by a fingerprint that all
ranks must share. What they have in common:

* `_arguments`: arrays and structures out of what the caller gives; `_kinds`: the arrays of other libraries.
* `_headers`: the header round, by which ranks that may bring different shapes tell each other what they bring.
* `_reducing`: what is compared, brought and returned where values are combined. `fused` reduces arrays together, `overlap`
  keeps what one of them reads from what another writes, and `tree_sum` combines in this process alone.
* `flat`: stages that move arrays whose counts all ranks know, of which calls are made. `sync_points`: calls by which ranks meet at
  a point of their programs, with nothing or an object each.
* `_moving`: blocks that ranks which share memory take from each other.
* `_preparing`: which all-reduces are prepared after the first; `agreeing` are small ones that are made again and again.
* `pairs`: what the two ends of a message do; `_mailbox`: what a rank sends to itself.
* `groups`, `mesh` and `uneven`: who takes part.

Arguments have the same names in all these files: `communicator` is the group's; `x`, `op`, `root`, `axis` and `out` are what the
caller gave, and `algorithm` what it forced, or None; `name` is what the ranks compare and messages tell; `how` is the
`Reduction` of an array; `reproducible` sums by the tree; `keep` takes copies now, because the caller may change what it gave
before the call ends.
"""

from __future__ import annotations

from syncvar.collectives.all_gather import all_gather
from syncvar.collectives.all_reduce import all_reduce
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
from syncvar.collectives.tree_sum import tree_sum
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
