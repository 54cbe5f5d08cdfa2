"""Find mismatches, deadlocks and stalls in the reports of waiting ranks.

The coordinator collects the reports. Both certain findings rest on one proved property of all
schedules, the entry property: no rank finishes a call before all ranks of the group enter it.

* Mismatch: two ranks report different fingerprints for the same call of the same group.
* Deadlock: a waiting rank waits for each member that has not entered its call. If these edges
  form a cycle of ranks with no other active thread, none of them ever moves again. Reports may be
  of different times: a rank that has reported stays blocked until the next rank enters its call.
"""

from __future__ import annotations

from typing import NamedTuple

from syncvar.protocol.stall_text import (
    DEADLOCK,
    MISMATCH,
    NOT_REPORTED,
    call_text,
    deadlock_row,
    stall_sentence,
)


class WaitReport(NamedTuple):
    """A waiting rank's report of its call.

    Args:
        rank: World rank of the reporter.
        group: Identity of the group.
        members: World ranks of the group.
        call: Call number within the group.
        ordinal: Number of the call as the program counts the group's calls, from 1.
        fingerprint: Hash of the call.
        what: Text of the call.
        site: file:line of the caller.
        awaiting: Ranks whose frames are missing.
        since: Begin of the wait, on the receiver's clock.
        received: Arrival of the report, on the same clock.
        mismatch: Whether the rank has seen a frame with another fingerprint.
        may_move: Whether another thread of the rank could still make calls.
        entered: Last call that the rank has entered, by group.
    """

    rank: int
    group: int
    members: tuple[int, ...]
    call: int
    ordinal: int
    fingerprint: int
    what: str
    site: str
    awaiting: tuple[int, ...]
    since: float
    received: float
    mismatch: bool
    may_move: bool
    entered: dict[int, int]

    def describe(self) -> str:
        """Return the call with its number and its place in the program."""
        return call_text(self.what, self.ordinal, self.site)


class DeadlockReport(NamedTuple):
    """A call that cannot succeed: a mismatch or a deadlock.

    Args:
        group: Identity of the group.
        call: Call number.
        members: Ranks that must abort the call.
        text: Reason, as a sentence.
        table: State of each rank.
    """

    group: int
    call: int
    members: tuple[int, ...]
    text: str
    table: dict[int, str]


def _by_call(reports: list[WaitReport]) -> dict[tuple[int, int], list[WaitReport]]:
    calls: dict[tuple[int, int], list[WaitReport]] = {}
    for report in reports:
        calls.setdefault((report.group, report.call), []).append(report)
    return calls


def find_mismatch(
    reports: list[WaitReport], now: float, patience_s: float = 0.3
) -> list[DeadlockReport]:
    """Return one entry for each call at which ranks disagree.

    It waits until all members have reported, or `patience_s` seconds after the last report, so
    that the table names as many ranks as possible.
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
                table[rank] = other.describe() if other else NOT_REPORTED
        found.append(DeadlockReport(group, call, members, MISMATCH, table))
    return found


def find_deadlock(reports: list[WaitReport]) -> list[DeadlockReport]:
    """Return one entry for each call on a cycle of ranks that wait for one another, if any."""
    waiting: dict[int, WaitReport] = {}
    movable: set[int] = set()
    for report in reports:
        if report.rank in waiting or report.may_move:
            movable.add(report.rank)
        waiting[report.rank] = report
    waiting = {rank: report for rank, report in waiting.items() if rank not in movable}
    edges = {
        rank: [
            other
            for other in report.members
            if other in waiting
            and other != rank
            and waiting[other].entered.get(report.group, -1) < report.call
        ]
        for rank, report in waiting.items()
    }
    cycle = _find_cycle(edges)
    table = {
        rank: deadlock_row(waiting[rank].describe(), cycle[(index + 1) % len(cycle)])
        for index, rank in enumerate(cycle)
    }
    calls = {(waiting[rank].group, waiting[rank].call): waiting[rank].members for rank in cycle}
    return [
        DeadlockReport(group, call, members, DEADLOCK, table)
        for (group, call), members in calls.items()
    ]


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
    """A call in which ranks have waited for a long time.

    Args:
        key: (group, call).
        waited_s: Time since the first rank began to wait, in seconds.
        sentence: Text for the user.
        late: Ranks that have not entered the call.
    """

    key: tuple[int, int]
    waited_s: float
    sentence: str
    late: list[int]


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
        sentence = stall_sentence(
            [report.rank for report in ours],
            waited_s,
            ours[0].describe(),
            late,
            {rank: first[rank].describe() for rank in late if rank in first},
        )
        result.append(Stall((group, call), waited_s, sentence, late))
    return result
