"""Sentences on what the processes of ranks do now, for stall reports and late starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from syncvar_launcher.job.workers import Workers

_BUSY_SHARE = 0.2  # of a core
_SHOWN_MAX = 4  # ranks that a sentence names


class RankStates:
    """Describes the processes of an attempt.

    Args:
        workers: The workers.
        starting: The ranks that have not reached their script.
    """

    def __init__(self, workers: Workers, starting: Container[int]) -> None:
        self._workers = workers
        self._starting = starting
        self._busy: dict[int, tuple[float, float]] = {}  # time and processor time of the question

    def watch(self, ranks: Iterable[int], now: float) -> None:
        """Measure processor time of ranks that the rendezvous server asks for a sign of life."""
        self._busy = {
            rank: self._busy.get(rank) or (now, self._workers.busy_s(rank)) for rank in ranks
        }

    def process(self, number: int) -> str:
        """Return whether the process of a rank or server runs, and its state."""
        pid = self._workers.pid(number)
        if number not in self._workers.workers or pid < 0:
            return "its process has not been started"
        letter = self._workers.state(number)
        stopped = " is stopped" if letter == "T" else ""
        return f"process {pid}{stopped} (state {letter})" if letter else f"process {pid} has ended"

    def absent(self, ranks: Sequence[int]) -> str:
        """Return what the first of the ranks do that others wait for."""
        return "; ".join(f"rank {rank}: {self._absence(rank)}" for rank in ranks[:_SHOWN_MAX])

    def _absence(self, rank: int) -> str:
        text = self.process(rank)
        if rank in self._starting:
            return f"{text}, has not reached its script" if text.startswith("process") else text
        place = self._workers.place_now(rank) if rank in self._workers.workers else ""
        return f"{text}, {place}" if place else text

    def activity(self, rank: int, now: float) -> str:
        """Return whether a rank has used its core since `watch` began to measure it."""
        letter, known = self._workers.state(rank), self._busy.get(rank)
        if not letter or known is None:
            return ""
        since, before = known
        share = (self._workers.busy_s(rank) - before) / max(1e-3, now - since)
        is_busy = share > _BUSY_SHARE or letter == "R"  # R: runnable, even without a free core
        return f", CPU {'busy' if is_busy else 'idle'} (state {letter})"
