"""A worker's side: it numbers requests, sends them again until they are answered, and takes the answers.

One request goes to all servers that it concerns at once and is over when all have answered, so a step's worth of variables costs
one round trip. After a request that reads, nothing is sent until it is over: what a program reads, it waits for anyway, and order
is plain.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import (
    ConfigError,
    GroupBroken,
    MismatchError,
    PeerLost,
    SyncvarError,
    UsageError,
    WireError,
)
from syncvar.core.process_ids import server_number
from syncvar.parameter_server.messages import SHARED, OutgoingMessage, changes, reads
from syncvar.parameter_server.server.primary import WINDOW
from syncvar.parameter_server.server.replication import PATIENCE
from syncvar.parameter_server.server.server_machine import RESEND_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.messages import Arrays, Endpoint, Message

_NEVER = float("inf")
_TOLD = {one.__name__: one for one in (ConfigError, MismatchError, UsageError)}


class ServerPart(NamedTuple):
    """What one server is asked.

    Args:
        operations: Maps with "do", see `ledger`; they name arrays by number.
        arrays: Must not change until the request is over.
    """

    operations: list[dict[str, Any]]
    arrays: Arrays = ()


class Ticket:
    """A request on its way.

    Args:
        parts: What each server is asked.
    """

    def __init__(self, parts: Mapping[int, ServerPart], transaction: int = 0) -> None:
        self.parts = dict(parts)
        self.transaction = transaction
        self.error: SyncvarError | None = None
        self.results: dict[int, list[dict[str, Any]]] = {}
        self.arrays: dict[int, Arrays] = {}
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether all servers have answered, or it has failed."""
        return self._is_over

    def array(self, server: int, operation: int) -> NDArray[Any]:
        """Return what one operation has read."""
        number: int = self.results[server][operation]["array"]
        return self.arrays[server][number]

    def fail(self, error: SyncvarError) -> None:
        """End it with an error."""
        self.error, self._is_over = error, True

    def finish(self) -> None:
        """End it."""
        self._is_over = True


class _Snapshot(Ticket):
    """A cut on its way."""

    def __init__(self, parts: Mapping[int, ServerPart]) -> None:
        super().__init__(parts)
        self.id = 0
        self.peeks = True  # nobody is held up for it
        self.marks: dict[int, dict[int, list[Any]]] = {}
        self.need: dict[int, dict[int, list[int]]] = {}
        self.version: dict[int, dict[int, list[Any]]] = {}


class _Sent(NamedTuple):
    ticket: Ticket
    outgoing: OutgoingMessage


