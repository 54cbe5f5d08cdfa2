"""A training run that you can stop at any time and resume with the same result, to the bit.

    syncvar-launch --workers 4 -m syncvar.examples.resume runs/first

Every 50 steps it saves a checkpoint in the background. At SIGTERM, from you or from a scheduler,
all workers agree on a step and save it. Then the job ends with exit code 75, "run me again".

To resume after a stop or a failure, run the same command again. Weights, optimizer state, position
in the data and each worker's random generator continue from the checkpoint. With the same number of
workers the last line equals that of an uninterrupted run. With `--max-restarts 3` syncvar-launch
restarts the job by itself when a worker fails.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import numpy as np

import syncvar as sv

ROWS, FEATURES, BATCH = 2048, 32, 128
SAVE_EVERY = 50
NOISE = 0.05  # deviation of each worker's own noise on the rows, from its own random generator


def main() -> None:
    """Train, from the latest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("directory", help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to add to each step, to simulate work"
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
            print(f"continues after step {checkpoint.step}", flush=True)
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
        sha256 = hashlib.sha256(w.numpy().tobytes()).hexdigest()
        print(f"steps={checkpoint.step} weights_sha256={sha256[:16]}")


if __name__ == "__main__":
    main()
