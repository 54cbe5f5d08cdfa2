"""Train a small network on scikit-learn's digits on any number of workers, data-parallel.

    syncvar-launch --workers 4 -m syncvar.examples.digits

The weights are ON_WRITE variables: the optimizer combines all gradients in one call, and every
worker holds the same bytes. The metrics are ON_READ variables: writes are local, a read adds the
workers' values. `busy_s` is a NONE variable: each worker has its own value.

Any number of workers ends with the same weights, to the bit. A step always has 24 micro-shards of
the same shape, and each worker computes some of them. `apply_gradients(…, shards=True)` sums them
in the order of their numbers, by one tree.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MICRO_SHARDS = 24  # per step, for any number of workers
ROWS = 5  # per micro-shard
HIDDEN = 64
EPOCHS = 24
LEARNING_RATE = 0.4
TEST_ROWS = 360

SYNCHRONIZATION, AGGREGATION = sv.VariableSynchronization, sv.VariableAggregation


class Data(NamedTuple):
    """Images as rows of 64 numbers in [0, 1], and labels 0 to 9."""

    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]


def load(seed: int = 0) -> Data:
    """Return the digits, shuffled and split in the same way on every worker."""
    try:
        from sklearn.datasets import load_digits
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ImportError(
            "this example uses data of scikit-learn: pip install scikit-learn"
        ) from error
    threadpool_limits(1)  # the number of BLAS threads may change the bits of a matrix product
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return Data(images[TEST_ROWS:], labels[TEST_ROWS:], images[:TEST_ROWS], labels[:TEST_ROWS])


def forward(weights: list[Any], images: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the activations of the hidden layer and the probabilities of the ten digits."""
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(images @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    exps = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, exps / exps.sum(axis=1, keepdims=True)


def gradients(
    weights: list[Any], images: NDArray[Any], labels: NDArray[Any]
) -> tuple[list[NDArray[Any]], float, int]:
    """Return the gradients of a micro-shard's mean loss, its total loss and its right answers."""
    hidden, likely = forward(weights, images)
    rows = np.arange(len(labels))
    loss = float(-np.log(likely[rows, labels]).sum())
    right = int((likely.argmax(axis=1) == labels).sum())
    error = likely.copy()
    error[rows, labels] -= 1
    error /= np.float32(ROWS)
    back = (error @ weights[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)], loss, right


def own_shards(workers: int, rank: int) -> range:
    """Return the micro-shards of a worker; none for some workers if there are more than shards."""
    return range(rank * MICRO_SHARDS // workers, (rank + 1) * MICRO_SHARDS // workers)


class Trainer:
    """One worker's part of the training."""

    def __init__(self, data: Data, strategy: sv.MultiWorkerMirroredStrategy) -> None:
        self.data = data
        self.strategy = strategy
        self.optimizer = sv.optimizers.SGD(LEARNING_RATE)
        draw = np.random.default_rng(1)

        def layer(rows: int, columns: int) -> NDArray[Any]:
            return draw.normal(0, np.sqrt(2 / rows), (rows, columns)).astype(np.float32)

        start = {
            "w1": layer(64, HIDDEN),
            "b1": np.zeros(HIDDEN, np.float32),
            "w2": layer(HIDDEN, 10),
            "b2": np.zeros(10, np.float32),
        }
        with strategy.scope():
            self.weights = [
                sv.Variable(value, name=name, synchronization=SYNCHRONIZATION.ON_WRITE)
                for name, value in start.items()
            ]
            self.loss, self.right, self.seen = (
                sv.Variable(
                    0.0,
                    name=name,
                    dtype=np.float64,
                    synchronization=SYNCHRONIZATION.ON_READ,
                    aggregation=AGGREGATION.SUM,
                )
                for name in ("loss", "right", "seen")
            )
            self.busy_s = sv.Variable(
                0.0, name="busy_s", dtype=np.float64, synchronization=SYNCHRONIZATION.NONE
            )

    def step(self, rows: NDArray[Any]) -> None:
        """Train on one global batch: MICRO_SHARDS * ROWS indices, the same on every worker.

        `strategy.run` calls it, so that it runs in a replica context.
        """
        start = time.perf_counter()
        weights = [weight.read_value() for weight in self.weights]
        parts = {}
        for shard in own_shards(self.strategy.num_replicas_in_sync, sv.rank()):
            mine = rows[shard * ROWS : (shard + 1) * ROWS]
            parts[shard], loss, right = gradients(
                weights, self.data.train_images[mine], self.data.train_labels[mine]
            )
            self.loss.assign_add(loss)
            self.right.assign_add(right)
            self.seen.assign_add(ROWS)
        self.busy_s.assign_add(time.perf_counter() - start)
        # For each weight a dict from micro-shard to gradient, as shards=True expects.
        by_weight = [
            {shard: part[index] for shard, part in parts.items()} for index in range(len(weights))
        ]
        self.optimizer.apply_gradients(zip(by_weight, self.weights, strict=True), shards=True)

    def epoch(self, order: NDArray[Any]) -> tuple[float, float]:
        """Train on all rows in this order; return the mean loss and the training accuracy."""
        size = MICRO_SHARDS * ROWS
        for start in range(0, len(order) - size + 1, size):
            self.strategy.run(self.step, args=(order[start : start + size],))
        with self.strategy.scope():  # the read of an ON_READ variable is a collective
            loss, right, seen = (float(metric) for metric in (self.loss, self.right, self.seen))
            for metric in (self.loss, self.right, self.seen):
                metric.assign(0.0)
        return loss / seen, right / seen

    def test_accuracy(self) -> float:
        """Return the fraction of test digits that are classified correctly."""
        _, likely = forward([weight.read_value() for weight in self.weights], self.data.test_images)
        return float((likely.argmax(axis=1) == self.data.test_labels).mean())

    def digest(self) -> str:
        """Return the SHA-256 of this worker's weights."""
        sha256 = hashlib.sha256()
        for weight in self.weights:
            sha256.update(weight.local_value().tobytes())
        return sha256.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and test; every worker runs it."""
    parser = argparse.ArgumentParser(prog="syncvar.examples.digits", allow_abbrev=False)
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, metavar="N", help=f"passes over the data ({EPOCHS})"
    )
    epochs = parser.parse_args(arguments).epochs
    began = time.perf_counter()
    sv.init()
    strategy = sv.MultiWorkerMirroredStrategy()
    trainer = Trainer(load(), strategy)
    is_chief = sv.rank() == 0
    draw = np.random.default_rng(2)
    for number in range(1, epochs + 1):
        loss, accuracy = trainer.epoch(draw.permutation(len(trainer.data.train_labels)))
        if is_chief:
            progress = f"loss {loss:.4f}  training accuracy {accuracy:.3f}"
            sys.stdout.write(f"\repoch {number:2}/{epochs}  {progress}")
            sys.stdout.flush()
    busy = strategy.gather(np.reshape(trainer.busy_s, (1,)), axis=0)
    if is_chief:
        print("\ncompute seconds of each worker: " + " ".join(f"{seconds:.2f}" for seconds in busy))
        print(f"weights_sha256={trainer.digest()}")
        seconds = time.perf_counter() - began
        workers = strategy.num_replicas_in_sync
        result = f"test_accuracy={trainer.test_accuracy():.3f}"
        print(f"{result} workers={workers} seconds={seconds:.1f}", flush=True)


if __name__ == "__main__":
    main()
