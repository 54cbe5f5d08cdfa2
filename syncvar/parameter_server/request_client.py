"""A worker's requests: `RequestBuilder` collects operations, `Client` numbers and repeats them.

One request goes to all its servers at once and is over when all have answered, so the variables of
a step cost one round trip. After a request that reads, the client sends nothing until it is over:
the program waits for the result anyway, and the order stays simple.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
from syncvar.parameter_server.primary import PATIENCE, WINDOW
from syncvar.parameter_server.server_machine import RESEND_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.messages import Arrays, Endpoint, Message
    from syncvar.parameter_server.shard import RuleKey, ShardSlots, Spec

_NEVER = float("inf")
_REPLACED = "the servers have given this worker up: another process has taken its place"
_ERRORS = {one.__name__: one for one in (ConfigError, MismatchError, UsageError)}
ResultRef = tuple[int, int]  # the position of a result: server, and number of the operation there


class ServerPart(NamedTuple):
    """The part of a request for one server; arrays must not change until the request is over."""

    operations: list[dict[str, Any]]
    arrays: Arrays = ()


class RequestBuilder:
    """Collects the operations of one request; each method returns the position of its result.

    `messages` lists the operations. Arrays must not change until the request is over.

    Example:
        >>> request = RequestBuilder()
        >>> request.pull(1, "weights/0")
        (1, 0)
        >>> request.add(1, "tick", clock=3)
        (1, 1)
        >>> sorted(request.parts())
        [1]
    """

    def __init__(self) -> None:
        self._operations: dict[int, list[dict[str, Any]]] = {}
        self._arrays: dict[int, list[NDArray[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._operations)

    def parts(self) -> dict[int, ServerPart]:
        """Return the part of each server."""
        return {
            server: ServerPart(operations, tuple(self._arrays.get(server, ())))
            for server, operations in self._operations.items()
        }

    def add(self, server: int, operation: str, **fields: Any) -> ResultRef:
        """Add an operation without arrays."""
        operations = self._operations.setdefault(server, [])
        operations.append({"op": operation, **fields})
        return server, len(operations) - 1

    def on_all(self, servers: int, operation: str, **fields: Any) -> list[ResultRef]:
        """Add an operation without arrays for each of the servers."""
        return [self.add(server, operation, **fields) for server in range(servers)]

    def create(
        self, server: int, key: str, spec: Spec, staleness: int | None, value: NDArray[Any]
    ) -> ResultRef:
        """Create a shard with a value, unless it exists."""
        index = self._array(server, value)
        return self.add(
            server, "create", key=key, value=index, staleness=staleness, **spec._asdict()
        )

    def expect(self, server: int, key: str, spec: Spec) -> ResultRef:
        """Wait until a shard exists, and compare its spec."""
        return self.add(server, "expect", key=key, **spec._asdict())

    def push(
        self,
        server: int,
        key: str,
        method: str,
        value: NDArray[Any],
        rows: NDArray[Any] | None = None,
        **step: Any,
    ) -> ResultRef:
        """Change a shard; a "step" also has `rule`, `rate` and `combine`; see `shard.Push`."""
        step |= {"method": method, "value": self._array(server, value)}
        step["rows"] = None if rows is None else self._array(server, rows)
        return self.add(server, "push", key=key, **step)

    def pull(self, server: int, key: str, rows: NDArray[Any] | None = None) -> ResultRef:
        """Read a shard, or rows of it."""
        number = None if rows is None else self._array(server, rows)
        return self.add(server, "pull", key=key, rows=number)

    def restore(
        self,
        server: int,
        key: str,
        spec: Spec,
        staleness: int | None,
        value: NDArray[Any],
        rules: Mapping[RuleKey, ShardSlots] | None = None,
    ) -> ResultRef:
        """Create or overwrite a shard, on all servers of the request or on none."""
        saved = []
        for (name, settings), one in (rules or {}).items():
            slots = {slot: self._array(server, array) for slot, array in one.slots.items()}
            saved.append([[name, dict(settings)], one.steps, slots])
        fields = {"value": self._array(server, value), "staleness": staleness, "rules": saved}
        return self.add(server, "restore", key=key, **fields, **spec._asdict())

    def slots(self, server: int, key: str, rule: RuleKey) -> ResultRef:
        """Read the slots that an optimizer keeps of a shard."""
        return self.add(server, "slots", key=key, rule=[rule[0], dict(rule[1])])

    def put(self, server: int, task: int, call: NDArray[Any]) -> ResultRef:
        """Add a task to the queue."""
        return self.add(server, "put", task=task, value=self._array(server, call))

    def finish(self, server: int, task: int, value: NDArray[Any], *, failed: bool) -> ResultRef:
        """Report the result or error of this worker's task."""
        number = self._array(server, value)
        return self.add(server, "finish", task=task, value=number, has_failed=failed)

    def _array(self, server: int, array: NDArray[Any]) -> int:
        arrays = self._arrays.setdefault(server, [])
        arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return len(arrays) - 1


