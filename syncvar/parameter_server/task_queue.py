"""Functions that wait for a worker, as one server knows them: pure bookkeeping, part of its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class TaskResult(NamedTuple):
    """What has become of a task.

    Args:
        failed: It raised.
        value: What it returned or raised, as bytes.
    """

    failed: bool
    value: NDArray[Any]


class TaskQueue:
    """Tasks, in the order in which they were put up, and the workers that wait for one.

    A task goes to the worker that has waited longest; one whose worker is lost goes to the next one, before all others.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.given: dict[int, tuple[int, NDArray[Any]]] = {}  # rank -> task and what it says
        self.outcomes: dict[int, TaskResult] = {}
        self._waiting: dict[int, NDArray[Any]] = {}
        self._idle: list[int] = []

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data and arrays."""
        return {
            "is_closed": self.is_closed,
            "given": dict(self.given),
            "idle": list(self._idle),
            "waiting": dict(self._waiting),
            "outcomes": {task: tuple(one) for task, one in self.outcomes.items()},
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> TaskQueue:
        """Return the board that had this state."""
        made = cls()
        made.is_closed, made.given, made._idle, made._waiting = (
            state["is_closed"],
            state["given"],
            state["idle"],
            state["waiting"],
        )
        made.outcomes = {task: TaskResult(*one) for task, one in state["outcomes"].items()}
        return made

    @property
    def is_drained(self) -> bool:
        """Whether no task waits or is worked on."""
        return not self._waiting and not self.given

    def is_over(self, task: int) -> bool:
        """Return whether a task is finished or was taken down."""
        return task not in self._waiting and all(task != given for given, _ in self.given.values())

    def put(self, task: int, says: NDArray[Any]) -> None:
        """Put up a task."""
        self._waiting[task] = says
        self._give()

    def ask(self, rank: int) -> None:
        """Note that a worker wants a task."""
        if rank not in self._idle and rank not in self.given:
            self._idle.append(rank)
        self._give()

    def finish(self, rank: int, task: int, outcome: TaskResult) -> None:
        """Take what a worker has made of its task; of one that is not its own any more, nothing."""
        if self.given.get(rank, (None,))[0] == task:
            del self.given[rank]
            self.outcomes[task] = outcome

    def lose(self, rank: int) -> None:
        """Give a worker's task to others: it is gone."""
        if rank in self._idle:
            self._idle.remove(rank)
        if rank in self.given:
            task, says = self.given.pop(rank)
            self._waiting = {task: says, **self._waiting}
            self._give()

    def cancel(self) -> list[int]:
        """Take down the tasks that nobody works on; returns which."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def forget(self, tasks: Sequence[int]) -> None:
        """Drop outcomes that nobody asks for any more."""
        for task in tasks:
            self.outcomes.pop(task, None)

    def close(self) -> None:
        """Tell all workers that there will be no more tasks."""
        self.is_closed = True

    def _give(self) -> None:
        while self._waiting and self._idle:
            task = next(iter(self._waiting))
            self.given[self._idle.pop(0)] = task, self._waiting.pop(task)
