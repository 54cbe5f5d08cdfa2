"""The base of all update rules: one step of one variable.

A rule knows no replicas and no variables. It changes arrays in place, one block at a time, with one
scratch array, so a step allocates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from syncvar.optimizers.rules.exact_math import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = list[NDArray[Any]]


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is float16 or bfloat16."""
    return dtype.itemsize == 2


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a variable of `dtype` is stepped: float32 for half types."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


class SteppedVariable(Protocol):
    """What a rule needs of a variable that it steps."""

    @property
    def is_half(self) -> bool:
        """Whether a float32 master is stepped in its place."""

    @property
    def gradient(self) -> NDArray[Any]:
        """Its gradient; overwritten."""

    @property
    def scratch(self) -> NDArray[Any]:
        """Scratch memory, as large as the gradient or one block."""


class RuleWorkspace(Protocol):
    """Memory for reductions over a variable."""

    @property
    def room(self) -> NDArray[Any]:
        """float64 array, as long as the largest gradient or one block."""


class UpdateRule:
    """How gradients change a variable; a subclass for each kind of optimizer."""

    slot_initials: ClassVar[dict[str, float]] = {}  # initial values of the slots, by name
    counts_steps: ClassVar[bool] = False  # needs the number of steps of each variable
    decays_variable: ClassVar[bool] = False  # applies weight decay itself, to the variable
    decay: float = 0.0  # weight decay

    def __init__(self, **numbers: Any) -> None:
        self.numbers = numbers

    def initials(self) -> dict[str, float]:
        """Return the initial values of the slots, by name."""
        return self.slot_initials

    def change(
        self,
        arrays: Arrays,
        part: SteppedVariable,
        workspace: RuleWorkspace,
        rate: float,
        step: int,
        known: dict[int, tuple[float, ...]],
    ) -> None:
        """Make one step of one variable.

        Args:
            arrays: Its copy, its master (half types), its slots, its counter of steps if there is
                one.
            part: Its gradient.
            workspace: Memory for reductions.
            rate: Learning rate.
            step: Number of the optimizer's last step.
            known: Factors by step number, shared by the variables of one step.
        """
        copy, *rest = arrays
        counter = rest.pop() if self.counts_steps else None
        number = (step if counter is None else int(counter)) + 1
        factors = known.get(number)
        if factors is None:
            factors = known[number] = self._factors(rate, number)
        if not part.is_half:
            self._advance(copy, part, rest, factors, workspace.room)
        else:
            master = rest.pop(0)
            # The program may have written to the variable meanwhile: take over each changed
            # element.
            np.copyto(master, copy, where=master.astype(copy.dtype) != copy, casting="unsafe")
            self._advance(master, part, rest, factors, workspace.room)
            copy[...] = master
        if counter is not None:
            counter[...] = number

    def _advance(
        self,
        weight: NDArray[Any],
        part: SteppedVariable,
        slots: Arrays,
        factors: tuple[float, ...],
        room: NDArray[Any],
    ) -> None:
        """Make the step one block at a time, so that a large variable stays in the cache."""
        del room
        gradient, scratch = part.gradient, part.scratch
        if gradient.size <= BLOCK:
            self._decayed_update(weight, gradient, slots, scratch, factors)
            return
        flats = [array.reshape(-1) for array in (weight, gradient, *slots)]
        for start in range(0, gradient.size, BLOCK):
            weight, gradient, *slots = [flat[start : start + BLOCK] for flat in flats]
            self._decayed_update(weight, gradient, slots, scratch[: weight.size], factors)

    def _decayed_update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        if self.decay and not self.decays_variable:
            np.multiply(weight, self.decay, out=scratch)
            np.add(gradient, scratch, out=gradient)
        self._update(weight, gradient, slots, scratch, factors)

    def _factors(self, rate: float, step: int) -> tuple[float, ...]:
        """Return the factors of a step; the first step is 1. Usually the learning rate alone."""
        del step
        return (rate,)

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        """Change `weight` and `slots` in place; may overwrite `gradient` and `scratch`."""
        raise NotImplementedError
