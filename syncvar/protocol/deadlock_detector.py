"""Find mismatches, deadlocks and stalls in the reports of waiting ranks, and warn of stalls.

The coordinator collects the reports, and calls `Stalls.tick` for the warnings. Mismatches and
deadlocks are certain: they rest on one proved property of all schedules, the entry property. It
says that no rank finishes a call before all ranks of the group enter it.

* Mismatch: two ranks report different fingerprints for the same call of the same group.
* Deadlock: a waiting rank waits for each member that has not entered its call. If these edges
  form a cycle of ranks with no other active thread, none of them ever moves again. Reports may be
  of different times: a rank that has reported stays blocked until the next rank enters its call.
  A rank that waits for a message from any source waits for one of several ranks. It is part of a
  deadlock if all of them are. A rank whose threads wait in several calls moves if one of them ends.

A call can also end with an error, although not all ranks have entered it. `WaitReports` knows which
calls do so, and such a rank can move from then on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.process_ids import RANKS, ProcessNames, process_name, rank_list
from syncvar.protocol.unreceived_messages import ENTERED_MAX, SkippedBlocks, is_left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncvar.protocol.control_messages import Message

_MISMATCH = (
    "the ranks do not make the same call. Write the same calls in the same order on every rank, "
    "with the same shape and dtype, and none of them inside `if sv.rank() == 0:`"
)
_DEADLOCK = "deadlock: each rank in the table waits for the next one"
_NOT_REPORTED = "has not reported"
_NO_THREAD_ANSWERS = "no Python thread answers"

_GROUPS_MAX = 4
_TEXT_MAX = 400
# Times of the warnings, in multiples of `after_s`; later ones follow at the last interval.
_WARN_AT = (1, 6, 30)
# Each rank has a thread that answers, so a longer silence means that Python does not run there.
_ANSWER_S = 1.0
# Decisions whose calls a rank may still report: it sent the report before it knew the decision.
_DECISIONS_MAX = 256

_Key = tuple[int, int]


class WaitReport(NamedTuple):
    """A waiting rank's report of its call."""

    rank: int  # world rank of the reporter
    group: int  # identity of the group
    members: tuple[int, ...]  # world ranks of the group
    call: int  # call number within the group
    ordinal: int  # number of the call as the program counts the group's calls, from 1
    fingerprint: int  # hash of the call
    description: str  # text of the call
    site: str  # file:line of the caller
    awaiting: tuple[int, ...]  # ranks whose frames are missing
    since: float  # begin of the wait, on the receiver's clock
    received: float  # arrival of the report, on the same clock
    mismatch: bool  # whether the rank has seen a frame with another fingerprint
    has_active_threads: bool  # whether another thread of the rank could still make calls
    entered: dict[int, int]  # last call that the rank has entered, by group
    # (rank, group, call): one of these calls ends the wait, for instance a send. Empty: all ranks
    # of the group have to enter the call.
    alternatives: tuple[tuple[int, int, int], ...] = ()
    is_awaited: bool = True  # whether a thread of the rank waits in the call

    def describe(self) -> str:
        """Return the call with its number and its place in the program."""
        return f"{self.description} (call {self.ordinal}) at {self.site}"


class DeadlockReport(NamedTuple):
    """A call that cannot succeed: a mismatch or a deadlock."""

    group: int  # identity of the group
    call: int  # call number
    members: tuple[int, ...]  # ranks that must abort the call
    text: str  # reason, as a sentence
    table: dict[int, str]  # state of each rank
    is_deadlock: bool = False  # whether each rank of the table waits for the next one


