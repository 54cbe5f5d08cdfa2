"""One launch: what each worker gets, and the fork server.

This module imports only what is needed before the fork server starts.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Protocol

from syncvar.core.environment import HostMap, RankEnvironment, split_evenly
from syncvar.core.process_ids import (
    RANKS,
    SERVER_0,
    WORKERS,
    ProcessNames,
    failover_order,
    is_server,
    replica_holders,
    server_hosts,
)
from syncvar.core.progress_line import VARIABLE as PROGRESS
from syncvar.core.progress_line import is_watched
from syncvar_launcher.job.job_files import FlightRecords, LostFiles
from syncvar_launcher.local.host_resources import (
    Binding,
    blas_environment,
    blas_threads,
    cannot_start,
    plan_binding,
)
from syncvar_launcher.local.worker_start import (
    ForkServer,
    plan_start,
    server_command,
    shared_variables,
    worker_command,
)
from syncvar_launcher.options.option_table import core_count, usable_cores
from syncvar_launcher.options.worker_environment import inherited_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncvar_launcher.options.launch_options import LaunchOptions, RankProgram

_LOOPBACK = "127.0.0.1"


class JobHost(Protocol):
    """A host of a job that has workers."""

    @property
    def name(self) -> str:
        """The name for messages."""

    @property
    def workers(self) -> int:
        """The number of its workers."""

    @property
    def address(self) -> str:
        """The address for links of other ranks."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its agent reported: cores, processor and so on."""


class HostGroup(Protocol):
    """The hosts of a job whose workers are started by agents."""

    began: float
    address: str
    secret: bytes

    @property
    def sites(self) -> Sequence[JobHost]:
        """The hosts that have workers, in the order of their ranks."""

    def renew(self, left_s: float) -> None:
        """Replace agents that have ended, in at most so many seconds."""


