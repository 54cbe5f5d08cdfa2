"""What a part of a run is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from comparison.bounds import Verdict
    from comparison.host_table import Scene
    from comparison.libraries import Library
    from comparison.rounds import Effort

__all__ = ["Part", "Setting", "failure", "failures"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What every part is given.

    Args:
        present: The libraries that can be started, by name; syncvar is always among them.
        workers: Numbers of workers.
        effort: How long is measured.
        crowd: Workers of the part that crowds the machine.
        scenes: Where the part over several hosts measures.
    """

    present: Mapping[str, Library]
    workers: tuple[int, ...]
    effort: Effort
    crowd: int
    scenes: tuple[Scene, ...] = ()

    @property
    def syncvar(self) -> Library:
        """Return the library that is compared with the others."""
        return self.present["syncvar"]


@dataclass(slots=True)
class Part:
    """What a part found.

    Args:
        report: For the JSON.
        lines: For people.
        verdicts: Its numbers beside their bounds.
        failed: Whether syncvar itself failed.
    """

    report: Any
    lines: list[str]
    verdicts: list[Verdict] = field(default_factory=list)
    failed: bool = False


def failures(problems: Mapping[str, str]) -> list[str]:
    """Return the lines that say who failed."""
    return [f"  {name}: {problem}" for name, problem in problems.items()]


def failure(what: str, problems: Mapping[str, str], *verdicts: Verdict) -> Part:
    """Return a part that found nothing because syncvar failed."""
    return Part(
        {"problems": dict(problems)},
        [f"{what}: failed", *failures(problems)],
        list(verdicts),
        failed=True,
    )
