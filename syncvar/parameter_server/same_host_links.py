"""Links between a server and the workers of its host: Unix sockets, and arrays in shared memory.

The thread that waits for an answer reads the socket (`Pipe`) itself. A short message costs one
system call at each end. Sending never waits: what a socket does not take at once is kept and sent
later.

The sender copies a long array once, into a block of its own region, or has allocated it there
(`ShmBufferPool.allocate`), and sends the location. The receiver reads the block in place. No
process writes a lent block, so a read is never torn. A block begins with eight words, one for each
reader. A reader clears its word with its last view, and the owner reclaims the block when it lends
next.
"""

from __future__ import annotations

import collections
import contextlib
import math
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import InternalError, SharedMemoryFull
from syncvar.core.process_ids import server_hosts
from syncvar.parameter_server.messages import NBYTES_MAX, Packed, length_of
from syncvar.shm.fd_passing import servers_fd_socket_path
from syncvar.shm.segment import SharedSegment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.shm.segment_file import SharedMemoryReference

_CHUNK_NBYTES = 128 << 10
_JOINED_NBYTES_MAX = 32 << 10  # shorter messages are joined: that is less work than many pieces
_PIECES_MAX = 512  # of one system call; the limit of Linux is 1024
_BACKLOG = 4096
LEND_NBYTES_MIN = 64 << 10
_WORDS = 8
_WORDS_NBYTES = 8 * _WORDS  # before the array: a cache line of their own
_SPARE_NBYTES_MAX = 128 << 20
_LENT = 1
_UNSHARED = 2  # references to a block that only one name has: the name, and getrefcount's own


class UnixListener:
    """The socket at `path` where processes of this host connect; only for this user."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(path)
            self._path.chmod(0o600)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor for a poller."""
        return self._socket.fileno()

    def accept(self) -> Pipe | None:
        """Return a new pipe of another process, or None."""
        try:
            connected, _ = self._socket.accept()
        except OSError:
            return None
        return Pipe(connected)

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class Pipe:
    """One end of a stream."""

    def __init__(self, connected: socket.socket, *, is_opener: bool = False) -> None:
        connected.settimeout(0.0)
        self._socket = connected
        self.is_opener = is_opener
        self.peer: Any = None  # data of the owner about the other end
        self.is_over = False  # whether the stream has ended
        self._unsent: deque[memoryview] = deque()
        self._buffer = memoryview(bytearray(_CHUNK_NBYTES))
        self._is_full = False  # the last read filled the buffer
        self._chunk = memoryview(b"")  # received bytes of the next messages
        self.has_more = True  # whether `receive` may return another message that no poller signals
        self._filling: memoryview | None = None  # a message that is partly received
        self._filled = 0

    @classmethod
    def open(cls, path: str, hello: Packed) -> Pipe:
        """Connect and send a hello; the pipe is over if no process listens."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        pipe = cls(connected, is_opener=True)
        try:
            connected.connect(path)
        except OSError:
            pipe.close()
        else:
            pipe.send(hello)
        return pipe

    def fileno(self) -> int:
        """Return the descriptor for a poller."""
        return self._socket.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether there are unsent bytes."""
        return bool(self._unsent)

    def send(self, message: Packed) -> bool:
        """Send a message without separate parts; its buffers must not change. False if over."""
        if self.is_over:
            return False
        pieces: list[Any] = message.pieces
        if message.nbytes <= _JOINED_NBYTES_MAX:
            pieces = [b"".join(pieces)]
        if not self._unsent:
            with contextlib.suppress(BlockingIOError):
                sent = self._put(pieces)
                if sent == message.nbytes:
                    return True
                pieces = _after(pieces, sent)
        if not self.is_over:
            self._unsent.extend(_after(pieces, 0))
        return not self.is_over

    def flush(self) -> None:
        """Send unsent bytes, as many as the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._put(list(self._unsent))
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]

    def receive(self, nbytes_max: int = NBYTES_MAX) -> memoryview | None:
        """Return the next whole message, which does not change, or None.

        Call it until it returns None, or until `has_more` is False.
        """
        if self._filling is not None:
            return self._fill()
        if len(self._chunk) < 8:
            try:
                nbytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return None
            except OSError:
                nbytes = 0
            if not nbytes:
                self.is_over = True
                return None
            self._is_full = nbytes == _CHUNK_NBYTES
            # One buffer for all reads: the system would allocate and free a new one each time.
            received = bytes(self._buffer[:nbytes])
            self._chunk = memoryview(bytes(self._chunk) + received if self._chunk else received)
            if len(self._chunk) < 8:
                return None
        nbytes = length_of(self._chunk, nbytes_max)
        if nbytes <= len(self._chunk):
            message, self._chunk = self._chunk[:nbytes], self._chunk[nbytes:]
            self.has_more = self._is_full or len(self._chunk) >= 8
            return message
        self._filling = memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]
        self._filled = len(self._chunk)
        self._filling[: self._filled] = self._chunk
        self._chunk = memoryview(b"")
        return self._fill()

    def close(self, linger_s: float = 0.0) -> None:
        """Flush for at most `linger_s`, and close. Idempotent."""
        until = time.monotonic() + linger_s
        while self._unsent and not self.is_over and (left_s := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll(1000 * left_s + 1)
            self.flush()
        self._end()
        self._socket.close()

    def _fill(self) -> memoryview | None:
        whole = self._filling
        assert whole is not None, "a message is partly received"
        while self._filled < len(whole):
            try:
                nbytes = self._socket.recv_into(whole[self._filled :])
            except BlockingIOError:
                return None
            except OSError:
                nbytes = 0
            if not nbytes:
                self._end()
                return None
            self._filled += nbytes
        self._filling = None
        self.has_more = True
        return whole.toreadonly()

    def _put(self, pieces: list[Any]) -> int:
        try:
            if len(pieces) == 1:
                return self._socket.send(pieces[0])
            return self._socket.sendmsg(pieces[:_PIECES_MAX])
        except BlockingIOError:
            raise
        except OSError:  # the other process has ended
            self._end()
            return 0

    def _end(self) -> None:
        self.is_over = True
        self._unsent.clear()


def _after(pieces: list[Any], nbytes: int) -> list[memoryview]:
    left: list[memoryview] = []
    for one in pieces:
        size = memoryview(one).nbytes
        if size > nbytes:
            left.append(memoryview(one).cast("B")[nbytes:])
        nbytes = max(0, nbytes - size)
    return left


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
    """The blocks that one process has lent, and views of blocks that it has borrowed."""

    def __init__(self, shm: SharedSegment, *, lends: bool = True) -> None:
        self.lent = 0  # number of arrays lent
        # The memory. A process may lend only to processes that have mapped it too.
        self.segment = shm.segment
        self._shm, self._lends = shm, lends
        # reader, block, index of the reader's word
        self._out: collections.deque[tuple[_BufferReader, NDArray[np.uint8], int]]
        self._out = collections.deque()
        self._spare: dict[int, list[NDArray[np.uint8]]] = {}
        self._spare_nbytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
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
        """Lend the long ones of some buffers, except the first, to a process that maps `segment`.

        It copies them to shared memory where needed. Returns the index of each lent buffer, and a
        reference with the offset of the reader's word.
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
        """Return the block of a buffer from `allocate` and a free word of it, or None."""
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
