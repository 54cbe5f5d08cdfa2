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
from syncvar.bootstrap.launch_env.rank_placement import evenly_placed
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError, RendezvousError
from syncvar.core.fork_cleanup import unregister_exit
from syncvar.core.network import address_towards, address_towards_any, resolved, tcp_endpoint
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
    told: LaunchInfo,
    config: RuntimeConfig,
    environ: Mapping[str, str],
    secret: bytes | None,
    cards: KeyValueStore | None = None,
) -> Met:
    """Return the identity of this process; start the services that syncvar-launch would provide.

    Args:
        told: What the launcher says.
        config: Deadlines and limits.
        environ: Environment variables: XDG_RUNTIME_DIR, TMPDIR, HOME.
        secret: Secret from the user; None without one.
        cards: Key-value store, if it is neither the process manager nor a folder.

    Raises:
        ConfigError: Several hosts have no secret, or another job has the same variables.
        RendezvousError: Rank 0 cannot listen, or the first rank of this host does not come.
    """
    if told not in _met:
        _met[told] = _Rendezvous(told, config, environ, secret, cards).meet()
    return _met[told]


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
    """The steps of `meet`; `told` is extended with what they learn."""

    def __init__(
        self,
        told: LaunchInfo,
        config: RuntimeConfig,
        environ: Mapping[str, str],
        secret: bytes | None,
        cards: KeyValueStore | None,
    ) -> None:
        self.told = told
        self.config = config
        self.environ = environ
        self.secret = secret
        self.cards = cards
        self.name = environ.get("SLURMD_NODENAME") or socket.gethostname()

    def meet(self) -> Met:
        told = self.told
        if told.way == PMI and (told.host_count != 1 or not told.run):
            self.cards = ProcessManager(self.environ, self.config.rendezvous_timeout_s)
            self.told = told = self.cards.placed(told)
        is_addressed = told.way == ADDRESS or (self.secret is not None and told.port > 0)
        if self.cards is not None and (told.host_count == 1 or is_addressed):
            self.cards.done()
        if told.host_count == 1:
            return self._begin("")
        if told.rank == 0 and self.config.opened:
            _log.warning("%s", self.config.opened)
        return self._meet_at_address() if is_addressed else self._meet_by_cards()

    def _meet_at_address(self) -> Met:
        told = self.told
        if self.secret is None and self.config.encryption != "off":
            raise ConfigError(
                f"{told.source} names {told.host_count or 'several'} hosts: links between hosts "
                "need a secret that all ranks have. Set "
                "SYNCVAR_KEY_FILE to a file of 64 hexadecimal digits (chmod 600), or SYNCVAR_KEY "
                "to the digits; make them with "
                f'python -c "import secrets; print(secrets.token_hex(32))"'
            )
        # torchrun itself listens on MASTER_PORT of rank 0's host.
        port = told.port if told.source == "TF_CONFIG" else told.port + 1
        self.told = evenly_placed(told)
        return self._begin(
            tcp_endpoint(resolved(told.address, self.config.rendezvous_timeout_s), port)
        )

    def _meet_by_cards(self) -> Met:
        told = self.told
        cards = self.cards or FolderStore(self.environ, told.run, self.config.rendezvous_timeout_s)
        if told.local_rank == 0:
            cards.put(f"host-{told.rank}", f"{told.local_world_size} {self.name}")
        cards.turn()
        names = self._walk(cards)
        if told.rank:
            cards.turn()
            endpoint, nonce, text = cards.read("meet", "rank 0").split(" ")
            if text == "given" and self.secret is None:
                raise ConfigError(
                    "rank 0 was given a secret (SYNCVAR_KEY_FILE or SYNCVAR_KEY), and this rank "
                    "was not: give all ranks the same"
                )
            cards.done()
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
            resolved(told.address, self.config.rendezvous_timeout_s)
            if told.address
            else address_towards_any(names)
        )
        self._agree(address, nonce)
        met = self._begin(tcp_endpoint(address, "*"), cards)
        cards.put("meet", f"{met.environment.rendezvous} {nonce} {text}")
        cards.turn()
        cards.done()
        return met

    def _walk(self, cards: KeyValueStore) -> list[str]:
        """Read the entries of all hosts.

        Set this host's index, and return the names of the other hosts.
        """
        told, names = self.told, []
        first = index = count = 0
        while first < told.world_size:
            size, _, name = cards.read(
                f"host-{first}", f"rank {first}, the first of its host,"
            ).partition(" ")
            if first == told.rank - told.local_rank:
                index = count
                if name != self.name:
                    raise ConfigError(
                        f"rank {told.rank} is the {told.local_rank + 1}. of {self.name} and rank "
                        f"{first} is on {name}: ranks must be numbered host by host "
                        "(mpirun --map-by slot)"
                    )
            else:
                names.append(name)
            first += int(size)
            count += 1
        self.told = told._replace(host_index=index, host_count=count)
        return names

    def _agree(self, address: str, nonce: str) -> None:
        """Add rank 0's address, and its nonce, which distinguishes this run from earlier ones."""
        self.told = self.told._replace(address=address, run=f"{self.told.run} {nonce}")

    def _begin(self, endpoint: str, cards: KeyValueStore | None = None) -> Met:
        """Start the services on the first rank of a host; on other ranks, wait for them.

        Args:
            endpoint: Address of the rendezvous server; empty on one host.
            cards: Key-value store that rank 0 removes when all ranks have come.
        """
        told, secret = self.told, self.secret
        job = repr((told.address, told.port, told.run, told.world_size))
        name = (
            MEETING
            + hashlib.blake2b(
                f"{job} {told.rank - told.local_rank}".encode(), digest_size=4, key=secret or b""
            ).hexdigest()
        )
        job_id = hashlib.blake2b(job.encode(), digest_size=16, key=secret or b"").hexdigest()
        if told.local_rank == 0:
            directory = JobDirectory(self.environ, name)
            endpoint = endpoint or f"ipc://{directory.path}/store"
            host = HostService(directory, told, endpoint, self.config, job_id, secret, cards)
            _hosts.append(host)
            path, endpoint = (
                directory.path,
                host.store.endpoint if host.store is not None else endpoint,
            )
        else:
            path = self._await_directory(name)
            endpoint = endpoint or f"ipc://{path}/store"
        environment = RankEnvironment(
            rank=told.rank,
            world_size=told.world_size,
            local_rank=told.local_rank,
            local_world_size=told.local_world_size,
            host_index=told.host_index,
            host_count=told.host_count,
            generation=0,
            rendezvous=endpoint,
            job_id=job_id,
            host=self.name,
            host_directory=str(path),
            host_address="" if told.host_count == 1 else self._own_address(),
            restarts=told.restarts,
        )
        return Met(environment, secret)

    def _own_address(self) -> str:
        """Return the address of this host on the route to rank 0."""
        address = resolved(self.told.address, self.config.rendezvous_timeout_s)
        try:
            return address_towards(address, self.told.port)
        except OSError as error:
            raise RendezvousError(
                f"there is no way to rank 0 at {self.told.address}: {error}"
            ) from error

    def _await_directory(self, name: str) -> Path:
        told, timeout_s = self.told, self.config.rendezvous_timeout_s
        until = time.monotonic() + timeout_s
        while True:
            path = JobDirectory.find(self.environ, name)
            if path is not None and (path / READY).exists():
                return path
            if time.monotonic() > until:
                raise RendezvousError(
                    f"rank {told.rank} waited {timeout_s:g} s for rank "
                    f"{told.rank - told.local_rank}, the first of its host by {told.source}; do "
                    "all ranks run, as the same user and with the same variables?"
                )
            time.sleep(_PAUSE_S)
