"""How frames get from one rank to another. A transport knows links, memory and failure; it knows no collective.

* `base`: the contract. `syncvar.testing.check_transport` proves it for any transport.
* `zeromq`: unix sockets and tcp. Each rank has one socket that others connect to (`connections`) and one to each peer that it sends to
  (`outgoing`); `sockets` is what all sockets of ZeroMQ have in common, and `addresses` how hosts are reached. `mpi`: frames as messages of MPI. `wakeup` ends the waits of both.
* `memory`: a whole world inside one process, with seeded faults.
* `control`: the channel to the launcher. `curve`: who may connect over tcp; `strangers`: how few of the others may stay.
"""
