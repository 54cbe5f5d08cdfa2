"""Evaluate a classifier on all of scikit-learn's digits exactly, on any number of workers.

    syncvar-launch --workers 3 -m syncvar.examples.evaluate

The 1797 digits come in batches of 100, so the last batch is short, and most numbers of workers do
not divide the batches evenly. Each digit goes to exactly one worker. A worker without a digit of a
batch takes part with empty arrays. The counts are ON_READ variables: writes are local, and a read
adds the workers' values. So the accuracy equals that of one process, to the bit.

For comparison the program prints the mean of the workers' means over their batches. It is close to
the accuracy but wrong, because it weighs short batches like full ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH_ROWS = 100
CLASSES = 10

SYNCHRONIZATION, AGGREGATION = sv.VariableSynchronization, sv.VariableAggregation


class Scores(NamedTuple):
    """Result of the evaluation.

    Args:
        accuracy: Fraction of digits that are classified correctly.
        seen: Number of digits.
        confusion: Counts, int64[10, 10], by (digit, predicted digit).
        mean_distance: Mean distance to the nearest centre, over all digits.
        mean_of_means: Mean of the workers' means of their batches' accuracies.
    """

    accuracy: float
    seen: int
    confusion: NDArray[np.int64]
    mean_distance: float
    mean_of_means: float


def load() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the images as rows of 64 numbers, and the digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "this example uses data of scikit-learn: pip install scikit-learn"
        ) from error
    images, digits = load_digits(return_X_y=True)
    return images, digits.astype(np.int64)


def centres_of(images: NDArray[Any], digits: NDArray[Any]) -> NDArray[Any]:
    """Return the model of a nearest-centre classifier: the mean image of each digit, rounded."""
    return np.stack([np.round(images[digits == digit].mean(axis=0)) for digit in range(CLASSES)])


def evaluate(
    strategy: sv.MirroredStrategy,
    images: NDArray[Any],
    digits: NDArray[Any],
    batch_rows: int = BATCH_ROWS,
) -> Scores:
    """Evaluate the classifier on all images; every worker calls it and returns the same scores.

    Args:
        strategy: Strategy over the workers that share the work.
        images: Images, float64[rows, 64].
        digits: Digits, int64[rows].
        batch_rows: Rows of a global batch.
    """
    centres = centres_of(images, digits)
    on_read, total, mean = SYNCHRONIZATION.ON_READ, AGGREGATION.SUM, AGGREGATION.MEAN
    with strategy.scope():
        right, seen, confusion = (
            sv.Variable(np.zeros(shape, np.int64), synchronization=on_read, aggregation=total)
            for shape in ((), (), (CLASSES, CLASSES))
        )
        own_accuracy = sv.Variable(0.0, dtype=np.float64, synchronization=on_read, aggregation=mean)

    def step(batch: dict[str, NDArray[Any]]) -> NDArray[Any]:
        rows, expected = batch["image"], batch["digit"]
        squares = ((rows[:, None, :] - centres) ** 2).sum(axis=2)
        predicted = squares.argmin(axis=1)
        right.assign_add(np.sum(predicted == expected))
        seen.assign_add(len(expected))
        counts = np.zeros((CLASSES, CLASSES), np.int64)
        np.add.at(counts, (expected, predicted), 1)
        confusion.assign_add(counts)
        if len(expected):
            own_accuracy.assign_add(np.mean(predicted == expected))
        return np.asarray(squares.min(axis=1))

    batches = sv.data.from_arrays({"image": images, "digit": digits}, batch_size=batch_rows)
    means = []
    for batch in strategy.experimental_distribute_dataset(batches.prefetch(2)):
        distances = strategy.run(step, args=(batch,))
        # With axis=0 the mean is over the rows of all workers, not over workers.
        distance = float(strategy.reduce("MEAN", distances, axis=0))
        means.append((distance, int(strategy.reduce("SUM", len(distances), axis=None))))
    with strategy.scope():  # every worker reads, because the read of ON_READ is a collective
        count = int(seen)
        return Scores(
            accuracy=int(right) / count,
            seen=count,
            confusion=confusion.numpy(),
            mean_distance=sum(distance * rows for distance, rows in means) / count,
            mean_of_means=float(own_accuracy) / len(means),
        )


def main() -> None:
    """Evaluate and print the scores; every worker runs it."""
    strategy = sv.MirroredStrategy()
    scores = evaluate(strategy, *load())
    if sv.rank() == 0:
        worst = int(np.argmin(scores.confusion.diagonal() / scores.confusion.sum(axis=1)))
        mistake = scores.confusion[worst].argsort()[-2]
        print(f"worst digit: {worst}, most often classified as {mistake}")
        print(f"mean of the workers' means: {scores.mean_of_means:.6f} (not the accuracy)")
        right = int(scores.confusion.trace())
        workers = strategy.num_replicas_in_sync
        print(
            f"accuracy={scores.accuracy!r} right={right} seen={scores.seen} workers={workers}",
            flush=True,
        )


if __name__ == "__main__":
    main()
