"""The server in charge of one ledger: what enters it, in which order, and what may be said about it.

* A worker's requests are executed in the order of their numbers; what comes early waits, what comes again is answered again.
* A part of a transaction over several servers is *staged*, and a vote goes to its *home*, the lowest of these servers. When all
  have voted, the home decides and tells. Until then nothing of that worker is executed after it, so that order is kept. A home
  that knows a worker's incarnation to be over gives up what is not decided: then a part of it was never sent.
* With a mirror, nothing is said before the mirror has executed what it follows from.
* A snapshot is what the servers have when they are asked (`peek`), if by how far each worker has come (`marks`) that is one version. Else
  it is a cut: the servers stop executing and tell their marks, the worker that asks computes the earliest state of all of them that
  leaves out nothing another one has, they go on to it (`take`), and tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import SyncvarError
from syncvar.parameter_server.messages import OutgoingMessage
from syncvar.parameter_server.server.replicated_state import (
    ReplicatedState,
    WorkerRequest,
    changes,
    reads,
)
from syncvar.parameter_server.server.replication import ReplicationStream

if TYPE_CHECKING:
    from syncvar.parameter_server.messages import Arrays, Message
    from syncvar.parameter_server.server.replicated_state import WorkerState

WINDOW = 64
"""So many requests of a worker may be unanswered; more than that a server does not keep."""

_NEVER = float("inf")
_FREEZE_S = 5.0  # after which a cut that nobody takes is given up


@dataclass
class _Cut:
    """A snapshot that is being taken.

    Args:
        until: When it is given up.
        take: What is wanted, once that is known, and its arrays.
    """

    until: float
    take: WorkerRequest | None = None


@dataclass
class _Held:
    """What a primary knows of a worker beside its ledger."""

    early: dict[int, WorkerRequest] = field(default_factory=dict)
    reading: WorkerRequest | None = None
    voted_at: float = 0.0


class PrimaryReplica:
    """One server's ledger, executed here.

    Args:
        server: Which server.
        ledger: Its state; new, or that of a mirror.
        mirror: Who executes the same entries; None for nobody.
        resend_s: Seconds after which what has no answer is sent again.
    """

    def __init__(
        self, server: int, ledger: ReplicatedState, mirror: int | None, resend_s: float
    ) -> None:
        self.server = server
        self.ledger = ledger
        self._copying = ReplicationStream(server, ledger.entries, mirror, resend_s)
        self.is_retired = False
        self._resend_s = resend_s
        self._held: dict[int, _Held] = {}
        self._reading: set[int] = set()  # workers that have a request that waits until it may read
        self._votes: dict[
            tuple[int, int, int], dict[int, str]
        ] = {}  # rank, incarnation, transaction -> server -> reason
        self._cuts: dict[tuple[int, int], _Cut] = {}
        self.now = 0.0

    # -- messages ----------------------------------------------------------------------------------

    def handle(self, message: Message, arrays: Arrays, now: float) -> list[OutgoingMessage]:
        """Take a message for this server; return what is to be sent."""
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
            elif kind == "copied":
                self._copying.copied(message["index"])
            elif kind == "retired":
                self.is_retired = True
                self._copying.retire()
        return self._copying.said()

    @property
    def mirror(self) -> int | None:
        """Who executes the same entries; None for nobody."""
        return self._copying.mirror

    def fence(self, rank: int, incarnation: int, now: float) -> list[OutgoingMessage]:
        """Refuse everything of a worker's earlier incarnations from now on."""
        self.now = now
        if incarnation > self.ledger.worker(rank).incarnation:
            self._fence(rank, incarnation)
        return self._copying.said()

    def copy_to(self, mirror: int | None, now: float) -> list[OutgoingMessage]:
        """Let another server be the mirror, or none, as the one before is lost."""
        self.now = now
        if mirror != self.mirror:
            self._copying.move_to(mirror, self.ledger, now)
        return self._copying.said()

    def wake_at(self) -> float:
        """Return when `wake` has something to do at the latest; infinite for never."""
        copying = self._copying.wake_at()
        if not (self._cuts or self.ledger.undecided):
            return copying
        times = [copying, *(cut.until for cut in self._cuts.values())]
        times += [self._of(rank).voted_at + self._resend_s for rank in self.ledger.undecided]
        return min(times)

    def wake(self, now: float) -> list[OutgoingMessage]:
        """Send again what has no answer, and give up cuts that nobody takes."""
        self.now = now
        if self.is_retired:
            return []
        for key in [key for key, cut in self._cuts.items() if cut.until <= now]:
            del self._cuts[key]
            self._go_on()
        self._copying.wake(now)
        for rank in sorted(self.ledger.undecided):
            if self._of(rank).voted_at + self._resend_s <= now:
                self._send_vote(rank, self.ledger.worker(rank))
        return self._copying.said()

    # -- requests ----------------------------------------------------------------------------------

    def _of(self, rank: int) -> _Held:
        found = self._held.get(rank)
        if found is None:
            found = self._held[rank] = _Held()
        return found

    def _request(self, request: WorkerRequest) -> None:
        message = request.message
        rank, incarnation, number = message["rank"], message["incarnation"], message["number"]
        worker = self.ledger.worker(rank)
        if incarnation < worker.incarnation:
            self._say(
                OutgoingMessage(
                    ("worker", rank),
                    {"kind": "refused", "server": self.server, "incarnation": incarnation},
                )
            )
            return
        if incarnation > worker.incarnation:
            self._fence(rank, incarnation)
        if number > worker.done:
            early = self._of(rank).early
            if (
                number in early or len(early) < 2 * WINDOW
            ):  # reads do not count as done: numbers may be far from that
                early[number] = request
            self._advance(rank)
        elif worker.staged is None or number < worker.staged.message["number"]:
            self._answer(request)  # again: the answer was lost

    def _advance(self, rank: int) -> None:
        """Execute what may be executed of a worker."""
        worker, held = self.ledger.worker(rank), self._of(rank)
        while held.early and worker.staged is None:
            numbers = [
                number
                for number, one in held.early.items()
                if one.message["follows"] <= worker.done
            ]
            if not numbers:
                return
            number = min(numbers)
            request = held.early[number]
            message = request.message
            if not changes(message):
                del held.early[number]
                self._read_when_seen(request)
            elif len(message["parts"]) < 2 and not self._may_change(rank, number):
                return
            else:
                del held.early[number]
                self._execute(message, request.arrays)
                if len(message["parts"]) > 1:
                    self._send_vote(rank, worker)
                else:
                    self._answer(request)

    def _answer(self, request: WorkerRequest) -> None:
        """Answer a request that is executed, as soon as what it reads may be seen."""
        message = request.message
        worker = self.ledger.worker(message["rank"])
        refused = worker.refusals.get(message["number"])
        if refused is not None:
            self._reply(message, refused)
        else:
            self._read_when_seen(request)

    def _read_when_seen(self, request: WorkerRequest) -> None:
        message = request.message
        if not self.ledger.may_read(message["rank"], message["operations"]):
            held = self._of(message["rank"])
            if held.reading is None or held.reading.message["number"] <= message["number"]:
                held.reading = request  # an earlier one was answered, and comes late
                self._reading.add(message["rank"])
            return
        if not reads(message):
            self._reply(message)
            return
        try:
            made = self.ledger.read(message["rank"], message["operations"], request.arrays)
        except (SyncvarError, KeyError, IndexError, TypeError) as error:
            name = type(error).__name__ if isinstance(error, SyncvarError) else "WireError"
            self._reply(message, (name, str(error)))
        else:
            self._reply(message, None, made.results, tuple(made.arrays))

    def _reply(
        self,
        message: Message,
        refused: tuple[str, str] | None = None,
        results: list[dict[str, Any]] | None = None,
        arrays: Arrays = (),
    ) -> None:
        error, reason = refused or ("", "")
        answer = {
            "kind": "answer",
            "server": self.server,
            "incarnation": message["incarnation"],
            "number": message["number"],
            "error": error,
            "reason": reason,
            "results": results or [],
        }
        self._say(OutgoingMessage(("worker", message["rank"]), answer, arrays))

    def _fence(self, rank: int, incarnation: int) -> None:
        held = self._of(rank)
        held.early.clear()
        held.reading = None
        self._execute({"kind": "fence", "rank": rank, "incarnation": incarnation}, ())
        for key in [key for key in self._votes if key[0] == rank and key[1] < incarnation]:
            del self._votes[key]
        staged = self.ledger.worker(rank).staged
        if staged is not None and self._home(staged.message) == self.server:
            self._decide(staged.message, "its worker was lost before all of it was sent")

    # -- transactions over several servers ---------------------------------------------------------

    @staticmethod
    def _home(message: Message) -> int:
        return int(min(message["parts"]))

    def _send_vote(self, rank: int, worker: WorkerState) -> None:
        assert worker.staged is not None, "a part of a transaction is staged when it is executed"
        message = worker.staged.message
        self._of(rank).voted_at = self.now
        refused = self.ledger.refusal(worker.staged)
        vote = {
            "kind": "vote",
            "home": self._home(message),
            "server": self.server,
            "rank": rank,
            "incarnation": message["incarnation"],
            "transaction": message["transaction"],
            "parts": message["parts"],
            "reason": "" if refused is None else refused[1],
        }
        if vote["home"] == self.server:
            self._vote(vote)
        else:
            self._say(OutgoingMessage(("server", vote["home"]), vote))

    def _vote(self, vote: Message) -> None:
        rank, incarnation, transaction = vote["rank"], vote["incarnation"], vote["transaction"]
        worker = self.ledger.worker(rank)
        if transaction <= worker.decided.get(incarnation, 0):
            self._tell(vote, [vote["server"]], worker.given_up.get((incarnation, transaction), ""))
            return
        staged = worker.staged
        if incarnation < worker.incarnation and not (
            staged is not None and staged.message["incarnation"] == incarnation
        ):
            self._tell(vote, [vote["server"]], "its worker was lost before all of it was sent")
            return
        votes = self._votes.setdefault((rank, incarnation, transaction), {})
        votes[vote["server"]] = vote["reason"]
        if (
            set(vote["parts"]) <= set(votes)
            and staged is not None
            and self._may_decide(worker, staged)
        ):
            self._decide(vote, next((reason for reason in votes.values() if reason), ""))

    def _decide(self, about: Message, reason: str) -> None:
        """Decide a transaction whose home this is, and tell the others."""
        self._votes.pop((about["rank"], about["incarnation"], about["transaction"]), None)
        self._enter_decision({**about, "home": self.server}, reason)
        self._tell(about, [server for server in about["parts"] if server != self.server], reason)

    def _tell(self, about: Message, servers: list[int], reason: str) -> None:
        for server in servers:
            decision = {
                "kind": "decision",
                "server": server,
                "rank": about["rank"],
                "incarnation": about["incarnation"],
                "transaction": about["transaction"],
                "reason": reason,
            }
            self._say(OutgoingMessage(("server", server), decision))

    def _decided(self, decision: Message) -> None:
        """Take what another server, the home, has decided."""
        staged = self.ledger.worker(decision["rank"]).staged
        if staged is None or (staged.message["incarnation"], staged.message["transaction"]) != (
            decision["incarnation"],
            decision["transaction"],
        ):
            return
        if self._may_decide(self.ledger.worker(decision["rank"]), staged):
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
        """Return whether a request that changes something may be executed now, whatever cut is being taken."""
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
        """Return whether a staged part may be applied or dropped now; that of a lost worker always: cuts wait for it."""
        message = staged.message
        return message["incarnation"] < worker.incarnation or self._may_change(
            message["rank"], message["number"]
        )

    def _marks(self) -> dict[int, list[Any]]:
        """Return how far each worker has come: rank -> incarnation, its last change here, and those at all servers."""
        return {
            rank: [one.incarnation, one.executed, *one.sent]
            for rank, one in self.ledger.workers.items()
        }

    def _peek(self, request: WorkerRequest) -> None:
        """Tell what there is now, and how far each worker has come."""
        message = request.message
        if any(self._is_open(worker) for worker in map(self.ledger.worker, self.ledger.undecided)):
            self._say(
                OutgoingMessage(
                    ("worker", message["rank"]),
                    {"kind": "uncut", "server": self.server, "id": message["id"]},
                )
            )
        else:
            self._say_taken(request, message["id"])

    @staticmethod
    def _is_open(worker: WorkerState) -> bool:
        """Return whether a lost worker's part is staged: another server may have it already, which its marks do not say."""
        return (
            worker.staged is not None and worker.staged.message["incarnation"] < worker.incarnation
        )

    def _say_taken(self, request: WorkerRequest, number: int) -> None:
        made = self.ledger.read(-1, request.message["operations"], request.arrays)
        taken = {
            "kind": "taken",
            "server": self.server,
            "id": number,
            "marks": self._marks(),
            "results": made.results,
        }
        self._say(OutgoingMessage(("worker", request.message["rank"]), taken, tuple(made.arrays)))

    def _cut(self, message: Message) -> None:
        key = message["rank"], message["id"]
        if key not in self._cuts:
            if any(rank == key[0] and number > key[1] for rank, number in self._cuts):
                return  # it came late
            for earlier in [one for one in self._cuts if one[0] == key[0]]:
                del self._cuts[earlier]
            self._cuts[key] = _Cut(self.now + _FREEZE_S)
        self._say_marks(key)

    def _say_marks(self, key: tuple[int, int]) -> None:
        marks = {"kind": "marks", "server": self.server, "id": key[1], "marks": self._marks()}
        self._say(OutgoingMessage(("worker", key[0]), marks))

    def _take(self, request: WorkerRequest) -> None:
        message = request.message
        key = message["rank"], message["id"]
        cut = self._cuts.get(key)
        if cut is None:
            self._say(
                OutgoingMessage(
                    ("worker", key[0]), {"kind": "uncut", "server": self.server, "id": key[1]}
                )
            )
            return
        cut.take = request
        for rank, (incarnation, _) in message["need"].items():
            if incarnation > self.ledger.worker(rank).incarnation:
                self._fence(rank, incarnation)
        self._go_on()

    def _go_on(self) -> None:
        """Execute what has become possible, then finish the cuts that have come to where they should be."""
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
            if state == "beyond":  # another cut has gone on: this one is computed anew
                cut.take = None
                self._say_marks(key)
            elif state == "there":
                del self._cuts[key]
                self._say_taken(cut.take, key[1])
                self._go_on()

    def _compared(self, need: dict[int, list[int]]) -> str:
        """Return whether the state is "there", not "yet", or "beyond" what a cut needs."""
        state = "there"
        for rank, worker in self.ledger.workers.items():
            incarnation, number = need.get(rank, (0, 0))
            if worker.incarnation > incarnation or (
                worker.incarnation == incarnation and worker.executed > number
            ):
                return "beyond"
            if worker.incarnation < incarnation or worker.executed < number:
                state = "yet"
            if self._is_open(worker):
                state = "yet"  # that is decided soon
        return state

    # -- the ledger and its mirror -----------------------------------------------------------------

    def _execute(self, entry: Message, arrays: Arrays) -> None:
        self.ledger.execute(entry, arrays)
        self._copying.enter(entry, arrays, self.now)
        for rank in sorted(self._reading):
            held = self._of(rank)
            waiting = held.reading
            if waiting is None:
                self._reading.discard(rank)
            elif self.ledger.may_read(rank, waiting.message["operations"]):
                held.reading = None
                self._reading.discard(rank)
                self._read_when_seen(waiting)
                self._advance(rank)
        if self._cuts:
            self._finish_cuts()

    def _say(self, outgoing: OutgoingMessage) -> None:
        self._copying.say(outgoing)
