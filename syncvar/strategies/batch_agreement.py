"""What replicas offer for a step of their input, and what they make of it: the same on all, from the same records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.protocol.fixed_records import ARRAY, InputRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_LARGEST = (1 << 64) - 1


class BatchHeader(NamedTuple):
    """What one replica has for a step.

    Args:
        has_batch: A batch; otherwise its dataset has ended.
        rows: Of the batch.
        epoch: Which the iterator reads.
        position: Batches handed out before.
        kind: Digest of the batch's kind; where the dataset has ended, of the kind that is known, 0 if none is.
        content: Digest of the first batch of an iterator, where batches are the same everywhere; else 0.
    """

    has_batch: bool
    rows: int
    epoch: int
    position: int
    kind: int
    content: int = 0

    def sides(self, *, is_global: bool) -> NDArray[np.uint64]:
        """Return the numbers that are the same in the common case, and their complements.

        The maximum over replicas tells whether they are: `is_unanimous`. Lengths count for global batches only.
        """
        rows = self.rows if is_global else 0
        values = (int(self.has_batch), rows, self.epoch, self.position, self.kind, self.content)
        return np.array((*values, *(_LARGEST - value for value in values)), np.uint64)

    def record(self) -> InputRecord:
        """Return it as a record that can be exchanged."""
        return InputRecord(
            ARRAY,
            int(self.has_batch),
            (self.rows, self.epoch, self.position, self.content),
            self.kind,
        )

    @staticmethod
    def from_record(record: InputRecord) -> BatchHeader:
        """Return the offer in a record."""
        rows, epoch, position, content = record.shape
        return BatchHeader(bool(record.dtype), rows, epoch, position, record.nbytes, content)


class BatchDecision(NamedTuple):
    """What all replicas do with their offers.

    Args:
        disagreement: What does not fit together, in words; empty if all does.
        is_over: All datasets have ended.
        teacher: A replica whose kind of batch others need to be told; None if all know it.
        differs: Replicas read different contents where they should be the same.
    """

    disagreement: str = ""
    is_over: bool = False
    teacher: int | None = None
    differs: bool = False


def is_unanimous(largest: NDArray[Any]) -> bool:
    """Return whether all replicas offer the same.

    Args:
        largest: The elementwise maximum of all replicas' `BatchHeader.sides`.

    Example:
        >>> one, other = BatchHeader(True, 8, 0, 2, kind=7), BatchHeader(True, 8, 0, 3, kind=7)
        >>> is_unanimous(np.maximum(one.sides(is_global=True), other.sides(is_global=True)))
        False
    """
    numbers = largest.tolist()
    half = len(numbers) // 2
    return all(
        high + low == _LARGEST for high, low in zip(numbers[:half], numbers[half:], strict=True)
    )


def verdict(offers: Sequence[BatchHeader], *, is_global: bool) -> BatchDecision:
    """Return what all replicas do, a pure function of what all of them offer.

    Args:
        offers: By replica.
        is_global: All replicas read the same batches and take their part of each.

    Example:
        >>> batch, end = BatchHeader(True, 8, 0, 2, kind=77), BatchHeader(False, 0, 0, 2, kind=0)
        >>> verdict([end, batch], is_global=False)
        BatchDecision(disagreement='', is_over=False, teacher=1, differs=False)
        >>> verdict([end, batch], is_global=True).disagreement
        'the dataset has ended on some replicas and not on others'
    """
    if len({(offer.epoch, offer.position) for offer in offers}) > 1:
        return BatchDecision("the replicas are at different places of their datasets")
    live = [place for place, offer in enumerate(offers) if offer.has_batch]
    if not live:
        return BatchDecision(is_over=True)
    if is_global and len(live) < len(offers):
        return BatchDecision("the dataset has ended on some replicas and not on others")
    kinds = {offers[place].kind for place in live}
    if len(kinds) > 1:
        return BatchDecision("the replicas' batches differ in structure, dtype or shape of a row")
    if is_global and len({offer.rows for offer in offers}) > 1:
        return BatchDecision("the replicas' global batches differ in length")
    needed = any(offer.kind not in kinds for offer in offers)
    differs = is_global and len({offer.content for offer in offers}) > 1
    return BatchDecision(teacher=live[0] if needed else None, differs=differs)
