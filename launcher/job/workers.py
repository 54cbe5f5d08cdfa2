"""What an attempt needs of its workers, whether the launcher or agents on hosts start them.

`job.direct_workers.DirectWorkers` starts the workers of this machine. `hosts.remote_workers`
starts those of other hosts through agents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from syncvar.core.stack_dump import Thread
    from syncvar_launcher.local.local_workers import Event, LocalWorkers
    from syncvar_launcher.local.stack_requests import StackRequest


class Workers(Protocol):
    """The workers and servers of one attempt."""

    @property
    def workers(self) -> Mapping[int, object]:
        """The processes that were started, by number."""
        ...

    @property
    def places(self) -> Mapping[int, str]:
        """Where each rank that answered stood when `note` asked it, in one line."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether all ranks share one memory, so that no connection carries their data."""
        ...

    def describe(self) -> tuple[str, str]:
        """Return the transport in few words, and in a line with the reason."""
        ...

    def start(self) -> Iterator[Event]:
        """Start all workers and servers."""
        ...

    def restart_rank(self, rank: int, incarnation: int) -> Iterator[Event]:
        """Start one worker or server again, alone; it gets no input."""
        ...

    # The loop.

    def descriptors(self, takes: Callable[[int, Literal["out", "err"]], bool]) -> list[int]:
        """Return the descriptors to poll for reading.

        `takes` returns whether the launcher can use more output of a rank; else the rank waits.
        """
        ...

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        ...

    def readable(self, descriptor: int) -> Iterator[Event]:
        """Handle a descriptor that poll reported; ignore others."""
        ...

    def look(self) -> None:
        """Do what is due with each heartbeat."""
        ...

    def take_messages(self) -> list[str]:
        """Return the sentences to show since the last call."""
        ...

    def state(self, rank: int) -> str:
        """Return the state letter of a process, or an empty text when it has ended."""
        ...

    def busy_s(self, rank: int) -> float:
        """Return the processor time of a process in seconds, as far as it is known."""
        ...

    # Signals.

    def send(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to workers; SIGTERM also wakes those that are stopped."""
        ...

    def send_groups(self, number: int) -> list[int]:
        """Send a signal to the process groups of all ranks; return the ranks that get none."""
        ...

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill the sessions of workers, grandchildren included."""
        ...

    def stop(self) -> None:
        """Stop the sessions of all workers."""
        ...

    def resume(self) -> None:
        """Continue what `stop` has stopped."""
        ...

    def abort(self, generation: int | None = None) -> None:
        """Wake all ranks that wait in shared memory, of one generation or of all."""
        ...

    # Stacks.

    def note(self, ranks: Iterable[int]) -> None:
        """Request the stacks that the report shows; a rank is asked only once."""
        ...

    def await_noted(self, limit_s: float) -> None:
        """Wait for these stacks."""
        ...

    def ask(self, rank: int, *, all_threads: bool = False) -> StackRequest:
        """Request the stack of a rank."""
        ...

    def answer(self, asked: StackRequest, *, is_last: bool = False) -> list[Thread] | None:
        """Return the answer to a request; None before it arrives, empty without a request."""
        ...

    def place_now(self, rank: int) -> str:
        """Return where a rank stands, in one line, or an empty text after a moment."""
        ...

    def pid(self, rank: int) -> int:
        """Return the number of a process on its host; -1 if it is unknown."""
        ...

    def close(self) -> Iterator[Event]:
        """Kill what still runs, and yield what it wrote."""
        ...


class JobHost(Protocol):
    """A host of a job that has workers."""

    @property
    def name(self) -> str:
        """The name for messages."""
        ...

    @property
    def workers(self) -> int:
        """The number of its workers."""
        ...

    @property
    def address(self) -> str:
        """The address for links of other ranks."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its agent reported: cores, processor and so on."""
        ...


class HostGroup(Protocol):
    """The hosts of a job whose workers are started by agents."""

    began: float
    address: str
    secret: bytes

    @property
    def sites(self) -> Sequence[JobHost]:
        """The hosts that have workers, in the order of their ranks."""
        ...

    def renew(self, left_s: float) -> None:
        """Replace agents that have ended, in at most so many seconds."""
        ...

    def workers_of(
        self,
        job: Any,
        here: LocalWorkers,
        folder: Path,
        rendezvous: str,
        *,
        generation: int,
        restarts: int,
    ) -> Workers:
        """Return the workers of one attempt, not started yet."""
        ...