class Ticket:
    """A request in progress, with its part for each server."""

    def __init__(self, parts: Mapping[int, ServerPart], transaction: int = 0) -> None:
        self.parts = dict(parts)
        self.transaction = transaction
        self.error: SyncvarError | None = None
        self.results: dict[int, list[dict[str, Any]]] = {}
        self.arrays: dict[int, Arrays] = {}
        self.is_over = False  # whether all servers have answered, or the request has failed

    def array(self, server: int, operation: int) -> NDArray[Any]:
        """Return the array that one operation has read."""
        number: int = self.results[server][operation]["array"]
        return self.arrays[server][number]

    def fail(self, error: SyncvarError) -> None:
        """End the request with an error."""
        self.error, self.is_over = error, True

    def finish(self) -> None:
        """End the request."""
        self.is_over = True


class _Snapshot(Ticket):
    """A snapshot in progress."""

    def __init__(self, parts: Mapping[int, ServerPart]) -> None:
        super().__init__(parts)
        self.id = 0
        self.peeks = True  # the first attempt, which does not stop the servers
        self.marks: dict[int, dict[int, list[Any]]] = {}
        self.need: dict[int, dict[int, list[int]]] = {}
        self.version: dict[int, dict[int, list[Any]]] = {}


class _Sent(NamedTuple):
    ticket: Ticket
    outgoing: OutgoingMessage


