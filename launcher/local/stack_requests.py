"""The Python stacks of the ranks of one start: asked for by a signal, read from the files in which they answer.

Asking takes no time, and a rank that cannot run Python answers too, by its fault handler; see `syncvar.core.stack_dump`. A signal is
sent only to a process that has said in its file that it listens, that handles the signal, and that still has the file open:
to any other it would mean something else, or its end.
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
    dumps_of,
    stack_path,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncvar_launcher.local.local_workers import LocalWorkers

ENDED, NOT_STARTED = "its process has ended", "its process has not been started"

_LARGE = 1 << 20  # bytes of a file, after which it begins anew
_PAUSE_S = 0.001
_MOMENT_S = 0.25
_INSIST_S = 0.05  # after which a rank that has not answered may be in a call that does not return
_INSIST_TICKS = 5  # of processor time that it has used meanwhile, if it does not sleep


@dataclass(slots=True, eq=False)
class StackRequest:
    """A request to one rank.

    Args:
        rank: Which one.
        start: Where its answer begins in its file; -1 where it was not asked.
        instead: Why it was not asked, in words; empty where it was.
        all_threads: All its threads are to be told, not the main thread alone.
        at: When it was asked, monotonic seconds.
        ticks: Processor time of its main thread by then.
        insisted: Its fault handler has been asked as well.
    """

    rank: int
    start: int
    instead: str = ""
    all_threads: bool = False
    at: float = 0.0
    ticks: int = 0
    insisted: bool = False


class StackCollector:
    """What asks ranks where they stand.

    Args:
        agent: The workers.
        directory: Says in which private folder a rank answers.
        folder: Where the ranks were started; paths are told relative to it.
        is_command: The workers are programs that need not be Python.

    Attributes:
        places: Where each rank that has told it stood when it was noted, in one line.
    """

    def __init__(
        self, agent: LocalWorkers, directory: Callable[[int], str], folder: str, *, is_command: bool
    ) -> None:
        self._agent = agent
        self._directory = directory
        self._folder = folder
        self._is_command = is_command
        self._noted: dict[int, StackRequest] = {}
        self.places: dict[int, str] = {}

    # -- at the end of a job -----------------------------------------------------------------------

    def note(self, ranks: Iterable[int]) -> None:
        """Ask ranks for what is said of them at the end; who has been asked before stood there when it mattered."""
        for rank in ranks:
            if rank not in self._noted:
                self._noted[rank] = self.ask(rank)

    def await_noted(self, limit_s: float) -> None:
        """Wait until all answers are there: whoever is ended now answers no more."""
        until = time.monotonic() + limit_s
        while (
            any(self.answer(asked) is None for asked in self._noted.values())
            and time.monotonic() < until
        ):
            time.sleep(_PAUSE_S)

    def read_noted(self) -> None:
        """Read the answers; call it before the private folder is removed."""
        for rank, asked in self._noted.items():
            if asked.start >= 0 or asked.instead == STOPPED:
                self.places[rank] = self.line(asked)

    def place_now(self, rank: int) -> str:
        """Ask a rank where it stands, and wait a moment for the answer; empty where there is none."""
        asked, until = self.ask(rank), time.monotonic() + _MOMENT_S
        while self.answer(asked) is None and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return self.line(asked) if asked.start >= 0 else ""

    # -- at any time -------------------------------------------------------------------------------

    def ask(self, rank: int, *, all_threads: bool = False) -> StackRequest:
        """Ask a rank; its answer comes a little later."""
        worker = self._agent.workers.get(rank)
        if worker is None or worker.status is not None:
            return StackRequest(rank, -1, NOT_STARTED if worker is None else ENDED)
        pid, number = worker.process.pid, ALL_THREADS if all_threads else MAIN_THREAD
        status = _status(pid)
        if status.get("State", "").startswith(("T", "t")):
            return StackRequest(rank, -1, STOPPED)
        if self._is_command:
            return StackRequest(rank, -1, "it is no Python program of ours (--no-python)")
        path = stack_path(self._directory(rank), rank)
        start = _size_if_held(pid, path) if _has(status, "SigCgt", number) else -1
        if start < 0:
            return StackRequest(
                rank, -1, "it shows no stack: its script has not begun, or has taken the means away"
            )
        asked = StackRequest(rank, start, "", all_threads, time.monotonic(), _main_thread(pid)[1])
        self._agent.send([rank], number)
        return asked

    def answer(self, asked: StackRequest, *, is_last: bool = False) -> list[Thread] | None:
        """Return what a rank has answered; None where it has not (yet), empty where it was not asked.

        Args:
            asked: Which request.
            is_last: Nobody will ask for it again, which matters to ranks of other hosts alone (`Agents.answer`).
        """
        if asked.start < 0:
            return []
        worker = self._agent.workers[asked.rank]
        text = self._text(asked)
        answer, is_whole, _ = text.partition(f"{END}\n")
        threads = dumps_of(answer)
        if not is_whole and worker.status is None:
            # The second stack of the fault handler begins when the first is complete.
            is_whole = "whole" if len(threads) > 1 else ""
            if not is_whole:
                self._insist(asked, worker.process.pid)
        if asked.all_threads and any(thread.ident for thread in threads):
            threads = [thread for thread in threads if thread.ident]
        else:
            threads = threads[:1]
        return threads if threads and (is_whole or worker.status is not None) else None

    def _insist(self, asked: StackRequest, pid: int) -> None:
        """Ask the fault handler of a rank that does not come to answer, once it is sure to be in a call that does not return.

        It sleeps though it has been sent a signal, or it has computed for a while without a step of the program.
        """
        if asked.insisted or time.monotonic() - asked.at < _INSIST_S:
            return
        state, ticks = _main_thread(pid)
        if state in ("S", "D") or ticks - asked.ticks >= _INSIST_TICKS:
            asked.insisted = True
            status = _status(pid)
            if _has(status, "SigCgt", WITHOUT_PYTHON) and not _has(
                status, "SigPnd", WITHOUT_PYTHON
            ):
                # Twice: a handler is not interrupted by its own signal.
                self._agent.send([asked.rank, asked.rank], WITHOUT_PYTHON)

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process; -1 where it has none yet."""
        worker = self._agent.workers.get(rank)
        return -1 if worker is None else worker.process.pid

    def line(self, asked: StackRequest) -> str:
        """Return an answer in one line: where the main thread stands, or why that is not known."""
        threads = self.answer(asked)
        return asked.instead if not threads else where(threads[0].frames, self._folder)

    def _text(self, asked: StackRequest) -> str:
        path = stack_path(self._directory(asked.rank), asked.rank)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(asked.start)
            return file.read().decode("utf-8", "replace")
        return ""


def _main_thread(pid: int) -> tuple[str, int]:
    """Return the state of a process's main thread, and how many clock ticks it has used a core."""
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
    """Return the size of a process's file, which begins anew where it has become large; -1 where it is not open any more.

    The file's first line is the number under which the process has it open: it may have closed that, and opened another.
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
