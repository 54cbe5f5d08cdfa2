"""A worker's way to the servers: who waits for an answer takes it from the sockets itself, without another thread in between.

The sockets may be used by several threads one after the other, which the lock of the session sees to. Who waits does so without
the lock, and looks at what has something then. What comes while nobody waits is taken by the next call, or by a thread that looks
50 times a second, and stays with what was sent until it is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.bootstrap.job_secret import keys_of
from syncvar.core.errors import InternalError, SyncvarError, UsageError, WireError
from syncvar.core.fork_cleanup import register_exit, unregister_exit
from syncvar.core.process_ids import SERVER_0, heirs_of, is_server, server_hosts
from syncvar.parameter_server.client.pending_answers import Session
from syncvar.parameter_server.client.push_counter import PushCounter, tally_path
from syncvar.parameter_server.client.request_client import Client
from syncvar.parameter_server.discovery import Directory
from syncvar.parameter_server.messages import frames_of, message_of
from syncvar.parameter_server.transport.server_links import ServerLinks
from syncvar.parameter_server.transport.shm_buffers import lender_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.parameter_server.client.request_client import ServerPart, Ticket
    from syncvar.parameter_server.messages import OutgoingMessage

_LOOK_EVERY_S = 0.02
_edges: list[WorkerSession] = []  # of this process, until they are closed
_LOOK_S = 0.05  # another thread may have taken what this one waits for


class WorkerSession(Session):
    """The session of a worker with the servers of its job.

    Args:
        environment: Who this worker is.
        config: Deadlines and limits.
        environ: `os.environ`, from which the job's secret is taken.

    Attributes:
        before_end: Called with what is being done, and None, at the end of the script: they wait for what they have pushed.

    Raises:
        RendezvousError: Not all servers have begun in time, or the launcher refuses this process.
    """

    def __init__(
        self, environment: RankEnvironment, config: RuntimeConfig, environ: MutableMapping[str, str]
    ) -> None:
        hosts = server_hosts(environment.servers, environment.host_count)
        heirs = [
            heirs_of(server, hosts, environment.server_replicas)
            for server in range(environment.servers)
        ]
        client = Client(environment.rank, environment.incarnation, environment.servers, heirs)
        super().__init__(client, config.collective_timeout_s)
        self._config = config
        self._process = os.getpid()
        self._waiting = 0
        self._is_given_up = False  # nobody waits any more for what was pushed
        self.before_end: list[Callable[[str, float | None], None]] = []
        self._ends = threading.Event()
        self._tally = PushCounter(
            tally_path(environment.socket_directory, environment.rank), environment.generation
        )
        self.pushes_before = self._tally.before
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        keys = keys_of(environment, config, environ)
        self._lender = lender_of(environment, config)
        self._directory = Directory(self._context, environment, config, keys)
        self._links = ServerLinks(self._context, environment, config, keys, self._lender)
        try:
            self._directory.find()
            self._directory.await_all()
            for server, address in self._directory.addresses.items():
                self._links.connect(server, address)
            for number, reason in list(self._directory.ended.items()):
                if is_server(number):
                    self.server_lost(number - SERVER_0, reason)
            self._links.watching.add(self._directory.socket)
        except BaseException:
            self._let_go(0.0)
            raise
        self._thread = threading.Thread(target=self._look, name="syncvar-servers", daemon=True)
        self._thread.start()
        register_exit(self._close_at_exit)
        _edges.append(self)

    # -- the session -------------------------------------------------------------------------------

    def send(self, outgoing: list[OutgoingMessage]) -> None:
        """Send messages; called with the lock held."""
        for one in outgoing:
            self._links.send(one.target[1] + SERVER_0, frames_of(one.message, one.arrays))

    def request(self, parts: Mapping[int, ServerPart], *, snapshot: bool = False) -> Ticket:
        """Ask servers; returns at once."""
        if os.getpid() != self._process:
            raise UsageError(
                "this process was forked from one that uses servers, and cannot use them: start it afresh"
            )
        with self._changed:
            if self._ends.is_set():
                raise UsageError("the servers have been left")
            if not self.client.is_idle:
                self._take(self._links.watching.wait(0.0))
            ticket = super().request(parts, snapshot=snapshot)
            self._tally.count(self.client.pushes)
            return ticket

    def wait(self, ticket: Ticket, what: str, timeout_s: float | None = None) -> Ticket:
        """Wait until a request is over, and take what comes meanwhile."""
        now = time.monotonic()
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = now + allowed
        ready: list[Any] = []
        self._waiting += 1
        try:
            while True:
                with self._changed:
                    if ready:
                        self._take(ready)
                        if ticket.is_over:
                            break
                        now = time.monotonic()
                    if self.client.wake_at() <= now:
                        self.turn()
                    if ticket.is_over or self._ends.is_set():
                        break
                    if now >= deadline:
                        self._overdue(ticket, what, allowed)
                    until = min(now + _LOOK_S, self.client.wake_at(), deadline)
                ready = self._links.watching.wait(until - now)
                if not ready:
                    now = time.monotonic()
        finally:
            self._waiting -= 1
        if not ticket.is_over:
            raise UsageError("the servers have been left")
        return self._told(ticket)

    def close(self) -> None:
        """Wait until what was pushed is acknowledged, for at most `shutdown_timeout_s`, and let go. Idempotent."""
        if self._ends.is_set() or os.getpid() != self._process:
            return
        try:
            if self.client.broken is None and not self._is_given_up:
                self.settle("leaving the servers", self._config.shutdown_timeout_s)
        finally:
            self._ends.set()
            if self._thread is not None:
                self._thread.join()
            with self._changed:
                self._let_go(self._config.shutdown_timeout_s)
            unregister_exit(self._close_at_exit)
            _edges.remove(self)

    def settle_own(self, what: str) -> None:
        """Wait until what was pushed is acknowledged; nothing in a forked copy, or where the program was told that it cannot be."""
        if not self._ends.is_set() and os.getpid() == self._process and self.client.broken is None:
            try:
                for settle in self.before_end:
                    settle(what, None)
                self.settle(what)
            except SyncvarError:
                self._is_given_up = True
                raise

    def _close_at_exit(self) -> None:
        with contextlib.suppress(
            SyncvarError
        ):  # `settle_all` has told, or the process fails for another reason
            self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _take(self, ready: list[Any]) -> None:
        """Take what has come on some sockets; with the lock held."""
        try:
            self._take_all(ready)
        except InternalError as error:  # to drop the message and ask again would bring the same one
            self.fail(error)

    def _take_all(self, ready: list[Any]) -> None:
        for one in ready:
            if one is self._directory.socket:
                self._take_changes()
                continue
            while (came := self._links.receive(one)) is not None:
                with contextlib.suppress(WireError):  # it is asked for again
                    self.received(("server", came.number - SERVER_0), *message_of(came.frames))
                if not self._links.may_have_more(one):
                    break

    def _take_changes(self) -> None:
        """Take what the launcher says of servers."""
        try:
            changes = self._directory.changes()
        except SyncvarError as error:
            self.fail(error)
            return
        self._links.watching.is_empty(self._directory.socket)
        for change in changes:
            server = change.number - SERVER_0
            if change.kind == "serves":
                self._links.connect(server, self._directory.addresses[server])
            elif change.kind == "ended" and is_server(change.number):
                self._links.forget(change.number)
                self.server_lost(server, change.reason)

    def _look(self) -> None:
        watching = self._links.watching
        while not self._ends.wait(_LOOK_EVERY_S):
            while not self._waiting and not self._ends.is_set():
                ready = watching.wait(0.0)
                with self._changed:
                    self._take(ready)
                    self.turn()
                    if not self._links.is_behind:
                        break
                watching.wait(_LOOK_S)

    def _let_go(self, linger_s: float) -> None:
        self._links.close(linger_s)
        self._directory.close()
        self._context.term()
        self._tally.close()
        if self._lender is not None:
            self._lender.close()


def settle_all() -> None:
    """Wait until what this process has pushed is acknowledged: a script that ends before would lose it, and nobody would know.

    Raises:
        SyncvarError: A push was refused, or took too long.
    """
    for edge in _edges:
        edge.settle_own("the end of the script")
