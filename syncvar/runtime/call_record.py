"""Entries of the flight recorder: typed records of calls, their program lines and their totals."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from operator import attrgetter
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import MismatchError, PeerLost, error_line
from syncvar.core.process_ids import rank_spans
from syncvar.core.stack_dump import current_frames, frames_of
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType, FrameType

    from syncvar.algorithms.builders import CollectiveSchedules
    from syncvar.core.stack_dump import StackFrame

DETAIL_MAX = 2000  # characters
NOWHERE = -1  # group and call of an entry that is no call of a group
EPOCH_CALLS = 1_000_000  # a block of call numbers; each strategy.run begins and ends one
_FOLD_AT = 256
_KINDS_MAX = 4096
_CLASSES = tuple(16**power for power in range(1, 9))
# Factor by its formula; n is the number of ranks.
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "2(n-1)/n": lambda size: 2 * (size - 1) / size,
    "(n-1)/n": lambda size: (size - 1) / size,
    "1": lambda _: 1.0,
}

# Formulas of calls that have no schedules of their own.
_FORMULAS = {"all_reduce_shards": "2(n-1)/n", "send": "1", "recv": "1"}

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Run as `__main__`.
_STARTERS = tuple(
    os.path.join(_PACKAGE, "bootstrap", name)
    for name in ("worker_entry.py", "worker_main.py", "fork_server.py")
)
_own_frame = sys._getframe  # noqa: SLF001  (the documented way to the caller's frame)
_looking = threading.Lock()


class Event(NamedTuple):
    """One entry of the ring, as record files contain it."""

    # The call, for instance "all_reduce(sum, float32[10])"; or "joined", "left", "broke", "verdict"
    label: str
    group: int  # identity of the group; -1 for none
    call: int  # call number within the group; -1 for none
    # Signature of the call, equal on all ranks that make the same call; 0 for none
    fingerprint: int
    nbytes: int  # bytes that the call worked on
    path: str  # "shm" or "links", and the algorithm; empty if the call ended before the choice
    began_ns: int  # start, CLOCK_MONOTONIC
    ended_ns: int  # end; 0 for a call that is still running
    state: str  # "started", "done", "failed", or "noted" for an entry that is no call
    thread: int  # identity of the calling thread
    detail: str  # error text, or details of a noted event
    # The fields from here to `access` are those of `CollectiveSpec`; a shape is text, "[2, 3]"
    collective: str = ""
    op: str = ""
    dtype: str = ""
    shape: str = ""
    elements: int = -1
    size: int = -1
    root: int = -1
    peer: int = -1
    tag: int = -1
    variable: str = ""
    access: str = ""
    # The fields from here on are those of `ErrorFields`
    error: str = ""
    is_deadlock: bool = False
    lost_rank: int = NOWHERE
    lost_status: int | None = None


_described_fields = attrgetter(*(name for name in Event._fields if name in CollectiveSpec._fields))

COLUMNS = ("what", *Event._fields[1:])
"""Titles of the columns of events in record files, in the order of the fields."""


class ErrorFields(NamedTuple):
    """The error of an entry as data."""

    detail: str = ""  # class and message of the error; or details of a noted event
    error: str = ""  # class of the error, for instance "PeerLost"
    is_deadlock: bool = False  # whether a `MismatchError` is about ranks that wait for each other
    lost_rank: int = NOWHERE  # process that a `PeerLost` names, else -1
    lost_status: int | None = None  # its exit code, or minus its signal; None if unknown


_NO_ERROR = ErrorFields()


class CallInfo(NamedTuple):
    """The part of an entry that repeated calls share."""

    spec: CollectiveSpec
    group: int = NOWHERE
    members: tuple[int, ...] = ()  # world ranks of the group
    fingerprint: int = 0  # signature of the call; 0 for none
    nbytes: int = 0  # bytes of the array
    path: str = ""  # "shm", "links" or "hosts", and the algorithm


class PendingRecord:
    """The entry of a call that is still running."""

    __slots__ = (
        "began",
        "call",
        "ended",
        "error",
        "info",
        "nbytes",
        "place",
        "state",
        "thread",
        "waited",
        "way",
    )

    def __init__(self, info: CallInfo, call: int, began: int, place: Any = None) -> None:
        self.info = info
        self.place = place  # code and instruction of a call that was started earlier
        self.call = call
        self.began = began
        self.waited = 0  # when a thread began to wait for it; 0 while none has
        self.ended = 0
        self.nbytes = info.nbytes
        self.way = info.path
        self.state = "started"
        self.thread = get_ident()
        self.error = _NO_ERROR

    def stage(self, algorithm: str, nbytes: int) -> None:
        """Record that the call reaches a schedule that works on so many bytes."""
        self.way = f"{self.info.path} {algorithm}"
        self.nbytes += nbytes

    def end(self, error: BaseException | None = None) -> None:
        """Record the end; later calls change nothing."""
        if self.ended == 0:
            self.state = "done" if error is None else "failed"
            if error is not None:
                self.error = error_fields(error)
            self.ended = monotonic_ns()


UNRECORDED = PendingRecord(CallInfo(CollectiveSpec("")), NOWHERE, 0)
"""Stands for the entry of calls that are not recorded."""


def event_of(entry: Any) -> Event:
    """Convert an entry of the ring: a `PendingRecord`, or the tuple that `Recorder.add` takes."""
    info = call_info_of(entry)
    if isinstance(entry, tuple):
        _, call, began, ended, thread = entry[:5]
        nbytes, path, error = info.nbytes, info.path, _NO_ERROR
        times = began, ended, "done", thread
    else:
        call, nbytes, path, error = entry.call, entry.nbytes, entry.way, entry.error
        times = entry.began, entry.ended, entry.state, entry.thread
    spec = info.spec
    head = spec.label, info.group, call, info.fingerprint, nbytes, path
    shape = str(list(spec.shape)) if spec.dtype else ""
    fields = _described_fields(spec._replace(shape=shape))  # type: ignore[arg-type]
    return Event._make((*head, *times, error.detail, *fields, *error[1:]))


def call_info_of(entry: Any) -> CallInfo:
    """Return the part of an entry that repeated calls share."""
    info: CallInfo = entry[0] if isinstance(entry, tuple) else entry.info
    return info


def error_fields(error: BaseException) -> ErrorFields:
    """Return an error as data."""
    fields = ErrorFields(error_text(error), type(error).__name__)
    if isinstance(error, PeerLost):
        return fields._replace(lost_rank=error.rank, lost_status=error.status)
    is_deadlock = isinstance(error, MismatchError) and error.is_deadlock
    return fields._replace(is_deadlock=is_deadlock)


def error_text(error: BaseException) -> str:
    """Return an error as one line of a record."""
    return error_line(error)[:DETAIL_MAX]


def call_site(thread: int) -> str:
    """Return file:line and function of a thread's innermost frame outside of syncvar."""
    frame = _innermost(thread)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back  # it waits for the thread that drives the engine
    frame = _users(frame)
    if frame is None:
        return "a place unknown"
    path = frame.f_code.co_filename
    relative = os.path.relpath(path)
    name = path if relative.startswith("..") else relative
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def own_site() -> str:
    """Return file:line and function of the caller's frame outside of syncvar; about 1 us."""
    frame = _users(_own_frame())
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def own_place() -> tuple[CodeType | str, int | None]:
    """Return code and instruction of the caller's frame outside of syncvar, for `site_of`."""
    frame = _users(_own_frame())
    return ("", None) if frame is None else (frame.f_code, frame.f_lasti)


