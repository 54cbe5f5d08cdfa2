"""Find mismatches, deadlocks and stalls in the reports of waiting ranks, and warn of stalls.

The coordinator collects the reports, and calls `Stalls.tick` for the warnings. Mismatches and
deadlocks are certain: they rest on one proved property of all schedules, the entry property. It
says that no rank finishes a call before all ranks of the group enter it.

* Mismatch: two ranks report different fingerprints for the same call of the same group.
* Deadlock: a waiting rank waits for each member that has not entered its call. If these edges
  form a cycle of ranks with no other active thread, none of them ever moves again. Reports may be
  of different times: a rank that has reported stays blocked until the next rank enters its call.
  A rank that waits for a message from any source waits for one of several ranks. It is part of a
  deadlock if all of them are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.process_ids import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable

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


def find_deadlock(reports: list[WaitReport]) -> list[DeadlockReport]:
    """Return one entry for each call on a cycle of ranks that wait for one another, if any."""
    waiting: dict[int, WaitReport] = {}
    movable: set[int] = set()
    for report in reports:
        if report.rank in waiting or report.has_active_threads:
            movable.add(report.rank)
        waiting[report.rank] = report
    waiting = {rank: report for rank, report in waiting.items() if rank not in movable}
    edges = _stuck_edges(waiting)
    cycle = _find_cycle(edges)
    following = {rank: [cycle[(at + 1) % len(cycle)]] for at, rank in enumerate(cycle)}
    if any(len(waiting[rank].alternatives) > 1 for rank in cycle):
        following = _reachable(edges, cycle)  # the other alternatives belong to it
    table = {
        rank: f"waits in {waiting[rank].describe()} for {rank_list(others)}"
        for rank, others in following.items()
    }
    calls = {(waiting[rank].group, waiting[rank].call): waiting[rank].members for rank in following}
    return [
        DeadlockReport(group, call, members, _DEADLOCK, table, is_deadlock=True)
        for (group, call), members in calls.items()
    ]


def _stuck_edges(waiting: dict[int, WaitReport]) -> dict[int, list[int]]:
    """Return for which ranks each rank waits, of the ranks that can only move if another does."""
    edges = {rank: _blocking(report, waiting) for rank, report in waiting.items()}
    size = -1
    while len(edges) != size:
        size = len(edges)
        edges = {
            rank: stuck
            for rank, others in edges.items()
            if (stuck := [other for other in others if other in edges])
            and len(stuck) >= len(waiting[rank].alternatives)
        }
    return edges


def _blocking(report: WaitReport, waiting: dict[int, WaitReport]) -> list[int]:
    """Return the waiting ranks that have not entered a call that a rank waits for."""
    awaited = report.alternatives or [(rank, report.group, report.call) for rank in report.members]
    return [
        other
        for other, group, call in awaited
        if other in waiting
        and other != report.rank
        and waiting[other].entered.get(group, -1) < call
    ]


def _reachable(edges: dict[int, list[int]], start: list[int]) -> dict[int, list[int]]:
    """Return the edges of all ranks to which edges lead from some ranks."""
    found: dict[int, list[int]] = {}
    ahead = list(start)
    while ahead:
        rank = ahead.pop(0)
        if rank not in found:
            found[rank] = edges[rank]
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


def find_stalls(reports: list[WaitReport], now: float, after_s: float) -> list[Stall]:
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
        sentence = _stall_sentence(waiting, waited_s, ours[0], late, others)
        result.append(Stall((group, call), waited_s, sentence, late))
    return result


def _stall_sentence(
    waiting: list[int],
    waited_s: float,
    report: WaitReport,
    late: list[int],
    other_calls: dict[int, str],
) -> str:
    """Return which ranks wait in a call, for how long, and for which ranks.

    `report` is that of one of them. `other_calls` has the text of the call for each late rank that
    waits in another one.
    """
    waits = f"{rank_list(waiting)} {_have(waiting)} been waiting {waited_s:.0f} s in "
    waits += f"{report.describe()}: "
    if late:
        waits += f"{rank_list(late)} {_have(late)} not entered it"
    elif len(report.members) == 1:  # a probe, or a receive from any source
        waits += "no message has come"
    else:
        waits += "all ranks have entered it, and data are missing"
    return waits + "".join(f"; rank {rank} waits in {other}" for rank, other in other_calls.items())


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

    Attributes:
        pinged: Unanswered ranks, with the time of the question.
    """

    def __init__(self, after_s: float) -> None:
        self.pinged: dict[int, float] = {}
        self._after_s = after_s
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
        found = {stall.key: stall for stall in find_stalls(reports, now, self._after_s)}
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
                actions.sentences.append(stall.sentence + _late_ranks_text(late))
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


def _late_ranks_text(activity: dict[int, str]) -> str:
    """Return the activity of late ranks; ranks with equal texts share one."""
    groups: dict[str, list[int]] = {}
    for rank, text in activity.items():
        groups.setdefault(text, []).append(rank)
    texts = [f"; {rank_list(ranks)}: {text}" for text, ranks in groups.items()]
    return "".join(texts[:_GROUPS_MAX]) + ("; …" if len(texts) > _GROUPS_MAX else "")
