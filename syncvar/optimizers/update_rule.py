"""The step of one variable: what the rules of `momentum`, `adaptive` and `adam` have in common.

A rule is arithmetic on arrays: it knows no replicas, no variables and no slots by name. Arrays are changed in place, a block at
a time, with one scratch array, so that a step allocates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from syncvar.optimizers.exact_math import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RuleWorkspace", "SteppedVariable", "UpdateRule"]


class SteppedVariable(Protocol):
    """What a rule has to know of a variable that it steps."""

    @property
    def is_half(self) -> bool:
        """Whether it has a master of float32, which is stepped in its stead."""

    @property
    def gradient(self) -> NDArray[Any]:
        """Its gradient; overwritten."""

    @property
    def scratch(self) -> NDArray[Any]:
        """Room, as large as the gradient, or one block."""


class RuleWorkspace(Protocol):
    """What a rule works in."""

    @property
    def room(self) -> NDArray[Any]:
        """Elements of float64, as many as the largest gradient has, or a block."""


class UpdateRule:
    """How gradients change a variable; each optimizer is one."""

    _slot_initials: ClassVar[dict[str, float]] = {}  # name -> what it is filled with
    _counts_steps: ClassVar[bool] = False  # the rule needs the number of steps of each variable
    _decays_variable: ClassVar[bool] = (
        False  # the decay is taken off the variable, by the rule itself
    )

    def __init__(self) -> None:
        self._decay = 0.0

    def _initials(self) -> dict[str, float]:
        """Return name -> first value of the rule's slots."""
        return self._slot_initials

    def _change(
        self,
        arrays: list[NDArray[Any]],
        part: SteppedVariable,
        plan: RuleWorkspace,
        rate: float,
        step: int,
        known: dict[int, tuple[float, ...]],
    ) -> None:
        """Make the step of one variable; `arrays` are its copy, its master, its slots and its counter."""
        copy, *rest = arrays
        counter = rest.pop() if self._counts_steps else None
        made = (step if counter is None else int(counter)) + 1
        numbers = known.get(made)
        if numbers is None:
            numbers = known[made] = self._numbers(rate, made)
        if not part.is_half:
            self._advance(copy, part, rest, numbers, plan.room)
        else:
            master = rest.pop(0)
            # What the program has written to the variable meanwhile is taken from it, element by element.
            np.copyto(master, copy, where=master.astype(copy.dtype) != copy, casting="unsafe")
            self._advance(master, part, rest, numbers, plan.room)
            copy[...] = master
        if counter is not None:
            counter[...] = made

    def _advance(
        self,
        weight: NDArray[Any],
        part: SteppedVariable,
        slots: list[NDArray[Any]],
        numbers: tuple[float, ...],
        room: NDArray[Any],
    ) -> None:
        """Make the step of one variable, a block at a time so that a large one stays in the cache."""
        del room
        gradient, scratch = part.gradient, part.scratch
        if gradient.size <= BLOCK:
            self._decayed_update(weight, gradient, slots, scratch, numbers)
            return
        flats = [array.reshape(-1) for array in (weight, gradient, *slots)]
        for start in range(0, gradient.size, BLOCK):
            weight, gradient, *slots = [flat[start : start + BLOCK] for flat in flats]
            self._decayed_update(weight, gradient, slots, scratch[: weight.size], numbers)

    def _decayed_update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        numbers: tuple[float, ...],
    ) -> None:
        if self._decay and not self._decays_variable:
            np.multiply(weight, self._decay, out=scratch)
            np.add(gradient, scratch, out=gradient)
        self._update(weight, gradient, slots, scratch, numbers)

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        """Return the factors of the rule at a step (1 for the first)."""
        raise NotImplementedError

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        numbers: tuple[float, ...],
    ) -> None:
        """Change `weight` and `slots` in place; `gradient` and `scratch` may be overwritten."""
        raise NotImplementedError
