"""How a process comes into a job: it finds the others, proves that it belongs, and holds what it is in.

* `process`: what this process is in. It joins with the first call that needs that, leaves with `shutdown`, and lets go where
  it was forked or fails.
* `connecting`: from what tells a process who it is to its `context`, with the sockets, the arena and the keys for it.
* `context`: one process's membership in one generation of a job: the groups it can call, and what it owns for that.
* `roll_call`: a rank tells that it has come, and hears who the others are; `likeness` is what it tells of itself to be compared.
* `meeting`: how processes that syncvar-launch has not started find each other: by `cards` in a folder or of a process
  manager, or by MPI (`mpi_meeting`).
* `store`: where rank 0, or the launcher, keeps the roll. `directory` is a job's private folder, and `secret` what its links
  between hosts are encrypted with.
* `state`: the folder in which evidence of jobs outlives them. `finite`: whether what a rank brings to a call is finite.
"""
