"""All that one server knows, as a machine: the same entries in the same order make the same state, on a mirror too.

Entries are maps with arrays beside them: `request` (of a worker, in its order), `decision` (about a transaction over several
servers), `fence` (a worker's incarnation ends). What a worker only reads is no entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, MismatchError, SyncvarError, WireError
from syncvar.parameter_server.operations import push_of, rule_key_of, slots_of, spec_of
from syncvar.parameter_server.server.server_rules import rule_of
from syncvar.parameter_server.server.shard import Shard, check_slots
from syncvar.parameter_server.task_queue import TaskQueue, TaskResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from syncvar.parameter_server.messages import Arrays, Message
    from syncvar.parameter_server.server.shard import Position, Room, Spec

_GIVEN_UP_MAX = 256  # others ask about the latest only: a worker has far fewer unanswered requests
_READS = frozenset(
    (
        "pull",
        "slots",
        "version",
        "expect",
        "describe",
        "task",
        "outcome",
        "drained",
        "progress",
        "where",
        "stats",
        "rule",
    )
)
_UNCHECKED = _READS | {"meet", "leave", "ask", "forget", "cancel", "close"}

SHARED = ("push", "restore", "count")
"""Operations that are executed on all servers that a request names them for, or on none."""


class WorkerRequest(NamedTuple):
    """A worker's request: its map, and its arrays."""

    message: Message
    arrays: Arrays


class Reading(NamedTuple):
    """What reading gave: a map for each operation, and the arrays that these name by number."""

    results: list[dict[str, Any]]
    arrays: list[NDArray[Any]]


@dataclass
class WorkerState:
    """What a server knows of one worker.

    Args:
        incarnation: How often it was started before; requests of earlier ones are refused.
        done: Number of its last request that changes something and was executed, refused or staged.
        takes_part: Others wait for it, where staleness is bounded.
        clock: How often it has ticked; phase: at how many barriers it was since.
        phase: See clock.
        executed: Number of its last request that changed something here.
        pushes: Its pushes that were applied here, of those to several servers only at the lowest, in all its incarnations.
        sent: For each server the number of its last request that changes something, when it sent that one.
        staged: Its part of a transaction that is not decided yet.
        refusals: Number -> what was refused, as long as the worker may ask again.
        failed: What has become of an acknowledged push of it, of which it is to be told.
        decided: Incarnation -> its last transaction that was decided here; given_up: those that were not made.
        given_up: See decided.
    """

    incarnation: int = 0
    done: int = 0
    takes_part: bool = True
    clock: int = 0
    phase: int = 0
    executed: int = 0
    pushes: int = 0
    sent: list[int] = field(default_factory=list)
    staged: WorkerRequest | None = None
    refusals: dict[int, tuple[str, str]] = field(default_factory=dict)
    failed: tuple[str, str] | None = None
    decided: dict[int, int] = field(default_factory=dict)
    given_up: dict[tuple[int, int], str] = field(default_factory=dict)


