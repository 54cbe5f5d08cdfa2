"""Programs: the work of a rank in one call in shared memory, as data.

A **program** is a tuple of instructions over named **memories**: input and output arrays of this
rank, slots and cells that ranks write for each other, arrays of other ranks. It has no addresses,
so one program serves every call of its kind; a runner looks the memories up for each call.

Before a program begins, all ranks have published the same call (phase 0), together with the cells
that the opening of the program wrote. Four instructions follow:

* `CopyInstruction` copies a span of one memory to another one.
* `Combine` combines spans in rank order, by the tree of `algorithms.reproducible_tree.tree_order`.
* `Publish` publishes that everything before it is done.
* `Await` waits until the others have published as much.

A copy to a result (`TARGET`, `PEER_TARGET`) is a **store**: it converts to the array's dtype, or
applies a ufunc to the array. A rank that has waited for publication p of the others knows only that
they have done everything before it. The compilers must guarantee that a span is read after it was
written, and overwritten after all have read it. Tests prove it: they run the programs of all ranks
on symbols, in every order that the waits allow.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from syncvar._native.constants import MemoryKind, Opcode


class Memory(NamedTuple):
    """One memory of a program."""

    kind: MemoryKind
    rank: int = -1  # its owner in the group; -1 for private memory of this rank
    place: int = 0  # index among several

    def __str__(self) -> str:
        kind, rank, place = self
        if kind in (MemoryKind.SOURCE, MemoryKind.TARGET, MemoryKind.SCRATCH):
            return _NAMES[kind] + (f" {place}" if place else "")
        which = f", block {place}" if place else ""
        if kind in (MemoryKind.CELLS, MemoryKind.COMBINED):
            which = f", side {place}"
        return f"{_NAMES[kind]} of rank {rank}{which} "


_NAMES = {
    MemoryKind.SOURCE: "source",
    MemoryKind.TARGET: "target",
    MemoryKind.SCRATCH: "scratch",
    MemoryKind.SLOT: "slot",
    MemoryKind.CELLS: "cells",
    MemoryKind.COMBINED: "combined",
    MemoryKind.PEER_SOURCE: "array",
    MemoryKind.PEER_TARGET: "target",
}


class Span(NamedTuple):
    """Elements [start, start + length) of a memory."""

    memory: Memory
    start: int
    length: int

    def cut(self, low: int, high: int) -> Span:
        """Return the elements [low, high) of this span."""
        return Span(self.memory, self.start + low, high - low)

    def __str__(self) -> str:
        return f"{self.memory}[{self.start}:{self.start + self.length}]"


def in_cell(rank: int, turn: int, lag: int, width: int, start: int, length: int) -> Span:
    """Return a span of the cell that a rank writes in a turn; two sides have `lag` cells each."""
    return Span(Memory(MemoryKind.CELLS, rank, turn // lag & 1), turn % lag * width + start, length)


class CopyInstruction(NamedTuple):
    """Set target to source, of the same length."""

    source: Span
    target: Span

    def __str__(self) -> str:
        return f"copy     {self.source} -> {self.target}"


class Combine(NamedTuple):
    """Set target to the combination of the terms, in their order, all of one length."""

    terms: tuple[Span, ...]
    target: Span

    def __str__(self) -> str:
        return f"fold     {', '.join(map(str, self.terms))} -> {self.target}"


class Publish(NamedTuple):
    """Publish the next phase of the call."""

    def __str__(self) -> str:
        return "publish  the next phase"


class Await(NamedTuple):
    """Wait until all others have published what this rank published `back` publications ago."""

    back: int = 0

    def __str__(self) -> str:
        ago = f"the phase {self.back} before this rank's last"
        ago = ago if self.back else "this rank's last phase"
        return f"await    {ago} of all others"


Instruction = CopyInstruction | Combine | Publish | Await


class Program(NamedTuple):
    """Program of a rank."""

    opening: tuple[CopyInstruction, ...]
    steps: tuple[Instruction, ...]  # steps after all ranks have published the same call
    # Side of its cells that is written last: 0 that of phase 0, 1 the other; None for none
    last_side: int | None = None
    is_read: bool = True  # at its end all ranks have read this rank's cells


def program_text(program: Program, most: int | None = None) -> str:
    """Return a program as text, one instruction a line, with at most `most` steps after phase 0.

    Example:
        >>> from syncvar.runtime.compile_reduce import lower_small
        >>> print(program_text(lower_small(0, 2, 3)), end="")
        copy     source[0:3] -> slot of rank 0 [0:3]
        phase 0  all ranks publish their call, and compare
        fold     slot of rank 0 [0:3], slot of rank 1 [0:3] -> target[0:3]
    """
    steps = program.steps[:most]
    left = len(program.steps) - len(steps)
    phase_0 = "phase 0  all ranks publish their call, and compare"
    lines = [*program.opening, phase_0, *steps, *([f"...      {left} more"] if left else [])]
    return "".join(f"{line}\n" for line in lines)


def extents(program: Program) -> dict[Memory, int]:
    """Return the least number of elements of each memory.

    Example:
        >>> x, slot = Memory(MemoryKind.SOURCE), Memory(MemoryKind.SLOT, 1)
        >>> extents(Program((CopyInstruction(Span(x, 2, 3), Span(slot, 0, 3)),), ()))[x]
        5
    """
    found: dict[Memory, int] = {}
    for step in (*program.opening, *program.steps):
        stretches: tuple[Span, ...] = ()
        if isinstance(step, CopyInstruction):
            stretches = step
        elif isinstance(step, Combine):
            stretches = (*step.terms, step.target)
        for memory, start, length in stretches:
            found[memory] = max(found.get(memory, 0), start + length)
    return found


# Plain integers: the interpreter compares them in its loop.
COPY, STORE, COMBINE, PUBLISH, AWAIT = map(int, Opcode)
_SHARED = (MemoryKind.SLOT, MemoryKind.CELLS, MemoryKind.COMBINED)


class CompiledProgram:
    """A program for a runner: memories are numbers, instructions are tuples of numbers.

    Args:
        sizes: Least number of elements of each memory, in the order of their numbers.
        opening: Instructions (COPY, source, first, target, first, length).
        steps: (COPY or STORE, source, first, target, first, length), (COMBINE, ((term, first),
            ...), target, first, length), (PUBLISH,) and (AWAIT, back).
        last_side, is_read: As in the program.
    """

    def __init__(
        self,
        sizes: dict[Memory, int],
        opening: tuple[tuple[int, ...], ...],
        steps: tuple[tuple[Any, ...], ...],
        last_side: int | None,
        *,
        is_read: bool = True,
    ) -> None:
        self.sizes, self.opening, self.steps = sizes, opening, steps
        self.last_side, self.is_read = last_side, is_read
        self.natives: dict[Any, Any] = {}  # the program for the C extension, by its arithmetic
        numbered = list(enumerate(sizes))
        # (number, memory) of memories in which ranks write for each other
        self.shared = [(number, memory) for number, memory in numbered if memory.kind in _SHARED]
        # (number, kind, rank, place, elements) of memories whose location differs in each call
        self.own = [
            (number, int(memory.kind), memory.rank, memory.place, sizes[memory])
            for number, memory in numbered
            if memory.kind not in _SHARED
        ]
        # Some of these are cells
        self.uses_cells = any(memory.kind == MemoryKind.CELLS for memory in sizes)
        # The opening with copies to adjacent spans joined: ((source, first, length)..., target,
        # first)
        self.joins = _joined(opening)

    def numbers(self) -> tuple[bytes, int, tuple[int, ...], tuple[int, ...]]:
        """Return the program for C: code, numbers of the opening, names and sizes of memories."""
        found = array("q")
        for copied in self.opening:
            found.extend(copied)
        opening = len(found)
        for step in self.steps:
            if step[0] == COMBINE:
                _, terms, target, first, length = step
                found.extend((COMBINE, target, first, length, len(terms)))
                found.extend(number for term in terms for number in term)
            else:
                found.extend(step)
        names = tuple(int(number) for memory in self.sizes for number in memory)
        return found.tobytes(), opening, names, tuple(self.sizes.values())


def _joined(
    opening: tuple[tuple[int, ...], ...],
) -> list[tuple[list[tuple[int, int, int]], int, int]]:
    joins: list[tuple[list[tuple[int, int, int]], int, int]] = []
    end = -1
    for _, source, first, target, start, length in opening:
        if joins and joins[-1][1] == target and start == end:
            joins[-1][0].append((source, first, length))
        else:
            joins.append(([(source, first, length)], target, start))
        end = start + length
    return joins


def assemble(program: Program) -> CompiledProgram:
    """Compile a program for a runner."""
    sizes = extents(program)
    numbers = {memory: number for number, memory in enumerate(sizes)}

    def coded(step: Instruction) -> tuple[Any, ...]:
        if isinstance(step, CopyInstruction):
            source, target = step
            kind = (
                STORE if target.memory.kind in (MemoryKind.TARGET, MemoryKind.PEER_TARGET) else COPY
            )
            here, there = numbers[source.memory], numbers[target.memory]
            return kind, here, source.start, there, target.start, source.length
        if isinstance(step, Combine):
            terms = tuple([(numbers[term.memory], term.start) for term in step.terms])
            target = step.target
            return COMBINE, terms, numbers[target.memory], target.start, target.length
        return (PUBLISH,) if isinstance(step, Publish) else (AWAIT, step.back)

    opening, steps = tuple(map(coded, program.opening)), tuple(map(coded, program.steps))
    return CompiledProgram(sizes, opening, steps, program.last_side, is_read=program.is_read)
