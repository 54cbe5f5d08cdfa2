"""A worker's session with the servers, and servers inside this process.

`Session` is a client with a lock; subclasses move the messages. All strategies of a worker share
one `ServerConnection`. `LocalServers` serve one worker without a launcher, or ranks as threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from syncvar.core.errors import DeadlineExceeded, SyncvarError
from syncvar.core.process_ids import failover_order
from syncvar.parameter_server.request_client import Client, RequestBuilder
from syncvar.parameter_server.server_machine import Server
from syncvar.variables.create import Names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.parameter_server.messages import Arrays, Endpoint, Message, OutgoingMessage
    from syncvar.parameter_server.request_client import ServerPart, Ticket

_log = logging.getLogger("syncvar")
_WORLD = 0


class Session:
    """A worker's client, with a lock.

    A subclass implements `send`, calls `received` for each message, and `turn` when it is due.
    """

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client, self.timeout_s = client, timeout_s
        self.pushes_before = 0  # pushes of this worker before a restart of all ranks, if known
        self._changed = threading.Condition(threading.RLock())

    def send(self, outgoing: list[OutgoingMessage]) -> None:
        """Send messages, without waiting; the lock is held, so they leave in the client's order."""
        raise NotImplementedError

    def request(self, parts: Mapping[int, ServerPart], *, snapshot: bool = False) -> Ticket:
        """Send a request; with `snapshot`, its reads see one version. Does not wait."""
        with self._changed:
            ask = self.client.snapshot if snapshot else self.client.request
            ticket, outgoing = ask(parts, time.monotonic())
            self.send(outgoing)
            return ticket

    def wait(self, ticket: Ticket, call: str, timeout_s: float | None = None) -> Ticket:
        """Wait until a request is over; raise its error, or DeadlineExceeded."""
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + allowed
        with self._changed:
            while not ticket.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._overdue(ticket, call, allowed)
                self._changed.wait(min(left, max(self.turn(), 0.001)))
        return self._checked(ticket)

    @staticmethod
    def _checked(ticket: Ticket) -> Ticket:
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def _overdue(self, ticket: Ticket, call: str, allowed: float) -> NoReturn:
        """Give up a request; the caller holds the lock."""
        waiting = sorted(set(ticket.parts) - set(ticket.results))
        self.send(self.client.give_up(ticket, time.monotonic()))
        servers = ", ".join(map(str, waiting))
        raise DeadlineExceeded(
            f"{call}: no answer of server {servers} within {allowed:g} s. Another worker may not "
            f"have come so far (staleness), or the server is overloaded",
            (),
            allowed,
        )

    def settle(self, call: str, timeout_s: float | None = None) -> None:
        """Wait until servers have acknowledged all requests so far; raise the error of one."""
        with self._changed:
            waiting = self.client.unanswered
        for ticket in waiting:
            self.wait(ticket, call, timeout_s)

    def received(self, sender: Endpoint, message: Message, arrays: Arrays) -> None:
        """Take a message; any thread may call it."""
        with self._changed:
            self.send(self.client.handle(sender, message, arrays, time.monotonic()))
            self._changed.notify_all()

    def server_lost(self, server: int, reason: str) -> None:
        """Continue without a server that has ended."""
        with self._changed:
            self.send(self.client.server_lost(server, time.monotonic(), reason))
            self._changed.notify_all()

    def fail(self, error: SyncvarError) -> None:
        """End all requests with an error."""
        with self._changed:
            self.client.fail(error)
            self._changed.notify_all()

    def turn(self) -> float:
        """Do what is due by time; return the seconds until it is due again, at most 1."""
        with self._changed:
            now = time.monotonic()
            self.send(self.client.wake(now))
            return max(0.0, min(1.0, self.client.wake_at() - now))

    def stats(self) -> dict[str, Any]:
        """Return metrics."""
        with self._changed:
            return {"resent": self.client.resent, "unanswered": len(self.client.unanswered)}


