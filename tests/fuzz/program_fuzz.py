"""Random programs by both runners over the same memory, and broken ones by the C runner: python program_fuzz.py SEED COUNT."""

import os
import sys

import ml_dtypes
import numpy as np

GUARD = 64  # bytes around each array that nothing may change
SHM_BYTES = 1 << 16
WORDS = 16  # of an entry
ABORT = 8
DTYPES = [np.uint8, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex128]


def channel_over(memory, size):
    """Return a channel whose other ranks have published everything already."""
    from syncvar._native import ChannelState, bind

    class Channel(ChannelState):
        def publish(self):
            self.phase += 1

    made, words = Channel(), memory.view(np.uint64)
    entries = [(2 + rank) * WORDS for rank in range(size)]
    for entry in entries[1:]:
        words[entry], words[entry + 3] = 1 << 40, 1 << 40
    made.side = made.last = made.phase = made.tail = 0
    made.is_settled = True
    places = (1, 3, 4, 8, 10, ABORT, 14)
    assert bind(
        made,
        memory,
        entries[0],
        places,
        tuple(entries[1:]),
        (4096,) * size,
        (64, 4096, 1024),
        0,
        0,
        4,
        (os.getpid(),) * size,
    )
    return made


class Place:
    """A memory of a program: an array of its own between guards, or a stretch of shared memory."""

    def __init__(self, draw, dtype, shm, offset):
        itemsize = np.dtype(dtype).itemsize
        self.count = int(draw.integers(1, 5000))
        self.offset = offset
        if offset < 0:
            whole = np.frombuffer(draw.bytes(self.count * itemsize + 2 * GUARD), np.uint8).copy()
            self.whole, self.array = whole, whole[GUARD:-GUARD].view(dtype)
        else:
            self.count = min(self.count, 8192 // itemsize)
            self.whole = None
            self.array = shm[offset : offset + self.count * itemsize].view(dtype)


def stretch(draw, places, length=None):
    number = int(draw.integers(len(places)))
    most = places[number].count if length is None else min(length, places[number].count)
    length = int(draw.integers(1, most + 1)) if length is None else most
    return number, int(draw.integers(0, places[number].count - length + 1)), length


def steps_of(draw, places):
    """Return random steps in which nothing overlaps that must not."""
    from syncvar.runtime.instructions import AWAIT, COMBINE, COPY, PUBLISH, STORE

    made = []
    for _ in range(int(draw.integers(1, 20))):
        kind = (COPY, STORE, COMBINE, PUBLISH, AWAIT)[int(draw.integers(5))]
        if kind == PUBLISH:
            made.append((PUBLISH,))
        elif kind == AWAIT:
            made.append((AWAIT, int(draw.integers(0, 3))))
        elif kind == COMBINE:
            target, start, length = stretch(draw, places)
            terms = [stretch(draw, places, length) for _ in range(int(draw.integers(1, 6)))]
            length = min(length, *(term[2] for term in terms))
            kept = tuple((number, first) for number, first, _ in terms if number != target)
            if kept and draw.integers(2):
                kept = ((target, start), *kept)  # in place
            if len(kept) > 1:
                made.append((COMBINE, kept, target, start, length))
        else:
            source, first, length = stretch(draw, places)
            target, start, length = stretch(draw, places, length)
            if source != target:
                made.append((kind, source, first, target, start, length))
    return made


def contents(places, shm):
    return [
        shm.tobytes(),
        *(place.whole.tobytes() for place in places if place.whole is not None),
    ]


def both(draw):
    """Run a random program by both runners; the bytes of all memories are the same afterwards."""
    from syncvar._native import program, run
    from syncvar.runtime.arithmetic import Arithmetic, folder
    from syncvar.runtime.instructions import (
        COMBINE,
        COPY,
        STORE,
        CompiledProgram,
        Memory,
        MemoryKind,
    )
    from syncvar.runtime.program_runner import ADDRESS, interpret
    from syncvar.runtime.shm_reduce import ReduceBuffers

    dtype = np.dtype(DTYPES[int(draw.integers(len(DTYPES)))])
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    ufunc = [np.add, np.multiply, np.maximum][int(draw.integers(3 if dtype.kind != "c" else 2))]
    divisor = 3 if wide.kind in "fc" and draw.integers(2) else 0
    shm = np.zeros(SHM_BYTES, np.uint8)
    shm[4096:] = np.frombuffer(draw.bytes(SHM_BYTES - 4096), np.uint8) % 60  # no NaN
    places = [
        Place(draw, dtype, shm, 16384 + 8192 * number if draw.integers(2) else -1)
        for number in range(int(draw.integers(2, 6)))
    ]
    for place in places:
        place.array[...] = draw.integers(0, 9, place.count).astype(dtype)
    steps = steps_of(draw, places)
    vector = ReduceBuffers.of([np.empty(1, dtype)], [np.empty(1, dtype)], ufunc, wide, divisor)
    how = vector.arithmetic
    arrays, offsets = tuple(place.array for place in places), [place.offset for place in places]
    memories = [Memory(MemoryKind.SCRATCH, -1, number) for number in range(len(places))]
    if draw.integers(
        2
    ):  # nothing is combined, and what is only read lies in a process, here this one
        how, steps = Arithmetic(None, dtype, dtype), [step for step in steps if step[0] != COMBINE]
        written = {step[3] for step in steps if step[0] in (COPY, STORE)}
        for number, place in enumerate(places):
            if number not in written and place.whole is not None:
                memories[number] = Memory(MemoryKind.PEER_SOURCE, 1, number)
                offsets[number] = ADDRESS | place.array.__array_interface__["data"][0]
    offsets = tuple(offsets)
    code = CompiledProgram(
        {memory: place.count for memory, place in zip(memories, places, strict=True)},
        (),
        tuple(steps),
        None,
    )
    before = contents(places, shm)
    channel = channel_over(shm, 3)
    made = program(*code.numbers(), how.native)
    assert made is not None
    assert list(run(made, channel, arrays, offsets, keeps_lock=bool(draw.integers(2)))) == []
    phases, native = channel.phase, contents(places, shm)
    words = shm[:4096].copy()
    for place, bytes_before in zip(
        [shm, *(place.whole for place in places if place.whole is not None)], before, strict=True
    ):
        place[...] = np.frombuffer(bytes_before, np.uint8)
    channel = channel_over(shm, 3)
    with np.errstate(all="ignore"):
        needs = list(
            interpret(
                channel, steps, arrays, np.copyto, np.copyto, folder(vector.arithmetic, hold=False)
            )
        )
    assert len(needs) == sum(step[0] == 4 for step in steps)
    assert channel.phase == phases
    shm[:4096] = words
    assert contents(places, shm) == native, (dtype, ufunc, divisor, steps)
    return made, code, how, channel, arrays, offsets, places, shm


def broken(draw, code, how, channel, arrays, offsets, places, shm):
    """Change a program anywhere: it is refused, or does nothing outside of its memories."""
    from syncvar._native import program, run

    numbers, opening, names, sizes = code.numbers()
    changed = np.frombuffer(numbers, np.int64).copy()
    if not changed.size:
        return
    for place in draw.integers(0, changed.size, 3):
        changed[place] = draw.choice(
            [-1, 0, 1, 2, 3, 4, 7, 10_000, 1 << 40, -(1 << 62), (1 << 62) + 1]
        )
    cut = int(draw.integers(0, changed.size + 1))
    opening = int(draw.choice([opening, 0, 6, 1, -1, 12, 1 << 40]))
    made = program(changed[:cut].tobytes(), opening, names, sizes, how.native)
    guards = [
        (place.whole[:GUARD].copy(), place.whole[-GUARD:].copy())
        for place in places
        if place.whole is not None
    ]
    outside = shm[:16384].copy()
    if made is not None:
        for _ in zip(run(made, channel, arrays, offsets, keeps_lock=True), range(3), strict=False):
            pass
        outside.view(np.uint64)[2 * WORDS + 3] = shm.view(np.uint64)[2 * WORDS + 3]  # its own phase
    assert (shm[:16384] == outside).all()
    for place, (low, high) in zip(
        [place for place in places if place.whole is not None], guards, strict=True
    ):
        assert (place.whole[:GUARD] == low).all()
        assert (place.whole[-GUARD:] == high).all()


def main(seed, count):
    for turn in range(count):
        draw = np.random.default_rng([seed, turn])
        made, *rest = both(draw)
        del made
        for _ in range(5):
            broken(draw, *rest)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    print("the same")
