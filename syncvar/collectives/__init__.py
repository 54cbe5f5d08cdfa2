"""Operations of whole groups: check the arguments, choose a plan, run it.

One file for each collective, by its name; `objects` has those of plain data, and `point_to_point` what goes from one rank to
another. A file has the public signature, and:

* `_form`: what is prepared of the call, an array as a rule, or None where the call has to be made generally;
* `_request`: checks the arguments before anything is sent, and returns the request: the call in words, a fingerprint that all ranks
  must share, and what moves or combines. A `Moving` or a `Reducing` request also knows how its like are prepared.

Everything else that public calls have in common is done by `calls.make_call`: the group, the persistent call, calls that are started,
arrays of other libraries (`library_arrays`), errors that tell the others. What requests are made of:

* `moving`: blocks that ranks which share memory take from each other.
* `reducing`: what is compared, brought and returned where values are combined. `fused` reduces arrays together, and `tree_sum`
  combines in this process alone.
* `flat`: stages that move arrays whose counts all ranks know, and the header round. `sync_points`: calls by which ranks meet at a
  point of their programs, with nothing or an object each.
* `pairs`: what the two ends of a message do; `mailbox`: what a rank sends to itself.
* `groups` and `mesh`: who takes part. `finite`: whether what a rank brings is finite.

All collectives have these arguments:

* `group`: the ranks that take part; None means the world.
* `async_op`: return a `Work` at once. What is given is taken when the call is made, and may be changed after that.
* `timeout`: seconds; None means the job's default.
* `algorithm`: force one of those that `syncvar plan NAME` shows; the same on every rank.

And all raise these errors:

* ConfigError: an argument is wrong. The other ranks raise MismatchError, and the group stays usable.
* MismatchError: the ranks do not make the same call. The group stays usable.
* PeerLost: a rank is gone.
* DeadlineExceeded: the call did not finish in time.

Inside, arguments have the same names in all these files: `communicator` is the group's; `x`, `op`, `root`, `axis` and `out` are what
the caller gave; `name` is what the ranks compare and messages tell; `how` is the `Reduction` of an array; `reproducible` sums by the
tree; `keep` takes copies now, because the caller may change what it gave before the call ends.
"""

from __future__ import annotations

from syncvar.collectives.all_gather import all_gather
from syncvar.collectives.all_reduce import all_reduce
from syncvar.collectives.all_to_all import all_to_all
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.gather import gather
from syncvar.collectives.groups import Group, new_group
from syncvar.collectives.mesh import Mesh, mesh
from syncvar.collectives.object_collectives import (
    all_gather_object,
    broadcast_object,
    gather_object,
    scatter_object,
)
from syncvar.collectives.reduce import reduce
from syncvar.collectives.reduce_scatter import reduce_scatter
from syncvar.collectives.scan import exscan, scan
from syncvar.collectives.scatter import scatter
from syncvar.collectives.send_recv import recv, recv_object, send, send_object, sendrecv
from syncvar.collectives.sharded_all_reduce import all_reduce_shards
from syncvar.collectives.tree_sum import tree_sum
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
