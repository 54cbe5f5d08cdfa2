"""Meeting without syncvar-launch: processes that torchrun or a cluster manager has started, by what these tell them.

The first rank of each host hands over the host's arena, and rank 0 keeps the roll, as the launcher would, in a thread
of its own. On one host everything goes through unix sockets in a private folder whose name follows from what the ranks
are told; between hosts through tcp, for which all need the job's secret.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import zmq

from syncvar.arena.creating import CreatedArena, create, why_not_here
from syncvar.arena.handing import Handing, arena_path
from syncvar.arena.room import core_quota
from syncvar.env import RankEnvironment
from syncvar.errors import ConfigError, RendezvousError
from syncvar.runtime.directory import JobDirectory
from syncvar.runtime.store import Store
from syncvar.transports.zeromq import tcp_endpoint, why_closed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncvar.config import RuntimeConfig
    from syncvar.topology import Told

__all__ = ["environment_of", "leave"]

_log = logging.getLogger("syncvar")
_READY = "ready"  # a file in the folder: what is served there can be asked for
_PAUSE_S = 0.02
_LOOK_MS = 200
_hosts: dict[str, _Host] = {}


def environment_of(
    told: Told, config: RuntimeConfig, environ: Mapping[str, str], secret: bytes | None
) -> RankEnvironment:
    """Return the contract that syncvar-launch would have written, and begin to serve what it would have served.

    Args:
        told: What the other launcher says.
        config: Deadlines and limits.
        environ: Where XDG_RUNTIME_DIR or TMPDIR say where private folders may be.
        secret: The job's; None where there is none.

    Raises:
        ConfigError: Several hosts and no secret, or another job is told the same.
        RendezvousError: Rank 0 cannot listen, or the first rank of this host does not come.
    """
    if told.host_count > 1 and config.opened and told.rank == 0:
        _log.warning("%s", config.opened)
    if told.host_count > 1 and secret is None and config.encryption != "off":
        raise ConfigError(
            f"{told.source} names {told.host_count} hosts: links between hosts need a secret that all ranks have. Set "
            f"SYNCVAR_KEY_FILE to a file of 64 hexadecimal digits (chmod 600), or SYNCVAR_KEY to the digits; make them with "
            f'python -c "import secrets; print(secrets.token_hex(32))"'
        )
    about = repr((told.address, told.port, told.run, told.world_size, told.host_index)).encode()
    name = "m" + hashlib.blake2b(about, digest_size=4, key=secret or b"").hexdigest()
    job = repr((told.address, told.port, told.run, told.world_size)).encode()
    job_id = hashlib.blake2b(job, digest_size=16, key=secret or b"").hexdigest()
    is_first = told.local_rank == 0
    if is_first and name not in _hosts:
        _hosts[name] = _Host(JobDirectory(environ, name), told, config, job_id, secret)
    path = _hosts[name].directory.path if is_first else _await_directory(environ, name, told, config)
    address = "" if told.host_count == 1 else _own_address(told)
    return RankEnvironment(
        rank=told.rank,
        world_size=told.world_size,
        local_rank=told.local_rank,
        local_world_size=told.local_world_size,
        host_index=told.host_index,
        host_count=told.host_count,
        generation=0,
        rendezvous=_rendezvous(told, str(path)),
        job_id=job_id,
        host=socket.gethostname(),
        host_directory=str(path),
        host_address=address,
        restarts=told.restarts,
    )


def leave(patience_s: float) -> None:
    """End now what this process serves, rather than when it ends: it goes on without the job.

    Args:
        patience_s: Longest wait until the others have left, in seconds; 0 where this rank has failed.
    """
    for name in tuple(_hosts):
        host = _hosts.pop(name)
        atexit.unregister(host.end)
        host.end(patience_s)


def _rendezvous(told: Told, path: str) -> str:
    if told.host_count == 1:
        return f"ipc://{path}/store"
    # torchrun itself listens on MASTER_PORT, on rank 0's host.
    port = told.port if told.source == "TF_CONFIG" else told.port + 1
    return tcp_endpoint(_resolved(told.address), port)


def _resolved(address: str) -> str:
    """Return the address that a name stands for, the same on all hosts: of IPv4 where there is one."""
    try:
        found = socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
    except OSError as error:
        raise RendezvousError(f"the address of rank 0, {address!r}, cannot be found: {error}") from error


def _own_address(told: Told) -> str:
    """Return the address of this host by which it reaches rank 0; nothing is sent to find it."""
    address = _resolved(told.address)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, told.port))
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
        config: Deadlines and limits.
        job_id: The job's identity.
        secret: The job's.
    """

    def __init__(
        self, directory: JobDirectory, told: Told, config: RuntimeConfig, job_id: str, secret: bytes | None
    ) -> None:
        from syncvar.transports.curve import link_keys

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
                self.store = Store(_rendezvous(told, str(directory.path)), told.world_size, job_id, config, keys=keys)
                self.store.watch()
            if told.local_world_size > 1 and config.transport != "zmq":
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
        self.directory.remove()