class Client:
    """One worker's requests to all servers.

    Args:
        rank: The worker's; one beyond the ranks of the job (an evaluator) is waited for by nobody.
        incarnation: How often the worker was started before.
        servers: How many there are.
        heirs: For each server those that take its place, in order.
        resend_s: Seconds after which what has no answer is sent again.
    """

    def __init__(
        self,
        rank: int,
        incarnation: int,
        servers: int,
        heirs: Sequence[Sequence[int]] = (),
        *,
        resend_s: float = RESEND_S,
    ) -> None:
        self.rank, self.incarnation, self.servers = rank, incarnation, servers
        self.broken: SyncvarError | None = None
        self._heirs = [tuple(one) for one in heirs] or [()] * servers
        self._gone: set[int] = set()
        self._resend_s = self._patience_s = resend_s
        self._numbers = [0] * servers
        self._changed = [0] * servers
        self._transactions = 0
        self._cuts = 0
        self._waiting: deque[Ticket] = deque()
        self._sent: list[dict[int, _Sent]] = [{} for _ in range(servers)]
        self._snapshot: _Snapshot | None = None
        self._snapshots: deque[_Snapshot] = deque()  # that wait for it: one is taken at a time
        self._sent_at = 0.0
        self.resent = 0
        self.pushes = 0  # made so far, or said by whoever knows of those before

    # -- asking ------------------------------------------------------------------------------------

    def request(
        self, parts: Mapping[int, ServerPart], now: float
    ) -> tuple[Ticket, list[OutgoingMessage]]:
        """Ask servers; what is pushed to several of them is applied on all or on none.

        Args:
            parts: For each server that it concerns, what it is asked.
            now: Seconds of a monotonic clock.

        Returns:
            A ticket that is over when all have answered, and what is to be sent now.
        """
        ticket = Ticket(parts)
        if self.broken is not None:
            ticket.fail(self.broken)
            return ticket, []
        self.pushes += any(
            one["do"] == "push" for part in parts.values() for one in part.operations
        )
        self._waiting.append(ticket)
        return ticket, self._send_waiting(now)

    def snapshot(
        self, parts: Mapping[int, ServerPart], now: float
    ) -> tuple[Ticket, list[OutgoingMessage]]:
        """Read variables as they are at one version of all servers: of each worker the same pushes on every server.

        Args:
            parts: For each server, pulls.
            now: Seconds of a monotonic clock.
        """
        ticket = _Snapshot(parts)
        if self.broken is not None:
            ticket.fail(self.broken)
            return ticket, []
        self._snapshots.append(ticket)
        return ticket, self._next_cut(now)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not any(self._sent) and self._snapshot is None

    @property
    def unanswered(self) -> list[Ticket]:
        """Requests that are not over, in order."""
        found = {id(one.ticket): one.ticket for sent in self._sent for one in sent.values()}
        ordered = sorted(found.values(), key=lambda ticket: ticket.transaction)
        return [*ordered, *self._waiting]

    def handle(
        self, sender: Endpoint, message: Message, arrays: Arrays, now: float
    ) -> list[OutgoingMessage]:
        """Take one message of a server; return what is to be sent."""
        server = message["server"]
        if (
            not 0 <= server < self.servers
            or sender != self._target(server)
            or self.broken is not None
        ):
            return []
        self._patience_s = self._resend_s
        kind = message["kind"]
        if kind == "answer":
            if message["incarnation"] != self.incarnation:
                return []
            return self._answered(server, message, arrays, now)
        if kind == "lost":
            self.fail(
                PeerLost(
                    server_number(server), "", "its copy was lost too before there was another"
                )
            )
            return []
        if kind == "refused":
            if message["incarnation"] == self.incarnation:
                self.fail(
                    GroupBroken(
                        "the servers have given this worker up: another process has taken its place"
                    )
                )
            return []
        ticket = self._snapshot
        if (
            ticket is None
            or message["id"] != ticket.id
            or server not in ticket.parts
            or server in ticket.version
        ):
            return []
        if kind == "marks":
            return self._marked(ticket, server, message["marks"], now)
        if kind == "taken":
            return self._taken(ticket, server, message, arrays, now)
        if kind == "uncut":
            return self._begin_cut(ticket, now)
        raise WireError(f"a worker has no use for a message {kind!r:.40}")

    def server_lost(self, server: int, now: float, reason: str = "") -> list[OutgoingMessage]:
        """Go on without a server: who takes its place is asked again what it has not answered.

        Without a copy all requests fail with PeerLost.
        """
        before = [self._place(one) for one in range(self.servers)]
        self._gone.add(server)
        if any(self._place(one) is None for one in range(self.servers)):
            self.fail(
                PeerLost(
                    server_number(server), "", reason or "no other has a copy of its variables"
                )
            )
            return []
        self.resent += 1
        made = self._again(lambda one: before[one] != self._place(one))
        if self._snapshot is not None:
            made += self._begin_cut(self._snapshot, now)
        return made

    def give_up(self, ticket: Ticket, now: float) -> list[OutgoingMessage]:
        """Wait no longer for a request that only reads; what waits behind it is sent. Others are kept: they may be executed."""
        for sent in self._sent:
            for number in [
                number
                for number, one in sent.items()
                if one.ticket is ticket and not changes(one.outgoing.message)
            ]:
                del sent[number]
        if self._snapshot is ticket:
            self._snapshot = None
        return [*self._send_waiting(now), *self._next_cut(now)]

    def wake_at(self) -> float:
        """Return the time at which `wake` is due at the latest; infinite for never."""
        return _NEVER if self.is_idle else self._sent_at + self._patience_s

    def wake(self, now: float) -> list[OutgoingMessage]:
        """Send again what has no answer; each time nothing comes, wait twice as long: servers may be busy."""
        if self.wake_at() > now:
            return []
        self._sent_at = now
        self._patience_s = min(2 * self._patience_s, PATIENCE * self._resend_s)
        made = self._again(lambda _: True)
        if self._snapshot is not None:
            made += self._cut_messages(self._snapshot)
        self.resent += len(made)
        return made

    def fail(self, error: SyncvarError) -> None:
        """End all requests, also later ones, with an error."""
        self.broken = error
        for ticket in [
            *self.unanswered,
            *self._snapshots,
            *([] if self._snapshot is None else [self._snapshot]),
        ]:
            ticket.fail(error)
        self._waiting.clear()
        self._snapshots.clear()
        self._snapshot = None
        for sent in self._sent:
            sent.clear()

    # -- requests ----------------------------------------------------------------------------------

    def _place(self, server: int) -> int | None:
        """Return which process is in charge of a server's variables; None where they are lost."""
        if server not in self._gone:
            return server
        return next((other for other in self._heirs[server] if other not in self._gone), None)

    def _target(self, server: int) -> Endpoint:
        place = self._place(server)
        return "server", -1 if place is None else place

    def _send_waiting(self, now: float) -> list[OutgoingMessage]:
        made: list[OutgoingMessage] = []
        while self._waiting:
            if not any(self._sent):
                self._sent_at = now
            elif any(len(sent) >= WINDOW - 1 for sent in self._sent) or any(
                reads(one.outgoing.message) for sent in self._sent for one in sent.values()
            ):
                break
            made += self._sent_off(self._waiting.popleft())
        return made

    def _sent_off(self, ticket: Ticket) -> list[OutgoingMessage]:
        self._transactions += 1
        ticket.transaction = self._transactions
        before = list(self._changed)
        for server, part in ticket.parts.items():
            self._numbers[server] += 1
            if changes({"operations": part.operations}):
                self._changed[server] = self._numbers[server]
        sharing: list[int] = []
        if len(ticket.parts) > 1:
            sharing = sorted(
                server
                for server, part in ticket.parts.items()
                if any(one["do"] in SHARED for one in part.operations)
            )
        made: list[OutgoingMessage] = []
        for server, part in ticket.parts.items():
            number = self._numbers[server]
            answered = min(self._sent[server], default=number) - 1
            message = {
                "kind": "request",
                "server": server,
                "rank": self.rank,
                "incarnation": self.incarnation,
                "number": number,
                "follows": before[server],
                "answered": answered,
                "transaction": ticket.transaction,
                "parts": sharing if server in sharing else [server],
                "sent": list(self._changed),
                "operations": part.operations,
            }
            outgoing = OutgoingMessage(self._target(server), message, part.arrays)
            self._sent[server][number] = _Sent(ticket, outgoing)
            made.append(outgoing)
        return made

    def _again(self, concerns: Any) -> list[OutgoingMessage]:
        return [
            one.outgoing._replace(target=self._target(server))
            for server, sent in enumerate(self._sent)
            if concerns(server)
            for one in sent.values()
        ]

    def _answered(
        self, server: int, message: Message, arrays: Arrays, now: float
    ) -> list[OutgoingMessage]:
        sent = self._sent[server].pop(message["number"], None)
        if sent is None:
            return []
        ticket = sent.ticket
        if message["error"] and ticket.error is None:
            ticket.error = error_of(message["error"], message["reason"])
        ticket.results[server], ticket.arrays[server] = message["results"], arrays
        if len(ticket.results) == len(ticket.parts):
            ticket.finish()
        return self._send_waiting(now)

    # -- snapshots ---------------------------------------------------------------------------------

    def _next_cut(self, now: float) -> list[OutgoingMessage]:
        if self._snapshot is not None or not self._snapshots:
            return []
        self._snapshot = self._snapshots.popleft()
        return self._begin_cut(self._snapshot, now, peeks=True)

    def _begin_cut(
        self, ticket: _Snapshot, now: float, *, peeks: bool = False
    ) -> list[OutgoingMessage]:
        """Begin a cut, or begin it anew: under another number, which ends the earlier one on the servers.

        At first the servers are only asked for what they have (`peeks`): if that happens to be of one version it was one round trip.
        """
        self._cuts += 1
        ticket.id, ticket.peeks = self._cuts, peeks
        ticket.marks, ticket.need, ticket.version = {}, {}, {}
        ticket.results, ticket.arrays = {}, {}
        if not any(self._sent):
            self._sent_at = now
        return self._cut_messages(ticket)

    def _cut_messages(self, ticket: _Snapshot) -> list[OutgoingMessage]:
        """Return what the servers of a cut have not answered yet."""
        made: list[OutgoingMessage] = []
        for server, part in ticket.parts.items():
            about = {"server": server, "rank": self.rank, "id": ticket.id}
            if server in ticket.version:
                continue
            if ticket.peeks:
                made.append(
                    OutgoingMessage(
                        self._target(server),
                        {"kind": "peek", **about, "operations": part.operations},
                        part.arrays,
                    )
                )
            elif server in ticket.need:
                take = {
                    "kind": "take",
                    **about,
                    "need": ticket.need[server],
                    "operations": part.operations,
                }
                made.append(OutgoingMessage(self._target(server), take, part.arrays))
            elif server not in ticket.marks:
                made.append(OutgoingMessage(self._target(server), {"kind": "cut", **about}))
        return made

    def _marked(
        self, ticket: _Snapshot, server: int, marks: dict[int, list[Any]], now: float
    ) -> list[OutgoingMessage]:
        if ticket.marks.get(server) == marks and server in ticket.need:
            return []  # an earlier answer that came twice
        ticket.marks[server] = marks
        if len(ticket.marks) < len(ticket.parts):
            return []
        needs = {one: _needed(one, ticket.marks) for one in ticket.parts}
        changed = {one for one in ticket.parts if ticket.need.get(one) != needs[one]}
        if not changed.isdisjoint(ticket.version):
            return self._begin_cut(ticket, now)
        ticket.need = needs
        return [
            one for one in self._cut_messages(ticket) if one.message["server"] in {server, *changed}
        ]

    def _taken(
        self, ticket: _Snapshot, server: int, message: Message, arrays: Arrays, now: float
    ) -> list[OutgoingMessage]:
        ticket.version[server] = message["marks"]
        ticket.arrays[server] = arrays
        ticket.results[server] = message["results"]
        if len(ticket.version) < len(ticket.parts):
            return []
        for one, version in ticket.version.items():
            for rank, (incarnation, number) in _needed(one, ticket.version).items():
                if version.get(rank, [0, 0])[:2] != [incarnation, number]:
                    return self._begin_cut(
                        ticket, now
                    )  # one of them had to go on for another cut meanwhile
        self._snapshot = None
        ticket.finish()
        return self._next_cut(now)


def _needed(server: int, marks: dict[int, dict[int, list[Any]]]) -> dict[int, list[int]]:
    """Return how far a server has to go for each worker, so that it has all that any of the servers knows of."""
    need: dict[int, list[int]] = {}
    for one, workers in marks.items():
        for rank, (incarnation, executed, *sent) in workers.items():
            number = executed if one == server else (sent[server] if sent else 0)
            need[rank] = max(need.get(rank, [0, 0]), [incarnation, number])
    return need


def error_of(name: str, reason: str) -> SyncvarError:
    """Return the error that a server has told of."""
    kind: type[ConfigError | MismatchError | UsageError] | None = _TOLD.get(name)
    return WireError(reason) if kind is None else kind(reason)
