"""`syncvar explain`: the first call in which ranks diverged, and every sentence about it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from syncvar.cli.record_files import (
    FlightRecord,
    LostRank,
    calls_of,
    clock_lines,
    duration,
    lost_ranks,
    members_of,
    names_of,
    newest,
    number_of,
)
from syncvar.cli.wait_analysis import describe_waits
from syncvar.core.process_ids import is_server, process_list, process_name, rank_list
from syncvar.core.stack_dump import stack_text

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from syncvar.runtime.call_record import Event

_FINAL = ("PeerLost", "DeadlineExceeded", "GroupBroken")  # after these a rank makes no more calls
_BEFORE = 5
_OTHERS = 4
_LINES = 16
_REASON = 160
_SIGTERM = "SystemExit: 143"  # reason of a worker's record after SIGTERM
_AT_EXIT = ("_wait_for_tstate_lock", "_shutdown")  # of a main thread when the interpreter ends


class Divergence(NamedTuple):
    """A call that some ranks made, and others did not."""

    group: int  # identity of the group
    call: int  # number of the call
    entered: Mapping[int, Event]  # rank -> its event of this call
    absent: tuple[int, ...]  # ranks that certainly did not enter the call
    began: int  # time of the first entry


def divergences(records: Sequence[FlightRecord]) -> list[Divergence]:
    """Return the first divergence of each group, the earliest first, harmless ones last.

    A call diverges if fingerprints differ, if a rank with a record did not enter it, or if a rank
    had ended before. The time before a full ring, and after a record from the middle of a run, is
    unknown.
    """
    groups = members_of(records)
    by_rank = {record.rank: record for record in records}
    every: list[Divergence] = []
    for group, calls in calls_of(records).items():
        numbers = {
            record.rank: [event.call for event in record.events if event.group == group]
            for record in records
        }
        for call, events in calls.items():
            began = min(event.began_ns for event in events.values())
            absent = []
            for rank in groups.get(group, ()):
                if rank in events:
                    continue
                if rank not in by_rank:
                    absent += [rank] if rank in _ended_before(events.values()) else []
                elif _would_know(by_rank[rank], numbers[rank], call, began):
                    absent.append(rank)
            every.append(Divergence(group, call, events, tuple(absent), began))
    found: dict[int, Divergence] = {}
    for one in _without_excuse(every):
        found.setdefault(one.group, one)
    return sorted(found.values(), key=lambda one: (_is_done(one), one.began, one.group))


def _without_excuse(every: Sequence[Divergence]) -> list[Divergence]:
    """Return the calls that diverge.

    A rank may have missed a call because another call blocked it. That excuses it if that other
    call does not diverge itself, or is excused too. Ranks that block each other have no excuse.
    """
    suspects = [one for one in every if one.absent or _differs(one)]
    held: dict[int, list[Event]] = {}  # rank -> calls that block it, or did for a while
    for one in every:
        for rank, event in one.entered.items():
            if event.state != "done":
                held.setdefault(rank, []).append(event)
    blamed = {(one.group, one.call) for one in suspects}
    while True:
        excused = [
            one
            for one in suspects
            if not _differs(one)
            and all(_is_blocked(held.get(rank, ()), one, blamed) for rank in one.absent)
        ]
        if not excused:
            return suspects
        suspects = [one for one in suspects if one not in excused]
        blamed = {(one.group, one.call) for one in suspects}


def _is_done(one: Divergence) -> bool:
    """Return whether no rank waited: a send, or a root, may be done before the others enter."""
    return all(event.state == "done" for event in one.entered.values())


def _differs(one: Divergence) -> bool:
    return len({event.fingerprint for event in one.entered.values()}) > 1


def _is_blocked(held: Sequence[Event], one: Divergence, blamed: Container[tuple[int, int]]) -> bool:
    return any(
        (event.group, event.call) not in blamed
        and (event.ended_ns > one.began or event.state == "started" or _is_final(event))
        for event in held
    )


def _is_final(event: Event) -> bool:
    return event.error in _FINAL


def cycle_of(found: Sequence[Divergence]) -> dict[int, Divergence]:
    """Return the ranks of a deadlock with their calls, each waiting for the next in a cycle.

    Empty if the first divergence is something else.
    """
    waits: dict[int, Divergence] = {}
    for one in found:
        for rank, event in one.entered.items():
            if one.absent and event.is_deadlock:
                waits.setdefault(rank, one)
    path: list[int] = []
    rank = next((rank for rank, one in waits.items() if one is found[0]), -1)
    while rank in waits and rank not in path:
        path.append(rank)
        rank = next((other for other in waits[rank].absent if other in waits), -1)
    if rank not in path:
        return {}
    path = path[path.index(rank) :]
    first = path.index(min(path))
    return {rank: waits[rank] for rank in (*path[first:], *path[:first])}


def _ended_before(events: Iterable[Event]) -> list[int]:
    """Return the ranks that had ended before a call, by the errors of those that waited in it."""
    return [rank for event in events for rank, lost in lost_ranks(event).items() if lost.did_end]


def _would_know(record: FlightRecord, numbers: Sequence[int], call: int, began: int) -> bool:
    """Return whether a call missing in a record was certainly not entered by its rank."""
    is_later = record.written > began or any(number > call for number in numbers)
    if not record.is_final and not is_later:
        return False  # the record is older than the call
    if record.is_whole:
        return True
    if numbers and min(numbers) < call:
        return True
    return bool(record.events) and record.events[0].began_ns < began and not numbers


def explain_records(records: Sequence[FlightRecord]) -> tuple[str, bool]:
    """Return the text about the records, and whether the ranks diverged."""
    servers = newest(record for record in records if is_server(record.rank))
    records = newest(record for record in records if not is_server(record.rank))
    everybody = [*records, *servers]
    zero = min((record.events[0].began_ns for record in everybody if record.events), default=0)
    found, names = divergences(records), names_of(records)
    lines = _head(everybody)
    cycle = cycle_of(found)
    if cycle:
        lines += _describe_cycle(records, cycle, names, zero)
        others = [one for one in found if one not in cycle.values()][:_OTHERS]
        lines += [f"also: {_one_line(records, one, zero)}" for one in others]
    elif found:
        lines += _describe_divergence(records, found[0], zero)
        lines += [f"also: {_one_line(records, one, zero)}" for one in found[1 : 1 + _OTHERS]]
        if len(found) > 1 + _OTHERS:
            lines.append(f"also: {len(found) - 1 - _OTHERS} more groups")
    else:
        lines += _agreed(records, zero)
    lines += ["", "at the end"]
    lines += [f"  {line}" for record in everybody for line in _last(record, zero, names)]
    lines += describe_waits(records)
    return "".join(f"{line}\n" for line in lines), bool(found)


# -- parts -----------------------------------------------------------------------------------------


def _head(records: Sequence[FlightRecord]) -> list[str]:
    first = records[0]
    ranks = [record.rank for record in records]  # and servers
    missing = sorted(set(range(first.world_size)) - set(ranks))
    job = f" of job {first.job[:8]}" if first.job else ""
    generation = f", generation {first.generation}" if first.generation else ""
    title = f"flight records of {process_list(ranks)}{job}{generation}"
    lines = [f"{title}, {first.world_size} ranks in the world"]
    workers = [f"rank {one.rank} is worker {one.worker}" for one in records if one.worker >= 0]
    if workers:
        lines.append(f"of this elastic job: {', '.join(workers)}")
    lost = _lost(records)
    unknown = "killed before it could write one, never joined, or ended before anything failed"
    ends: dict[str, list[int]] = {}
    for rank in missing:
        ends.setdefault(lost[rank].words if rank in lost else unknown, []).append(rank)
    lines += [f"{rank_list(ranks)} left none: {words}" for words, ranks in ends.items()]
    return [*lines, *clock_lines(records), ""]


def _lost(records: Sequence[FlightRecord]) -> dict[int, LostRank]:
    """Return the ends of ranks, as the errors of other ranks report them."""
    lost: dict[int, LostRank] = {}
    for record in records:
        for event in record.events:
            lost |= lost_ranks(event)
    return lost


def _describe_divergence(records: Sequence[FlightRecord], one: Divergence, zero: int) -> list[str]:
    members = members_of(records).get(one.group, ())
    names = names_of(records)
    group = names[one.group]
    after = duration(one.began - zero)
    lines = [
        f"first divergence: call {_number(records, one)} of {group}, {after} after the first event"
    ]
    does: dict[str, list[int]] = {}
    for rank, event in sorted(one.entered.items()):
        does.setdefault(_did(event), []).append(rank)
    by_rank = {record.rank: record for record in records}
    texts = []
    for text, ranks in does.items():
        begins = [one.entered[rank].began_ns - zero for rank in ranks]
        when = f"at {duration(min(begins))}"
        when += f" to {duration(max(begins))}" if len(ranks) > 1 else ""
        texts.append((ranks, f"{rank_list(ranks)}: {text}, begun {when}"))
    lost = _lost(records)
    for rank in one.absent:
        if rank in by_rank:
            texts.append(
                (
                    [rank],
                    (
                        f"{rank_list([rank])}: never entered it; "
                        f"{_instead(by_rank[rank], one, zero, names)}"
                    ),
                )
            )
        else:
            call = _number(records, one)
            texts.append(([rank], f"{rank_list([rank])}: {lost[rank].words} without call {call}"))
    unknown = sorted(set(members) - set(one.entered) - set(one.absent))
    texts = sorted(texts, key=lambda item: item[0])
    lines += [f"  {text}" for _, text in texts[:_LINES]]
    if len(texts) > _LINES:
        lines.append(
            f"  {rank_list(rank for ranks, _ in texts[_LINES:] for rank in ranks)}: otherwise"
        )
    if unknown:
        lines.append(f"  {rank_list(unknown)}: not known")
    lines += _verdict(one)
    return [*lines, "", f"before it, in {group}", *_before(records, one.group, one.call, zero)]


def _describe_cycle(
    records: Sequence[FlightRecord],
    cycle: Mapping[int, Divergence],
    names: Mapping[int, str],
    zero: int,
) -> list[str]:
    ranks = list(cycle)
    after = dict(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    waits = [
        f"rank {rank} {'waits ' if rank == ranks[0] else ''}for "
        f"{_awaited(cycle[rank].entered[rank])}rank {after[rank]}"
        for rank in ranks[:_LINES]
    ]
    lines = [f"deadlock: {', '.join(waits[:-1])}, and {waits[-1]}"]
    for rank, one in list(cycle.items())[:_LINES]:
        event = one.entered[rank]
        number = _number(records, one)
        start = duration(event.began_ns - zero)
        lines.append(
            f"  rank {rank}: call {number} of {names[one.group]}, {_did(event)}, begun at {start}"
        )
    return [*lines, *_verdict(cycle[ranks[0]]), ""]


def _number(records: Sequence[FlightRecord], one: Divergence) -> int:
    """Return the number of a divergent call in its group, as the ranks that made it count."""
    return number_of(
        [record for record in records if record.rank in one.entered], one.group, one.call
    )


def _awaited(event: Event) -> str:
    return "a message of " if event.collective.startswith("recv") else ""


def _did(event: Event) -> str:
    if event.state == "failed":
        message = event.detail.removeprefix(f"{event.error}: ").split("\n", 1)[0]
        reason = f" ({message})" if event.fingerprint == 0 else ""
        return f"{event.label}, failed with {event.error}{reason}"
    return f"{event.label}, {_state(event)}"


def _instead(record: FlightRecord, one: Divergence, zero: int, names: Mapping[int, str]) -> str:
    """Describe what a rank did instead of a call."""
    own = [event for event in record.events if event.group == one.group]
    before = [event for event in own if event.call < one.call]
    after = [event for event in own if event.call > one.call]
    since = before[-1].began_ns if before else 0
    if before:
        number = number_of([record], one.group, before[-1].call)
        text = f"its call {number} was {before[-1].label}, {before[-1].state}"
    else:
        text = "its earlier calls are not known"
        if record.is_whole:
            text = "it made no call of the group before"
    if after:
        number = number_of([record], one.group, after[0].call)
        at = duration(after[0].began_ns - zero)
        return f"{text}; its next was call {number}, {after[0].label}, at {at}"
    others = [event for event in record.events if event.group != one.group]
    later = [event for event in others if event.state != "noted" and event.began_ns > since]
    other = later[0] if before and later else None
    other = next((event for event in later if event.state != "done"), other)
    if other is not None:
        number = number_of([record], other.group, other.call)
        call = f"call {number} of {names[other.group]}" if other.group >= 0 else "a get request"
        at = duration(other.began_ns - zero)
        return f"{text}; instead it made {call}, {other.label}, {_state(other)}, at {at}"
    reason = f": {_first(record.reason)}" if record.reason else ""
    return f"{text}; it made no other call{reason}"


def _first(reason: str) -> str:
    line = "ended by SIGTERM" if reason == _SIGTERM else reason.split("\n", 1)[0]
    return line if len(line) <= _REASON else f"{line[:_REASON]} …"


def _state(event: Event) -> str:
    return {"started": "not ended"}.get(event.state, event.state)


def _verdict(one: Divergence) -> list[str]:
    """Quote the error of a rank: it names file and line of the ranks that waited."""
    for event in one.entered.values():
        if event.error == "MismatchError":
            quoted = event.detail.removeprefix(f"{event.error}: ").split("\n")
            return ["  the ranks raised:", *(f"    {line.strip()}" for line in quoted)]
    return []


def _before(records: Sequence[FlightRecord], group: int, call: int, zero: int) -> list[str]:
    calls = calls_of(records).get(group, {})
    numbers = [number for number in calls if number < call][-_BEFORE:]
    if not numbers:
        return ["  nothing"]
    lines = []
    for number in numbers:
        events = calls[number]
        label = next(iter(events.values())).label
        states = {_state(event) for event in events.values()}
        ended = max(event.ended_ns for event in events.values())
        state = f"{', '.join(sorted(states))} at {duration(ended - zero)}" if ended else "not ended"
        shown = number_of(records, group, number)
        lines.append(f"  call {shown}: {label}, {rank_list(events)}, {state}")
    return lines


def _one_line(records: Sequence[FlightRecord], one: Divergence, zero: int) -> str:
    group = names_of(records)[one.group]
    entered = sorted(one.entered.items())[:_OTHERS]
    calls = "; ".join(f"rank {rank} {event.label}" for rank, event in entered)
    absent = f"; not entered by {rank_list(one.absent)}" if one.absent else ""
    at = duration(one.began - zero)
    return f"call {_number(records, one)} of {group} at {at}: {calls}{absent}"


def _agreed(records: Sequence[FlightRecord], zero: int) -> list[str]:
    """Describe ranks that made the same calls, some of them perhaps unfinished."""
    lines = ["no divergence: the ranks that left a record made the same calls"]
    names = names_of(records)
    for group, calls in calls_of(records).items():
        for call, events in calls.items():
            bad = {rank: event for rank, event in events.items() if event.state != "done"}
            if not bad:
                continue
            states: dict[str, list[int]] = {}
            for rank, event in sorted(bad.items()):
                end = f"failed: {_first(event.detail)}" if event.state == "failed" else "not ended"
                states.setdefault(end, []).append(rank)
            label = next(iter(bad.values())).label
            began = min(event.began_ns for event in events.values())
            number = number_of(records, group, call)
            at = duration(began - zero)
            lines.append(
                f"first unfinished call of {names[group]}: call {number}, {label}, begun at {at}"
            )
            lines += [f"  {rank_list(ranks)}: {end}" for end, ranks in states.items()]
            lines += ["before it", *_before(records, group, call, zero)]
            break
    return lines


def _last(record: FlightRecord, zero: int, names: Mapping[int, str]) -> list[str]:
    """Describe the last call of a rank."""
    operations = [event for event in record.events if event.state != "noted"]
    name = process_name(record.rank)
    running = [event for event in operations if event.state == "started"]
    last = (running or operations)[-1] if operations else None
    if last is None:
        text = f"{name}: no operation"
    else:
        call = "a request" if is_server(record.rank) else "a get request"
        if last.group >= 0:
            call = f"call {number_of([record], last.group, last.call)} of {names[last.group]}"
        if last.state == "started":
            lasted = duration(record.written - last.began_ns)
            text = f"{name}: in {call}, {last.label}, for {lasted}"
        else:
            at = duration(last.ended_ns - zero)
            text = f"{name}: after {call}, {last.label}, {last.state} at {at}"
    text += _position(record, last)
    lines = [text]
    if record.reason:
        lines.append(f"  reason of its record: {_first(record.reason)}")
    return lines


def _position(record: FlightRecord, last: Event | None) -> str:
    """Describe the position of a rank: of the thread of its last call, or of its main thread."""
    if is_server(record.rank):
        position = stack_text(record.stack, os.getcwd())
        return f"; it stood {position}" if position.startswith("at ") else ""
    site = record.threads.get(last.thread, {}).get("site", "") if last is not None else ""
    if site and site != "a place unknown" and not site.endswith(_AT_EXIT):
        return f"; it stood at {site}"
    is_over = not record.stack or record.stack[0].name in _AT_EXIT
    position = "" if is_over else stack_text(record.stack, os.getcwd())
    return f"; it stood {position}" if position.startswith("in ") else ""
