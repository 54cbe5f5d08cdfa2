"""The workers of all hosts of a job, through the agents there; implements `job.workers.Workers`.

Messages replace the calls of `LocalWorkers`, `ShmService` and `StackCollector` on one host. An
agent sends no more output than the launcher has granted credit for, so a rank that writes much
blocks.
"""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from syncvar.core.errors import ConfigError, HostUnreachable, WireError, error_message
from syncvar.core.exit_status import INTERNAL
from syncvar.core.process_ids import SERVER_0
from syncvar.core.stack_dump import StackFrame, Thread, stack_text
from syncvar_launcher.hosts.agent_connection import NOT_UNDERSTOOD, poll_hosts
from syncvar_launcher.hosts.agent_protocol import FIRST_CREDIT, RankSpec
from syncvar_launcher.hosts.file_transfer import (
    ReceivedFiles,
    call_parts,
    folder_and_targets,
    forget_results,
)
from syncvar_launcher.io.output import escape
from syncvar_launcher.io.standard_streams import Input
from syncvar_launcher.local.local_workers import (
    Event,
    HostArrived,
    Spared,
    WorkerExited,
    WorkerOutput,
    WorkerStarted,
    WorkerStatus,
    WorkerUnreachable,
)
from syncvar_launcher.local.shm_service import shm_unavailable_reason
from syncvar_launcher.local.stack_requests import ENDED, NOT_STARTED, StackRequest
from syncvar_launcher.local.worker_start import shared_variables
from syncvar_launcher.options.worker_environment import carried_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from syncvar_launcher.hosts.agent_connection import HostSlot
    from syncvar_launcher.hosts.agent_protocol import Message
    from syncvar_launcher.hosts.host_arrivals import HostArrivals
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.local.host_resources import Binding
    from syncvar_launcher.local.local_workers import LocalWorkers

_CLOSE_S = 10.0
_GRANT = 1 << 18  # bytes that the launcher uses before it grants as many again
_MOMENT_S = 0.3
_CODE_MAX = 255
_BEATS_MISSED = 3
_EXCESS = 1 << 18  # an agent may exceed its credit by one read
_WORDS_SHOWN = 10
_FAILURE_FIELDS = {"error", "message", "traceback", "exit_code"}


class _RemoteProcess(NamedTuple):
    """The last report on a rank's process."""

    letter: str = ""  # its state
    busy_s: float = 0.0  # processor time
    pid: int = -1  # its number on its host
    resident_nbytes: int = 0  # memory


_UNKNOWN = _RemoteProcess()


class AgentHosts(Protocol):
    """The hosts of a job, as their workers need them."""

    secret: bytes
    sites: list[HostSlot]
    arrivals: HostArrivals | None

    def admit(self, slot: HostSlot) -> None:
        """Add a host while the job runs."""

    def free_port(self) -> int:
        """Return a free port at the first host's address."""

    def take_messages(self) -> list[str]:
        """Return the messages for the user since the last call."""


