"""A run that can be stopped at any moment, and goes on as if nothing had happened.

    syncvar-launch --workers 4 -m syncvar.examples.resume runs/first

Every 50 steps a checkpoint is saved beside the computation. SIGTERM (from you, or from a scheduler that wants the machine back)
is taken as a notice: all workers agree on one step, save it, and the job ends with exit code 75, "run me again". Killed or stopped,
run the same line again: weights, the optimizer's moments, the place in the data and each worker's random numbers go on where they were,
and the last line is the same to the bit as that of a run that was left alone (with the same number of workers). With
`--max-restarts 3` syncvar-launch runs it again by itself when a worker is lost.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import numpy as np

import syncvar as sv

ROWS, FEATURES, BATCH = 2048, 32, 128
SAVE_EVERY = 50
NOISE = (
    0.05  # deviation of each worker's own noise on the rows: other random numbers, another result
)


def main() -> None:
    """Train, from the latest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        help="seconds of a step, as if there were more to compute",
    )
    chosen = parser.parse_args()

    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES))
    data = {"x": x, "y": x @ rng.standard_normal(FEATURES)}
    strategy = sv.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.zeros(FEATURES), name="w", aggregation=sv.VariableAggregation.MEAN)
    optimizer = sv.optimizers.Adam(0.02)
    own = np.random.default_rng(sv.rank())
    dataset = sv.data.from_arrays(data, batch_size=BATCH, shuffle=True, seed=1).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    def step() -> None:
        batch = next(batches)
        rows = batch["x"] + NOISE * own.standard_normal(batch["x"].shape)
        error = rows @ w.read_value() - batch["y"]
        optimizer.apply_gradients([(rows.T @ error / len(error), w)])

    checkpoint = sv.Checkpoint(w=w, optimizer=optimizer, own=own, batches=batches, step=0)
    with sv.CheckpointManager(checkpoint, chosen.directory, keep=3, on_preemption=True) as manager:
        if manager.restore_latest() is not None and sv.rank() == 0:
            print(f"goes on after step {checkpoint.step}", flush=True)
        while checkpoint.step < chosen.steps:
            strategy.run(step)
            checkpoint.step += 1
            time.sleep(chosen.pause)
            if manager.should_stop():
                manager.stop(checkpoint.step)
            if checkpoint.step % SAVE_EVERY == 0:
                manager.save(checkpoint.step, async_op=True)  # should_stop commits it
        manager.save(checkpoint.step)
    if sv.rank() == 0:
        print(
            f"steps={checkpoint.step} weights_sha256={hashlib.sha256(w.numpy().tobytes()).hexdigest()[:16]}"
        )


if __name__ == "__main__":
    main()