class WaitReports:
    """The reports of the waiting ranks of one version of the membership.

    A decision, or a rank that leaves, ends calls with an error. A rank may report such a call, or
    end it, long after the coordinator knows that. So its report does not count, and the rank counts
    as active until it sends "wait_end".
    """

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int, int], WaitReport] = {}
        self._failing: set[tuple[int, int, int]] = set()
        self._decisions: deque[tuple[int, int, int]] = deque(maxlen=_DECISIONS_MAX)
        self._left: dict[int, tuple[Mapping[int, int], SkippedBlocks]] = {}

    def live(self) -> list[WaitReport]:
        """Return the reports of calls that may still succeed."""
        movable = {rank for rank, _, _ in self._failing}
        return [
            one._replace(has_active_threads=True) if one.rank in movable else one
            for key, one in self._reports.items()
            if key not in self._failing
        ]

    def add(self, report: WaitReport) -> None:
        """Record a report. It is the latest news of all threads of its rank."""
        key = report.rank, report.group, report.call
        self._reports.pop(key, None)  # keep the latest report of a rank last
        self._reports[key] = report
        self._set_activity(report.rank, is_active=report.has_active_threads)
        self._failing.discard(key)
        if any(_is_in(key, decision) for decision in self._decisions) or any(
            _is_left_by(rank, report, *left) for rank, left in self._left.items()
        ):
            self._failing.add(key)

    def end(self, rank: int, group: int, call: int) -> None:
        """Record that a rank has ended a call: the thread that waited there may make others."""
        key = rank, group, call
        self._failing.discard(key)
        if self._reports.pop(key, None) is not None:
            self._set_activity(rank, is_active=True)

    def decide(self, group: int, first: int, last: int) -> None:
        """Record a decision: the first to the last of these calls of a group end with an error."""
        decision = group, first, last
        self._decisions.append(decision)
        self._failing |= {key for key in self._reports if _is_in(key, decision)}

    def leave(self, rank: int, entered: Mapping[int, int], skipped: list[int]) -> None:
        """Record that a rank has left: calls that it has not entered end with an error."""
        self.drop(rank)
        left = self._left[rank] = entered, SkippedBlocks(skipped)
        self._failing |= {
            key for key, one in self._reports.items() if _is_left_by(rank, one, *left)
        }

    def drop(self, rank: int) -> None:
        """Forget the reports of a rank."""
        for key in [key for key in self._reports if key[0] == rank]:
            del self._reports[key]
            self._failing.discard(key)

    def _set_activity(self, rank: int, *, is_active: bool) -> None:
        for key, one in self._reports.items():
            if key[0] == rank and one.has_active_threads != is_active:
                self._reports[key] = one._replace(has_active_threads=is_active)


def _is_in(key: tuple[int, int, int], decision: tuple[int, int, int]) -> bool:
    group, first, last = decision
    return key[1] == group and first <= key[2] <= last


def _is_left_by(
    rank: int, report: WaitReport, entered: Mapping[int, int], skipped: SkippedBlocks
) -> bool:
    """Return whether a rank left before it entered the call of a report."""
    return rank in report.members and is_left_out(entered, skipped, report.group, report.call)


def _by_call(reports: list[WaitReport]) -> dict[tuple[int, int], list[WaitReport]]:
    calls: dict[tuple[int, int], list[WaitReport]] = {}
    for report in reports:
        calls.setdefault((report.group, report.call), []).append(report)
    return calls


def find_mismatch(
    reports: list[WaitReport], now: float, patience_s: float = 0.3
) -> list[DeadlockReport]:
    """Return one entry for each call at which ranks disagree.

    A call is judged when all members have reported, or `patience_s` seconds after the last report.
    """
    found = []
    for (group, call), ours in _by_call(reports).items():
        if len({r.fingerprint for r in ours}) < 2 and not any(r.mismatch for r in ours):
            continue
        members = ours[0].members
        is_recent = now - max(r.received for r in ours) < patience_s
        if len({r.rank for r in ours}) < len(members) and is_recent:
            continue
        table = {report.rank: report.describe() for report in ours}
        for rank in members:
            if rank not in table:
                other = next((r for r in reports if r.rank == rank), None)
                table[rank] = other.describe() if other else _NOT_REPORTED
        found.append(DeadlockReport(group, call, members, _MISMATCH, table))
    return found


class _StuckWait(NamedTuple):
    report: WaitReport
    ranks: list[int]  # stuck ranks that have not entered the call


_StuckRanks = dict[int, list[_StuckWait]]


def find_deadlock(reports: list[WaitReport]) -> list[DeadlockReport]:
    """Return one entry for each call on a cycle of ranks that wait for one another, if any."""
    stuck = _stuck_ranks(reports)
    edges = {rank: [other for one in waits for other in one.ranks] for rank, waits in stuck.items()}
    cycle = _find_cycle(edges)
    if any(len(stuck[rank]) > 1 or len(stuck[rank][0].report.alternatives) > 1 for rank in cycle):
        # The ranks that its other calls wait for, and the other alternatives, belong to it.
        found = {rank: stuck[rank] for rank in _reachable(edges, cycle)}
    else:
        following = [*cycle[1:], *cycle[:1]]
        found = {
            rank: [_StuckWait(stuck[rank][0].report, [other])]
            for rank, other in zip(cycle, following, strict=True)
        }
    table = {
        rank: "; ".join(
            f"waits in {one.report.describe()} for {rank_list(one.ranks)}" for one in waits
        )
        for rank, waits in found.items()
    }
    waited = [one.report for waits in found.values() for one in waits]
    calls = {(report.group, report.call): report.members for report in waited}
    return [
        DeadlockReport(group, call, members, _DEADLOCK, table, is_deadlock=True)
        for (group, call), members in calls.items()
    ]


