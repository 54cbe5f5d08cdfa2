"""The Python stacks of ranks: a signal requests them, and ranks write them to files.

A request does not wait for the answer. A rank that cannot run Python answers through its fault
handler; see `syncvar.core.stack_dump`. The signal goes only to a process that has announced in its
file that it listens, that handles the signal, and that still has the file open. For any other
process the signal would mean something else, or its end.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncvar.core.stack_dump import (
    ALL_THREADS,
    END,
    MAIN_THREAD,
    STOPPED,
    WITHOUT_PYTHON,
    Thread,
    parse_stacks,
    stack_path,
    stack_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from syncvar_launcher.local.local_workers import LocalWorkers

ANSWER_S = 2.0  # for the stacks of ranks; an answer names ranks without one
ENDED, NOT_STARTED = "its process has ended", "its process has not been started"

_LARGE = 1 << 20  # bytes of a file, after which it begins anew
_PAUSE_S = 0.001
_MOMENT_S = 0.25
_INSIST_S = 0.05  # after which a rank that has not answered may be in a call that does not return
_INSIST_TICKS = 5  # of processor time that it has used meanwhile, if it does not sleep


@dataclass(slots=True, eq=False)
class StackRequest:
    """A request to one rank."""

    rank: int  # rank
    start: int  # offset of its answer in its file; -1 if it got no signal
    instead: str = ""  # why it got no signal, as text; else empty
    all_threads: bool = False  # whether the answer has all threads, not only the main thread
    at: float = 0.0  # time of the request, in monotonic seconds
    ticks: int = 0  # processor time of its main thread by then
    insisted: bool = False  # whether its fault handler got a signal, too


class StackCollector:
    """Requests and reads the stacks of ranks.

    `directory` returns the private folder in which a rank answers. Paths in answers are relative to
    `folder`. The ranks in `commands` run programs that need not be Python.
    """

    def __init__(
        self,
        processes: LocalWorkers,
        directory: Callable[[int], str],
        folder: str,
        commands: Container[int],
    ) -> None:
        self._processes = processes
        self._directory = directory
        self._folder = folder
        self._commands = commands
        self._noted: dict[int, StackRequest] = {}
        self.places: dict[int, str] = {}

    # -- for reports -------------------------------------------------------------------------------

    def note(self, ranks: Iterable[int]) -> None:
        """Request the stacks for the report; a rank keeps its first answer."""
        for rank in ranks:
            if rank not in self._noted:
                self._noted[rank] = self.ask(rank)

    def await_noted(self, limit_s: float) -> None:
        """Wait for these stacks before the processes end, which then answer no more."""
        until = time.monotonic() + limit_s
        while (
            any(self.answer(request) is None for request in self._noted.values())
            and time.monotonic() < until
        ):
            time.sleep(_PAUSE_S)

    def read_noted(self) -> None:
        """Read the answers; call it before the private folder is removed."""
        for rank, request in self._noted.items():
            if request.start >= 0 or request.instead == STOPPED:
                self.places[rank] = self.line(request)

    def place_now(self, rank: int) -> str:
        """Return where a rank stands, after a moment; empty without an answer."""
        request, until = self.ask(rank), time.monotonic() + _MOMENT_S
        while self.answer(request) is None and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return self.line(request) if request.start >= 0 else ""

    # -- at any time -------------------------------------------------------------------------------

    def ask(self, rank: int, *, all_threads: bool = False) -> StackRequest:
        """Request the stack of a rank."""
        worker = self._processes.workers.get(rank)
        if worker is None or worker.status is not None:
            return StackRequest(rank, -1, NOT_STARTED if worker is None else ENDED)
        pid, number = worker.process.pid, ALL_THREADS if all_threads else MAIN_THREAD
        status = _status(pid)
        if status.get("State", "").startswith(("T", "t")):
            return StackRequest(rank, -1, STOPPED)
        if rank in self._commands:
            return StackRequest(rank, -1, "it is no Python program of ours (--no-python)")
        path = stack_path(self._directory(rank), rank)
        start = _size_if_held(pid, path) if _has(status, "SigCgt", number) else -1
        if start < 0:
            return StackRequest(
                rank, -1, "no stack: its script has not begun, or has replaced our signal handler"
            )
        request = StackRequest(rank, start, "", all_threads, time.monotonic(), _main_thread(pid)[1])
        self._processes.send([rank], number)
        return request

    def answer(self, request: StackRequest, *, is_last: bool = False) -> list[Thread] | None:
        """Return the answer to a request; None before it arrives, empty if the rank got no signal.

        `is_last` matters only for ranks of other hosts (`RemoteWorkers.answer`).
        """
        if request.start < 0:
            return []
        worker = self._processes.workers[request.rank]
        text = self._text(request)
        answer, is_whole, _ = text.partition(f"{END}\n")
        threads = parse_stacks(answer)
        if not is_whole and worker.status is None:
            # The second stack of the fault handler begins when the first is complete.
            is_whole = "whole" if len(threads) > 1 else ""
            if not is_whole:
                self._insist(request, worker.process.pid)
        if request.all_threads and any(thread.ident for thread in threads):
            threads = [thread for thread in threads if thread.ident]
        else:
            threads = threads[:1]
        return threads if threads and (is_whole or worker.status is not None) else None

    def _insist(self, request: StackRequest, pid: int) -> None:
        """Send a signal to the fault handler of a rank in a call that does not return.

        Such a rank sleeps although it got a signal, or computes for long without a step of Python.
        """
        if request.insisted or time.monotonic() - request.at < _INSIST_S:
            return
        state, ticks = _main_thread(pid)
        if state in ("S", "D") or ticks - request.ticks >= _INSIST_TICKS:
            request.insisted = True
            status = _status(pid)
            if _has(status, "SigCgt", WITHOUT_PYTHON) and not _has(
                status, "SigPnd", WITHOUT_PYTHON
            ):
                # Twice: a handler is not interrupted by its own signal.
                self._processes.send([request.rank, request.rank], WITHOUT_PYTHON)

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process; -1 before it starts."""
        worker = self._processes.workers.get(rank)
        return -1 if worker is None else worker.process.pid

    def line(self, request: StackRequest) -> str:
        """Return an answer in one line: where the main thread stands, or why that is unknown."""
        threads = self.answer(request)
        return request.instead if not threads else stack_text(threads[0].frames, self._folder)

    def _text(self, request: StackRequest) -> str:
        path = stack_path(self._directory(request.rank), request.rank)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(request.start)
            return file.read().decode("utf-8", "replace")
        return ""


def _main_thread(pid: int) -> tuple[str, int]:
    """Return the state of a process's main thread, and its processor time in clock ticks."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/task/{pid}/stat", encoding="ascii", errors="replace") as file,
    ):
        fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    return "", 0


def _status(pid: int) -> dict[str, str]:
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file,
    ):
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    return {}


def _has(status: dict[str, str], mask: str, number: int) -> bool:
    return bool(int(status.get(mask, "0"), 16) >> (number - 1) & 1)


def _size_if_held(pid: int, path: str) -> int:
    """Return the size of a process's file; -1 if the process no longer has it open.

    A file that has become large is emptied. Its first line is the descriptor under which the
    process has it open; the process may have closed that and opened another file.
    """
    try:
        with open(path, "rb+") as file:
            number = int(file.readline(16))
            theirs, ours = os.stat(f"/proc/{pid}/fd/{number}"), os.fstat(file.fileno())
            if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
                return -1
            return ours.st_size if ours.st_size < _LARGE else file.truncate()
    except (OSError, ValueError):
        return -1
