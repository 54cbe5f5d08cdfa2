"""A worker's session with the servers: a thread that waits for an answer reads the sockets itself.

Several threads may use the sockets one after the other, under the lock of the session. A thread
waits without the lock. Messages that arrive while no thread waits stay in the sockets until the
next call, or until a background thread looks, 50 times a second; it also flushes what is unsent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.bootstrap.job_private import keys_of
from syncvar.core.errors import InternalError, SyncvarError, UsageError, WireError
from syncvar.core.fork_cleanup import register_exit, unregister_exit
from syncvar.core.process_ids import SERVER_0, is_server
from syncvar.parameter_server.discovery import Directory, PushCounter, heirs_of, tally_path
from syncvar.parameter_server.messages import frames_of, message_of
from syncvar.parameter_server.request_client import Client
from syncvar.parameter_server.same_host_links import lender_of
from syncvar.parameter_server.server_links import ServerLinks
from syncvar.parameter_server.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.parameter_server.messages import OutgoingMessage
    from syncvar.parameter_server.request_client import ServerPart, Ticket

_POLL_EVERY_S = 0.02  # of the background thread
_WAIT_MAX_S = 0.05  # another thread may have read the message that this one waits for
_sessions: list[WorkerSession] = []  # open sessions of this process


class WorkerSession(Session):
    """The session of a worker with the servers of its job."""

    def __init__(
        self, environment: RankEnvironment, config: RuntimeConfig, environ: MutableMapping[str, str]
    ) -> None:
        heirs = heirs_of(environment)
        client = Client(environment.rank, environment.incarnation, environment.servers, heirs)
        super().__init__(client, config.collective_timeout_s)
        self._config = config
        self._process = os.getpid()
        self._waiting = 0
        self._has_failed = False  # a push has failed: `close` does not wait for others
        # Functions of a call's name and a timeout that wait for this worker's pushes; the end of
        # the script calls them.
        self.before_end: list[Callable[[str, float | None], None]] = []
        self._ends = threading.Event()
        path = tally_path(environment.socket_directory, environment.rank)
        self._push_counter = PushCounter(path, environment.generation)
        self.pushes_before = self._push_counter.before
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
            self._release(0.0)
            raise
        self._thread = threading.Thread(target=self._poll, name="syncvar-servers", daemon=True)
        self._thread.start()
        register_exit(self._close_at_exit)
        _sessions.append(self)

    # -- the session -------------------------------------------------------------------------------

    def send(self, outgoing: list[OutgoingMessage]) -> None:
        """Send messages; the caller holds the lock."""
        for one in outgoing:
            self._links.send(one.target[1] + SERVER_0, frames_of(one.message, one.arrays))

    def request(self, parts: Mapping[int, ServerPart], *, snapshot: bool = False) -> Ticket:
        """Send a request; does not wait."""
        if os.getpid() != self._process:
            raise UsageError(
                "this process was forked from one that uses servers, and cannot use them: start "
                "it afresh"
            )
        with self._changed:
            if self._ends.is_set():
                raise UsageError("the servers have been left")
            if not self.client.is_idle:
                self._receive(self._links.watching.wait(0.0))
            ticket = super().request(parts, snapshot=snapshot)
            self._push_counter.count(self.client.pushes)
            return ticket

    def wait(self, ticket: Ticket, call: str, timeout_s: float | None = None) -> Ticket:
        """Wait until a request is over, and take incoming messages meanwhile."""
        now = time.monotonic()
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = now + allowed
        ready: list[Any] = []
        self._waiting += 1
        try:
            while True:
                with self._changed:
                    if ready:
                        self._receive(ready)
                        if ticket.is_over:
                            break
                        now = time.monotonic()
                    if self.client.wake_at() <= now:
                        self.turn()
                    if ticket.is_over or self._ends.is_set():
                        break
                    if now >= deadline:
                        self._overdue(ticket, call, allowed)
                    until = min(now + _WAIT_MAX_S, self.client.wake_at(), deadline)
                ready = self._links.watching.wait(until - now)
                if not ready:
                    now = time.monotonic()
        finally:
            self._waiting -= 1
        if not ticket.is_over:
            raise UsageError("the servers have been left")
        return self._checked(ticket)

    def close(self) -> None:
        """Wait for pushes, at most `shutdown_timeout_s`, and close the sockets. Idempotent."""
        if self._ends.is_set() or os.getpid() != self._process:
            return
        try:
            if self.client.broken is None and not self._has_failed:
                self.settle("leaving the servers", self._config.shutdown_timeout_s)
        finally:
            self._ends.set()
            if self._thread is not None:
                self._thread.join()
            with self._changed:
                self._release(self._config.shutdown_timeout_s)
            unregister_exit(self._close_at_exit)
            _sessions.remove(self)

    def settle_own(self, call: str) -> None:
        """Wait until servers have acknowledged all pushes; not in a fork or a broken session."""
        if self._ends.is_set() or os.getpid() != self._process or self.client.broken is not None:
            return
        try:
            for settle in self.before_end:
                settle(call, None)
            self.settle(call)
        except SyncvarError:
            self._has_failed = True
            raise

    def _close_at_exit(self) -> None:
        # `settle_all` has raised the error, or the process fails for another reason.
        with contextlib.suppress(SyncvarError):
            self.close()

    def _receive(self, ready: list[Any]) -> None:
        """Take the messages of some sockets; the caller holds the lock."""
        try:
            self._receive_all(ready)
        except InternalError as error:  # a repeated request would bring the same message
            self.fail(error)

    def _receive_all(self, ready: list[Any]) -> None:
        for one in ready:
            if one is self._directory.socket:
                self._apply_changes()
                continue
            while (message := self._links.receive(one)) is not None:
                sender = "server", message.number - SERVER_0
                with contextlib.suppress(WireError):  # the client repeats the request
                    self.received(sender, *message_of(message.frames))
                if not self._links.may_have_more(one):
                    break

    def _apply_changes(self) -> None:
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

    def _poll(self) -> None:
        watching = self._links.watching
        while not self._ends.wait(_POLL_EVERY_S):
            while not self._waiting and not self._ends.is_set():
                ready = watching.wait(0.0)
                with self._changed:
                    self._receive(ready)
                    self.turn()
                    if not self._links.is_behind:
                        break
                watching.wait(_WAIT_MAX_S)

    def _release(self, linger_s: float) -> None:
        self._links.close(linger_s)
        self._directory.close()
        self._context.term()
        self._push_counter.close()
        if self._lender is not None:
            self._lender.close()


def settle_all() -> None:
    """Wait until servers have acknowledged all pushes of this process; raise the error of one."""
    for session in _sessions:
        session.settle_own("the end of the script")