class Job:
    """One launch; without a host group the launcher starts all workers on this machine.

    `arguments` are the command line, for advice in messages.
    """

    def __init__(
        self,
        chosen: LaunchOptions,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        host_group: HostGroup | None = None,
    ) -> None:
        self.options = chosen
        self.arguments = list(arguments)
        self.environ = environ
        self.config = chosen.runtime
        self.job_id = os.urandom(16).hex()
        self.host_group = host_group
        self._moved: dict[int, int] = {}  # hosts of workers that were placed while the job ran
        if host_group is None:
            self.hosts = HostMap(split_evenly(chosen.ranks.workers, chosen.ranks.fake_hosts))
        else:
            self.place_hosts()
        self.server_hosts = server_hosts(chosen.ranks.servers, len(self.hosts.sizes))
        self.host = socket.gethostname()
        self.records = FlightRecords(chosen.output.log_dir, environ, self.job_id)
        self.lost_files = LostFiles()
        self.programs = chosen.programs
        self._program_indices = [
            index for index, one in enumerate(self.programs) for _ in range(one.workers)
        ]
        # The ranks whose program is no Python program of ours.
        self.command_ranks = frozenset(
            rank
            for rank, index in enumerate(self._program_indices)
            if self.programs[index].kind == "command"
        )
        # Ranks have no terminal. The launcher shows their lines on its own.
        self._shown_progress: dict[str, str] = {}
        if self.config.progress == "auto" and is_watched("auto"):
            self._shown_progress[PROGRESS] = "on"
        self.usable = usable_cores()
        self.core_count = core_count()
        ranks, program = chosen.ranks, chosen.program
        self.binding = Binding((), "")
        if host_group is None:
            online = os.cpu_count() or 1
            self.binding = plan_binding(
                ranks.workers, self.usable, online, ranks.bind, ranks.cores_per_worker
            )
        self.start_method = plan_start(
            ranks.start_method,
            self.programs,
            ranks.workers,
            str(program.cwd),
            {**self.base_environment(), **shared_variables(self.programs)},
        )

    # -- what a worker gets ------------------------------------------------------------------------

    def program_index(self, number: int) -> int:
        """Return the index of the program of a rank; a server belongs to the first one."""
        return 0 if is_server(number) else self._program_indices[number]

    def program_of(self, number: int) -> RankProgram:
        """Return the program of a rank or server."""
        return self.programs[self.program_index(number)]

    def program_label(self, number: int) -> str:
        """Return the program of a rank for messages; empty for a server and with one program."""
        is_one = len(self.programs) == 1
        return "" if is_one or number < 0 or is_server(number) else self.program_of(number).label

    def command(self, rank: int = 0) -> list[str]:
        """Return the command line of a worker, or of the fork server."""
        return self.start_method.command(self.program_of(rank))

    def fresh_command(self, rank: int) -> list[str]:
        """Return the command line of a worker that is not forked."""
        program = self.program_of(rank)
        return worker_command(program.kind, program.target, program.args, is_forked=False)

    def server_command(self, number: int) -> list[str]:
        """Return the command line of a server, by the number of its process."""
        program = self.options.program
        return server_command(program.kind, program.target, number - SERVER_0)

    @property
    def servers(self) -> range:
        """The numbers of the servers' processes."""
        return range(SERVER_0, SERVER_0 + self.options.ranks.servers)

    def heirs(self, server: int) -> tuple[int, ...]:
        """Return the servers that replace a server, in order."""
        return failover_order(server, self.server_hosts, self.options.ranks.server_replicas)

    def mirrors(self) -> tuple[tuple[int, ...], ...]:
        """Return for each server the servers that hold copies of its variables."""
        return tuple(
            replica_holders(server, self.server_hosts, self.options.ranks.server_replicas)
            for server in range(self.options.ranks.servers)
        )

    def host_of(self, number: int) -> int:
        """Return the index of the host of a rank or server."""
        if is_server(number):
            return self.server_hosts[number - SERVER_0]
        return self._moved.get(number, self.hosts.host_of(number))

    @property
    def first_workers(self) -> range:
        """The numbers of the workers that have a place at the start."""
        return range(sum(self.hosts.sizes))

    def place_hosts(self) -> None:
        """Take the hosts of the host group, at the start and before a restart."""
        assert self.host_group is not None
        self.hosts = HostMap(tuple(one.workers for one in self.host_group.sites))
        self._moved.clear()

    def place(self, host: int, numbers: Iterable[int]) -> None:
        """Place workers of an elastic job on a host that has come."""
        self._moved |= dict.fromkeys(numbers, host)

    def local_rank(self, number: int) -> int:
        """Return the index of a worker among those of its host."""
        host = self._moved.get(number)
        if host is None:
            return self.hosts.local_rank(number)
        return sorted(one for one, on in self._moved.items() if on == host).index(number)

    def size_of(self, host: int) -> int:
        """Return the number of workers of a host."""
        moved = sum(on == host for on in self._moved.values())
        return moved or self.hosts.sizes[host]

    def binding_of(self, host: int) -> Binding:
        """Return the cores of the workers of a host with an agent."""
        assert self.host_group is not None
        site, ranks = self.host_group.sites[host], self.options.ranks
        cores, online = site.facts["cores"], site.facts["cpu_count"]
        return plan_binding(site.workers, cores, online, ranks.bind, ranks.cores_per_worker)

    def summary(self) -> str:
        """Return the number of ranks and their hosts, for messages."""
        workers = self.options.ranks.workers
        ranks = f"{workers} rank{'s' * (workers > 1)}"
        if servers := self.options.ranks.servers:
            ranks += f" and {servers} server{'s' * (servers > 1)}"
        if self.host_group is None:
            return f"{ranks} on {self.host}"
        hosts = [f"{one.name} ({one.workers})" for one in self.host_group.sites]
        return f"{ranks} on {', '.join(hosts)}"

    def host_name(self, rank: int) -> str:
        """Return the name of a rank's host for messages; a fake host also has its number."""
        if self.host_group is not None:
            return self.host_group.sites[self.host_of(rank)].name
        return f"{self.host}#{self.host_of(rank)}" if len(self.hosts.sizes) > 1 else self.host

    @property
    def names(self) -> ProcessNames:
        """What sentences call the processes of this job."""
        return WORKERS if self.options.ranks.fewest else RANKS

    def worker_name(self, worker: int) -> str:
        """Return a worker of an elastic job, whose number is not its rank, for messages."""
        return f"worker {worker} on {self.host_name(worker)}"

    def processor_of(self, host: int) -> str:
        """Return the processor type of a host, as `os.uname` names it."""
        if self.host_group is None:
            return os.uname().machine
        return str(self.host_group.sites[host].facts["processor"])

    def own_environment(
        self,
        rank: int,
        rendezvous: str,
        directory: str,
        torch: Mapping[str, str],
        generation: int = 0,
        restarts: int = 0,
        incarnation: int = 0,
    ) -> dict[str, str]:
        """Return the variables that the launcher sets for a rank or server.

        `directory` is the private folder of its host; empty if an agent sets it. `torch` has the
        variables of `--torch-env`. The launcher has started all ranks again `restarts` times, and
        this one alone `incarnation` times.
        """
        chosen = self.options
        host, serves = self.host_of(rank), is_server(rank)
        host_count = max(len(self.hosts.sizes), host + 1)
        if torch:
            torch = {**torch, "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": str(host_count)}
        has_totals = chosen.output.stats and self.host_group is None
        folder = os.path.dirname(rendezvous.removeprefix("ipc://"))
        contract = RankEnvironment(
            rank=rank - SERVER_0 if serves else rank,
            world_size=chosen.ranks.workers,
            local_rank=0 if serves else self.local_rank(rank),
            local_world_size=self.size_of(host),
            host_index=host,
            host_count=host_count,
            generation=generation,
            rendezvous=rendezvous,
            job_id=self.job_id,
            role="server" if serves else "worker",
            host=self.host_name(rank),
            flight_dir=str(self.records.folder or ""),
            host_directory=directory,
            host_address=self._address_of(host),
            restarts=restarts,
            stats_dir=folder if has_totals else "",
            servers=chosen.ranks.servers,
            server_replicas=chosen.ranks.server_replicas,
            incarnation=incarnation,
            program=self.program_index(rank),
            elastic=chosen.ranks.fewest if chosen.ranks.forms_generations else 0,
        )
        own = self.program_of(rank).env
        return {
            **self._settings(host, own),
            **({} if serves else torch),
            **own,
            **contract.to_mapping(),
        }

    def _address_of(self, host: int) -> str:
        if len(self.hosts.sizes) == 1 and not self.options.may_grow:
            return ""
        return _LOOPBACK if self.host_group is None else self.host_group.sites[host].address

    def base_environment(self) -> dict[str, str]:
        """Return the variables that workers inherit from the launcher."""
        return inherited_variables(self.environ, is_clear=self.options.program.env_clear)

    def pass_fds(self) -> list[int]:
        """Return the descriptors that workers inherit from the launcher's parent."""
        return [int(text) for text in self.environ.get("SYNCVAR_PASS_FDS", "").split(",") if text]

    def _settings(self, host: int, own: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that are equal for all ranks of a host with one program.

        `own` are the variables of that program.
        """
        chosen = self.options
        workers, cores = chosen.ranks.workers, self.core_count
        if self.host_group is not None:
            site = self.host_group.sites[host]
            workers, cores = site.workers, site.facts["core_count"]
        threads = blas_threads(workers, cores, chosen.ranks.cores_per_worker)
        return {
            **blas_environment(threads, {**self.environ, **own}),
            **self.config.to_mapping(),
            **self._shown_progress,
        }

    # -- running -----------------------------------------------------------------------------------

    def fork_server(self, ahead: ForkServer | None = None) -> ForkServer | None:
        """Start the fork server; None for fresh processes and for hosts with agents.

        `ahead` is a server from `start_early`. If it does not fit, this method ends it.
        """
        program = self.options.program
        is_needed = self.host_group is None and self.start_method.is_forked
        environ: dict[str, str] = {}
        if is_needed:
            shared = shared_variables(self.programs)
            environ = {**self.base_environment(), **self._settings(0, shared), **shared}
        if ahead is not None and not (is_needed and ahead.suits(environ, program.cwd)):
            ahead.close()
            ahead = None
        if not is_needed:
            return None
        argv = self.command()
        try:
            server = ahead or ForkServer(argv, environ, program.cwd, self.pass_fds())
        except OSError as error:
            raise cannot_start(argv[0], error) from error
        server.order(self.programs, environ)
        return server
