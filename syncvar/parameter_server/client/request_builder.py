"""Builds the requests of a worker: operations and arrays for each server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.parameter_server.client.request_client import ServerPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from syncvar.parameter_server.server.shard import RuleKey, ShardSlots, Spec

ResultRef = tuple[int, int]  # the position of a result: server, and number of the operation there


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
        operations.append({"do": operation, **fields})
        return server, len(operations) - 1

    def on_all(self, servers: int, operation: str, **fields: Any) -> list[ResultRef]:
        """Add an operation without arrays for each of the servers."""
        return [self.add(server, operation, **fields) for server in range(servers)]

    def create(
        self, server: int, key: str, spec: Spec, staleness: int | None, value: NDArray[Any]
    ) -> ResultRef:
        """Create a shard with a value, unless it exists."""
        number = self._array(server, value)
        return self.add(
            server, "create", key=key, value=number, staleness=staleness, **spec._asdict()
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
        step |= {"how": method, "value": self._array(server, value)}
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
        return self.add(server, "finish", task=task, value=number, failed=failed)

    def _array(self, server: int, array: NDArray[Any]) -> int:
        arrays = self._arrays.setdefault(server, [])
        arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return len(arrays) - 1
