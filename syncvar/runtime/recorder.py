"""The flight recorder: the last calls of this process, written to a file after a failure.

Every call, remote get and membership change adds one entry to one ring. Failure records and traces
read that ring. Adding an entry formats no text: it refers to existing texts.

Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a host share. A record names its
host and boot, and the offset of its clock from the launcher's.

In frames, each begin and end of a `strategy.run` continues call numbers at the next million, so
that calls of different runs never match (`syncvar.runtime.communicator`). Texts show the ordinal:
the first call of a group on a rank is call 1.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import DeadlineExceeded, InternalError, MismatchError, PeerLost
from syncvar.core.host_clock import boot_identity
from syncvar.core.process_ids import process_name
from syncvar.core.stack_dump import stack_text
from syncvar.protocol.clock_offsets import ClockOffset
from syncvar.runtime.call_record import (
    COLUMNS,
    DETAIL_MAX,
    NOWHERE,
    CallCounter,
    CallInfo,
    ErrorFields,
    Event,
    PendingRecord,
    Totals,
    call_info_of,
    call_site,
    error_fields,
    error_text,
    event_of,
    main_stack,
)
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar.core.stack_dump import StackFrame
    from syncvar.runtime.call_ledger import Ledger

RING = 2048
FORMAT = "syncvar flight record 1"
_WRITING_S = 1.0
_REFUSED, _ENDED = 1, 2  # a record of the end replaces one of a refused call
_WRITTEN_FOR = (MismatchError, DeadlineExceeded, PeerLost, InternalError)

Gap = tuple[int, int]
"""First number of a block of calls, and how many numbers before it belong to no call."""

_BLOCKS_MAX = 2048  # as many as the ring of events: each kept block has a call
_GROUPS_MAX = 1024


class CallNumbers:
    """The numbers that each group of a process has left out."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[int, deque[Gap]] = OrderedDict()
        self.epochs: dict[int, int] = {}  # begins and ends of blocks of strategy.run, by group
        self._runs: dict[int, deque[int]] = {}  # first numbers of blocks inside strategy.run

    def skip(self, group: int, following: int, first: int, *, is_run: bool = False) -> None:
        """Record that a group continues with another number than the following one.

        `is_run`: strategy.run begins there.
        """
        self.epochs[group] = self.epochs.get(group, 0) + 1
        runs = self._runs.get(group)
        if is_run and runs is None:
            runs = self._runs[group] = deque(maxlen=_BLOCKS_MAX)
            if len(self._runs) > _GROUPS_MAX:
                del self._runs[next(iter(self._runs))]
        if runs and runs[-1] == following:  # the block has no call
            runs.pop()
        if is_run and runs is not None:
            runs.append(first)
        gaps = self._gaps.get(group)
        if gaps is None:
            gaps = self._gaps[group] = deque(maxlen=_BLOCKS_MAX)
            if len(self._gaps) > _GROUPS_MAX:
                self._gaps.popitem(last=False)
        left_out = first - following + (gaps[-1][1] if gaps else 0)
        if gaps and gaps[-1][0] == following:  # the block has no call
            gaps[-1] = (first, left_out)
        else:
            gaps.append((first, left_out))

    def text(self, label: str, group: int, call: int) -> str:
        """Return a call with its ordinal, for messages.

        Example:
            >>> numbers = CallNumbers()
            >>> numbers.skip(0, 2, 1_000_000)
            >>> numbers.text("barrier", 0, 1), numbers.text("barrier", 0, 1_000_000)
            ('barrier (call 2)', 'barrier (call 3)')
        """
        return label if call < 0 else f"{label} (call {self.ordinal(group, call)})"

    def ordinal(self, group: int, call: int) -> int:
        """Return the ordinal of a call in its group, from 1."""
        gaps = self._gaps.get(group)
        return call + 1 if gaps is None else ordinal(list(gaps), call)

    def known(self) -> dict[int, list[Gap]]:
        """Return the gaps by group."""
        return {group: list(gaps) for group, gaps in self._gaps.copy().items()}

    def runs(self) -> dict[int, list[int]]:
        """Return the first numbers of the blocks of strategy.run by group."""
        return {group: list(firsts) for group, firsts in self._runs.copy().items()}


