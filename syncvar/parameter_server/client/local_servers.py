"""Servers inside this process, for one worker without a launcher, or for ranks as threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from syncvar.core.process_ids import failover_order
from syncvar.parameter_server.client.pending_answers import Session
from syncvar.parameter_server.client.request_client import Client
from syncvar.parameter_server.server.server_machine import Server

if TYPE_CHECKING:
    from syncvar.parameter_server.client.request_client import Ticket
    from syncvar.parameter_server.messages import Endpoint, OutgoingMessage


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

    def wait(self, ticket: Ticket, what: str, timeout_s: float | None = None) -> Ticket:
        if not ticket.is_over:
            with self._changed:
                self._servers.turn()
        return super().wait(ticket, what, timeout_s)

    def turn(self) -> float:
        return max(0.0, min(super().turn(), self._servers.turn()))
