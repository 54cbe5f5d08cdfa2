"""Decide whether the launcher restarts all ranks after they ended, and when; pure.

The rules, in order:

1. After a request to end (a signal to the launcher, a closed output pipe, the time limit): no.
2. After a failure that would repeat: no. See `HOPELESS_CODES` and `HOPELESS_ERRORS`; also if the
   ranks have never all joined.
3. If all ranks stopped on request (exit code 75): yes. The restart does not count, unless they
   stopped within `SHORT_S`. Otherwise a program that does only that would loop forever.
4. Otherwise yes, while fewer than `--max-restarts` have counted.

Without `--max-restarts` the answer is always no.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from syncvar.core.exit_status import (
    CONFIGURATION,
    KEY,
    LIMITS,
    MEANINGS,
    MISMATCH,
    PREEMPTED,
    RENDEZVOUS,
    TIMEOUT,
    USAGE,
)

SHORT_S = 10.0
_PAUSE_S_MAX = 30.0
_LINES_MAX = 10
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127

HOPELESS_CODES: dict[int, str] = {
    **{code: MEANINGS[code] for code in (USAGE, LIMITS, MISMATCH, KEY, CONFIGURATION, TIMEOUT)},
    _CANNOT_EXECUTE: "the command cannot be executed",
    _NOT_FOUND: "the command was not found",
}
HOPELESS_ERRORS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "TabError",
        "ImportError",
        "ModuleNotFoundError",
        "ConfigError",
        "UsageError",
        "NoAggregation",
    }
)


class Ending(NamedTuple):
    """End of one attempt.

    Args:
        exit_code: Exit code that the launcher would return.
        failure: Failure in one sentence; empty if there was none.
        error: Name of the exception that was the cause, or an empty text.
        was_end_requested: Whether the launcher got a request to end.
        had_met: Whether all ranks of this job have joined once, in this or an earlier attempt.
        lasted_s: Duration of the attempt, in seconds.
    """

    exit_code: int
    failure: str = ""
    error: str = ""
    was_end_requested: bool = False
    had_met: bool = True
    lasted_s: float = 0.0


class Decision(NamedTuple):
    """Whether to restart all ranks after an attempt, why, and after which pause."""

    restarts: bool
    reason: str = ""
    pause_s: float = 0.0


def pause_s(number: int, first_s: float) -> float:
    """Return the pause before restart `number` (from 1), in seconds.

    It starts with `first_s` and doubles each time, up to 30 s or `first_s`.
    """
    return min(first_s * 2.0 ** min(number - 1, 60), max(_PAUSE_S_MAX, first_s))


@dataclass(slots=True)
class Restarting:
    """Restarts of one job: at most `most` may count (`--max-restarts`)."""

    most: int
    first_pause_s: float
    counted: int = 0
    endings: list[Ending] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of restarts so far."""
        return len(self.endings)

    def after(self, ending: Ending) -> Decision:
        """Return the decision after an attempt, and record it."""
        if ending.exit_code == 0 or not self.most:
            return Decision(restarts=False)
        is_free = (
            ending.exit_code == PREEMPTED and not ending.failure and ending.lasted_s >= SHORT_S
        )
        if refusal := self._refusal(ending, is_free=is_free):
            return Decision(restarts=False, reason=refusal)
        self.endings.append(ending)
        if is_free:
            reason, pause = f"restart {self.number}, which does not count", self.first_pause_s
        else:
            self.counted += 1
            reason = f"restart {self.counted} of {self.most}"
            pause = pause_s(self.counted, self.first_pause_s)
        return Decision(restarts=True, reason=reason, pause_s=pause)

    def _refusal(self, ending: Ending, *, is_free: bool) -> str:
        """Return why there is no further restart, or an empty text."""
        code, reason = ending.exit_code, ""
        if ending.was_end_requested:
            reason = "the launcher got a request to end"
        elif code in HOPELESS_CODES:
            reason = f"exit code {code} ({HOPELESS_CODES[code]}) would come again"
        elif ending.error in HOPELESS_ERRORS:
            reason = f"{ending.error} would come again"
        elif code == RENDEZVOUS and not ending.had_met:
            reason = "the ranks have never all joined"
        elif not is_free and self.counted >= self.most:
            reason = f"there have been {self.counted} of {self.most} restarts"
        return reason

    def summary(self) -> list[str]:
        """Return lines about all restarts: how many, and the reason of each."""
        if not self.endings:
            return []
        lines = [f"started again {self.number} time{'s' * (self.number > 1)}:"]
        first = max(0, self.number - _LINES_MAX)
        lines += ["  (earlier ones left out)"] * (first > 0)
        for number, ending in enumerate(self.endings[first:], first + 1):
            reason = ending.failure or "all ranks stopped as asked"
            lines.append(f"  {number}. after {ending.lasted_s:.1f} s: {reason}")
        return lines