def ordinal(gaps: Sequence[Gap], call: int) -> int:
    """Return the ordinal of a call, from 1.

    Example:
        >>> gaps = [(1_000_000, 999_998), (3_000_000, 2_999_995)]
        >>> [ordinal(gaps, call) for call in (0, 1, 1_000_000, 3_000_001)]
        [1, 2, 3, 7]
    """
    index = bisect.bisect_right(gaps, call, key=lambda gap: gap[0])
    return call + 1 - (gaps[index - 1][1] if index else 0)


class RecordIdentity(NamedTuple):
    """The process that a record is about."""

    rank: int = 0  # world rank, or the number of a server's process
    world_size: int = 1  # ranks of the world
    generation: int = 0  # version of the membership
    job: str = ""  # identity of the job
    host: str = ""  # name of its host
    worker: int = -1  # number of its worker in an elastic job; -1 elsewhere


_NO_JOB = RecordIdentity()


class Recorder:
    """The ring of one rank or server, and the file that it is written to.

    Args:
        identity: This process.
        folder: Folder for the record after a failure; empty for none.
        trace: Folder for the record of every run; empty for none.
        stats: Folder for the totals of all calls; empty for none.
        ledger: Folder for the ledger of all calls; empty for none.

    Cost: 0.15 us for a persistent call, 0.7 us for others (`bench/recorder.py`); at most 1 MB.
    """

    def __init__(
        self,
        identity: RecordIdentity = _NO_JOB,
        *,
        folder: str = "",
        trace: str = "",
        stats: str = "",
        ledger: str = "",
    ) -> None:
        self.numbers = CallNumbers()  # ordinals of calls
        self._ring: collections.deque[Any] = collections.deque(maxlen=RING)
        # Adds (info, call, began, ended, thread) of a completed call, and for a started call where
        # it began; atomic, from any thread
        self.add: Callable[[Any], None] = self._ring.append
        # The same for the C extension, which keeps the list, so that the method may change
        self.add_slot = [self.add]
        self._counters: list[CallCounter] = []
        self._stats = stats
        self._totals: Totals | None = None
        if stats:
            self._totals = Totals()
            self.attach(self._totals)
        self._ledger: Ledger | None = None
        self._ledger_folder = ledger
        if ledger:
            from syncvar.runtime.call_ledger import Ledger  # most runs have none

            self._ledger = Ledger([identity.rank])
            self.attach(self._ledger.counter)
        self.identity = identity
        self._folder = folder
        self._trace = trace
        self._process = os.getpid()
        self._written = 0
        self._broken_by = ""
        self.is_due = False  # the group broke, and the record has not been written since
        # Data path between ranks and its encryption; empty before they have met
        self.transport = ""
        # What to add to times of this process to get those of the launcher's clock
        self.clock = ClockOffset()
        self._writing = threading.Lock()

    # -- counters ----------------------------------------------------------------------------------

    def attach(self, counter: CallCounter) -> None:
        """Let a counter see every later call."""
        self._counters.append(counter)
        self._link()

    def detach(self, counter: CallCounter) -> None:
        """End what `attach` began."""
        self._counters.remove(counter)
        self._link()

    def replace_add(self, add: Callable[[Any], None]) -> None:
        """Add entries by another function, also those of calls that the C extension runs."""
        self.add = self.add_slot[0] = add

    def _link(self) -> None:
        add: Callable[[Any], None] = self._ring.append
        for counter in self._counters:
            counter.append = add
            add = counter.add
        self.replace_add(add)

    # -- entries -----------------------------------------------------------------------------------

    def begin(
        self, info: CallInfo, call: int, began: int | None = None, place: Any = None
    ) -> PendingRecord:
        """Add a call that begins now or began at `began`; `PendingRecord.end` ends it.

        `place` is the code and the instruction that began it; None for those of the caller.
        """
        entry = PendingRecord(info, call, monotonic_ns() if began is None else began, place)
        self.add(entry)
        return entry

    def note(self, label: str, detail: str = "") -> None:
        """Add an event."""
        self._note(label, ErrorFields(detail[:DETAIL_MAX]))

    def _note(self, label: str, error: ErrorFields) -> None:
        entry = self.begin(CallInfo(CollectiveSpec(label)), NOWHERE)
        entry.state, entry.ended, entry.error = "noted", entry.began, error

    def refused(self, info: CallInfo, call: int, error: BaseException) -> None:
        """Add a call whose arguments were refused."""
        self.begin(info, call).end(error)

    def failed(self, error: BaseException) -> None:
        """Write the record for a failed call, if nothing has been written yet."""
        if self._folder and not self._written and isinstance(error, _WRITTEN_FOR):
            self._write(self._folder, error_text(error), _REFUSED)

    def broke(self, error: BaseException) -> None:
        """Record that the group broke; the file is written after the others have been informed."""
        self._note("broke", error_fields(error))
        self._broken_by = self._broken_by or error_text(error)
        self.is_due = True

    def ended(self, reason: str = "", stack: Sequence[StackFrame] = ()) -> None:
        """Write the record because this rank ends with an error, unless that has been done."""
        self.is_due = False
        if self._folder and self._written < _ENDED:
            self._write(self._folder, self._broken_by or reason, _ENDED, stack)

    def closed(self) -> None:
        """Write the trace, the totals and the ledger, if asked for."""
        if os.getpid() == self._process:
            identity = self.identity
            if self._totals is not None:
                import json

                text = json.dumps({"rank": identity.rank, "rows": self._totals.rows()})
                self._write_text(
                    self._stats, f"stats-{identity.rank}.{identity.generation}.json", text
                )
            if self._ledger is not None:
                name = record_name(identity.rank, identity.generation, "ledger")
                self._write_text(self._ledger_folder, name, self._ledger.text())
        if self._trace:
            self._write(self._trace, "the run is over", self._written)

    def _write_text(self, folder: str, name: str, text: str) -> None:
        from syncvar.core.output_files import write_record

        try:
            write_record(folder, name, text)
        except OSError as error:
            self._report_lost(folder, name, error)

    # -- readers -----------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return the entries of the ring, oldest first."""
        return [event_of(entry) for entry in self.entries()]

    def whereabouts(self) -> dict[str, Any]:
        """Return the last call of this rank, its age in seconds, its state and the main stack."""
        calls = (
            event
            for event in map(event_of, reversed(self.entries()))
            if event.group >= 0 and event.call >= 0
        )
        last = next(calls, None)
        stack = stack_text(main_stack(), _folder())
        if last is None:
            return {"last_call": "", "age_s": 0.0, "is_finished": True, "stack": stack}
        age_s = (monotonic_ns() - (last.ended_ns or last.began_ns)) / 1e9
        label = self.numbers.text(last.label, last.group, last.call)
        is_finished = last.ended_ns != 0
        return {"last_call": label, "age_s": age_s, "is_finished": is_finished, "stack": stack}

    def record(
        self, reason: str = "", *, is_final: bool = True, stack: Sequence[StackFrame] = ()
    ) -> dict[str, Any]:
        """Return the ring and the identity of this process as plain data.

        `is_final`: this rank makes no more calls. `stack` is that of the main thread, innermost
        first; empty for the current one.
        """
        entries = self.entries()
        events = [event_of(entry) for entry in entries]
        infos = [call_info_of(entry) for entry in entries]
        groups = {info.group: info.members for info in infos if info.members}
        return {
            "format": FORMAT,
            **self.identity._asdict(),
            "boot": boot_identity(),
            "process": self._process,
            "reason": reason,
            "is_final": is_final,
            "transport": self.transport,
            "clock_offset_ns": self.clock.offset_ns,
            "clock_error_ns": self.clock.error_ns,
            "written_ns": monotonic_ns(),
            "written_wall_ns": time.time_ns(),
            "is_whole": len(entries) < RING,
            "groups": {str(group): list(members) for group, members in sorted(groups.items())},
            "gaps": {
                str(group): gaps for group, gaps in self.numbers.known().items() if group in groups
            },
            "runs": {
                str(group): runs for group, runs in self.numbers.runs().items() if group in groups
            },
            "stack": [list(frame) for frame in stack or main_stack()],
            "threads": _threads({event.thread for event in events}),
            "columns": list(COLUMNS),
            "events": [list(event) for event in events],
        }

    def entries(self) -> list[Any]:
        """Return the entries of the ring as they are, oldest first."""
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has added an entry
                return list(self._ring)

    def _write(
        self, folder: str, reason: str, level: int, stack: Sequence[StackFrame] = ()
    ) -> None:
        """Write the record; an error here must not hide the original failure."""
        # A signal handler may interrupt this thread here, so never wait for long.
        if os.getpid() != self._process or not self._writing.acquire(timeout=_WRITING_S):
            return
        try:
            name = record_name(self.identity.rank, self.identity.generation)
            try:
                from syncvar.core.output_files import write_record

                is_final = level != _REFUSED or folder == self._trace
                text = _text(self.record(reason, is_final=is_final, stack=stack))
                write_record(folder, name, text)
            except Exception as error:
                self._report_lost(folder, name, error)
            self._written = max(level, self._written)
        finally:
            self._writing.release()

    def _report_lost(self, folder: str, name: str, error: Exception) -> None:
        with contextlib.suppress(Exception):  # the original failure must stay visible
            from syncvar.core.output_files import (
                EVIDENCE,
                LostFile,
                report_lost_file,
                write_error_text,
            )

            origins = {
                self._trace: "SYNCVAR_TRACE",
                self._stats: "--stats",
                self._ledger_folder: "SYNCVAR_LEDGER",
            }
            path = os.path.join(folder, name)
            report_lost_file(LostFile(path, origins.get(folder, EVIDENCE), write_error_text(error)))


