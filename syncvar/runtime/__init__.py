"""The edge where plans meet sockets, threads and clocks.

* `context`: joining and leaving a job; who this process is.
* `engine`: one lock, one driver at a time; deadlines and failure.
* `callbook`: where the calls of each group stand; `flow`: byte credit of the links; `sites`: the user's file and line.
* `asking`: questions outside all calls, for one-sided reads.
* `executor`: runs plans on arrays as resumable operations.
* `group`: call numbers, poison, prepared plans; `work`: the handle of a started call.
* `kernels`: reductions by dtype.
* `store`: the launcher's end (imports no NumPy; the launcher imports it by its own name).
"""
