"""The shared memory of the ranks of each host; without it they use unix sockets."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

from syncvar.core.environment import split_evenly
from syncvar.core.process_ids import server_hosts
from syncvar.shm.fd_passing import FdServer, fd_socket_path, servers_fd_socket_path
from syncvar.shm.segment_file import (
    CreatedSegment,
    SegmentLayout,
    bytes_in_words,
    create,
    unsupported_machine,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    """Return the shared memory of this machine, or of the hosts as which it poses.

    Args:
        options: The options.
        job_id: The identity of the job.
        core_count: The number of cores that its ranks may use together.
        directories: The private folder of each host.
        generation: The first generation of the ranks that will ask for memory.
        hands_over: Whether workers will ask for it.
    """
    sizes = split_evenly(options.ranks.workers, options.ranks.fake_hosts)
    return ShmService(
        job_id,
        options.runtime.shm_bytes,
        sizes,
        [max(1, core_count * size // options.ranks.workers) for size in sizes],
        directories,
        why_not=shm_unavailable_reason(options, os.uname().machine, sizes[0]),
        generation=generation,
        between_hosts=options.runtime.between_hosts,
        hands_over=hands_over and options.runtime.transport != "zmq",
        servers=[
            server_hosts(options.ranks.servers, len(sizes)).count(host)
            for host in range(len(sizes))
        ],
    )


def shm_unavailable_reason(options: LaunchOptions, machine: str, size: int) -> str:
    """Return why the ranks of a host share no memory; empty if they do.

    Args:
        options: The options.
        machine: The processor type of the host, as `os.uname` names it.
        size: The number of ranks of the host.
    """
    if options.runtime.transport == "zmq":
        said = {"environment": "SYNCVAR_TRANSPORT=zmq", "file": 'transport = "zmq" in the file'}
        return f"{said.get(options.origin['transport'], 'the default')} asks for it"
    if options.ranks.workers == 1:
        return "a single rank sends nothing"
    if size == 1:
        return "there is one rank on this host"
    reason = unsupported_machine(machine)
    if not reason:
        SegmentLayout(options.runtime.shm_bytes, size)
    return f"unix sockets; no shared memory because {reason}" if reason else ""


class ShmService:
    """The shared memory of each host: makes it on request and hands it over.

    After a failure it wakes the ranks that wait in it.

    Args:
        job_id: The identity of the job.
        shm_bytes: The virtual size of each host's memory.
        sizes: The ranks of each host here.
        cores: The number of cores that the ranks of each host may use together.
        directories: The private folder of each host.
        why_not: Why there is no shared memory; empty if there is.
        generation: The first generation of the ranks that will ask for it.
        hands_over: Whether workers will ask for it; not with sockets (`transport`) or for
            `--dry-run`.
        between_hosts: The transport between fake hosts, as text.
        servers: The servers of each host here, which share another memory with its ranks.
        first_host: The index in the job of the first host here.
    """

    def __init__(
        self,
        job_id: str,
        shm_bytes: int,
        sizes: Sequence[int],
        cores: Sequence[int],
        directories: Sequence[Path],
        *,
        why_not: str = "",
        generation: int = 0,
        hands_over: bool = True,
        between_hosts: str = "",
        servers: Sequence[int] = (),
        first_host: int = 0,
    ) -> None:
        self._between_hosts = between_hosts
        self._shm_bytes = shm_bytes
        self._sizes = sizes
        self._cores = cores
        self._directories = directories
        self._first_host = first_host
        self._generation = generation
        self._why_not = why_not
        self._handings: dict[int, FdServer] = {}  # by host
        self._of_servers: list[FdServer] = []
        self._said: list[str] = []
        if hands_over and sum(sizes) > 1:
            try:
                for host, size in enumerate(self._sizes):
                    if size > 1:
                        path = fd_socket_path(str(directories[host]))
                        self._handings[host] = FdServer(
                            path, job_id, size, partial(self.make, host), generation
                        )
            except OSError as error:
                self.close()
                self._why_not = (
                    "unix sockets; no shared memory because it cannot be handed over "
                    f"({error.strerror})"
                )
                self._said.append(f"no shared memory: it cannot be handed over ({error.strerror})")

        if hands_over and any(servers) and not unsupported_machine(os.uname().machine):
            for host, count in enumerate(servers):
                if count:
                    make = partial(self._create, host, count + sizes[host])
                    with contextlib.suppress(OSError):  # then their arrays go through sockets
                        path = servers_fd_socket_path(str(directories[host]))
                        self._of_servers.append(
                            FdServer(path, job_id, count + sizes[host], make, generation)
                        )

    def describe(self) -> tuple[str, str]:
        """Return the transport in two words, and in a line with the reason.

        This makes shared memory, because only that shows whether it works.
        """
        hosts = len(self._sizes)
        between = (
            f"; {self._between_hosts} on loopback between {hosts} fake hosts" if hosts > 1 else ""
        )
        if self._why_not:
            return f"unix sockets{between}", f"transport zmq: {self._why_not}{between}"
        shm, reason = (
            self._handings[0].prepare(self._generation)
            if 0 in self._handings
            else self.make(0, self._generation)
        )
        if shm is None:
            return (
                f"unix sockets{between}",
                f"transport zmq: unix sockets; no shared memory because {reason}{between}",
            )
        if not self._handings:
            shm.close()
        size = bytes_in_words(self._shm_bytes)
        line = (
            f"transport shared memory: shared memory ({shm.form}), {size} virtual; "
            f"SYNCVAR_TRANSPORT=zmq turns it off{between}"
        )
        return f"shared memory ({shm.form}){between}", line

    @property
    def is_complete(self) -> bool:
        """Whether all ranks share one memory, so that no connection carries their data."""
        return not self._why_not and len(self._sizes) == 1

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [
            descriptor
            for handing in (*self._handings.values(), *self._of_servers)
            for descriptor in handing.descriptors()
        ]

    def readable(self, descriptor: int) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        for handing in (*self._handings.values(), *self._of_servers):
            handing.readable(descriptor)

    def take_messages(self) -> list[str]:
        """Return the sentences to show since the last call."""
        said, self._said = self._said, []
        for handing in self._handings.values():
            said += [sentence for sentence in handing.take_messages() if sentence not in said]
        return said

    def abort(self, generation: int | None = None) -> None:
        """Wake every rank that waits in shared memory, of one generation or of all."""
        for handing in self._handings.values():
            handing.abort(generation)

    def close(self) -> None:
        """Release everything. Idempotent."""
        for handing in (*self._handings.values(), *self._of_servers):
            handing.close()
        self._handings.clear()
        self._of_servers.clear()

    def make(self, host: int, generation: int) -> tuple[CreatedSegment | None, str]:
        """Make shared memory of a host for a generation: (memory, "") or (None, the reason)."""
        if self._why_not:
            return None, self._why_not
        return self._create(host, self._sizes[host], generation)

    def _create(self, host: int, size: int, generation: int) -> tuple[CreatedSegment | None, str]:
        folder = str(self._directories[host])
        return create(
            self._shm_bytes, size, self._cores[host], generation, folder, self._first_host + host
        )
