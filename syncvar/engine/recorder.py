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
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.engine.call_sites import call_site, main_stack
from syncvar.errors import DeadlineExceeded, InternalError, MismatchError, PeerLost
from syncvar.roles import process_name
from syncvar.stacks import where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar.engine.totals import Totals
    from syncvar.stacks import Frame

__all__ = ["FORMAT", "RING", "UNRECORDED", "Entry", "Event", "Recorder", "Told", "boot_identity", "record_name", "write_record"]

RING = 2048
FORMAT = "syncvar flight record 1"
_DETAIL_MAX = 2000
_WRITING_S = 1.0
_REFUSED, _ENDED = 1, 2  # a record of the end replaces that of a call that was refused before
_WRITTEN_FOR = (MismatchError, DeadlineExceeded, PeerLost, InternalError)
_NOWHERE = -1


class Event(NamedTuple):
    """What one entry of the ring says.

    Args:
        what: The call in words, for instance "all_reduce(sum, float32[10])"; or what happened: "joined", "left",
            "broke", "verdict".
        group: Identity of the group; -1 where the event is of no group.
        call: Call number within the group; -1 where it is no call of a group.
        fingerprint: Digest of what the call is, the same on all ranks that make the same call; 0 for none.
        nbytes: Bytes of the arrays that the call worked on; 0 where it came to none.
        path: "arena" or "links" and the algorithm; empty where it came to none.
        began_ns: When it began, CLOCK_MONOTONIC.
        ended_ns: When it ended; 0 where it has not.
        state: "started", "done", "failed", or "noted" for what is no operation.
        thread: The thread that made the call.
        detail: How it failed, or what there is to say of what happened; else empty.
    """

    what: str
    group: int
    call: int
    fingerprint: int
    nbytes: int
    path: str
    began_ns: int
    ended_ns: int
    state: str
    thread: int
    detail: str


class Told(NamedTuple):
    """What is the same in all entries of calls that are repeated: made once, and referred to.

    Args:
        what: The call in words.
        group: Identity of the group.
        members: Its ranks in the world.
        fingerprint: Digest of what the call is.
        nbytes: Bytes of the array.
        path: How the bytes go.
    """

    what: str
    group: int
    members: tuple[int, ...]
    fingerprint: int
    nbytes: int
    path: str


class Entry:
    """An operation in the ring whose end is still to come."""

    __slots__ = ("began", "call", "detail", "ended", "nbytes", "state", "thread", "told", "way")

    def __init__(self, told: Told, call: int, began: int) -> None:
        self.told = told
        self.call = call
        self.began = began
        self.ended = 0
        self.nbytes = told.nbytes
        self.way = told.path
        self.state = "started"
        self.thread = get_ident()
        self.detail = ""

    def stage(self, algorithm: str, nbytes: int) -> None:
        """Note that the operation comes to a plan, and what it works on."""
        self.way = f"{self.told.path} {algorithm}"
        self.nbytes += nbytes

    def end(self, error: BaseException | None = None) -> None:
        """Note the end; the first one counts."""
        if self.ended == 0:
            self.state = "done" if error is None else "failed"
            if error is not None:
                self.detail = _told_error(error)
            self.ended = monotonic_ns()


