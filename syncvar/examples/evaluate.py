"""Evaluate a classifier on all of scikit-learn's handwritten digits, exactly, with any number of workers.

    syncvar-launch --workers 3 -m syncvar.examples.evaluate

The 1797 digits are read in batches of 100, so the last batch is short and no number of workers divides them evenly. Every
digit goes to one worker; a worker for which none is left takes part with arrays without rows. The counts are ON_READ
variables: adding to them is local, reading adds the workers' up. So the accuracy is that of one process, to the bit.

Beside it stands what the usual short cut gives, the mean over the workers of each worker's mean over its batches: close,
and wrong, since short batches count as much as full ones.
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
    """What the evaluation found.

    Args:
        accuracy: Share of the digits that are recognised.
        seen: Digits looked at.
        confusion: int64[10, 10], by (digit, what it was taken for).
        mean_distance: Mean distance to the nearest centre, weighted by digit.
        mean_of_means: The mean of the workers' means of their batches' accuracies.
    """

    accuracy: float
    seen: int
    confusion: NDArray[np.int64]
    mean_distance: float
    mean_of_means: float


def load() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the images as rows of 64 numbers, and the digits.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "this example takes its data from scikit-learn: pip install scikit-learn"
        ) from error
    images, digits = load_digits(return_X_y=True)
    return images, digits.astype(np.int64)


def centres_of(images: NDArray[Any], digits: NDArray[Any]) -> NDArray[Any]:
    """Return the mean image of each digit, rounded: the model, a nearest-centre classifier."""
    return np.stack([np.round(images[digits == digit].mean(axis=0)) for digit in range(CLASSES)])


def evaluate(
    strategy: sv.MirroredStrategy,
    images: NDArray[Any],
    digits: NDArray[Any],
    batch_rows: int = BATCH_ROWS,
) -> Scores:
    """Return the scores of the classifier on all images; every worker calls it and gets the same.

    Args:
        strategy: Whose workers share the work.
        images: float64[rows, 64].
        digits: int64[rows].
        batch_rows: Rows of a global batch.
    """
    centres = centres_of(images, digits)
    with strategy.scope():
        right, seen, confusion = (
            sv.Variable(
                np.zeros(shape, np.int64),
                synchronization=SYNCHRONIZATION.ON_READ,
                aggregation=AGGREGATION.SUM,
            )
            for shape in ((), (), (CLASSES, CLASSES))
        )
        own_accuracy = sv.Variable(
            0.0,
            dtype=np.float64,
            synchronization=SYNCHRONIZATION.ON_READ,
            aggregation=AGGREGATION.MEAN,
        )

    def step(batch: dict[str, NDArray[Any]]) -> NDArray[Any]:
        rows, wanted = batch["image"], batch["digit"]
        squares = ((rows[:, None, :] - centres) ** 2).sum(axis=2)
        found = squares.argmin(axis=1)
        right.assign_add(np.sum(found == wanted))
        seen.assign_add(len(wanted))
        counts = np.zeros((CLASSES, CLASSES), np.int64)
        np.add.at(counts, (wanted, found), 1)
        confusion.assign_add(counts)
        if len(wanted):
            own_accuracy.assign_add(np.mean(found == wanted))
        return np.asarray(squares.min(axis=1))

    batches = sv.data.from_arrays(
        {"image": images, "digit": digits}, batch_size=batch_rows
    ).prefetch(2)
    dataset = strategy.experimental_distribute_dataset(batches)
    # A mean with an axis is the total over the number of rows, of all workers together.
    means = [
        (
            float(strategy.reduce("MEAN", distances, axis=0)),
            int(strategy.reduce("SUM", len(distances), axis=None)),
        )
        for distances in (strategy.run(step, args=(batch,)) for batch in dataset)
    ]
    with strategy.scope():  # every worker reads: reading an ON_READ variable adds the copies up
        total = int(seen)
        return Scores(
            accuracy=int(right) / total,
            seen=total,
            confusion=confusion.numpy(),
            mean_distance=sum(mean * rows for mean, rows in means) / total,
            mean_of_means=float(own_accuracy) / len(means),
        )


def main() -> None:
    """Run as one worker."""
    strategy = sv.MirroredStrategy()
    scores = evaluate(strategy, *load())
    if sv.rank() == 0:
        worst = int(np.argmin(scores.confusion.diagonal() / scores.confusion.sum(axis=1)))
        print(f"worst digit: {worst}, taken for {scores.confusion[worst].argsort()[-2]} most often")
        print(f"mean of the workers' means: {scores.mean_of_means:.6f} (not the accuracy)")
        print(
            f"accuracy={scores.accuracy!r} right={int(scores.confusion.trace())} seen={scores.seen} "
            f"workers={strategy.num_replicas_in_sync}",
            flush=True,
        )


if __name__ == "__main__":
    main()
