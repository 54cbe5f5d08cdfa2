"""Train a small network on scikit-learn's handwritten digits, data-parallel over any number of workers.

    syncvar-launch --workers 4 -m syncvar.examples.digits

The weights are ON_WRITE variables: the optimizer combines all gradients in one call, and every worker holds the same
bytes. The metrics are ON_READ variables: counting is local, reading adds up. `busy_s` is a NONE variable: each worker's
own, never sent.

Any number of workers ends with the same weights, to the bit: a step always has 24 micro-shards of the same shape, each
worker takes its share of them, and `apply_gradients(…, shards=True)` sums them by one tree over their numbers.
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

MICRO_SHARDS = 24  # of every step, whatever the number of workers
ROWS = 5  # of a micro-shard
HIDDEN = 64
EPOCHS = 24
LEARNING_RATE = 0.4
TEST_ROWS = 360

SYNCHRONIZATION, AGGREGATION = sv.VariableSynchronization, sv.VariableAggregation


class Data(NamedTuple):
    """Images as rows of 64 numbers in [0, 1], labels as 0 to 9."""

    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]


def load(seed: int = 0) -> Data:
    """Return the digits, shuffled and split the same way on every worker.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ImportError(
            "this example takes its data from scikit-learn: pip install scikit-learn"
        ) from error
    threadpool_limits(1)  # the bits of a matrix product may depend on the number of BLAS threads
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return Data(images[TEST_ROWS:], labels[TEST_ROWS:], images[:TEST_ROWS], labels[:TEST_ROWS])


def forward(weights: list[Any], images: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the hidden layer and the probabilities of the ten digits."""
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(images @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    exps = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, exps / exps.sum(axis=1, keepdims=True)


def gradients(
    weights: list[Any], images: NDArray[Any], labels: NDArray[Any]
) -> tuple[list[NDArray[Any]], float, int]:
    """Return the gradients of one micro-shard's mean loss, its summed loss, and how many digits it had right."""
    hidden, likely = forward(weights, images)
    rows = np.arange(len(labels))
    loss, right = (
        float(-np.log(likely[rows, labels]).sum()),
        int((likely.argmax(axis=1) == labels).sum()),
    )
    error = likely.copy()
    error[rows, labels] -= 1
    error /= np.float32(ROWS)
    back = (error @ weights[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)], loss, right


def own_shards(workers: int, rank: int) -> range:
    """Return the micro-shards of one worker: its share, neighbours; none for some where there are more workers."""
    return range(rank * MICRO_SHARDS // workers, (rank + 1) * MICRO_SHARDS // workers)


class Trainer:
    """One worker's part of the training.

    Args:
        data: The digits.
        strategy: Over any number of workers.
    """

    def __init__(self, data: Data, strategy: sv.MultiWorkerMirroredStrategy) -> None:
        self.data = data
        self.strategy = strategy
        self.own_shards = own_shards(strategy.num_replicas_in_sync, sv.rank())
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
        """Train on one global batch; runs in replica context.

        Args:
            rows: MICRO_SHARDS * ROWS indices, the same on every worker.
        """
        start = time.perf_counter()
        weights = [weight.read_value() for weight in self.weights]
        parts = {}
        for shard in self.own_shards:
            mine = rows[shard * ROWS : (shard + 1) * ROWS]
            parts[shard], loss, right = gradients(
                weights, self.data.train_images[mine], self.data.train_labels[mine]
            )
            self.loss.assign_add(loss)
            self.right.assign_add(right)
            self.seen.assign_add(ROWS)
        self.busy_s.assign_add(time.perf_counter() - start)
        by_weight = [
            {shard: part[place] for shard, part in parts.items()} for place in range(len(weights))
        ]
        self.optimizer.apply_gradients(zip(by_weight, self.weights, strict=True), shards=True)

    def epoch(self, order: NDArray[Any]) -> tuple[float, float]:
        """Train on all rows in this order; return mean loss and accuracy while training."""
        size = MICRO_SHARDS * ROWS
        for start in range(0, len(order) - size + 1, size):
            self.strategy.run(self.step, args=(order[start : start + size],))
        with (
            self.strategy.scope()
        ):  # every worker reads: reading an ON_READ variable adds the copies up
            loss, right, seen = (float(metric) for metric in (self.loss, self.right, self.seen))
            for metric in (self.loss, self.right, self.seen):
                metric.assign(0.0)
        return loss / seen, right / seen

    def test_accuracy(self) -> float:
        """Return the share of the test digits that are recognised."""
        _, likely = forward([weight.read_value() for weight in self.weights], self.data.test_images)
        return float((likely.argmax(axis=1) == self.data.test_labels).mean())

    def digest(self) -> str:
        """Return the SHA-256 of this worker's weights."""
        made = hashlib.sha256()
        for weight in self.weights:
            made.update(weight.local_value().tobytes())
        return made.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as one worker."""
    parser = argparse.ArgumentParser(prog="syncvar.examples.digits", allow_abbrev=False)
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, metavar="N", help=f"rounds over all digits ({EPOCHS})"
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
            sys.stdout.write(
                f"\repoch {number:2}/{epochs}  loss {loss:.4f}  training accuracy {accuracy:.3f}"
            )
            sys.stdout.flush()
    busy = strategy.gather(np.reshape(trainer.busy_s, (1,)), axis=0)
    if is_chief:
        print("\nseconds of computing by worker: " + " ".join(f"{seconds:.2f}" for seconds in busy))
        print(f"weights_sha256={trainer.digest()}")
        seconds = time.perf_counter() - began
        print(
            f"test_accuracy={trainer.test_accuracy():.3f} workers={strategy.num_replicas_in_sync} seconds={seconds:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
