"""Compile reductions of long arrays: every rank combines all, or each rank a part of each segment.

* **all sum** (few ranks): each rank writes its cells and combines the cells of all. It reads its
  own input in place. No cell crosses shared memory twice.
* **owners** (many ranks): the vector is cut into segments. Rank r combines part r of each segment
  for all ranks, which read the combination there.
* **into all**: if the targets of all ranks are in shared memory, an owner writes its combination
  into all of them.

Cells have two sides of `lag` cells, used in turn. So a rank may be up to `lag` cells ahead of the
others. Invariant: in turn t phase t has been published. Waiting for phase t - lag + 1 of the others
then proves two things: all ranks have written cell t, and all have read the cell that turn t + lag
overwrites.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from syncvar._native.constants import MemoryKind
from syncvar.algorithms.schedule import even_chunks
from syncvar.runtime.instructions import (
    Await,
    Combine,
    CompiledProgram,
    CopyInstruction,
    Instruction,
    Memory,
    Program,
    Publish,
    Span,
    assemble,
    in_cell,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCRATCH = Memory(MemoryKind.SCRATCH)
_FOLDS_MAX = 4  # arrays of a cell that are combined one by one; more are copied together


class Cells(NamedTuple):
    """How a group cuts long vectors; the same on all ranks."""

    elements: int
    lag: int = 1
    sums_all: bool = False  # every rank combines everything


class BufferPlacement(NamedTuple):
    """Placement of the inputs and outputs of a call, and what follows from it."""

    sources: frozenset[int] = frozenset()  # ranks whose input the others read in place
    into_all: bool = False  # the targets of all ranks are in shared memory, and others write them
    converts: bool = False  # this rank's input has another dtype than its cells
    # An input that others read is its own target, so only its owner may read it
    by_owners: bool = False
    # More of the call follows, which may write all cells: all must be read at the end
    goes_on: bool = False
    # A combination cannot be made in a target: it is converted, or applied to it
    makes_first: bool = False


class ResultPlacement(NamedTuple):
    """Which inputs each rank gets combined: all, all on the root only, or those of a prefix."""

    collective: str = "all_reduce"  # all_reduce, reduce, scan or exscan
    root: int = 0

    def terms(self, rank: int, size: int) -> range:
        """Return the ranks whose inputs a rank of the group gets combined."""
        if self.collective == "reduce":
            return range(size if rank == self.root else 0)
        if self.collective == "scan":
            return range(rank + 1)
        return range(rank if self.collective == "exscan" else size)

    def divisor(self, rank: int, size: int) -> int:
        """Return the divisor of a mean on a rank; 0 for one input, which is not divided.

        NumPy divides a complex infinity by 1 to inf+nanj, so all ways have to agree.
        """
        count = size if self.collective == "reduce" else len(self.terms(rank, size))
        return count if count > 1 else 0

    @property
    def is_prefix(self) -> bool:
        """Whether each rank gets another combination, so that no rank can combine for others."""
        return self.collective in ("scan", "exscan")


EVERYWHERE = ResultPlacement()
"""All ranks end with the combination of all."""


@lru_cache(maxsize=1024)
def owner_bounds(count: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each rank's part of a segment."""
    return tuple((chunk.start, chunk.stop) for chunk in even_chunks(count, size))


@lru_cache(maxsize=256)
def reduce_code(
    rank: int,
    size: int,
    counts: int | tuple[int, ...],
    cells: Cells | None,
    places: BufferPlacement,
    block: int = 1,
    ends: ResultPlacement = EVERYWHERE,
) -> CompiledProgram:
    """Compile `lower_reduce`, or without cells `lower_small`."""
    if cells is None:
        return assemble(lower_small(rank, size, counts, makes_first=places.makes_first, ends=ends))
    return assemble(lower_reduce(rank, size, counts, cells, places, block, ends))


def lower_small(
    rank: int,
    size: int,
    counts: int | tuple[int, ...],
    *,
    makes_first: bool = False,
    ends: ResultPlacement = EVERYWHERE,
) -> Program:
    """Return a rank's program of a reduction through slots: every rank combines its own result.

    Example:
        >>> program = lower_small(0, 2, (2, 3))
        >>> len(program.opening), [type(step).__name__ for step in program.steps]
        (2, ['Combine', 'CopyInstruction', 'CopyInstruction'])
    """
    arrays = _Arrays(counts)
    slots = [Span(Memory(MemoryKind.SLOT, one), 0, arrays.count) for one in range(size)]
    terms = tuple([slots[one] for one in ends.terms(rank, size)])
    is_one = len(arrays.counts) == 1
    if is_one:
        steps = arrays.sum(terms, 0, arrays.count, None, makes_first=makes_first)
    else:
        steps = arrays.sum_whole(terms, 0, arrays.count)
    return Program(arrays.copies_into(slots[rank], 0), steps)


