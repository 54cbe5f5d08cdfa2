"""The state machine of a server process: the states in its charge, and backups of others."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.parameter_server.messages import OutgoingMessage
from syncvar.parameter_server.primary import PrimaryReplica, state_of_seed
from syncvar.parameter_server.replicated_state import ReplicatedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.parameter_server.messages import Arrays, Endpoint, Message
    from syncvar.parameter_server.shard import Allocate

# Messages between two processes about a state; a takeover does not redirect them.
_BETWEEN_SERVERS = ("seed", "copy", "backup_ack", "retire")

RESEND_S = 0.5  # a message without an answer is repeated after this time; only lossy links need it


class Server:
    """One server process."""

    def __init__(
        self,
        index: int,
        workers: int,
        heirs: Sequence[Sequence[int]],
        *,
        resend_s: float = RESEND_S,
    ) -> None:
        self.index, self._workers = index, workers
        self._heirs = [tuple(one) for one in heirs]
        self._allocate: Allocate = np.empty
        self._resend_s = resend_s
        self._ended: set[int] = set()
        # Servers whose backup is new here; the caller reads and clears it.
        self.new_copies: list[int] = []
        state = ReplicatedState(index, workers)
        self.primaries = {index: PrimaryReplica(index, state, self._backup_of(index), resend_s)}
        self.copies = {
            server: ReplicatedState(server, workers)
            for server, others in enumerate(self._heirs)
            if others[:1] == (index,)
        }
        self._sources = {server: server for server in self.copies}  # who sends a backup's entries
        self._early: dict[int, dict[int, tuple[Message, Arrays]]] = {
            server: {} for server in self.copies
        }

    def use_allocator(self, allocate: Allocate) -> None:
        """Use another allocator for shards and for results of reads; before the first message."""
        self._allocate = allocate
        primaries = [primary.ledger for primary in self.primaries.values()]
        for ledger in (*primaries, *self.copies.values()):
            ledger.allocate = allocate

    def handle(
        self, sender: Endpoint, message: Message, arrays: Arrays, now: float
    ) -> list[OutgoingMessage]:
        """Take one message; return the messages to send."""
        kind = message["kind"]
        if kind == "copy":
            return self._copy(sender, message, arrays)
        if sender[0] == "server" and sender[1] in self._ended:
            return []  # a late message of a server that has failed
        if kind == "seed":
            return self._seed(sender, message, arrays)
        about = message["home"] if kind == "vote" else message["server"]
        primary = self.primaries.get(about)
        if primary is None:
            if sender[0] == "worker" and self._home_of(about) == self.index:
                # This server is in charge, and had no backup when the primary failed.
                return [OutgoingMessage(sender, {"kind": "state_lost", "server": about})]
            return []  # not in charge yet: the sender repeats it
        return self._dispatch(primary.handle(message, arrays, now), now)

    def worker_lost(self, rank: int, incarnation: int, now: float) -> list[OutgoingMessage]:
        """End a worker's incarnation: refuse its messages, and abort incomplete transactions."""
        outgoing: list[OutgoingMessage] = []
        for primary in list(self.primaries.values()):
            outgoing += primary.fence(rank, incarnation + 1, now)
        return self._dispatch(outgoing, now)

    def server_lost(self, server: int, now: float) -> list[OutgoingMessage]:
        """Take over a failed server's state if the backup is here, and replace lost backups."""
        if server in self._ended or server == self.index:
            return []
        self._ended.add(server)
        outgoing: list[OutgoingMessage] = []
        for one in [one for one in self.copies if self._home_of(one) == self.index]:
            self._early.pop(one)
            self.primaries[one] = PrimaryReplica(one, self.copies.pop(one), None, self._resend_s)
        for one, primary in list(self.primaries.items()):
            outgoing += primary.copy_to(self._backup_of(one), now)
            outgoing += primary.wake(now)
        return self._dispatch(outgoing, now)

    def wake_at(self) -> float:
        """Return the time at which `wake` is due; infinite for never."""
        return min([primary.wake_at() for primary in self.primaries.values()])

    def wake(self, now: float) -> list[OutgoingMessage]:
        """Do what is due by time: repeat messages, end cuts."""
        outgoing: list[OutgoingMessage] = []
        for primary in list(self.primaries.values()):
            outgoing += primary.wake(now)
        return self._dispatch(outgoing, now)

    def stats(self) -> dict[str, Any]:
        """Return metrics of all states in charge: shards, entries, and leads of reads."""
        ledgers = [primary.ledger for primary in self.primaries.values()]
        ahead: collections.Counter[int] = collections.Counter()
        for ledger in ledgers:
            ahead.update(ledger.staleness)
        return {
            "shards": sum(len(ledger.shards) for ledger in ledgers),
            "entries": sum(ledger.entries for ledger in ledgers),
            "staleness": dict(ahead),
        }

    def _home_of(self, server: int) -> int:
        if server not in self._ended:
            return server
        return next((other for other in self._heirs[server] if other not in self._ended), server)

    def _backup_of(self, server: int) -> int | None:
        """Return the server with the backup of a state in charge here: the next that lives."""
        alive = (one for one in self._heirs[server] if one not in self._ended and one != self.index)
        return next(alive, None)

    def _dispatch(self, outgoing: list[OutgoingMessage], now: float) -> list[OutgoingMessage]:
        """Return the messages to other processes; handle those for states in charge here."""
        result: list[OutgoingMessage] = []
        waiting = outgoing
        if len(waiting) == 1 and waiting[0].target[0] == "worker":
            return waiting
        while waiting:
            again: list[OutgoingMessage] = []
            for one in waiting:
                target, message = one.target, one.message
                if target[0] == "server" and message["kind"] not in _BETWEEN_SERVERS:
                    target = "server", self._home_of(target[1])
                if target != ("server", self.index):
                    result.append(one._replace(target=target))
                    continue
                about = message["home"] if message["kind"] == "vote" else message["server"]
                if about in self.primaries:
                    again += self.primaries[about].handle(message, one.arrays, now)
            waiting = again
        return result

    def _copy(self, sender: Endpoint, message: Message, arrays: Arrays) -> list[OutgoingMessage]:
        """Execute an entry of another server's state on the backup, in order."""
        server = message["server"]
        ledger = self.copies.get(server)
        if ledger is not None and self._sources[server] != sender[1]:
            return []  # from a server that has lost the charge
        if ledger is None:
            retired = server in self.primaries and server != self.index
            return [self._about(sender, "retire", server)] if retired else []
        early = self._early[server]
        if message["index"] > ledger.entries:
            early[message["index"]] = (message["entry"], arrays)
        while ledger.entries + 1 in early:
            ledger.execute(*early.pop(ledger.entries + 1))
        return [self._about(sender, "backup_ack", server, index=ledger.entries)]

    def _seed(self, sender: Endpoint, message: Message, arrays: Arrays) -> list[OutgoingMessage]:
        """Take a whole state, whose backup this server holds from now on."""
        server = message["server"]
        if server in self.primaries:
            return [self._about(sender, "retire", server)]
        if self._sources.get(server) != sender[1]:
            self.copies[server] = state_of_seed(server, self._workers, arrays, self._allocate)
            self._sources[server], self._early[server] = sender[1], {}
            self.new_copies.append(server)
        return [self._about(sender, "backup_ack", server, index=self.copies[server].entries)]

    @staticmethod
    def _about(sender: Endpoint, kind: str, server: int, **fields: int) -> OutgoingMessage:
        return OutgoingMessage(sender, {"kind": kind, "server": server, **fields})
