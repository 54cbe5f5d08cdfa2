"""Servers: variables that live on processes of their own, to which workers push and from which they pull.

Everything that decides is pure here: bytes, arrays and the time go in, messages come out, and no socket, thread or clock is
known. The same classes are driven by the processes of a job and by a simulation in virtual time (`syncvar.testing.Cluster`).

* `messages`: what goes over the wire, and how a message and its arrays become frames.
* `shard`: a part of a variable on one server: how pushes change it, and who may read it when. `rules`: the optimizers' steps.
* `board`: functions that wait for a worker.
* `ledger`: all that one server knows, as a machine that executes entries in order; a mirror executes the same entries.
* `primary`: the order of a worker's requests, transactions over several servers, snapshots, and copies on a mirror.
* `server`: the process: what it holds itself, and what it holds for another server.
* `client`: a worker's side: numbers, resending, answers. `session`: waiting for them, for programs with threads.
* `asking`: requests, put together. `local`: servers inside this process.

How it is bound to processes: a server process makes one `Server`, a worker one `Session` (which has a `Client`). Whoever moves
bytes calls `Server.handle(sender, message, arrays, now)` or `Session.received(...)` for each message that came, sends every
`Outgoing` of the list it gets back to its `target` (`frames_of` makes the frames, `message_of` reads them), and calls
`wake(now)` at the latest at `wake_at()`. Who watches processes calls `worker_lost` and `server_lost` on every server that
lives, and `server_lost` on every session; which server takes the place of a lost one all compute alike from `mirrors`.

Promises: a push is applied once, however often its message comes, and survives what its answer survived; one worker's requests
are executed in its order; a transaction over several servers is applied on all of them or on none, also when its worker dies.
"""
