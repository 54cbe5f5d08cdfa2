"""The workers of an attempt: the protocol `Workers`, and those that the launcher starts itself.

`DirectWorkers` starts the workers of this machine. `RemoteWorkers` in `hosts.remote_workers` starts
those of other hosts through agents.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Literal, Protocol

from syncvar.core.process_ids import is_server, process_name
from syncvar.protocol.auth_keys import KEY_BYTES
from syncvar_launcher.job.start_progress import clock
from syncvar_launcher.local.host_resources import cannot_start
from syncvar_launcher.local.local_workers import (
    Event,
    LocalWorkers,
    WorkerSpec,
    WorkerStarted,
    secret_descriptor,
    write_secret,
)
from syncvar_launcher.local.shm_service import make_shm_service
from syncvar_launcher.local.stack_requests import StackCollector
from syncvar_launcher.options.worker_environment import KEY_FD, KEY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from syncvar.core.stack_dump import Thread
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.local.local_workers import WorkerProcess
    from syncvar_launcher.local.stack_requests import StackRequest


class Workers(Protocol):
    """The workers and servers of one attempt."""

    @property
    def workers(self) -> Mapping[int, object]:
        """The processes that were started, by number."""

    @property
    def places(self) -> Mapping[int, str]:
        """Where each rank that answered stood when `note` asked it, in one line."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks share one memory, so that no connection carries their data."""

    def describe(self) -> tuple[str, str]:
        """Return the transport in few words, and in a line with the reason."""

    def start(self) -> Iterator[Event]:
        """Start all workers and servers."""

    def restart_rank(self, rank: int, incarnation: int) -> Iterator[Event]:
        """Start one worker or server again, alone; it gets no input."""

    def begin_generation(self, generation: int, seats: Mapping[int, tuple[int, int]]) -> None:
        """Prepare shared memory for a generation of an elastic job.

        `seats` has, for each host with members, its index in the generation and their number.
        """

    def look_for_hosts(self, room: int | None, returning: Collection[int]) -> None:
        """Look for hosts with room for so many workers; ask workers of others to leave.

        `room` is None if the job takes no more workers. `returning` are workers that have ended and
        will be started again on their hosts.
        """

    def start_host(self, slot: Any, numbers: Mapping[int, int]) -> Iterator[Event]:
        """Start workers on a host that has come; without any let it go.

        `numbers` has for each the number of its earlier processes.
        """

    # The loop.

    def descriptors(self, takes: Callable[[int, Literal["out", "err"]], bool]) -> list[int]:
        """Return the descriptors to poll for reading.

        `takes` returns whether the launcher can use more output of a rank; else the rank waits.
        """

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""

    def readable(self, descriptor: int) -> Iterator[Event]:
        """Handle a descriptor that poll reported; ignore others."""

    def look(self) -> None:
        """Do what is due with each heartbeat."""

    def take_messages(self) -> list[str]:
        """Return the sentences to show since the last call."""

    def state(self, rank: int) -> str:
        """Return the state letter of a process, or an empty text when it has ended."""

    def busy_s(self, rank: int) -> float:
        """Return the processor time of a process in seconds, as far as it is known."""

    def resident_nbytes(self, rank: int) -> int:
        """Return the memory of a process in bytes, as far as it is known; 0 after its end."""

    # Signals.

    def send(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to workers; SIGTERM also wakes those that are stopped."""

    def send_groups(self, number: int) -> list[int]:
        """Send a signal to the process groups of all ranks; return the ranks that get none."""

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill the sessions of workers, grandchildren included."""

    def stop(self) -> None:
        """Stop the sessions of all workers."""

    def resume(self) -> None:
        """Continue what `stop` has stopped."""

    def abort(self, generation: int | None = None) -> None:
        """Wake all ranks that wait in shared memory, of one generation or of all."""

    # Stacks.

    def note(self, ranks: Iterable[int]) -> None:
        """Request the stacks that the report shows; a rank is asked only once."""

    def await_noted(self, limit_s: float) -> None:
        """Wait for these stacks."""

    def ask(self, rank: int, *, all_threads: bool = False) -> StackRequest:
        """Request the stack of a rank."""

    def answer(self, request: StackRequest, *, is_last: bool = False) -> list[Thread] | None:
        """Return the answer to a request; None before it arrives, empty without a request."""

    def place_now(self, rank: int) -> str:
        """Return where a rank stands, in one line, or an empty text after a moment."""

    def pid(self, rank: int) -> int:
        """Return the number of a process on its host; -1 if it is unknown."""

    def close(self) -> Iterator[Event]:
        """Kill what still runs, and yield what it wrote."""


class WorkersFactory(Protocol):
    """Makes the workers of an attempt, not started yet, as the constructor of `DirectWorkers`."""

    def __call__(
        self,
        job: Job,
        processes: LocalWorkers,
        folder: Path,
        rendezvous: str,
        /,
        *,
        generation: int,
        restarts: int,
    ) -> Workers:
        """Make them."""


class DirectWorkers:
    """Workers that the launcher starts itself, without agents; implements `Workers`."""

    def __init__(
        self,
        job: Job,
        processes: LocalWorkers,
        folder: Path,
        rendezvous: str,
        *,
        generation: int,
        restarts: int,
    ) -> None:
        self._job = job
        self._processes = processes
        self._folder = folder
        self._rendezvous = rendezvous
        self._generation = generation
        self._restarts = restarts
        self._secret = b""  # shared by the hosts as which this machine poses
        self._folders = [folder]
        if len(job.hosts.sizes) > 1:
            self._folders = [folder / f"h{host}" for host in range(len(job.hosts.sizes))]
            for one in self._folders:
                one.mkdir(mode=0o700)
        program = job.options.program
        self._shm = make_shm_service(
            job.options, job.job_id, job.core_count, self._folders, generation=generation
        )
        self._stacks = StackCollector(
            processes,
            self._folder_of,
            str(program.cwd),
            job.command_ranks,
        )
        # These methods of its parts complete the protocol.
        self.unsent, self.look = processes.unsent, processes.look
        self.state, self.busy_s = processes.state, processes.busy_s
        self.resident_nbytes = processes.resident_nbytes
        self.send, self.send_groups = processes.send, processes.send_groups
        self.kill, self.stop, self.resume = processes.kill, processes.stop, processes.resume
        self.describe, self.take_messages = self._shm.describe, self._shm.take_messages
        self.abort, self.begin_generation = self._shm.abort, self._shm.begin_generation
        self.note, self.await_noted = self._stacks.note, self._stacks.await_noted
        self.ask, self.answer = self._stacks.ask, self._stacks.answer
        self.place_now, self.pid = self._stacks.place_now, self._stacks.pid

    @property
    def workers(self) -> Mapping[int, WorkerProcess]:
        """The processes that were started, by number."""
        return self._processes.workers

    @property
    def places(self) -> Mapping[int, str]:
        """Where each rank that answered stood when `note` asked it."""
        return self._stacks.places

    @property
    def is_complete(self) -> bool:
        """Whether all ranks share one memory."""
        return self._shm.is_complete

    def start(self) -> Iterator[Event]:
        """Start all servers and workers."""
        ranks = self._job.options.ranks
        if not self._job.start_method.is_forked:
            self._processes.start_fresh()
        torch = _torch_environment() if ranks.torch_env else {}
        if len(self._job.hosts.sizes) > 1:
            self._secret = os.urandom(KEY_BYTES)
        for number in (*self._job.servers, *range(ranks.workers)):
            clock.enter(f"starts {process_name(number)}")
            yield self._start_one(number, torch)

    def restart_rank(self, rank: int, incarnation: int) -> Iterator[Event]:
        """Start one worker or server again, alone; it gets no input."""
        yield self._start_one(rank, {}, incarnation)

    def look_for_hosts(self, room: int | None, returning: Collection[int]) -> None:
        """Do nothing: this launcher uses its own machine only."""

    def start_host(self, slot: Any, numbers: Mapping[int, int]) -> Iterator[Event]:
        """Refuse: this launcher uses its own machine only."""
        raise AssertionError("no host comes to a launcher without agents")

    def _start_one(self, number: int, torch: Mapping[str, str], incarnation: int = 0) -> Event:
        job, ranks, serves = self._job, self._job.options.ranks, is_server(number)
        if serves:
            argv = job.server_command(number)
        else:
            argv = job.fresh_command(number) if incarnation else job.command(number)
        has_terminal = ranks.debug == number
        reads = has_terminal if ranks.debug is not None else number == 0
        named: dict[str, int] = {}
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            own = job.own_environment(
                number,
                self._rendezvous,
                self._folder_of(number),
                torch,
                self._generation,
                self._restarts,
                incarnation,
            )
            if self._secret and number in job.command_ranks:
                own[KEY_FILE] = write_secret(self._secret, self._folder)
            elif self._secret:
                named[KEY_FD] = secret_descriptor(self._secret, self._folder)
            self._processes.start(
                WorkerSpec(
                    number,
                    argv,
                    job.base_environment() | own,
                    job.options.program.cwd,
                    None if serves else job.binding.cores[number],
                    stdin=0 if reads and not incarnation else null,
                    outputs=(1, 2) if has_terminal else None,
                    pass_fds=job.pass_fds(),
                    named=named,
                    is_fresh=serves or incarnation > 0,
                    program=job.program_index(number),
                )
            )
        except OSError as error:
            raise cannot_start(argv[0], error) from error
        finally:
            for descriptor in (null, *named.values()):
                os.close(descriptor)
        return WorkerStarted(number, self._stacks.pid(number))

    def _folder_of(self, number: int) -> str:
        return str(self._folders[self._job.host_of(number)])

    def descriptors(self, takes: Callable[[int, Literal["out", "err"]], bool]) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [*self._processes.descriptors(takes), *self._shm.descriptors()]

    def readable(self, descriptor: int) -> Iterator[Event]:
        """Handle a descriptor that poll reported; ignore others."""
        yield from self._processes.readable(descriptor)
        self._shm.readable(descriptor)

    def close(self) -> Iterator[Event]:
        """Kill what still runs, and yield what it wrote."""
        self._stacks.read_noted()
        yield from self._processes.close()
        self._processes.end_cleanup()
        self._shm.close()


def _torch_environment() -> dict[str, str]:
    """Return the variables by which torch.distributed meets, with a free port.

    The port may be taken before rank 0 listens; nothing else in the launcher guesses a port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
