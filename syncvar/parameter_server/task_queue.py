"""The queue of a coordinator's tasks: pure bookkeeping, part of a server's replicated state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.messages import Arrays


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
            "given": dict(self.assigned),
            "idle": list(self._idle),
            "waiting": dict(self._waiting),
            "outcomes": {task: tuple(one) for task, one in self.outcomes.items()},
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> TaskQueue:
        """Return the queue with this state."""
        queue = cls()
        queue.is_closed, queue.assigned = state["is_closed"], state["given"]
        queue._idle, queue._waiting = state["idle"], state["waiting"]
        queue.outcomes = {task: TaskResult(*one) for task, one in state["outcomes"].items()}
        return queue

    def execute(self, rank: int, operation: dict[str, Any], arrays: Arrays) -> None:
        """Execute a worker's operation."""
        match operation["do"]:
            case "put":
                self.put(operation["task"], arrays[operation["value"]])
            case "ask":
                self.ask(rank)
            case "finish":
                result = TaskResult(operation["failed"], arrays[operation["value"]])
                self.finish(rank, operation["task"], result)
            case "forget":
                self.forget(operation["tasks"])
            case "cancel":
                self.cancel()
            case "close":
                self.close()

    def is_ready(self, rank: int, operation: dict[str, Any]) -> bool:
        """Return whether `read` can answer now; True for operations on other state."""
        name = operation["do"]
        if name == "task":
            return rank in self.assigned or self.is_closed
        if name == "outcome":
            return self.is_over(operation["task"])
        return name != "drained" or self.is_drained

    def read(
        self, rank: int, operation: dict[str, Any], add: Callable[[NDArray[Any]], int]
    ) -> dict[str, Any]:
        """Return the result of a read; `add` stores an array and returns its number."""
        match operation["do"]:
            case "task":
                if rank not in self.assigned:
                    return {"closed": True}
                task, call = self.assigned[rank]
                return {"closed": False, "task": task, "array": add(call)}
            case "outcome":
                result = self.outcomes.get(operation["task"])
                if result is None:
                    return {"cancelled": True}
                return {"cancelled": False, "failed": result.failed, "array": add(result.value)}
            case "progress":
                failed = [task for task, one in self.outcomes.items() if one.failed]
                return {"drained": self.is_drained, "failed": failed}
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
