/* Generated from constants.py by `python syncvar/_native/constants.py`: do not edit. */
#ifndef SYNCVAR_CONSTANTS_H
#define SYNCVAR_CONSTANTS_H

#define FORM 34
#define SPREAD 11400714819323198485ull
#define RANKS_MAX 64
#define RING_SLOTS 32
#define NUMBERS_MAX 1024
#define LEAVES_MAX 1024
#define DTYPES_MAX 8
#define SLOT_ALIGN_BYTES 16
#define LINE 64
#define PAGE 4096
#define ADDRESS 1152921504606846976ull
#define AT_PAGE 4611686018427387904ull
#define OFFER_BITS 3
#define PLACES 8
#define WRITES_PER_DECISION 64

enum Need {
    END = 0,
    AT_ONCE = 1,
    PEER_ENDED = -1073741824,
    UNREAD = -1073741825,
    DISAGREE = -1073741826,
};

enum Opcode {
    COPY = 0,
    STORE = 1,
    COMBINE = 2,
    PUBLISH = 3,
    AWAIT = 4,
};

enum MemoryKind {
    SOURCE = 0,
    TARGET = 1,
    SCRATCH = 2,
    SLOT = 3,
    CELLS = 4,
    COMBINED = 5,
    PEER_SOURCE = 6,
    PEER_TARGET = 7,
};

enum HalfType {
    NO_HALF = 0,
    FLOAT16 = 1,
    BFLOAT16 = 2,
};

enum BlockOffer {
    READS = 1,
    RESIDENT = 2,
    LOCATED = 4,
};

enum RingWord {
    FILLED = 0,
    NEWS = 1,
    NUMBER = 4,
    ATTENDED = 5,
    USED = 8,
    FULL = 9,
    ANSWERS = 16,
    CANCELLED = 24,
};

enum EntryWord {
    LENGTH = 0,
    TYPE_CODE = 1,
    STREAM = 2,
    CALL = 3,
    NBYTES = 4,
    SHAPE = 5,
    START = 5,
};

enum EntryForm {
    GAP = 0,
    WHOLE = 1,
    BY_ADDRESS = 2,
    PART = 3,
};

enum StoreResult {
    FALLBACK = 0,
    STORED = 1,
    STORED_AND_SAMPLE = 2,
};

#endif
