"""Public collectives: each file checks the arguments of one and starts the call.

All collectives have these arguments:

* `group`: The ranks that take part, from `sv.new_group` or `split`. None means the world.
* `async_op`: Return a `Work` at once. You may change the input as soon as the call returns.
* `timeout`: Seconds. None means the default of the job (setting `collective_timeout_s`).
* `algorithm`: An algorithm that `syncvar plan NAME` shows, the same on every rank. None lets
  syncvar choose.

All collectives raise these errors:

* ConfigError: An argument is wrong. The other ranks raise MismatchError. The group stays usable.
* MismatchError: The ranks do not make the same call. The group stays usable.
* PeerLost: A rank has failed.
* DeadlineExceeded: The call did not finish within `timeout`.

Two phrases in the costs mean the same everywhere. "Links" are connections between hosts; rounds
over links are those of n ranks that are alone on their hosts. Where ranks share a host, n is the
number of hosts, and each byte of a long array crosses once for a host; not so in `scan` and
`exscan`. "One direct copy" means that a rank copies a block straight from the memory of another
one. Small blocks, with the C extension all blocks below 4 MiB, take two copies instead: one into
shared memory and one out of it. So do all blocks where a rank may not read the memory of the
others.

A collective has a public function, which calls `dispatch.make_call`, and the class of its calls: a
`TransferCall` moves blocks, a `ReductionCall` combines arrays. To write a new one, write these:

* `persistent_input` returns the input that a persistent call takes, or None for the slow path.
* `__init__` checks the arguments, before anything is sent, and describes the call by a
  `CollectiveSpec`. With `keep` it copies the input.
* `stages` yields the stages of a `ReductionCall`; `ends` says which ranks get a result.
* `blocks_of` returns the arrays of a `TransferCall` in shared memory, and `finish` makes its
  result. `slow_path` yields the stages over links, or for inputs that differ between ranks.

This package imports all of them at once. A signal handler may make any call, also while another one
is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
