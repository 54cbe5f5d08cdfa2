"""How a process comes into a job: it finds the others, proves that it belongs, and holds what it is in.

* `process`: what this process is in. It joins with the first call that needs that, leaves with `shutdown`, and lets go where
  it was forked or fails.
* `connecting`: from what tells a process who it is to its `context`, with the sockets, the arena and the keys for it.
* `context`: one process's membership in one generation of a job: the groups it can call, and what it owns for that.
* `roll_call`: a rank tells that it has come and what has to be alike in all, and hears who the others are. `store`: where the
  launcher, or rank 0, keeps the roll.
* `meeting`: how processes that syncvar-launch has not started find each other: at an address that is told, or by `cards` in a
  folder, of a process manager or of MPI (`mpi_meeting`). `host`: what the first of each host then serves, in the launcher's place.
* `directory`: a job's private folder. `secret`: what protects its links between hosts.
"""
