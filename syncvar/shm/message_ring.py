"""A box: where the messages of one rank to another lie until they are taken, as its sender and its receiver see it.

A box is a ring of entries behind four lines of 64 bytes:

* line 0, written by the sender: FILLED, the bytes put into the ring since the beginning; NEWS, which grows by one with
  every message, put here or sent over a link; BY_LINK, how many of these went over a link; RING, how long the ring is;
  NUMBER, that of the last long message; and ATTENDED, that of the one whose parts the sender can put at once.
* line 1, written by the receiver: USED, the bytes of the ring that are free again, and FULL while the receiver keeps
  so much of other tags for itself that it wants no more in this way.
* line 2, written by the receiver: an answer for each of eight long messages that may be open at a time.
* line 3, written by the sender: for each of these, whether it was given up.

An entry is a multiple of a line: its length, what it is, the stream and call number that the message belongs to, the length
of the message; then its shape and its bytes. A WHOLE entry has the message. A TOLD one says where a long message lies: the
receiver reads it there and answers, or asks for it in PARTs. Long messages are numbered; number s uses place s % 8, and the
answer is 2s - 1 for "send it in parts" and 2s for "taken".

FILLED may come to the end of an entry in steps; NEWS grows when it is there. The bytes of an entry are written before
FILLED, and read before USED is written: on x86-64, which alone takes this path, that is the order in which the other
process sees them.

A long ring is a fast one. What one core has just read it still holds, and writing there again takes it away from that
core line by line, at a tenth of the speed of a copy; when the sender comes round a ring that is as long as the cores' own
caches, its lines have left these for the cache that all share.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.shm.segment_layout import LINE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.shm.segment import SharedSegment

__all__ = [
    "ATTENDED",
    "BY_LINK",
    "ENTRY_BYTES_MAX",
    "FILLED",
    "FULL",
    "HEADER_WORDS",
    "NEWS",
    "NUMBER",
    "PLACES",
    "RING",
    "RING_BYTES_LEAST",
    "USED",
    "Form",
    "RingEntry",
    "RingReader",
    "RingWriter",
    "what_of",
]

FILLED, NEWS, BY_LINK, RING, NUMBER, ATTENDED = range(6)  # the last is between C and C
USED, FULL = 8, 9
_ANSWERS, _GIVEN_UP, PLACES = 16, 24, 8
HEADER_WORDS = 32
RING_BYTES_LEAST = 256 << 10
ENTRY_BYTES_MAX = (
    RING_BYTES_LEAST // 2
)  # so that there is always a place for one, once the receiver has come so far
_FIXED_WORDS = 5  # of an entry, before its shape
_ALIGNED_FROM = 1024  # bytes of messages that begin at a line
_PART_BYTES = 64 << 10


class Form:
    """What an entry is."""

    GAP, WHOLE, TOLD, PART = range(4)


class RingEntry(NamedTuple):
    """An entry of a ring, as the receiver finds it.

    Args:
        form: See `Form`.
        kind: What was sent: an array, or an object as bytes.
        dtype: Index of the dtype.
        stream: Identity of the pair's calls.
        call: Number of the message among them.
        nbytes: Of the whole message, or of this part.
        shape: Of the array.
        data: Where the bytes begin in shared memory; of a part, those of the part.
        place: Of a message that is told: its address in the sender's process. Of a part: its first byte in the message.
        offset: Of a message that is told: 1 + where it lies in shared memory; 0 where it does not.
        number: Of a message that is told.
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
    """Return how many bytes behind its beginning the bytes of an entry lie, behind some words."""
    return words * 8 if nbytes < _ALIGNED_FROM else -(-words * 8 // LINE_BYTES) * LINE_BYTES


class _Box:
    def __init__(self, shm: SharedSegment, start: int) -> None:
        self._shm = shm
        self.words = shm.words
        self.start = start
        self.base = start // 8
        self.ring = start + HEADER_WORDS * 8  # where it begins in shared memory
        self.ring_bytes = self.words[self.base + RING]


class RingWriter(_Box):
    """The sender's end of a box. One thread at a time.

    Args:
        shm: The mapped shared memory.
        start: Where the box is.
    """

    def __init__(self, shm: SharedSegment, start: int) -> None:
        super().__init__(shm, start)
        self._used = 0  # as far as it has been looked at
        self._asked = -1  # how far the receiver was when room was waited for

    def put(
        self, what: int, stream: int, call: int, shape: tuple[int, ...], data: Any, nbytes: int
    ) -> bool:
        """Put a whole message in.

        Args:
            what: Its kind and the index of its dtype, as `told` returns them.
            stream: Identity of the pair's calls.
            call: Number of the message among them.
            shape: Of the array.
            data: The bytes, in one piece, as something with the buffer protocol.
            nbytes: How many.

        Returns:
            False where there is no room now.
        """
        at = _data_at(_FIXED_WORDS + len(shape), nbytes)
        start = self._room(at + nbytes)
        if start < 0:
            return False
        words, word = self.words, start // 8
        words[word + 1] = what | Form.WHOLE
        words[word + 2] = stream
        words[word + 3] = call
        words[word + 4] = nbytes
        for place, length in enumerate(shape, word + 5):
            words[place] = length
        if nbytes:
            self._shm.memory[start + at : start + at + nbytes] = data
        self._publish(word)
        return True

    def tell(
        self,
        what: int,
        stream: int,
        call: int,
        shape: tuple[int, ...],
        nbytes: int,
        address: int,
        offset: int,
    ) -> int:
        """Tell the receiver of a long message; returns its number, or 0 where there is no room for it now.

        Args:
            what: As for `put`.
            stream: As for `put`.
            call: As for `put`.
            shape: As for `put`.
            nbytes: Its length.
            address: Where it lies in this process, in one piece, until it is taken or given up.
            offset: 1 + where it lies in shared memory; 0 where it does not.
        """
        words, number = self.words, self.words[self.base + NUMBER] + 1
        before = number - PLACES
        if (
            before > 0
            and words[self._answer(before)] < before << 1
            and words[self._given_up(before)] != before
        ):
            return 0
        start = self._room((_FIXED_WORDS + len(shape) + 3) * 8)
        if start < 0:
            return 0
        words[self.base + NUMBER] = number
        word = start // 8
        words[word + 1] = what | Form.TOLD
        words[word + 2] = stream
        words[word + 3] = call
        words[word + 4] = nbytes
        for place, value in enumerate((*shape, address, offset, number), word + 5):
            words[place] = value
        self._publish(word)
        return number

    def part(self, stream: int, call: int, start: int, data: memoryview) -> int:
        """Put a part of a long message in, as long as there is room for; returns how many bytes, perhaps none.

        Args:
            stream: As for `put`.
            call: As for `put`.
            start: The first byte that has not gone yet.
            data: The bytes of the message.
        """
        nbytes = min(len(data) - start, _PART_BYTES)
        at = _data_at(_FIXED_WORDS + 1, nbytes)
        begin = self._room(at + nbytes)
        if begin < 0:
            return 0
        words, word = self.words, begin // 8
        words[word + 1] = Form.PART
        words[word + 2] = stream
        words[word + 3] = call
        words[word + 4] = nbytes
        words[word + 5] = start
        self._shm.memory[begin + at : begin + at + nbytes] = data[start : start + nbytes]
        self._publish(word)
        return nbytes

    def count_link(self) -> None:
        """Note that a message goes over a link; only the driver of this rank's engine does so."""
        self.words[self.base + BY_LINK] += 1

    def note_news(self) -> None:
        """Let a receiver that looks into the box look up: a message has gone over a link."""
        self.words[self.base + NEWS] += 1

    def room_at(self, shape: tuple[int, ...], nbytes: int) -> tuple[int, int] | None:
        """Return the word that tells of room, and how far it has to come for a message; None where nothing has changed since last asked.

        Args:
            shape: As for `put`.
            nbytes: As for `put`.
        """
        words, base = self.words, self.base
        used, before = words[base + USED], self._asked
        self._asked = used
        nbytes = (
            -(-(_data_at(_FIXED_WORDS + len(shape), nbytes) + nbytes) // LINE_BYTES) * LINE_BYTES
        )
        filled = words[base + FILLED]
        place = filled % self.ring_bytes
        gap = self.ring_bytes - place if place + nbytes > self.ring_bytes else 0
        if used == before or nbytes > ENTRY_BYTES_MAX or words[base + FULL]:
            return None
        return base + USED, filled + gap + nbytes - self.ring_bytes

    def answer(self, number: int) -> int:
        """Return what the receiver has said of a long message: 0 nothing, 1 that it wants it in parts, 2 that it has it.

        Its place may be that of a later one already, which is only told once this one has been taken.
        """
        return min(2, max(0, self.words[self._answer(number)] - (number << 1) + 2))

    def answers_at(self, number: int) -> int:
        """Return the word in which the answer comes: 2 * `number` - 1 or 2 * `number`."""
        return self._answer(number)

    def give_up(self, number: int) -> None:
        """Say that a long message is not to be read any more; what is being read of it will not be used."""
        self.words[self._given_up(number)] = number

    def _answer(self, number: int) -> int:
        return self.base + _ANSWERS + number % PLACES

    def _given_up(self, number: int) -> int:
        return self.base + _GIVEN_UP + number % PLACES

    def _room(self, nbytes: int) -> int:
        """Return where in shared memory an entry of some bytes begins, its length written there; -1 where it has no room now."""
        nbytes = -(-nbytes // LINE_BYTES) * LINE_BYTES
        words, base = self.words, self.base
        filled = words[base + FILLED]
        place = filled % self.ring_bytes
        gap = self.ring_bytes - place if place + nbytes > self.ring_bytes else 0
        if filled + gap + nbytes - self._used > self.ring_bytes:
            if nbytes > ENTRY_BYTES_MAX or words[base + FULL]:
                return -1  # and what has become free meanwhile is not known here, lest it be used
            self._used = words[base + USED]
            if filled + gap + nbytes - self._used > self.ring_bytes:
                return -1
        if gap:
            word = (self.ring + place) // 8
            words[word], words[word + 1] = gap, Form.GAP
            words[base + FILLED] = filled + gap
            place = 0
        start = self.ring + place
        words[start // 8] = nbytes
        return start

    def _publish(self, word: int) -> None:
        """Let the receiver see an entry, and that there is news."""
        words, base = self.words, self.base
        words[base + FILLED] += words[word]
        words[base + NEWS] += 1


class RingReader(_Box):
    """The receiver's end of a box. One thread at a time.

    Args:
        shm: The mapped shared memory.
        start: Where the box is.
    """

    @property
    def news(self) -> int:
        """How many messages the sender has spoken of."""
        return self.words[self.base + NEWS]

    @property
    def news_at(self) -> int:
        """The word that says so."""
        return self.base + NEWS

    @property
    def by_link(self) -> int:
        """How many of them went over a link."""
        return self.words[self.base + BY_LINK]

    def first(self) -> RingEntry | None:
        """Return the oldest entry that has not been freed; None where there is none."""
        words, base = self.words, self.base
        while True:
            used = words[base + USED]
            if used == words[base + FILLED]:
                return None
            start = self.ring + used % self.ring_bytes
            word = start // 8
            nbytes_entry, what = words[word], words[word + 1]
            form = what & 0xFF
            if form != Form.GAP:
                break
            words[base + USED] = used + nbytes_entry
        if words[base + FILLED] - used < nbytes_entry:
            return None  # the C runner publishes a long entry piece by piece
        dimensions = what >> 24
        end = word + _FIXED_WORDS + dimensions
        shape = tuple(words[word + _FIXED_WORDS : end])
        kind, dtype, stream, call, nbytes = (
            what >> 8 & 0xFF,
            what >> 16 & 0xFF,
            words[word + 2],
            words[word + 3],
            words[word + 4],
        )
        if form == Form.TOLD:
            return RingEntry(
                form,
                kind,
                dtype,
                stream,
                call,
                nbytes,
                shape,
                0,
                words[end],
                words[end + 1],
                words[end + 2],
            )
        if form == Form.PART:
            return RingEntry(
                form,
                kind,
                dtype,
                stream,
                call,
                nbytes,
                (),
                start + _data_at(_FIXED_WORDS + 1, nbytes),
                words[end],
            )
        return RingEntry(
            form,
            kind,
            dtype,
            stream,
            call,
            nbytes,
            shape,
            start + _data_at(_FIXED_WORDS + dimensions, nbytes),
        )

    def free(self) -> None:
        """Let go of the oldest entry."""
        words, base = self.words, self.base
        used = words[base + USED]
        words[base + USED] = used + words[(self.ring + used % self.ring_bytes) // 8]

    def refuse(self, *, refuses: bool) -> None:
        """Say whether the sender is to put no more in."""
        self.words[self.base + FULL] = refuses

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return some bytes of shared memory, as they lie there."""
        return np.ndarray(nbytes, np.uint8, self._shm.ground, offset)

    def resident(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes of an array of the sender that lives in shared memory."""
        return self._shm.view(offset, nbytes, np.uint8)

    def want(self, number: int) -> None:
        """Ask for a long message in parts."""
        self._say(number, 1)

    def taken(self, number: int) -> None:
        """Say that a long message has been read."""
        self._say(number, 2)

    def was_given_up(self, number: int) -> bool:
        """Return whether the sender has given a long message up."""
        return self.words[self.base + _GIVEN_UP + number % PLACES] >= number

    def _say(self, number: int, what: int) -> None:
        with contextlib.suppress(ValueError):  # shared memory is closed
            self.words[self.base + _ANSWERS + number % PLACES] = (number << 1) - 2 + what


def what_of(kind: int, dtype: int, dimensions: int) -> int:
    """Return what an entry says of an array, as one number."""
    return kind << 8 | dtype << 16 | dimensions << 24
