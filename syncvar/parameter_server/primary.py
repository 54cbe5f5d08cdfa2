"""The server in charge of one replicated state: which entries it executes, and in which order.

* It executes a worker's requests in the order of their numbers. Early requests wait; repeated
  requests get their answer again.
* A transaction over several servers has two phases. Each server *stages* its part and sends a vote
  to the *home*, the lowest of these servers. With all votes, the home decides and sends the
  decision. Until then, servers execute nothing more of that worker. If the worker's incarnation has
  ended, the home aborts an undecided transaction: one of its parts was never sent.
* With a backup, it sends nothing before the backup has executed the entries that the message
  depends on (`ReplicationStream`). A new backup, after a failure, first gets the whole state
  (`seed`) and then every entry; messages wait for the seed too.
* A snapshot first asks all servers for their present state (`peek`), with *marks*: the last change
  of each worker. If the marks fit together, that is one version. Else the servers stop executing
  and send their marks (`cut`). The worker computes the earliest state that misses nothing of any
  server; the servers advance to it and send it (`take`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import SyncvarError, error_message
from syncvar.parameter_server.messages import OutgoingMessage, changes, reads
from syncvar.parameter_server.replicated_state import ReplicatedState, WorkerRequest, is_about
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from syncvar.parameter_server.messages import Arrays, Message
    from syncvar.parameter_server.replicated_state import WorkerState
    from syncvar.parameter_server.shard import Allocate

PATIENCE = 16  # factor up to which the interval between repeated messages doubles
WINDOW = 64  # unanswered requests of a worker; a server keeps no more

_NEVER = float("inf")
_FREEZE_S = 5.0  # a cut without a `take` ends after this time
_LOST = "its worker was lost before all of it was sent"


class ReplicationStream:
    """The entries of one state on their way to the backup, and the messages that wait for it."""

    def __init__(self, server: int, entries: int, backup: int | None, resend_s: float) -> None:
        self.backup, self._server = backup, server
        self._resend_s = self._patience_s = resend_s
        self._seed: OutgoingMessage | None = None
        self._log: deque[tuple[int, OutgoingMessage]] = deque()  # entries without confirmation
        self._logged = self._confirmed = entries
        self._sent_at = 0.0
        self._waiting: deque[tuple[int, OutgoingMessage]] = deque()
        self._out: list[OutgoingMessage] = []

    def enter(self, entry: Message, arrays: Arrays, now: float) -> None:
        """Send an entry, which has just been executed, to the backup."""
        self._logged += 1
        if self.backup is None:
            self._confirmed = self._logged
            return
        copy = {"kind": "copy", "server": self._server, "index": self._logged, "entry": entry}
        outgoing = OutgoingMessage(("server", self.backup), copy, arrays)
        if not self._log and self._seed is None:
            self._sent_at = now
        self._log.append((self._logged, outgoing))
        self._out.append(outgoing)

    def move_to(self, backup: int | None, ledger: ReplicatedState, now: float) -> None:
        """Replace the backup, which has failed, by another server or none."""
        self.backup = backup
        self._log.clear()
        if backup is None:
            self._seed, self._confirmed = None, self._logged
            return
        seed = {"kind": "seed", "server": self._server, "index": self._logged}
        self._seed = OutgoingMessage(("server", backup), seed, seed_of(ledger))
        self._sent_at, self._patience_s = now, 4 * self._resend_s  # it may be large
        self._out.append(self._seed)

    def acknowledge(self, index: int) -> None:
        """Note that the backup has executed all entries up to `index`."""
        self._confirmed, self._seed = max(self._confirmed, index), None
        self._patience_s = self._resend_s

    def enqueue(self, outgoing: OutgoingMessage) -> None:
        """Queue a message until the backup has the entries that it depends on."""
        self._waiting.append((self._logged, outgoing))

    def retire(self) -> None:
        """Drop all messages: another server is in charge."""
        self._waiting.clear()

    def wake_at(self) -> float:
        """Return the time at which `wake` is due; infinite for never."""
        is_open = self._log or self._seed is not None
        return self._sent_at + self._patience_s if is_open else float("inf")

    def wake(self, now: float) -> None:
        """Repeat what the backup has not confirmed."""
        if self.wake_at() > now:
            return
        self._sent_at = now
        self._patience_s = min(2 * self._patience_s, PATIENCE * self._resend_s)
        seeds = [] if self._seed is None else [self._seed]
        self._out += [*seeds, *(copy for _, copy in self._log)]

    def ready(self) -> list[OutgoingMessage]:
        """Return the messages that may be sent now, those to the backup first."""
        while self._log and self._log[0][0] <= self._confirmed:
            self._log.popleft()
        outgoing, self._out = self._out, []
        while self._waiting and self._waiting[0][0] <= self._confirmed:
            outgoing.append(self._waiting.popleft()[1])
        return outgoing


def seed_of(ledger: ReplicatedState) -> Arrays:
    """Return a state as arrays that do not change: one of plain data, then those it numbers."""
    arrays: list[Any] = []
    state = pack_object(_numbered(ledger.state(), arrays))
    return (np.frombuffer(state, np.uint8), *arrays)


def state_of_seed(server: int, workers: int, seed: Arrays, allocate: Allocate) -> ReplicatedState:
    """Return the state in a seed."""
    state = unpack_object(seed[0].tobytes())
    return ReplicatedState.of_state(server, workers, _resolved(state, seed[1:]), allocate)


def _numbered(value: Any, arrays: list[Any]) -> Any:
    """Return plain data in which {None: number} stands for an array, appended to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {None: len(arrays) - 1}
    if isinstance(value, dict):
        return {key: _numbered(one, arrays) for key, one in value.items()}
    if isinstance(value, tuple | list):
        parts = [_numbered(one, arrays) for one in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _resolved(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, dict):
        if None in value:
            return arrays[value[None]]
        return {key: _resolved(one, arrays) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_resolved(one, arrays) for one in value)
    return value


@dataclass
class _Cut:
    """A snapshot in progress: the time when it ends, and the request for its state, once known."""

    until: float
    take: WorkerRequest | None = None


@dataclass
class _WorkerQueue:
    """Requests of a worker that are not executed yet."""

    early: dict[int, WorkerRequest] = field(default_factory=dict)
    reading: WorkerRequest | None = None
    voted_at: float = 0.0


class PrimaryReplica:
    """One server's replicated state, executed here."""

    def __init__(
        self, server: int, ledger: ReplicatedState, backup: int | None, resend_s: float
    ) -> None:
        self.server, self.ledger = server, ledger
        self._replication = ReplicationStream(server, ledger.entries, backup, resend_s)
        self.is_retired = False
        self._resend_s = resend_s
        self._queues: dict[int, _WorkerQueue] = {}
        self._reading: set[int] = set()  # workers whose request waits until it may read
        # (rank, incarnation, transaction) -> server -> reason
        self._votes: dict[tuple[int, int, int], dict[int, str]] = {}
        self._cuts: dict[tuple[int, int], _Cut] = {}
        self.now = 0.0

    # -- messages ----------------------------------------------------------------------------------

    def handle(self, message: Message, arrays: Arrays, now: float) -> list[OutgoingMessage]:
        """Take a message for this server; return the messages to send."""
        self.now = now
        if not self.is_retired:
            kind = message["kind"]
            if kind == "request":
                self._request(WorkerRequest(message, arrays))
            elif kind == "vote":
                self._vote(message)
            elif kind == "decision":
                self._decided(message)
            elif kind == "peek":
                self._peek(WorkerRequest(message, arrays))
            elif kind == "cut":
                self._cut(message)
            elif kind == "take":
                self._take(WorkerRequest(message, arrays))
            elif kind == "backup_ack":
                self._replication.acknowledge(message["index"])
            elif kind == "retire":
                self.is_retired = True
                self._replication.retire()
        return self._replication.ready()

    @property
    def backup(self) -> int | None:
        """Server of the backup; None for no backup."""
        return self._replication.backup

    def fence(self, rank: int, incarnation: int, now: float) -> list[OutgoingMessage]:
        """Refuse all messages of a worker's earlier incarnations from now on."""
        self.now = now
        if incarnation > self.ledger.worker(rank).incarnation:
            self._fence(rank, incarnation)
        return self._replication.ready()

    def copy_to(self, backup: int | None, now: float) -> list[OutgoingMessage]:
        """Replace the backup, which has failed, by another server or none."""
        self.now = now
        if backup != self.backup:
            self._replication.move_to(backup, self.ledger, now)
        return self._replication.ready()

    def wake_at(self) -> float:
        """Return the time at which `wake` is due; infinite for never."""
        due = self._replication.wake_at()
        if not (self._cuts or self.ledger.undecided):
            return due
        times = [due, *(cut.until for cut in self._cuts.values())]
        times += [self._queue(rank).voted_at + self._resend_s for rank in self.ledger.undecided]
        return min(times)

    def wake(self, now: float) -> list[OutgoingMessage]:
        """Repeat messages without an answer, and end cuts that no worker takes."""
        self.now = now
        if self.is_retired:
            return []
        for key in [key for key, cut in self._cuts.items() if cut.until <= now]:
            del self._cuts[key]
            self._continue()
        self._replication.wake(now)
        for rank in sorted(self.ledger.undecided):
            if self._queue(rank).voted_at + self._resend_s <= now:
                self._send_vote(rank, self.ledger.worker(rank))
        return self._replication.ready()

    # -- requests ----------------------------------------------------------------------------------

    def _queue(self, rank: int) -> _WorkerQueue:
        found = self._queues.get(rank)
        if found is None:
            found = self._queues[rank] = _WorkerQueue()
        return found

    def _request(self, request: WorkerRequest) -> None:
        message = request.message
        rank, incarnation, number = message["rank"], message["incarnation"], message["number"]
        worker = self.ledger.worker(rank)
        if incarnation < worker.incarnation:
            self._answer_worker(rank, "incarnation_ended", incarnation=incarnation)
            return
        if incarnation > worker.incarnation:
            self._fence(rank, incarnation)
        if number > worker.done:
            early = self._queue(rank).early
            # Reads do not count as done, so numbers may be far beyond `done`.
            if number in early or len(early) < 2 * WINDOW:
                early[number] = request
            self._advance(rank)
        elif worker.staged is None or number < worker.staged.message["number"]:
            self._answer(request)  # again: the answer was lost

    def _advance(self, rank: int) -> None:
        worker, queue = self.ledger.worker(rank), self._queue(rank)
        while queue.early and worker.staged is None:
            numbers = [
                number
                for number, one in queue.early.items()
                if one.message["previous_change"] <= worker.done
            ]
            if not numbers:
                return
            number = min(numbers)
            request = queue.early[number]
            message = request.message
            if not changes(message):
                del queue.early[number]
                self._read_when_seen(request)
            elif len(message["participants"]) < 2 and not self._may_change(rank, number):
                return
            else:
                del queue.early[number]
                self._execute(message, request.arrays)
                if len(message["participants"]) > 1:
                    self._send_vote(rank, worker)
                else:
                    self._answer(request)

    def _answer(self, request: WorkerRequest) -> None:
        """Answer a request that is executed, once its reads may see the state."""
        message = request.message
        worker = self.ledger.worker(message["rank"])
        refusal = worker.refusals.get(message["number"])
        if refusal is not None:
            self._reply(message, refusal)
        else:
            self._read_when_seen(request)

    def _read_when_seen(self, request: WorkerRequest) -> None:
        message = request.message
        if not self.ledger.may_read(message["rank"], message["operations"]):
            queue = self._queue(message["rank"])
            if queue.reading is None or queue.reading.message["number"] <= message["number"]:
                queue.reading = request  # a lower number is a late copy of an answered request
                self._reading.add(message["rank"])
            return
        if not reads(message):
            self._reply(message)
            return
        try:
            result = self.ledger.read(message["rank"], message["operations"], request.arrays)
        except (SyncvarError, KeyError, IndexError, TypeError) as error:
            name = type(error).__name__ if isinstance(error, SyncvarError) else "WireError"
            self._reply(message, (name, error_message(error)))
        else:
            self._reply(message, None, result.results, tuple(result.arrays))

    def _reply(
        self,
        message: Message,
        refusal: tuple[str, str] | None = None,
        results: list[dict[str, Any]] | None = None,
        arrays: Arrays = (),
    ) -> None:
        error, reason = refusal or ("", "")
        fields = {name: message[name] for name in ("incarnation", "number")}
        fields |= {"error": error, "reason": reason, "results": results or []}
        self._answer_worker(message["rank"], "answer", arrays, **fields)

    def _fence(self, rank: int, incarnation: int) -> None:
        queue = self._queue(rank)
        queue.early.clear()
        queue.reading = None
        self._execute({"kind": "fence", "rank": rank, "incarnation": incarnation}, ())
        for key in [key for key in self._votes if key[0] == rank and key[1] < incarnation]:
            del self._votes[key]
        staged = self.ledger.worker(rank).staged
        if staged is not None and self._home(staged.message) == self.server:
            self._decide(staged.message, _LOST)

    # -- transactions over several servers ---------------------------------------------------------

    @staticmethod
    def _home(message: Message) -> int:
        return int(min(message["participants"]))

    def _send_vote(self, rank: int, worker: WorkerState) -> None:
        assert worker.staged is not None, "a part of a transaction is staged when it is executed"
        message = worker.staged.message
        self._queue(rank).voted_at = self.now
        refusal = self.ledger.refusal(worker.staged)
        fields = ("rank", "incarnation", "transaction", "participants")
        vote = {
            "kind": "vote",
            "home": self._home(message),
            "server": self.server,
            "reason": "" if refusal is None else refusal[1],
            **{name: message[name] for name in fields},
        }
        if vote["home"] == self.server:
            self._vote(vote)
        else:
            self._replication.enqueue(OutgoingMessage(("server", vote["home"]), vote))

    def _vote(self, vote: Message) -> None:
        rank, incarnation, transaction = vote["rank"], vote["incarnation"], vote["transaction"]
        worker = self.ledger.worker(rank)
        if transaction <= worker.decided.get(incarnation, 0):
            reason = worker.aborted.get((incarnation, transaction), "")
            self._send_decision(vote, [vote["server"]], reason)
            return
        staged = worker.staged
        is_staged = staged is not None and staged.message["incarnation"] == incarnation
        if incarnation < worker.incarnation and not is_staged:
            self._send_decision(vote, [vote["server"]], _LOST)
            return
        votes = self._votes.setdefault((rank, incarnation, transaction), {})
        votes[vote["server"]] = vote["reason"]
        if staged is None or not set(vote["participants"]) <= set(votes):
            return
        if self._may_decide(worker, staged):
            self._decide(vote, next((reason for reason in votes.values() if reason), ""))

    def _decide(self, about: Message, reason: str) -> None:
        """Decide a transaction whose home this is, and send the decision."""
        self._votes.pop((about["rank"], about["incarnation"], about["transaction"]), None)
        self._enter_decision({**about, "home": self.server}, reason)
        others = [server for server in about["participants"] if server != self.server]
        self._send_decision(about, others, reason)

    def _send_decision(self, about: Message, servers: list[int], reason: str) -> None:
        for server in servers:
            decision = {name: about[name] for name in ("rank", "incarnation", "transaction")}
            decision |= {"kind": "decision", "server": server, "reason": reason}
            self._replication.enqueue(OutgoingMessage(("server", server), decision))

    def _decided(self, decision: Message) -> None:
        worker = self.ledger.worker(decision["rank"])
        staged = worker.staged
        if staged is None or not is_about(staged.message, decision):
            return
        if self._may_decide(worker, staged):
            self._enter_decision({**decision, "home": -1}, decision["reason"])

    def _enter_decision(self, about: Message, reason: str) -> None:
        rank = about["rank"]
        staged = self.ledger.worker(rank).staged
        entry = {name: about[name] for name in ("rank", "incarnation", "transaction", "home")}
        self._execute({"kind": "decision", "reason": reason, **entry}, ())
        if staged is not None and self.ledger.worker(rank).staged is None:
            if staged.message["incarnation"] == self.ledger.worker(rank).incarnation:
                self._answer(staged)
            self._advance(rank)

    # -- snapshots ---------------------------------------------------------------------------------

    def _may_change(self, rank: int, number: int | None) -> bool:
        """Return whether the cuts allow to execute a changing request now."""
        if not self._cuts:
            return True
        incarnation = self.ledger.worker(rank).incarnation
        for cut in self._cuts.values():
            if cut.take is not None and number is not None:
                need = cut.take.message["need"].get(rank)
                if need is not None and need[0] == incarnation and number <= need[1]:
                    return True
        return False

    def _may_decide(self, worker: WorkerState, staged: WorkerRequest) -> bool:
        """Return whether the cuts allow to end a staged part; always for failed workers."""
        message = staged.message
        has_ended = message["incarnation"] < worker.incarnation
        return has_ended or self._may_change(message["rank"], message["number"])

    def _marks(self) -> dict[int, list[Any]]:
        """Return rank -> incarnation, its last change here, and its last one at each server."""
        return {
            rank: [one.incarnation, one.executed, *one.last_changes]
            for rank, one in self.ledger.workers.items()
        }

    def _peek(self, request: WorkerRequest) -> None:
        message = request.message
        if any(self._is_open(worker) for worker in map(self.ledger.worker, self.ledger.undecided)):
            self._answer_worker(message["rank"], "no_cut", id=message["id"])
        else:
            self._send_state(request, message["id"])

    @staticmethod
    def _is_open(worker: WorkerState) -> bool:
        """Return whether a failed worker's part is staged.

        Another server may have executed its part, which that server's marks do not show.
        """
        staged = worker.staged
        return staged is not None and staged.message["incarnation"] < worker.incarnation

    def _send_state(self, request: WorkerRequest, number: int) -> None:
        state = self.ledger.read(-1, request.message["operations"], request.arrays)
        fields = {"id": number, "marks": self._marks(), "results": state.results}
        self._answer_worker(request.message["rank"], "state", tuple(state.arrays), **fields)

    def _cut(self, message: Message) -> None:
        key = message["rank"], message["id"]
        if key not in self._cuts:
            if any(rank == key[0] and number > key[1] for rank, number in self._cuts):
                return  # a later cut of this worker has begun
            for earlier in [one for one in self._cuts if one[0] == key[0]]:
                del self._cuts[earlier]
            self._cuts[key] = _Cut(self.now + _FREEZE_S)
        self._send_marks(key)

    def _send_marks(self, key: tuple[int, int]) -> None:
        self._answer_worker(key[0], "marks", id=key[1], marks=self._marks())

    def _take(self, request: WorkerRequest) -> None:
        message = request.message
        key = message["rank"], message["id"]
        cut = self._cuts.get(key)
        if cut is None:
            self._answer_worker(key[0], "no_cut", id=key[1])
            return
        cut.take = request
        for rank, (incarnation, _) in message["need"].items():
            if incarnation > self.ledger.worker(rank).incarnation:
                self._fence(rank, incarnation)
        self._continue()

    def _continue(self) -> None:
        """Execute what has become possible, then finish the cuts that are reached."""
        for rank in list(self.ledger.workers):
            worker = self.ledger.workers[rank]
            if worker.staged is not None and self._may_decide(worker, worker.staged):
                self._send_vote(rank, worker)
            self._advance(rank)
        self._finish_cuts()

    def _finish_cuts(self) -> None:
        for key, cut in list(self._cuts.items()):
            if cut.take is None or key not in self._cuts:
                continue
            message = cut.take.message
            state = self._compared(message["need"])
            if state == "beyond":  # another cut has advanced this server: the worker asks anew
                cut.take = None
                self._send_marks(key)
            elif state == "there":
                del self._cuts[key]
                self._send_state(cut.take, key[1])
                self._continue()

    def _compared(self, need: dict[int, list[int]]) -> str:
        """Compare the state with the need of a cut: "there", "yet" (not there) or "beyond"."""
        state = "there"
        for rank, worker in self.ledger.workers.items():
            incarnation, number = need.get(rank, (0, 0))
            mine = worker.incarnation, worker.executed
            if mine > (incarnation, number):
                return "beyond"
            if worker.incarnation < incarnation or worker.executed < number:
                state = "yet"
            if self._is_open(worker):
                state = "yet"  # its decision follows soon
        return state

    # -- the state and its backup ------------------------------------------------------------------

    def _execute(self, entry: Message, arrays: Arrays) -> None:
        self.ledger.execute(entry, arrays)
        self._replication.enter(entry, arrays, self.now)
        for rank in sorted(self._reading):
            queue = self._queue(rank)
            waiting = queue.reading
            if waiting is None:
                self._reading.discard(rank)
            elif self.ledger.may_read(rank, waiting.message["operations"]):
                queue.reading = None
                self._reading.discard(rank)
                self._read_when_seen(waiting)
                self._advance(rank)
        if self._cuts:
            self._finish_cuts()

    def _answer_worker(self, rank: int, kind: str, arrays: Arrays = (), **fields: Any) -> None:
        message = {"kind": kind, "server": self.server, **fields}
        self._replication.enqueue(OutgoingMessage(("worker", rank), message, arrays))
