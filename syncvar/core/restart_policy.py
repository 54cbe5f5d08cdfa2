"""Whether all ranks are started again after an end, how long to wait before, and what to say: data in, data out.

The rules, in their order:

1. Who was told to end (a signal to the launcher, a reader that is gone, the time limit) has ended.
2. A failure that would only come again is not tried again: `HOPELESS_CODES`, `HOPELESS_ERRORS`, and ranks of which not
   all have ever met.
3. Ranks that all stopped as asked (exit code 75: saved, run me again) are started again. That does not count, unless they
   stop within `SHORT_S`: a program that does nothing else must not go round for ever.
4. Everything else counts, and K may count.

Without `--max-restarts` nothing is ever started again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from syncvar.core.exit_codes import (
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
    """How the ranks ended that were started together.

    Args:
        exit_code: What the launcher would exit with.
        why: The failure in one sentence; empty where there was none.
        error: Name of the exception that was the cause, or an empty text.
        was_told: The launcher was told to end them.
        had_met: All ranks of this job have met once, now or in an earlier start.
        lasted_s: Seconds from their start to their end.
    """

    exit_code: int
    why: str = ""
    error: str = ""
    was_told: bool = False
    had_met: bool = True
    lasted_s: float = 0.0


class Decision(NamedTuple):
    """What follows from an ending.

    Args:
        restarts: Start all ranks again.
        reason: Why, in words; empty where there is nothing to decide.
        pause_s: Seconds to wait before.
    """

    restarts: bool
    reason: str = ""
    pause_s: float = 0.0


def pause_s(number: int, first_s: float) -> float:
    """Return how long to wait before a restart: twice as long each time, at most 30 s (or the first, if that is longer).

    Args:
        number: Which restart, from 1.
        first_s: Seconds before the first.

    Example:
        >>> [pause_s(number, 1.0) for number in range(1, 8)]
        [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    """
    return min(first_s * 2.0 ** min(number - 1, 60), max(_PAUSE_S_MAX, first_s))


@dataclass(slots=True)
class Restarting:
    """The restarts of one job.

    Args:
        most: How many may count (`--max-restarts`).
        first_pause_s: Seconds before the first.

    Example:
        >>> job = Restarting(1, 1.0)
        >>> job.after(Ending(exit_code=137, why="rank 1 was killed by signal 9 (SIGKILL)", lasted_s=3.0))
        Decision(restarts=True, reason='restart 1 of 1', pause_s=1.0)
        >>> job.after(Ending(exit_code=1, why="rank 0 exited with status 1", lasted_s=5.0)).reason
        'there have been 1 of 1 restarts'
    """

    most: int
    first_pause_s: float
    counted: int = 0
    endings: list[Ending] = field(default_factory=list)

    @property
    def number(self) -> int:
        """How often the ranks have been started again."""
        return len(self.endings)

    def after(self, ending: Ending) -> Decision:
        """Decide what follows, and remember it."""
        if ending.exit_code == 0 or not self.most:
            return Decision(restarts=False)
        if ending.was_told:
            return Decision(restarts=False, reason="the launcher was told to end")
        if ending.exit_code in HOPELESS_CODES:
            return Decision(
                restarts=False,
                reason=f"exit code {ending.exit_code} ({HOPELESS_CODES[ending.exit_code]}) would come again",
            )
        if ending.error in HOPELESS_ERRORS:
            return Decision(restarts=False, reason=f"{ending.error} would come again")
        if ending.exit_code == RENDEZVOUS and not ending.had_met:
            return Decision(restarts=False, reason="the ranks have never met")
        is_free = ending.exit_code == PREEMPTED and not ending.why and ending.lasted_s >= SHORT_S
        if not is_free and self.counted >= self.most:
            return Decision(
                restarts=False, reason=f"there have been {self.counted} of {self.most} restarts"
            )
        self.endings.append(ending)
        if is_free:
            return Decision(
                restarts=True,
                reason=f"restart {self.number}, which does not count",
                pause_s=self.first_pause_s,
            )
        self.counted += 1
        return Decision(
            restarts=True,
            reason=f"restart {self.counted} of {self.most}",
            pause_s=pause_s(self.counted, self.first_pause_s),
        )

    def summary(self) -> list[str]:
        """Return the lines that tell of all restarts: how many, and why each."""
        if not self.endings:
            return []
        lines = [f"started again {self.number} time{'s' * (self.number > 1)}:"]
        first = max(0, self.number - _LINES_MAX)
        lines += ["  (earlier ones left out)"] * (first > 0)
        for number, ending in enumerate(self.endings[first:], first + 1):
            lines.append(
                f"  {number}. after {ending.lasted_s:.1f} s: {ending.why or 'all ranks stopped as asked'}"
            )
        return lines