class ServerConnection:
    """This worker's connection to the servers: one for each process, or each rank of threads."""

    def __init__(self, session: Session, rank: int, workers: int) -> None:
        self.session, self.rank, self.workers = session, rank, workers
        self.count = session.client.servers
        self.names = Names()
        self.next_server = 0
        self.clock = 0
        self.restore_count = 0  # restores from checkpoints, the same number on all workers
        self.counts_barriers = False  # True if a variable has staleness 0: barriers end a step
        self.pushes: deque[tuple[Ticket, str]] = deque()
        self.lock = threading.RLock()
        if session.client.incarnation:
            self._read_progress()

    def _read_progress(self) -> None:
        """Read this worker's clock and number of pushes from the servers."""
        request = RequestBuilder()
        refs = request.on_all(self.count, "position")
        ticket = self.session.request(request.parts())
        self.session.wait(ticket, "asking servers where this worker was")
        found = [ticket.results[server][number] for server, number in refs]
        self.clock = max(self.clock, *(one["clock"] for one in found))
        self.session.client.pushes = sum(one["pushes"] for one in found)

    def resume_after_restore(self, path: str | None) -> None:
        """Continue after a restore from `path` (None: no checkpoint); warn about lost pushes."""
        self.settle("restoring", None)
        self._read_progress()
        before, self.session.pushes_before = self.session.pushes_before, 0
        restored = self.session.client.pushes
        if before > restored:
            _log.warning(
                "rank %d %s: %d of the %d pushes that it had made are lost, number %d and later",
                self.rank,
                f"goes on from {path}" if path else "begins anew, as nothing was saved",
                before - restored,
                before,
                restored + 1,
            )

    def settle(self, call: str, timeout: float | None) -> None:
        """Wait until the servers have acknowledged all pushes; raise the error of one."""
        while True:
            with self.lock:
                if not self.pushes:
                    return
                ticket, pushed = self.pushes[0]
            try:
                self.session.wait(ticket, f"{call}: {pushed}", timeout)
            finally:
                with self.lock, contextlib.suppress(ValueError):
                    self.pushes.remove((ticket, pushed))

    def before_call(self, group: int, name: str) -> None:
        """Wait for pushes before a collective; a barrier of the world ends a step."""
        if group == _WORLD and name == "barrier" and self.counts_barriers:
            request = RequestBuilder()
            request.on_all(self.count, "barrier")
            self.pushes.append((self.session.request(request.parts()), "barrier"))
        self.settle(name, None)

    def leave(self) -> None:
        """Sign this worker off: no worker waits for its clock any more."""
        with contextlib.suppress(SyncvarError):
            self.settle("leaving the servers", None)
            request = RequestBuilder()
            request.on_all(self.count, "leave")
            self.session.wait(self.session.request(request.parts()), "leaving the servers")


class LocalServers:
    """Servers of a job whose workers are all in this process."""

    def __init__(self, workers: int, servers: int = 1, replicas: int = 0) -> None:
        self.count = servers
        self.heirs = [failover_order(index, [0] * servers, replicas) for index in range(servers)]
        # One lock for all sessions, so that no thread ever holds two.
        self.changed = threading.Condition(threading.RLock())
        self._servers = {index: Server(index, workers, self.heirs) for index in range(servers)}
        self._failures: dict[int, str] = {}
        self._sessions: dict[int, Session] = {}
        self._waiting: deque[tuple[Endpoint, OutgoingMessage]] = deque()
        self._is_delivering = False

    def session(self, rank: int, timeout_s: float, incarnation: int = 0) -> Session:
        """Return a session of a worker; a later incarnation replaces the earlier one."""
        with self.changed:
            client = Client(rank, incarnation, self.count, self.heirs)
            session = self._sessions[rank] = _LocalSession(self, client, timeout_s)
            for server, reason in self._failures.items():
                session.server_lost(server, reason)
            return session

    def lose(self, server: int, reason: str = "signal 9") -> None:
        """End a server as if the system had killed its process."""
        with self.changed:
            del self._servers[server]
            self._failures[server] = reason
            for index, one in list(self._servers.items()):
                self.move(("server", index), one.server_lost(server, time.monotonic()))
            for session in self._sessions.values():
                session.server_lost(server, reason)

    def lose_worker(self, rank: int, incarnation: int = 0) -> None:
        """End an incarnation of a worker for the servers."""
        with self.changed:
            for index, one in list(self._servers.items()):
                self.move(("server", index), one.worker_lost(rank, incarnation, time.monotonic()))

    def move(self, sender: Endpoint, outgoing: list[OutgoingMessage]) -> None:
        """Deliver messages, and the messages that follow from them."""
        with self.changed:
            self._waiting += [(sender, one) for one in outgoing]
            if self._is_delivering:
                return
            self._is_delivering = True
            try:
                while self._waiting:
                    self._deliver(*self._waiting.popleft())
            finally:
                self._is_delivering = False

    def turn(self) -> float:
        """Do what is due by time; return the seconds until it is due again."""
        with self.changed:
            now = time.monotonic()
            for index, one in list(self._servers.items()):
                self.move(("server", index), one.wake(now))
            return min(one.wake_at() for one in self._servers.values()) - now

    def _deliver(self, sender: Endpoint, one: OutgoingMessage) -> None:
        kind, index = one.target
        if kind == "worker":
            if index in self._sessions:
                self._sessions[index].received(sender, one.message, one.arrays)
        elif index in self._servers:
            server = self._servers[index]
            outgoing = server.handle(sender, one.message, one.arrays, time.monotonic())
            self._waiting += [(one.target, each) for each in outgoing]


class _LocalSession(Session):
    def __init__(self, servers: LocalServers, client: Client, timeout_s: float) -> None:
        super().__init__(client, timeout_s)
        self._changed = servers.changed
        self._servers = servers

    def send(self, outgoing: list[OutgoingMessage]) -> None:
        self._servers.move(("worker", self.client.rank), outgoing)

    def wait(self, ticket: Ticket, call: str, timeout_s: float | None = None) -> Ticket:
        if not ticket.is_over:
            with self._changed:
                self._servers.turn()
        return super().wait(ticket, call, timeout_s)

    def turn(self) -> float:
        return max(0.0, min(super().turn(), self._servers.turn()))
