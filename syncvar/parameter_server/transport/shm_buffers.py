"""Arrays that a server and the workers of its host exchange in shared memory.

The sender copies an array once, into a block of its own region, or has allocated it there
(`ShmBufferPool.room`), and sends the location. The receiver reads the block in place. No process
writes a lent block, so a read is never torn. A block begins with eight words, one for each reader.
A reader clears its word with its last view, and the owner reclaims the block when it lends next.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import InternalError, SharedMemoryFull
from syncvar.core.process_ids import server_hosts
from syncvar.shm.fd_passing import servers_fd_socket_path
from syncvar.shm.segment import SharedSegment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.shm.segment_file import SharedMemoryReference

LEND_NBYTES_MIN = 64 << 10
_WORDS = 8
_WORDS_NBYTES = 8 * _WORDS  # before the array: a cache line of their own
_SPARE_NBYTES_MAX = 128 << 20
_LENT = 1
_UNSHARED = 2  # references to a block that only one name has: the name, and getrefcount's own


def lender_of(environment: RankEnvironment, config: RuntimeConfig) -> ShmBufferPool | None:
    """Return this process's region of the host's shared memory for servers; None for none."""
    hosts = server_hosts(environment.servers, environment.host_count)
    here = [server for server, host in enumerate(hosts) if host == environment.host_index]
    if config.transport == "zmq" or not here:
        return None
    index = len(here) + environment.local_rank
    if environment.role == "server":
        index = here.index(environment.rank)
    path = servers_fd_socket_path(environment.socket_directory)
    shm = SharedSegment.fetch(path, environment, environment.generation, index, config)
    if isinstance(shm, str):
        return None
    # Readers may still have blocks of an earlier incarnation: later ones do not lend.
    return ShmBufferPool(shm, lends=environment.incarnation == 0)


class _BufferReader(NamedTuple):
    """A process number and its incarnation."""

    number: int
    incarnation: int


class ShmBufferPool:
    """The blocks that one process has lent, and views of blocks that it has borrowed.

    Attributes:
        lent: Number of arrays lent.
        segment: The memory. A process may lend only to processes that have mapped it too.
    """

    def __init__(self, shm: SharedSegment, *, lends: bool = True) -> None:
        self.lent = 0
        self.segment = shm.segment
        self._shm = shm
        self._lends = lends
        # reader, block, index of the reader's word
        self._out: collections.deque[tuple[_BufferReader, NDArray[np.uint8], int]]
        self._out = collections.deque()
        self._spare: dict[int, list[NDArray[np.uint8]]] = {}
        self._spare_nbytes = 0

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a new uninitialized array, in shared memory if it is long.

        `lend` then needs no copy, as long as the caller does not write it any more.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._block(nbytes) if self._lends and nbytes >= LEND_NBYTES_MIN else None
        if block is None:
            return np.empty(shape, dtype)
        return block[_WORDS_NBYTES:].view(dtype).reshape(shape)

    def lend(
        self, number: int, frames: Sequence[Any], incarnation: int = 0
    ) -> list[tuple[int, SharedMemoryReference]]:
        """Lend the long ones of some buffers, after a copy to shared memory where needed.

        Args:
            number: Process number of the reader, which has mapped `segment`.
            frames: The buffers; the first is never lent.
            incarnation: Incarnation of the reader.

        Returns:
            Index of each lent buffer, and a reference with the offset of the reader's word.
        """
        if not self._lends:
            return []
        found: list[tuple[int, SharedMemoryReference]] = []
        for index, frame in enumerate(frames):
            if index and len(frame) >= LEND_NBYTES_MIN:
                view = memoryview(frame)
                if not found:
                    self._reclaim()
                word = self._free_word(view)
                if word is None:
                    copy = self._block(view.nbytes)
                    if copy is None:
                        break
                    copy[_WORDS_NBYTES:] = np.frombuffer(view, np.uint8)
                    word = copy, self._first_word(copy)
                self._shm.words[word[1]] = _LENT
                self._out.append((_BufferReader(number, incarnation), *word))
                found.append((index, self._shm.refer(8 * word[1], view.nbytes)))
        self.lent += len(found)
        return found

    def borrow(self, reference: SharedMemoryReference) -> memoryview:
        """Return a read-only view of a lent array; its end releases the block."""
        word = self._shm.resolve(reference)
        block = self._shm.refer(word // 64 * 64, _WORDS_NBYTES + reference.nbytes)
        if word % 8:
            raise InternalError(
                f"another process lends {reference.nbytes} bytes at {word}, where no reader's "
                f"word can be"
            )
        array: Any = np.asarray(
            _Borrowed(self._shm, word, self._shm.resolve(block) + _WORDS_NBYTES, reference.nbytes)
        )
        return memoryview(array)

    def forget(self, number: int, incarnation: int) -> None:
        """Reclaim the blocks of a process that has ended; not those of later incarnations."""
        for reader, _, word in self._out:
            if reader.number == number and reader.incarnation <= incarnation:
                self._shm.words[word] = 0

    def close(self) -> None:
        """Unmap the memory, except what is still read."""
        self._out.clear()
        self._spare.clear()
        self._shm.close()

    def _first_word(self, block: NDArray[np.uint8]) -> int:
        offset = self._shm.locate(block)
        assert offset is not None
        return offset // 8

    def _free_word(self, view: memoryview) -> tuple[NDArray[np.uint8], int] | None:
        """Return the block of a buffer that `room` has made, and a free word of it, or None."""
        owner: Any = view.obj
        while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
            owner = owner.base
        is_block = isinstance(owner, np.ndarray) and owner.nbytes == view.nbytes + _WORDS_NBYTES
        if not is_block or self._shm.locate(owner) is None:
            return None
        first, words = self._first_word(owner), self._shm.words
        free = next((one for one in range(first, first + _WORDS) if words[one] != _LENT), None)
        return None if free is None else (owner, free)

    def _block(self, nbytes: int) -> NDArray[np.uint8] | None:
        spare = self._spare.get(nbytes)
        if spare:
            self._spare_nbytes -= nbytes
            return spare.pop()
        try:
            block = self._shm.empty(_WORDS_NBYTES + nbytes, np.uint8)
        except SharedMemoryFull:
            self._spare.clear()
            self._spare_nbytes = 0
            return None
        block[:_WORDS_NBYTES] = 0
        return block

    def _reclaim(self) -> None:
        """Keep released blocks for arrays of the same size, up to a limit; free the others."""
        words = self._shm.words
        for _ in range(len(self._out)):
            entry = self._out.popleft()
            if words[entry[2]] == _LENT:
                self._out.append(entry)
                continue
            block = entry[1]
            del entry
            nbytes = len(block) - _WORDS_NBYTES
            fits = self._spare_nbytes + nbytes <= _SPARE_NBYTES_MAX
            if sys.getrefcount(block) == _UNSHARED and fits:
                self._spare_nbytes += nbytes
                self._spare.setdefault(nbytes, []).append(block)


class _Borrowed:
    """The owner of a borrowed array's memory, at the end of the chain of base objects."""

    __slots__ = ("__array_interface__", "_ground", "_word", "_words")

    def __init__(self, shm: SharedSegment, word: int, offset: int, nbytes: int) -> None:
        self._ground = shm.ground  # keeps the mapping alive
        self._words = shm.words
        self._word = word // 8
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (shm.address + offset, True),
            "version": 3,
        }

    def __del__(self) -> None:
        with contextlib.suppress(ValueError):  # the segment is closed
            self._words[self._word] = 0
