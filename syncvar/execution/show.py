"""Programs as text, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.execution.program import Await, Copy, Fold, Kind, Publish

if TYPE_CHECKING:
    from syncvar.execution.program import Instruction, Memory, Program, Stretch

__all__ = ["program_text"]

_OWN = {Kind.SOURCE: "source", Kind.TARGET: "target", Kind.SCRATCH: "scratch"}
_SHARED = {Kind.SLOT: "slot", Kind.CELLS: "cells", Kind.MADE: "made", Kind.LYING: "array", Kind.GOAL: "target"}


def program_text(program: Program, most: int | None = None) -> str:
    """Return a program, an instruction a line.

    Args:
        program: Of a rank.
        most: So many instructions after phase 0 at most; None for all.

    Example:
        >>> from syncvar.execution.lower_reduce import lower_small
        >>> print(program_text(lower_small(0, 2, 3)), end="")
        copy     source[0:3] -> slot of rank 0 [0:3]
        phase 0  all ranks say what they do, and compare
        fold     slot of rank 0 [0:3], slot of rank 1 [0:3] -> target[0:3]
    """
    steps = program.steps if most is None else program.steps[:most]
    lines = [_instruction(step) for step in program.opening]
    lines.append("phase 0  all ranks say what they do, and compare")
    lines += [_instruction(step) for step in steps]
    if len(steps) < len(program.steps):
        lines.append(f"...      {len(program.steps) - len(steps)} more")
    return "".join(f"{line}\n" for line in lines)


def _instruction(step: Instruction) -> str:
    if isinstance(step, Copy):
        return f"copy     {_stretch(step.source)} -> {_stretch(step.target)}"
    if isinstance(step, Fold):
        return f"fold     {', '.join(map(_stretch, step.terms))} -> {_stretch(step.target)}"
    if isinstance(step, Publish):
        return "publish  the next phase"
    assert isinstance(step, Await)
    ago = "this rank's last phase" if not step.back else f"the phase {step.back} before this rank's last"
    return f"await    {ago} of all others"


def _stretch(stretch: Stretch) -> str:
    return f"{_memory(stretch.memory)}[{stretch.start}:{stretch.start + stretch.length}]"


def _memory(memory: Memory) -> str:
    kind, rank, place = memory
    if kind in _OWN:
        return _OWN[kind] + (f" {place}" if place else "")
    side = f", side {place}" if kind in (Kind.CELLS, Kind.MADE) else f", block {place}" if place else ""
    return f"{_SHARED[kind]} of rank {rank}{side} "