class Client:
    """One worker's requests to all servers."""

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
        self._ended: set[int] = set()
        self._resend_s = self._patience_s = resend_s
        self._numbers = [0] * servers
        self._changed = [0] * servers
        self._transactions = 0
        self._cuts = 0
        self._waiting: deque[Ticket] = deque()
        self._sent: list[dict[int, _Sent]] = [{} for _ in range(servers)]
        self._snapshot: _Snapshot | None = None
        self._snapshots: deque[_Snapshot] = deque()  # waiting; one runs at a time
        self._sent_at = 0.0
        self.resent = 0
        self.pushes = 0  # of all incarnations, where earlier ones are known

    # -- requests ----------------------------------------------------------------------------------

    def request(
        self, parts: Mapping[int, ServerPart], now: float
    ) -> tuple[Ticket, list[OutgoingMessage]]:
        """Send a request; its pushes are applied on all of its servers or on none."""
        ticket = Ticket(parts)
        if self.broken is not None:
            ticket.fail(self.broken)
            return ticket, []
        operations = [one for part in parts.values() for one in part.operations]
        self.pushes += any(one["op"] == "push" for one in operations)
        self._waiting.append(ticket)
        return ticket, self._send_waiting(now)

    def snapshot(
        self, parts: Mapping[int, ServerPart], now: float
    ) -> tuple[Ticket, list[OutgoingMessage]]:
        """Send pulls that read one version: the same pushes of each worker on all servers."""
        ticket = _Snapshot(parts)
        if self.broken is not None:
            ticket.fail(self.broken)
            return ticket, []
        self._snapshots.append(ticket)
        return ticket, self._next_cut(now)

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
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
        """Take one message of a server; return the messages to send."""
        server = message["server"]
        is_from_server = 0 <= server < self.servers and sender == self._target(server)
        if not is_from_server or self.broken is not None:
            return []
        self._patience_s = self._resend_s
        kind = message["kind"]
        if kind == "answer":
            if message["incarnation"] != self.incarnation:
                return []
            return self._answered(server, message, arrays, now)
        if kind == "state_lost":
            reason = "its copy was lost too before there was another"
            self.fail(PeerLost(server_number(server), "", reason))
            return []
        if kind == "incarnation_ended":
            if message["incarnation"] == self.incarnation:
                self.fail(GroupBroken(_REPLACED))
            return []
        return self._snapshot_message(server, message, arrays, now)

    def _snapshot_message(
        self, server: int, message: Message, arrays: Arrays, now: float
    ) -> list[OutgoingMessage]:
        ticket, kind = self._snapshot, message["kind"]
        if ticket is None or message["id"] != ticket.id:
            return []
        if server not in ticket.parts or server in ticket.version:
            return []
        if kind == "marks":
            return self._marked(ticket, server, message["marks"], now)
        if kind == "state":
            return self._add_state(ticket, server, message, arrays, now)
        if kind == "no_cut":
            return self._begin_cut(ticket, now)
        raise WireError(f"a worker has no use for a message {kind!r:.40}")

    def server_lost(self, server: int, now: float, reason: str = "") -> list[OutgoingMessage]:
        """Continue without a failed server: its successor gets the unanswered requests.

        Without a backup, all requests fail with PeerLost.
        """
        before = [self._home_of(one) for one in range(self.servers)]
        self._ended.add(server)
        if any(self._home_of(one) is None for one in range(self.servers)):
            reason = reason or "no other has a copy of its variables"
            self.fail(PeerLost(server_number(server), "", reason))
            return []
        self.resent += 1
        outgoing = self._again(lambda one: before[one] != self._home_of(one))
        if self._snapshot is not None:
            outgoing += self._begin_cut(self._snapshot, now)
        return outgoing

    def give_up(self, ticket: Ticket, now: float) -> list[OutgoingMessage]:
        """Stop waiting for a request that only reads, and send those behind it.

        Requests that change something stay, since servers may execute them.
        """
        for sent in self._sent:
            for number, one in list(sent.items()):
                if one.ticket is ticket and not changes(one.outgoing.message):
                    del sent[number]
        if self._snapshot is ticket:
            self._snapshot = None
        return [*self._send_waiting(now), *self._next_cut(now)]

    def wake_at(self) -> float:
        """Return the time at which `wake` is due; infinite for never."""
        return _NEVER if self.is_idle else self._sent_at + self._patience_s

    def wake(self, now: float) -> list[OutgoingMessage]:
        """Repeat requests without an answer; the interval doubles, as servers may be busy."""
        if self.wake_at() > now:
            return []
        self._sent_at = now
        self._patience_s = min(2 * self._patience_s, PATIENCE * self._resend_s)
        outgoing = self._again(lambda _: True)
        if self._snapshot is not None:
            outgoing += self._cut_messages(self._snapshot)
        self.resent += len(outgoing)
        return outgoing

    def fail(self, error: SyncvarError) -> None:
        """End all requests, also later ones, with an error."""
        self.broken = error
        running = [] if self._snapshot is None else [self._snapshot]
        for ticket in [*self.unanswered, *self._snapshots, *running]:
            ticket.fail(error)
        self._waiting.clear()
        self._snapshots.clear()
        self._snapshot = None
        for sent in self._sent:
            sent.clear()

    # -- messages ----------------------------------------------------------------------------------

    def _home_of(self, server: int) -> int | None:
        """Return the server in charge of a server's state; None if the state is lost."""
        if server not in self._ended:
            return server
        return next((other for other in self._heirs[server] if other not in self._ended), None)

    def _target(self, server: int) -> Endpoint:
        home = self._home_of(server)
        return "server", -1 if home is None else home

    def _send_waiting(self, now: float) -> list[OutgoingMessage]:
        outgoing: list[OutgoingMessage] = []
        while self._waiting:
            if not any(self._sent):
                self._sent_at = now
            elif any(len(sent) >= WINDOW - 1 for sent in self._sent) or any(
                reads(one.outgoing.message) for sent in self._sent for one in sent.values()
            ):
                break
            outgoing += self._start(self._waiting.popleft())
        return outgoing

    def _start(self, ticket: Ticket) -> list[OutgoingMessage]:
        self._transactions += 1
        ticket.transaction = self._transactions
        before = list(self._changed)
        for server, part in ticket.parts.items():
            self._numbers[server] += 1
            if changes({"operations": part.operations}):
                self._changed[server] = self._numbers[server]
        # The servers that must apply this request together.
        shared: list[int] = []
        if len(ticket.parts) > 1:
            shared = sorted(
                server
                for server, part in ticket.parts.items()
                if any(one["op"] in SHARED for one in part.operations)
            )
        messages: list[OutgoingMessage] = []
        for server, part in ticket.parts.items():
            number = self._numbers[server]
            answered = min(self._sent[server], default=number) - 1
            message = {
                "kind": "request",
                "server": server,
                "rank": self.rank,
                "incarnation": self.incarnation,
                "number": number,
                "previous_change": before[server],
                "ack": answered,
                "transaction": ticket.transaction,
                "participants": shared if server in shared else [server],
                "last_changes": list(self._changed),
                "operations": part.operations,
            }
            outgoing = OutgoingMessage(self._target(server), message, part.arrays)
            self._sent[server][number] = _Sent(ticket, outgoing)
            messages.append(outgoing)
        return messages

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
        """Begin a snapshot or repeat it, under a new number, which ends the earlier cut.

        With `peeks`, the servers only send their present state: one round trip if it fits.
        """
        self._cuts += 1
        ticket.id, ticket.peeks = self._cuts, peeks
        ticket.marks, ticket.need, ticket.version = {}, {}, {}
        ticket.results, ticket.arrays = {}, {}
        if not any(self._sent):
            self._sent_at = now
        return self._cut_messages(ticket)

    def _cut_messages(self, ticket: _Snapshot) -> list[OutgoingMessage]:
        """Return the messages of a snapshot to servers that have not answered."""
        outgoing: list[OutgoingMessage] = []
        for server, part in ticket.parts.items():
            if server in ticket.version:
                continue
            message: Message = {"server": server, "rank": self.rank, "id": ticket.id}
            arrays = part.arrays
            if ticket.peeks:
                message |= {"kind": "peek", "operations": part.operations}
            elif server in ticket.need:
                need = ticket.need[server]
                message |= {"kind": "take", "need": need, "operations": part.operations}
            elif server not in ticket.marks:
                message["kind"], arrays = "cut", ()
            else:
                continue
            outgoing.append(OutgoingMessage(self._target(server), message, arrays))
        return outgoing

    def _marked(
        self, ticket: _Snapshot, server: int, marks: dict[int, list[Any]], now: float
    ) -> list[OutgoingMessage]:
        if ticket.marks.get(server) == marks and server in ticket.need:
            return []  # a repeated answer
        ticket.marks[server] = marks
        if len(ticket.marks) < len(ticket.parts):
            return []
        needs = {one: _needed(one, ticket.marks) for one in ticket.parts}
        changed = {one for one in ticket.parts if ticket.need.get(one) != needs[one]}
        if not changed.isdisjoint(ticket.version):
            return self._begin_cut(ticket, now)
        ticket.need = needs
        concerned = {server, *changed}
        return [one for one in self._cut_messages(ticket) if one.message["server"] in concerned]

    def _add_state(
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
                    # Another cut has advanced this server meanwhile.
                    return self._begin_cut(ticket, now)
        self._snapshot = None
        ticket.finish()
        return self._next_cut(now)


def _needed(server: int, marks: dict[int, dict[int, list[Any]]]) -> dict[int, list[int]]:
    """Return rank -> change up to which a server must execute to miss nothing of any server."""
    need: dict[int, list[int]] = {}
    for one, workers in marks.items():
        for rank, (incarnation, executed, *sent) in workers.items():
            number = executed if one == server else (sent[server] if sent else 0)
            need[rank] = max(need.get(rank, [0, 0]), [incarnation, number])
    return need


def error_of(name: str, reason: str) -> SyncvarError:
    """Return the error in an answer."""
    error: type[ConfigError | MismatchError | UsageError] | None = _ERRORS.get(name)
    return WireError(reason) if error is None else error(reason)
