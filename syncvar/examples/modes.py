"""Compare the four synchronization modes: each worker counts events, and worker r counts r + 1.

syncvar-launch --workers 4 -m syncvar.examples.modes
"""

from __future__ import annotations

import syncvar as sv

SYNCHRONIZATION, AGGREGATION = sv.VariableSynchronization, sv.VariableAggregation


def main() -> None:
    """Count in all modes and print the counters; every worker runs it."""
    modes = (
        SYNCHRONIZATION.ON_WRITE,
        SYNCHRONIZATION.ON_READ,
        SYNCHRONIZATION.NONE,
        SYNCHRONIZATION.AUTO,
    )
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        counters = [
            sv.Variable(
                0, name=f"events_{mode.name}", synchronization=mode, aggregation=AGGREGATION.SUM
            )
            for mode in modes
        ]

    def step() -> None:
        seen = sv.rank() + 1
        for counter in counters:
            counter.assign_add(seen)

    for _ in range(10):
        strategy.run(step)

    # Every worker reads, not only the one that prints: the read of ON_READ is a collective.
    rows = [(counter, int(counter.local_value()), int(counter)) for counter in counters]
    if sv.rank() == 0:
        print(f"{'mode':<10} {'copy of worker 0':>16} {'value':>6}  how it works")
        for counter, local, value in rows:
            text = {
                SYNCHRONIZATION.ON_WRITE: "a write is an all-reduce, a read is local",
                SYNCHRONIZATION.ON_READ: "a write is local, a read adds the workers' copies",
                SYNCHRONIZATION.NONE: "no messages: each worker has its own count",
                SYNCHRONIZATION.AUTO: f"chooses: {counter.explain().mode}",
            }[counter.requested_synchronization]
            print(f"{counter.requested_synchronization.name:<10} {local:>16} {value:>6}  {text}")


if __name__ == "__main__":
    main()
