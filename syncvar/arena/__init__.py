"""The memory that the processes of one host share: the arena.

One stretch of memory, as large as `arena_bytes` and almost all of it without a page behind it, is mapped whole by every
process of the host. An array's offset in it means the same bytes to everybody, so that a rank can read and write what
another one owns. Each rank takes memory in its own region only, and only pages that have been asked of the system
before are ever touched: a full machine is an error in words, never a signal.

* `layout`: what stands where. Pure.
* `extents`: which bytes of a region are taken, free, or given back. Pure.
* `creating`: makes the memory, in the launcher; no name of it stays anywhere.
* `handing`: hands its descriptor to the workers of this job, and to nobody else.
* `room`: what the container and the machine still have.
* `references`: how one process tells another where bytes lie, and what the other checks before it looks there. Pure.
* `mapping`: a worker's view of it; arrays that live in it.
* `channels`: how the ranks of a group tell each other how far they are, and where their data lie; `channel` is one rank's end.
* `box`: where the messages of one rank to another lie until they are taken; `boxes` makes and finds them.
* `waiting`: how a rank waits for a word of another.

The launcher imports `creating` and `handing`, so these load no NumPy; this file loads nothing for the same reason.
"""
