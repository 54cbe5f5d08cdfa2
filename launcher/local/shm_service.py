"""The shared memory of the ranks of each host; without it they use unix sockets."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.environment import split_evenly
from syncvar.core.process_ids import server_hosts
from syncvar.shm.fd_passing import FdServer, fd_socket_path, servers_fd_socket_path
from syncvar.shm.segment_file import (
    CreatedSegment,
    SegmentLayout,
    create,
    format_bytes,
    unsupported_machine,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from syncvar_launcher.options.launch_options import LaunchOptions


def make_shm_service(
    options: LaunchOptions,
    job_id: str,
    core_count: int,
    directories: Sequence[Path],
    *,
    generation: int = 0,
    hands_over: bool = True,
) -> ShmService:
    """Return the shared memory of this machine, or of the hosts as which it poses."""
    ranks, runtime = options.ranks, options.runtime
    sizes = split_evenly(ranks.workers, ranks.fake_hosts)
    servers = server_hosts(ranks.servers, len(sizes))
    cores = [max(1, core_count * size // ranks.workers) for size in sizes]
    service = ShmService(
        job_id,
        runtime.shm_bytes,
        [
            ShmHost(host, size, servers.count(host), cores[host], directories[host])
            for host, size in enumerate(sizes)
        ],
        unavailable_reason=shm_unavailable_reason(options, os.uname().machine, sizes[0]),
        generation=generation,
        hands_over=hands_over and runtime.transport != "zmq",
        between_hosts=runtime.between_hosts,
    )
    if ranks.forms_generations:
        service.await_generations()
    return service


def shm_unavailable_reason(options: LaunchOptions, machine: str, size: int) -> str:
    """Return why the ranks of a host share no memory; empty if they do.

    `machine` is the processor type of the host, and `size` the number of its ranks.
    """
    if options.runtime.transport == "zmq":
        sources = {"environment": "SYNCVAR_TRANSPORT=zmq", "file": 'transport = "zmq" in the file'}
        return f"{sources.get(options.origin['transport'], 'the default')} asks for it"
    if options.ranks.workers == 1:
        return "a single rank sends nothing"
    if size == 1:
        return "there is one rank on this host"
    reason = unsupported_machine(machine)
    if not reason:
        SegmentLayout(options.runtime.shm_bytes, size)
    return f"unix sockets; no shared memory because {reason}" if reason else ""


class ShmHost(NamedTuple):
    """A host with shared memory: this machine, or one of the hosts as which it poses."""

    number: int  # index of the host in the job
    size: int  # number of its ranks
    servers: int  # number of its servers, which share another memory with its ranks
    cores: int  # number of cores that its ranks may use together
    directory: Path  # its private folder


class ShmService:
    """The shared memory of each host here: makes it on request, and passes it to the ranks.

    After a failure it wakes the ranks that wait in it. `generation` is the first generation of the
    ranks that will request it. Without `hands_over`, as with sockets or for `--dry-run`, no rank
    will.
    """

    def __init__(
        self,
        job_id: str,
        shm_bytes: int,
        hosts: Sequence[ShmHost],
        *,
        unavailable_reason: str = "",
        generation: int = 0,
        hands_over: bool = True,
        between_hosts: str = "",
    ) -> None:
        self._between_hosts = between_hosts
        self._shm_bytes = shm_bytes
        self._hosts = hosts
        self._generation = generation
        self._unavailable_reason = unavailable_reason
        # Of generations of an elastic job: by host, its index and its number of members.
        self._seats: dict[int, Mapping[int, tuple[int, int]]] = {}
        self._fd_servers: dict[int, FdServer] = {}  # by position in `hosts`
        self._fd_servers_of_servers: list[FdServer] = []
        self._messages: list[str] = []
        if not hands_over:
            return
        if sum(host.size for host in hosts) > 1:
            self._offer_to_ranks(job_id)
        if any(host.servers for host in hosts) and not unsupported_machine(os.uname().machine):
            self._offer_to_servers(job_id)

    def _offer_to_ranks(self, job_id: str) -> None:
        try:
            for position, host in enumerate(self._hosts):
                if host.size > 1:
                    path, make = fd_socket_path(str(host.directory)), partial(self.make, position)
                    server = FdServer(path, job_id, host.size, make, self._generation)
                    self._fd_servers[position] = server
        except OSError as error:
            self.close()
            reason = f"no shared memory because it cannot be handed over ({error.strerror})"
            self._unavailable_reason = f"unix sockets; {reason}"
            self._messages.append(f"no shared memory: it cannot be handed over ({error.strerror})")

    def _offer_to_servers(self, job_id: str) -> None:
        for position, host in enumerate(self._hosts):
            if host.servers:
                size = host.servers + host.size
                make = partial(self._create, position, size)
                path = servers_fd_socket_path(str(host.directory))
                with contextlib.suppress(OSError):  # then their arrays go through sockets
                    server = FdServer(path, job_id, size, make, self._generation)
                    self._fd_servers_of_servers.append(server)

    def describe(self) -> tuple[str, str]:
        """Return the transport in two words, and in a line with the reason.

        This makes shared memory, because only that shows whether it works.
        """
        hosts, between = len(self._hosts), ""
        if hosts > 1:
            between = f"; {self._between_hosts} on loopback between {hosts} fake hosts"
        if self._unavailable_reason:
            return f"unix sockets{between}", f"transport zmq: {self._unavailable_reason}{between}"
        if 0 in self._fd_servers:
            shm, reason = self._fd_servers[0].segment_of(self._generation)
        else:
            shm, reason = self.make(0, self._generation)
        if shm is None:
            line = f"transport zmq: unix sockets; no shared memory because {reason}{between}"
            return f"unix sockets{between}", line
        if not self._fd_servers:
            shm.close()
        size = format_bytes(self._shm_bytes)
        line = (
            f"transport shared memory: shared memory ({shm.form}), {size} virtual; "
            f"SYNCVAR_TRANSPORT=zmq turns it off{between}"
        )
        return f"shared memory ({shm.form}){between}", line

    @property
    def is_complete(self) -> bool:
        """Whether all ranks share one memory, so that no connection carries their data."""
        return not self._unavailable_reason and len(self._hosts) == 1

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [
            descriptor
            for server in (*self._fd_servers.values(), *self._fd_servers_of_servers)
            for descriptor in server.descriptors()
        ]

    def readable(self, descriptor: int) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        for server in (*self._fd_servers.values(), *self._fd_servers_of_servers):
            server.readable(descriptor)

    def take_messages(self) -> list[str]:
        """Return the sentences to show since the last call."""
        messages, self._messages = self._messages, []
        for server in self._fd_servers.values():
            messages += [text for text in server.take_messages() if text not in messages]
        return messages

    def await_generations(self) -> None:
        """Let requests wait for the `begin_generation` of their generation, as in elastic jobs."""
        for server in self._fd_servers.values():
            server.awaits_generations = True

    def begin_generation(self, generation: int, seats: Mapping[int, tuple[int, int]]) -> None:
        """Expect the members of a generation of an elastic job.

        `seats` has, for each host with members, its index in the generation and their number.
        """
        self._seats = {generation: seats}
        for position, server in self._fd_servers.items():
            _, size = seats.get(self._hosts[position].number, (0, 0))
            server.expect(generation, size)

    def abort(self, generation: int | None = None) -> None:
        """Wake every rank that waits in shared memory, of one generation or of all."""
        for server in self._fd_servers.values():
            server.abort(generation)

    def close(self) -> None:
        """Release everything. Idempotent."""
        for server in (*self._fd_servers.values(), *self._fd_servers_of_servers):
            server.close()
        self._fd_servers.clear()
        self._fd_servers_of_servers.clear()

    def make(self, position: int, generation: int) -> tuple[CreatedSegment | None, str]:
        """Make shared memory of a host for a generation: (memory, "") or (None, the reason)."""
        if self._unavailable_reason:
            return None, self._unavailable_reason
        return self._create(position, self._hosts[position].size, generation)

    def _create(
        self, position: int, size: int, generation: int
    ) -> tuple[CreatedSegment | None, str]:
        host = self._hosts[position]
        folder = str(host.directory)
        index = host.number
        if generation in self._seats:
            index, size = self._seats[generation][host.number]
        return create(self._shm_bytes, size, host.cores, generation, folder, index)
