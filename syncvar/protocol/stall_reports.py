"""Decide when to warn about a stalled call: a few times, at growing intervals.

The coordinator calls `Stalls.tick`. Before each warning it asks the late ranks for their last
call and their stack. A rank that does not answer within a second is reported too. In its
process something keeps Python from running, for instance a C call that holds the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.protocol.deadlock_detector import find_stalls
from syncvar.protocol.stall_text import NO_THREAD_ANSWERS, last_activity, late_ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.protocol.control_messages import Message
    from syncvar.protocol.deadlock_detector import WaitReport

# Times of the warnings, in multiples of `after_s`; later ones follow at the last interval.
_WARN_AT = (1, 6, 30)
# Each rank has a thread that answers, so a longer silence means that Python does not run there.
_ANSWER_S = 1.0

_Key = tuple[int, int]


class StallActions(NamedTuple):
    """Actions that follow from the stalls of this moment.

    Args:
        sentences: Warnings for the user.
        ask: Ranks to send "are_you_there".
        silent: (rank, seconds) of ranks that have not answered, each once.
    """

    sentences: list[str]
    ask: list[int]
    silent: list[tuple[int, float]]


class Stalls:
    """The stalled calls of one version of the membership.

    Args:
        after_s: Wait after which a call counts as stalled, in seconds.

    Attributes:
        asked: Unanswered ranks, with the time of the question.
    """

    def __init__(self, after_s: float) -> None:
        self.asked: dict[int, float] = {}
        self._after_s = after_s
        self._warnings: dict[_Key, int] = {}
        self._asking: dict[_Key, tuple[float, list[int]]] = {}
        self._answers: dict[int, tuple[float, str]] = {}
        self._silent: dict[int, str] = {}

    def record_answer(self, rank: int, message: Message, now: float) -> None:
        """Record a rank's answer to "are_you_there"."""
        self.asked.pop(rank, None)
        self._silent.pop(rank, None)
        self._answers[rank] = (now, last_activity(message))

    def record_silent(self, rank: int, words: str) -> None:
        """Record a text for a silent rank: what its process does, as seen from outside."""
        self._silent[rank] = words

    def silence(self, rank: int) -> str:
        """Return the text recorded for a silent rank; empty for other ranks."""
        return self._silent.get(rank, "")

    def tick(
        self, reports: list[WaitReport], now: float, may_answer: Callable[[int], bool]
    ) -> StallActions:
        """Return the actions that are due at time `now` (seconds).

        `may_answer(rank)` says whether the rank is connected and can be asked.
        """
        actions = StallActions([], [], [])
        found = {stall.key: stall for stall in find_stalls(reports, now, self._after_s)}
        for notes in (self._warnings, self._asking):
            for key in notes.keys() - found.keys():
                del notes[key]
        reporting = {report.rank for report in reports}
        for key, stall in found.items():
            if stall.waited_s < self._next_warning_s(key):
                continue
            if key not in self._asking:
                ranks = [rank for rank in stall.late if may_answer(rank)]
                actions.ask.extend(ranks)
                self._asking[key] = (now, ranks)
                self.asked = {**dict.fromkeys(ranks, now), **self.asked}
            since, ranks = self._asking[key]
            answers = {
                rank: self._answers[rank][1]
                for rank in ranks
                if self._answers.get(rank, (-1.0,))[0] >= since
            }
            have_all = all(rank in answers or not may_answer(rank) for rank in ranks)
            if have_all or now - since >= _ANSWER_S:
                del self._asking[key]
                self._warnings[key] = self._warnings.get(key, 0) + 1
                late = {rank: text for rank, text in answers.items() if rank not in reporting}
                actions.sentences.append(stall.sentence + late_ranks_text(late))
        for rank, since in self.asked.items():
            if now - since >= _ANSWER_S and rank not in self._silent and may_answer(rank):
                self._silent[rank] = NO_THREAD_ANSWERS
                actions.silent.append((rank, now - since))
        return actions

    def _next_warning_s(self, key: _Key) -> float:
        count = self._warnings.get(key, 0)
        later = max(0, count - len(_WARN_AT) + 1)
        return self._after_s * (_WARN_AT[min(count, len(_WARN_AT) - 1)] + later * _WARN_AT[-1])
