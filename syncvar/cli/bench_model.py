"""Times that the costs of plans predict, beside those that are measured.

`syncvar.cli.plan_cost` moves a clock through the plan that a call would run. Two of its constants, the latency and the
time of a byte, are fitted to two measurements of the same run, the smallest and the largest size; reductions and copies
stay in the proportion to a byte that its own constants have. All lines between are predictions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncvar.algorithms.builders import ALGORITHMS, build_all
from syncvar.algorithms.selection import choose
from syncvar.bootstrap.process import current
from syncvar.cli.plan_cost import LINKS, SHM, predicted_seconds
from syncvar.core.dtypes import DTYPE_NAMES, dtype_from_index
from syncvar.core.reduce_ops import reduction

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from syncvar.algorithms.schedule import Schedule
    from syncvar.cli.collective_registry import Collective
    from syncvar.cli.plan_cost import CostModel
    from syncvar.cli.selftest_inputs import Case


_STEPS = 8
_STEP = 1e-3


class Model:
    """The predicted times of a collective for one dtype, op and root.

    Args:
        collective: The collective.
        chosen: The options.
    """

    def __init__(self, collective: Collective, chosen: argparse.Namespace) -> None:
        world = current().world
        self.collective = collective
        self.forced = chosen.algorithm or world.forced(collective.name)
        self.reproducible = bool(chosen.reproducible)
        self.is_shared = world.is_shared
        self.constants = SHM if self.is_shared else LINKS
        self.is_fitted = False

    @staticmethod
    def why_not(collective: Collective, chosen: argparse.Namespace, size: int) -> str:
        """Return in words why there is no model of a run, or an empty text where there is one."""
        if chosen.no_model:
            return "--no-model"
        if collective.name not in ALGORITHMS:
            return f"{collective.name} runs no plan"
        if size == 1:
            return "one rank moves nothing"
        return "calls that are started together overlap" if chosen.asynchronous else ""

    def fit(self, measured: Mapping[Case, float]) -> None:
        """Fit latency and time of a byte to two measured times, in seconds; fewer leave the constants as they are."""
        found = fitted(
            [(self._predictor(case), seconds) for case, seconds in measured.items()], self.constants
        )
        self.is_fitted = found is not None
        self.constants = found or self.constants

    def microseconds(self, case: Case) -> float:
        """Return the predicted time of a case."""
        return predicted_seconds(self._plans(case), self._itemsize(case), self.constants) * 1e6

    def note(self) -> str:
        """Return in words where the constants come from."""
        source = (
            "fitted to the first and the last size"
            if self.is_fitted
            else "not fitted, orders of magnitude"
        )
        return f"{source}: {self.constants.text()}"

    def record(self) -> dict[str, Any]:
        """Return the same as data."""
        return {
            "is_fitted": self.is_fitted,
            "latency_s": self.constants.latency,
            "s_per_byte": self.constants.per_byte,
            "s_per_byte_reduced": self.constants.per_reduced_byte,
            "s_per_byte_copied": self.constants.per_copied_byte,
        }

    def _predictor(self, case: Case) -> Callable[[CostModel], float]:
        plans, itemsize = self._plans(case), self._itemsize(case)
        return lambda constants: predicted_seconds(plans, itemsize, constants)

    def _itemsize(self, case: Case) -> int:
        kind = dtype_from_index(DTYPE_NAMES.index(case.dtype))
        return int(
            reduction(case.op, kind).accumulate.itemsize
            if self.collective.has_op
            else kind.itemsize
        )

    def _plans(self, case: Case) -> list[Schedule]:
        count = self.collective.total(case)
        chosen = choose(
            self.collective.name,
            count * self._itemsize(case),
            case.size,
            reproducible=self.reproducible,
            forced=self.forced,
            shared=self.is_shared,
        )
        count = count if self.collective.layout == "vector" else count // case.size
        return build_all(
            self.collective.name, chosen.algorithm, case.size, count=count, root=case.root
        )


def fitted(
    points: Sequence[tuple[Callable[[CostModel], float], float]], start: CostModel
) -> CostModel | None:
    """Return the constants with which two predictions are two measured times, or None where there are none.

    A predicted time is the longest of many sums of constants, so it is linear as long as the same sum is the longest:
    a few steps of Newton's method find the constants.

    Args:
        points: (prediction by constants, measured seconds), two of them.
        start: Where to begin; the proportion of its times per byte is kept.

    Example:
        >>> found = fitted([(lambda c: 2 * c.latency, 6e-6), (lambda c: 2 * c.latency + 1000 * c.per_byte, 16e-6)], LINKS)
        >>> round(found.latency * 1e6, 6), round(found.per_byte * 1e9, 6)
        (3.0, 10.0)
    """
    if len(points) != 2:
        return None

    def constants(latency: float, per_byte: float) -> CostModel:
        times = per_byte / start.per_byte
        return replace(
            start,
            latency=latency,
            per_byte=per_byte,
            per_reduced_byte=start.per_reduced_byte * times,
            per_copied_byte=start.per_copied_byte * times,
        )

    latency, per_byte = start.latency, start.per_byte
    for _ in range(_STEPS):
        rows = []
        for predict, seconds in points:
            here = predict(constants(latency, per_byte))
            by_latency = (predict(constants(latency * (1 + _STEP), per_byte)) - here) / (
                latency * _STEP
            )
            rows.append((by_latency, (here - by_latency * latency) / per_byte, seconds))
        (a, b, first), (c, d, second) = rows
        determinant = a * d - b * c
        if abs(determinant) <= 1e-9 * max(abs(a * d), abs(b * c), 1e-30):
            return None
        latency, per_byte = (
            (first * d - second * b) / determinant,
            (a * second - c * first) / determinant,
        )
        if latency <= 0 or per_byte <= 0:
            return None
    return constants(latency, per_byte)
