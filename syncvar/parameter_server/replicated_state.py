"""The replicated state machine of one server: equal entries in equal order make equal state.

Primary and backup execute the same entries, which are maps with arrays. An entry is a worker's
`request`, a `decision` about a transaction over several servers, or a `fence`. A fence ends an
incarnation of a worker. Reads are no entries. The state has shards, and the queue of a
coordinator's tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, MismatchError, SyncvarError, WireError, error_message
from syncvar.parameter_server.messages import READS, push_of, rule_key_of, slots_of, spec_of
from syncvar.parameter_server.shard import Shard, check_slots, rule_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.messages import Arrays, Message
    from syncvar.parameter_server.shard import Allocate, Position, Spec

_ABORTED_MAX = 256  # servers ask about the latest only: a worker has far fewer open requests
_UNCHECKED = READS.union(
    ("tick", "barrier", "leave", "set_pushes", "request_task", "forget", "cancel", "close")
)


class TaskResult(NamedTuple):
    """Whether a task failed, and its packed result or error."""

    failed: bool
    value: NDArray[Any]


class TaskQueue:
    """Tasks in the order of `put`, and the workers that wait for one.

    A task goes to the worker that has waited longest. If that worker fails, the task goes to the
    next one, before all others.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.assigned: dict[int, tuple[int, NDArray[Any]]] = {}  # rank -> task, packed call
        self.outcomes: dict[int, TaskResult] = {}
        self._waiting: dict[int, NDArray[Any]] = {}
        self._idle: list[int] = []

    def state(self) -> dict[str, Any]:
        """Return the whole queue as plain data and arrays."""
        return {
            "is_closed": self.is_closed,
            "assigned": dict(self.assigned),
            "idle": list(self._idle),
            "waiting": dict(self._waiting),
            "outcomes": {task: tuple(one) for task, one in self.outcomes.items()},
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> TaskQueue:
        """Return the queue with this state."""
        queue = cls()
        queue.is_closed, queue.assigned = state["is_closed"], state["assigned"]
        queue._idle, queue._waiting = state["idle"], state["waiting"]
        queue.outcomes = {task: TaskResult(*one) for task, one in state["outcomes"].items()}
        return queue

    def execute(self, rank: int, operation: dict[str, Any], arrays: Arrays) -> None:
        """Execute a worker's operation."""
        match operation["op"]:
            case "put":
                self.put(operation["task"], arrays[operation["value"]])
            case "request_task":
                self.ask(rank)
            case "finish":
                result = TaskResult(operation["has_failed"], arrays[operation["value"]])
                self.finish(rank, operation["task"], result)
            case "forget":
                self.forget(operation["tasks"])
            case "cancel":
                self.cancel()
            case "close":
                self.close()

    def is_ready(self, rank: int, operation: dict[str, Any]) -> bool:
        """Return whether `read` can answer now; True for operations on other state."""
        name = operation["op"]
        if name == "task":
            return rank in self.assigned or self.is_closed
        if name == "outcome":
            return self.is_over(operation["task"])
        return name != "wait_all" or self.is_drained

    def read(
        self, rank: int, operation: dict[str, Any], add: Callable[[NDArray[Any]], int]
    ) -> dict[str, Any]:
        """Return the result of a read; `add` stores an array and returns its number."""
        match operation["op"]:
            case "task":
                if rank not in self.assigned:
                    return {"is_closed": True}
                task, call = self.assigned[rank]
                return {"is_closed": False, "task": task, "array": add(call)}
            case "outcome":
                one = self.outcomes.get(operation["task"])
                if one is None:
                    return {"is_cancelled": True}
                return {"is_cancelled": False, "has_failed": one.failed, "array": add(one.value)}
            case "progress":
                failed = [task for task, one in self.outcomes.items() if one.failed]
                return {"is_drained": self.is_drained, "failed_tasks": failed}
        return {}

    @property
    def is_drained(self) -> bool:
        """Whether no task waits or runs."""
        return not self._waiting and not self.assigned

    def is_over(self, task: int) -> bool:
        """Return whether a task has ended or was cancelled."""
        return task not in self._waiting and all(task != one for one, _ in self.assigned.values())

    def put(self, task: int, call: NDArray[Any]) -> None:
        """Add a task."""
        self._waiting[task] = call
        self._assign()

    def ask(self, rank: int) -> None:
        """Note that a worker is idle."""
        if rank not in self._idle and rank not in self.assigned:
            self._idle.append(rank)
        self._assign()

    def finish(self, rank: int, task: int, outcome: TaskResult) -> None:
        """Keep the result of a worker's task, unless another worker has the task now."""
        if self.assigned.get(rank, (None,))[0] == task:
            del self.assigned[rank]
            self.outcomes[task] = outcome

    def lose(self, rank: int) -> None:
        """Give the task of a failed worker to another one."""
        if rank in self._idle:
            self._idle.remove(rank)
        if rank in self.assigned:
            task, call = self.assigned.pop(rank)
            self._waiting = {task: call, **self._waiting}
            self._assign()

    def cancel(self) -> list[int]:
        """Remove the tasks that no worker has begun, and return them."""
        tasks = list(self._waiting)
        self._waiting.clear()
        return tasks

    def forget(self, tasks: Sequence[int]) -> None:
        """Drop results."""
        for task in tasks:
            self.outcomes.pop(task, None)

    def close(self) -> None:
        """End the queue: idle workers stop."""
        self.is_closed = True

    def _assign(self) -> None:
        while self._waiting and self._idle:
            task = next(iter(self._waiting))
            self.assigned[self._idle.pop(0)] = task, self._waiting.pop(task)


class WorkerRequest(NamedTuple):
    """A worker's request: its map and its arrays."""

    message: Message
    arrays: Arrays


class Reading(NamedTuple):
    """The results of reads: a map for each operation, and the arrays that the maps number."""

    results: list[dict[str, Any]]
    arrays: list[NDArray[Any]]

    def add(self, array: NDArray[Any]) -> int:
        """Append an array, and return its number."""
        self.arrays.append(array)
        return len(self.arrays) - 1


@dataclass
class WorkerState:
    """A server's record of one worker."""

    incarnation: int = 0  # number of its restarts; servers refuse requests of earlier incarnations
    done: int = 0  # number of its last changing request that was executed, refused or staged
    takes_part: bool = True  # whether others wait for it under a bound of staleness
    clock: int = 0  # number of its ticks
    phase: int = 0  # number of its barriers since the last tick
    executed: int = 0  # number of its last executed request that changed something here
    # applied pushes of all incarnations; those to several servers count at the lowest
    pushes: int = 0
    # number of its last changing request to each server, as of its last request
    last_changes: list[int] = field(default_factory=list)
    staged: WorkerRequest | None = None  # its part of an undecided transaction
    # request number -> error and reason, as long as the worker may ask again
    refusals: dict[int, tuple[str, str]] = field(default_factory=dict)
    # error of an acknowledged push, for the answer to its next request
    failed: tuple[str, str] | None = None
    # incarnation -> its last transaction decided here
    decided: dict[int, int] = field(default_factory=dict)
    # (incarnation, transaction) -> reason of aborted transactions
    aborted: dict[tuple[int, int], str] = field(default_factory=dict)


class ReplicatedState:
    """The state of one server."""

    def __init__(self, server: int, workers: int) -> None:
        self.server = server
        self.count = workers
        self.workers: dict[int, WorkerState] = {rank: WorkerState() for rank in range(workers)}
        self.shards: dict[str, Shard] = {}
        self.queue = TaskQueue()
        self.entries = 0
        self.undecided: set[int] = set()  # workers with a staged part of a transaction
        self._in_rounds: set[Shard] = set()  # shards whose pushes wait for other workers
        self.staleness: dict[int, int] = {}  # ticks ahead of the slowest worker -> reads
        # For arrays of shards, and of rows that workers read.
        self.allocate: Allocate = np.empty

    def worker(self, rank: int) -> WorkerState:
        """Return the record of a worker."""
        found = self.workers.get(rank)
        if found is None:
            found = self.workers[rank] = WorkerState(takes_part=False)
        return found

    def places(self) -> dict[int, Position]:
        """Return the position of each worker that takes part."""
        return {
            rank: (one.clock, one.phase)
            for rank, one in self.workers.items()
            if one.takes_part and rank < self.count
        }

    def state(self) -> dict[str, Any]:
        """Return the whole state as plain data and arrays that do not change."""
        workers = {
            rank: {**vars(one), "staged": None if one.staged is None else tuple(one.staged)}
            for rank, one in self.workers.items()
        }
        return {
            "workers": workers,
            "shards": {key: shard.state() for key, shard in self.shards.items()},
            "queue": self.queue.state(),
            "entries": self.entries,
            "staleness": dict(self.staleness),
        }

    @classmethod
    def of_state(
        cls, server: int, workers: int, state: dict[str, Any], allocate: Allocate
    ) -> ReplicatedState:
        """Return the replicated state of a server from the result of `state`."""
        new = cls(server, workers)
        new.allocate = allocate
        new.entries, new.staleness = state["entries"], state["staleness"]
        for rank, one in state["workers"].items():
            staged = None if one["staged"] is None else WorkerRequest(*one["staged"])
            new.workers[rank] = WorkerState(**{**one, "staged": staged})
        new.undecided = {rank for rank, one in new.workers.items() if one.staged is not None}
        new.shards = {
            key: Shard.of_state(shard, allocate) for key, shard in state["shards"].items()
        }
        new.queue = TaskQueue.of_state(state["queue"])
        new._in_rounds = {shard for shard in new.shards.values() if shard.waits}
        return new

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
            raise WireError(f"servers know no entry {kind!r:.40}")
        if self._in_rounds:
            places = self.places()
            for shard in list(self._in_rounds):
                if shard.settle(places):
                    self._in_rounds.discard(shard)
                self._report_failures(shard)

    def _request(self, message: Message, arrays: Arrays) -> None:
        worker = self.worker(message["rank"])
        number = message["number"]
        worker.done = number
        if worker.refusals:
            for old in [one for one in worker.refusals if one <= message["ack"]]:
                del worker.refusals[old]
        if not worker.takes_part and message["rank"] < self.count:
            # It is back, and continues at the clock of the slowest, unless it was further.
            worker.takes_part = True
            clocks = [place[0] for rank, place in self.places().items() if rank != message["rank"]]
            if clocks and min(clocks) > worker.clock:
                worker.clock, worker.phase = min(clocks), 0
        request = WorkerRequest(message, arrays)
        refusal = self.refusal(request)
        if len(message["participants"]) > 1:
            worker.staged = request
            self.undecided.add(message["rank"])
            return
        if refusal is not None:
            worker.refusals[number] = refusal
        else:
            self._apply(worker, request)
        if worker.failed is not None:
            worker.refusals.setdefault(number, worker.failed)
            worker.failed = None

    def _report_failures(self, shard: Shard) -> None:
        """Keep errors of acknowledged pushes for the next requests of their workers."""
        for ranks, error, reason in shard.failures:
            for rank in ranks:
                self.worker(rank).failed = error, reason
        shard.failures.clear()

    def _decision(self, entry: Message) -> None:
        worker = self.worker(entry["rank"])
        incarnation, transaction = entry["incarnation"], entry["transaction"]
        reason = entry["reason"]
        if entry["home"] == self.server:
            worker.decided[incarnation] = max(worker.decided.get(incarnation, 0), transaction)
            if reason:
                worker.aborted[incarnation, transaction] = reason
                if len(worker.aborted) > _ABORTED_MAX:
                    del worker.aborted[next(iter(worker.aborted))]
        staged = worker.staged
        if staged is None or not is_about(staged.message, entry):
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
        worker.executed, worker.last_changes = 0, []
        self.queue.lose(rank)
        worker.phase += 1  # it returns to a position where no round has begun
        worker.refusals.clear()
        worker.failed = None

    def _apply(self, worker: WorkerState, request: WorkerRequest) -> None:
        message = request.message
        if message["incarnation"] == worker.incarnation:
            worker.executed, worker.last_changes = message["number"], message["last_changes"]
        rank = message["rank"]
        if min(message["participants"]) == self.server:
            worker.pushes += any(operation["op"] == "push" for operation in message["operations"])
        for operation in message["operations"]:
            if operation["op"] in READS:
                continue
            try:
                self._perform(rank, worker, operation, request.arrays)
            except SyncvarError as error:  # a custom rule whose trial, before other pushes, passed
                if message["incarnation"] == worker.incarnation:
                    worker.refusals[message["number"]] = type(error).__name__, error_message(error)

    def _perform(
        self, rank: int, worker: WorkerState, operation: dict[str, Any], arrays: Arrays
    ) -> None:
        kind = operation["op"]
        if kind == "push":
            takes_part = worker.takes_part and rank < self.count
            position = (worker.clock, worker.phase) if takes_part else None
            shard = self.shards[operation["key"]]
            shard.push(rank, position, push_of(operation, arrays))
            if shard.staleness == 0:
                self._in_rounds.add(shard)
        elif kind in ("create", "restore"):
            self._create(operation, arrays)
        elif kind == "staleness":
            self.shards[operation["key"]].set_staleness(operation["staleness"])
            self._report_failures(self.shards[operation["key"]])
        elif kind == "tick":
            worker.clock, worker.phase = max(worker.clock, operation["clock"]), 0
        elif kind == "barrier":
            worker.phase += 1
        elif kind == "set_pushes":
            for rank_of, one in self.workers.items():
                one.pushes = operation["pushes"].get(rank_of, 0)
        elif kind == "leave":
            worker.takes_part = False
            self.queue.lose(rank)
        else:
            self.queue.execute(rank, operation, arrays)

    def _create(self, operation: dict[str, Any], arrays: Arrays) -> None:
        key, value = operation["key"], arrays[operation["value"]]
        if key not in self.shards:
            bound = operation["staleness"]
            self.shards[key] = Shard(spec_of(operation), value, bound, self.allocate)
        if operation["op"] == "restore":
            self.shards[key].restore(value, slots_of(operation, arrays))

    # -- checks ------------------------------------------------------------------------------------

    def refusal(self, request: WorkerRequest) -> tuple[str, str] | None:
        """Return error and reason why a request cannot be executed, or None; changes nothing."""
        created: set[str] = set()
        try:
            for operation in request.message["operations"]:
                self._check(operation, request.arrays, created)
        except SyncvarError as error:
            return type(error).__name__, error_message(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = f"an operation of a request is malformed: {type(error).__name__}: {error}"
            return "WireError", reason
        return None

    def _check(self, operation: dict[str, Any], arrays: Arrays, created: set[str]) -> None:
        kind = operation["op"]
        if kind == "push":
            if operation["key"] not in created:
                self._shard(operation).check(push_of(operation, arrays))
        elif kind in ("create", "restore"):
            created.add(operation["key"])
            self._check_create(operation, arrays)
        elif kind == "staleness":
            self._shard(operation)
        elif kind == "tick" and type(operation["clock"]) is not int:
            raise WireError(f"a tick has clock {operation['clock']!r:.40}, no whole number")
        elif kind == "set_pushes" and not all(
            type(one) is int for one in operation["pushes"].values()
        ):
            raise WireError("pushes are counted in whole numbers")
        elif kind in ("put", "finish"):
            is_number = type(operation["task"]) is int
            if not is_number or arrays[operation["value"]].dtype.name != "uint8":
                raise WireError(f"a task to {kind} is a number and bytes")
        elif kind not in _UNCHECKED:
            raise WireError(f"servers know no operation {kind!r:.40}")

    def _check_create(self, operation: dict[str, Any], arrays: Arrays) -> None:
        key, spec, value = operation["key"], spec_of(operation), arrays[operation["value"]]
        if value.shape != spec.shape or value.dtype.name != spec.dtype:
            raise WireError(f"variable {key!r}: the value is no {spec.dtype}{list(spec.shape)}")
        bound = operation["staleness"]
        if bound is not None and (type(bound) is not int or bound < 0):
            raise ConfigError(f"staleness must be None or at least 0, not {bound!r}")
        if key in self.shards:
            self._compare(key, spec)
        if operation["op"] == "restore":
            for rule, slots in slots_of(operation, arrays).items():
                check_slots(rule, slots, value)

    def _shard(self, operation: dict[str, Any]) -> Shard:
        shard = self.shards.get(operation["key"])
        if shard is None:
            raise ConfigError(f"server {self.server} holds no {operation['key']!r}")
        return shard

    def _compare(self, key: str, spec: Spec) -> None:
        mine = self.shards[key].spec
        if mine != spec:
            raise MismatchError(
                f"this worker makes variable {key!r} as {spec.dtype}{list(spec.whole)} "
                f"{spec.aggregation}, and there is one: {mine.dtype}{list(mine.whole)} "
                f"{mine.aggregation}. All workers make the same variables in the same order"
            )

    # -- reading -----------------------------------------------------------------------------------

    def may_read(self, rank: int, operations: Iterable[dict[str, Any]]) -> bool:
        """Return whether a worker's reads may be answered now."""
        for operation in operations:
            kind = operation["op"]
            if kind == "pull":
                shard = self.shards.get(operation["key"])
                is_bounded = shard is not None and shard.staleness is not None
                if is_bounded and not self.shards[operation["key"]].may_read(rank, self.places()):
                    return False
            elif kind in ("expect", "describe"):
                if operation["key"] not in self.shards:
                    return False
            elif not self.queue.is_ready(rank, operation):
                return False
        return True

    def read(self, rank: int, operations: Iterable[dict[str, Any]], arrays: Arrays) -> Reading:
        """Return the results of reads; an empty map for an operation that reads nothing."""
        reading = Reading([], [])
        for operation in operations:
            if operation["op"] in READS:
                result = self._read_one(rank, operation, arrays, reading)
            else:
                result = {}
            reading.results.append(result)
        return reading

    def _read_one(
        self, rank: int, operation: dict[str, Any], arrays: Arrays, reading: Reading
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        match operation["op"]:
            case "pull":
                result = {"array": reading.add(self._pull(rank, operation, arrays))}
            case "slots":
                steps, slots = self._shard(operation).slots(rule_key_of(operation["rule"]))
                numbers = {name: reading.add(slot) for name, slot in slots.items()}
                result = {"steps": steps, "slots": numbers}
            case "version":
                pushes = {rank: one.pushes for rank, one in self.workers.items() if one.pushes}
                result = {"pushes": pushes}
            case "expect":
                self._compare(operation["key"], spec_of(operation))
            case "describe":
                spec = self._shard(operation).spec
                result = {"whole": list(spec.whole), "dtype": spec.dtype, "shards": spec.shards}
                result["aggregation"] = spec.aggregation
            case "position":
                worker = self.worker(rank)
                result = {"clock": worker.clock, "pushes": worker.pushes}
            case "rule":
                rule_of(*operation["rule"])
            case "stats":
                result = {"shards": len(self.shards), "entries": self.entries}
                result["staleness"] = dict(self.staleness)
            case _:
                result = self.queue.read(rank, operation, reading.add)
        return result

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


def is_about(staged: Message, decision: Message) -> bool:
    """Return whether a decision is about the transaction of a staged request."""
    return all(staged[name] == decision[name] for name in ("incarnation", "transaction"))
