"""The agent's side of one attempt: processes, memory, stacks, input and files of its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.job_private import JobDirectory
from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError
from syncvar.core.exit_status import INTERNAL, exit_code_of
from syncvar.core.output_files import RECORDS, TOTALS
from syncvar.core.process_ids import SERVER_0, is_server
from syncvar.parameter_server.discovery import put_tallies, take_tallies
from syncvar_launcher.hosts.agent_protocol import FIRST_CREDIT
from syncvar_launcher.hosts.file_transfer import result_parts
from syncvar_launcher.io.standard_streams import open_terminal, resize
from syncvar_launcher.local.host_resources import cannot_start
from syncvar_launcher.local.local_workers import (
    Event,
    LocalWorkers,
    WorkerOutput,
    WorkerSpec,
    secret_descriptor,
    write_secret,
)
from syncvar_launcher.local.shm_service import ShmHost, ShmService
from syncvar_launcher.local.stack_requests import ANSWER_S, StackCollector, StackRequest
from syncvar_launcher.local.worker_start import (
    ForkServer,
    ForkUnsupported,
    ServerEnded,
    StartMethod,
    plan_start,
    server_command,
    worker_command,
)
from syncvar_launcher.options.worker_environment import KEY_FD, KEY_FILE, inherited_variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar_launcher.hosts.agent_protocol import RankSpec, StartRequest

_RECORD_MAX = 8 << 20
_FLIGHT = "flight"
_STACKS_S = 0.25


class CannotFork(ConfigError):
    """The ranks cannot be forked; `refusal` has the reason."""

    def __init__(self, refusal: ForkUnsupported) -> None:
        self.exit_code = exit_code_of(refusal.status or INTERNAL)
        super().__init__(f"{refusal.reason}; --start-method spawn does without it")


class HostRanks:
    """The ranks of this host in one attempt.

    `tallies` are the counts of pushes that the workers of the last attempt have left. `call` is the
    bytes of the call of `sv.run`; empty without one.
    """

    def __init__(self, order: StartRequest, tallies: dict[str, bytes], call: bytes) -> None:
        self.credit = {
            (one.rank, stream): FIRST_CREDIT for one in order.ranks for stream in ("out", "err")
        }
        self._order = order
        base = self._base()
        # Indices of the programs that ranks of this host run.
        self._used = sorted({one.program for one in order.ranks if not is_server(one.rank)})
        programs = [order.programs[index] for index in self._used]
        self._start_method = plan_start(
            order.start_method,
            programs,
            len(order.ranks) - order.server_count,
            order.cwd,
            base,
        )
        self._started: dict[int, int] = {}
        self.requests: dict[int, tuple[StackRequest, float]] = {}
        self._input = self._input_end = -1
        self._unfed = bytearray()
        self._has_all = self._is_finished = False
        self._stack = contextlib.ExitStack()
        try:
            with _private():
                directory = JobDirectory(os.environ)
            self._stack.callback(directory.remove)
            self._folder = directory.path
            put_tallies(tallies, directory.path)
            self._results: Path | None = None
            self._call: list[int] = []  # the descriptor of the call, which all ranks inherit
            if call:
                self._keep_call(call)
            self._server: ForkServer | None = None
            if self._start_method.is_forked:
                argv = self._start_method.command(programs[0])
                self._server = ForkServer(argv, base, order.cwd, self._call)
                self._stack.callback(self._server.close)
                limit_s = order.ranks[0].environ.get(f"{PREFIX}RENDEZVOUS_TIMEOUT_S")
                self._server.limit_s = float(limit_s or self._server.limit_s)
                self._server.order(programs, base)
            self.processes = LocalWorkers(directory.path, directory.lock, self._server)
            self._stack.callback(self._end, directory)
            with _private():
                self.shm = self._make_shm(order, directory.path)
            self._stack.callback(self.shm.close)
            self._stacks = StackCollector(
                self.processes,
                lambda _: str(directory.path),
                order.cwd,
                [one.rank for one in order.ranks if self._is_command(one)],
            )
            if self._server is None:
                self._start_all()
        except BaseException:
            self._stack.close()
            raise

    def writable(self) -> list[int]:
        """Return the descriptors to poll for writing: rank 0's input, if data wait for it."""
        return [self._input_end] if self._unfed and self._input_end >= 0 else []

    def descriptors(self, *, is_full: bool) -> list[int]:
        """Return the descriptors to poll for reading."""
        of_workers = self.processes.descriptors(
            lambda rank, stream: not is_full and self.credit[rank, stream] > 0
        )
        watched = [*of_workers, *self.shm.descriptors()]
        return watched if self._server is None else [self._server.descriptor(), *watched]

    def readable(self, descriptor: int) -> list[Event]:
        """Handle a descriptor that poll reported."""
        if self._server is not None and descriptor == self._server.descriptor():
            return self._take_answer(self._server)
        self.shm.readable(descriptor)
        events = list(self.processes.readable(descriptor))
        for event in events:
            if isinstance(event, WorkerOutput):
                self.credit[event.rank, event.stream] -= len(event.data)
        return events

    def look(self) -> dict[int, list[Any]]:
        """Return state, processor time, process number and memory of each worker that runs."""
        processes = self.processes
        processes.look()
        return {
            rank: [
                processes.state(rank),
                processes.busy_s(rank),
                self._stacks.pid(rank),
                processes.resident_nbytes(rank),
            ]
            for rank in self.running()
        }

    def running(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return [rank for rank, worker in self.processes.workers.items() if worker.status is None]

    def pop_started(self) -> dict[int, int]:
        """Return the process of each rank that has started since the last call."""
        started, self._started = self._started, {}
        return started

    def restart_rank(self, one: RankSpec) -> None:
        """Start one rank again, alone."""
        self._start([one], is_fresh=True)

    def ask(self, number: int, rank: int, *, all_threads: bool) -> None:
        """Request the stack of a rank."""
        request = self._stacks.ask(rank, all_threads=all_threads)
        self.requests[number] = request, time.monotonic() + ANSWER_S

    def pop_stacks(self, now: float) -> Iterator[tuple[int, str, list[Any]]]:
        """Yield the stacks that have arrived, each with the number of its request."""
        for number, (request, until) in list(self.requests.items()):
            threads = self._stacks.answer(request, is_last=now >= until)
            if threads is not None:
                yield (
                    number,
                    request.instead,
                    [[one.ident, one.is_main, [*map(list, one.frames)]] for one in threads],
                )
            if threads is not None or now >= until:
                del self.requests[number]

    def feed(self, data: bytes) -> None:
        """Forward data of the launcher's standard input; empty bytes are its end."""
        self._unfed += data
        self._has_all = not data

    def resize(self, rank: int, size: list[int]) -> None:
        """Set rows and columns of the terminal of the debugged rank."""
        if self._input_end >= 0:
            resize(self._input_end, size)
        self.processes.send([rank], signal.SIGWINCH)

    def add_credit(self, rank: int, stream: str, nbytes: int) -> None:
        """Let a rank write more."""
        self.credit[rank, stream] += nbytes

    def feed_on(self) -> int:
        """Write waiting input to the pipe of rank 0; return how many bytes are done."""
        count = 0
        while self._unfed and self._input_end >= 0:
            try:
                written = os.write(self._input_end, self._unfed[:65536])
            except BlockingIOError:
                break
            except OSError:  # it reads no more
                written = len(self._unfed)
            del self._unfed[:written]
            count += written
        if self._has_all and not self._unfed and self._input_end >= 0:
            os.close(self._input_end)
            self._input_end = -1
        return count

    def note(self, ranks: list[int]) -> dict[int, str]:
        """Return where ranks stand, for those that answer within a moment."""
        self._stacks.note(ranks)
        self._stacks.await_noted(_STACKS_S)
        self._stacks.read_noted()
        return {rank: line for rank, line in self._stacks.places.items() if rank in ranks}

    def finish(self) -> list[Event]:
        """Kill what still runs, and return what it wrote; nothing the second time."""
        if self._is_finished:
            return []
        self._is_finished = True
        events = list(self.processes.close())
        for descriptor in (self._input, self._input_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._input = self._input_end = -1
        return events

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yield flight records and totals of calls that the ranks have left, with their names."""
        for path in (
            *sorted((self._folder / _FLIGHT).glob(RECORDS)),
            *sorted(self._folder.glob(TOTALS)),
        ):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if len(data) <= _RECORD_MAX:
                    yield path.name, data

    def results(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield results for the caller of `sv.run`; see `result_parts`."""
        return iter(()) if self._results is None else result_parts(self._results)

    def tallies(self) -> dict[str, bytes]:
        """Return the workers' counts of pushes, for the workers that replace them."""
        return take_tallies(self._folder)

    def close(self) -> None:
        """Remove the private folder."""
        self._stack.close()

    # -- inside ------------------------------------------------------------------------------------

    def _end(self, directory: JobDirectory) -> None:
        """Kill what still runs, and remove the folder.

        The system may kill this process meanwhile, because its parent has ended. The cleanup
        process goes on then, so it ends last.
        """
        self.finish()
        directory.remove()
        self.processes.end_cleanup()

    @staticmethod
    def _make_shm(order: StartRequest, folder: Path) -> ShmService:
        index = int(order.ranks[0].environ[f"{PREFIX}HOST_INDEX"])
        workers = len(order.ranks) - order.server_count
        service = ShmService(
            order.job,
            order.shm_bytes,
            [ShmHost(index, workers, order.server_count, order.core_count, folder)],
            unavailable_reason=order.shm_unavailable_reason,
            generation=order.generation,
            hands_over=order.requests_shm,
        )
        if order.ranks[0].environ[f"{PREFIX}ELASTIC"] != "0":
            service.await_generations()
        return service

    def _keep_call(self, call: bytes) -> None:
        """Store a call where ranks read it, and make the folder for their results."""
        descriptor = os.memfd_create("syncvar-call", os.MFD_CLOEXEC)
        self._stack.callback(os.close, descriptor)
        with open(descriptor, "wb", closefd=False) as file:  # noqa: PTH123
            file.write(call)
        self._call = [descriptor]
        self._results = self._folder / "results"
        self._results.mkdir(mode=0o700)

    def _base(self) -> dict[str, str]:
        """Return the variables of all ranks: the order's, and the login's without SYNCVAR_."""
        own = inherited_variables(os.environ, is_clear=self._order.env_clear)
        return {
            **{name: value for name, value in own.items() if not name.startswith(PREFIX)},
            **self._order.environ,
        }

    def _is_command(self, one: RankSpec) -> bool:
        """Return whether a rank runs no Python program of ours."""
        is_command = self._order.programs[one.program].kind == "command"
        return is_command and not is_server(one.rank)

    def _start_all(self) -> None:
        if not self._start_method.is_forked:
            self.processes.start_fresh()
        self._start(self._order.ranks)

    def _start(self, ranks: Sequence[RankSpec], *, is_fresh: bool = False) -> None:
        order, base = self._order, self._base()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        secret = secret_descriptor(order.secret, self._folder)
        argv: list[str] = []
        try:
            for one in ranks:
                serves = is_server(one.rank)
                argv = self._argv_of(one, is_fresh=is_fresh)
                stdin, outputs, source = self._streams_of(one, null)
                own = {**base, **self._environ_of(one)}
                is_program = self._is_command(one)
                if is_program:
                    own[KEY_FILE] = write_secret(order.secret, self._folder)
                self.processes.start(
                    WorkerSpec(
                        one.rank,
                        argv,
                        own,
                        Path(order.cwd),
                        one.cores,
                        stdin=stdin,
                        outputs=outputs,
                        source=source,
                        pass_fds=self._call,
                        named={} if is_program else {KEY_FD: secret},
                        is_fresh=is_fresh or serves,
                        program=0 if serves else self._used.index(one.program),
                    )
                )
                self._started[one.rank] = self.processes.workers[one.rank].process.pid
        except OSError as error:
            raise cannot_start(argv[0], error) from error
        finally:
            os.close(null)
            os.close(secret)
            if self._input >= 0:
                os.close(self._input)
                self._input = -1

    def _argv_of(self, one: RankSpec, *, is_fresh: bool) -> list[str]:
        program = self._order.programs[one.program]
        kind, target, args = program.kind, program.target, program.args
        if is_server(one.rank):
            return server_command(kind, target, one.rank - SERVER_0)
        if is_fresh:
            return worker_command(kind, target, args, is_forked=False)
        return self._start_method.command(program)

    def _streams_of(self, one: RankSpec, null: int) -> tuple[int, tuple[int, int] | None, int]:
        """Return standard input, both outputs unless they are pipes, and our end of a terminal."""
        outputs, source = None, -1
        if one.terminal is not None:
            source, self._input = open_terminal(one.terminal)
            self._input_end, outputs = os.dup(source), (self._input, self._input)
        elif one.has_input:
            self._input, self._input_end = os.pipe2(os.O_CLOEXEC)
        if not one.has_input:
            return null, outputs, source
        os.set_blocking(self._input_end, False)
        return self._input, outputs, source

    def _environ_of(self, one: RankSpec) -> dict[str, str]:
        own = {
            **one.environ,
            "SYNCVAR_HOST_DIRECTORY": str(self._folder),
            "SYNCVAR_FLIGHT_DIR": str(self._folder / _FLIGHT),
        }
        if self._results is not None:
            own["SYNCVAR_CALL_FD"] = str(self._call[0])
            own["SYNCVAR_RESULT_DIR"] = str(self._results)
        if self._order.saves_call_totals:
            own["SYNCVAR_STATS_DIR"] = str(self._folder)
        return own

    def _take_answer(self, server: ForkServer) -> list[Event]:
        self._server = None
        with server:
            refusal = server.refusal()
            if refusal is not None and self._start_method.may_change:
                server.close()
                self._start_method = StartMethod(is_forked=False, reason=refusal.reason)
                refusal = None
            if refusal is None or not refusal.is_certain:
                try:
                    self._start_all()
                    server.release()
                except ServerEnded as ended:
                    refusal = ForkUnsupported(ended.sentence, is_certain=True, status=ended.status)
                else:
                    return []
        raise CannotFork(refusal)


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Create files for this user only; workers keep the umask of the login."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