def record_name(number: Any, generation: Any = 0, kind: str = "flight") -> str:
    """Return the file name of a rank's or server's record, or of a file of another kind.

    Example:
        >>> from syncvar.core.process_ids import server_number
        >>> record_name(3), record_name(3, 1), record_name(server_number(1))
        ('flight-rank3.json', 'flight-rank3.generation1.json', 'flight-server1.json')
        >>> record_name(3, kind="ledger")
        'ledger-rank3.json'
    """
    version = f"generation{generation}." if generation else ""
    return f"{kind}-{process_name(number).replace(' ', '')}.{version}json"


def _text(record: dict[str, Any]) -> str:
    """Return a record as JSON, one line for each event."""
    import json  # only a record that is written needs it

    head = json.dumps({name: value for name, value in record.items() if name != "events"}, indent=1)
    # An event begins with a text. Inside a text no quotation mark follows a bracket unescaped.
    events = json.dumps(record["events"])[1:-1].replace('], ["', '],\n  ["')
    events = f"\n  {events}\n " if events else ""
    return f'{head[:-2]},\n "events": [{events}]\n}}\n'


def _threads(used: Iterable[int]) -> dict[str, dict[str, str]]:
    """Return name and current program line of each thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        str(ident): {"name": names[ident], "site": call_site(ident)}
        for ident in sorted(used)
        if ident in names
    }


def _folder() -> str:
    with contextlib.suppress(OSError):  # the folder has been removed
        return os.getcwd()
    return ""
