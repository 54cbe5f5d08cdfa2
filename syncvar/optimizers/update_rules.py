"""Update rules: how gradients change a variable. Optimizers use them, and servers `SERVER_RULES`.

A rule knows no replicas and no variables. It changes arrays in place, one block at a time, with one
scratch array, so a step allocates nothing.

Copies must stay equal to the bit, also between hosts with other processors and C libraries. IEEE
addition, multiplication, division and square root are exact everywhere; `pow` of the C library and
the dot product of a BLAS are not. So `power` and `norm` are computed here.
"""

from __future__ import annotations

import re
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict

import numpy as np

from syncvar.core.array_arguments import matching_word
from syncvar.core.errors import ConfigError
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Rate = float | Callable[[int], float]
    Array = NDArray[Any]
    Arrays = list[Array]
    Factors = tuple[float, ...]

BLOCK = 16384  # elements that are worked on at a time: the arrays of a step then stay in the cache


class Options(TypedDict, total=False):
    """The options of every optimizer besides its own hyperparameters; see `Optimizer`."""

    weight_decay: float
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    nonfinite: str
    compress: Any
    bucket_bytes: int | None
    first_bucket_bytes: int | None
    name: str | None


def checked_number(
    name: str, value: Any, low: float = 0.0, high: float = float("inf"), *, open_low: bool = False
) -> float:
    """Return a finite number in [low, high); in (low, high) with `open_low`."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(
        value, bool
    )
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf":
        is_number = True
    if is_number:
        number = float(value)
        if isfinite(number) and low <= number < high and not (open_low and number == low):
            return number
    sign = "<" if open_low else "<="
    limits = f"{low:g} {sign} {name}" + ("" if high == float("inf") else f" < {high:g}")
    raise ConfigError(f"{name} must be a finite number, {limits}, not {value!r:.80}")


def checked_rate(value: Any) -> Rate:
    """Return a learning rate: a number, or a function of the step."""
    if callable(value):
        return value  # type: ignore[no-any-return]
    return checked_number("learning_rate", value)


def checked_count(name: str, value: Any) -> int:
    """Return an integer of at least one."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ConfigError(f"{name} must be an integer of at least 1, not {value!r:.80}")


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return one of some words, given as text or as a member of an enumeration."""
    if type(value) is str and value in choices:  # of each step: faster than to look at each word
        return value
    if (word := matching_word(value, choices)) is not None:
        return word
    hint = nearest(value, choices) if isinstance(value, str) else ""
    raise ConfigError(
        f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r:.80}{hint}"
    )


def checked_name(value: Any, default: str) -> str:
    """Return the name of an optimizer, which is a part of its slots' names."""
    if value is None:
        return default
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_./-]{1,64}", value):
        return value
    raise ConfigError(
        f"the name of an optimizer must be 1 to 64 of A-Z a-z 0-9 _ . / -, not {value!r:.80}"
    )


