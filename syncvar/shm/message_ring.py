"""Message rings: the shared memory that carries messages from one rank of a host to another.

A ring has a header of four lines of 64 bytes, then its entries:

* line 0, written by the sender: FILLED, bytes put in since the beginning; NEWS, messages sent, here
  or over a link; BY_LINK, how many of these went over a link; RING, bytes of the ring; NUMBER,
  number of the last long message; ATTENDED, number of the message whose parts the sender sends now.
* line 1, written by the receiver: USED, bytes of the ring that are free again; FULL, whether the
  receiver accepts no more because it already holds many messages with other tags.
* line 2, written by the receiver: the answer to each of up to eight open long messages.
* line 3, written by the sender: for each of these, whether the sender cancelled it.

An entry is a multiple of a line: its length, its form, stream and call number of the message,
length of the message, its shape, its bytes. A WHOLE entry holds the message. A BY_ADDRESS entry
holds the location of a long message: the receiver reads it from there and answers, or asks for PART
entries. Long message s uses answer s % 8: 2s - 1 asks for parts, 2s says "received".

**Ring order**: the sender writes the bytes before FILLED, and the receiver reads them before it
writes USED. FILLED may reach the end of an entry in steps; NEWS grows at the end. On x86-64 the
other process sees the stores in this order.

Long rings are fast: a core that has just read a line still caches it, and writing it again is ten
times slower than a copy. In a ring as long as the private caches, the lines are back in the shared
cache before the sender reuses them.

An ordered pair of ranks has one ring for all groups and tags, in the sender's region (`RingTable`).
The sender makes it with its first message, so pairs that send nothing cost nothing. Word 5 of a
rank's table is the offset of its list of rings. The list has a word for each receiver: 0 while
there is no ring, 1 if the segment had no room and all messages go over links.

Cost: 2 MiB of shared memory for each pair; down to 256 KiB with more than eight ranks on the host,
    or without room.
"""

from __future__ import annotations

import contextlib
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import PLACES, EntryForm, RingWord
from syncvar.core.errors import SharedMemoryFull
from syncvar.shm.segment_file import LINE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.shm.channel_table import ChannelTable, ProcessReader
    from syncvar.shm.segment import SharedSegment

# Plain numbers, because members of an enum are slower.
FILLED, NEWS, NUMBER = int(RingWord.FILLED), int(RingWord.NEWS), int(RingWord.NUMBER)
USED, FULL = int(RingWord.USED), int(RingWord.FULL)
_ANSWERS, _CANCELLED = int(RingWord.ANSWERS), int(RingWord.CANCELLED)
BY_LINK, RING = 2, 3  # the C extension does not use these
HEADER_WORDS = 32
RING_BYTES_LEAST = 256 << 10
ENTRY_BYTES_MAX = RING_BYTES_LEAST // 2  # so an empty ring has room for an entry at any position
_FIXED_WORDS = 5  # of an entry, before its shape
_ALIGNED_FROM = 1024  # bytes from which a message begins at a line
_PART_BYTES = 64 << 10
RING_BYTES = 2 << 20  # shorter rings fit into private caches, and are slower
_RINGS_BYTES = 16 << 20  # of all rings of a rank together, about
_RINGS = 5  # word of a rank's table: offset of its list of rings
_NEVER = 1  # value in the list: all messages go over links


class RingAnswer(IntEnum):
    """Answer of a receiver to a long message."""

    NONE = 0
    WANTS_PARTS = 1
    RECEIVED = 2


class RingEntry(NamedTuple):
    """An entry of a ring, as the receiver finds it.

    `form` is an `EntryForm`; `data` is the offset in the segment of `nbytes` bytes, of the message
    or the part. In a BY_ADDRESS entry `place` is the address in the sender's process, `offset` 1 +
    offset in the segment or 0 for private memory, and `number` that of the long message. In a PART
    entry `place` is the first byte of the part.
    """

    form: int
    kind: int
    dtype: int
    stream: int
    call: int
    nbytes: int
    shape: tuple[int, ...]
    data: int
    place: int = 0
    offset: int = 0
    number: int = 0


