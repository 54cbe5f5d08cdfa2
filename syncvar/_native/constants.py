"""Constants that Python and the C extension share; `constants.h` is generated from this module.

After a change run `python syncvar/_native/constants.py`, which writes the header, and build the
extension again. tests/unit/_native/test_native_constants.py fails as long as the header differs.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

HEADER = Path(__file__).with_name("constants.h")

FORM = 34  # version of the interface between Python and the extension

# Of calls and their checks.
SPREAD = 0x9E3779B97F4A7C15  # odd, so that calls with one fingerprint have different checks
RANKS_MAX = 64  # ranks of a group whose calls the extension runs
# Slots of a rank that take turns. With fewer, a slot would still be in another core's private cache
# when its turn comes.
RING_SLOTS = 32
NUMBERS_MAX = 1024  # numbers of a list that becomes an array
LEAVES_MAX = 1024  # arrays of a pytree that form one vector
DTYPES_MAX = 8  # dtypes of such arrays
SLOT_ALIGN_BYTES = 16  # vectors of different dtypes in a slot begin at multiples of it

# Of shared memory and of locations that ranks publish.
LINE = 64  # bytes of a cache line
PAGE = 4096  # bytes
ADDRESS = 1 << 60  # in a location: an address in the owner's process, not a shared-memory offset
AT_PAGE = 1 << 62  # in the source of a copied input: it has the page at which the cells begin
OFFER_BITS = 3  # of a `BlockOffer`, the lowest bits of a mark

# Of messages and variables.
PLACES = 8  # long messages of a ring that may be open
WRITES_PER_DECISION = 64  # increments of an AUTO variable between two samples


class Need(IntEnum):
    """Values of a need that are neither a word nor a phase.

    A step of a call yields its need: what all other ranks have to publish before the next step. A
    positive need is a word of the channel; words begin at 2. A negative one is minus a phase of
    this call. `GroupChannel.is_reached` reads needs, and `is_at` of channels.c does the same.
    """

    END = 0  # C only: a run has ended
    AT_ONCE = 1  # nothing is needed
    PEER_ENDED = -(1 << 30)  # the process whose memory a run reads has ended
    UNREAD = -(1 << 30) - 1  # the memory of another process could not be read
    DISAGREE = -(1 << 30) - 2  # the ranks make different calls: only the launcher ends the wait


class Opcode(IntEnum):
    """Instruction of a compiled program."""

    COPY = 0
    STORE = 1
    COMBINE = 2
    PUBLISH = 3
    AWAIT = 4


class MemoryKind(IntEnum):
    """Kind of a memory that a program uses."""

    SOURCE = 0  # an input array of this rank
    TARGET = 1  # an output array of this rank
    SCRATCH = 2  # private memory of this rank
    SLOT = 3  # the small slot of a rank, on the side of this call
    CELLS = 4  # the cells of a rank: place 0 on the side of its phase 0, place 1 on the other side
    COMBINED = 5  # what a rank has combined for the others: two halves
    PEER_SOURCE = 6  # an input array of a rank, read in place
    PEER_TARGET = 7  # the output array of a rank, written in place by others


class HalfType(IntEnum):
    """Half type that is combined as float32."""

    NO_HALF = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class BlockOffer(IntEnum):
    """Bits that a rank publishes about its long blocks; 0 if they go by cells."""

    READS = 1  # it can read the memory of all ranks
    RESIDENT = 2  # its blocks, if any, are in shared memory
    LOCATED = 4  # it has published the locations of its blocks


class RingWord(IntEnum):
    """Word in the header of a message ring; see `syncvar.shm.message_ring`."""

    FILLED = 0
    NEWS = 1
    NUMBER = 4
    ATTENDED = 5
    USED = 8
    FULL = 9
    ANSWERS = 16
    CANCELLED = 24


class EntryWord(IntEnum):
    """Word of an entry in a message ring; START is the first byte of a part in its message."""

    LENGTH = 0
    TYPE_CODE = 1
    STREAM = 2
    CALL = 3
    NBYTES = 4
    SHAPE = 5
    START = 5


class EntryForm(IntEnum):
    """Form of an entry in a message ring."""

    GAP = 0
    WHOLE = 1
    BY_ADDRESS = 2  # of a long message: the entry has its location
    PART = 3


class StoreResult(IntEnum):
    """What a persistent write of a variable has done."""

    FALLBACK = 0  # nothing: the slow path has to make the write
    STORED = 1
    STORED_AND_SAMPLE = 2  # and the deferral policy has to look at the variable


def header() -> str:
    """Return the text of `constants.h`."""
    lines = [
        "/* Generated from constants.py by `python syncvar/_native/constants.py`: do not edit. */",
        "#ifndef SYNCVAR_CONSTANTS_H",
        "#define SYNCVAR_CONSTANTS_H",
        "",
    ]
    for name, value in globals().items():
        if isinstance(value, int) and name.isupper():
            lines.append(f"#define {name} {_literal(value)}")
        elif isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum:
            # Not `value.items()`: an alias, as START, belongs into the header too.
            members = [f"    {one} = {int(each)}," for one, each in value.__members__.items()]
            lines += ["", f"enum {name} {{", *members, "};"]
    return "\n".join([*lines, "", "#endif", ""])


def _literal(value: int) -> str:
    return f"{value}ull" if value >= 1 << 31 else str(value)


if __name__ == "__main__":
    HEADER.write_text(header())
