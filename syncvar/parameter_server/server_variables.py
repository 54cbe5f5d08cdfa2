"""Variables whose values are on servers: a worker pushes what it writes and pulls what it reads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import ConfigError, UsageError
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.parameter_server.server.shard import Spec
from syncvar.parameter_server.server_access import ServerAccess, checked_staleness
from syncvar.variables.coercion import checked_dtype, plain_array
from syncvar.variables.create import checked_name, checked_trainable, checked_value
from syncvar.variables.mode_explanation import Explanation
from syncvar.variables.partitioners import row_ranges
from syncvar.variables.policy import (
    AccessKind,
    VariableAggregation,
    VariableSynchronization,
    as_member,
    resolve,
)
from syncvar.variables.row_updates import checked_rows
from syncvar.variables.scope import current_owner
from syncvar.variables.sharded_init import ShardInfo, checked_shape, require_shape, takes_shard_info
from syncvar.variables.variable import Variable
from syncvar.variables.variable_writes import checked_operand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from syncvar.parameter_server.client.request_builder import Place
    from syncvar.parameter_server.client.request_client import Ticket
    from syncvar.parameter_server.strategy import ParameterServerStrategy

__all__ = ["Reads", "ServerVariable", "ShardedVariable"]


class Reads:
    """The pulls of one request, and how their results become arrays.

    Args:
        asking: The request.
    """

    def __init__(self, asking: RequestBuilder) -> None:
        self._asking = asking
        self._found: list[
            tuple[ServerVariable, list[Place], NDArray[Any] | None, tuple[int, ...]]
        ] = []

    def add(self, variable: ServerVariable, indices: Any = None) -> None:
        """Read a variable, or the named rows of it.

        Raises:
            ConfigError: They cannot be rows of it.
        """
        rows, shape = (
            (None, variable.shape) if indices is None else variable.checked_indices(indices)
        )
        places = []
        for index, (start, stop) in enumerate(variable.row_ranges):
            inside = None if rows is None else rows[(rows >= start) & (rows < stop)] - start
            if inside is None or inside.size:
                places.append(
                    self._asking.pull(variable.server_of(index), variable.key_of(index), inside)
                )
        self._found.append((variable, places, rows, shape))

    def arrays(self, ticket: Ticket) -> list[NDArray[Any]]:
        """Return the values, read-only, when the request is over."""
        return [
            _joined(variable, [ticket.array(*place) for place in places], rows, shape)
            for variable, places, rows, shape in self._found
        ]


class ServerVariable(Variable):
    """A variable that lives on servers, whole or in parts; made by `sv.Variable` in a ParameterServerStrategy's scope.

    `assign`, `assign_add` and the other writes push and return at once; each is applied exactly once. Reading pulls, and sees
    this worker's own pushes. There is no collective: workers read and write when they like.
    """

    def __init__(
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = VariableSynchronization.AUTO,
        aggregation: Any = VariableAggregation.NONE,
        shape: Any = None,
    ) -> None:
        owner: Any = current_owner()
        if getattr(owner, "servers", None) is None:
            raise UsageError(
                "variables on servers are made by sv.Variable(…) in the scope of an sv.ParameterServerStrategy"
            )
        self._requested = as_member(VariableSynchronization, synchronization, "synchronization")
        self._aggregation = as_member(VariableAggregation, aggregation, "aggregation")
        self._synchronization, _ = resolve(self._requested)
        base = checked_name(name)
        wanted = None if dtype is None else checked_dtype(dtype)
        self._trainable = checked_trainable(trainable, usual=True)
        lengths, by_shards = checked_shape(base, shape), takes_shard_info(initial_value)
        known, value = require_shape(base, lengths, wanted) if by_shards else None, None
        if known is None:
            value = checked_value(
                base, initial_value, wanted, self._aggregation, calls=owner.is_chief, shape=lengths
            )
            known = None if value is None else (value.shape, value.dtype)
        self._name = owner.here.names.take(base)
        self._owner: ParameterServerStrategy = owner
        self._rule = "the value is on servers, to which each worker pushes"
        self._first, self._staleness = owner.here.next_server, owner.staleness
        if known is None:
            self._find(lengths)
        else:
            self._shape, self._dtype = known
            self._cut(owner.servers.partition(self._shape, self._dtype))
            if by_shards and owner.is_chief:
                self._make_by_shards(initial_value)
            else:
                self._make(value)
        owner.here.meets |= self._staleness == 0
        owner.here.next_server = (self._first + self.num_shards) % owner.server_count
        if self.num_shards > 1:
            self.__class__ = ShardedVariable

    # -- what it is --------------------------------------------------------------------------------

    @property
    def stepper(self) -> ServerAccess:  # type: ignore[override]
        """Who makes an optimizer's steps of it."""
        return self._owner.servers

    @property
    def num_shards(self) -> int:
        """Parts, each on one server."""
        return len(self._ranges)

    @property
    def row_ranges(self) -> list[list[int]]:
        """The first row and the row after the last one of each part."""
        return [list(one) for one in self._ranges]

    @property
    def staleness(self) -> int | None:
        """Ticks by which a read may miss other workers' pushes; None for any number."""
        bound: int | None = self._staleness
        return bound

    def set_staleness(self, staleness: int | None) -> None:
        """Change by how many ticks a read may miss other workers' pushes; the same on every worker.

        Args:
            staleness: At least 0, or None for any number.

        Raises:
            ConfigError: Another value.
        """
        self._staleness = checked_staleness(staleness)
        self._owner.here.meets |= self._staleness == 0
        asking = RequestBuilder()
        for index in range(self.num_shards):
            asking.staleness(self.server_of(index), self.key_of(index), self._staleness)
        self._owner.servers.push(asking, f"set_staleness of variable {self._name!r}")

    def key_of(self, shard: int) -> str:
        """Return the name of a part on its server; of use to this package only."""
        return f"{self._name}/{shard}"

    def server_of(self, shard: int) -> int:
        """Return where a part is: the parts of all variables are given to the servers in turns."""
        server: int = (self._first + shard) % self._owner.server_count
        return server

    def explain(self) -> Explanation:
        """Return where its parts are and its bound of staleness; sends nothing."""
        bound = "any" if self._staleness is None else str(self._staleness)
        servers = ", ".join(str(self.server_of(index)) for index in range(self.num_shards))
        numbers: dict[str, Any] = {
            "shards": self.num_shards,
            "nbytes": int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize,
        }
        return Explanation(
            "on servers",
            self._requested.name,
            self._rule,
            numbers,
            [],
            f"servers {servers}; staleness {bound}",
        )

    def pin(self, mode: str | None) -> None:
        """Refuse: a variable on servers has no pace.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"variable {self._name!r} is on servers: its pushes travel at once; write v.set_staleness(k) to bound what reads miss"
        )

    def __repr__(self) -> str:
        kind = "ShardedVariable" if self.num_shards > 1 else "Variable"
        return f"<sv.{kind} {self._name!r} on servers shape={self._shape} dtype={self._dtype.name} shards={self.num_shards}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> ServerVariable:
        with self._owner.scope():
            made: Any = Variable(
                self.read_value(),
                trainable=self._trainable,
                name=self._name,
                synchronization=self._requested,
                aggregation=self._aggregation,
            )
        memo[id(self)] = made
        return made  # type: ignore[no-any-return]

    # -- reading -----------------------------------------------------------------------------------

    def read_value(self, copy: bool = True) -> NDArray[Any]:
        """Pull the value, read-only. It has all pushes of this worker, and of the others what the bound of staleness says.

        Args:
            copy: Means nothing here: what was pulled is this worker's alone.

        Raises:
            PeerLost: A server is gone, and no other holds a copy.
            DeadlineExceeded: No answer in time; where staleness is bounded, also because another worker has not come so far.

        Cost: one round trip to all servers that have a part; `strategy.read_all` reads many variables in one.
        """
        del copy
        return self._owner.read_all([self])[0]

    def value(self) -> NDArray[Any]:
        """Return `read_value()`."""
        return self.read_value()

    def numpy(self) -> NDArray[Any]:
        """Return `read_value()`."""
        return self.read_value()

    def local_value(self) -> NDArray[Any]:
        """Return `read_value()`: a worker has no copy of its own."""
        return self.read_value()

    def sync(self) -> NDArray[Any]:
        """Return `read_value()`; not a collective."""
        return self.read_value()

    def read_from(self, rank: int) -> NDArray[Any]:
        """Return `read_value()`: there is one value for all workers.

        Raises:
            ConfigError: There is no such worker.
        """
        if (
            isinstance(rank, bool)
            or not isinstance(rank, int | np.integer)
            or not 0 <= rank < self._owner.num_replicas_in_sync
        ):
            raise ConfigError(
                f"read_from: there is no worker {rank!r}: write 0 to {self._owner.num_replicas_in_sync - 1}"
            )
        return self.read_value()

    def lookup(self, indices: Any) -> NDArray[Any]:
        """Pull rows, in the order in which they are named.

        Args:
            indices: Integers in [0, rows), of any shape S; a row may be named several times.

        Returns:
            Array of shape S + shape[1:], read-only.

        Raises:
            RowOutOfRange: An index outside the variable; nothing was sent.
            ConfigError: A scalar variable, or indices that are no integers.

        Cost: one round trip to the servers that have such rows; only these rows travel.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2))
            >>> with strategy.scope():
            ...     table = sv.Variable([[0.0], [1.0], [2.0]])
            >>> table.lookup([2, 0, 2]).tolist()
            [[2.0], [0.0], [2.0]]
        """
        return self._owner.read_all([(self, indices)])[0]

    # -- writing -----------------------------------------------------------------------------------

    def _assign(self, operation: AccessKind, x: Any, done: int = 0) -> Variable:
        del done
        array = checked_operand(self, operation, x, is_reduced=False)
        with self._owner.servers.pushing(f"{operation.value} of variable {self._name!r}") as asking:
            self.add_push(asking, operation.value, array)
        return self

    def _scatter(self, operation: AccessKind, indices: Any, values: Any) -> Variable:
        what = f"{operation.value} of variable {self._name!r}"
        rows = checked_rows(operation, indices, values, self._shape, self._dtype, what)
        with self._owner.servers.pushing(what) as asking:
            self.add_push(asking, operation.value, rows.values, rows.indices)
        return self

    def add_push(
        self,
        asking: RequestBuilder,
        how: str,
        value: NDArray[Any],
        rows: NDArray[Any] | None = None,
        **step: Any,
    ) -> None:
        """Add a push of the value, or of rows, to a request; what is pushed is copied. Of use to this package only."""
        for index, (start, stop) in enumerate(self._ranges):
            server, key = self.server_of(index), self.key_of(index)
            if rows is None:
                part = value if self.num_shards == 1 else value[start:stop]
                asking.push(server, key, how, np.array(part, copy=True), **step)
                continue
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                asking.push(server, key, how, value[inside], rows[inside] - start, **step)

    # -- inside ------------------------------------------------------------------------------------

    def _cut(self, parts: int) -> None:
        rows = self._shape[0] if self._shape else 1
        self._ranges = [(start, stop) for start, stop in row_ranges(rows, parts)]

    def spec_of(self, shard: int) -> Spec:
        """Return what a part is; of use to this package only."""
        start, stop = self._ranges[shard]
        shape = (stop - start, *self._shape[1:]) if self._shape else ()
        return Spec(
            shape, self._dtype.name, self._aggregation.name, self._shape, start, self.num_shards
        )

    def _make_by_shards(self, make: Callable[..., Any]) -> None:
        """Let the servers make it, from parts of which one at a time is here; on the chief."""
        for index, (start, _) in enumerate(self._ranges):
            spec = self.spec_of(index)
            info = ShardInfo(
                spec.shape, (start, *(0 for _ in spec.shape[1:])) if spec.shape else ()
            )
            asking = RequestBuilder()
            value = checked_value(
                self._name,
                partial(make, shard_info=info),
                self._dtype,
                self._aggregation,
                calls=True,
                shape=spec.shape,
            )
            assert value is not None
            asking.create(self.server_of(index), self.key_of(index), spec, self._staleness, value)
            self._owner.servers.ask(asking, f"making variable {self._name!r}")

    def _make(self, value: NDArray[Any] | None) -> None:
        """Let the servers make it, if this is the chief, who has the value; else wait until they have."""
        asking = RequestBuilder()
        for index, (start, stop) in enumerate(self._ranges):
            server, key, spec = self.server_of(index), self.key_of(index), self.spec_of(index)
            if value is not None and self._owner.is_chief:
                asking.create(
                    server,
                    key,
                    spec,
                    self._staleness,
                    value if not self._shape else value[start:stop],
                )
            else:
                asking.expect(server, key, spec)
        self._owner.servers.ask(asking, f"making variable {self._name!r}")

    def _find(self, lengths: tuple[int, ...] | None) -> None:
        """Learn from a server what the chief has made of a callable; it must have the given shape, if there is one."""
        asking = RequestBuilder()
        server, number = asking.describe(self._first, self.key_of(0))
        told = self._owner.servers.ask(asking, f"making variable {self._name!r}").results[server][
            number
        ]
        if told["aggregation"] != self._aggregation.name:
            raise ConfigError(
                f"variable {self._name!r} has aggregation {told['aggregation']} on the chief, {self._aggregation.name} here"
            )
        self._shape, self._dtype = tuple(told["whole"]), np.dtype(told["dtype"])
        if lengths not in (None, self._shape):
            raise ConfigError(
                f"variable {self._name!r} has shape {self._shape} on the chief, and shape= says {lengths} here"
            )
        self._cut(told["shards"])

    def checked_indices(self, indices: Any) -> tuple[NDArray[Any], tuple[int, ...]]:
        """Return the rows that indices name, and the shape of what looking them up gives; of use to this package only.

        Raises:
            RowOutOfRange: One of them is none.
            ConfigError: A scalar variable, or indices that are no integers.
        """
        shape = np.shape(plain_array(indices, f"lookup in variable {self._name!r}: indices"))
        values = np.broadcast_to(np.zeros((), self._dtype), (*shape, *self._shape[1:]))
        rows = checked_rows(
            AccessKind.SCATTER_UPDATE,
            indices,
            values,
            self._shape,
            self._dtype,
            f"lookup in variable {self._name!r}",
        )
        return rows.indices, (*shape, *self._shape[1:])


class ShardedVariable(ServerVariable):
    """A variable on servers that a partitioner has cut along its first axis into several parts.

    It is made by `sv.Variable` in the scope of a ParameterServerStrategy with a `variable_partitioner`, and behaves as an array
    like any variable. A write of it is applied on all of its servers or on none.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(3))
        >>> with strategy.scope():
        ...     table = sv.Variable(np.zeros((7, 2), np.float32))
        >>> isinstance(table, sv.ShardedVariable), table.num_shards, table.row_ranges
        (True, 3, [[0, 3], [3, 5], [5, 7]])
        >>> table.scatter_add([6, 6], np.ones((2, 2))).lookup([6]).tolist()
        [[2.0, 2.0]]
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())


def _joined(
    variable: ServerVariable,
    parts: list[NDArray[Any]],
    rows: NDArray[Any] | None,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    if rows is None:
        made = parts[0] if len(parts) == 1 else np.concatenate(parts)
    elif variable.num_shards == 1 and parts:
        made = parts[0]
    else:
        made = np.empty((rows.size, *variable.shape[1:]), variable.dtype)
        remaining = iter(parts)
        for start, stop in variable.row_ranges:
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                made[inside] = next(remaining)
    made = made.reshape(shape)
    made.flags.writeable = False
    return made