def site_of(code: CodeType, instruction: int, path: str = "") -> str:
    """Return file:line and function of an instruction; `path` replaces the file's."""
    line = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line),
        code.co_firstlineno,
    )
    return f"{path or code.co_filename}:{line} in {code.co_name}"


def main_stack() -> list[StackFrame]:
    """Return the calls of the main thread, innermost first."""
    ident = threading.main_thread().ident
    return frames_of(_innermost(ident)) if ident is not None else []


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame is not one of the user's program."""
    module = frame.f_globals.get("__name__", "")
    # copy.deepcopy and JAX call us on behalf of the user.
    ours = module == "copy" or module.startswith(("syncvar.", "jax."))
    ours = ours or frame.f_code.co_filename in _STARTERS
    return ours and not module.startswith("syncvar.examples.")


def _innermost(thread: int) -> FrameType | None:
    if thread == threading.get_ident():
        return _own_frame()
    with _looking:  # otherwise two threads could leave the garbage collector switched off
        return current_frames().get(thread)


def bus_factor(collective: str, size: int) -> float:
    """Return a collective's bus bandwidth factor; 0 if it is unknown or moves no bytes."""
    schedules = _schedules_of(collective)
    formula = _FORMULAS.get(collective, "") if schedules is None else schedules.bus
    return BUS_FACTORS[formula](size) if formula and size > 0 else 0.0


def _schedules_of(collective: str) -> CollectiveSchedules | None:
    from syncvar.algorithms.builders import SCHEDULES  # the launcher needs it for totals only

    return SCHEDULES.get(collective)


