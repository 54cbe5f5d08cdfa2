"""What a request asks, put together: operations and arrays for each server that it concerns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.parameter_server.client.request_client import ServerPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from syncvar.parameter_server.server.shard import RuleKey, ShardSlots, Spec

Place = tuple[int, int]
"""Where a result is: the server, and which of its operations."""


class RequestBuilder:
    """A request in the making.

    Example:
        >>> asking = RequestBuilder()
        >>> asking.pull(1, "weights/0")
        (1, 0)
        >>> sorted(asking.parts())
        [1]
    """

    def __init__(self) -> None:
        self._operations: dict[int, list[dict[str, Any]]] = {}
        self._arrays: dict[int, list[NDArray[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._operations)

    def parts(self) -> dict[int, ServerPart]:
        """Return what each server is asked."""
        return {
            server: ServerPart(operations, tuple(self._arrays.get(server, ())))
            for server, operations in self._operations.items()
        }

    def create(
        self, server: int, key: str, spec: Spec, staleness: int | None, value: NDArray[Any]
    ) -> Place:
        """Make a shard with a value, unless there is one."""
        return self._do(
            server,
            "create",
            key=key,
            value=self._array(server, value),
            staleness=staleness,
            **_told(spec),
        )

    def expect(self, server: int, key: str, spec: Spec) -> Place:
        """Wait until there is a shard, and compare what it is."""
        return self._do(server, "expect", key=key, **_told(spec))

    def describe(self, server: int, key: str) -> Place:
        """Wait until there is a shard, and tell what it is."""
        return self._do(server, "describe", key=key)

    def push(
        self,
        server: int,
        key: str,
        how: str,
        value: NDArray[Any],
        rows: NDArray[Any] | None = None,
        *,
        rule: tuple[str, dict[str, Any]] = ("", {}),
        rate: float = 0.0,
        combine: str = "mean",
    ) -> Place:
        """Change a shard; see `shard.Push`. The arrays must not change until the request is over."""
        told: dict[str, Any] = {"how": how, "value": self._array(server, value)}
        told["rows"] = None if rows is None else self._array(server, rows)
        if rule[0]:
            told |= {"rule": list(rule), "rate": rate, "combine": combine}
        return self._do(server, "push", key=key, **told)

    def pull(self, server: int, key: str, rows: NDArray[Any] | None = None) -> Place:
        """Read a shard, or the named rows of it."""
        return self._do(
            server, "pull", key=key, rows=None if rows is None else self._array(server, rows)
        )

    def restore(
        self,
        server: int,
        key: str,
        spec: Spec,
        staleness: int | None,
        value: NDArray[Any],
        rules: Mapping[RuleKey, ShardSlots] | None = None,
    ) -> Place:
        """Make a shard, or make it what it was once, on all servers that a request names this for, or on none; see `shard.Shard.restore`."""
        told = [
            [
                [name, dict(settings)],
                one.steps,
                {slot: self._array(server, array) for slot, array in one.slots.items()},
            ]
            for (name, settings), one in (rules or {}).items()
        ]
        return self._do(
            server,
            "restore",
            key=key,
            value=self._array(server, value),
            staleness=staleness,
            rules=told,
            **_told(spec),
        )

    def count(self, server: int, pushes: dict[int, int]) -> Place:
        """Say how many pushes of each worker are in what this request restores."""
        return self._do(server, "count", pushes=pushes)

    def slots(self, server: int, key: str, rule: RuleKey) -> Place:
        """Read what an optimizer keeps of a shard."""
        return self._do(server, "slots", key=key, rule=[rule[0], dict(rule[1])])

    def version(self, server: int) -> Place:
        """Read how many pushes of each worker have been applied."""
        return self._do(server, "version")

    def staleness(self, server: int, key: str, staleness: int | None) -> Place:
        """Change the bound of a shard."""
        return self._do(server, "staleness", key=key, staleness=staleness)

    def tick(self, server: int, clock: int) -> Place:
        """End a clock step."""
        return self._do(server, "tick", clock=clock)

    def meet(self, server: int) -> Place:
        """Note that this worker comes to a barrier."""
        return self._do(server, "meet")

    def leave(self, server: int) -> Place:
        """Take no part any more: nobody waits for this worker."""
        return self._do(server, "leave")

    def where(self, server: int) -> Place:
        """Ask for this worker's clock."""
        return self._do(server, "where")

    def rule(self, server: int, rule: tuple[str, dict[str, Any]]) -> Place:
        """Let a server say whether it makes the steps of an optimizer."""
        return self._do(server, "rule", rule=list(rule))

    def stats(self, server: int) -> Place:
        """Read numbers for metrics."""
        return self._do(server, "stats")

    def put(self, server: int, task: int, says: NDArray[Any]) -> Place:
        """Put up a task; see `board`."""
        return self._do(server, "put", task=task, value=self._array(server, says))

    def ask_for_task(self, server: int) -> Place:
        """Say that this worker wants a task."""
        return self._do(server, "ask")

    def task(self, server: int) -> Place:
        """Wait for a task, or for the end of all."""
        return self._do(server, "task")

    def finish(self, server: int, task: int, value: NDArray[Any], *, failed: bool) -> Place:
        """Tell what has become of this worker's task."""
        return self._do(
            server, "finish", task=task, value=self._array(server, value), failed=failed
        )

    def outcome(self, server: int, task: int) -> Place:
        """Wait until a task is over, and read what has become of it."""
        return self._do(server, "outcome", task=task)

    def drained(self, server: int) -> Place:
        """Wait until no task is left."""
        return self._do(server, "drained")

    def progress(self, server: int) -> Place:
        """Read whether a task is left, and which have failed."""
        return self._do(server, "progress")

    def forget(self, server: int, tasks: list[int]) -> Place:
        """Drop outcomes."""
        return self._do(server, "forget", tasks=tasks)

    def cancel(self, server: int) -> Place:
        """Take down the tasks that nobody works on."""
        return self._do(server, "cancel")

    def close(self, server: int) -> Place:
        """Say that there will be no more tasks."""
        return self._do(server, "close")

    def _do(self, server: int, kind: str, **told: Any) -> Place:
        operations = self._operations.setdefault(server, [])
        operations.append({"do": kind, **told})
        return server, len(operations) - 1

    def _array(self, server: int, array: NDArray[Any]) -> int:
        arrays = self._arrays.setdefault(server, [])
        arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return len(arrays) - 1


def _told(spec: Spec) -> dict[str, Any]:
    return {
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "aggregation": spec.aggregation,
        "whole": list(spec.whole),
        "start": spec.start,
        "shards": spec.shards,
    }
