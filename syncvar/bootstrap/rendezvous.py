"""Rendezvous without syncvar-launch, for processes of another launcher or scheduler.

The first rank of each host serves the shared memory, and rank 0 the rendezvous (`HostService`). On
one host all use unix sockets in a private folder, whose name follows from the launcher's variables.
Between hosts they use TCP with a common secret: from the user, or drawn by rank 0 if the ranks
share a private key-value store.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import zmq

from syncvar.bootstrap.job_private import MEETING, JobDirectory
from syncvar.bootstrap.kv_store import FolderStore, ProcessManager
from syncvar.bootstrap.launch_env import ADDRESS, PMI, assume_equal_hosts
from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError, RendezvousError
from syncvar.core.exit_status import exit_error_text, is_failing
from syncvar.core.fork_cleanup import register_exit, unregister_exit
from syncvar.protocol.auth_keys import KEY_BYTES
from syncvar.shm.fd_passing import FdServer, fd_socket_path
from syncvar.shm.host_limits import core_quota
from syncvar.shm.segment_file import CreatedSegment, create, unsupported_machine
from syncvar.transports.zeromq_sockets import (
    address_towards,
    address_towards_any,
    resolve_host,
    tcp_endpoint,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncvar.bootstrap.kv_store import KeyValueStore
    from syncvar.bootstrap.launch_env import LaunchInfo
    from syncvar.core.settings import RuntimeConfig

READY = "ready"  # file in the private folder that says that the services are up
_PAUSE_S = 0.02
_LOOK_MS = 200
_ENDED = "its process ended without leaving"

_log = logging.getLogger("syncvar")
_identities: dict[LaunchInfo, JobIdentity] = {}  # a process joins again after `shutdown`
_hosts: list[HostService] = []


class HostService:
    """The services of a host's first rank: shared memory and, on rank 0, the rendezvous (`server`).

    They run in a thread until `end`, which also runs when the process ends. The system may choose
    the port of `endpoint`. Rank 0 removes `kv_store` when all ranks have come.
    """

    def __init__(
        self,
        directory: JobDirectory,
        info: LaunchInfo,
        endpoint: str,
        config: RuntimeConfig,
        job_id: str,
        secret: bytes | None,
        kv_store: KeyValueStore | None,
    ) -> None:
        self._directory = directory
        self._info = info
        self._config = config
        self._kv_store = kv_store
        self._process = os.getpid()
        self._pidfds: dict[int, int] = {}  # descriptor -> rank
        self._watched: set[int] = set()
        self._ends = threading.Event()
        self._fd_server: FdServer | None = None
        self._thread: threading.Thread | None = None
        self.server: RendezvousServer | None = None
        umask = os.umask(0o077)
        try:
            if info.rank == 0:
                from syncvar.transports.curve import link_keys

                is_open = secret is None or config.encryption == "off"
                keys = None if secret is None or is_open else link_keys(secret, job_id)
                self.server = RendezvousServer(endpoint, info.world_size, job_id, config, keys=keys)
            if info.local_world_size > 1 and config.shares_memory:
                self._fd_server = FdServer(
                    fd_socket_path(str(directory.path)), job_id, info.local_world_size, self._make
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.umask(umask)
        # Without services there is no thread: polling nothing would not wait, and take the GIL
        # from calls.
        if self.server is not None or self._fd_server is not None:
            self._thread = threading.Thread(
                target=self._serve, name="syncvar-rendezvous", daemon=True
            )
            self._thread.start()
        (directory.path / READY).touch()
        register_exit(self.end)  # registered before the context's, so it runs after it

    def end(self, patience_s: float | None = None) -> None:
        """Serve until the others have left, for `patience_s` at most; a failing rank informs them.

        None is the default at the end of a process.
        """
        if os.getpid() != self._process:
            return
        if self.server is not None:
            if patience_s is None:
                patience_s = 0.0 if is_failing() else self._config.rendezvous_timeout_s
            until = time.monotonic() + patience_s
            while time.monotonic() < until and self._others(self.server):
                time.sleep(_PAUSE_S)
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self._close()

    def _others(self, server: RendezvousServer) -> set[int]:
        """Return the other ranks that have joined, and have neither left nor failed."""
        coordinator = server.coordinator
        return (
            set(coordinator.handshake.members)
            - {self._info.rank}
            - set(coordinator.left)
            - set(coordinator.failed_ranks)
            - coordinator.lost
        )

    def _serve(self) -> None:
        server, fd_server = self.server, self._fd_server
        while not self._ends.is_set():
            poller = zmq.Poller()
            if server is not None:
                poller.register(server.socket, zmq.POLLIN)
            fd_sockets = fd_server.descriptors() if fd_server is not None else []
            for descriptor in (*fd_sockets, *self._pidfds):
                poller.register(descriptor, zmq.POLLIN)
            ready = [item for item, _ in poller.poll(_LOOK_MS)]
            if server is not None:
                self._serve_rendezvous(
                    server, [item for item in ready if item in self._pidfds], time.monotonic()
                )
            if fd_server is not None:
                for item in ready:
                    if isinstance(item, int) and item in fd_sockets:
                        fd_server.readable(item)
                _warn(fd_server.take_messages())

    def _serve_rendezvous(self, server: RendezvousServer, ended: list[int], now: float) -> None:
        """Handle messages of the rendezvous and ended processes; `ended` are descriptors."""
        server.serve(now)
        coordinator = server.coordinator
        for rank, member in coordinator.handshake.members.items():
            is_other = member.host_index == self._info.host_index and rank != self._info.rank
            if is_other and member.pid not in self._watched:  # no launcher watches them
                self._watched.add(member.pid)
                with contextlib.suppress(OSError):
                    self._pidfds[os.pidfd_open(member.pid)] = rank
        if (
            self._kv_store is not None
            and len(coordinator.handshake.members) == self._info.world_size
        ):
            self._kv_store.remove()
            self._kv_store = None
        # No link reports these during the handshake, or after this rank has left.
        for rank, reason in server.take_lost(now).items():
            is_member = rank in coordinator.handshake.members and rank not in coordinator.left
            if rank != self._info.rank and (
                is_member or rank in coordinator.next_handshake.members
            ):
                server.ended(rank, reason, now)
        for descriptor in ended:
            rank = self._pidfds.pop(descriptor)
            os.close(descriptor)
            if rank not in coordinator.left:
                if self._fd_server is not None:
                    self._fd_server.abort()
                server.ended(rank, _ENDED, now)
        if coordinator.broken_by is not None and self._fd_server is not None:
            self._fd_server.abort(coordinator.handshake.generation)
        _warn(server.take_messages())

    def _make(self, generation: int) -> tuple[CreatedSegment | None, str]:
        reason = unsupported_machine(os.uname().machine)
        if reason:
            return None, reason
        cores = min(len(os.sched_getaffinity(0)), core_quota() or sys.maxsize)
        size, folder = self._info.local_world_size, str(self._directory.path)
        host = self._info.host_index
        return create(self._config.shm_bytes, size, cores, generation, folder, host)

    def _close(self) -> None:
        if self.server is not None:
            linger_s = 0.0
            # Inform them before the server closes.
            if self._ends.is_set() and self._others(self.server):
                self.server.ended(self._info.rank, exit_error_text() or _ENDED, time.monotonic())
                linger_s = self._config.shutdown_timeout_s
            self.server.close(linger_s)
        if self._fd_server is not None:
            self._fd_server.close()
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds.clear()
        if self._kv_store is not None:
            self._kv_store.remove()
        self._directory.remove()


def _warn(sentences: list[str]) -> None:
    for sentence in sentences:
        _log.warning("%s", sentence)


class JobIdentity(NamedTuple):
    """The identity that syncvar-launch would have set, and the secret of the job, if any."""

    environment: RankEnvironment
    secret: bytes | None


def meet(
    info: LaunchInfo,
    config: RuntimeConfig,
    environ: Mapping[str, str],
    secret: bytes | None,
    kv_store: KeyValueStore | None = None,
) -> JobIdentity:
    """Return the identity of this process; start the services that syncvar-launch would provide.

    `environ` is read for XDG_RUNTIME_DIR, TMPDIR and HOME. `secret` is that of the user, if any.
    `kv_store` is one that is neither the process manager nor a folder.

    Raises:
        ConfigError: Several hosts have no secret, or another job has the same variables.
        RendezvousError: Rank 0 cannot listen, or the first rank of this host does not come.
    """
    if info not in _identities:
        _identities[info] = _Rendezvous(info, config, environ, secret, kv_store).meet()
    return _identities[info]


def leave(patience_s: float) -> None:
    """End the services of this process now, instead of at its end; `patience_s` as for `end`."""
    _identities.clear()
    while _hosts:
        host = _hosts.pop()
        unregister_exit(host.end)
        host.end(patience_s)


class _Rendezvous:
    """The steps of `meet`; `info` is extended with what they learn."""

    def __init__(
        self,
        info: LaunchInfo,
        config: RuntimeConfig,
        environ: Mapping[str, str],
        secret: bytes | None,
        kv_store: KeyValueStore | None,
    ) -> None:
        self.info = info
        self.config = config
        self.environ = environ
        self.secret = secret
        self.kv_store = kv_store
        self.name = environ.get("SLURMD_NODENAME") or socket.gethostname()

    def meet(self) -> JobIdentity:
        info = self.info
        if info.way == PMI and (info.host_count != 1 or not info.run):
            self.kv_store = ProcessManager(self.environ, self.config.rendezvous_timeout_s)
            self.info = info = self.kv_store.add_host(info)
        is_addressed = info.way == ADDRESS or (self.secret is not None and info.port > 0)
        if self.kv_store is not None and (info.host_count == 1 or is_addressed):
            self.kv_store.done()
        if info.host_count == 1:
            return self._begin("")
        if info.rank == 0 and self.config.exposure_warning:
            _log.warning("%s", self.config.exposure_warning)
        return self._meet_at_address() if is_addressed else self._meet_by_kv_store()

    def _meet_at_address(self) -> JobIdentity:
        info = self.info
        if self.secret is None and self.config.encryption != "off":
            raise ConfigError(
                f"{info.source} names {info.host_count or 'several'} hosts: links between hosts "
                "need a secret that all ranks have. Set "
                "SYNCVAR_KEY_FILE to a file of 64 hexadecimal digits (chmod 600), or SYNCVAR_KEY "
                "to the digits; make them with "
                f'python -c "import secrets; print(secrets.token_hex(32))"'
            )
        # torchrun itself listens on MASTER_PORT of rank 0's host.
        port = info.port if info.source == "TF_CONFIG" else info.port + 1
        self.info = assume_equal_hosts(info)
        return self._begin(
            tcp_endpoint(resolve_host(info.address, self.config.rendezvous_timeout_s), port)
        )

    def _meet_by_kv_store(self) -> JobIdentity:
        info = self.info
        kv_store = self.kv_store or FolderStore(
            self.environ, info.run, self.config.rendezvous_timeout_s
        )
        if info.local_rank == 0:
            kv_store.put(f"host-{info.rank}", f"{info.local_world_size} {self.name}")
        kv_store.fence()
        names = self._walk(kv_store)
        if info.rank:
            kv_store.fence()
            endpoint, nonce, text = kv_store.read("meet", "rank 0").split(" ")
            if text == "given" and self.secret is None:
                raise ConfigError(
                    "rank 0 has a secret (SYNCVAR_KEY_FILE or SYNCVAR_KEY), and this rank has "
                    "none: give all ranks the same"
                )
            kv_store.done()
            if text not in ("given", "none"):
                self.secret = bytes.fromhex(text)
            self._agree(endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"), nonce)
            return self._begin(endpoint)
        text = "given"
        if self.secret is None:
            self.secret = None if self.config.encryption == "off" else os.urandom(KEY_BYTES)
            text = "none" if self.secret is None else self.secret.hex()
        nonce = os.urandom(8).hex()
        if info.address:
            address = resolve_host(info.address, self.config.rendezvous_timeout_s)
        else:
            address = address_towards_any(names)
        self._agree(address, nonce)
        identity = self._begin(tcp_endpoint(address, "*"), kv_store)
        kv_store.put("meet", f"{identity.environment.rendezvous} {nonce} {text}")
        kv_store.fence()
        kv_store.done()
        return identity

    def _walk(self, kv_store: KeyValueStore) -> list[str]:
        """Read the entries of all hosts; set this host's index and return the others' names."""
        info, names = self.info, []
        first = index = count = 0
        while first < info.world_size:
            owner = f"rank {first}, the first of its host,"
            size, _, name = kv_store.read(f"host-{first}", owner).partition(" ")
            if first == info.rank - info.local_rank:
                index = count
                if name != self.name:
                    raise ConfigError(
                        f"rank {info.rank} is the {info.local_rank + 1}. of {self.name} and rank "
                        f"{first} is on {name}: ranks must be numbered host by host "
                        "(mpirun --map-by slot)"
                    )
            else:
                names.append(name)
            first += int(size)
            count += 1
        self.info = info._replace(host_index=index, host_count=count)
        return names

    def _agree(self, address: str, nonce: str) -> None:
        """Add rank 0's address, and its nonce, which distinguishes this run from earlier ones."""
        self.info = self.info._replace(address=address, run=f"{self.info.run} {nonce}")

    def _begin(self, endpoint: str, kv_store: KeyValueStore | None = None) -> JobIdentity:
        """Start the services on the first rank of a host; on other ranks, wait for them.

        `endpoint` is the address of the rendezvous server, empty on one host.
        """
        info, secret = self.info, self.secret
        job = repr((info.address, info.port, info.run, info.world_size))
        key, here = secret or b"", f"{job} {info.rank - info.local_rank}"
        name = MEETING + hashlib.blake2b(here.encode(), digest_size=4, key=key).hexdigest()
        job_id = hashlib.blake2b(job.encode(), digest_size=16, key=key).hexdigest()
        if info.local_rank == 0:
            directory = JobDirectory(self.environ, name)
            endpoint = endpoint or f"ipc://{directory.path}/store"
            host = HostService(directory, info, endpoint, self.config, job_id, secret, kv_store)
            _hosts.append(host)
            path = directory.path
            endpoint = endpoint if host.server is None else host.server.endpoint
        else:
            path = self._await_directory(name)
            endpoint = endpoint or f"ipc://{path}/store"
        environment = RankEnvironment(
            rank=info.rank,
            world_size=info.world_size,
            local_rank=info.local_rank,
            local_world_size=info.local_world_size,
            host_index=info.host_index,
            host_count=info.host_count,
            generation=0,
            rendezvous=endpoint,
            job_id=job_id,
            host=self.name,
            host_directory=str(path),
            host_address="" if info.host_count == 1 else self._own_address(),
            restarts=info.restarts,
            program=info.program,
        )
        return JobIdentity(environment, secret)

    def _own_address(self) -> str:
        """Return the address of this host on the route to rank 0."""
        address = resolve_host(self.info.address, self.config.rendezvous_timeout_s)
        try:
            return address_towards(address, self.info.port)
        except OSError as error:
            raise RendezvousError(
                f"there is no route to rank 0 at {self.info.address}: {error}"
            ) from error

    def _await_directory(self, name: str) -> Path:
        info, timeout_s = self.info, self.config.rendezvous_timeout_s
        until = time.monotonic() + timeout_s
        while True:
            path = JobDirectory.find(self.environ, name)
            if path is not None and (path / READY).exists():
                return path
            if time.monotonic() > until:
                raise RendezvousError(
                    f"rank {info.rank} waited {timeout_s:g} s for rank "
                    f"{info.rank - info.local_rank}, the first of its host by {info.source}; do "
                    "all ranks run, as the same user and with the same variables?"
                )
            time.sleep(_PAUSE_S)
