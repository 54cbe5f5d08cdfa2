"""The flight recorder: the last operations of this process, always on, written to a file when something goes wrong.

There is one stream of events. Every call, question and change of membership adds one entry to a ring, and whatever tells
of the past (the record of a failure, a trace) reads that ring. Nothing is put into words when an entry is added:
an entry refers to texts that exist already.

Times are those of CLOCK_MONOTONIC in nanoseconds, which all processes of a host share. A record names its host and
its boot, and says how far its clock is from that of rank 0; on one host that is nothing.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import DeadlineExceeded, InternalError, MismatchError, PeerLost
from syncvar.core.process_ids import process_name
from syncvar.core.stack_dump import where
from syncvar.runtime.flight_recorder.call_numbers import CallNumbers
from syncvar.runtime.flight_recorder.call_record import (
    DETAIL_MAX,
    NOWHERE,
    CallInfo,
    Event,
    PendingRecord,
    error_text,
    event_of,
    told_of,
)
from syncvar.runtime.flight_recorder.call_sites import call_site, main_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar.core.stack_dump import StackFrame
    from syncvar.runtime.flight_recorder.call_stats import Totals

__all__ = ["FORMAT", "RING", "Recorder", "boot_identity", "record_name"]

RING = 2048
FORMAT = "syncvar flight record 1"
_WRITING_S = 1.0
_REFUSED, _ENDED = 1, 2  # a record of the end replaces that of a call that was refused before
_WRITTEN_FOR = (MismatchError, DeadlineExceeded, PeerLost, InternalError)


class Recorder:
    """The ring of one rank or server, and the file that it is written to.

    Args:
        rank: This rank in the world, or the number of a server's process.
        world_size: Ranks of the world.
        generation: Version of the membership.
        job: Identity of the job.
        host: Name of this host.
        folder: Where the record goes when something has gone wrong; empty for nowhere.
        trace: Where it goes at the end in any case; empty for nowhere.
        stats: Where the totals of all calls go at the end; empty for nowhere, then nothing is counted.

    Attributes:
        numbers: The numbers of calls as texts show them.
        is_due: The generation broke, and the record has not been written since.
        transport: The data path between ranks, and how it is protected between hosts; empty before they have met.
        add: Adds (told, call, began, ended, thread), an operation that is over; one step, from any thread.

    Cost: 0.15 us for an operation of the short way, 0.7 us for any other (`bench/recorder.py`); at most 1 MB.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        generation: int = 0,
        *,
        job: str = "",
        host: str = "",
        folder: str = "",
        trace: str = "",
        stats: str = "",
    ) -> None:
        self.numbers = CallNumbers()
        self._ring: collections.deque[Any] = collections.deque(maxlen=RING)
        self.add: Callable[[Any], None] = self._ring.append
        self._stats = stats
        self._totals: Totals | None = None
        if stats:
            from syncvar.runtime.flight_recorder.call_stats import Totals

            self._totals = Totals(self._ring.append)
            self.add = self._totals.add
        self._who = {
            "rank": rank,
            "world_size": world_size,
            "generation": generation,
            "job": job,
            "host": host,
        }
        self._folder = folder
        self._trace = trace
        self._process = os.getpid()
        self._written = 0
        self._broken_by = ""
        self.is_due = False
        self.transport = ""
        self._writing = threading.Lock()

    # -- what happens ------------------------------------------------------------------------------

    def begin(self, told: CallInfo, call: int, began: int | None = None) -> PendingRecord:
        """Add an operation that begins now, or began at `began`; `PendingRecord.end` ends it."""
        entry = PendingRecord(told, call, monotonic_ns() if began is None else began)
        self.add(entry)
        return entry

    def note(self, what: str, detail: str = "") -> None:
        """Add something that happened."""
        entry = self.begin(CallInfo(what, NOWHERE, (), 0, 0, ""), NOWHERE)
        entry.state, entry.ended, entry.detail = "noted", entry.began, detail[:DETAIL_MAX]

    def refused(self, told: CallInfo, call: int, error: BaseException) -> None:
        """Add a call whose arguments were refused."""
        self.begin(told, call).end(error)

    def failed(self, error: BaseException) -> None:
        """Write the record for a call that failed, if nothing has been written yet."""
        if self._folder and not self._written and isinstance(error, _WRITTEN_FOR):
            self._write(self._folder, error_text(error), _REFUSED)

    def broke(self, error: BaseException) -> None:
        """Note that the generation broke; the record is due when the others have been told."""
        self.note("broke", error_text(error))
        self._broken_by = self._broken_by or error_text(error)
        self.is_due = True

    def ended(self, reason: str = "", stack: Sequence[StackFrame] = ()) -> None:
        """Write the record, because this rank ends badly; nothing when that has been done already.

        Args:
            reason: Why, where nothing broke before.
            stack: Where its main thread was; empty for where it is.
        """
        self.is_due = False
        if self._folder and self._written < _ENDED:
            self._write(self._folder, self._broken_by or reason, _ENDED, stack)

    def closed(self) -> None:
        """Write the record where a trace of every run is asked for, and the totals where these are."""
        if self._totals is not None and os.getpid() == self._process:
            self._write_totals(self._totals)
        if self._trace:
            self._write(self._trace, "the run is over", self._written)

    def _write_totals(self, totals: Totals) -> None:
        import json

        from syncvar.core.state_folder import write_record

        text = json.dumps({"rank": self._who["rank"], "rows": totals.rows()})
        name = f"stats-{self._who['rank']}.{self._who['generation']}.json"
        try:
            write_record(self._stats, name, text)
        except OSError as error:
            self._report_lost(self._stats, name, error)

    # -- readers -----------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return what the ring holds, oldest first."""
        return [event_of(entry) for entry in self._entries()]

    def whereabouts(self) -> dict[str, Any]:
        """Return the last call of this rank, its age in seconds, whether it is over, and where the main thread stands."""
        calls = (
            event
            for event in map(event_of, reversed(self._entries()))
            if event.group >= 0 and event.call >= 0
        )
        last = next(calls, None)
        stack = where(main_stack(), _folder())
        if last is None:
            return {"last": "", "age_s": 0.0, "is_over": True, "stack": stack}
        age_s = (monotonic_ns() - (last.ended_ns or last.began_ns)) / 1e9
        what = self.numbers.text(last.what, last.group, last.call)
        return {"last": what, "age_s": age_s, "is_over": last.ended_ns != 0, "stack": stack}

    def record(
        self, reason: str = "", *, is_final: bool = True, stack: Sequence[StackFrame] = ()
    ) -> dict[str, Any]:
        """Return the ring and who this is, as plain data.

        Args:
            reason: Why the record is made.
            is_final: This rank makes no calls any more.
            stack: Where the main thread was, innermost first; empty for where it is.
        """
        entries = self._entries()
        events = [event_of(entry) for entry in entries]
        groups = {
            told.group: told.members
            for told in (told_of(entry) for entry in entries)
            if told.members
        }
        return {
            "format": FORMAT,
            **self._who,
            "boot": boot_identity(),
            "process": self._process,
            "reason": reason,
            "is_final": is_final,
            "transport": self.transport,
            "clock_offset_ns": 0,  # ranks of one host share their clock
            "written_ns": monotonic_ns(),
            "written_wall_ns": time.time_ns(),
            "is_whole": len(entries) < RING,
            "groups": {str(group): list(members) for group, members in sorted(groups.items())},
            "gaps": {
                str(group): gaps for group, gaps in self.numbers.known().items() if group in groups
            },
            "stack": [list(frame) for frame in stack or main_stack()],
            "threads": _threads({event.thread for event in events}),
            "columns": list(Event._fields),
            "events": [list(event) for event in events],
        }

    def _entries(self) -> list[Any]:
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has added an entry meanwhile
                return list(self._ring)

    def _write(
        self, folder: str, reason: str, level: int, stack: Sequence[StackFrame] = ()
    ) -> None:
        """Write the record; whatever goes wrong here must not hide what went wrong before."""
        # A thread may come here again from a signal handler while it is here: then there is no waiting for ever.
        if os.getpid() != self._process or not self._writing.acquire(timeout=_WRITING_S):
            return
        try:
            name = record_name(self._who["rank"], self._who["generation"])
            try:
                from syncvar.core.state_folder import (
                    write_record,  # only a record that is written needs it
                )

                text = _text(
                    self.record(
                        reason, is_final=level != _REFUSED or folder == self._trace, stack=stack
                    )
                )
                write_record(folder, name, text)
            except Exception as error:
                self._report_lost(folder, name, error)
            self._written = max(level, self._written)
        finally:
            self._writing.release()

    def _report_lost(self, folder: str, name: str, error: Exception) -> None:
        with contextlib.suppress(
            Exception
        ):  # the failure that the record is about must stay the one that is seen
            from syncvar.core.output_files import (
                EVIDENCE,
                LostFile,
                report_lost_file,
                why_unwritten,
            )

            origins = {self._trace: "SYNCVAR_TRACE", self._stats: "--stats"}
            path = os.path.join(folder, name)
            report_lost_file(LostFile(path, origins.get(folder, EVIDENCE), why_unwritten(error)))


