"""Rendezvous without syncvar-launch, for processes of another launcher or scheduler.

The first rank of each host serves the shared memory, and rank 0 the rendezvous (`host_service`). On
one host all use unix sockets in a private folder, whose name follows from the launcher's variables.
Between hosts they use TCP with a common secret: from the user, or drawn by rank 0 if the ranks
share a private key-value store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from syncvar.bootstrap.host_service import READY, HostService
from syncvar.bootstrap.job_directory import MEETING, JobDirectory
from syncvar.bootstrap.kv_store import FolderStore, ProcessManager
from syncvar.bootstrap.launch_env.base import ADDRESS, PMI
from syncvar.bootstrap.launch_env.rank_placement import assume_equal_hosts
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError, RendezvousError
from syncvar.core.fork_cleanup import unregister_exit
from syncvar.core.network import address_towards, address_towards_any, resolve_host, tcp_endpoint
from syncvar.protocol.auth_keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncvar.bootstrap.kv_store import KeyValueStore
    from syncvar.bootstrap.launch_env.base import LaunchInfo
    from syncvar.core.settings import RuntimeConfig

_log = logging.getLogger("syncvar")
_PAUSE_S = 0.02
_met: dict[LaunchInfo, Met] = {}  # kept, because a process joins again after `shutdown`
_hosts: list[HostService] = []


class Met(NamedTuple):
    """Identity of a process and the secret of its job.

    Args:
        environment: The variables that syncvar-launch would have set.
        secret: Secret of the job; None without one.
    """

    environment: RankEnvironment
    secret: bytes | None


def meet(
    info: LaunchInfo,
    config: RuntimeConfig,
    environ: Mapping[str, str],
    secret: bytes | None,
    kv_store: KeyValueStore | None = None,
) -> Met:
    """Return the identity of this process; start the services that syncvar-launch would provide.

    Args:
        info: What the launcher says.
        config: Deadlines and limits.
        environ: Environment variables: XDG_RUNTIME_DIR, TMPDIR, HOME.
        secret: Secret from the user; None without one.
        kv_store: Key-value store, if it is neither the process manager nor a folder.

    Raises:
        ConfigError: Several hosts have no secret, or another job has the same variables.
        RendezvousError: Rank 0 cannot listen, or the first rank of this host does not come.
    """
    if info not in _met:
        _met[info] = _Rendezvous(info, config, environ, secret, kv_store).meet()
    return _met[info]


def leave(patience_s: float) -> None:
    """End the services of this process now, instead of at its end.

    Args:
        patience_s: Longest wait until the others have left, in seconds; 0 if this rank has failed.
    """
    _met.clear()
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

    def meet(self) -> Met:
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
        return self._meet_at_address() if is_addressed else self._meet_by_cards()

    def _meet_at_address(self) -> Met:
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

    def _meet_by_cards(self) -> Met:
        info = self.info
        kv_store = self.kv_store or FolderStore(
            self.environ, info.run, self.config.rendezvous_timeout_s
        )
        if info.local_rank == 0:
            kv_store.put(f"host-{info.rank}", f"{info.local_world_size} {self.name}")
        kv_store.turn()
        names = self._walk(kv_store)
        if info.rank:
            kv_store.turn()
            endpoint, nonce, text = kv_store.read("meet", "rank 0").split(" ")
            if text == "given" and self.secret is None:
                raise ConfigError(
                    "rank 0 was given a secret (SYNCVAR_KEY_FILE or SYNCVAR_KEY), and this rank "
                    "was not: give all ranks the same"
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
        address = (
            resolve_host(info.address, self.config.rendezvous_timeout_s)
            if info.address
            else address_towards_any(names)
        )
        self._agree(address, nonce)
        met = self._begin(tcp_endpoint(address, "*"), kv_store)
        kv_store.put("meet", f"{met.environment.rendezvous} {nonce} {text}")
        kv_store.turn()
        kv_store.done()
        return met

    def _walk(self, kv_store: KeyValueStore) -> list[str]:
        """Read the entries of all hosts.

        Set this host's index, and return the names of the other hosts.
        """
        info, names = self.info, []
        first = index = count = 0
        while first < info.world_size:
            size, _, name = kv_store.read(
                f"host-{first}", f"rank {first}, the first of its host,"
            ).partition(" ")
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

    def _begin(self, endpoint: str, kv_store: KeyValueStore | None = None) -> Met:
        """Start the services on the first rank of a host; on other ranks, wait for them.

        Args:
            endpoint: Address of the rendezvous server; empty on one host.
            kv_store: Key-value store that rank 0 removes when all ranks have come.
        """
        info, secret = self.info, self.secret
        job = repr((info.address, info.port, info.run, info.world_size))
        name = (
            MEETING
            + hashlib.blake2b(
                f"{job} {info.rank - info.local_rank}".encode(), digest_size=4, key=secret or b""
            ).hexdigest()
        )
        job_id = hashlib.blake2b(job.encode(), digest_size=16, key=secret or b"").hexdigest()
        if info.local_rank == 0:
            directory = JobDirectory(self.environ, name)
            endpoint = endpoint or f"ipc://{directory.path}/store"
            host = HostService(directory, info, endpoint, self.config, job_id, secret, kv_store)
            _hosts.append(host)
            path, endpoint = (
                directory.path,
                host.store.endpoint if host.store is not None else endpoint,
            )
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
        )
        return Met(environment, secret)

    def _own_address(self) -> str:
        """Return the address of this host on the route to rank 0."""
        address = resolve_host(self.info.address, self.config.rendezvous_timeout_s)
        try:
            return address_towards(address, self.info.port)
        except OSError as error:
            raise RendezvousError(
                f"there is no way to rank 0 at {self.info.address}: {error}"
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
