"""Asks the launcher of one job for its status, and keeps the last five minutes for charts.

One thread asks for all readers: each second while somebody looks, else every five seconds. So the
number of readers, and what they send, does not change what the launcher gets.
"""

from __future__ import annotations

import collections
import json
import math
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.cli.running_jobs import ask, find_jobs
from syncvar.cli.stacks import stacks_text
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "syncvar status 1"
HISTORY_S = 300.0

_PERIOD_S = 1.0
_UNWATCHED_PERIOD_S = 5.0
_ATTENTION_S = 5.0  # after a reader's last request
_STACKS_S = 1.0  # one answer serves the buttons of several ranks
_SILENT_TEXT = "The launcher does not answer (is it stopped?), or the ranks are about to start."
_OTHER_TEXT = "The launcher is of another version of syncvar, and has no status to show."
_END_TEXT = "The job has ended."


class Snapshot(NamedTuple):
    """What is known about the job at one time."""

    number: int  # 1, 2, ...
    time_s: float  # monotonic time of the last answer
    state: str  # "answers", "silent" or "ended"
    text: str  # a sentence for a state other than "answers"
    status: dict[str, Any]  # the last status, as plain JSON; empty before the first one
    events: bytes  # the events of this snapshot for readers of the page

    def as_json(self) -> bytes:
        """Return the state and the status as one JSON object."""
        launcher = {"state": self.state, "text": self.text, "age_s": time.monotonic() - self.time_s}
        return json.dumps({"launcher": launcher, "status": self.status}).encode()


class JobPoller:
    """The status of one job for all readers of its dashboard.

    Args:
        launcher: The process number of the launcher.
        path: Its socket, if it is known. Each attempt of a job has a socket of its own.
    """

    def __init__(self, launcher: int, path: str = "") -> None:
        self._launcher = launcher
        self._path = path
        self._changed = threading.Condition()
        self._looked = -math.inf
        self._is_ended = False
        self._log: list[Any] = []
        self._history: collections.deque[tuple[float, bytes]] = collections.deque()
        self._stacks_lock = threading.Lock()
        self._stacks: dict[str, Any] | None = None
        self._stacks_time = -math.inf
        self.snapshot = Snapshot(0, time.monotonic(), "silent", _SILENT_TEXT, {}, b"")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def end(self) -> None:
        """Show that the job has ended, and ask no more."""
        with self._changed:
            self._is_ended = True
            self._publish("ended", _END_TEXT, self.snapshot.status)

    def look(self) -> None:
        """Note that somebody looks: the thread then asks each second."""
        now = time.monotonic()
        with self._changed:
            is_new = now - self._looked > _ATTENTION_S
            self._looked = now
            if is_new:
                self._changed.notify_all()

    def wait(self, number: int, limit_s: float) -> Snapshot:
        """Return the first snapshot after the one with this number, or the last one in time."""
        self.look()
        with self._changed:
            self._changed.wait_for(lambda: self.snapshot.number > number, limit_s)
            return self.snapshot

    def beginning(self) -> tuple[Snapshot, bytes]:
        """Return the last snapshot, and the events that a new reader needs."""
        with self._changed:
            points = b",".join(point for _, point in self._history)
            events = _event("history", b"[" + points + b"]") + _event(
                "log", json.dumps(self._log).encode()
            )
            snapshot = self.snapshot
        return snapshot, events + _event("status", snapshot.as_json())

    def receive(self, answer: Mapping[str, Any] | None, now: float) -> None:
        """Show an answer of the launcher, or that there is none; it may contain anything."""
        status: dict[str, Any] = {} if answer is None else plain_json(answer)
        log = status.pop("log", None)
        with self._changed:
            if self._is_ended:
                return
            if answer is None:
                self._publish("silent", _SILENT_TEXT, self.snapshot.status)
                return
            if status.get("format") != FORMAT:
                self._publish("silent", _OTHER_TEXT, {})
                return
            point = json.dumps(chart_point(status, now)).encode()
            self._history.append((now, point))
            while self._history[0][0] < now - HISTORY_S:
                self._history.popleft()
            events = _event("point", point)
            if isinstance(log, list) and log != self._log:
                self._log = log
                events += _event("log", json.dumps(log).encode())
            self._publish("answers", "", status, events)

    def stacks(self, rank: int) -> str | None:
        """Return the stacks of a rank's threads as text; None if there is no answer for it."""
        with self._stacks_lock:
            if time.monotonic() - self._stacks_time >= _STACKS_S:
                self._stacks = self._ask(question="stacks", all_threads=True)
                self._stacks_time = time.monotonic()
            answer = self._stacks
        ranks = [one for one in (answer or {}).get("ranks", ()) if one["rank"] == rank]
        if answer is None or not ranks:
            return None
        text = stacks_text({**answer, "ranks": ranks}, all_threads=True)
        return text.partition("\n")[2]  # without the line about the job

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_ended:
            began = time.monotonic()
            is_watched = began - self._looked < _ATTENTION_S
            try:
                answer = self._ask(question="status", log=is_watched)
                self.receive(answer, began)
            except Exception as error:  # odd data must not end the thread
                with self._changed:
                    self._publish("silent", f"The answer cannot be read: {error}", {})
            self._pause(began)

    def _pause(self, began: float) -> None:
        with self._changed:
            while not self._is_ended:
                now = time.monotonic()
                is_watched = now - self._looked < _ATTENTION_S
                period = _PERIOD_S if is_watched else _UNWATCHED_PERIOD_S
                if now >= began + period:
                    return
                self._changed.wait(began + period - now)

    def _ask(self, **request: Any) -> dict[str, Any] | None:
        """Return an answer; look for the socket of the next attempt if there is none."""
        answer = ask(self._path, **request) if self._path else None
        if answer is None:
            try:
                self._path = find_jobs(str(self._launcher), {})[0]
            except ConfigError:
                return None
            answer = ask(self._path, **request)
        return answer

    def _publish(self, state: str, text: str, status: dict[str, Any], events: bytes = b"") -> None:
        number = self.snapshot.number + 1
        time_s = time.monotonic() if state == "answers" else self.snapshot.time_s
        snapshot = Snapshot(number, time_s, state, text, status, events)
        events += _event("status", snapshot.as_json())
        self.snapshot = snapshot._replace(events=events)
        self._changed.notify_all()


def chart_point(status: Mapping[str, Any], at: float) -> list[Any]:
    """Return a point of the charts: time, steps/s, bytes/s, and the wait share of each rank."""
    ranks = [one for one in status.get("ranks", ()) if isinstance(one, dict)]
    steps = [_number(one.get("steps_per_s")) for one in ranks]
    return [
        round(at, 1),
        max(steps, default=0.0),
        sum(_number(one.get("bytes_per_s")) for one in ranks),
        [[one.get("rank"), round(_number(one.get("wait_share")), 3)] for one in ranks],
    ]


def plain_json(value: Any) -> Any:
    """Return a value as JSON has it: text keys, and null for numbers that JSON lacks.

    Example:
        >>> plain_json({1: [float("nan"), b"a", 2.5]})
        {'1': [None, 'a', 2.5]}
    """
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or isinstance(value, str | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
