"""Reader of checkpoints.

It checks every length before it allocates, and the digest of every byte that it uses.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from syncvar.checkpoint.file_names import MANIFEST, is_left_over
from syncvar.checkpoint.folder import CheckpointFolder, read_into
from syncvar.checkpoint.manifest import MANIFEST_BYTES_MAX, Manifest, digest_of
from syncvar.checkpoint.safetensors_header import (
    CODES,
    Tensor,
    header_length,
    itemsize_of,
    parse_header,
    stored_shape,
)
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import CheckpointError, Corrupt, NotFound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.checkpoint.manifest import Piece, Stored


_TRIES = 3


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
    """An open checkpoint; a context manager.

    Args:
        path: Its folder.
    """

    def __init__(self, path: str) -> None:
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
                read_into(descriptor, part, data_start + tensors[key].start, file)
            except OSError as error:
                raise CheckpointError(
                    f"{self._folder.path}/{file} cannot be read: {error.strerror}"
                ) from error
            actual = digest_of(part)
            if actual != piece.digest:
                detail = f"elements {piece.start} to {piece.stop} in {file}"
                raise Corrupt(key, piece.digest, actual, detail)
        return array

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
