"""Train the network of `syncvar.examples.digits` while workers come and go.

    syncvar-launch --workers 1:4 --max-restarts 4 -m syncvar.examples.elastic_digits --pause 0.05

End workers with `kill -9` while it runs: the others go on, and the workers that the launcher starts
again join them. The last line stays the same, to the bit. The state has the position in the data,
so each epoch reads every row once. A step has 24 micro-shards, and the present workers share them.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np

import syncvar as sv
from syncvar.examples.digits import EPOCHS, MICRO_SHARDS, ROWS, Trainer, load

if TYPE_CHECKING:
    from collections.abc import Sequence


@sv.elastic.run
def train(state: sv.elastic.State, trainer: Trainer, pause_s: float) -> None:
    """Make the steps that are left. Each generation of workers begins here."""
    print(f"worker {sv.rank()} of {sv.world_size()} begins at step {state.step}", flush=True)
    for rows in state.batches:  # global batches: each worker reads all indices
        trainer.strategy.run(trainer.step, args=(rows,))
        state.step += 1
        time.sleep(pause_s)
        state.commit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and test; every worker runs it."""
    parser = argparse.ArgumentParser(prog="syncvar.examples.elastic_digits", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to add to each step")
    chosen = parser.parse_args(arguments)
    data = load()
    trainer = Trainer(data, sv.MultiWorkerMirroredStrategy())
    indices = np.arange(len(data.train_labels))
    size = MICRO_SHARDS * ROWS
    batches = sv.data.from_arrays(
        indices, batch_size=size, shuffle=True, seed=2, drop_remainder=True
    )
    state = sv.elastic.State(
        weights=trainer.weights,
        metrics=[trainer.loss, trainer.right, trainer.seen, trainer.busy_s],
        optimizer=trainer.optimizer,
        batches=iter(batches.repeat(chosen.epochs)),
        step=0,
    )
    train(state, trainer, chosen.pause)
    with trainer.strategy.scope():
        seen = int(trainer.seen)
    if sv.rank() == 0:
        print(f"steps={state.step} rows={seen} weights_sha256={trainer.digest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
