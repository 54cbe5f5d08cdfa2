"""What a rank answers to the launcher's question "observe": its last calls, from the ring.

The ring is there for the flight record. So a call costs nothing more; the answer takes less than
1 ms (`bench/recorder.py`).
"""

from __future__ import annotations

from operator import itemgetter
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from syncvar.core.host_clock import boot_identity
from syncvar.protocol.clock_offsets import ClockOffset
from syncvar.protocol.wait_shares import LONG, is_sampled, sample_stride
from syncvar.runtime.sequence import UNKNOWN_CALL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.protocol.control_messages import Message
    from syncvar.runtime.call_record import CallInfo
    from syncvar.runtime.recorder import Recorder

ENTRIES_MAX = 1024  # entries of the ring that an answer is about: more would take more than 1 ms
_CALLS_MAX = 400  # calls in an answer
_KINDS_MAX = 200  # kinds of calls in an answer; the launcher takes no message of any length
_MEMBERS_MAX = 65536  # ranks of all groups in an answer
_TEXT_MAX = 200

_BLOCKING = 5  # items of the record of a call that was not started before
# Group, call, began_ns, ended_ns, the rest, and when a thread began to wait for it (0: none has)
_Call = tuple[int, int, int, int, "CallInfo", int]
_Kind = tuple[str, str, str]  # call, variable, path


class CallSummary:
    """Summarizes the calls of a process since the question before."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._boot = boot_identity()
        self._since_ns = 0
        self._last: _Call | None = None  # a rank may compute for a long time after it

    def fields(
        self, question: Message, entered: Mapping[int, int], sent: Mapping[int, int]
    ) -> dict[str, Any]:
        """Return the fields of the answer.

        Args:
            question: The question, with what the launcher knows about our clock.
            entered: The number of the last call of each group.
            sent: The bytes sent over links, by peer.
        """
        now = monotonic_ns()
        recorder = self._recorder
        recorder.clock = ClockOffset(question["offset_ns"], question["error_ns"])
        entries, since = recorder.entries()[-ENTRIES_MAX:], self._since_ns
        calls, kinds = self._recent(entries)
        begin = min([one[2] for one in calls], default=now)
        if since and (begin < since or len(calls) < len(entries) or len(entries) < ENTRIES_MAX):
            begin = since  # the ring goes back to the question before
        self._since_ns = now
        running = [one for one in calls if not one[3]]
        current = self._last = (running or calls)[-1] if calls else self._last
        numbers, done = recorder.numbers, len(calls) - len(running)
        sample = _sample(calls, done, now - begin)
        return {
            "number": question["number"],
            "received_ns": now,
            "boot": self._boot,
            "window_ns": now - begin,
            "counted": done,
            # Of the next call, because a block of numbers may have ended after the last one.
            "made": sum(
                numbers.ordinal(group, call + 1) - 1
                for group, call in entered.items()
                if call != UNKNOWN_CALL
            ),
            "steps": max(numbers.epochs.copy().values(), default=0) // 2,
            "last_call": "" if current is None else self._text(current),
            "is_in_call": bool(running),
            "age_s": 0.0 if current is None else (now - (current[3] or current[2])) / 1e9,
            "calls": [number for one in sample for number in (*one[:4], one[5])],
            "groups": _groups(sample),
            "kind_texts": [text[:_TEXT_MAX] for kind in kinds for text in kind],
            "kind_numbers": [number for totals in kinds.values() for number in totals],
            "sent": dict(sent),
            "answered_ns": monotonic_ns(),
        }

    def _text(self, call: _Call) -> str:
        group, number, _, _, info, _ = call
        return self._recorder.numbers.text(info.spec.label[:_TEXT_MAX], group, number)

    def _recent(self, entries: list[Any]) -> tuple[list[_Call], dict[_Kind, list[int]]]:
        """Return the calls that run or ended since the last question, and totals by kind."""
        since = free = self._since_ns  # started calls overlap: no time counts twice
        calls = []
        by_info: dict[int, list[Any]] = {}
        for entry in entries:
            if type(entry) is tuple:
                info, call, began, ended = entry[:4]
                # A started call has more items: nobody knows when its caller waited for it.
                path, waited = info.path, began if len(entry) == _BLOCKING else 0
            elif entry.state == "noted":
                continue
            else:
                info, call, began, ended = entry.info, entry.call, entry.began, entry.ended
                path, waited = entry.way, entry.waited
            if call < 0 or info.group < 0 or 0 < ended < since:
                continue
            calls.append((info.group, call, began, ended, info, waited))
            if ended:
                totals = by_info.get(id(info))
                if totals is None:
                    totals = by_info[id(info)] = [info, path, 0, 0, 0]
                totals[2] += 1
                totals[3] += info.nbytes if type(entry) is tuple else entry.nbytes
                if ended > free:
                    totals[4] += ended - max(began, free)
                    free = ended
        kinds: dict[_Kind, list[int]] = {}
        for info, path, count, nbytes, spent in by_info.values():
            key = info.spec.kind, info.spec.variable, path
            totals = kinds.setdefault(key, [0, 0, 0])
            totals[0] += count
            totals[1] += nbytes
            totals[2] += spent
        return calls, _fitting(kinds)


def _fitting(totals: dict[_Kind, list[int]]) -> dict[_Kind, list[int]]:
    """Return the kinds that took most time; the last one stands for all others."""
    if len(totals) <= _KINDS_MAX:
        return totals
    order = sorted(totals, key=lambda kind: -totals[kind][2])
    found = {kind: totals[kind] for kind in order[: _KINDS_MAX - 1]}
    rest = [totals[kind] for kind in order[_KINDS_MAX - 1 :]]
    found["other calls", "", ""] = [sum(numbers) for numbers in zip(*rest, strict=True)]
    return found


def _sample(calls: list[_Call], count: int, window_ns: int) -> list[_Call]:
    """Return at most `_CALLS_MAX` calls; `count` of `calls` have ended.

    The last call of each group is among them: it shows that a rank is in it. So are those after
    which a long time has passed since the call before: ranks that wait have them in common.
    """
    stride, long_ns = sample_stride(count), window_ns // LONG
    newest = {one[0]: one[1] for one in sorted(calls, key=itemgetter(1))}
    before, found = calls[0][2] if calls else 0, []
    for one in calls:
        group, call, began, ended, _, _ = one
        if (
            (ended or began) - before > long_ns
            or not ended
            or newest[group] == call
            or is_sampled(call, stride)
        ):
            found.append(one)
        if ended:
            before = ended
    return found[-_CALLS_MAX:]


def _groups(calls: list[_Call]) -> dict[int, list[int]]:
    """Return the members of the groups of some calls, as many as fit into an answer."""
    found: dict[int, list[int]] = {}
    room = _MEMBERS_MAX
    for group, _, _, _, info, _ in reversed(calls):
        if group not in found and len(info.members) <= room:
            found[group] = list(info.members)
            room -= len(info.members)
    return found
