"""Meeting without syncvar-launch: processes that another launcher or a scheduler has started, by what it tells them.

The first rank of each host hands over the host's arena, and rank 0 keeps the roll, as the launcher would, in a thread
of its own. On one host everything goes through unix sockets in a private folder whose name follows from what the ranks
are told; between hosts through tcp, for which all need the job's secret: one that was given to all, or, where the engine
leads to a place for cards that only they can read, one that rank 0 draws.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import zmq

from syncvar.arena.creating import CreatedArena, create, why_not_here
from syncvar.arena.handing import Handing, arena_path
from syncvar.arena.room import core_quota
from syncvar.env import RankEnvironment
from syncvar.errors import ConfigError, RendezvousError
from syncvar.joining.cards import Folder, ProcessManager, host_of_each, own_address_towards
from syncvar.joining.directory import JobDirectory
from syncvar.joining.store import Store
from syncvar.topology import ADDRESS, PMI
from syncvar.transports.zeromq import tcp_endpoint, why_closed
from syncvar.wire import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncvar.config import RuntimeConfig
    from syncvar.joining.cards import Cards
    from syncvar.topology import Told

__all__ = ["Met", "leave", "meet"]

_log = logging.getLogger("syncvar")
_READY = "ready"  # a file in the folder: what is served there can be asked for
_PAUSE_S = 0.02
_LOOK_MS = 200
_ANY_PORT = 9
_NOT_YET = (socket.EAI_NONAME, socket.EAI_AGAIN)
_met: dict[Told, Met] = {}  # a process joins again after `shutdown`
_hosts: list[_Host] = []


class Met(NamedTuple):
    """Who a process is, and what it shares with the others.

    Args:
        environment: The contract that syncvar-launch would have written.
        secret: The job's; None where there is none.
    """

    environment: RankEnvironment
    secret: bytes | None


def meet(told: Told, config: RuntimeConfig, environ: Mapping[str, str], secret: bytes | None, cards: Cards | None = None) -> Met:
    """Return who this process is, and begin to serve what syncvar-launch would have served.

    Args:
        told: What the engine says.
        config: Deadlines and limits.
        environ: Where XDG_RUNTIME_DIR or TMPDIR say where private folders may be, and HOME where one of all hosts is.
        secret: That was given; None where none was.
        cards: Where ranks of several hosts put them down, where it is neither the process manager nor a folder.

    Raises:
        ConfigError: Several hosts and no secret, or another job is told the same.
        RendezvousError: Rank 0 cannot listen, or the first rank of this host does not come.
    """
    if told not in _met:
        _met[told] = _meet(told, config, environ, secret, cards)
    return _met[told]


def _meet(told: Told, config: RuntimeConfig, environ: Mapping[str, str], secret: bytes | None, cards: Cards | None) -> Met:
    if told.way == PMI and (told.host_count != 1 or not told.run):
        manager = cards = ProcessManager(environ, config.rendezvous_timeout_s)
        told = _mapped(told, manager)
    is_addressed = told.way == ADDRESS or (secret is not None and told.port > 0)
    if cards is not None and (told.host_count == 1 or is_addressed):
        cards.done()
    if told.host_count == 1:
        return _begin(told, config, environ, secret, "")
    if told.rank == 0 and config.opened:
        _log.warning("%s", config.opened)
    if is_addressed:
        if secret is None and config.encryption != "off":
            raise ConfigError(
                f"{told.source} names {told.host_count or 'several'} hosts: links between hosts need a secret that all ranks have. Set "
                f"SYNCVAR_KEY_FILE to a file of 64 hexadecimal digits (chmod 600), or SYNCVAR_KEY to the digits; make them with "
                f'python -c "import secrets; print(secrets.token_hex(32))"'
            )
        port = told.port if told.source == "TF_CONFIG" else told.port + 1  # torchrun itself listens on MASTER_PORT, on rank 0's host
        told = _evenly_placed(told)
        return _begin(told, config, environ, secret, tcp_endpoint(_resolved(told.address, config), port))
    return _meet_by_cards(told, config, environ, secret, cards or Folder(environ, told.run, config.rendezvous_timeout_s))


def _mapped(told: Told, manager: ProcessManager) -> Told:
    """Return what is told, with what the process manager says of its hosts."""
    hosts = host_of_each(manager.mapping(), told.world_size)
    order = [host for host, _ in itertools.groupby(hosts)]
    if len(order) != len(set(order)):
        raise ConfigError(
            f"{told.source}: {len(set(hosts))} hosts have the ranks in turns, which have to be numbered host by host: give each host all of its "
            f"ranks at once, for instance by mpiexec -ppn N"
        )
    own = order.index(hosts[told.rank])
    first = hosts.index(hosts[told.rank])
    return told._replace(
        run=f"{told.run} {manager.name}", local_rank=told.rank - first, local_world_size=hosts.count(hosts[told.rank]), host_index=own,
        host_count=len(order),
    )  # fmt: skip


def _evenly_placed(told: Told) -> Told:
    """Return what is told, with this host's index and the number of hosts where only that of its ranks was."""
    if told.host_index >= 0:
        return told
    first, each = told.rank - told.local_rank, told.local_world_size
    if not each or first % each or told.world_size % each:
        raise ConfigError(
            f"{told.source}: {each} of {told.world_size} ranks are on this host, the first is rank {first}, and nobody says how many are on the "
            f"others; give each host as many, in order, or unset MASTER_PORT: the ranks meet in a folder that all hosts have"
        )
    return told._replace(host_index=first // each, host_count=told.world_size // each)


def _meet_by_cards(told: Told, config: RuntimeConfig, environ: Mapping[str, str], secret: bytes | None, cards: Cards) -> Met:
    own = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if told.local_rank == 0:
        cards.put(f"host-{told.rank}", f"{told.local_world_size} {own}")
    cards.turn()
    told, names = _walked(told, own, cards)
    if told.rank:
        cards.turn()
        endpoint, nonce, text = cards.read("meet", "rank 0").split(" ")
        if text == "given" and secret is None:
            raise ConfigError("rank 0 was given a secret (SYNCVAR_KEY_FILE or SYNCVAR_KEY), and this rank was not: give all ranks the same")
        cards.done()
        secret = bytes.fromhex(text) if text not in ("given", "none") else secret
        told = told._replace(address=endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"), run=f"{told.run} {nonce}")
        return _begin(told, config, environ, secret, endpoint)
    text = "given"
    if secret is None:
        secret = None if config.encryption == "off" else os.urandom(KEY_BYTES)
        text = "none" if secret is None else secret.hex()
    nonce = os.urandom(8).hex()
    address = _resolved(told.address, config) if told.address else own_address_towards(names)
    told = told._replace(address=address, run=f"{told.run} {nonce}")
    met = _begin(told, config, environ, secret, tcp_endpoint(address, "*"), cards)
    cards.put("meet", f"{met.environment.rendezvous} {nonce} {text}")
    cards.turn()
    cards.done()
    return met


def _walked(told: Told, own: str, cards: Cards) -> tuple[Told, list[str]]:
    """Go from the card of one host to that of the next; return what is told with the index of ours, and the others' names."""
    names: list[str] = []
    first = index = count = 0
    while first < told.world_size:
        size, _, name = cards.read(f"host-{first}", f"rank {first}, the first of its host,").partition(" ")
        if first == told.rank - told.local_rank:
            index = count
            if name != own:
                raise ConfigError(
                    f"rank {told.rank} is the {told.local_rank + 1}. of {own} and rank {first} is on {name}: ranks are numbered host by host; leave "
                    f"out what gives them to the hosts in turns (mpirun --map-by slot)"
                )
        else:
            names.append(name)
        first += int(size)
        count += 1
    return told._replace(host_index=index, host_count=count), names


def _begin(
    told: Told, config: RuntimeConfig, environ: Mapping[str, str], secret: bytes | None, endpoint: str, cards: Cards | None = None
) -> Met:
    """Serve, where this is the first rank of its host; where it is not, wait for that one. On one host there is no endpoint."""
    job = repr((told.address, told.port, told.run, told.world_size))
    name = "m" + hashlib.blake2b(f"{job} {told.rank - told.local_rank}".encode(), digest_size=4, key=secret or b"").hexdigest()
    job_id = hashlib.blake2b(job.encode(), digest_size=16, key=secret or b"").hexdigest()
    if told.local_rank == 0:
        directory = JobDirectory(environ, name)
        endpoint = endpoint or f"ipc://{directory.path}/store"
        host = _Host(directory, told, endpoint, config, job_id, secret, cards)
        _hosts.append(host)
        path, endpoint = directory.path, host.store.endpoint if host.store is not None else endpoint
    else:
        path = _await_directory(environ, name, told, config)
        endpoint = endpoint or f"ipc://{path}/store"
    return Met(
        RankEnvironment(
            rank=told.rank,
            world_size=told.world_size,
            local_rank=told.local_rank,
            local_world_size=told.local_world_size,
            host_index=told.host_index,
            host_count=told.host_count,
            generation=0,
            rendezvous=endpoint,
            job_id=job_id,
            host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
            host_directory=str(path),
            host_address="" if told.host_count == 1 else _own_address(told, config),
            restarts=told.restarts,
        ),
        secret,
    )


def leave(patience_s: float) -> None:
    """End now what this process serves, rather than when it ends: it goes on without the job.

    Args:
        patience_s: Longest wait until the others have left, in seconds; 0 where this rank has failed.
    """
    _met.clear()
    while _hosts:
        host = _hosts.pop()
        atexit.unregister(host.end)
        host.end(patience_s)


def _resolved(address: str, config: RuntimeConfig) -> str:
    """Return the address that a name stands for, the same on all hosts: of IPv4 where there is one.

    The name of a pod is known only when the pod has begun.
    """
    until = time.monotonic() + config.rendezvous_timeout_s
    while True:
        try:
            found = socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)
            return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
        except OSError as error:
            if time.monotonic() > until or "." not in address or error.errno not in _NOT_YET:
                raise RendezvousError(f"the address of rank 0, {address!r}, cannot be found: {error}") from error
        time.sleep(_PAUSE_S)


def _own_address(told: Told, config: RuntimeConfig) -> str:
    """Return the address of this host by which it reaches rank 0; nothing is sent to find it."""
    address = _resolved(told.address, config)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, told.port or _ANY_PORT))
        except OSError as error:
            raise RendezvousError(f"there is no way to rank 0 at {told.address}: {error}") from error
        return str(probe.getsockname()[0])