def size_class(nbytes: int) -> int:
    """Return the upper limit of a size's class: 0, 16 B, 256 B, 4 KiB, 64 KiB, 1 MiB and so on.

    A size may exceed the limit by a sixteenth, for headers.

    Example:
        >>> [size_class(nbytes) for nbytes in (0, 8, 16, 18, 5000)]
        [0, 16, 16, 256, 65536]
    """
    return (
        next((end for end in _CLASSES if nbytes <= end + end // 16), _CLASSES[-1]) if nbytes else 0
    )


def size_of(info: CallInfo, nbytes: int) -> int:
    """Return the bytes by which a call is rated, as nccl-tests counts them; -1 if unknown."""
    if info.spec.size >= 0:
        return info.spec.size
    if info.path == "hosts":  # several schedules ran, on parts of the data
        return -1
    # A persistent call records the bytes of one rank in advance.
    is_block = info.nbytes and info.spec.collective == "all_gather"
    return nbytes * len(info.members) if is_block else nbytes


class CallCounter:
    """Counts calls as the ring records them; `Recorder.attach` puts it before the ring.

    `_cached` has, for each kind of persistent call, its CallInfo, calls, nanoseconds, and what a
    subclass adds. `_others` has the other entries, with the same additions.
    """

    def __init__(self) -> None:
        self.append: Callable[[Any], None] = _drop  # adds an entry to the ring
        self._cached: dict[Any, list[Any]] = {}
        self._others: deque[tuple[Any, ...]] = deque()
        self._fold_at = _FOLD_AT

    def add(self, item: Any) -> None:
        """Record a call in the ring, and count it."""
        raise NotImplementedError

    def _new_cell(self, key: Any, info: CallInfo, *more: Any) -> list[Any]:
        if len(self._cached) >= _KINDS_MAX:
            self._fold()
        cell = self._cached[key] = [info, 0, 0, *more]
        return cell

    def _add_other(self, *entry: Any) -> None:
        self._others.append(entry)
        if len(self._others) >= self._fold_at:
            self._fold()

    def _fold(self) -> None:
        cached, self._cached = self._cached, {}
        for info, calls, ns, *more in cached.values():
            self._count(info, calls, info.nbytes, ns, *more)
        for _ in range(len(self._others)):
            other = self._others.popleft()
            entry, *more = other
            if entry.state == "started":
                self._others.append(other)  # still running
            elif entry.state != "noted":
                is_done = entry.state == "done"
                ns = entry.ended - entry.began
                self._count(entry.info, 1, entry.nbytes, ns, *more, failed=not is_done)
        # Running ones are not checked again at every call.
        self._fold_at = _FOLD_AT + 2 * len(self._others)

    def _count(
        self, info: CallInfo, calls: int, nbytes: int, ns: int, *more: Any, failed: bool = False
    ) -> None:
        raise NotImplementedError


def _drop(_item: Any) -> None:
    """Take the entries of a counter that is not attached."""


class Totals(CallCounter):
    """Totals of all calls for `--stats`; 0.25 us for each persistent call."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[tuple[str, int, tuple[int, ...], int], list[int]] = {}

    def add(self, item: Any) -> None:
        """Record a call in the ring and in the totals."""
        self.append(item)
        if type(item) is tuple:
            info = item[0]
            cell = self._cached.get(id(info)) or self._new_cell(id(info), info)
            cell[1] += 1
            cell[2] += item[3] - item[2]
        else:
            self._add_other(item)

    def rows(self) -> list[dict[str, Any]]:
        """Return the totals as plain data."""
        self._fold()
        return [
            {
                "call": call,
                "group": group,
                "ranks": rank_spans(members),
                "size": len(members),
                "class": end,
                "calls": calls,
                "nbytes": nbytes,
                "ns": ns,
                "failed": failed,
            }
            for (call, group, members, end), (calls, nbytes, ns, failed) in self._rows.items()
        ]

    def _count(
        self, info: CallInfo, calls: int, nbytes: int, ns: int, *_: Any, failed: bool = False
    ) -> None:
        if not info.members:
            return
        size = size_of(info, nbytes)
        key = row_name(info.spec), info.group, info.members, size_class(max(0, size))
        row = self._rows.setdefault(key, [0, 0, 0, 0])
        row[0] += calls
        row[1] = row[1] + size * calls if size >= 0 and row[1] >= 0 else -1
        row[2] += ns
        row[3] += failed


def row_name(spec: CollectiveSpec | Event) -> str:
    """Return the collective, with its op where calls with different ops differ in cost."""
    name, op = spec.collective, spec.op
    reduces = name == "all_reduce_shards" or _schedules_of(name) is not None
    return f"{name}({op})" if reduces and op.isalpha() and op.islower() else name
