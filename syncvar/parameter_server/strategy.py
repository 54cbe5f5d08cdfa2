"""`ParameterServerStrategy`: variables live on servers; workers push to them and pull from them.

`ServerAccess` sends the requests of a strategy.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.bootstrap.process import current, environment_here, joined, on_join
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.core.settings import RuntimeConfig
from syncvar.optimizers.gradient_call import rows_of
from syncvar.optimizers.update_rules import compute_dtype
from syncvar.parameter_server.request_client import RequestBuilder, Ticket
from syncvar.parameter_server.server_variables import PullBatch, ServerVariable, checked_staleness
from syncvar.parameter_server.session import LocalServers, ServerConnection
from syncvar.runtime.work import checked_timeout
from syncvar.strategies.base import Strategy
from syncvar.variables.policy import AccessKind, CallContext, VariableSynchronization
from syncvar.variables.values import check_rows, operand_array
from syncvar.variables.variable_owner import (
    ScopeEntry,
    current_scope,
    current_stacks,
    keep_scopes_when_joining,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.core.environment import RankEnvironment
    from syncvar.variables.variable import Variable

_PER_WORKER = (VariableSynchronization.ON_READ.name, VariableSynchronization.NONE.name)
_PUSHES_MAX = 32  # pushes of one worker without an answer


class ParameterServerStrategy(Strategy):
    """Variables live on server processes, and workers push and pull without waiting for each other.

    Start it with `syncvar-launch --workers 4 --servers 2 train.py`. `v.assign_add(x)` pushes and
    returns at once; servers apply each push exactly once, even if processes die. `v.read_value()`
    pulls. Servers get whole variables, or the parts that a partitioner makes, in round-robin order.
    With one worker and no launcher, a server inside the process serves.

    A clock of ticks bounds how old a read may be: each worker ends its step with
    `strategy.tick()`. With `staleness` k, a read at clock c waits until it includes all pushes that
    other workers made before their tick c - k. With 0, servers combine the pushes of a step as
    synchronous training does, with the bytes of reproducible=True. They use the variable's
    aggregation, or SUM where it is NONE. With None, no read waits.

    The constructor, variables, reads and writes are not collective, and the launcher can restart a
    worker that dies. `reduce`, `gather` and datasets are collectives of all workers.

    Args:
        variable_partitioner: One of `sv.partitioners`, or a function of shape and dtype that
            returns the number of parts of each axis; None for whole variables.
        staleness: Bound in ticks of variables without `set_staleness`: at least 0, or None.
        timeout: Seconds that a call waits; None means the job's default.

    Raises:
        UsageError: There are several workers and no servers.
        ConfigError: An argument is invalid.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.ParameterServerStrategy(staleness=None)
        >>> with strategy.scope():
        ...     w = sv.Variable([1.0, 2.0])
        >>> _ = w.assign_add([1.0, 1.0])
        >>> w.numpy()
        array([2., 3.], dtype=float32)
    """

    _has_copies = False

    def __init__(
        self,
        variable_partitioner: Callable[[Sequence[int], Any], list[int]] | None = None,
        *,
        staleness: int | None = 0,
        timeout: float | None = None,
        **_foreign: Never,
    ) -> None:
        if _foreign:
            raise unexpected_keyword(type(self), _foreign)
        if variable_partitioner is not None:
            from syncvar.core.migration_hints import object_hint

            hint = object_hint(variable_partitioner)
            if hint or not callable(variable_partitioner):
                hint = hint or ": write sv.partitioners.FixedShards(2)"
                raise ConfigError(
                    f"variable_partitioner must be a partitioner or None, not "
                    f"{variable_partitioner!r:.80}{hint}"
                )
        self.staleness = checked_staleness(staleness)
        self.timeout = None if timeout is None else checked_timeout(timeout)
        self.strict = self.check_cross_writes = self.is_default = False
        self.reproducible = True
        self._check_every = 0
        self.variable_class, self.create_storage = self._variable_class, self._create_storage
        self._aligned = ()  # `run` is no collective
        self._replica = ScopeEntry(self, CallContext.REPLICA)
        self.queue = self.registry = None
        self.here = _servers_here()
        self.places = current_stacks()
        self.servers = ServerAccess(self, self.here, variable_partitioner)

    def __getattr__(self, name: str) -> Any:
        if name in ("context", "_communicator"):  # join only for what needs the other workers
            self.context = current()
            self._communicator = self.context.world
            return self.__dict__[name]
        return super().__getattr__(name)  # type: ignore[misc]

    # -- what variables need -----------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this worker creates the variables' values."""
        return self.here.rank == 0

    @property
    def server_count(self) -> int:
        """Number of servers of the job."""
        return self.here.count

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers; 1 in a function that a ClusterCoordinator has scheduled."""
        return 1 if self.servers.in_scheduled_function else self.here.workers

    @property
    def replica_id(self) -> int:
        """Number of this worker."""
        return 0 if self.servers.in_scheduled_function else self.here.rank

    def _variable_class(self, synchronization: Any) -> type[Any] | None:
        """Return the class of server-side variables; None for variables of each worker."""
        name = getattr(synchronization, "name", synchronization)
        is_per_worker = isinstance(name, str) and name.upper() in _PER_WORKER
        return None if is_per_worker else ServerVariable

    # -- what programs call ------------------------------------------------------------------------

    def read_all(self, variables: Iterable[Variable | tuple[Variable, Any]]) -> list[NDArray[Any]]:
        """Pull several variables, or rows of them, in one round trip.

        Args:
            variables: Server-side variables of this strategy; (variable, indices) stands for
                `variable.lookup(indices)`.

        Returns:
            Their values, read-only, in order.

        Raises:
            ConfigError: An item is not such a variable.
            PeerLost: A server has failed, and no other has a copy.
            DeadlineExceeded: The servers did not answer in time.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy()
            >>> with strategy.scope():
            ...     a, b = sv.Variable(1.0), sv.Variable(2)
            >>> strategy.read_all([a, b])
            [array(1., dtype=float32), array(2)]
        """
        return self._read(self._checked(variables, "read_all"), snapshot=False)

    def snapshot(self, variables: Iterable[Variable | tuple[Variable, Any]]) -> list[NDArray[Any]]:
        """Read several variables at one version of all servers; other workers continue to write.

        The result has a prefix of each worker's pushes, the same prefix in all variables. It
        contains all pushes of this worker, and each transaction as a whole or not at all. Use it
        for evaluation and saving.

        Args:
            variables: As in `read_all`.

        Returns:
            Their values, read-only, in order.

        Cost: one round trip if the servers happen to be at one version; else two more, during
            which they delay pushes.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy()
            >>> with strategy.scope():
            ...     a, b = sv.Variable(1.0), sv.Variable(1.0)
            >>> strategy.snapshot([a, b])
            [array(1., dtype=float32), array(1., dtype=float32)]
        """
        chosen = self._checked(variables, "snapshot")
        self.here.settle("snapshot", self.timeout)
        return self._read(chosen, snapshot=True)

    def tick(self) -> None:
        """End this worker's clock step, after servers have acknowledged its pushes.

        Raises:
            SyncvarError: A server refused a push or has failed.

        Example:
            >>> import syncvar as sv
            >>> sv.ParameterServerStrategy(staleness=2).tick()
        """
        here = self.here
        here.settle("tick", self.timeout)
        here.clock += 1
        request = RequestBuilder()
        request.on_all(here.count, "tick", clock=here.clock)
        here.pushes.append((here.session.request(request.parts()), "tick"))

    def staleness_counts(self) -> dict[int, int]:
        """Return how stale the reads of all workers were: lead in ticks -> number of reads.

        The lead is that of the reader over the slowest worker. Reads of variables with staleness
        None do not count.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy(staleness=0)
            >>> with strategy.scope():
            ...     v = sv.Variable(0)
            >>> int(v), 0 in strategy.staleness_counts()
            (0, True)
        """
        request = RequestBuilder()
        refs = request.on_all(self.here.count, "stats")
        ticket = self.servers.ask(request, "staleness_counts")
        counts: collections.Counter[int] = collections.Counter()
        for server, number in refs:
            counts.update(ticket.results[server][number]["staleness"])
        return dict(sorted(counts.items()))

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that makes all writes of its block atomic on all servers.

        The writes start when the block ends. Servers apply all or none, and snapshots see all or
        none. If an exception leaves the block, no write starts. Reads inside do not see them.

        Raises:
            UsageError: The block is inside another transaction.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy()
            >>> with strategy.scope():
            ...     a, b = sv.Variable(0), sv.Variable(0)
            >>> with strategy.transaction():
            ...     _ = a.assign_add(1)
            ...     _ = b.assign_add(1)
            >>> int(a), int(b)
            (1, 1)
        """
        return self.servers.transaction()

    def _require_member(self) -> None:
        """Do nothing: every worker is a member."""

    def _send_queued(self) -> None:
        """Do nothing: these variables have no deferred writes."""

    def _checked(self, variables: Iterable[Any], method: str) -> list[tuple[ServerVariable, Any]]:
        pairs = [
            one if isinstance(one, tuple) and len(one) == 2 else (one, None) for one in variables
        ]
        for one, _ in pairs:
            if not isinstance(one, ServerVariable) or one.strategy.here is not self.here:
                raise ConfigError(
                    f"{method} takes server-side variables of this strategy, not {one!r:.80}"
                )
        return pairs

    def _read(
        self, pairs: list[tuple[ServerVariable, Any]], *, snapshot: bool
    ) -> list[NDArray[Any]]:
        names = ", ".join(repr(one.name) for one, _ in pairs[:3])
        call = "snapshot" if snapshot else f"reading {names}"
        self.servers.require_scope(call)
        request = RequestBuilder()
        pulls = PullBatch(request)
        for one, indices in pairs:
            pulls.add(one, indices)
        if not request:
            return pulls.arrays(Ticket({}))
        session = self.here.session
        ticket = session.request(request.parts(), snapshot=snapshot)
        return pulls.arrays(session.wait(ticket, call, self.timeout))


