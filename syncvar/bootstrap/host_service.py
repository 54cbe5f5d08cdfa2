"""Services of a host's first rank in jobs without syncvar-launch.

They are the host's shared memory and, on rank 0, the rendezvous.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import zmq

from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core.exit_codes import exit_error_text, is_failing
from syncvar.core.fork_cleanup import register_exit
from syncvar.shm.fd_passing import FdServer, fd_socket_path
from syncvar.shm.host_limits import core_quota
from syncvar.shm.segment_file import CreatedSegment, create, unsupported_machine

if TYPE_CHECKING:
    from syncvar.bootstrap.job_directory import JobDirectory
    from syncvar.bootstrap.kv_store import KeyValueStore
    from syncvar.bootstrap.launch_env.base import LaunchInfo
    from syncvar.core.settings import RuntimeConfig

READY = "ready"
"""File in the private folder that says that the services are up."""

_PAUSE_S = 0.02
_LOOK_MS = 200
_ENDED = "its process ended without leaving"


class HostService:
    """Serves in a thread until `end`, which also runs when the process ends.

    Args:
        directory: The private folder.
        told: Identity of this process.
        endpoint: Address of the rendezvous on rank 0; the system may choose its port.
        config: Deadlines and limits.
        job_id: Identity of the job.
        secret: Secret of the job.
        cards: Key-value store that rank 0 removes when all ranks have come; None without one.

    Attributes:
        store: The rendezvous server; None except on rank 0.
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
        self._handing: FdServer | None = None
        self._thread: threading.Thread | None = None
        self.store: RendezvousServer | None = None
        umask = os.umask(0o077)
        try:
            if info.rank == 0:
                from syncvar.transports.curve import link_keys

                keys = (
                    None
                    if secret is None or config.encryption == "off"
                    else link_keys(secret, job_id)
                )
                self.store = RendezvousServer(endpoint, info.world_size, job_id, config, keys=keys)
            if info.local_world_size > 1 and config.shares_memory:
                self._handing = FdServer(
                    fd_socket_path(str(directory.path)), job_id, info.local_world_size, self._make
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.umask(umask)
        # Without services there is no thread: polling nothing would not wait, and take the GIL
        # from calls.
        if self.store is not None or self._handing is not None:
            self._thread = threading.Thread(target=self._serve, name="syncvar-meeting", daemon=True)
            self._thread.start()
        (directory.path / READY).touch()
        register_exit(self.end)  # registered before the context's, so it runs after it

    def end(self, patience_s: float | None = None) -> None:
        """Serve until the other ranks have left, then end. A failing rank informs them.

        Args:
            patience_s: Longest wait for the others, in seconds; None for the default at the end of
                a process.
        """
        if os.getpid() != self._process:
            return
        if self.store is not None:
            if patience_s is None:
                patience_s = 0.0 if is_failing() else self._config.rendezvous_timeout_s
            until = time.monotonic() + patience_s
            while time.monotonic() < until and self._others(self.store):
                time.sleep(_PAUSE_S)
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self._close()

    def _others(self, store: RendezvousServer) -> set[int]:
        """Return the other ranks that have joined, and have neither left nor failed."""
        coordinator = store.coordinator
        return (
            set(coordinator.handshake.members)
            - {self._info.rank}
            - set(coordinator.left)
            - set(coordinator.failed_ranks)
            - coordinator.lost
        )

    def _serve(self) -> None:
        store, handing = self.store, self._handing
        while not self._ends.is_set():
            poller = zmq.Poller()
            if store is not None:
                poller.register(store.socket, zmq.POLLIN)
            handed = handing.descriptors() if handing is not None else []
            for descriptor in (*handed, *self._pidfds):
                poller.register(descriptor, zmq.POLLIN)
            ready = [item for item, _ in poller.poll(_LOOK_MS)]
            if store is not None:
                self._serve_rendezvous(
                    store, [item for item in ready if item in self._pidfds], time.monotonic()
                )
            if handing is not None:
                for item in ready:
                    if isinstance(item, int) and item in handed:
                        handing.readable(item)
                _warn(handing.take_said())

    def _serve_rendezvous(self, store: RendezvousServer, ended: list[int], now: float) -> None:
        """Handle messages of the rendezvous and ended processes; `ended` are descriptors."""
        store.serve(now)
        coordinator = store.coordinator
        for (
            rank,
            member,
        ) in (
            coordinator.handshake.members.items()
        ):  # no launcher watches the processes of this host
            if (
                member.host_index == self._info.host_index
                and rank != self._info.rank
                and member.pid not in self._watched
            ):
                self._watched.add(member.pid)
                with contextlib.suppress(OSError):
                    self._pidfds[os.pidfd_open(member.pid)] = rank
        if (
            self._kv_store is not None
            and len(coordinator.handshake.members) == self._info.world_size
        ):
            self._kv_store.remove()
            self._kv_store = None
        for rank, reason in store.take_lost(
            now
        ).items():  # no link reports these during the handshake, or after this rank has left
            is_member = rank in coordinator.handshake.members and rank not in coordinator.left
            if rank != self._info.rank and (
                is_member or rank in coordinator.next_handshake.members
            ):
                store.ended(rank, reason, now)
        for descriptor in ended:
            rank = self._pidfds.pop(descriptor)
            os.close(descriptor)
            if rank not in coordinator.left:
                if self._handing is not None:
                    self._handing.abort()
                store.ended(rank, _ENDED, now)
        if coordinator.broken_by is not None and self._handing is not None:
            self._handing.abort(coordinator.handshake.generation)
        _warn(store.take_said())

    def _make(self, generation: int) -> tuple[CreatedSegment | None, str]:
        reason = unsupported_machine(os.uname().machine)
        if reason:
            return None, reason
        cores = min(len(os.sched_getaffinity(0)), core_quota() or sys.maxsize)
        size = self._info.local_world_size
        return create(
            self._config.shm_bytes,
            size,
            cores,
            generation,
            str(self._directory.path),
            self._info.host_index,
        )

    def _close(self) -> None:
        if self.store is not None:
            linger_s = 0.0
            # Inform them before the server closes.
            if self._ends.is_set() and self._others(self.store):
                self.store.ended(self._info.rank, exit_error_text() or _ENDED, time.monotonic())
                linger_s = self._config.shutdown_timeout_s
            self.store.close(linger_s)
        if self._handing is not None:
            self._handing.close()
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds.clear()
        if self._kv_store is not None:
            self._kv_store.remove()
        self._directory.remove()


def _warn(sentences: list[str]) -> None:
    for sentence in sentences:
        logging.getLogger("syncvar").warning("%s", sentence)