def _stuck_ranks(reports: list[WaitReport]) -> _StuckRanks:
    """Return the waits of the ranks that can only move if another of these ranks does."""
    movable = {report.rank for report in reports if report.has_active_threads}
    waiting: dict[int, list[WaitReport]] = {}
    entered: dict[int, dict[int, int]] = {}
    for report in reports:
        if report.is_awaited and report.rank not in movable:
            waiting.setdefault(report.rank, []).append(report)
            entered[report.rank] = report.entered  # the latest, see `WaitReports.add`
    found: _StuckRanks = {
        rank: [_StuckWait(one, _blocking(one, entered)) for one in waits]
        for rank, waits in waiting.items()
    }
    size = -1
    while len(found) != size:
        size = len(found)
        found = {
            rank: [
                _StuckWait(one.report, [other for other in one.ranks if other in found])
                for one in waits
            ]
            for rank, waits in found.items()
        }
        found = {
            rank: waits
            for rank, waits in found.items()
            if all(len(one.ranks) >= max(1, len(one.report.alternatives)) for one in waits)
        }
    return found


def _blocking(report: WaitReport, entered: dict[int, dict[int, int]]) -> list[int]:
    """Return the waiting ranks that have not entered a call that a rank waits for.

    `entered` has the last calls of each waiting rank.
    """
    awaited = report.alternatives or [(rank, report.group, report.call) for rank in report.members]
    return [
        other
        for other, group, call in awaited
        if other != report.rank
        and other in entered
        and _has_not_entered(entered[other], group, call)
    ]


def _has_not_entered(entered: dict[int, int], group: int, call: int) -> bool:
    """Return whether a rank surely has not entered a call.

    `entered` may lack groups that it used long ago.
    """
    last = entered.get(group)
    return len(entered) < ENTERED_MAX if last is None else last < call


def _reachable(edges: dict[int, list[int]], start: list[int]) -> list[int]:
    """Return all ranks to which edges lead from some ranks."""
    found: list[int] = []
    ahead = list(start)
    while ahead:
        rank = ahead.pop(0)
        if rank not in found:
            found.append(rank)
            ahead += edges[rank]
    return found


def _find_cycle(edges: dict[int, list[int]]) -> list[int]:
    done: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        position: dict[int, int] = {}
        stack: list[tuple[int, int]] = [(start, 0)]
        while stack:
            rank, index = stack.pop()
            if index == 0:
                if rank in done:
                    continue
                position[rank] = len(path)
                path.append(rank)
            targets = edges[rank]
            if index < len(targets):
                stack.append((rank, index + 1))
                target = targets[index]
                if target in position:
                    return path[position[target] :]
                if target not in done:
                    stack.append((target, 0))
            else:
                done.add(rank)
                position.pop(rank)
                path.pop()
    return []


class Stall(NamedTuple):
    """A call in which ranks have waited for a long time."""

    key: tuple[int, int]  # (group, call)
    waited_s: float  # time since the first rank began to wait, in seconds
    sentence: str  # text for the user
    late: list[int]  # ranks that have not entered the call


def find_stalls(
    reports: list[WaitReport], now: float, after_s: float, names: ProcessNames = RANKS
) -> list[Stall]:
    """Return each call in which a rank has waited for longer than `after_s` seconds."""
    calls = _by_call(reports)
    groups = {group for group, _ in calls}
    latest: dict[tuple[int, int], int] = {}  # (rank, group): last call that the rank has entered
    first: dict[int, WaitReport] = {}
    for report in reports:
        first.setdefault(report.rank, report)
        for group in groups & report.entered.keys():
            key = (report.rank, group)
            latest[key] = max(report.entered[group], latest.get(key, -1))
    result = []
    for (group, call), ours in sorted(calls.items()):
        waited_s = now - min(report.since for report in ours)
        if waited_s < after_s:
            continue
        late = [rank for rank in ours[0].members if latest.get((rank, group), -1) < call]
        waiting = [report.rank for report in ours]
        others = {rank: first[rank].describe() for rank in late if rank in first}
        sentence = _stall_sentence(waiting, waited_s, ours[0], late, others, names)
        result.append(Stall((group, call), waited_s, sentence, late))
    return result


def _stall_sentence(
    waiting: list[int],
    waited_s: float,
    report: WaitReport,
    late: list[int],
    other_calls: dict[int, str],
    names: ProcessNames,
) -> str:
    """Return which ranks wait in a call, for how long, and for which ranks.

    `report` is that of one of them. `other_calls` has the text of the call for each late rank that
    waits in another one.
    """
    waits = f"{rank_list(waiting, names)} {_have(waiting)} been waiting {waited_s:.0f} s in "
    waits += f"{report.describe()}: "
    if late:
        waits += f"{rank_list(late, names)} {_have(late)} not entered it"
    elif len(report.members) == 1:  # a probe, or a receive from any source
        waits += "no message has come"
    else:
        waits += f"all {names.word}s have entered it, and data are missing"
    for rank, call in other_calls.items():
        waits += f"; {process_name(rank, names)} waits in {call}"
    return waits