class ServerAccess:
    """The requests of one strategy: reads, pushes and optimizers' steps."""

    def __init__(
        self,
        strategy: Strategy,
        here: ServerConnection,
        partitioner: Callable[[Sequence[int], Any], list[int]] | None,
    ) -> None:
        self._strategy, self.here, self._partitioner = strategy, here, partitioner
        self._rules: set[str] = set()  # custom update rules that all servers have imported
        self._open: RequestBuilder | None = None  # the writes of a transaction
        self.in_scheduled_function = False  # whether a function of a ClusterCoordinator runs

    @contextlib.contextmanager
    def as_only_worker(self) -> Iterator[None]:
        """Show a scheduled function this worker as the only one."""
        before, self.in_scheduled_function = self.in_scheduled_function, True
        try:
            yield
        finally:
            self.in_scheduled_function = before

    def partition(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return the number of parts of a variable."""
        if self._partitioner is None or not shape:
            return 1
        parts = self._partitioner(shape, dtype)
        is_list = isinstance(parts, list | tuple) and len(parts) == len(shape)
        if not is_list or not all(map(_is_part_count, parts)):
            raise ConfigError(
                f"variable_partitioner returned {parts!r:.80} for shape {shape}: it must return "
                f"{len(shape)} numbers of at least 1"
            )
        if any(one > 1 for one in parts[1:]):
            raise ConfigError(
                f"variable_partitioner returned {parts!r:.80}: variables are cut along their first "
                f"axis only"
            )
        return int(min(parts[0], max(1, shape[0])))

    def ask(
        self,
        request: RequestBuilder,
        call: str,
        *,
        snapshot: bool = False,
        timeout: float | None = None,
    ) -> Ticket:
        """Send a request and wait for the answers."""
        self.require_scope(call)
        session = self.here.session
        ticket = session.request(request.parts(), snapshot=snapshot)
        return session.wait(ticket, call, self._strategy.timeout if timeout is None else timeout)

    @contextlib.contextmanager
    def pushing(self, call: str) -> Iterator[RequestBuilder]:
        """Yield a request for writes, and send it; in a transaction, yield the open request."""
        if self._open is not None:
            yield self._open
            return
        request = RequestBuilder()
        yield request
        self.push(request, call)

    def push(self, request: RequestBuilder, call: str) -> None:
        """Send a request without waiting; raise the error of an earlier push."""
        self.require_scope(call)
        here = self.here
        if not request:
            return
        while here.pushes and here.pushes[0][0].is_over:
            here.session.wait(*here.pushes.popleft())  # raises its error
        if len(here.pushes) >= _PUSHES_MAX:
            here.settle(call, self._strategy.timeout)
        here.pushes.append((here.session.request(request.parts()), call))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Send all writes of a block as one request."""
        if self._open is not None:
            raise UsageError("a transaction is begun inside another one")
        request = self._open = RequestBuilder()
        try:
            yield
        finally:
            self._open = None
        self.push(request, "transaction")

    def require_scope(self, call: str) -> None:
        """Raise UsageError in the scope of another strategy."""
        place = current_scope()
        if place is not None and place.owner is not self._strategy and not place.owner.is_default:
            raise UsageError(
                f"{call}: the variable belongs to another strategy than the scope it is used in; "
                f"use it under `with variable.strategy.scope():`, or outside every scope"
            )

    def step(
        self,
        rule: tuple[str, dict[str, Any]],
        rate: float,
        pairs: list[tuple[Any, Any]],
        combine: str,
    ) -> None:
        """Push gradients, from which the servers make an optimizer's step of each variable."""
        self.prepare(rule)
        steps: list[tuple[Any, NDArray[Any], NDArray[Any] | None]] = []
        for gradient, variable in pairs:
            if gradient is None:
                continue
            if variable.dtype.kind not in "fV":
                raise ConfigError(
                    f"variable {variable.name!r} is {variable.dtype.name}; an optimizer steps real "
                    f"floating numbers"
                )
            call, dtype = f"gradient of variable {variable.name!r}", compute_dtype(variable.dtype)
            pair = rows_of(gradient, variable.shape)
            if pair is not None:
                rows = check_rows(AccessKind.SCATTER_ADD, *pair, variable.shape, dtype, call)
                steps.append((variable, rows.values, rows.indices))
            else:
                steps.append((variable, operand_array(gradient, variable.shape, dtype, call), None))
        settings = {"rule": list(rule), "rate": rate, "combine": combine}
        with self.pushing("apply_gradients") as request:
            for variable, value, indices in steps:
                variable.add_push(request, "step", value, indices, **settings)

    def prepare(self, rule: tuple[str, dict[str, Any]]) -> None:
        """Make every server import a custom update rule, before the first step with it."""
        name = rule[1].get("rule", "")
        if not name or name in self._rules:
            return
        if name.startswith("__main__:"):
            raise ConfigError(
                f"update rule {name.partition(':')[2]!r} is in the script itself, which servers do "
                f"not run: put it into a module beside the script and import it from there"
            )
        request = RequestBuilder()
        request.on_all(self.here.count, "rule", rule=list(rule))
        self.ask(request, f"asking servers for update rule {name}")
        self._rules.add(name)


def _is_part_count(count: Any) -> bool:
    is_whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    return is_whole and bool(count >= 1)


# -- the connection to the servers -----------------------------------------------------------------

_by_process: dict[int, ServerConnection] = {}  # process id -> connection: a forked process has none
_lock = threading.Lock()


def _servers_here() -> ServerConnection:
    """Return this worker's connection to the servers; the first call makes it."""
    context = joined()
    local: LocalServers | None = None if context is None else context.extras.get("servers")
    if context is not None and local is not None:
        here: ServerConnection | None = context.extras.get("servers_here")
        if here is None:
            session = local.session(context.rank, context.config.collective_timeout_s)
            here = ServerConnection(session, context.rank, context.world_size)
            context.extras["servers_here"] = here
            _listen_to_calls(context, here)
        return here
    environment = environment_here()
    if environment is None or not environment.servers:
        workers = current().world_size
        if workers > 1:
            raise UsageError(
                f"ParameterServerStrategy: {workers} workers and no servers to hold their "
                f"variables; start them with syncvar-launch --workers {workers} --servers 1 …"
            )
    with _lock:
        here = _by_process.get(os.getpid())
        if here is None:
            here = _by_process[os.getpid()] = _connect(environment)
        return here


def _connect(environment: RankEnvironment | None) -> ServerConnection:
    if environment is not None and environment.servers:
        from syncvar.parameter_server.worker_session import WorkerSession

        config = RuntimeConfig.from_mapping(os.environ).consistent()
        session = WorkerSession(environment, config, os.environ)
        here = ServerConnection(session, environment.rank, environment.world_size)
        session.before_end.append(here.settle)
    else:
        local_session = LocalServers(1).session(0, current().config.collective_timeout_s)
        here = ServerConnection(local_session, 0, 1)
    register_exit(here.leave)

    def join(context: ProcessContext) -> None:
        keep_scopes_when_joining(context)
        _listen_to_calls(context, here)

    on_join(join)
    context = joined()
    if context is not None:
        _listen_to_calls(context, here)
    return here


def _listen_to_calls(context: ProcessContext, here: ServerConnection) -> None:
    if context.engine is not None:
        context.engine.before_each_call(here.before_call)
