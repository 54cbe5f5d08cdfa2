"""The base class of sessions with servers: a client with a lock; subclasses move the messages."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from syncvar.core.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.errors import SyncvarError
    from syncvar.parameter_server.client.request_client import Client, ServerPart, Ticket
    from syncvar.parameter_server.messages import Arrays, Endpoint, Message, OutgoingMessage


class Session:
    """A worker's client, with a lock.

    A subclass implements `send`, calls `received` for each message, and `turn` when it is due.
    """

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client = client
        self.timeout_s = timeout_s
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

    def wait(self, ticket: Ticket, what: str, timeout_s: float | None = None) -> Ticket:
        """Wait until a request is over; raise its error, or DeadlineExceeded."""
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + allowed
        with self._changed:
            while not ticket.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._overdue(ticket, what, allowed)
                self._changed.wait(min(left, max(self.turn(), 0.001)))
        return self._checked(ticket)

    @staticmethod
    def _checked(ticket: Ticket) -> Ticket:
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def _overdue(self, ticket: Ticket, what: str, allowed: float) -> NoReturn:
        """Give up a request; the caller holds the lock."""
        waiting = sorted(set(ticket.parts) - set(ticket.results))
        self.send(self.client.give_up(ticket, time.monotonic()))
        servers = ", ".join(map(str, waiting))
        raise DeadlineExceeded(
            f"{what}: no answer of server {servers} within {allowed:g} s. Another worker may not "
            f"have come so far (staleness), or the server is overloaded",
            (),
            allowed,
        )

    def settle(self, what: str, timeout_s: float | None = None) -> None:
        """Wait until servers have acknowledged all requests so far; raise the error of one."""
        with self._changed:
            waiting = self.client.unanswered
        for ticket in waiting:
            self.wait(ticket, what, timeout_s)

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
