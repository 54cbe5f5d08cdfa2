"""Draw how fast jobs start beside mpirun and torchrun, for docs/benchmarks.md."""

import speed

MPIRUN = "launch of 4 workers{}, against the faster mpirun"
HOSTS = "launch over 2 hosts x 2 workers{}, against Open MPI"
SPAWN = ", --start-method spawn"
CASES = {
    "one host, beside torchrun": "launch of 4 workers, against torchrun",
    "one host, beside mpirun": MPIRUN.format(""),
    "one host, spawn, beside mpirun": MPIRUN.format(SPAWN),
    "two hosts, beside mpirun": HOSTS.format(""),
    "two hosts, spawn, beside mpirun": HOSTS.format(SPAWN),
}


def draw():
    """Return the picture of the whole command of 4 workers."""
    rows = [(words, 1 / speed.value_of(what)) for words, what in CASES.items()]
    return speed.bars("Start and end of 4 workers: the peer's time / syncvar's", rows)
