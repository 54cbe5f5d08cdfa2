"""Predicted times of a collective, shown by `syncvar bench` beside the measured ones.

`plan_cost` moves a clock through the schedule that a call would run. Two constants, the latency and
the time of a byte, are fitted to the smallest and the largest size of the same run. Times of
reductions and copies keep their ratio to the time of a byte. All lines between are predictions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncvar.algorithms.builders import ALGORITHMS, build_all
from syncvar.algorithms.selection import choose
from syncvar.bootstrap.process import current
from syncvar.cli.plan_cost import LINKS, SHM, predicted_seconds
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
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
    """Predicted times of a collective for one dtype, op and root."""

    def __init__(self, collective: Collective, chosen: argparse.Namespace) -> None:
        world = current().world
        self.collective = collective
        self.forced = chosen.algorithm or world.forced(collective.name)
        self.reproducible = bool(chosen.reproducible)
        self.is_shared = world.is_shared
        self.constants = SHM if self.is_shared else LINKS
        self.is_fitted = False

    @staticmethod
    def unsupported_reason(collective: Collective, chosen: argparse.Namespace, size: int) -> str:
        """Return why a run has no model, "" if it has one."""
        if chosen.no_model:
            return "--no-model"
        if collective.name not in ALGORITHMS:
            return f"{collective.name} runs no plan"
        if size == 1:
            return "one rank moves nothing"
        return "calls that are started together overlap" if chosen.asynchronous else ""

    def fit(self, measured: Mapping[Case, float]) -> None:
        """Fit latency and time of a byte to two measured times (s); fewer change nothing."""
        found = fit_constants(
            [(self._predictor(case), seconds) for case, seconds in measured.items()], self.constants
        )
        self.is_fitted = found is not None
        self.constants = found or self.constants

    def microseconds(self, case: Case) -> float:
        """Return the predicted time of a case."""
        return predicted_seconds(self._plans(case), self._itemsize(case), self.constants) * 1e6

    def note(self) -> str:
        """Return where the constants come from."""
        fit = "fitted to the first and the last size"
        source = fit if self.is_fitted else "not fitted, orders of magnitude"
        return f"{source}: {self.constants.text()}"

    def record(self) -> dict[str, Any]:
        """Return the constants as data."""
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
        if self.collective.has_op:
            return int(reduction(case.op, kind).accumulate.itemsize)
        return int(kind.itemsize)

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
        name = self.collective.name
        return build_all(name, chosen.algorithm, case.size, count=count, root=case.root)


def fit_constants(
    points: Sequence[tuple[Callable[[CostModel], float], float]], start: CostModel
) -> CostModel | None:
    """Return the constants for which two predictions equal two measurements, or None.

    A predicted time is the maximum of sums of constants, hence piecewise linear: a few steps of
    Newton's method find the constants.
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
            beside = predict(constants(latency * (1 + _STEP), per_byte))
            by_latency = (beside - here) / (latency * _STEP)
            rows.append((by_latency, (here - by_latency * latency) / per_byte, seconds))
        (a, b, first), (c, d, second) = rows
        determinant = a * d - b * c
        if abs(determinant) <= 1e-9 * max(abs(a * d), abs(b * c), 1e-30):
            return None
        latency = (first * d - second * b) / determinant
        per_byte = (a * second - c * first) / determinant
        if latency <= 0 or per_byte <= 0:
            return None
    return constants(latency, per_byte)
