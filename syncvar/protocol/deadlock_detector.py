"""Reports of long waits in, verdicts out: mismatch, certain deadlock, or keep waiting.

A rank that waits longer than a moment reports where it stands. All collectives here share a property that the checker
of the plans proves: no rank can finish a call before every rank of the group has entered it. Therefore

* two ranks at the same call of the same group with different fingerprints can never agree: a mismatch;
* a rank that waits waits for every member that has not entered its call. When these arrows form a cycle among ranks
  that cannot move otherwise, nobody will ever move again. This is certain even though reports are of different times:
  a rank blocked at its report stays blocked until the one it waits for enters, and that one was blocked later still.
"""

from __future__ import annotations

from typing import NamedTuple

from syncvar.core.rank_text import rank_list

_MISMATCH = (
    "the ranks do not make the same call. Write the same calls in the same order on every rank, with the same shape and "
    "dtype, and none of them inside `if sv.rank() == 0:`"
)


class WaitReport(NamedTuple):
    """Where a waiting rank stands.

    Args:
        rank: Who reports, in the world.
        group: Identity of the group.
        members: Ranks of the group, in the world.
        call: Call number within the group.
        ordinal: Which call of the group it is, as the program counts from 1.
        fingerprint: What the call is, as a number.
        what: What the call is, in words.
        site: file:line of the caller.
        awaiting: Ranks whose frames are missing.
        since: When the wait began, on the receiver's clock.
        received: When the report came, on the same clock.
        mismatch: The rank has seen a frame of another fingerprint.
        may_move: Another thread of the rank could still make calls.
        entered: For each group, the last call that the rank has entered.
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
        """Return the call in words, with its place."""
        return f"{self.what} (call {self.ordinal}) at {self.site}"


class DeadlockReport(NamedTuple):
    """One call of one group cannot succeed.

    Args:
        group: Identity of the group.
        call: Call number.
        members: Ranks that must hear of it.
        text: Why, in a sentence.
        table: What each rank does.
    """

    group: int
    call: int
    members: tuple[int, ...]
    text: str
    table: dict[int, str]


def find_mismatch(
    reports: list[WaitReport], now: float, patience_s: float = 0.3
) -> list[DeadlockReport]:
    """Return a verdict for each call at which ranks disagree.

    A verdict waits until all members have reported, or `patience_s` after the disagreement is known, so that the table
    names as many ranks as possible.
    """
    calls: dict[tuple[int, int], list[WaitReport]] = {}
    for report in reports:
        calls.setdefault((report.group, report.call), []).append(report)
    verdicts = []
    for (group, call), here in calls.items():
        if len({report.fingerprint for report in here}) < 2 and not any(
            report.mismatch for report in here
        ):
            continue
        members = here[0].members
        if (
            len({report.rank for report in here}) < len(members)
            and now - max(r.received for r in here) < patience_s
        ):
            continue
        table = {report.rank: report.describe() for report in here}
        for rank in members:
            if rank not in table:
                elsewhere = [report for report in reports if report.rank == rank]
                table[rank] = elsewhere[0].describe() if elsewhere else "has not reported"
        verdicts.append(DeadlockReport(group, call, members, _MISMATCH, table))
    return verdicts


def find_deadlock(reports: list[WaitReport]) -> list[DeadlockReport]:
    """Return a verdict for each call that lies on a cycle of ranks waiting for one another, if there is one."""
    waiting: dict[int, WaitReport] = {}
    movable: set[int] = set()
    for report in reports:
        if report.rank in waiting or report.may_move:
            movable.add(report.rank)
        waiting[report.rank] = report
    waiting = {rank: report for rank, report in waiting.items() if rank not in movable}
    arrows = {
        rank: [
            other
            for other in report.members
            if other in waiting
            and other != rank
            and waiting[other].entered.get(report.group, -1) < report.call
        ]
        for rank, report in waiting.items()
    }
    cycle = _cycle(arrows)
    if not cycle:
        return []
    table = {
        rank: f"waits in {waiting[rank].describe()} for rank {cycle[(index + 1) % len(cycle)]}"
        for index, rank in enumerate(cycle)
    }
    calls = {(waiting[rank].group, waiting[rank].call): waiting[rank].members for rank in cycle}
    return [
        DeadlockReport(
            group, call, members, "deadlock: each of these ranks waits for the next one", table
        )
        for (group, call), members in calls.items()
    ]


def _cycle(arrows: dict[int, list[int]]) -> list[int]:
    done: set[int] = set()
    for start in sorted(arrows):
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
            targets = arrows[rank]
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
    """A call that has been waited for for long.

    Args:
        key: (group, call).
        waited_s: Since it began to be waited for.
        sentence: Who waits for whom, since when and where.
        late: Ranks that have not come.
    """

    key: tuple[int, int]
    waited_s: float
    sentence: str
    late: list[int]


def stalls(reports: list[WaitReport], now: float, after_s: float) -> list[Stall]:
    """Return each call that has been waited for for longer than `after_s` seconds."""
    calls: dict[tuple[int, int], list[WaitReport]] = {}
    for report in reports:
        calls.setdefault((report.group, report.call), []).append(report)
    groups = {group for group, _ in calls}
    furthest: dict[
        tuple[int, int], int
    ] = {}  # by rank and group: the last call that it has entered
    first: dict[int, WaitReport] = {}
    for report in reports:
        first.setdefault(report.rank, report)
        for group in groups & report.entered.keys():
            furthest[report.rank, group] = max(
                report.entered[group], furthest.get((report.rank, group), -1)
            )
    result = []
    for key, here in sorted(calls.items()):
        waited_s = now - min(report.since for report in here)
        if waited_s < after_s:
            continue
        late = [rank for rank in here[0].members if furthest.get((rank, key[0]), -1) < key[1]]
        others = [
            f"rank {rank} waits in {first[rank].describe()}" for rank in late if rank in first
        ]
        verb = "waits" if len(here) == 1 else "wait"
        whom = f"{rank_list(late)}, not there yet" if late else "data; all ranks are there"
        sentence = (
            f"{rank_list(r.rank for r in here)} {verb} since {waited_s:.0f} s in "
            f"{here[0].describe()} for {whom}"
        )
        result.append(
            Stall(key, waited_s, sentence + "".join(f"; {other}" for other in others), late)
        )
    return result