def record_name(number: Any, generation: Any = 0) -> str:
    """Return the name of the file of a rank's record, or of a server's.

    Example:
        >>> from syncvar.core.process_ids import server_number
        >>> record_name(3), record_name(3, 1), record_name(server_number(1))
        ('flight-rank3.json', 'flight-rank3.generation1.json', 'flight-server1.json')
    """
    return f"flight-{process_name(number).replace(' ', '')}.{f'generation{generation}.' if generation else ''}json"


def _text(record: dict[str, Any]) -> str:
    """Return a record as JSON, a line for each event."""
    import json  # only a record that is written needs it

    head = json.dumps({name: value for name, value in record.items() if name != "events"}, indent=1)
    # An event begins with a text, and within a text no quotation mark follows a bracket: there it has a backslash before.
    events = json.dumps(record["events"])[1:-1].replace('], ["', '],\n  ["')
    return (
        f'{head[:-2]},\n "events": [\n  {events}\n ]\n}}\n'
        if events
        else f'{head[:-2]},\n "events": []\n}}\n'
    )


def _threads(used: Iterable[int]) -> dict[str, dict[str, str]]:
    """Return the name of each thread, and where in the program it stands now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        str(ident): {"name": names[ident], "site": call_site(ident)}
        for ident in sorted(used)
        if ident in names
    }


def _folder() -> str:
    with contextlib.suppress(OSError):  # somebody has removed it
        return os.getcwd()
    return ""


def boot_identity() -> str:
    """Return what tells this machine, since it was started, from one of the same name; empty where it says nothing."""
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file,
    ):
        return file.read().strip()
    return ""
