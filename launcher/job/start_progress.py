"""Tracks which processes have reached their script, and when to report the others.

Pure: time is an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.process_ids import process_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_SHOWN = 8


class Overdue(NamedTuple):
    """A start that makes no progress.

    Args:
        missing: The processes that have not reached their script.
        waited_s: The seconds since the last process reached its script.
        has_failed: Whether the deadline has passed.
    """

    missing: tuple[int, ...]
    waited_s: float
    has_failed: bool

    def sentence(self, states: Iterable[str], joined: Collection[int]) -> str:
        """Return the sentence to show.

        `states` has one text for each missing process, of which it shows eight. `joined` are the
        ranks that wait.

        Example:
            >>> overdue = Overdue((1,), 5.0, has_failed=False)
            >>> overdue.sentence(["process 77 (state S)"], [0]).partition(": ")[2]
            'rank 1 has not reached its script (process 77 (state S)); rank 0 waits'
        """
        has = "has not reached its" if len(self.missing) == 1 else "have not reached their"
        shown = list(states)[:_SHOWN]
        more = [f"{len(self.missing) - _SHOWN} more"] if len(self.missing) > _SHOWN else []
        waiting = (
            f"; {process_list(joined)} {'waits' if len(joined) == 1 else 'wait'}" if joined else ""
        )
        given_up = ", and is given up" if self.has_failed else ""
        return (
            f"the start has made no progress for {self.waited_s:.0f} s{given_up}: "
            f"{process_list(self.missing)} {has} script ({'; '.join([*shown, *more])}){waiting}"
        )


class StartProgress:
    """The processes of one attempt, until each has reached its script.

    Args:
        processes: The numbers of the ranks and servers that report it.
        notice_s: The seconds without progress until `look` returns an `Overdue`; the pause then
            doubles.
        limit_s: The seconds without progress until the start has failed.
        now: The time in seconds of a clock that stands while the launcher is stopped.
    """

    def __init__(
        self, processes: Iterable[int], notice_s: float, limit_s: float, now: float
    ) -> None:
        self.missing = set(processes)
        self._notice_s, self._limit_s = notice_s, limit_s
        self._restart(now)

    def reached(self, number: int, now: float) -> None:
        """Note that a process has reached its script, or has ended."""
        if number in self.missing:
            self.missing.discard(number)
            self._restart(now)

    def expect(self, number: int, now: float) -> None:
        """Note that a process starts again."""
        self.missing.add(number)
        self._restart(now)

    def advance(self, now: float) -> None:
        """Note another step of the start."""
        self._restart(now)

    def due(self) -> float:
        """Return when to call `look` again, in seconds; infinite if no process is missing."""
        return min(self._next, self._since + self._limit_s) if self.missing else float("inf")

    def look(self, now: float) -> Overdue | None:
        """Return the missing processes, if it is time to report them."""
        if not self.missing or now < self.due():
            return None
        waited_s = now - self._since
        self._next = now + waited_s
        return Overdue(tuple(sorted(self.missing)), waited_s, waited_s >= self._limit_s)

    def _restart(self, now: float) -> None:
        self._since, self._next = now, now + self._notice_s
