"""What stands in the ring of the flight recorder."""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import Any, NamedTuple

__all__ = [
    "DETAIL_MAX",
    "NOWHERE",
    "UNRECORDED",
    "CallInfo",
    "Event",
    "PendingRecord",
    "error_text",
    "event_of",
    "told_of",
]

DETAIL_MAX = 2000  # characters
NOWHERE = -1  # group and call of what is no call


class Event(NamedTuple):
    """What one entry of the ring says.

    Args:
        what: The call in words, for instance "all_reduce(sum, float32[10])"; or what happened: "joined", "left",
            "broke", "verdict".
        group: Identity of the group; -1 where the event is of no group.
        call: Call number within the group; -1 where it is no call of a group.
        fingerprint: Digest of what the call is, the same on all ranks that make the same call; 0 for none.
        nbytes: Bytes of the arrays that the call worked on; 0 where it came to none.
        path: "shm" or "links" and the algorithm; empty where it came to none.
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


class CallInfo(NamedTuple):
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


class PendingRecord:
    """An operation in the ring whose end is still to come."""

    __slots__ = ("began", "call", "detail", "ended", "nbytes", "state", "thread", "told", "way")

    def __init__(self, told: CallInfo, call: int, began: int) -> None:
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
                self.detail = error_text(error)
            self.ended = monotonic_ns()


UNRECORDED = PendingRecord(CallInfo("", NOWHERE, (), 0, 0, ""), NOWHERE, 0)
"""The entry of operations that nobody records."""


def event_of(entry: Any) -> Event:
    """Return what an entry of the ring says: an `PendingRecord`, or (told, call, began, ended, thread) of a call that is over."""
    if isinstance(entry, tuple):
        told, call, began, ended, thread = entry
        return Event(
            told.what,
            told.group,
            call,
            told.fingerprint,
            told.nbytes,
            told.path,
            began,
            ended,
            "done",
            thread,
            "",
        )
    told = entry.told
    return Event(
        told.what,
        told.group,
        entry.call,
        told.fingerprint,
        entry.nbytes,
        entry.way,
        entry.began,
        entry.ended,
        entry.state,
        entry.thread,
        entry.detail,
    )


def told_of(entry: Any) -> CallInfo:
    """Return what an entry of the ring shares with others."""
    told: CallInfo = entry[0] if isinstance(entry, tuple) else entry.told
    return told


def error_text(error: BaseException) -> str:
    """Return an error as one line of a record."""
    return f"{type(error).__name__}: {error}"[:DETAIL_MAX]
