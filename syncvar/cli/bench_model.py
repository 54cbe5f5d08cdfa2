"""Times that the plan's cost predicts, beside those that are measured."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from syncvar.cli.contributions import Case
    from syncvar.cli.registry import Collective

__all__ = ["Model"]


class Model:
    """The predicted times of one collective.

    Args:
        collective: The collective.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.is_usable = False
        self.note = ""

    @classmethod
    def of(cls, collective: Collective, chosen: argparse.Namespace) -> Model | None:
        """Return the model of a collective, or None where there is none."""
        if find_spec("syncvar.plans.cost") is None or chosen.asynchronous:
            return None
        return cls(collective)

    def fit(self, measured: Sequence[tuple[Case, float]]) -> None:
        """Fit latency and bandwidth to two measured times, in seconds."""

    def microseconds(self, case: Case) -> float | None:
        """Return the predicted time of a case."""
        return None

    def record(self) -> dict[str, Any]:
        """Return what a file should say of the model."""
        return {"note": self.note}