def _await_directory(environ: Mapping[str, str], name: str, told: Told, config: RuntimeConfig) -> Path:
    until = time.monotonic() + config.rendezvous_timeout_s
    while True:
        path = JobDirectory.find(environ, name)
        if path is not None and (path / _READY).exists():
            return path
        if time.monotonic() > until:
            raise RendezvousError(
                f"rank {told.rank} waited {config.rendezvous_timeout_s:g} s for rank {told.rank - told.local_rank}, the first of "
                f"its host by {told.source}; do all ranks run, as the same user and with the same variables?"
            )
        time.sleep(_PAUSE_S)


class _Host:
    """What the first rank of a host serves; rank 0 also keeps the roll.

    Args:
        directory: The private folder.
        told: Who this process is.
        endpoint: Where rank 0 keeps the roll; the system may choose its port.
        config: Deadlines and limits.
        job_id: The job's identity.
        secret: The job's.
        cards: What rank 0 removes when all have come; None where they have not met by cards.
    """

    def __init__(
        self, directory: JobDirectory, told: Told, endpoint: str, config: RuntimeConfig, job_id: str, secret: bytes | None, cards: Cards | None
    ) -> None:
        from syncvar.transports.curve import link_keys

        self._cards = cards

        self.directory = directory
        self._told = told
        self._config = config
        self._process = os.getpid()
        self._pidfds: dict[int, int] = {}  # descriptor -> rank
        self._watched: set[int] = set()
        self._ends = threading.Event()
        self._handing: Handing | None = None
        self.store: Store | None = None
        umask = os.umask(0o077)
        try:
            if told.rank == 0:
                keys = None if secret is None or config.encryption == "off" else link_keys(secret, job_id)
                self.store = Store(endpoint, told.world_size, job_id, config, keys=keys)
                self.store.watch()
            if told.local_world_size > 1 and config.shares_memory:
                path = arena_path(str(directory.path))
                self._handing = Handing(path, job_id, told.local_world_size, self._make)
        except BaseException:
            self._close()
            raise
        finally:
            os.umask(umask)
        # A host of one rank, or one without shared memory, is served nothing: a poll of nothing would not wait, and a
        # thread that never waits takes the interpreter's lock from the calls.
        self._thread: threading.Thread | None = None
        if self.store is not None or self._handing is not None:
            self._thread = threading.Thread(target=self._serve, name="syncvar-meeting", daemon=True)
            self._thread.start()
        (directory.path / _READY).touch()
        atexit.register(self.end)  # registered before the context's: it runs after that has left

    def end(self, patience_s: float | None = None) -> None:
        """Serve until the others have left, then end. A rank that fails tells them.

        Args:
            patience_s: Longest wait for the others, in seconds; None for what suits the end of a process.
        """
        if os.getpid() != self._process:
            return
        if self.store is not None:
            failing = getattr(sys, "last_value", None) is not None
            patience_s = (0.0 if failing else self._config.rendezvous_timeout_s) if patience_s is None else patience_s
            until = time.monotonic() + patience_s
            while time.monotonic() < until and not self._is_deserted():
                time.sleep(_PAUSE_S)
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self._close()

    def _is_deserted(self) -> bool:
        return self.store is not None and not self._present(self.store)

    def _present(self, store: Store) -> set[int]:
        """Return the others who have joined and have neither left nor been lost, to anybody."""
        coordinator = store.coordinator
        return set(coordinator.roll.members) - {self._told.rank} - set(coordinator.left) - set(coordinator.gone) - coordinator.lost

    def _serve(self) -> None:
        while not self._ends.is_set():
            poller = zmq.Poller()
            if self.store is not None:
                poller.register(self.store.socket, zmq.POLLIN)
            handed = self._handing.descriptors() if self._handing is not None else []
            for descriptor in (*handed, *self._pidfds):
                poller.register(descriptor, zmq.POLLIN)
            ready = [item for item, _ in poller.poll(_LOOK_MS)]
            now = time.monotonic()
            if self.store is not None:
                self.store.serve(now)
                self._watch(self.store)
                if self._cards is not None and len(self.store.coordinator.roll.members) == self._told.world_size:
                    self._cards.remove()
                    self._cards = None
                self._tell_lost(self.store, now)
                for item in ready:
                    if item in self._pidfds:
                        self._ended(self.store, item, now)
                if self.store.coordinator.broken_by is not None and self._handing is not None:
                    self._handing.abort(self.store.coordinator.roll.generation)
                for sentence in self.store.take_said():
                    _log.warning("%s", sentence)
            if self._handing is not None:
                for item in ready:
                    if isinstance(item, int) and item in handed:
                        self._handing.readable(item)
                for sentence in self._handing.take_said():
                    _log.warning("%s", sentence)

    def _watch(self, store: Store) -> None:
        """Look at the processes of this host: nobody else tells how they end."""
        for rank, member in store.coordinator.roll.members.items():
            if member.host_index == self._told.host_index and rank != self._told.rank and member.pid not in self._watched:
                self._watched.add(member.pid)
                with contextlib.suppress(OSError):
                    self._pidfds[os.pidfd_open(member.pid)] = rank

    def _tell_lost(self, store: Store, now: float) -> None:
        """Tell of ranks whose channel has closed: while the ranks meet, and when this one has left, no link tells of them."""
        coordinator = store.coordinator
        for rank in store.take_lost(now):
            is_member = rank in coordinator.roll.members and rank not in coordinator.left
            if rank != self._told.rank and (is_member or rank in coordinator.next_roll.members):
                store.ended(rank, why_closed(self._config), now)

    def _ended(self, store: Store, descriptor: int, now: float) -> None:
        rank = self._pidfds.pop(descriptor)
        os.close(descriptor)
        if rank not in store.coordinator.left:
            if self._handing is not None:
                self._handing.abort()
            store.ended(rank, "its process ended without leaving", now)

    def _make(self, generation: int) -> tuple[CreatedArena | None, str]:
        reason = why_not_here(os.uname().machine)
        if reason:
            return None, reason
        cores = min(len(os.sched_getaffinity(0)), core_quota() or sys.maxsize)
        size = self._told.local_world_size
        return create(self._config.arena_bytes, size, cores, generation, str(self.directory.path))

    def _close(self) -> None:
        if self.store is not None:
            if self._ends.is_set() and not self._is_deserted():  # the others hear it before the store is gone
                self.store.ended(self._told.rank, "its process ended without leaving", time.monotonic())
            self.store.close()
        if self._handing is not None:
            self._handing.close()
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds.clear()
        if self._cards is not None:
            self._cards.remove()
        self.directory.remove()
