"""Reports a start that makes no progress: of the launcher itself, and of its processes.

`StartClock` names the step in which the launcher hangs, and ends the launcher at the deadline. It
is a timer of the process (SIGALRM), so its handler also runs while the launcher waits in a system
call. A thread would do, but the launcher forks, and a forked child must not inherit a lock that a
thread held. While the loop of an attempt runs, the clock is off. Then `StartProgress` tracks which
processes have reached their script; time is an argument.

`main` imports this module first, so it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from types import FrameType

    from syncvar.core.process_ids import ProcessNames

_TICK_S = 1.0
_NOTICE_S, _LIMIT_S = 5.0, 300.0  # the defaults of missing_report_s and rendezvous_timeout_s
_EXIT_CODE = 69  # `exit_status.RENDEZVOUS`
_SHOWN_MISSING = 8


class StartClock:
    """Counts the seconds since the last step of a start began.

    It counts ticks of the timer, so it stands still while the launcher itself is stopped.
    """

    def __init__(self) -> None:
        self._notice_s, self._limit_s = _NOTICE_S, _LIMIT_S
        self._step = ""
        self._waited_s = self._next_s = 0.0
        self._before: Any = None
        self._runs = self._is_off = False

    def read_limits(self, environ: Mapping[str, str]) -> None:
        """Read the limits from the environment, until the launcher has read its options."""
        notice_s = _seconds(environ, "SYNCVAR_MISSING_REPORT_S", _NOTICE_S)
        self.set_limits(notice_s, _seconds(environ, "SYNCVAR_RENDEZVOUS_TIMEOUT_S", _LIMIT_S))

    def set_limits(self, notice_s: float, limit_s: float) -> None:
        """Set the seconds of one step until the clock names it, and until it ends the launcher."""
        self._notice_s, self._limit_s = notice_s, limit_s

    def enter(self, step: str) -> None:
        """Begin a step, and count from 0; `step` continues the words "the launcher"."""
        self._step, self._waited_s, self._next_s = step, 0.0, self._notice_s
        if self._is_off:
            return
        if not self._runs:
            self._before = signal.signal(signal.SIGALRM, self._tick)
            self._runs = True
        first_s = min(self._notice_s, self._limit_s, _TICK_S)
        signal.setitimer(signal.ITIMER_REAL, first_s, first_s)

    def stop(self) -> None:
        """Stop until the next step. Idempotent."""
        if self._runs:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)
            self._runs = False

    def turn_off(self) -> None:
        """Stop for good, because the user forwards SIGALRM."""
        self.stop()
        self._is_off = True

    def _tick(self, _number: int, frame: FrameType | None) -> None:
        self._waited_s += min(self._notice_s, self._limit_s, _TICK_S)
        is_over = self._waited_s >= self._limit_s
        if not is_over and self._waited_s < self._next_s:
            return
        self._next_s = 2 * self._waited_s
        step = f"the launcher {self._step}"
        if frame is not None:
            step += f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        waited = f"the start has made no progress for {self._waited_s:.0f} s"
        if is_over:
            write_error(f"{waited}, and is given up: {step}")
            # The cleanup process ends what has started, and removes the private directory.
            os._exit(_EXIT_CODE)
        write_error(f"{waited}: {step}")


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(environ.get(name, ""))
    except ValueError:
        return default
    return value if value > 0 else default


def write_error(sentence: str) -> None:
    """Write to standard error in a signal handler, if that neither blocks nor fails."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):  # the terminal is gone, or nothing reads the pipe
        if poller.poll(0):
            os.write(2, f"syncvar-launch: {sentence}\n".encode(errors="backslashreplace"))


clock = StartClock()
"""The clock of this process, which has only one such timer."""


class Overdue(NamedTuple):
    """A start that makes no progress."""

    missing: tuple[int, ...]  # processes that have not reached their script
    waited_s: float  # seconds since the last process reached its script
    has_failed: bool  # whether the deadline has passed

    def sentence(
        self, states: Iterable[str], joined: Collection[int], names: ProcessNames | None = None
    ) -> str:
        """Return the sentence to show.

        `states` has one text for each missing process, of which it shows eight. `joined` are the
        ranks that wait; without `names` they are called ranks.

        Example:
            >>> overdue = Overdue((1,), 5.0, has_failed=False)
            >>> overdue.sentence(["process 77 (state S)"], [0]).partition(": ")[2]
            'rank 1 has not reached its script (process 77 (state S)); rank 0 waits'
        """
        from syncvar.core.process_ids import RANKS, process_list

        names = names or RANKS

        has = "has not reached its" if len(self.missing) == 1 else "have not reached their"
        shown = list(states)[:_SHOWN_MISSING]
        if len(self.missing) > _SHOWN_MISSING:
            shown.append(f"{len(self.missing) - _SHOWN_MISSING} more")
        text = f"{process_list(self.missing, names)} {has} script ({'; '.join(shown)})"
        if joined:
            text += f"; {process_list(joined, names)} {'waits' if len(joined) == 1 else 'wait'}"
        end = ", and is given up" if self.has_failed else ""
        return f"the start has made no progress for {self.waited_s:.0f} s{end}: {text}"


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
