"""Reads checkpoints, and lists those in the directory of a manager.

The reader checks every length before it allocates, and the digest of every byte that it uses.
`StepFolders` orders the checkpoints by the sequence number that each manifest has. Times of files
would not do: clocks of hosts differ, and copies get new times.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from syncvar.checkpoint.checkpoint_format import (
    CODES,
    DIGEST_BYTES,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    Tensor,
    digest_of,
    header_length,
    is_left_over,
    itemsize_of,
    parse_header,
    step_name,
    step_of,
    stored_shape,
)
from syncvar.checkpoint.folder import CheckpointFolder, read_into
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import CheckpointError, Corrupt, NotFound
from syncvar.core.progress_line import ProgressLine, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.checkpoint.checkpoint_format import Piece, Stored

_TRIES = 3
_CHUNK = 1 << 20  # bytes whose digest is computed while they are in the cache
_Signature = tuple[int, int, int]  # inode, time and size of a manifest; every save changes it


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, also of dtypes without the buffer protocol."""
    return array.reshape(-1).view(np.uint8).data


def read_manifest(folder: CheckpointFolder) -> Manifest:
    """Return the manifest of a folder."""
    try:
        data = folder.read(MANIFEST, MANIFEST_BYTES_MAX)
    except NotFound:
        has_rest = any(is_left_over(name, None) for name in folder.names())
        note = " (it has files of an unfinished save)" if has_rest else ""
        raise NotFound(
            f"there is no checkpoint at {folder.path}: it has no {MANIFEST}{note}"
        ) from None
    try:
        return Manifest.from_bytes(data)
    except Corrupt as error:
        where = f"the manifest of the checkpoint {folder.path}"
        raise Corrupt(where, error.expected, error.actual) from None
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint {folder.path} cannot be read: {error}") from None


def fault_of(path: str) -> str:
    """Return why a checkpoint cannot be restored, "" if it can; raise NotFound if there is none.

    It reads the manifest and compares the lengths of the files, not their bytes.
    """
    fault = ""
    for _ in range(_TRIES):
        try:
            with CheckpointReader(path) as source:
                fault = source.file_fault()
                if not fault or not source.was_replaced():
                    return fault
        except NotFound:
            raise
        except CheckpointError as error:
            return str(error)
    return fault


