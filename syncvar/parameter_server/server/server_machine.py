"""A server process: the ledger that it is in charge of, and copies of others' ledgers, of which it takes charge when it must."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.parameter_server.messages import OutgoingMessage
from syncvar.parameter_server.server.primary import PrimaryReplica
from syncvar.parameter_server.server.replicated_state import ReplicatedState
from syncvar.parameter_server.server.replication import ledger_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.parameter_server.messages import Arrays, Endpoint, Message
    from syncvar.parameter_server.server.shard import Room

_BETWEEN_SERVERS = (
    "seed",
    "copy",
    "copied",
    "retired",
)  # these are about a ledger, and for one process

RESEND_S = 0.5
"""Seconds after which what has no answer is sent again; links that lose nothing never come to it."""


class Server:
    """One server process.

    Args:
        index: Which server.
        workers: Ranks of the job.
        heirs: For each server those that take its place, in order; the first of them that lives holds a copy of its ledger.
        resend_s: See `RESEND_S`.

    Attributes:
        new_copies: Servers of whose ledgers this one has got the copy since somebody has looked, and emptied it.

    Example:
        >>> server = Server(0, workers=1, heirs=[()])
        >>> tick = {"do": "tick", "clock": 1}
        >>> request = {"kind": "request", "server": 0, "rank": 0, "incarnation": 0, "number": 1, "follows": 0, "answered": 0, "transaction": 1,
        ...            "parts": [0], "sent": [1], "operations": [tick]}
        >>> [outgoing.target for outgoing in server.handle(("worker", 0), request, (), now=0.0)]
        [('worker', 0)]
    """

    def __init__(
        self,
        index: int,
        workers: int,
        heirs: Sequence[Sequence[int]],
        *,
        resend_s: float = RESEND_S,
    ) -> None:
        self.index = index
        self._workers = workers
        self._heirs = [tuple(one) for one in heirs]
        self._room: Room = np.empty
        self._resend_s = resend_s
        self._gone: set[int] = set()
        self.new_copies: list[int] = []  # of which the others have to be told
        self.primaries = {
            index: PrimaryReplica(
                index, ReplicatedState(index, workers), self._mirror_of(index), resend_s
            )
        }
        self.copies = {
            server: ReplicatedState(server, workers)
            for server, others in enumerate(self._heirs)
            if others[:1] == (index,)
        }
        self._sources = {
            server: server for server in self.copies
        }  # who sends the entries of a copy
        self._early: dict[int, dict[int, tuple[Message, Arrays]]] = {
            server: {} for server in self.copies
        }

    def read_into(self, room: Room) -> None:
        """Let shards, and what workers read, be put into arrays that `room` makes, by their shape and dtype; from the beginning."""
        self._room = room
        for ledger in (
            *(primary.ledger for primary in self.primaries.values()),
            *self.copies.values(),
        ):
            ledger.room = room

    def handle(
        self, sender: Endpoint, message: Message, arrays: Arrays, now: float
    ) -> list[OutgoingMessage]:
        """Take one message; return what is to be sent.

        Args:
            sender: Who sent it, as the link knows it.
            message: As `message_of` gives it.
            arrays: Its arrays; kept, so they must not change afterwards.
            now: Seconds of a monotonic clock.
        """
        kind = message["kind"]
        if kind == "copy":
            return self._copy(sender, message, arrays)
        if sender[0] == "server" and sender[1] in self._gone:
            return []  # what it said before it was given up may be late
        if kind == "seed":
            return self._seed(sender, message, arrays)
        about = message["home"] if kind == "vote" else message["server"]
        primary = self.primaries.get(about)
        if primary is None:
            if (
                sender[0] == "worker" and self._home_of(about) == self.index
            ):  # it would be here, if there were a copy
                return [OutgoingMessage(sender, {"kind": "lost", "server": about})]
            return []  # not in charge (yet): it is sent again
        return self._settled(primary.handle(message, arrays, now), now)

    def worker_lost(self, rank: int, incarnation: int, now: float) -> list[OutgoingMessage]:
        """Note that an incarnation of a worker has ended: nothing of it is executed any more, and nobody waits for it.

        A transaction of it that had not come to all its servers is given up on all.
        """
        made: list[OutgoingMessage] = []
        for primary in list(self.primaries.values()):
            made += primary.fence(rank, incarnation + 1, now)
        return self._settled(made, now)

    def server_lost(self, server: int, now: float) -> list[OutgoingMessage]:
        """Note that another server has ended; take its place, if this one holds the copy, and copy again what had a copy there."""
        if server in self._gone or server == self.index:
            return []
        self._gone.add(server)
        made: list[OutgoingMessage] = []
        for one in [one for one in self.copies if self._home_of(one) == self.index]:
            self._early.pop(one)
            self.primaries[one] = PrimaryReplica(one, self.copies.pop(one), None, self._resend_s)
        for one, primary in list(self.primaries.items()):
            made += primary.copy_to(self._mirror_of(one), now)
            made += primary.wake(now)
        return self._settled(made, now)

    def wake_at(self) -> float:
        """Return the time at which `wake` is due at the latest; infinite for never."""
        return min([primary.wake_at() for primary in self.primaries.values()])

    def wake(self, now: float) -> list[OutgoingMessage]:
        """Do what is due by time alone: send again, give up."""
        made: list[OutgoingMessage] = []
        for primary in list(self.primaries.values()):
            made += primary.wake(now)
        return self._settled(made, now)

    def stats(self) -> dict[str, Any]:
        """Return numbers for metrics: of all ledgers here, shards, entries, and how far reads were ahead of the slowest worker."""
        ahead: dict[int, int] = {}
        for primary in self.primaries.values():
            for ticks, reads in primary.ledger.staleness.items():
                ahead[ticks] = ahead.get(ticks, 0) + reads
        ledgers = [primary.ledger for primary in self.primaries.values()]
        return {
            "shards": sum(len(ledger.shards) for ledger in ledgers),
            "entries": sum(ledger.entries for ledger in ledgers),
            "staleness": ahead,
        }

    def _home_of(self, server: int) -> int:
        """Return which process is in charge of a server's ledger."""
        if server not in self._gone:
            return server
        return next((other for other in self._heirs[server] if other not in self._gone), server)

    def _mirror_of(self, server: int) -> int | None:
        """Return who holds the copy of a ledger in charge of which is this one: the next that lives."""
        return next(
            (
                other
                for other in self._heirs[server]
                if other not in self._gone and other != self.index
            ),
            None,
        )

    def _settled(self, outgoing: list[OutgoingMessage], now: float) -> list[OutgoingMessage]:
        """Return what goes to other processes; what is for a ledger in charge of which is this one is handed over."""
        made: list[OutgoingMessage] = []
        waiting = outgoing
        if len(waiting) == 1 and waiting[0].target[0] == "worker":
            return waiting
        while waiting:
            again: list[OutgoingMessage] = []
            for one in waiting:
                target = one.target
                if target[0] == "server":
                    target = (
                        "server",
                        target[1]
                        if one.message["kind"] in _BETWEEN_SERVERS
                        else self._home_of(target[1]),
                    )
                if target != ("server", self.index):
                    made.append(one._replace(target=target))
                    continue
                about = (
                    one.message["home"] if one.message["kind"] == "vote" else one.message["server"]
                )
                if about in self.primaries:
                    again += self.primaries[about].handle(one.message, one.arrays, now)
            waiting = again
        return made

    def _copy(self, sender: Endpoint, message: Message, arrays: Arrays) -> list[OutgoingMessage]:
        """Execute an entry of another server's ledger, in order."""
        server = message["server"]
        ledger = self.copies.get(server)
        if ledger is not None and self._sources[server] != sender[1]:
            return []  # of one whose place another has taken
        if ledger is None:
            retired = server in self.primaries and server != self.index
            return (
                [OutgoingMessage(sender, {"kind": "retired", "server": server})] if retired else []
            )
        early = self._early[server]
        if message["index"] > ledger.entries:
            early[message["index"]] = (message["entry"], arrays)
        while ledger.entries + 1 in early:
            ledger.execute(*early.pop(ledger.entries + 1))
        return [
            OutgoingMessage(sender, {"kind": "copied", "server": server, "index": ledger.entries})
        ]

    def _seed(self, sender: Endpoint, message: Message, arrays: Arrays) -> list[OutgoingMessage]:
        """Take a whole ledger, of which this server is to hold the copy from now on."""
        server = message["server"]
        if server in self.primaries:
            return [OutgoingMessage(sender, {"kind": "retired", "server": server})]
        if self._sources.get(server) != sender[1]:
            self.copies[server] = ledger_of(server, self._workers, arrays, self._room)
            self._sources[server], self._early[server] = sender[1], {}
            self.new_copies.append(server)
        return [
            OutgoingMessage(
                sender, {"kind": "copied", "server": server, "index": self.copies[server].entries}
            )
        ]