@lru_cache(maxsize=256)
def pieces(counts: tuple[int, ...], start: int, stop: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return (array, first, last, place in the range) of the parts that form [start, stop).

    Example:
        >>> pieces((2, 0, 3), 1, 4)
        ((0, 1, 2, 0), (2, 0, 2, 1))
    """
    found = []
    begin = 0
    for array, count in enumerate(counts):
        low, high = max(start, begin), min(stop, begin + count)
        if high > low:
            found.append((array, low - begin, high - begin, low - start))
        begin += count
        if begin >= stop:
            break
    return tuple(found)


class _Arrays:
    """The arrays that form a vector, SOURCE and TARGET 0, 1, ...; `counts` are their elements."""

    def __init__(self, counts: int | tuple[int, ...]) -> None:
        self.counts = counts if isinstance(counts, tuple) else (counts,)
        self.count = sum(self.counts)

    def copies_into(self, cell: Span, start: int) -> tuple[CopyInstruction, ...]:
        """Return the copies of source elements, from `start` on, into another memory."""
        pairs = self._pairs(MemoryKind.SOURCE, cell, start)
        return tuple([CopyInstruction(theirs, ours) for theirs, ours in pairs])

    def copies_from(self, combined: Span, start: int) -> tuple[CopyInstruction, ...]:
        """Return the copies of a combination into the targets, from `start` of the vector on."""
        pairs = self._pairs(MemoryKind.TARGET, combined, start)
        return tuple([CopyInstruction(ours, theirs) for theirs, ours in pairs])

    def are_many(self, start: int, length: int) -> bool:
        """Return whether a range covers so many arrays that they are combined together."""
        return len(self.counts) > _FOLDS_MAX and len(self._pieces(start, length)) > _FOLDS_MAX

    def sum(
        self,
        terms: tuple[Span, ...],
        start: int,
        length: int,
        own: int | None,
        *,
        makes_first: bool,
    ) -> tuple[Instruction, ...]:
        """Return the steps that combine terms and store them in the targets, from `start` on.

        The term `own` is read from the sources where the arrays are few. All ranks must decide
        alike: which of two NaN is kept may depend on how many elements are combined at once.
        """
        if self.are_many(start, length):
            return self.sum_whole(terms, start, length)
        steps: list[Instruction] = []
        for array, parts, first in self._folds(terms, start, length, own) if terms else ():
            target = Span(Memory(MemoryKind.TARGET, -1, array), first, parts[0].length)
            combined = parts[0]
            if len(parts) > 1:
                combined = Span(_SCRATCH, 0, target.length) if makes_first else target
                steps.append(Combine(parts, combined))
            if combined != target:
                steps.append(CopyInstruction(combined, target))
        return tuple(steps)

    def sum_whole(
        self, terms: tuple[Span, ...], start: int, length: int
    ) -> tuple[Instruction, ...]:
        """Return the same steps for terms that are combined at once, and then stored."""
        if len(terms) < 2:
            return self.copies_from(terms[0], start) if terms else ()
        combined = Span(_SCRATCH, 0, length)
        return (Combine(terms, combined), *self.copies_from(combined, start))

    def sum_into(
        self, combined: Span, terms: tuple[Span, ...], start: int, own: int | None
    ) -> list[Combine]:
        """Return the steps that combine terms into one memory; `own` as in `sum`."""
        if self.are_many(start, combined.length):
            return [Combine(terms, combined)]
        folds, done = [], 0
        for _, parts, _ in self._folds(terms, start, combined.length, own):
            folds.append(Combine(parts, combined.cut(done, done + parts[0].length)))
            done += parts[0].length
        return folds

    def _folds(
        self, terms: tuple[Span, ...], start: int, length: int, own: int | None
    ) -> Iterator[tuple[int, tuple[Span, ...], int]]:
        """Yield (array, parts of the terms, first element) for each array in a range."""
        for array, first, last, place in self._pieces(start, length):
            parts = [term.cut(place, place + last - first) for term in terms]
            if own is not None:
                parts[own] = Span(Memory(MemoryKind.SOURCE, -1, array), first, last - first)
            yield array, tuple(parts), first

    def _pieces(self, start: int, length: int) -> tuple[tuple[int, int, int, int], ...]:
        if len(self.counts) > 1:
            return pieces(self.counts, start, start + length)
        return ((0, start, start + length, 0),) if length else ()

    def _pairs(self, kind: MemoryKind, whole: Span, start: int) -> list[tuple[Span, Span]]:
        """Return the parts of arrays in a range, each with its part of another memory."""
        pairs = []
        for array, first, last, place in self._pieces(start, whole.length):
            part = Span(Memory(kind, -1, array), first, last - first)
            pairs.append((part, whole.cut(place, place + last - first)))
        return pairs


def lower_reduce(
    rank: int,
    size: int,
    counts: int | tuple[int, ...],
    cells: Cells,
    places: BufferPlacement,
    block: int,
    ends: ResultPlacement = EVERYWHERE,
) -> Program:
    """Return a rank's program of a reduction.

    `counts` are the elements of the vector, at least 1, or of the arrays whose concatenation it is;
    arrays are always copied. `block` elements are combined at once if the targets are in shared
    memory. If `ends` is not EVERYWHERE, others write into no target and read no input that is its
    own target.

    Example:
        >>> program = lower_reduce(0, 2, 5, Cells(4, sums_all=True), BufferPlacement(), 8)
        >>> len(program.opening), [type(step).__name__ for step in program.steps]
        (1, ['CopyInstruction', 'Combine', 'Publish', 'Await', 'Combine'])
    """
    return _Lowering(rank, size, _Arrays(counts), cells, places, block, ends).program()


class _Lowering:
    def __init__(
        self,
        rank: int,
        size: int,
        arrays: _Arrays,
        cells: Cells,
        places: BufferPlacement,
        block: int,
        ends: ResultPlacement,
    ) -> None:
        self.rank, self.size, self.arrays = rank, size, arrays
        self.cells, self.places, self.block = cells, places, block
        self.count = arrays.count
        self.turns = -(-self.count // cells.elements)
        self.steps: list[Instruction] = []
        self.sums_all = (
            (cells.sums_all or ends.is_prefix) and not places.into_all and not places.by_owners
        )
        self.terms = ends.terms(rank, size)
        read = [
            one
            for one in range(size)
            if not self.sums_all
            or any(one in ends.terms(other, size) for other in range(size) if other != one)
        ]
        self.are_put = any(one not in places.sources for one in read)
        reads_own = places.converts or len(arrays.counts) > _FOLDS_MAX  # from its cells
        self.puts = rank not in places.sources and (
            rank in read or (reads_own and rank in self.terms)
        )

    def program(self) -> Program:
        if self.places.into_all and len(self.places.sources) == self.size:
            low, high = owner_bounds(self.count, self.size)[self.rank]
            inputs = [Memory(MemoryKind.PEER_SOURCE, rank) for rank in range(self.size)]
            self._into_all(low, [Span(memory, low, high - low) for memory in inputs])
            return Program((), (*self.steps, Publish(), Await()), None)
        opening = tuple(
            copy for turn in range(min(self.cells.lag, self.turns)) for copy in self._put(turn)
        )
        if self.sums_all:
            self._all_sum()
        else:
            self._owners()
        last = ((self.turns - 1) // self.cells.lag) & 1 if self.puts and self.turns else None
        is_read = not self.sums_all or bool(self.places.sources) or self.places.goes_on
        return Program(opening, tuple(self.steps), last, is_read)

    def _length(self, turn: int) -> int:
        return min(self.cells.elements, self.count - turn * self.cells.elements)

    def _in_cells(self, rank: int, turn: int, low: int, high: int) -> Span:
        """Return where others read elements [low, high) of a rank's segment in a turn."""
        if rank in self.places.sources:
            return Span(
                Memory(MemoryKind.PEER_SOURCE, rank), turn * self.cells.elements + low, high - low
            )
        return self._cell(rank, turn, low, high)

    def _own_of(self, terms: range) -> int | None:
        """Return the index of the term that this rank reads in place; None if its dtype differs."""
        return terms.index(self.rank) if self.rank in terms and not self.places.converts else None

    def _cell(self, rank: int, turn: int, low: int, high: int) -> Span:
        return in_cell(rank, turn, self.cells.lag, self.cells.elements, low, high - low)

    def _put(self, turn: int) -> list[CopyInstruction]:
        """Return the copies into this rank's cell; its own part only if converted."""
        if not self.puts or turn >= self.turns:
            return []
        length, start = self._length(turn), turn * self.cells.elements
        low, high = owner_bounds(length, self.size)[self.rank]
        if self.sums_all or self.places.converts or self.arrays.are_many(start + low, high - low):
            low = high = 0  # copy its own part too
        copies: list[CopyInstruction] = []
        for first, last in ((0, low), (high, length)):
            if last > first:
                cell = self._cell(self.rank, turn, first, last)
                copies += self.arrays.copies_into(cell, start + first)
        return copies

    def _all_sum(self) -> None:
        lag, turns = self.cells.lag, self.turns
        # Once the others have read so many cells, only those of the last side may be unread.
        heard = (turns - 1) // lag * lag if self.are_put else 0
        for turn in range(turns):
            if heard and turn >= lag:
                self.steps.append(Await(min(turn, heard) - (turn - lag + 1)))
            self.steps += self._put(turn + lag)
            length = self._length(turn)
            terms = tuple([self._in_cells(rank, turn, 0, length) for rank in self.terms])
            start, own = turn * self.cells.elements, self._own_of(self.terms)
            makes_first = self.places.makes_first
            self.steps += self.arrays.sum(terms, start, length, own, makes_first=makes_first)
            if turn < heard:
                self.steps.append(Publish())
        # Published inputs must stay until all ranks have read them.
        if self.places.sources or self.places.goes_on:
            self.steps += [Publish(), Await()]
        elif heard > max(0, turns - lag):
            self.steps.append(Await())

    def _owners(self) -> None:
        lag, turns, into_all = self.cells.lag, self.turns, self.places.into_all
        for turn in range(turns + (0 if into_all else lag)):
            published = min(turn, turns)
            if turn >= lag:
                self.steps.append(Await(published - (turn - lag + 1)))
            self.steps += self._put(turn + lag)
            if turn < turns:
                self._own_part(turn)
            if not into_all and self.terms and 0 <= turn - lag < turns:
                self._take(turn - lag)
            if turn < turns:
                self.steps.append(Publish())
        if into_all:
            self.steps.append(Await())

    def _own_part(self, turn: int) -> None:
        low, high = owner_bounds(self._length(turn), self.size)[self.rank]
        start = turn * self.cells.elements + low
        terms = [self._in_cells(rank, turn, low, high) for rank in range(self.size)]
        own = self._own_of(range(self.size))
        if self.places.into_all:
            if own is not None:
                terms[own] = Span(Memory(MemoryKind.SOURCE), start, high - low)
            self._into_all(start, terms)
        elif high > low:
            combined = self._combined_span(self.rank, turn, high - low)
            self.steps += self.arrays.sum_into(combined, tuple(terms), start, own)
            self.steps += self.arrays.copies_from(combined, start) if self.terms else ()

    def _combined_span(self, rank: int, turn: int, count: int) -> Span:
        lag = self.cells.lag
        part = owner_bounds(self.cells.elements, self.size)[0][1]  # the longest
        return Span(Memory(MemoryKind.COMBINED, rank, (turn // lag) & 1), turn % lag * part, count)

    def _take(self, turn: int) -> None:
        """Take what the others have combined."""
        parts = owner_bounds(self._length(turn), self.size)
        for distance in range(1, self.size):
            other = (self.rank + distance) % self.size
            low, high = parts[other]
            if high > low:
                self.steps += self.arrays.copies_from(
                    self._combined_span(other, turn, high - low), turn * self.cells.elements + low
                )

    def _into_all(self, start: int, terms: list[Span]) -> None:
        """Combine terms into the targets of all ranks, by blocks that stay in the caches."""
        count = terms[0].length
        memories = [Memory(MemoryKind.PEER_TARGET, rank) for rank in range(self.size)]
        for low in range(0, count, self.block):
            high = min(count, low + self.block)
            parts = tuple(term.cut(low, high) for term in terms)
            targets = [Span(memory, start + low, high - low) for memory in memories]
            combined = Span(_SCRATCH, 0, high - low) if self.places.makes_first else targets[0]
            # Only the first term may be `combined` itself.
            self.steps.append(Combine(parts, combined))
            self.steps += [
                CopyInstruction(combined, target) for target in targets if target is not combined
            ]