def power(base: float, exponent: int) -> float:
    """Return base ** exponent by repeated squaring.

    Example:
        >>> power(0.5, 3), power(0.9, 0)
        (0.125, 1.0)
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def sum_of_squares(flat: Array, room: Array) -> float:
    """Return the sum of the squares of a flat array, in float64.

    Order: blocks of BLOCK elements from the left, NumPy's pairwise sum in each.
    """
    total = 0.0
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        squares = room[: part.size]
        np.copyto(squares, part)
        np.multiply(squares, squares, out=squares)
        total += float(np.add.reduce(squares))
    return total


def norm(flats: list[Array], room: Array) -> float:
    """Return the 2-norm of several flat arrays as of one."""
    return sqrt(sum([sum_of_squares(flat, room) for flat in flats]))


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
    def gradient(self) -> Array:
        """Its gradient; overwritten."""

    @property
    def scratch(self) -> Array:
        """Scratch memory, as large as the gradient or one block."""


class RuleWorkspace(Protocol):
    """Memory for reductions over a variable."""

    @property
    def room(self) -> Array:
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

        `arrays` are its copy, its master (half types), its slots, its counter of steps if there is
        one. `step` is the optimizer's last step; `known` has the factors by step number.
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
            # The program may have written to the variable: take over each changed element.
            np.copyto(master, copy, where=master.astype(copy.dtype) != copy, casting="unsafe")
            self._advance(master, part, rest, factors, workspace.room)
            copy[...] = master
        if counter is not None:
            counter[...] = number

    def _advance(
        self, weight: Array, part: SteppedVariable, slots: Arrays, factors: Factors, room: Array
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
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        if self.decay and not self.decays_variable:
            np.multiply(weight, self.decay, out=scratch)
            np.add(gradient, scratch, out=gradient)
        self._update(weight, gradient, slots, scratch, factors)

    def _factors(self, rate: float, step: int) -> Factors:
        """Return the factors of a step; the first step is 1. Usually the learning rate alone."""
        del step
        return (rate,)

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        """Change `weight` and `slots` in place; may overwrite `gradient` and `scratch`."""
        raise NotImplementedError


class SGDRule(UpdateRule):
    """w -= rate * g."""

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        np.multiply(gradient, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class MomentumRule(UpdateRule):
    """b = momentum * b + g; w -= rate * b, with `nesterov` w -= rate * (g + momentum * b)."""

    slot_initials: ClassVar[dict[str, float]] = {"momentum": 0.0}

    def __init__(self, momentum: float = 0.9, *, nesterov: Any = False) -> None:
        self._momentum = checked_number("momentum", momentum, 0.0, 1.0)
        if not isinstance(nesterov, bool):
            raise ConfigError(f"nesterov must be True or False, not {nesterov!r}")
        self._nesterov = nesterov
        super().__init__(momentum=self._momentum, nesterov=nesterov)

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        (velocity,) = slots
        np.multiply(velocity, self._momentum, out=velocity)
        np.add(velocity, gradient, out=velocity)
        if self._nesterov:
            np.multiply(velocity, self._momentum, out=scratch)
            np.add(gradient, scratch, out=gradient)
            np.multiply(gradient, factors[0], out=gradient)
        else:
            np.multiply(velocity, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class AdagradRule(UpdateRule):
    """s += g * g; w -= rate * g / (sqrt(s) + epsilon)."""

    def __init__(self, initial_accumulator_value: float = 0.0, epsilon: float = 1e-10) -> None:
        self._initial = checked_number("initial_accumulator_value", initial_accumulator_value)
        self._epsilon = checked_number("epsilon", epsilon)
        super().__init__(initial_accumulator_value=self._initial, epsilon=self._epsilon)

    def initials(self) -> dict[str, float]:
        """Return the initial values of the slots, by name."""
        return {"squares": self._initial}

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        (squares,) = slots
        np.multiply(gradient, gradient, out=scratch)
        np.add(squares, scratch, out=squares)
        np.sqrt(squares, out=scratch)
        np.add(scratch, self._epsilon, out=scratch)
        np.divide(gradient, scratch, out=gradient)
        np.multiply(gradient, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class RMSPropRule(UpdateRule):
    """s = rho * s + (1 - rho) * g * g; u = g / (sqrt(s) + epsilon); w -= rate * u."""

    def __init__(
        self,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        *,
        centered: Any = False,
    ) -> None:
        self._rho = checked_number("rho", rho, 0.0, 1.0)
        self._momentum = checked_number("momentum", momentum, 0.0, 1.0)
        self._epsilon = checked_number("epsilon", epsilon)
        if not isinstance(centered, bool):
            raise ConfigError(f"centered must be True or False, not {centered!r}")
        self._centered = centered
        super().__init__(
            rho=self._rho, momentum=self._momentum, epsilon=self._epsilon, centered=centered
        )

    def initials(self) -> dict[str, float]:
        """Return the initial values of the slots, by name."""
        names = ["squares"]
        names += ["mean"] if self._centered else []
        names += ["momentum"] if self._momentum else []
        return dict.fromkeys(names, 0.0)

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        squares, *others = slots
        np.multiply(gradient, gradient, out=scratch)
        np.multiply(scratch, 1 - self._rho, out=scratch)
        np.multiply(squares, self._rho, out=squares)
        np.add(squares, scratch, out=squares)
        if self._centered:
            mean = others[0]
            np.multiply(gradient, 1 - self._rho, out=scratch)
            np.multiply(mean, self._rho, out=mean)
            np.add(mean, scratch, out=mean)
            np.multiply(mean, mean, out=scratch)
            np.subtract(squares, scratch, out=scratch)
            np.maximum(scratch, 0, out=scratch)  # rounding may leave less than 0
            np.sqrt(scratch, out=scratch)
        else:
            np.sqrt(squares, out=scratch)
        np.add(scratch, self._epsilon, out=scratch)
        np.divide(gradient, scratch, out=gradient)
        if self._momentum:
            velocity = others[-1]
            np.multiply(velocity, self._momentum, out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.multiply(velocity, factors[0], out=gradient)
        else:
            np.multiply(gradient, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class AdamRule(UpdateRule):
    """m and v are decaying means of g and g * g; w -= rate * m' / (sqrt(v') + epsilon)."""

    slot_initials: ClassVar[dict[str, float]] = {"m": 0.0, "v": 0.0}
    counts_steps: ClassVar[bool] = True

    def __init__(self, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> None:
        self._beta_1 = checked_number("beta_1", beta_1, 0.0, 1.0)
        self._beta_2 = checked_number("beta_2", beta_2, 0.0, 1.0)
        self._epsilon = checked_number("epsilon", epsilon)
        super().__init__(beta_1=self._beta_1, beta_2=self._beta_2, epsilon=self._epsilon)

    def _factors(self, rate: float, step: int) -> Factors:
        # m' / (sqrt(v') + epsilon) = (m / c1) * r / (sqrt(v) + epsilon * r), r = sqrt(c2): two
        # operations on arrays fewer
        first, root = 1 - power(self._beta_1, step), sqrt(1 - power(self._beta_2, step))
        return rate * root / first, self._epsilon * root, 1 - rate * self.decay

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        factor, epsilon, decay_factor = factors
        self._direction(gradient, slots, scratch, epsilon)
        np.multiply(gradient, factor, out=gradient)
        if self.decays_variable and self.decay:
            np.multiply(weight, decay_factor, out=weight)
        np.subtract(weight, gradient, out=weight)

    def _direction(self, gradient: Array, slots: Arrays, scratch: Array, epsilon: float) -> None:
        """Update m and v, and replace `gradient` by m / (sqrt(v) + epsilon)."""
        mean, squares = slots
        np.multiply(mean, self._beta_1, out=mean)
        np.multiply(gradient, 1 - self._beta_1, out=scratch)
        np.add(mean, scratch, out=mean)
        np.multiply(gradient, gradient, out=gradient)
        np.multiply(gradient, 1 - self._beta_2, out=gradient)
        np.multiply(squares, self._beta_2, out=squares)
        np.add(squares, gradient, out=squares)
        np.sqrt(squares, out=gradient)
        np.add(gradient, epsilon, out=gradient)
        np.divide(mean, gradient, out=gradient)


class AdamWRule(AdamRule):
    """Adam with weight decay of the variable itself."""

    decays_variable: ClassVar[bool] = True
    decay = 0.01


class LAMBRule(AdamRule):
    """Adam's step, scaled for each variable by the quotient of its norm and the step's."""

    decays_variable: ClassVar[bool] = True
    decay = 0.01

    def _factors(self, rate: float, step: int) -> Factors:
        first, root = 1 - power(self._beta_1, step), sqrt(1 - power(self._beta_2, step))
        return root / first, self._epsilon * root, rate

    def _update(
        self, weight: Array, gradient: Array, slots: Arrays, scratch: Array, factors: Factors
    ) -> None:
        """Make `gradient` the direction u; `_advance` scales it when its norm is known."""
        self._direction(gradient, slots, scratch, factors[1])
        np.multiply(gradient, factors[0], out=gradient)
        if self.decay:
            np.multiply(weight, self.decay, out=scratch)
            np.add(gradient, scratch, out=gradient)

    def _advance(
        self, weight: Array, part: SteppedVariable, slots: Arrays, factors: Factors, room: Array
    ) -> None:
        super()._advance(weight, part, slots, factors, room)
        target, direction = weight.reshape(-1), part.gradient.reshape(-1)
        ours, theirs = sqrt(sum_of_squares(target, room)), sqrt(sum_of_squares(direction, room))
        ratio = ours / theirs if ours > 0 and theirs > 0 else 1.0
        for start in range(0, target.size, BLOCK):
            piece = direction[start : start + BLOCK]
            np.multiply(piece, factors[2] * ratio, out=piece)
            np.subtract(target[start : start + BLOCK], piece, out=target[start : start + BLOCK])


# By the class name of the optimizer. A server has only a part of a variable, so these are the rules
# that change each element by itself.
SERVER_RULES: dict[str, Callable[..., UpdateRule]] = {
    "SGD": SGDRule,
    "Momentum": MomentumRule,
    "Nesterov": MomentumRule,
    "Adagrad": AdagradRule,
    "RMSProp": RMSPropRule,
    "Adam": AdamRule,
    "AdamW": AdamWRule,
}