class CheckpointReader:
    """An open checkpoint; a context manager."""

    def __init__(self, path: str, line: ProgressLine | None = None) -> None:
        self._line = line or ProgressLine(None)  # shows how many bytes have been read
        self._nbytes = 0  # read so far
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(CheckpointFolder(path))
        try:
            self.manifest = read_manifest(self._folder)
        except BaseException:
            self._stack.close()
            raise
        self._shards: dict[int, tuple[int, int, dict[str, Tensor]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def was_replaced(self) -> bool:
        """Return whether another checkpoint has been committed in the folder meanwhile."""
        try:
            return read_manifest(self._folder).identity != self.manifest.identity
        except CheckpointError:
            return False

    def file_fault(self) -> str:
        """Return which file is missing or has a wrong length, "" if none."""
        for rank, shard in self.manifest.shards.items():
            file = self.manifest.shard_file(rank)
            nbytes = self._folder.nbytes_of(file)
            if nbytes is None:
                return f"the checkpoint {self._folder.path} has no regular file {file}"
            if nbytes != shard.nbytes:
                return f"{self._folder.path}/{file} has {nbytes} bytes instead of {shard.nbytes}"
        return ""

    def array(self, key: str, stored: Stored) -> NDArray[Any]:
        """Return an array of the checkpoint."""
        for piece in stored.pieces:  # before memory is allocated
            self._tensor(key, stored, piece)
        dtype = dtype_from_index(DTYPE_NAMES.index(stored.dtype))
        array: NDArray[Any] = np.empty(stored.shape, dtype)
        target = bytes_of(array)
        size = itemsize_of(stored.dtype)
        for piece in stored.pieces:
            descriptor, data_start, tensors = self._shards[piece.shard]
            part = target[piece.start * size : piece.stop * size]
            file = self.manifest.shard_file(piece.shard)
            try:
                actual = self._read(descriptor, part, data_start + tensors[key].start, file)
            except OSError as error:
                raise CheckpointError(
                    f"{self._folder.path}/{file} cannot be read: {error.strerror}"
                ) from error
            if actual != piece.digest:
                detail = f"elements {piece.start} to {piece.stop} in {file}"
                raise Corrupt(key, piece.digest, actual, detail)
        return array

    def _read(self, descriptor: int, part: memoryview, offset: int, file: str) -> str:
        """Read bytes from a shard; return their digest."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for start in range(0, part.nbytes, _CHUNK):
            if self._line.is_due():
                total = sum(one.nbytes for one in self.manifest.shards.values())
                size = size_text(self._nbytes + start, total)
                self._line.show(f"restoring {self._folder.path}: {size}")
            chunk = part[start : start + _CHUNK]
            read_into(descriptor, chunk, offset + start, file)
            digest.update(chunk)
        self._nbytes += part.nbytes
        return digest.hexdigest()

    def _tensor(self, key: str, stored: Stored, piece: Piece) -> None:
        """Check that a shard has a piece, of the right length."""
        tensors = self._shard(piece.shard)[2]
        count, code = piece.stop - piece.start, CODES[stored.dtype]
        is_complete = count == math.prod(stored.shape)
        shape = stored_shape(stored.dtype, stored.shape if is_complete else (count,))
        tensor = tensors.get(key)
        if tensor is None or tensor.dtype != code or tensor.shape != shape:
            actual = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            file = self.manifest.shard_file(piece.shard)
            raise Corrupt(key, f"{code}{list(shape)}", actual, file)

    def _shard(self, rank: int) -> tuple[int, int, dict[str, Tensor]]:
        """Open a shard and check its header; return (descriptor, start of the data, tensors)."""
        if rank in self._shards:
            return self._shards[rank]
        path = self._folder.path
        expected, file = self.manifest.shards[rank], self.manifest.shard_file(rank)
        try:
            descriptor, nbytes = self._stack.enter_context(self._folder.reading(file))
        except NotFound:
            detail = f"a file of {expected.nbytes} bytes"
            raise Corrupt(file, detail, "no such file", path) from None
        if nbytes != expected.nbytes:
            raise Corrupt(file, f"{expected.nbytes} bytes", f"{nbytes} bytes", path)
        title = f"the header of {file}"
        prefix = bytearray(8)
        read_into(descriptor, memoryview(prefix), 0, file)
        try:
            header = bytearray(header_length(bytes(prefix), nbytes))
            read_into(descriptor, memoryview(header), 0, file)
            actual = digest_of(header)
            if actual != expected.header_digest:
                raise Corrupt(title, expected.header_digest, actual, path)
            tensors = parse_header(bytes(header), nbytes)[0]
        except Corrupt:
            raise
        except CheckpointError as error:
            raise Corrupt(title, expected.header_digest, str(error), path) from error
        self._shards[rank] = descriptor, len(header), tensors
        return self._shards[rank]


class RetainedCheckpoint(NamedTuple):
    """A committed checkpoint of a manager's directory."""

    step: int  # step of the program
    metric: float | None = None  # quality, or None
    number: int = 0  # sequence number of the save in the directory; 0 if the manifest has none
    is_whole: bool = True  # whether no damage is known

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the order of saving; checkpoints without a number are ordered by step."""
        return self.number, self.step


def best_of(retained: Sequence[RetainedCheckpoint], best: str | None) -> RetainedCheckpoint | None:
    """Return the checkpoint with the best metric, the latest of equals; None without metrics."""
    if best is None:
        return None
    sign = 1.0 if best == "max" else -1.0
    rated = [
        (sign * one.metric, one)
        for one in retained
        if one.metric is not None and not math.isnan(one.metric)
    ]
    return max(rated, key=lambda pair: (pair[0], pair[1].order))[1] if rated else None


def removable(
    retained: Sequence[RetainedCheckpoint], keep: int | None, best: str | None
) -> list[RetainedCheckpoint]:
    """Return the checkpoints to remove, oldest first: all but the `keep` latest and the best.

    A damaged checkpoint does not count; it goes when it is older than all that stay.
    """
    ordered = sorted(retained, key=lambda one: one.order)
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
            retained = self._read[step][1]
            if retained is None:
                number = found[-1].number if found else 0
                retained = RetainedCheckpoint(step, None, number, is_whole=False)
            found.append(retained)
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
        for retained in self.committed():
            if not retained.is_whole:
                self._check(retained, faults)
        for retained in reversed(self.committed()):
            if retained.is_whole and self._check(retained, faults):
                return self.path(retained.step), faults
        return None, faults

    def _check(self, retained: RetainedCheckpoint, faults: list[str]) -> bool:
        """Return whether a checkpoint is complete, and cache that; append its fault if not."""
        try:
            fault = fault_of(self.path(retained.step))
        except NotFound:  # another job has just removed it
            return False
        if fault:
            faults.append(fault)
            signature = self._read[retained.step][0]
            self._read[retained.step] = signature, retained._replace(is_whole=False)
        elif not retained.is_whole:  # it has been repaired meanwhile
            self.forget(retained.step)
        return not fault