UNRECORDED = Entry(Told("", _NOWHERE, (), 0, 0, ""), _NOWHERE, 0)
"""The entry of operations that nobody records."""


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
        self._ring: collections.deque[Any] = collections.deque(maxlen=RING)
        self.add: Callable[[Any], None] = self._ring.append
        self._stats = stats
        self._totals: Totals | None = None
        if stats:
            from syncvar.engine.totals import Totals

            self._totals = Totals(self._ring.append)
            self.add = self._totals.add
        self._who = {"rank": rank, "world_size": world_size, "generation": generation, "job": job, "host": host}
        self._folder = folder
        self._trace = trace
        self._process = os.getpid()
        self._written = 0
        self._broken_by = ""
        self.is_due = False
        self.transport = ""
        self._writing = threading.Lock()

    # -- what happens ---------------------------------------------------------------------------------------------

    def begin(self, told: Told, call: int, began: int | None = None) -> Entry:
        """Add an operation that begins now, or began at `began`; `Entry.end` ends it."""
        entry = Entry(told, call, monotonic_ns() if began is None else began)
        self.add(entry)
        return entry

    def note(self, what: str, detail: str = "") -> None:
        """Add something that happened."""
        entry = self.begin(Told(what, _NOWHERE, (), 0, 0, ""), _NOWHERE)
        entry.state, entry.ended, entry.detail = "noted", entry.began, detail[:_DETAIL_MAX]

    def refused(self, told: Told, call: int, error: BaseException) -> None:
        """Add a call whose arguments were refused."""
        self.begin(told, call).end(error)

    def failed(self, error: BaseException) -> None:
        """Write the record for a call that failed, if nothing has been written yet."""
        if self._folder and not self._written and isinstance(error, _WRITTEN_FOR):
            self._write(self._folder, _told_error(error), _REFUSED)

    def broke(self, error: BaseException) -> None:
        """Note that the generation broke; the record is due when the others have been told."""
        self.note("broke", _told_error(error))
        self._broken_by = self._broken_by or _told_error(error)
        self.is_due = True

    def ended(self, reason: str = "", stack: Sequence[Frame] = ()) -> None:
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

        text = json.dumps({"rank": self._who["rank"], "rows": totals.rows()})
        with contextlib.suppress(OSError):  # the launcher says who has told nothing
            write_record(self._stats, f"stats-{self._who['rank']}.{self._who['generation']}.json", text)

    # -- readers --------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return what the ring holds, oldest first."""
        return [_event(entry) for entry in self._entries()]

    def whereabouts(self) -> dict[str, Any]:
        """Return the last call of this rank, its age in seconds, whether it is over, and where the main thread stands."""
        calls = (event for event in map(_event, reversed(self._entries())) if event.group >= 0 and event.call >= 0)
        last = next(calls, None)
        stack = where(main_stack(), _folder())
        if last is None:
            return {"last": "", "age_s": 0.0, "is_over": True, "stack": stack}
        age_s = (monotonic_ns() - (last.ended_ns or last.began_ns)) / 1e9
        return {"last": f"{last.what} (call {last.call})", "age_s": age_s, "is_over": last.ended_ns != 0, "stack": stack}

    def record(self, reason: str = "", *, is_final: bool = True, stack: Sequence[Frame] = ()) -> dict[str, Any]:
        """Return the ring and who this is, as plain data.

        Args:
            reason: Why the record is made.
            is_final: This rank makes no calls any more.
            stack: Where the main thread was, innermost first; empty for where it is.
        """
        entries = self._entries()
        events = [_event(entry) for entry in entries]
        groups = {told.group: told.members for told in (_told(entry) for entry in entries) if told.members}
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
            "stack": [list(frame) for frame in stack or main_stack()],
            "threads": _threads({event.thread for event in events}),
            "columns": list(Event._fields),
            "events": [list(event) for event in events],
        }

    def _entries(self) -> list[Any]:
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has added an entry meanwhile
                return list(self._ring)

    def _write(self, folder: str, reason: str, level: int, stack: Sequence[Frame] = ()) -> None:
        """Write the record; whatever goes wrong here must not hide what went wrong before."""
        # A thread may come here again from a signal handler while it is here: then there is no waiting for ever.
        if os.getpid() != self._process or not self._writing.acquire(timeout=_WRITING_S):
            return
        try:
            with contextlib.suppress(Exception):
                text = _text(self.record(reason, is_final=level != _REFUSED or folder == self._trace, stack=stack))
                write_record(folder, record_name(self._who["rank"], self._who["generation"]), text)
            self._written = max(level, self._written)
        finally:
            self._writing.release()


def record_name(number: Any, generation: Any = 0) -> str:
    """Return the name of the file of a rank's record, or of a server's.

    Example:
        >>> from syncvar.roles import server_number
        >>> record_name(3), record_name(3, 1), record_name(server_number(1))
        ('flight-rank3.json', 'flight-rank3.generation1.json', 'flight-server1.json')
    """
    return f"flight-{process_name(number).replace(' ', '')}.{f'generation{generation}.' if generation else ''}json"


def write_record(folder: str, name: str, text: str) -> None:
    """Write a file that only this user can read; whoever looks sees all of it or what was there before.

    Records hold paths, command lines and texts of exceptions. Nothing that another user has put there is followed.
    """
    from syncvar.engine.foreign import refuse_foreign_links  # only a record that is written needs it

    refuse_foreign_links(folder)
    _make_private(folder)
    refuse_foreign_links(folder)  # one that was laid meanwhile, where the folder was to be
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        draft = f"{name}.{os.getpid()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=directory)  # of a process that was killed while it wrote
        try:
            with open(os.open(draft, flags, 0o600, dir_fd=directory), "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def _make_private(folder: str) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if above and above != folder:
            _make_private(above)
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(folder, 0o700)


def _text(record: dict[str, Any]) -> str:
    """Return a record as JSON, a line for each event."""
    import json  # only a record that is written needs it

    head = json.dumps({name: value for name, value in record.items() if name != "events"}, indent=1)
    # An event begins with a text, and within a text no quotation mark follows a bracket: there it has a backslash before.
    events = json.dumps(record["events"])[1:-1].replace('], ["', '],\n  ["')
    return f'{head[:-2]},\n "events": [\n  {events}\n ]\n}}\n' if events else f'{head[:-2]},\n "events": []\n}}\n'


def _event(entry: Any) -> Event:
    if isinstance(entry, tuple):
        told, call, began, ended, thread = entry
        return Event(
            told.what, told.group, call, told.fingerprint, told.nbytes, told.path, began, ended, "done", thread, ""
        )
    told = entry.told
    return Event(
        told.what, told.group, entry.call, told.fingerprint, entry.nbytes, entry.way, entry.began, entry.ended,
        entry.state, entry.thread, entry.detail,
    )  # fmt: skip


def _told(entry: Any) -> Told:
    told: Told = entry[0] if isinstance(entry, tuple) else entry.told
    return told


def _told_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_DETAIL_MAX]


def _threads(used: Iterable[int]) -> dict[str, dict[str, str]]:
    """Return the name of each thread, and where in the program it stands now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        str(ident): {"name": names[ident], "site": call_site(ident)} for ident in sorted(used) if ident in names
    }


def _folder() -> str:
    with contextlib.suppress(OSError):  # somebody has removed it
        return os.getcwd()
    return ""


def boot_identity() -> str:
    """Return what tells this machine, since it was started, from one of the same name; empty where it says nothing."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""
