"""The checkpoint folders of a manager's directory, in the order of saving, and which to keep.

Each manifest has the sequence number of its save. Times of files would not do: clocks of hosts
differ, and copies get new times.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from syncvar.checkpoint.file_names import MANIFEST, step_name, step_of
from syncvar.checkpoint.folder import CheckpointFolder
from syncvar.checkpoint.shard_reader import fault_of, read_manifest
from syncvar.core.errors import CheckpointError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

_Signature = tuple[int, int, int]  # inode, time and size of a manifest; every save changes it


class RetainedCheckpoint(NamedTuple):
    """A committed checkpoint of a manager's directory.

    Args:
        step: Step of the program.
        metric: Quality, or None.
        number: Sequence number of the save in the directory; 0 if the manifest has none.
        is_whole: Whether no damage is known.
    """

    step: int
    metric: float | None = None
    number: int = 0
    is_whole: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the order of saving; checkpoints without a number are ordered by step."""
        return self.number, self.step


def best_of(kept: Sequence[RetainedCheckpoint], best: str | None) -> RetainedCheckpoint | None:
    """Return the checkpoint with the best metric, the latest of equals; None without metrics."""
    if best is None:
        return None
    sign = 1.0 if best == "max" else -1.0
    rated = [
        (sign * one.metric, one)
        for one in kept
        if one.metric is not None and not math.isnan(one.metric)
    ]
    return max(rated, key=lambda pair: (pair[0], pair[1].order))[1] if rated else None


def removable(
    kept: Sequence[RetainedCheckpoint], keep: int | None, best: str | None
) -> list[RetainedCheckpoint]:
    """Return the checkpoints to remove, oldest first: all but the `keep` latest and the best.

    A damaged checkpoint does not count; it goes when it is older than all that stay.
    """
    ordered = sorted(kept, key=lambda one: one.order)
    whole = [index for index, one in enumerate(ordered) if one.is_whole]
    if keep is None or len(whole) <= keep:
        return []
    winner = best_of(ordered, best)
    return [one for one in ordered[: whole[-keep]] if one is not winner]


class StepFolders:
    """The folders `step-…` of a directory, which need not exist."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._read: dict[int, tuple[_Signature, RetainedCheckpoint | None]] = {}

    def path(self, step: int) -> str:
        """Return the folder of a step."""
        return os.path.join(self.directory, step_name(step))

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, in ascending order."""
        return sorted(self._signatures())

    def _signatures(self) -> dict[int, _Signature]:
        found: dict[int, _Signature] = {}
        try:
            names = os.listdir(self.directory)
        except OSError:
            return found
        for name in names:
            step = step_of(name)
            if step is None:
                continue
            try:
                about = os.lstat(os.path.join(self.directory, name, MANIFEST))
            except OSError:
                continue
            found[step] = about.st_ino, about.st_mtime_ns, about.st_size
        return found

    def committed(self) -> list[RetainedCheckpoint]:
        """Return the committed checkpoints in the order of saving; each manifest is read once.

        An unreadable manifest has no known number: its checkpoint sorts behind the step below it.
        """
        signatures = self._signatures()
        self._read = {step: one for step, one in self._read.items() if step in signatures}
        found: list[RetainedCheckpoint] = []
        for step, signature in sorted(signatures.items()):
            if step not in self._read or self._read[step][0] != signature:
                self._read[step] = signature, self._look_at(step)
            kept = self._read[step][1]
            if kept is None:
                number = found[-1].number if found else 0
                kept = RetainedCheckpoint(step, None, number, is_whole=False)
            found.append(kept)
        return sorted(found, key=lambda one: one.order)

    def _look_at(self, step: int) -> RetainedCheckpoint | None:
        try:
            with CheckpointFolder(self.path(step)) as folder:
                label = read_manifest(folder).label
        except CheckpointError:
            return None
        return RetainedCheckpoint(step, label.metric, label.number)

    def forget(self, step: int) -> None:
        """Read the manifest of a step again: this process has just replaced it."""
        self._read.pop(step, None)

    def next_number(self) -> int:
        """Return a number above that of every checkpoint here."""
        committed = self.committed()
        unknown = sum(not one.is_whole for one in committed)
        return max([one.number for one in committed], default=0) + unknown + 1

    def latest(self) -> tuple[str | None, list[str]]:
        """Return the path of the latest complete save, and faults of those that may be later."""
        faults: list[str] = []
        for kept in self.committed():
            if not kept.is_whole:
                self._check(kept, faults)
        for kept in reversed(self.committed()):
            if kept.is_whole and self._check(kept, faults):
                return self.path(kept.step), faults
        return None, faults

    def _check(self, kept: RetainedCheckpoint, faults: list[str]) -> bool:
        """Return whether a checkpoint is complete, and cache that; append its fault if not."""
        try:
            fault = fault_of(self.path(kept.step))
        except NotFound:  # another job has just removed it
            return False
        if fault:
            faults.append(fault)
            signature = self._read[kept.step][0]
            self._read[kept.step] = signature, kept._replace(is_whole=False)
        elif not kept.is_whole:  # it has been repaired meanwhile
            self.forget(kept.step)
        return not fault