class RemoteWorkers:
    """The workers of one attempt, each started by the agent of its host.

    `folder` gets the totals of calls. `here` starts no worker: its cleanup process removes `folder`
    if the launcher is killed.
    """

    def __init__(
        self,
        host_group: AgentHosts,
        job: Job,
        here: LocalWorkers,
        folder: Path,
        rendezvous: str,
        *,
        generation: int,
        restarts: int,
    ) -> None:
        self._host_group = host_group
        self._job = job
        self._here = here
        self._rendezvous = rendezvous
        self._generation = generation
        self._restarts = restarts
        self.workers: dict[int, HostSlot] = {}  # the ranks that were started, with their hosts
        # Where each rank that answered stood when `note` asked it, in one line.
        self.places: dict[int, str] = {}
        self._shm_unavailable_reason = [
            shm_unavailable_reason(job.options, job.processor_of(host), site.workers)
            for host, site in enumerate(host_group.sites)
        ]
        # Whether all ranks share one memory.
        self.is_complete = self._shm_unavailable_reason == [""] and not job.options.may_grow
        self._running: set[int] = set()
        self._owed: dict[tuple[int, str], int] = {}
        self._allowed: dict[tuple[int, str], int] = {}
        self._received: dict[tuple[int, str], int] = {}
        self._unanswered: dict[int, tuple[HostSlot, StackRequest]] = {}
        self._processes: dict[int, _RemoteProcess] = {}
        self._noted: set[int] = set()
        self._request_count = 0
        self._late: list[Event] = []  # arrived during the wait for a stack
        self._stacks: dict[int, list[Thread]] = {}
        self._messages: list[str] = []
        self._files = ReceivedFiles(job, folder)
        self._reader = job.options.ranks.debug or 0  # the rank that gets the standard input
        self._input = Input(0, 1, is_debugged=job.options.ranks.debug is not None)
        self._is_closing = False
        self._handlers: dict[str, Callable[[Message, HostSlot], Iterable[Event] | None]] = {
            "output": self._forward_output,
            "started": self._report_started,
            "status": self._report_status,
            "exited": self._report_exit,
            "not_signalled": self._report_not_signalled,
            "start_failed": self._report_start_failed,
            "process_states": self._keep_process_states,
            "stack": self._keep_stack,
            "places": self._keep_places,
            "result": self._keep_result,
            "record": self._keep_record,
            "input_consumed": self._count_input,
            "notice": self._keep_notice,
            "attempt_ended": self._keep_release,
        }

    def start(self) -> Iterator[Event]:
        """Start all workers and servers; an agent reports each later."""
        chosen = self._job.options
        forget_results(self._job.environ)
        # For all hosts first: a wrong binding must fail before anything starts.
        bindings = [self._job.binding_of(index) for index in range(len(self._host_group.sites))]
        torch = {}
        if chosen.ranks.torch_env:
            torch = {
                "MASTER_ADDR": self._host_group.sites[0].address,
                "MASTER_PORT": str(self._host_group.free_port()),
            }
        first = 0
        for index, site in enumerate(self._host_group.sites):
            ranks = dict.fromkeys(range(first, first + site.workers), 0)
            self._start_site(index, ranks, bindings[index], torch)
            first += site.workers
        self._input.take()
        return iter(())

    def _start_site(
        self, index: int, ranks: Mapping[int, int], binding: Binding, torch: dict[str, str]
    ) -> None:
        """Start the servers and workers of a host; `ranks` has counts of earlier processes."""
        chosen, config = self._job.options, self._job.config
        site = self._host_group.sites[index]
        servers = [number for number in self._job.servers if self._job.host_of(number) == index]
        specs = [self._rank_spec(number, {}, None) for number in servers]
        for place, (rank, incarnation) in enumerate(ranks.items()):
            has_input = rank == self._reader
            cores = binding.cores[place]
            specs.append(
                self._rank_spec(rank, torch, cores, has_input=has_input, incarnation=incarnation)
            )
        cwd, targets = folder_and_targets(site.remote, chosen)
        programs = [
            one._replace(target=target)._asdict()
            for one, target in zip(self._job.programs, targets, strict=True)
        ]
        request = {
            "job": self._job.job_id,
            "generation": self._generation,
            "secret": self._host_group.secret,
            "ranks": specs,
            "shm_bytes": config.shm_bytes,
            "core_count": site.facts["core_count"],
            "shm_unavailable_reason": self._shm_unavailable_reason[index],
            "requests_shm": config.transport != "zmq",
            "env_clear": chosen.program.env_clear,
            "saves_call_totals": bool(chosen.output.stats),
            "start_method": chosen.ranks.start_method,
            "cwd": cwd,
            "programs": programs,
            "environ": {
                **carried_variables(self._job.environ),
                **shared_variables(self._job.programs),
            },
            "server_count": len(servers),
        }
        self._forget(ranks)
        self.workers |= dict.fromkeys((*servers, *ranks), site)
        self._running |= {*servers, *ranks}
        site.remote.heard = time.monotonic()
        for part in call_parts(self._job.environ):
            site.remote.send("call_data", data=part)
        site.remote.send("start", request=request)

    # -- hosts that come and go --------------------------------------------------------------------

    def look_for_hosts(self, room: int | None, returning: Collection[int]) -> None:
        """Look for hosts with room for so many workers; ask workers of others to leave."""
        arrivals = self._host_group.arrivals
        if arrivals is None:
            return
        restarting = [self.workers[number] for number in returning if number in self.workers]
        for site in self._host_group.sites:
            is_empty = not (self._running_on(site) or any(site is one for one in restarting))
            if is_empty and room is not None and not site.remote.loss_reason:
                site.remote.end("its workers have ended")  # the next login starts workers again
            if is_empty and site.remote.loss_reason:
                site.remote.release()
        living = [site for site in self._host_group.sites if not site.remote.loss_reason]
        for name in arrivals.look({site.name for site in living}, room=room or 0):
            leaving = next(site for site in living if site.name == name)
            numbers = self._running_on(leaving)
            if numbers:
                self._messages.append(f"{name} is to be left: its workers are asked to leave")
                self.send(numbers, signal.SIGTERM)

    def start_host(self, slot: HostSlot, numbers: Mapping[int, int]) -> Iterator[Event]:
        """Start workers on a host that has come; `numbers` has counts of earlier processes."""
        if not numbers:
            slot.remote.end("the job needs no more workers")
            slot.remote.close()
            return
        site, index = slot._replace(workers=len(numbers)), len(self._host_group.sites)
        binding, reason = None, ""
        try:
            self._host_group.admit(site)
            binding = self._job.binding_of(index)
        except (HostUnreachable, ConfigError) as error:  # the job goes on without it
            reason = escape(f"its host {site.name} cannot be used: {error_message(error)}")
        self._job.place(index, numbers)
        processor = self._job.processor_of(index)
        self._shm_unavailable_reason.append(
            shm_unavailable_reason(self._job.options, processor, len(numbers))
        )
        for number in numbers:
            for stream in ("out", "err"):
                for counts in (self._owed, self._allowed, self._received):
                    counts.pop((number, stream), None)
        if binding is not None:
            self._start_site(index, numbers, binding, {})
            return
        site.remote.end("it cannot be used")
        self._exclude(site)
        for number in numbers:
            yield WorkerUnreachable(number, reason)

    def _forget(self, ranks: Iterable[int]) -> None:
        """Forget what is known of the last processes of ranks."""
        for rank in ranks:
            self._processes.pop(rank, None)
            self.places.pop(rank, None)
            self._noted.discard(rank)

    def _exclude(self, site: HostSlot) -> None:
        if self._host_group.arrivals is not None:
            self._host_group.arrivals.fail(site.name)

    def restart_rank(self, rank: int, incarnation: int) -> Iterator[Event]:
        """Start a rank again, alone; it gets no input."""
        site = self.workers[rank]
        if site.remote.loss_reason:
            yield WorkerUnreachable(rank, f"its host {site.name} is gone")
            return
        host = self._job.host_of(rank)
        cores = self._job.binding_of(host).cores[self._job.local_rank(rank)]
        self._forget((rank,))
        self._running.add(rank)
        spec = self._rank_spec(rank, {}, cores, incarnation=incarnation)
        site.remote.send("restart_rank", rank_spec=spec)

    def begin_generation(self, generation: int, seats: Mapping[int, tuple[int, int]]) -> None:
        """Prepare shared memory for a generation of an elastic job."""
        for host, (index, size) in seats.items():
            self._host_group.sites[host].remote.send(
                "begin_generation", generation=generation, host=host, index=index, size=size
            )

    def _rank_spec(
        self,
        number: int,
        torch: dict[str, str],
        cores: Any,
        *,
        has_input: bool = False,
        incarnation: int = 0,
    ) -> dict[str, Any]:
        environ = self._job.own_environment(
            number, self._rendezvous, "", torch, self._generation, self._restarts, incarnation
        )
        terminal = list(self._input.size) if has_input and self._input.size is not None else None
        program = self._job.program_index(number)
        return RankSpec(number, environ, cores, has_input, terminal, program)._asdict()

    def describe(self) -> tuple[str, str]:
        """Return the transport in few words, and as a whole line."""
        within = "shared memory" if "" in self._shm_unavailable_reason else "unix sockets"
        hosts, links = len(self._host_group.sites), self._job.config.between_hosts
        between = f" on each host; {links} between {hosts} hosts" if hosts > 1 else ""
        if hosts > 1 and all(site.workers == 1 for site in self._host_group.sites):
            within, between = "", f"{links} between {hosts} hosts"
        return f"{within}{between}", f"transport: {within}{between}"

    # -- the loop ----------------------------------------------------------------------------------

    def descriptors(self, takes: Callable[[int, Literal["out", "err"]], bool]) -> list[int]:
        """Return the descriptors to poll for reading; grant credit for output that fits."""
        for (rank, stream), count in list(self._owed.items()):
            if count >= _GRANT and takes(rank, stream):  # type: ignore[arg-type]
                self._owed[rank, stream] = 0
                self._allowed[rank, stream] = (
                    self._allowed.get((rank, stream), FIRST_CREDIT) + count
                )
                self.workers[rank].remote.send("credit", rank=rank, stream=stream, nbytes=count)
        watched = [one for site in self._host_group.sites for one in site.remote.descriptors()]
        if self._host_group.arrivals is not None:
            watched += self._host_group.arrivals.descriptors()
        return [*watched, *self._input.descriptors()] if self._reader in self.workers else watched

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        unsent = [one for site in self._host_group.sites for one in site.remote.unsent()]
        if self._host_group.arrivals is not None:
            unsent += self._host_group.arrivals.unsent()
        return unsent

    def readable(self, descriptor: int) -> Iterator[Event]:
        """Handle a descriptor that poll reported."""
        late, self._late = self._late, []
        yield from late
        if self._input.is_at(descriptor):
            data = self._input.read()
            if data is not None:
                self.workers[self._reader].remote.send("input", data=data)
            return
        if self._host_group.arrivals is not None:
            for slot in self._host_group.arrivals.readable(descriptor):
                yield HostArrived(slot)
        for site in self._host_group.sites:
            site.remote.flush()
            for message in site.remote.readable(descriptor):
                yield from self._events(message, site)
            if site.remote.loss_reason:
                yield from self._lose(site)

    def look(self) -> None:
        """Send a heartbeat to all hosts, and check theirs."""
        now = time.monotonic()
        for site in self._host_group.sites:
            site.remote.send("heartbeat")
            silent_s = now - site.remote.heard
            if silent_s > self._job.config.host_silence_s and not site.remote.loss_reason:
                site.remote.end(
                    f"nothing has come from it for {silent_s:.1f} s; "
                    "its ranks may run on until its agent continues or ends"
                )
        if self._reader not in self._running:
            self._input.let_go()
        elif (size := self._input.take()) is not None:
            self.workers[self._reader].remote.send(
                "window_size", rank=self._reader, size=list(size)
            )

    def state(self, rank: int) -> str:
        """Return the last known state letter of a worker's process; empty after its end."""
        return self._processes.get(rank, _UNKNOWN).letter if rank in self._running else ""

    def busy_s(self, rank: int) -> float:
        """Return the last known processor time of a worker's process, in seconds."""
        return self._processes.get(rank, _UNKNOWN).busy_s

    def resident_nbytes(self, rank: int) -> int:
        """Return the last known memory of a worker's process, in bytes; 0 after its end."""
        return self._processes.get(rank, _UNKNOWN).resident_nbytes if rank in self._running else 0

    def send(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to workers; SIGTERM also wakes those that are stopped."""
        for site, own in self._by_site(ranks):
            site.remote.send("signal", ranks=own, signal_number=number)

    def send_groups(self, number: int) -> list[int]:
        """Send a signal to the process groups of all ranks.

        An event `Spared` names ranks that do not expect it, later.
        """
        for site in self._host_group.sites:
            site.remote.send("signal_groups", signal_number=number)
        return []

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill the whole sessions of workers, grandchildren included."""
        for site, own in self._by_site(ranks):
            site.remote.send("kill", ranks=own)

    def stop(self) -> None:
        """Stop the sessions of all workers."""
        self._input.let_go()
        for site in self._host_group.sites:
            site.remote.send("stop")

    def resume(self) -> None:
        """Continue what `stop` has stopped."""
        for site in self._host_group.sites:
            site.remote.heard = time.monotonic()
            site.remote.send("resume")

    def abort(self, generation: int | None = None) -> None:
        """Wake all ranks that wait in shared memory."""
        for site in self._host_group.sites:
            site.remote.send("abort", generation=generation)

    def take_messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        messages, self._messages = self._messages, []
        return [*messages, *self._host_group.take_messages()]

    # -- where ranks stand -------------------------------------------------------------------------

    def note(self, ranks: Iterable[int]) -> None:
        """Request the stacks for the report; a rank keeps its first answer."""
        new = [rank for rank in ranks if rank not in self._noted and rank in self._running]
        self._noted |= set(new)
        for site, own in self._by_site(new):
            site.remote.send("get_places", ranks=own)

    def await_noted(self, limit_s: float) -> None:
        """Do nothing: an agent answers before it forwards the next signal."""

    def ask(self, rank: int, *, all_threads: bool = False) -> StackRequest:
        """Request the stack of a rank."""
        if rank not in self._running:
            return StackRequest(rank, -1, ENDED if rank in self.workers else NOT_STARTED)
        self._request_count += 1
        number = self._request_count
        site, request = self.workers[rank], StackRequest(rank, number, "", all_threads)
        self._unanswered[number] = site, request
        site.remote.send("get_stack", request_id=number, rank=rank, all_threads=all_threads)
        return request

    def answer(self, request: StackRequest, *, is_last: bool = False) -> list[Thread] | None:
        """Return the answer to a request; None before it arrives, empty without a request."""
        if request.start < 0:
            return []
        if is_last:
            self._unanswered.pop(request.start, None)
            return self._stacks.pop(request.start, None)
        return self._stacks.get(request.start)

    def place_now(self, rank: int) -> str:
        """Return where a rank stands, after a moment; empty without an answer."""
        silent_s = time.monotonic() - self.workers[rank].remote.heard
        if silent_s > _BEATS_MISSED * self._job.config.heartbeat_interval_s:
            return ""  # waiting for each of its ranks would delay the news of its loss
        request = self.ask(rank)
        if request.start < 0:
            return ""
        site, until = self.workers[rank], time.monotonic() + _MOMENT_S
        while (threads := self.answer(request)) is None and not site.remote.loss_reason:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            (messages,), _ = poll_hosts([site.remote], left_s)
            for message in messages:
                self._late += self._events(message, site)
        return stack_text(threads[0].frames, str(self._job.options.program.cwd)) if threads else ""

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process on its host; -1 if unknown."""
        return self._processes.get(rank, _UNKNOWN).pid

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> Iterator[Event]:
        """Kill what still runs, and yield what it wrote."""
        if self._is_closing:
            return
        self._is_closing = True
        self._input.close()
        yield from self._here.close()
        self._here.end_cleanup()
        waiting = [site for site in self._host_group.sites if not site.remote.loss_reason]
        for rank, site in self.workers.items():
            for stream in ("out", "err"):
                site.remote.send("credit", rank=rank, stream=stream, nbytes=1 << 40)
                self._allowed[rank, stream] = 1 << 60
        for site in waiting:
            site.remote.send("end_attempt")
        yield from self._await_ends(waiting)
        for site in self._host_group.sites:
            if site.remote.loss_reason:
                yield from self._lose(site)

    def _await_ends(self, waiting: list[HostSlot]) -> Iterator[Event]:
        """Yield what agents still send, until each has ended the attempt or is lost."""
        # Only the waits for an agent count, not those for our reader.
        idle_s = dict.fromkeys((site.name for site in waiting), 0.0)
        while waiting:
            began = time.monotonic()
            received, _ = poll_hosts([site.remote for site in waiting], 1.0)
            waited_s = time.monotonic() - began
            have_ended = set()
            for site, messages in zip(waiting, received, strict=True):
                idle_s[site.name] = 0.0 if messages else idle_s[site.name] + waited_s
                for message in messages:
                    if message["kind"] == "attempt_ended":
                        have_ended.add(site.name)
                    yield from self._events(message, site)
                if idle_s[site.name] > _CLOSE_S:
                    self._messages.append(
                        f"{site.name}: its agent does not end; what its ranks wrote last may be "
                        "missing"
                    )
                    site.remote.end("it does not answer in time")
            waiting = [one for one in waiting if one.name not in have_ended]
            waiting = [one for one in waiting if not one.remote.loss_reason]

    # -- inside ------------------------------------------------------------------------------------

    def _by_site(self, ranks: Iterable[int]) -> list[tuple[HostSlot, list[int]]]:
        found: dict[int, tuple[HostSlot, list[int]]] = {}
        for rank in ranks:
            if rank in self._running:
                site = self.workers[rank]
                found.setdefault(id(site), (site, []))[1].append(rank)
        return list(found.values())

    def _events(self, message: Message, site: HostSlot) -> list[Event]:
        """Return the events of a message; a malformed one ends the connection."""
        handler = self._handlers.get(message["kind"])
        rank = message.get("rank")
        try:
            if handler is None or (rank is not None and self.workers.get(rank) is not site):
                return []
            return list(handler(message, site) or ())
        except (WireError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            site.remote.end(f"{NOT_UNDERSTOOD}: {message['kind']}: {error_message(error)}")
            return []

    def _forward_output(self, message: Message, _: HostSlot) -> Iterator[Event]:
        rank, stream, data = message["rank"], message["stream"], message["data"]
        if stream in ("out", "err"):
            key = rank, stream
            self._owed[key] = self._owed.get(key, 0) + len(data)
            self._received[key] = self._received.get(key, 0) + len(data)
            if self._received[key] > self._allowed.get(key, FIRST_CREDIT) + _EXCESS:
                raise WireError("it sends more output than the launcher has granted")
            yield WorkerOutput(rank, stream, data)

    def _report_started(self, message: Message, site: HostSlot) -> Iterator[Event]:
        for rank, pid in message["pids"].items():
            if self.workers.get(rank) is site:
                self._processes[rank] = _RemoteProcess(pid=int(pid))
                yield WorkerStarted(rank, int(pid))

    @staticmethod
    def _report_status(message: Message, _: HostSlot) -> Iterator[Event]:
        record = message["record"]
        is_flat = all(
            isinstance(name, str) and isinstance(value, str | int) for name, value in record.items()
        )
        is_whole = record.get("event") != "failed" or record.keys() >= _FAILURE_FIELDS
        if is_flat and not is_whole:
            raise WireError("it reports a failure without its fields")
        if is_flat:
            yield WorkerStatus(message["rank"], record)

    def _report_exit(self, message: Message, _: HostSlot) -> Iterator[Event]:
        self._running.discard(message["rank"])
        yield WorkerExited(message["rank"], message["status"], message["detail"])

    def _report_not_signalled(self, message: Message, site: HostSlot) -> Iterator[Event]:
        named = [each for each in message["ranks"] if isinstance(each, int)]
        ranks = [each for each in named if self.workers.get(each) is site]
        if ranks:
            yield Spared(message["signal_number"], ranks)

    def _report_start_failed(self, message: Message, site: HostSlot) -> Iterator[Event]:
        words = site.remote.words().splitlines()[-_WORDS_SHOWN:]
        self._messages += [escape(f"{site.name}: {line}") for line in words]
        code = message["exit_code"] if 0 < message["exit_code"] <= _CODE_MAX else INTERNAL
        for each in self._running_on(site):
            self._running.discard(each)
            reason = escape(f"it cannot be started: {message['reason']}")
            yield WorkerUnreachable(each, reason, code)

    def _keep_process_states(self, message: Message, site: HostSlot) -> None:
        for rank, (letter, busy_s, pid, nbytes) in message["states"].items():
            if self.workers.get(rank) is site:
                self._processes[rank] = _RemoteProcess(
                    str(letter)[:1], float(busy_s), int(pid), int(nbytes)
                )

    def _keep_places(self, message: Message, site: HostSlot) -> None:
        for rank, line in message["places"].items():
            if self.workers.get(rank) is site:
                self.places[rank] = escape(str(line))

    def _count_input(self, message: Message, _: HostSlot) -> None:
        self._input.fed(message["nbytes"])

    def _keep_notice(self, message: Message, site: HostSlot) -> None:
        self._messages.append(escape(f"{site.name}: {message['text']}"))

    def _keep_release(self, message: Message, site: HostSlot) -> None:
        site.remote.is_released = bool(message["is_released"])

    def _keep_stack(self, message: Message, site: HostSlot) -> None:
        number = message["request_id"]
        host, request = self._unanswered.get(number, (None, None))
        if request is None or host is not site:
            return
        del self._unanswered[number]
        request.instead = escape(message["no_stack_reason"])
        self._stacks[number] = [
            Thread(
                str(ident),
                bool(is_main),
                tuple(StackFrame(str(file), int(line), str(name)) for file, line, name in frames),
            )
            for ident, is_main, frames in message["threads"]
        ]

    def _keep_record(self, message: Message, site: HostSlot) -> None:
        found = re.fullmatch(r"(?:flight-rank|flight-(server)|stats-)(\d+)\..*", message["name"])
        if found is not None:
            rank = int(found[2]) + (SERVER_0 if found[1] else 0)
            # In an elastic job a record bears the rank in its generation, on any of the hosts.
            ranks = self._job.options.ranks
            is_elastic = ranks.forms_generations and rank < ranks.workers
            if is_elastic or self.workers.get(rank) is site:
                self._files.keep_record(message["name"], message["data"], site.name)

    def _keep_result(self, message: Message, site: HostSlot) -> None:
        name, data, is_last = message["name"], message["data"], message["is_last"]
        self._files.keep_result(name, data, site.name, is_last=is_last)

    def _running_on(self, site: HostSlot) -> list[int]:
        """Return the ranks and servers that run on a host, ranks first."""
        return sorted(
            one for one, own in self.workers.items() if own is site and one in self._running
        )

    def _lose(self, site: HostSlot) -> Iterator[Event]:
        ranks = self._running_on(site)
        if not ranks:
            return
        words = site.remote.words().splitlines()
        status = None if site.remote.is_ended else site.remote.status(0.2)
        ended = f"; its connection ended with {status}" if status is not None else ""
        last = f" ({words[-1].strip()})" if words else ""
        reason = escape(f"its host {site.name} is gone: {site.remote.loss_reason}{ended}{last}")
        self._exclude(site)
        for rank in ranks:
            self._running.discard(rank)
            yield WorkerUnreachable(rank, reason)
