"""A worker's way to the servers: who waits for an answer takes it from the sockets itself, without another thread in between.

ZeroMQ's sockets may be used by several threads one after the other, which the lock of the session sees to. Who waits does so on
the sockets' descriptors, without the lock, and looks at all sockets when one of them can be read. What comes while nobody waits
is taken by the next call, or by a thread that looks 50 times a second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.errors import SyncvarError, UsageError, WireError
from syncvar.roles import SERVER_0, is_server, mirrors_of, server_hosts
from syncvar.servers import Client, Session, frames_of, message_of
from syncvar.serving.directory import Directory, keys_of
from syncvar.serving.lending import lender_of
from syncvar.serving.links import Links

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from syncvar.config import RuntimeConfig
    from syncvar.env import RankEnvironment
    from syncvar.servers import Outgoing, Ticket
    from syncvar.servers.client import Part

__all__ = ["Edge"]

_LOOK_EVERY_S = 0.02
_LOOK_MS = 50  # another thread may have taken the sign of an arrival while it sent


class Edge(Session):
    """The session of a worker with the servers of its job.

    Args:
        environment: Who this worker is.
        config: Deadlines and limits.
        environ: `os.environ`, from which the job's secret is taken.

    Raises:
        RendezvousError: Not all servers have begun in time, or the launcher refuses this process.
    """

    def __init__(self, environment: RankEnvironment, config: RuntimeConfig, environ: MutableMapping[str, str]) -> None:
        hosts = server_hosts(environment.servers, environment.host_count)
        mirrors = [mirrors_of(server, hosts, environment.server_replicas) for server in range(environment.servers)]
        client = Client(environment.rank, environment.incarnation, environment.servers, mirrors)
        super().__init__(client, config.collective_timeout_s)
        self._config = config
        self._process = os.getpid()
        self._waiting = 0
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._descriptors = select.poll()
        self._watched: set[int] = set()
        self._context: zmq.Context[Any] = zmq.Context()
        keys = keys_of(environment, config, environ)
        self._lender = lender_of(environment, config)
        self._directory = Directory(self._context, environment, config, keys)
        self._links = Links(self._context, environment, config, keys, self._lender)
        try:
            self._directory.find()
            self._directory.await_all()
            for server, address in self._directory.addresses.items():
                self._links.connect(server, address)
            for number, reason in list(self._directory.ended.items()):
                if is_server(number):
                    self.server_lost(number - SERVER_0, reason)
            self._watch()
        except BaseException:
            self._let_go(0.0)
            raise
        self._thread = threading.Thread(target=self._look, name="syncvar-servers", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # -- the session ----------------------------------------------------------------------------------------------

    def send(self, outgoing: list[Outgoing]) -> None:
        """Send messages; called with the lock held."""
        for one in outgoing:
            self._links.send(one.target[1] + SERVER_0, frames_of(one.message, one.arrays))

    def request(self, parts: Mapping[int, Part], *, snapshot: bool = False) -> Ticket:
        """Ask servers; returns at once."""
        if os.getpid() != self._process:
            raise UsageError("this process was forked from one that uses servers, and cannot use them: start it afresh")
        with self._changed:
            if self._ends.is_set():
                raise UsageError("the servers have been left")
            self._take()
            return super().request(parts, snapshot=snapshot)

    def wait(self, ticket: Ticket, what: str, timeout_s: float | None = None) -> Ticket:
        """Wait until a request is over, and take what comes meanwhile."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        self._waiting += 1
        try:
            while True:
                with self._changed:
                    self._take()
                    due_s = self.turn()
                    left_s = deadline - time.monotonic()
                    if ticket.is_over or left_s <= 0 or self._ends.is_set():
                        break
                self._descriptors.poll(min(_LOOK_MS, 1000 * due_s + 1, 1000 * left_s + 1))
        finally:
            self._waiting -= 1
        return super().wait(ticket, what, 0.0 if not ticket.is_over and timeout_s is None else timeout_s)

    def close(self) -> None:
        """Wait until what was pushed is acknowledged, for at most `shutdown_timeout_s`, and let go. Idempotent."""
        if self._ends.is_set() or os.getpid() != self._process:
            return
        try:
            if self.client.broken is None:
                self.settle("leaving the servers", self._config.shutdown_timeout_s)
        finally:
            self._ends.set()
            if self._thread is not None:
                self._thread.join()
            with self._changed:
                self._let_go(self._config.shutdown_timeout_s)
            atexit.unregister(self.close)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Take what has come; with the lock held."""
        try:
            changes = self._directory.changes()
        except SyncvarError as error:
            self.fail(error)
            return
        for change in changes:
            server = change.number - SERVER_0
            if change.kind == "serves":
                self._links.connect(server, self._directory.addresses[server])
            elif change.kind == "ended" and is_server(change.number):
                self._links.forget(change.number)
                self.server_lost(server, change.reason)
        if changes:
            self._watch()
        for socket in self._links.sockets():
            while (came := self._links.receive(socket)) is not None:
                with contextlib.suppress(WireError):  # it is asked for again
                    self.received(("server", came.number - SERVER_0), *message_of(came.frames))

    def _watch(self) -> None:
        """Wait on the descriptors of the sockets that there are now."""
        found = {int(one.getsockopt(zmq.FD)) for one in (*self._links.sockets(), self._directory.socket)}
        for descriptor in self._watched - found:
            self._descriptors.unregister(descriptor)
        for descriptor in found - self._watched:
            self._descriptors.register(descriptor, select.POLLIN)
        self._watched = found

    def _look(self) -> None:
        while not self._ends.wait(_LOOK_EVERY_S):
            if not self._waiting:
                with self._changed:
                    self._take()
                    self.turn()

    def _let_go(self, linger_s: float) -> None:
        self._links.close(linger_s)
        self._directory.close()
        self._context.term()
        if self._lender is not None:
            self._lender.close()