def _have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


class StallActions(NamedTuple):
    """Actions that follow from the stalls of this moment."""

    sentences: list[str]  # warnings for the user
    ask: list[int]  # ranks to send "ping"
    silent: list[tuple[int, float]]  # (rank, seconds) of ranks that have not answered, each once


class Stalls:
    """The stalled calls of one version of the membership; warns a few times at growing intervals.

    Before each warning it asks the late ranks for their last call and their stack. A rank that does
    not answer within a second is reported too. In its process something keeps Python from running,
    for instance a C call that holds the GIL.

    Args:
        after_s: Wait after which a call counts as stalled, in seconds.
        names: What sentences call the ranks.

    Attributes:
        pinged: Unanswered ranks, with the time of the question.
    """

    def __init__(self, after_s: float, names: ProcessNames = RANKS) -> None:
        self.pinged: dict[int, float] = {}
        self._after_s, self._names = after_s, names
        self._warnings: dict[_Key, int] = {}
        self._pending: dict[_Key, tuple[float, list[int]]] = {}
        self._answers: dict[int, tuple[float, str]] = {}
        self._silent: dict[int, str] = {}

    def record_answer(self, rank: int, message: Message, now: float) -> None:
        """Record a rank's answer to "ping"."""
        self.pinged.pop(rank, None)
        self._silent.pop(rank, None)
        self._answers[rank] = (now, _last_activity(message))

    def record_silent(self, rank: int, words: str) -> None:
        """Record a text for a silent rank: what its process does, as seen from outside."""
        self._silent[rank] = words

    def silence(self, rank: int) -> str:
        """Return the text recorded for a silent rank; empty for other ranks."""
        return self._silent.get(rank, "")

    def tick(
        self, reports: list[WaitReport], now: float, may_answer: Callable[[int], bool]
    ) -> StallActions:
        """Return the actions that are due at `now`; `may_answer(rank)`: the rank can be asked."""
        actions = StallActions([], [], [])
        stalls = find_stalls(reports, now, self._after_s, self._names)
        found = {stall.key: stall for stall in stalls}
        for notes in (self._warnings, self._pending):
            for key in notes.keys() - found.keys():
                del notes[key]
        reporting = {report.rank for report in reports}
        for key, stall in found.items():
            if stall.waited_s < self._next_warning_s(key):
                continue
            if key not in self._pending:
                ranks = [rank for rank in stall.late if may_answer(rank)]
                actions.ask.extend(ranks)
                self._pending[key] = (now, ranks)
                self.pinged = {**dict.fromkeys(ranks, now), **self.pinged}
            since, ranks = self._pending[key]
            answers = {
                rank: self._answers[rank][1]
                for rank in ranks
                if self._answers.get(rank, (-1.0,))[0] >= since
            }
            have_all = all(rank in answers or not may_answer(rank) for rank in ranks)
            if have_all or now - since >= _ANSWER_S:
                del self._pending[key]
                self._warnings[key] = self._warnings.get(key, 0) + 1
                late = {rank: text for rank, text in answers.items() if rank not in reporting}
                actions.sentences.append(stall.sentence + _late_ranks_text(late, self._names))
        for rank, since in self.pinged.items():
            if now - since >= _ANSWER_S and rank not in self._silent and may_answer(rank):
                self._silent[rank] = _NO_THREAD_ANSWERS
                actions.silent.append((rank, now - since))
        return actions

    def _next_warning_s(self, key: _Key) -> float:
        count = self._warnings.get(key, 0)
        later = max(0, count - len(_WARN_AT) + 1)
        return self._after_s * (_WARN_AT[min(count, len(_WARN_AT) - 1)] + later * _WARN_AT[-1])


def _last_activity(answer: Message) -> str:
    """Return a late rank's last call and its stack, from its answer to "ping"."""
    text = "no call yet"
    if answer["last_call"]:
        age = f"{answer['age_s']:.0f} s"
        when = f"{age} ago" if answer["is_finished"] else f"under way for {age}"
        text = f"last call {answer['last_call'][:_TEXT_MAX]}, {when}"
    return text + (f", now {answer['stack'][:_TEXT_MAX]}" if answer["stack"] else "")


def _late_ranks_text(activity: dict[int, str], names: ProcessNames) -> str:
    """Return the activity of late ranks; ranks with equal texts share one."""
    groups: dict[str, list[int]] = {}
    for rank, text in activity.items():
        groups.setdefault(text, []).append(rank)
    texts = [f"; {rank_list(ranks, names)}: {text}" for text, ranks in groups.items()]
    return "".join(texts[:_GROUPS_MAX]) + ("; …" if len(texts) > _GROUPS_MAX else "")
