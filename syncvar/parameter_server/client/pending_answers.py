"""Waiting for answers of servers, in programs with threads; who moves the bytes is a subclass."""

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

    A subclass says how messages are sent (`send`), calls `received` for each that comes, and `turn` at the latest when it is due.

    Args:
        client: The state machine.
        timeout_s: Seconds that a call waits.
    """

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.pushes_before = (
            0  # that this worker had made when all were started again, where that is known
        )
        self._changed = threading.Condition(threading.RLock())

    def send(self, outgoing: list[OutgoingMessage]) -> None:
        """Send messages; called with the lock held, so that their order is the client's. Must not wait."""
        raise NotImplementedError

    def request(self, parts: Mapping[int, ServerPart], *, snapshot: bool = False) -> Ticket:
        """Ask servers; returns at once.

        Args:
            parts: What each server is asked.
            snapshot: All that is read is of one version.
        """
        with self._changed:
            ask = self.client.snapshot if snapshot else self.client.request
            ticket, outgoing = ask(parts, time.monotonic())
            self.send(outgoing)
            return ticket

    def wait(self, ticket: Ticket, what: str, timeout_s: float | None = None) -> Ticket:
        """Wait until a request is over.

        Raises:
            DeadlineExceeded: It took too long.
            SyncvarError: What the request failed with.
        """
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + allowed
        with self._changed:
            while not ticket.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._overdue(ticket, what, allowed)
                self._changed.wait(min(left, max(self.turn(), 0.001)))
        return self._told(ticket)

    def _told(self, ticket: Ticket) -> Ticket:
        """Return a request that is over, or raise what it has failed with."""
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def _overdue(self, ticket: Ticket, what: str, allowed: float) -> NoReturn:
        """Give a request up; with the lock held."""
        waiting = sorted(set(ticket.parts) - set(ticket.results))
        self.send(self.client.give_up(ticket, time.monotonic()))
        raise DeadlineExceeded(
            f"{what}: no answer of server {', '.join(map(str, waiting))} within {allowed:g} s. Another worker may not "
            f"have come so far (staleness), or the server is overloaded",
            (),
            allowed,
        )

    def settle(self, what: str, timeout_s: float | None = None) -> None:
        """Wait until all that was pushed so far is acknowledged.

        Raises:
            SyncvarError: A push was refused, or took too long.
        """
        with self._changed:
            waiting = self.client.unanswered
        for ticket in waiting:
            self.wait(ticket, what, timeout_s)

    def received(self, sender: Endpoint, message: Message, arrays: Arrays) -> None:
        """Take a message; called from any thread."""
        with self._changed:
            self.send(self.client.handle(sender, message, arrays, time.monotonic()))
            self._changed.notify_all()

    def server_lost(self, server: int, reason: str) -> None:
        """Take note that a server has ended."""
        with self._changed:
            self.send(self.client.server_lost(server, time.monotonic(), reason))
            self._changed.notify_all()

    def fail(self, error: SyncvarError) -> None:
        """End all requests with an error."""
        with self._changed:
            self.client.fail(error)
            self._changed.notify_all()

    def turn(self) -> float:
        """Do what is due by time; returns in how many seconds it is due again, at most 1."""
        with self._changed:
            now = time.monotonic()
            self.send(self.client.wake(now))
            return max(0.0, min(1.0, self.client.wake_at() - now))

    def stats(self) -> dict[str, Any]:
        """Return numbers for metrics."""
        with self._changed:
            return {"resent": self.client.resent, "unanswered": len(self.client.unanswered)}
