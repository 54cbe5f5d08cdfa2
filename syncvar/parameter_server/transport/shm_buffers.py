"""Arrays that go between a server and the workers of its host through memory that they share.

Who sends an array copies it once, into a block of its own region of shared memory, or has made it there (`ShmBufferPool.room`), and sends
where that is. Who receives it reads the block where it lies. Nobody writes a block while it is lent, so what is read is never torn, and always one version. A block
begins with eight words, one for each of so many readers. When the last view of it is gone a reader clears its word, and the owner
takes that back the next time it lends something.
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
    from syncvar.shm.shm_references import SharedMemoryReference

LEND_NBYTES_MIN = 64 << 10
_WORDS = 8
_WORDS_NBYTES = 8 * _WORDS  # before the array: they stay on a line of the cache of their own
_SPARE_NBYTES_MAX = 128 << 20
_LENT = 1
_ALONE = 2  # references to a block that nobody else has: a name, and the question's own


def lender_of(environment: RankEnvironment, config: RuntimeConfig) -> ShmBufferPool | None:
    """Return this process's part of the memory that servers and workers of its host share; None where there is none."""
    hosts = server_hosts(environment.servers, environment.host_count)
    here = [server for server, host in enumerate(hosts) if host == environment.host_index]
    if config.transport == "zmq" or not here:
        return None
    place = (
        here.index(environment.rank)
        if environment.role == "server"
        else len(here) + environment.local_rank
    )
    path = servers_fd_socket_path(environment.socket_directory)
    shm = SharedSegment.fetch(path, environment, environment.generation, place, config)
    if isinstance(shm, str):
        return None
    # What an earlier process in this one's place has lent may still be read: who came after it lends nothing.
    return ShmBufferPool(shm, lends=environment.incarnation == 0)


class _BufferReader(NamedTuple):
    """To whom something is lent: a process, and which of those that have had its number."""

    number: int
    incarnation: int


class ShmBufferPool:
    """What one process has lent, and what it has borrowed.

    Args:
        shm: The memory; this process lends from its own region.
        lends: It may lend; else it only borrows.

    Attributes:
        lent: How many arrays have been lent.
        segment: The memory. An array may be lent to a process only after that one has said that it has mapped the same.
    """

    def __init__(self, shm: SharedSegment, *, lends: bool = True) -> None:
        self.lent = 0
        self.segment = shm.segment
        self._shm = shm
        self._lends = lends
        self._out: collections.deque[tuple[_BufferReader, NDArray[np.uint8], int]] = (
            collections.deque()
        )  # to whom, block, word
        self._spare: dict[int, list[NDArray[np.uint8]]] = {}
        self._spare_nbytes = 0

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a new array with any content; a long one lies where it can be lent as it is, once, if nobody writes it then."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._block(nbytes) if self._lends and nbytes >= LEND_NBYTES_MIN else None
        return (
            np.empty(shape, dtype)
            if block is None
            else block[_WORDS_NBYTES:].view(dtype).reshape(shape)
        )

    def lend(
        self, number: int, frames: Sequence[Any], incarnation: int = 0
    ) -> list[tuple[int, SharedMemoryReference]]:
        """Copy the long ones of some buffers to where a process can read them, unless they are there.

        Args:
            number: The process, which has said that it has mapped `segment`.
            frames: The buffers.
            incarnation: Which of the processes that have had this number.

        Returns:
            For each long one its index, and a reference whose offset is that of the reader's word. The caller sends the others.
        """
        if not self._lends:
            return []
        found: list[tuple[int, SharedMemoryReference]] = []
        for index, frame in enumerate(frames):
            if index and len(frame) >= LEND_NBYTES_MIN:
                view = memoryview(frame)
                if not found:
                    self._take_back()
                word = self._free_word(view)
                if word is None:
                    copied = self._block(view.nbytes)
                    if copied is None:
                        break
                    copied[_WORDS_NBYTES:] = np.frombuffer(view, np.uint8)
                    word = copied, self._place(copied)
                self._shm.words[word[1]] = _LENT
                self._out.append((_BufferReader(number, incarnation), *word))
                found.append((index, self._shm.refer(8 * word[1], view.nbytes)))
        self.lent += len(found)
        return found

    def borrow(self, reference: SharedMemoryReference) -> memoryview:
        """Return what lies there, to be read; it is given back with the last view of it.

        Raises:
            InternalError: It is in other memory, or outside of it.
        """
        word = self._shm.resolve(reference)
        block = self._shm.refer(word // 64 * 64, _WORDS_NBYTES + reference.nbytes)
        if word % 8:
            raise InternalError(
                f"another process lends {reference.nbytes} bytes at {word}, where no reader's word can be"
            )
        array: Any = np.asarray(
            _Borrowed(self._shm, word, self._shm.resolve(block) + _WORDS_NBYTES, reference.nbytes)
        )
        return memoryview(array)

    def forget(self, number: int, incarnation: int) -> None:
        """Take back what a process had borrowed that has ended, and its earlier incarnations; not what a later one has."""
        for reader, _, word in self._out:
            if reader.number == number and reader.incarnation <= incarnation:
                self._shm.words[word] = 0

    def close(self) -> None:
        """Let go of the memory; what is still read stays."""
        self._out.clear()
        self._spare.clear()
        self._shm.close()

    def _place(self, block: NDArray[np.uint8]) -> int:
        """Return the index of a block's first word."""
        offset = self._shm.locate(block)
        assert offset is not None
        return offset // 8

    def _free_word(self, view: memoryview) -> tuple[NDArray[np.uint8], int] | None:
        """Return the block that `room` has made a buffer in, and a word for one more reader; None where there is none."""
        owner: Any = view.obj
        while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
            owner = owner.base
        if (
            not isinstance(owner, np.ndarray)
            or owner.nbytes != view.nbytes + _WORDS_NBYTES
            or self._shm.locate(owner) is None
        ):
            return None
        first = self._place(owner)
        free = next(
            (word for word in range(first, first + _WORDS) if self._shm.words[word] != _LENT),
            None,
        )
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

    def _take_back(self) -> None:
        """Keep blocks that nobody reads any more for arrays of the same size; beyond a limit they are freed."""
        words = self._shm.words
        for _ in range(len(self._out)):
            entry = self._out.popleft()
            if words[entry[2]] == _LENT:
                self._out.append(entry)
                continue
            block = entry[1]
            del entry
            nbytes = len(block) - _WORDS_NBYTES
            if (
                sys.getrefcount(block) == _ALONE
                and self._spare_nbytes + nbytes <= _SPARE_NBYTES_MAX
            ):
                self._spare_nbytes += nbytes
                self._spare.setdefault(nbytes, []).append(block)


class _Borrowed:
    """The owner of a borrowed array's memory, at the end of the chain of bases."""

    __slots__ = ("__array_interface__", "_ground", "_word", "_words")

    def __init__(self, shm: SharedSegment, word: int, offset: int, nbytes: int) -> None:
        self._ground = shm.ground  # the mapping lives as long as this
        self._words = shm.words
        self._word = word // 8
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (shm.address + offset, True),
            "version": 3,
        }

    def __del__(self) -> None:
        with contextlib.suppress(
            ValueError
        ):  # shared memory has been closed: nobody lends from it any more
            self._words[self._word] = 0
