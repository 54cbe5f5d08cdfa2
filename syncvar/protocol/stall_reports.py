"""Calls that wait for long: who waits for whom, and what those do instead, in one sentence, said a few times.

Before the sentence the ranks that have not come are asked what they did last and where they are; whoever does not answer
within a second is told of too: something keeps Python from running there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.rank_text import rank_list
from syncvar.protocol.deadlock_detector import stalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.protocol.control_messages import Message
    from syncvar.protocol.deadlock_detector import WaitReport

_AGAIN = (
    1,
    6,
    30,
)  # times the first wait: after 10, 60 and 300 s; later ones as far apart as the last is long
_ANSWER_S = 1.0  # a rank has a thread that answers, whatever its program does, unless something keeps Python from running
_GROUPS = 4

_Key = tuple[int, int]


class StallActions(NamedTuple):
    """What there is to do about stalls.

    Args:
        sentences: To show to the user.
        ask: Ranks to ask whether they are there.
        silent: (rank, seconds) of those who have not answered, each once.
    """

    sentences: list[str]
    ask: list[int]
    silent: list[tuple[int, float]]


class Stalls:
    """The calls that wait for long in one generation.

    Args:
        after_s: How long that is, in seconds.

    Attributes:
        asked: Ranks that were asked whether they are there, and have not answered: since when.
    """

    def __init__(self, after_s: float) -> None:
        self.asked: dict[int, float] = {}
        self._after_s = after_s
        self._times_said: dict[_Key, int] = {}
        self._asking: dict[_Key, tuple[float, list[int]]] = {}
        self._answers: dict[int, tuple[float, str]] = {}
        self._silent: dict[int, str] = {}

    def here(self, rank: int, message: Message, now: float) -> None:
        """Take a rank's answer."""
        self.asked.pop(rank, None)
        self._silent.pop(rank, None)
        last = "no call yet"
        if message["last"]:
            when = f"{message['age_s']:.0f} s"
            last = f"last call {message['last'][:400]}, " + (
                f"{when} ago" if message["is_over"] else f"under way since {when}"
            )
        self._answers[rank] = (
            now,
            last + (f", now {message['stack'][:400]}" if message["stack"] else ""),
        )

    def mute(self, rank: int, words: str) -> None:
        """Note in words what a rank does of which no thread answers."""
        self._silent[rank] = words

    def silence(self, rank: int) -> str:
        """Return what is known of a rank of which no thread answers; empty for any other."""
        return self._silent.get(rank, "")

    def tick(
        self, reports: list[WaitReport], now: float, may_answer: Callable[[int], bool]
    ) -> StallActions:
        """Look at the clock.

        Args:
            reports: Of the ranks that wait.
            now: Seconds.
            may_answer: Whether a rank is there to be asked.
        """
        told = StallActions([], [], [])
        found = {stall.key: stall for stall in stalls(reports, now, self._after_s)}
        for notes in (self._times_said, self._asking):
            for key in notes.keys() - found.keys():
                del notes[key]
        reporting = {report.rank for report in reports}
        for key, stall in found.items():
            times = self._times_said.get(key, 0)
            later = max(0, times - len(_AGAIN) + 1)
            if stall.waited_s < self._after_s * (
                _AGAIN[min(times, len(_AGAIN) - 1)] + later * _AGAIN[-1]
            ):
                continue
            if key not in self._asking:
                ranks = [rank for rank in stall.late if may_answer(rank)]
                told.ask.extend(ranks)
                self._asking[key] = (now, ranks)
                self.asked = {**dict.fromkeys(ranks, now), **self.asked}
            since, ranks = self._asking[key]
            answers = {
                rank: self._answers[rank][1]
                for rank in ranks
                if self._answers.get(rank, (-1.0,))[0] >= since
            }
            if now - since >= _ANSWER_S or all(
                rank in answers or not may_answer(rank) for rank in ranks
            ):
                del self._asking[key]
                self._times_said[key] = times + 1
                told.sentences.append(
                    stall.sentence
                    + _instead({r: one for r, one in answers.items() if r not in reporting})
                )
        for rank, since in self.asked.items():
            if now - since >= _ANSWER_S and rank not in self._silent and may_answer(rank):
                self._silent[rank] = "no Python thread answers"
                told.silent.append((rank, now - since))
        return told


def _instead(answers: dict[int, str]) -> str:
    """Return what late ranks have answered, equal answers once."""
    groups: dict[str, list[int]] = {}
    for rank, words in answers.items():
        groups.setdefault(words, []).append(rank)
    told = [f"; {rank_list(ranks)}: {words}" for words, ranks in groups.items()]
    return "".join(told[:_GROUPS]) + ("; …" if len(told) > _GROUPS else "")
