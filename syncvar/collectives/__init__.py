"""Operations of whole groups: check the arguments, choose a plan, run it.

One file for each collective. Each public function checks its arguments before anything is sent, and describes the
call by a fingerprint that all ranks must share.
"""

from __future__ import annotations

from syncvar.collectives.all_gather import all_gather
from syncvar.collectives.all_reduce import all_reduce, tree_sum
from syncvar.collectives.barrier import barrier
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.groups import Group, communicator_of, new_group
from syncvar.collectives.objects import all_gather_object, broadcast_object, gather_object, scatter_object

__all__ = [
    "Group",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "communicator_of",
    "gather_object",
    "new_group",
    "scatter_object",
    "tree_sum",
]