def _data_at(words: int, nbytes: int) -> int:
    """Return the distance from the start of an entry to its bytes, which follow `words` words."""
    return words * 8 if nbytes < _ALIGNED_FROM else _in_lines(words * 8)


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


class _Ring:
    def __init__(self, shm: SharedSegment, start: int) -> None:
        self._shm = shm
        self.words = shm.words
        self.start = start
        self.base = start // 8
        self.ring = start + HEADER_WORDS * 8  # offset of the first entry
        self.ring_bytes = self.words[self.base + RING]


class RingWriter(_Ring):
    """The sender's end of the ring whose header is at `start`. One thread at a time."""

    def __init__(self, shm: SharedSegment, start: int) -> None:
        super().__init__(shm, start)
        self._used = 0  # the last value read from USED
        self._last_used = -1  # USED when `room_at` last read it

    def put(
        self, type_code: int, stream: int, call: int, shape: tuple[int, ...], data: Any, nbytes: int
    ) -> bool:
        """Put a whole message in; return False if there is no room now."""
        head = type_code | EntryForm.WHOLE, stream, call, nbytes, *shape
        return self._append(head, data, nbytes)

    def put_address(
        self,
        type_code: int,
        stream: int,
        call: int,
        shape: tuple[int, ...],
        nbytes: int,
        address: int,
        offset: int,
    ) -> int:
        """Publish the location of a long message; return its number, or 0 if there is no room now.

        The bytes stay at `address` until the receiver answers or the sender cancels. `offset` is 1
        + their offset in the segment, or 0 for private memory.
        """
        words, number = self.words, self.words[self.base + NUMBER] + 1
        before = number - PLACES
        if (
            before > 0
            and words[self.answers_at(before)] < before << 1
            and words[self._cancelled_word(before)] != before
        ):
            return 0
        form = type_code | EntryForm.BY_ADDRESS
        head = form, stream, call, nbytes, *shape, address, offset, number
        if not self._append(head, b"", 0):
            return 0
        words[self.base + NUMBER] = number
        return number

    def part(self, stream: int, call: int, start: int, data: memoryview | NDArray[np.uint8]) -> int:
        """Put a part of a message in, from byte `start` on; return its length, 0 without room."""
        nbytes = min(len(data) - start, _PART_BYTES)
        head = int(EntryForm.PART), stream, call, nbytes, start
        return nbytes if self._append(head, data[start : start + nbytes], nbytes) else 0

    def count_link(self) -> None:
        """Count a message that goes over a link; only the engine's driver calls this."""
        self.words[self.base + BY_LINK] += 1

    def note_news(self) -> None:
        """Wake a receiver that watches the ring: a message has gone over a link."""
        self.words[self.base + NEWS] += 1

    def room_at(self, shape: tuple[int, ...], nbytes: int) -> tuple[int, int] | None:
        """Return the word that shows free room, and the value it must reach for a message.

        None if the receiver has freed nothing since the last call, or the message must go over a
        link.
        """
        words, base = self.words, self.base
        used, before = words[base + USED], self._last_used
        self._last_used = used
        nbytes = _in_lines(_data_at(_FIXED_WORDS + len(shape), nbytes) + nbytes)
        if used == before or nbytes > ENTRY_BYTES_MAX or words[base + FULL]:
            return None
        return base + USED, self._start_of(nbytes) + nbytes - self.ring_bytes

    def answer(self, number: int) -> RingAnswer:
        """Return the answer to a long message.

        The word may already belong to a later message; the sender publishes that only after this
        answer.
        """
        return RingAnswer(min(2, max(0, self.words[self.answers_at(number)] - (number << 1) + 2)))

    def answers_at(self, number: int) -> int:
        """Return the word of the answer; it becomes 2 * `number` - 1 or 2 * `number`."""
        return self.base + _ANSWERS + number % PLACES

    def cancel(self, number: int) -> None:
        """Cancel a long message; the receiver discards what it is reading of it."""
        self.words[self._cancelled_word(number)] = number

    def _cancelled_word(self, number: int) -> int:
        return self.base + _CANCELLED + number % PLACES

    def _start_of(self, nbytes: int) -> int:
        """Return where an entry begins, perhaps after a gap, in bytes since the beginning."""
        filled = self.words[self.base + FILLED]
        left = self.ring_bytes - filled % self.ring_bytes
        return filled if nbytes <= left else filled + left

    def _append(self, head: tuple[int, ...], data: Any, nbytes: int) -> bool:
        """Publish an entry of these words, after its length, and bytes; False without room now."""
        words, base = self.words, self.base
        at = _data_at(1 + len(head), nbytes)
        length = _in_lines(at + nbytes)
        begin = self._start_of(length)
        if begin + length - self._used > self.ring_bytes:
            if length > ENTRY_BYTES_MAX or words[base + FULL]:
                return False  # with the old `_used`, so that later entries find no room either
            self._used = words[base + USED]
            if begin + length - self._used > self.ring_bytes:
                return False
        filled = words[base + FILLED]
        if begin > filled:
            word = (self.ring + filled % self.ring_bytes) // 8
            words[word], words[word + 1] = begin - filled, EntryForm.GAP
            words[base + FILLED] = begin
        start = self.ring + begin % self.ring_bytes
        for word, value in enumerate((length, *head), start // 8):
            words[word] = value
        if nbytes:
            self._shm.memory[start + at : start + at + nbytes] = data
        words[base + FILLED] = begin + length
        words[base + NEWS] += 1
        return True


class RingReader(_Ring):
    """The receiver's end of the ring whose header is at `start`. One thread at a time."""

    @property
    def news(self) -> int:
        """Messages sent, through the ring or over a link."""
        return self.words[self.base + NEWS]

    @property
    def news_at(self) -> int:
        """Index of the word with `news`."""
        return self.base + NEWS

    @property
    def by_link(self) -> int:
        """Messages sent over a link."""
        return self.words[self.base + BY_LINK]

    def first(self) -> RingEntry | None:
        """Return the oldest entry not yet freed, or None."""
        words, base = self.words, self.base
        while True:
            used = words[base + USED]
            if used == words[base + FILLED]:
                return None
            start = self.ring + used % self.ring_bytes
            word = start // 8
            type_code = words[word + 1]
            form = type_code & 0xFF
            if form != EntryForm.GAP:
                break
            words[base + USED] = used + words[word]
        if words[base + FILLED] - used < words[word]:
            return None  # the C runner publishes a long entry in steps
        dimensions = type_code >> 24
        end = word + _FIXED_WORDS + dimensions
        shape = tuple(words[word + _FIXED_WORDS : end])
        stream, call, nbytes = words[word + 2], words[word + 3], words[word + 4]
        head = (form, type_code >> 8 & 0xFF, type_code >> 16 & 0xFF, stream, call, nbytes)
        if form == EntryForm.BY_ADDRESS:
            return RingEntry(*head, shape, 0, words[end], words[end + 1], words[end + 2])
        if form == EntryForm.PART:
            data = start + _data_at(_FIXED_WORDS + 1, nbytes)
            return RingEntry(*head, (), data, words[end])
        return RingEntry(*head, shape, start + _data_at(_FIXED_WORDS + dimensions, nbytes))

    def free(self) -> None:
        """Free the oldest entry."""
        words, base = self.words, self.base
        used = words[base + USED]
        words[base + USED] = used + words[(self.ring + used % self.ring_bytes) // 8]

    def refuse(self, *, refuses: bool) -> None:
        """Set whether the sender must send no more through the ring."""
        self.words[self.base + FULL] = refuses

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a view of bytes of the segment."""
        return np.ndarray(nbytes, np.uint8, self._shm.ground, offset)

    def resident(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a view of the sender's array in the segment."""
        return self._shm.view(offset, nbytes, np.uint8)

    def want(self, number: int) -> None:
        """Ask for a long message in parts."""
        self._answer(number, RingAnswer.WANTS_PARTS)

    def confirm(self, number: int) -> None:
        """Answer that this rank has received a long message."""
        self._answer(number, RingAnswer.RECEIVED)

    def is_cancelled(self, number: int) -> bool:
        """Return whether the sender cancelled a long message."""
        return self.words[self.base + _CANCELLED + number % PLACES] >= number

    def _answer(self, number: int, answer: RingAnswer) -> None:
        with contextlib.suppress(ValueError):  # the segment is closed
            self.words[self.base + _ANSWERS + number % PLACES] = (number << 1) - 2 + answer


def array_code(kind: int, dtype: int, dimensions: int) -> int:
    """Return the type, dtype and rank of an array as one number of an entry."""
    return kind << 8 | dtype << 16 | dimensions << 24


class RingTable:
    """Makes this rank's rings, of at most `ring_bytes`, and finds those of the other ranks."""

    def __init__(self, channels: ChannelTable, ring_bytes: int = RING_BYTES) -> None:
        self.channels = channels
        self._shm = channels.shm
        self._list = 0
        fair = _RINGS_BYTES // self._shm.local_world_size // LINE_BYTES * LINE_BYTES
        self._ring_bytes = min(ring_bytes, max(RING_BYTES_LEAST, fair))

    def outbox(self, dest: int) -> RingWriter | None:
        """Make the ring for messages to a world rank of this host; None without room."""
        shm, words = self._shm, self._shm.words
        table = shm.table(shm.local_rank) // 8
        place = self.channels.places[dest]
        if words[table + _RINGS] == _NEVER:
            return None
        try:
            if not self._list:
                listed = shm.allocate(shm.local_world_size * 8)
                if self._list:  # another thread made it meanwhile
                    shm.release(listed)  # type: ignore[unreachable]
                else:
                    self._list = listed
                    words[table + _RINGS] = listed
            start, ring_bytes = self._allocate()
        except SharedMemoryFull:
            words[self._list // 8 + place if self._list else table + _RINGS] = _NEVER
            return None
        words[start // 8 + RING] = ring_bytes  # all else reads as zeros
        words[self._list // 8 + place] = start
        return RingWriter(shm, start)

    def _allocate(self) -> tuple[int, int]:
        """Return the offset of a new ring, and its size."""
        with contextlib.suppress(SharedMemoryFull):
            return self._shm.allocate(HEADER_WORDS * 8 + self._ring_bytes), self._ring_bytes
        return self._shm.allocate(HEADER_WORDS * 8 + RING_BYTES_LEAST), RING_BYTES_LEAST

    def inbox(self, source: int) -> RingReader | None:
        """Return the ring of messages from a world rank of this host; None while there is none."""
        found = self._word_of(source)
        start = self._shm.words[found] if found else 0
        if start in (0, _NEVER):
            return None
        reader = RingReader(self._shm, start)
        self._shm.check(start, HEADER_WORDS * 8 + reader.ring_bytes)
        return reader

    def has_none(self, source: int) -> bool:
        """Return whether a rank will never have a ring to this one."""
        words, places = self._shm.words, self.channels.places
        found = self._word_of(source)
        return words[found or self._shm.table(places[source]) // 8 + _RINGS] == _NEVER

    def appears_word(self, source: int) -> int:
        """Return the word that changes when the ring from a rank appears."""
        return self._word_of(source) or self._shm.table(self.channels.places[source]) // 8 + _RINGS

    def reach(self, source: int) -> ProcessReader | None:
        """Return the reader of a rank's memory, as rank 0; None if it is not readable."""
        places = self.channels.places
        return self.channels.reach((places[source], self._shm.local_rank))

    def _word_of(self, source: int) -> int:
        """Return the index of the list word of the ring from a rank; 0 without a list."""
        shm = self._shm
        listed = shm.words[shm.table(self.channels.places[source]) // 8 + _RINGS]
        return 0 if listed in (0, _NEVER) else listed // 8 + shm.local_rank
