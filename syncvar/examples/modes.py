"""The four synchronization modes side by side: every worker counts events, worker r counts r + 1 of them.

syncvar-launch --workers 4 -m syncvar.examples.modes
"""

from __future__ import annotations

import syncvar as sv

SYNCHRONIZATION, AGGREGATION = sv.VariableSynchronization, sv.VariableAggregation


def main() -> None:
    """Run as one worker."""
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

    # Reading ON_READ adds the copies up, so every worker reads, not only the one that prints.
    rows = [(counter, int(counter.local_value()), int(counter)) for counter in counters]
    if sv.rank() == 0:
        print(f"{'mode':<10} {'copy of worker 0':>16} {'value':>6}  how")
        for counter, mine, value in rows:
            how = {
                SYNCHRONIZATION.ON_WRITE: "every write is an all-reduce; reading is free",
                SYNCHRONIZATION.ON_READ: "writing is free; reading adds the copies up",
                SYNCHRONIZATION.NONE: "never a message: each worker's own count",
                SYNCHRONIZATION.AUTO: f"decides: {counter.explain().mode}",
            }[counter.requested_synchronization]
            print(f"{counter.requested_synchronization.name:<10} {mine:>16} {value:>6}  {how}")


if __name__ == "__main__":
    main()
