"""Decide whether the replicas' batches of a step fit together, equally on all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.protocol.fixed_records import ARRAY, InputRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_LARGEST = (1 << 64) - 1


class BatchHeader(NamedTuple):
    """One replica's input for a step."""

    has_batch: bool  # whether it has a batch; else its dataset has ended
    rows: int  # rows of the batch
    epoch: int  # epoch that the iterator reads
    position: int  # batches that it has returned before
    kind: int  # digest of the batch's pytree and dtypes, or of the last known one; 0 for none
    content: int = 0  # digest of an iterator's first batch, for global batches; else 0

    def sides(self, *, is_global: bool) -> NDArray[np.uint64]:
        """Return the fields and their complements, for `is_unanimous`.

        `rows` counts for global batches only.
        """
        rows = self.rows if is_global else 0
        values = (int(self.has_batch), rows, self.epoch, self.position, self.kind, self.content)
        return np.array((*values, *(_LARGEST - value for value in values)), np.uint64)

    def record(self) -> InputRecord:
        """Return the header as a record for an exchange."""
        shape = self.rows, self.epoch, self.position, self.content
        return InputRecord(ARRAY, int(self.has_batch), shape, self.kind)

    @staticmethod
    def from_record(record: InputRecord) -> BatchHeader:
        """Return the header in a record."""
        rows, epoch, position, content = record.shape
        return BatchHeader(bool(record.dtype), rows, epoch, position, record.nbytes, content)


class BatchDecision(NamedTuple):
    """What all replicas do in a step."""

    disagreement: str = ""  # why the headers do not fit together; empty if they do
    is_over: bool = False  # whether all datasets have ended
    # replica that describes its batch to replicas without one; None if all know it
    teacher: int | None = None
    differs: bool = False  # whether replicas read different contents of global batches


def is_unanimous(largest: NDArray[Any]) -> bool:
    """Return whether all replicas have equal headers."""
    numbers = largest.tolist()
    half = len(numbers) // 2
    return all(
        high + low == _LARGEST for high, low in zip(numbers[:half], numbers[half:], strict=True)
    )


def verdict(offers: Sequence[BatchHeader], *, is_global: bool) -> BatchDecision:
    """Return what all replicas do; a pure function of the headers of all replicas."""
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