class ReplicatedState:
    """The state of one server.

    Args:
        server: Which one.
        workers: How many the job has; who has a rank beyond (an evaluator) is waited for by nobody.
    """

    def __init__(self, server: int, workers: int) -> None:
        self.server = server
        self.count = workers
        self.workers: dict[int, WorkerState] = {rank: WorkerState() for rank in range(workers)}
        self.shards: dict[str, Shard] = {}
        self.board = TaskQueue()
        self.entries = 0
        self.undecided: set[int] = set()  # workers that have a part of a transaction staged
        self._in_rounds: set[Shard] = set()  # in which pushes wait for those of other workers
        self.staleness: dict[
            int, int
        ] = {}  # how many ticks reads were ahead of the slowest -> reads
        self.room: Room = np.empty  # makes the arrays of shards, and of rows that are read

    def worker(self, rank: int) -> WorkerState:
        """Return what is known of a worker."""
        found = self.workers.get(rank)
        if found is None:
            found = self.workers[rank] = WorkerState(takes_part=False)
        return found

    def places(self) -> dict[int, Position]:
        """Return where each worker is that takes part."""
        return {
            rank: (one.clock, one.phase)
            for rank, one in self.workers.items()
            if one.takes_part and rank < self.count
        }

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data and arrays, which do not change any more."""
        workers = {
            rank: {**vars(one), "staged": None if one.staged is None else tuple(one.staged)}
            for rank, one in self.workers.items()
        }
        return {
            "workers": workers,
            "shards": {key: shard.state() for key, shard in self.shards.items()},
            "board": self.board.state(),
            "entries": self.entries,
            "staleness": dict(self.staleness),
        }

    @classmethod
    def of_state(
        cls, server: int, workers: int, state: dict[str, Any], room: Room
    ) -> ReplicatedState:
        """Return the ledger that had this state."""
        made = cls(server, workers)
        made.room, made.entries, made.staleness = room, state["entries"], state["staleness"]
        for rank, one in state["workers"].items():
            staged = one["staged"]
            made.workers[rank] = WorkerState(
                **{**one, "staged": None if staged is None else WorkerRequest(*staged)}
            )
        made.undecided = {rank for rank, one in made.workers.items() if one.staged is not None}
        made.shards = {key: Shard.of_state(shard, room) for key, shard in state["shards"].items()}
        made.board = TaskQueue.of_state(state["board"])
        made._in_rounds = {shard for shard in made.shards.values() if shard.waits}
        return made

    # -- entries -----------------------------------------------------------------------------------

    def execute(self, entry: Message, arrays: Arrays) -> None:
        """Execute one entry."""
        self.entries += 1
        kind = entry["kind"]
        if kind == "request":
            self._request(entry, arrays)
        elif kind == "decision":
            self._decision(entry)
        elif kind == "fence":
            self._fence(entry["rank"], entry["incarnation"])
        else:
            raise WireError(f"a ledger has no entry {kind!r:.40}")
        if self._in_rounds:
            places = self.places()
            for shard in list(self._in_rounds):
                if shard.settle(places):
                    self._in_rounds.discard(shard)
                self._tell_failures(shard)

    def _request(self, message: Message, arrays: Arrays) -> None:
        worker = self.worker(message["rank"])
        number = message["number"]
        worker.done = number
        if worker.refusals:
            for old in [one for one in worker.refusals if one <= message["answered"]]:
                del worker.refusals[old]
        if not worker.takes_part and message["rank"] < self.count:
            worker.takes_part = True  # it is back; it goes on where the slowest of the others is, unless it was further
            clocks = [place[0] for rank, place in self.places().items() if rank != message["rank"]]
            if clocks and min(clocks) > worker.clock:
                worker.clock, worker.phase = min(clocks), 0
        request = WorkerRequest(message, arrays)
        refused = self.refusal(request)
        if len(message["parts"]) > 1:
            worker.staged = request
            self.undecided.add(message["rank"])
            return
        if refused is not None:
            worker.refusals[number] = refused
        else:
            self._apply(worker, request)
        if worker.failed is not None:
            worker.refusals.setdefault(number, worker.failed)
            worker.failed = None

    def _tell_failures(self, shard: Shard) -> None:
        """Let workers whose pushes were acknowledged, and have failed as a round was over, be told with their next request."""
        for ranks, error, reason in shard.failures:
            for rank in ranks:
                self.worker(rank).failed = error, reason
        shard.failures.clear()

    def _decision(self, entry: Message) -> None:
        worker = self.worker(entry["rank"])
        incarnation, transaction, reason = (
            entry["incarnation"],
            entry["transaction"],
            entry["reason"],
        )
        if entry["home"] == self.server:
            worker.decided[incarnation] = max(worker.decided.get(incarnation, 0), transaction)
            if reason:
                worker.given_up[incarnation, transaction] = reason
                if len(worker.given_up) > _GIVEN_UP_MAX:
                    del worker.given_up[next(iter(worker.given_up))]
        staged = worker.staged
        if staged is None or (staged.message["incarnation"], staged.message["transaction"]) != (
            incarnation,
            transaction,
        ):
            return
        worker.staged = None
        self.undecided.discard(entry["rank"])
        if not reason:
            self._apply(worker, staged)
        elif incarnation == worker.incarnation:
            worker.refusals[staged.message["number"]] = ("ConfigError", reason)

    def _fence(self, rank: int, incarnation: int) -> None:
        worker = self.worker(rank)
        if incarnation <= worker.incarnation:
            return
        worker.incarnation, worker.done, worker.takes_part = incarnation, 0, False
        worker.executed, worker.sent = 0, []
        self.board.lose(rank)
        worker.phase += 1  # it comes back to a place where no round has begun
        worker.refusals.clear()
        worker.failed = None

    def _apply(self, worker: WorkerState, request: WorkerRequest) -> None:
        message = request.message
        if message["incarnation"] == worker.incarnation:
            worker.executed, worker.sent = message["number"], message["sent"]
        rank = message["rank"]
        if min(message["parts"]) == self.server:
            worker.pushes += any(operation["do"] == "push" for operation in message["operations"])
        for operation in message["operations"]:
            if operation["do"] in _READS:
                continue
            try:
                self._perform(rank, worker, operation, request.arrays)
            except SyncvarError as error:  # a program's rule that made the step when it was tried, before pushes of others
                if message["incarnation"] == worker.incarnation:
                    worker.refusals[message["number"]] = type(error).__name__, str(error)

    def _perform(
        self, rank: int, worker: WorkerState, operation: dict[str, Any], arrays: Arrays
    ) -> None:
        kind = operation["do"]
        if kind == "push":
            place = (
                (worker.clock, worker.phase) if worker.takes_part and rank < self.count else None
            )
            shard = self.shards[operation["key"]]
            shard.push(rank, place, push_of(operation, arrays))
            if shard.staleness == 0:
                self._in_rounds.add(shard)
        elif kind == "create":
            if operation["key"] not in self.shards:
                bound = operation["staleness"]
                self.shards[operation["key"]] = Shard(
                    spec_of(operation), arrays[operation["value"]], bound, self.room
                )
        elif kind == "restore":
            if operation["key"] not in self.shards:
                bound = operation["staleness"]
                self.shards[operation["key"]] = Shard(
                    spec_of(operation), arrays[operation["value"]], bound, self.room
                )
            self.shards[operation["key"]].restore(
                arrays[operation["value"]], slots_of(operation, arrays)
            )
        elif kind == "staleness":
            self.shards[operation["key"]].set_staleness(operation["staleness"])
            self._tell_failures(self.shards[operation["key"]])
        elif kind == "tick":
            worker.clock, worker.phase = max(worker.clock, operation["clock"]), 0
        elif kind == "meet":
            worker.phase += 1
        elif kind == "count":
            for rank_of, one in self.workers.items():
                one.pushes = operation["pushes"].get(rank_of, 0)
        elif kind == "leave":
            worker.takes_part = False
            self.board.lose(rank)
        else:
            self._post(rank, operation, arrays)

    def _post(self, rank: int, operation: dict[str, Any], arrays: Arrays) -> None:
        """Execute an operation on the board."""
        board, kind = self.board, operation["do"]
        if kind == "put":
            board.put(operation["task"], arrays[operation["value"]])
        elif kind == "ask":
            board.ask(rank)
        elif kind == "finish":
            board.finish(
                rank, operation["task"], TaskResult(operation["failed"], arrays[operation["value"]])
            )
        elif kind == "forget":
            board.forget(operation["tasks"])
        elif kind == "cancel":
            board.cancel()
        elif kind == "close":
            board.close()

    # -- checks ------------------------------------------------------------------------------------

    def refusal(self, request: WorkerRequest) -> tuple[str, str] | None:
        """Return the error and the reason why a request cannot be executed, or None; nothing is changed."""
        made: set[str] = set()
        try:
            for operation in request.message["operations"]:
                self._check(operation, request.arrays, made)
        except SyncvarError as error:
            return type(error).__name__, str(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return (
                "WireError",
                f"an operation of a request is malformed: {type(error).__name__}: {error}",
            )
        return None

    def _check(self, operation: dict[str, Any], arrays: Arrays, made: set[str]) -> None:
        kind = operation["do"]
        if kind == "push":
            if operation["key"] not in made:
                self._shard(operation).check(push_of(operation, arrays))
        elif kind in ("create", "restore"):
            spec, value = spec_of(operation), arrays[operation["value"]]
            made.add(operation["key"])
            if value.shape != spec.shape or value.dtype.name != spec.dtype:
                raise WireError(
                    f"variable {operation['key']!r}: the value is no {spec.dtype}{list(spec.shape)}"
                )
            bound = operation["staleness"]
            if bound is not None and (type(bound) is not int or bound < 0):
                raise ConfigError(f"staleness must be None or at least 0, not {bound!r}")
            if operation["key"] in self.shards:
                self._compare(operation["key"], spec)
            if kind == "restore":
                for rule, slots in slots_of(operation, arrays).items():
                    check_slots(rule, slots, value)
        elif kind == "staleness":
            self._shard(operation)
        elif kind == "tick":
            if type(operation["clock"]) is not int:
                raise WireError("a tick names the clock that it leads to")
        elif kind == "count":
            if not all(type(one) is int for one in operation["pushes"].values()):
                raise WireError("pushes are counted in whole numbers")
        elif kind in ("put", "finish"):
            if (
                type(operation["task"]) is not int
                or arrays[operation["value"]].dtype.name != "uint8"
            ):
                raise WireError(f"a task to {kind} is a number and bytes")
        elif kind not in _UNCHECKED:
            raise WireError(f"servers know no operation {kind!r:.40}")

    def _shard(self, operation: dict[str, Any]) -> Shard:
        shard = self.shards.get(operation["key"])
        if shard is None:
            raise ConfigError(f"server {self.server} holds no {operation['key']!r}")
        return shard

    def _compare(self, key: str, spec: Spec) -> None:
        mine = self.shards[key].spec
        if mine != spec:
            raise MismatchError(
                f"variable {key!r} is asked for as {spec.dtype}{list(spec.whole)} {spec.aggregation}, and there is one: "
                f"{mine.dtype}{list(mine.whole)} {mine.aggregation}. All workers make the same variables in the same order"
            )

    # -- reading -----------------------------------------------------------------------------------

    def may_read(self, rank: int, operations: Iterable[dict[str, Any]]) -> bool:
        """Return whether a worker's reads need not wait for anybody."""
        for operation in operations:
            kind = operation["do"]
            if kind == "pull":
                shard = self.shards.get(operation["key"])
                if (
                    shard is not None
                    and shard.staleness is not None
                    and not shard.may_read(rank, self.places())
                ):
                    return False
            elif kind in ("expect", "describe"):
                if operation["key"] not in self.shards:
                    return False
            elif kind in _READS and not self._is_on_board(rank, operation):
                return False
        return True

    def _is_on_board(self, rank: int, operation: dict[str, Any]) -> bool:
        """Return whether what an operation waits for on the board has come; of others, true."""
        board, kind = self.board, operation["do"]
        if kind == "task":
            return rank in board.given or board.is_closed
        if kind == "outcome":
            return board.is_over(operation["task"])
        return kind != "drained" or board.is_drained

    def read(self, rank: int, operations: Iterable[dict[str, Any]], arrays: Arrays) -> Reading:
        """Return what a request reads: an empty map for each operation that reads nothing.

        Raises:
            SyncvarError: It cannot be read.
        """
        made = Reading([], [])
        for operation in operations:
            result: dict[str, Any] = {}
            kind = operation["do"]
            if kind not in _READS:
                pass
            elif kind == "pull":
                value = self._pull(rank, operation, arrays)
                result = {"array": len(made.arrays)}
                made.arrays.append(value)
            elif kind == "slots":
                steps, slots = self._shard(operation).slots(rule_key_of(operation["rule"]))
                result = {
                    "steps": steps,
                    "slots": {name: len(made.arrays) + index for index, name in enumerate(slots)},
                }
                made.arrays.extend(slots.values())
            elif kind == "version":
                result = {
                    "pushes": {
                        rank: worker.pushes
                        for rank, worker in self.workers.items()
                        if worker.pushes
                    }
                }
            elif kind == "expect":
                self._compare(operation["key"], spec_of(operation))
            elif kind == "describe":
                spec = self._shard(operation).spec
                result = {
                    "whole": list(spec.whole),
                    "dtype": spec.dtype,
                    "aggregation": spec.aggregation,
                    "shards": spec.shards,
                }
            elif kind == "task":
                result = {"closed": rank not in self.board.given}
                if not result["closed"]:
                    task, says = self.board.given[rank]
                    result |= {"task": task, "array": len(made.arrays)}
                    made.arrays.append(says)
            elif kind == "outcome":
                outcome = self.board.outcomes.get(operation["task"])
                result = {"cancelled": outcome is None}
                if outcome is not None:
                    result |= {"failed": outcome.failed, "array": len(made.arrays)}
                    made.arrays.append(outcome.value)
            elif kind == "progress":
                failed = [task for task, one in self.board.outcomes.items() if one.failed]
                result = {"drained": self.board.is_drained, "failed": failed}
            elif kind == "where":
                worker = self.worker(rank)
                result = {"clock": worker.clock, "pushes": worker.pushes}
            elif kind == "rule":
                rule_of(*operation["rule"])
            elif kind == "stats":
                result = {
                    "staleness": dict(self.staleness),
                    "shards": len(self.shards),
                    "entries": self.entries,
                }
            made.results.append(result)
        return made

    def _pull(self, rank: int, operation: dict[str, Any], arrays: Arrays) -> NDArray[Any]:
        shard = self._shard(operation)
        rows = None if operation["rows"] is None else arrays[operation["rows"]]
        size = shard.array.shape[0] if shard.array.ndim else 0
        if rows is not None and rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < size:
            raise ConfigError(
                f"a lookup names rows outside 0 to {size - 1} of {operation['key']!r}"
            )
        if shard.staleness is not None and rank in (places := self.places()):
            ahead = places[rank][0] - min(place[0] for place in places.values())
            self.staleness[ahead] = self.staleness.get(ahead, 0) + 1
        return shard.rows(rows)


def reads(message: Message) -> bool:
    """Return whether a request has an answer that says more than that it was executed."""
    return not _READS.isdisjoint([operation.get("do") for operation in message["operations"]])


def changes(message: Message) -> bool:
    """Return whether a request changes what a server holds."""
    return not _READS.issuperset([operation.get("do") for operation in message["operations"]])
