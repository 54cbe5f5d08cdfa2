"""Server-side variables: a worker pushes what it writes and pulls what it reads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.html_table import html_table
from syncvar.parameter_server.request_client import RequestBuilder
from syncvar.parameter_server.shard import Spec
from syncvar.variables.create import (
    ShardInfo,
    checked_name,
    checked_shape,
    checked_trainable,
    checked_value,
    require_shape,
    takes_shard_info,
)
from syncvar.variables.partitioners import row_ranges
from syncvar.variables.policy import (
    AccessKind,
    VariableAggregation,
    VariableSynchronization,
    as_member,
    resolve,
)
from syncvar.variables.values import check_rows, checked_dtype, plain_array
from syncvar.variables.variable import Explanation, Variable
from syncvar.variables.variable_owner import current_owner
from syncvar.variables.variable_writes import checked_operand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from syncvar.parameter_server.request_client import ResultRef, Ticket
    from syncvar.variables.variable_owner import RemoteOptimizer


class PullBatch:
    """The pulls of one request; it assembles their results into arrays."""

    def __init__(self, request: RequestBuilder) -> None:
        self._request = request
        self._pulls: list[
            tuple[ServerVariable, list[ResultRef], NDArray[Any] | None, tuple[int, ...]]
        ] = []

    def add(self, variable: ServerVariable, indices: Any = None) -> None:
        """Add the pulls of a variable, or of rows of it."""
        rows, shape = None, variable.shape
        if indices is not None:
            rows, shape = variable.checked_indices(indices)
        refs = []
        for index, (start, stop) in enumerate(variable.row_ranges):
            inside = None if rows is None else rows[(rows >= start) & (rows < stop)] - start
            if inside is None or inside.size:
                server, key = variable.server_of(index), variable.key_of(index)
                refs.append(self._request.pull(server, key, inside))
        self._pulls.append((variable, refs, rows, shape))

    def arrays(self, ticket: Ticket) -> list[NDArray[Any]]:
        """Return the values, read-only, when the request is over."""
        return [
            _assemble(variable, [ticket.array(*ref) for ref in refs], rows, shape)
            for variable, refs, rows, shape in self._pulls
        ]


class ServerVariable(Variable):
    """A variable on servers; `sv.Variable` makes it in a ParameterServerStrategy's scope.

    `assign`, `assign_add` and the other writes push and return at once; servers apply each exactly
    once. A read pulls, and sees this worker's own pushes. Nothing is collective.
    """

    def __init__(  # noqa: PLR0913  (public signature)
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = VariableSynchronization.AUTO,
        aggregation: Any = VariableAggregation.NONE,
        shape: Any = None,
        compress: Any = None,
    ) -> None:
        owner: Any = current_owner()
        if getattr(owner, "servers", None) is None:
            raise UsageError(
                "server-side variables are made by sv.Variable(…) in the scope of an "
                "sv.ParameterServerStrategy"
            )
        self._requested = as_member(VariableSynchronization, synchronization, "synchronization")
        self._aggregation = as_member(VariableAggregation, aggregation, "aggregation")
        self._synchronization, _ = resolve(self._requested)
        base = checked_name(name)
        if compress is not None:
            raise ConfigError(
                f"variable {base!r}: leave out compress=, because the value is on servers, and "
                "each worker's pushes travel as they are"
            )
        checked = None if dtype is None else checked_dtype(dtype)
        self._trainable = checked_trainable(trainable, usual=True)
        lengths, by_shards = checked_shape(base, shape), takes_shard_info(initial_value)
        known, value = require_shape(base, lengths, checked) if by_shards else None, None
        if known is None:
            value = checked_value(
                base, initial_value, checked, self._aggregation, calls=owner.is_chief, shape=lengths
            )
            known = None if value is None else (value.shape, value.dtype)
        self._name = owner.here.names.take(base)
        self._owner: Any = owner
        self._rule = "the value is on servers, and each worker pushes to them"
        self._first, self._staleness = owner.here.next_server, owner.staleness
        if known is None:
            self._describe(lengths)
        else:
            self._shape, self._dtype = known
            self._split(owner.servers.partition(self._shape, self._dtype))
            if by_shards and owner.is_chief:
                self._create_by_shards(initial_value)
            else:
                self._create(value)
        owner.here.counts_barriers |= self._staleness == 0
        owner.here.next_server = (self._first + self.num_shards) % owner.server_count
        if self.num_shards > 1:
            self.__class__ = ShardedVariable

    # -- what it is --------------------------------------------------------------------------------

    @property
    def stepper(self) -> RemoteOptimizer:  # type: ignore[override]
        """The object that makes an optimizer's steps of this variable."""
        servers: RemoteOptimizer = self._owner.servers
        return servers

    @property
    def num_shards(self) -> int:
        """Number of parts, each on one server."""
        return len(self._ranges)

    @property
    def row_ranges(self) -> list[list[int]]:
        """First row, and row after the last, of each part."""
        return [list(one) for one in self._ranges]

    @property
    def staleness(self) -> int | None:
        """Bound in ticks of pushes that a read may miss; None for no bound."""
        bound: int | None = self._staleness
        return bound

    def set_staleness(self, staleness: int | None) -> None:
        """Change the bound of pushes that a read may miss; to the same on every worker.

        Args:
            staleness: Ticks, at least 0; or None for no bound.

        Raises:
            ConfigError: Another value.
        """
        self._staleness = checked_staleness(staleness)
        self._owner.here.counts_barriers |= self._staleness == 0
        request = RequestBuilder()
        for index in range(self.num_shards):
            server, key = self.server_of(index), self.key_of(index)
            request.add(server, "staleness", key=key, staleness=self._staleness)
        self._owner.servers.push(request, f"set_staleness of variable {self._name!r}")

    def key_of(self, shard: int) -> str:
        """Return the name of a part on its server; for this package only."""
        return f"{self._name}/{shard}"

    def server_of(self, shard: int) -> int:
        """Return the server of a part: round-robin over the parts of all variables."""
        server: int = (self._first + shard) % self._owner.server_count
        return server

    def explain(self) -> Explanation:
        """Return the servers of its parts and its bound of staleness; sends nothing."""
        bound = "any" if self._staleness is None else str(self._staleness)
        servers = ", ".join(str(self.server_of(index)) for index in range(self.num_shards))
        nbytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        numbers: dict[str, Any] = {"shards": self.num_shards, "nbytes": nbytes}
        detail = f"servers {servers}; staleness {bound}"
        return Explanation("on servers", self._requested.name, self._rule, numbers, [], detail)

    def pin(self, mode: str | None) -> None:
        """Raise UsageError: server-side variables defer no writes."""
        raise UsageError(
            f"variable {self._name!r} is on servers: its pushes start at once; write "
            f"v.set_staleness(k) to bound what reads miss"
        )

    def __repr__(self) -> str:
        name = "ShardedVariable" if self.num_shards > 1 else "Variable"
        return (
            f"<sv.{name} {self._name!r} on servers shape={self._shape} dtype={self._dtype.name} "
            f"shards={self.num_shards}>"
        )

    def _repr_html_(self) -> str:
        kind = "ShardedVariable" if self.num_shards > 1 else "Variable"
        rows = [
            ("stored", "on servers"),
            ("aggregation", self._requested.name),
            ("dtype", self._dtype.name),
            ("shape", self._shape),
            ("shards", self.num_shards),
        ]
        return html_table(f"sv.{kind} {self._name}", rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> ServerVariable:
        with self._owner.scope():
            copy: Any = Variable(
                self.read_value(),
                trainable=self._trainable,
                name=self._name,
                synchronization=self._requested,
                aggregation=self._aggregation,
            )
        memo[id(self)] = copy
        return copy  # type: ignore[no-any-return]

    # -- reading -----------------------------------------------------------------------------------

    def read_value(self, copy: bool = True) -> NDArray[Any]:  # noqa: FBT001, FBT002  (public signature)
        """Pull the value, read-only.

        It includes all pushes of this worker, and those of others that the staleness bound
        requires.

        Args:
            copy: Has no effect: each pull makes a new array.

        Returns:
            The value.

        Raises:
            PeerLost: A server has failed, and no other has a copy.
            DeadlineExceeded: The servers did not answer in time; with a bound of staleness, also
                because another worker is behind.

        Cost: one round trip to the servers of its parts; `strategy.read_all` reads many variables
            in one.
        """
        del copy
        value: NDArray[Any] = self._owner.read_all([self])[0]
        return value

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
        """Return `read_value()`: all workers share one value.

        Raises:
            ConfigError: There is no such worker.
        """
        workers = self._owner.num_replicas_in_sync
        is_whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
        if not is_whole or not 0 <= rank < workers:
            raise ConfigError(f"read_from: there is no worker {rank!r}: write 0 to {workers - 1}")
        return self.read_value()

    def lookup(self, indices: Any) -> NDArray[Any]:
        """Pull rows, in the order of `indices`.

        Args:
            indices: Integers in [0, rows), of any shape S; a row may occur several times.

        Returns:
            Array of shape S + shape[1:], read-only.

        Raises:
            RowOutOfRange: An index is outside the variable; nothing was sent.
            ConfigError: The variable is a scalar, or indices are no integers.

        Cost: one round trip to the servers that have such rows; only these rows travel.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2))
            >>> with strategy.scope():
            ...     table = sv.Variable([[0.0], [1.0], [2.0]])
            >>> table.lookup([2, 0, 2]).tolist()
            [[2.0], [0.0], [2.0]]
        """
        rows: NDArray[Any] = self._owner.read_all([(self, indices)])[0]
        return rows

    # -- writing -----------------------------------------------------------------------------------

    def _assign(self, operation: AccessKind, x: Any, done: int = 0) -> Variable:
        del done
        array = checked_operand(self, operation, x, is_reduced=False)
        with self._owner.servers.pushing(
            f"{operation.value} of variable {self._name!r}"
        ) as request:
            self.add_push(request, operation.value, array)
        return self

    def _scatter(self, operation: AccessKind, indices: Any, values: Any) -> Variable:
        call = f"{operation.value} of variable {self._name!r}"
        rows = check_rows(operation, indices, values, self._shape, self._dtype, call)
        with self._owner.servers.pushing(call) as request:
            self.add_push(request, operation.value, rows.values, rows.indices)
        return self

    def add_push(
        self,
        request: RequestBuilder,
        method: str,
        value: NDArray[Any],
        rows: NDArray[Any] | None = None,
        **step: Any,
    ) -> None:
        """Add a push of a copy of the value, or of rows, to a request; for this package only."""
        for index, (start, stop) in enumerate(self._ranges):
            server, key = self.server_of(index), self.key_of(index)
            if rows is None:
                part = value if self.num_shards == 1 else value[start:stop]
                request.push(server, key, method, np.array(part, copy=True), **step)
                continue
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                request.push(server, key, method, value[inside], rows[inside] - start, **step)

    def _split(self, parts: int) -> None:
        rows = self._shape[0] if self._shape else 1
        self._ranges = [(start, stop) for start, stop in row_ranges(rows, parts)]

    def spec_of(self, shard: int) -> Spec:
        """Return the shape, dtype and position of a part; for this package only."""
        start, stop = self._ranges[shard]
        shape = (stop - start, *self._shape[1:]) if self._shape else ()
        return Spec(
            shape, self._dtype.name, self._aggregation.name, self._shape, start, self.num_shards
        )

    def _create_by_shards(self, make: Callable[..., Any]) -> None:
        """Create the parts on the servers one after the other, so that one at a time is here."""
        for index, (start, _) in enumerate(self._ranges):
            spec = self.spec_of(index)
            offset = (start, *(0 for _ in spec.shape[1:])) if spec.shape else ()
            value = checked_value(
                self._name,
                partial(make, shard_info=ShardInfo(spec.shape, offset)),
                self._dtype,
                self._aggregation,
                calls=True,
                shape=spec.shape,
            )
            assert value is not None
            request = RequestBuilder()
            request.create(self.server_of(index), self.key_of(index), spec, self._staleness, value)
            self._owner.servers.ask(request, f"making variable {self._name!r}")

    def _create(self, value: NDArray[Any] | None) -> None:
        """Create the parts on the servers; workers other than the chief wait for them."""
        request = RequestBuilder()
        for index, (start, stop) in enumerate(self._ranges):
            server, key, spec = self.server_of(index), self.key_of(index), self.spec_of(index)
            if value is not None and self._owner.is_chief:
                part = value[start:stop] if self._shape else value
                request.create(server, key, spec, self._staleness, part)
            else:
                request.expect(server, key, spec)
        self._owner.servers.ask(request, f"making variable {self._name!r}")

    def _describe(self, lengths: tuple[int, ...] | None) -> None:
        """Read shape and dtype from a server: the chief has called the initial value."""
        request, name = RequestBuilder(), self._name
        server, number = request.add(self._first, "describe", key=self.key_of(0))
        ticket = self._owner.servers.ask(request, f"making variable {name!r}")
        found = ticket.results[server][number]
        if found["aggregation"] != self._aggregation.name:
            raise ConfigError(
                f"variable {name!r} has aggregation {found['aggregation']} on the chief, "
                f"{self._aggregation.name} here"
            )
        self._shape, self._dtype = tuple(found["whole"]), np.dtype(found["dtype"])
        if lengths not in (None, self._shape):
            raise ConfigError(
                f"variable {name!r} has shape {self._shape} on the chief, and shape= says "
                f"{lengths} here"
            )
        self._split(found["shards"])

    def checked_indices(self, indices: Any) -> tuple[NDArray[Any], tuple[int, ...]]:
        """Return the rows of indices, and the shape of a lookup; for this package only."""
        call = f"lookup in variable {self._name!r}"
        shape = np.shape(plain_array(indices, f"{call}: indices"))
        values = np.broadcast_to(np.zeros((), self._dtype), (*shape, *self._shape[1:]))
        method = AccessKind.SCATTER_UPDATE
        rows = check_rows(method, indices, values, self._shape, self._dtype, call)
        return rows.indices, (*shape, *self._shape[1:])


class ShardedVariable(ServerVariable):
    """A server-side variable that a partitioner has split along its first axis.

    `sv.Variable` makes it in the scope of a ParameterServerStrategy with a `variable_partitioner`.
    It behaves as an array like any variable. All of its servers apply a write, or none.

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


def _assemble(
    variable: ServerVariable,
    parts: list[NDArray[Any]],
    rows: NDArray[Any] | None,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    if rows is None:
        result = parts[0] if len(parts) == 1 else np.concatenate(parts)
    elif variable.num_shards == 1 and parts:
        result = parts[0]
    else:
        result = np.empty((rows.size, *variable.shape[1:]), variable.dtype)
        remaining = iter(parts)
        for start, stop in variable.row_ranges:
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                result[inside] = next(remaining)
    result = result.reshape(shape)
    result.flags.writeable = False
    return result


def checked_staleness(staleness: Any) -> int | None:
    """Return a bound of staleness; raise ConfigError for anything else."""
    if staleness is None:
        return None
    if isinstance(staleness, bool) or not isinstance(staleness, int | np.integer) or staleness < 0:
        raise ConfigError(
            f"staleness must be a number of ticks of at least 0, or None for any number, not "
            f"{staleness!r:.80}"
        )
    return int(staleness)
