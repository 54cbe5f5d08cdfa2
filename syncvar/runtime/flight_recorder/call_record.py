"""Entries of the flight recorder: one typed record of each call.

Functions that describe a call return a `CallLabel`: a text for people, and fields for statistics
and records.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import Any, NamedTuple, Self

DETAIL_MAX = 2000  # characters
NOWHERE = -1  # group and call of an entry that is no call of a group


class CallFields(NamedTuple):
    """The description of a call as data; -1 or empty where a field does not apply.

    Args:
        collective: Name of the call, for instance "all_reduce" or "assign of variable 'w'".
        op: Reduction.
        dtype: Element type of the input.
        shape: Shape of the input.
        elements: Elements of the input.
        size: Bytes of the whole call, as nccl-tests counts; -1 to use the bytes that were moved.
        root: Rank in the group of the root.
        peer: World rank of the other end of a message.
        tag: Tag of a message.
    """

    collective: str
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = -1
    size: int = -1
    root: int = -1
    peer: int = -1
    tag: int = -1


class CallLabel(str):
    """The text of a call, for instance "all_reduce(sum, float32[10])", with its fields.

    Args:
        text: The call for people.
        fields: The call for programs; a label as `collective` means the collective that it names.
    """

    __slots__ = ("fields",)

    fields: CallFields

    def __new__(cls, text: str, fields: CallFields | None = None) -> Self:
        """Return the label; without fields the text is the collective."""
        label = super().__new__(cls, text)
        fields = fields or CallFields(text)
        label.fields = fields._replace(collective=collective_of(fields.collective))
        return label


def collective_of(what: str) -> str:
    """Return the collective that a label or a plain text names."""
    return what.fields.collective if isinstance(what, CallLabel) else what


class Event(NamedTuple):
    """One entry of the ring, as record files contain it.

    Args:
        what: The call, for instance "all_reduce(sum, float32[10])"; or "joined", "left", "broke",
            "verdict".
        group: Identity of the group; -1 for none.
        call: Call number within the group; -1 for none.
        fingerprint: Signature of the call, equal on all ranks that make the same call; 0 for none.
        nbytes: Bytes that the call worked on.
        path: "shm" or "links", and the algorithm; empty if the call ended before the choice.
        began_ns: Start, CLOCK_MONOTONIC.
        ended_ns: End; 0 for a call that is still running.
        state: "started", "done", "failed", or "noted" for an entry that is no operation.
        thread: Identity of the calling thread.
        detail: Error text, or details of a noted event.
        collective: The fields from here on are those of `CallFields`; a shape is text, "[2, 3]".
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
    collective: str = ""
    op: str = ""
    dtype: str = ""
    shape: str = ""
    elements: int = -1
    size: int = -1
    root: int = -1
    peer: int = -1
    tag: int = -1


class CallInfo(NamedTuple):
    """The part of an entry that repeated calls share.

    Args:
        what: The call; a `CallLabel` where it has more fields than its text.
        group: Identity of the group.
        members: World ranks of the group.
        fingerprint: Signature of the call.
        nbytes: Bytes of the array.
        path: "shm", "links" or "hosts", and the algorithm.
    """

    what: str
    group: int
    members: tuple[int, ...]
    fingerprint: int
    nbytes: int
    path: str

    @property
    def fields(self) -> CallFields:
        """The description of the call as data."""
        return self.what.fields if isinstance(self.what, CallLabel) else CallFields(self.what)


class PendingRecord:
    """The entry of an operation that is still running."""

    __slots__ = ("began", "call", "detail", "ended", "info", "nbytes", "state", "thread", "way")

    def __init__(self, info: CallInfo, call: int, began: int) -> None:
        self.info = info
        self.call = call
        self.began = began
        self.ended = 0
        self.nbytes = info.nbytes
        self.way = info.path
        self.state = "started"
        self.thread = get_ident()
        self.detail = ""

    def stage(self, algorithm: str, nbytes: int) -> None:
        """Record that the operation reaches a schedule that works on so many bytes."""
        self.way = f"{self.info.path} {algorithm}"
        self.nbytes += nbytes

    def end(self, error: BaseException | None = None) -> None:
        """Record the end; later calls change nothing."""
        if self.ended == 0:
            self.state = "done" if error is None else "failed"
            if error is not None:
                self.detail = error_text(error)
            self.ended = monotonic_ns()


UNRECORDED = PendingRecord(CallInfo("", NOWHERE, (), 0, 0, ""), NOWHERE, 0)
"""Stands for the entry of operations that are not recorded."""


def event_of(entry: Any) -> Event:
    """Convert an entry of the ring: a `PendingRecord`, or the tuple that `Recorder.add` takes."""
    info = call_info_of(entry)
    if isinstance(entry, tuple):
        _, call, began, ended, thread = entry
        nbytes, path, times = info.nbytes, info.path, (began, ended, "done", thread, "")
    else:
        call, nbytes, path = entry.call, entry.nbytes, entry.way
        times = entry.began, entry.ended, entry.state, entry.thread, entry.detail
    names: Any = info.fields
    shape = str(list(names.shape)) if names.dtype else ""
    head = info.what, info.group, call, info.fingerprint, nbytes, path
    return Event(*head, *times, *names._replace(shape=shape))


def call_info_of(entry: Any) -> CallInfo:
    """Return the part of an entry that repeated calls share."""
    info: CallInfo = entry[0] if isinstance(entry, tuple) else entry.info
    return info


def error_text(error: BaseException) -> str:
    """Return an error as one line of a record."""
    return f"{type(error).__name__}: {error}"[:DETAIL_MAX]
