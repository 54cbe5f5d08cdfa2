"""The strategy whose variables live on servers: workers push and pull, each at its own pace."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Never

from syncvar.bootstrap.process import current, environment_here, joined, on_join
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.lazy_import import unexpected
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.client.local_servers import LocalServers
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.parameter_server.client.request_client import Ticket
from syncvar.parameter_server.server_access import ServerAccess, ServersHere, checked_staleness
from syncvar.parameter_server.server_variables import Reads, ServerVariable
from syncvar.runtime.timeouts import checked_timeout
from syncvar.strategies.base import Strategy
from syncvar.variables.policy import CallContext, VariableSynchronization
from syncvar.variables.scope import ScopeEntry, stacks_here, take_places_along

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext as Joined
    from syncvar.core.environment import RankEnvironment
    from syncvar.variables.variable import Variable

_APART = (VariableSynchronization.ON_READ, VariableSynchronization.NONE)


class ParameterServerStrategy(Strategy):
    """Variables live on server processes: `syncvar-launch --workers 4 --servers 2 train.py`. Each worker goes at its own pace.

    `v.assign_add(x)` pushes and returns at once; it is applied exactly once, whatever is sent again or dies. `v.read_value()`
    pulls. Whole variables, or the parts into which a partitioner cuts them, are given to the servers in turns. With one
    worker and no launcher a server inside the process serves.

    How old what a worker reads may be is counted in ticks: each worker ends its step with `strategy.tick()`. With `staleness`
    k a read at clock c waits until it has all pushes that the others made before their tick c - k. With 0 the pushes of a
    step are combined as in synchronous training, to the same bits as with reproducible=True: by the variable's aggregation,
    SUM where it is NONE. With None nobody waits.

    Constructing it, making variables, reading and writing are no collectives; a worker that dies can be started again alone.
    `reduce`, `gather` and datasets are collectives of all workers, as in any strategy.

    Args:
        variable_partitioner: Cuts large variables along their first axis: one of `sv.partitioners`, or a function of shape and dtype
            that returns the number of parts of each axis; None for none.
        staleness: Of variables whose `set_staleness` was not called: at least 0, or None.
        timeout: Seconds that a call waits; None means the job's default.

    Raises:
        UsageError: There are several workers and no servers.
        ConfigError: A wrong argument.

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
            raise unexpected(type(self), _foreign)
        if variable_partitioner is not None:
            from syncvar.core.migration_hints import object_hint

            hint = object_hint(variable_partitioner)
            if hint or not callable(variable_partitioner):
                raise ConfigError(
                    "variable_partitioner must be a partitioner or None, not "
                    f"{variable_partitioner!r:.80}{hint or ': write sv.partitioners.FixedShards(2)'}"
                )
        self.staleness = checked_staleness(staleness)
        self.timeout = None if timeout is None else checked_timeout(timeout)
        self.strict, self.check_cross_writes, self.reproducible, self.is_default = (
            False,
            False,
            True,
            False,
        )
        self._check_every = 0
        self._aligned, self._replica = (
            (),
            ScopeEntry(self, CallContext.REPLICA),
        )  # `run` is no meeting: each worker goes at its own pace
        self.queue = self.roster = None
        self.here = _servers_here()
        self.places = stacks_here()
        self.servers = ServerAccess(self, self.here, variable_partitioner)

    def __getattr__(self, name: str) -> Any:
        if name in ("context", "_communicator"):  # joining is for what needs the other workers
            self.context = current()
            self._communicator = self.context.world
            return self.__dict__[name]
        return super().__getattr__(name)  # type: ignore[misc]

    # -- what variables need -----------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this worker gives variables their initial values."""
        return self.here.rank == 0

    @property
    def server_count(self) -> int:
        """How many servers the job has."""
        return self.here.count

    @property
    def num_replicas_in_sync(self) -> int:
        """Workers of the job; 1 in a function that a ClusterCoordinator has scheduled."""
        return 1 if self.servers.is_one else self.here.workers

    @property
    def replica_id(self) -> int:
        """This worker."""
        return 0 if self.servers.is_one else self.here.rank

    def _kind_of_variable(self, synchronization: Any) -> type[Any] | None:
        """Return the class of its variables: those that are each worker's own are the usual ones."""
        name = getattr(synchronization, "name", synchronization)
        return (
            None
            if isinstance(name, str) and name.upper() in [one.name for one in _APART]
            else ServerVariable
        )

    # -- what programs call ------------------------------------------------------------------------

    def read_all(self, variables: Iterable[Variable | tuple[Variable, Any]]) -> list[NDArray[Any]]:
        """Pull several variables, or rows of them, in one round trip.

        Args:
            variables: Of this strategy, on servers; (variable, indices) stands for `variable.lookup(indices)`.

        Returns:
            Their values, read-only, in order.

        Raises:
            ConfigError: Something else than such variables.
            PeerLost: A server is gone, and no other holds a copy.
            DeadlineExceeded: No answer in time.

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
        """Read several variables as they were at one version of all servers, while other workers go on writing.

        Of each worker the result has the same pushes in all variables: all that it made up to some point, and none after it; a
        transaction is in it as a whole or not at all. All pushes of this worker are in it. For evaluation and saving.

        Args:
            variables: As `read_all`.

        Returns:
            Their values, read-only, in order.

        Cost: one round trip, if what the servers have then is one version; else two more, during which they hold pushes back.

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
        """End this worker's clock step, after its pushes are acknowledged.

        Raises:
            SyncvarError: A push was refused, or a server is gone.

        Example:
            >>> import syncvar as sv
            >>> sv.ParameterServerStrategy(staleness=2).tick()
        """
        here = self.here
        here.settle("tick", self.timeout)
        here.clock += 1
        asking = RequestBuilder()
        for server in range(here.count):
            asking.tick(server, here.clock)
        here.pushes.append((self.here.session.request(asking.parts()), "tick"))

    def staleness_counts(self) -> dict[int, int]:
        """Return how stale reads may have been: ticks that readers were ahead of the slowest worker -> reads, of all workers so far.

        Reads of variables with staleness None are not counted.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.ParameterServerStrategy(staleness=0)
            >>> with strategy.scope():
            ...     v = sv.Variable(0)
            >>> int(v), 0 in strategy.staleness_counts()
            (0, True)
        """
        asking = RequestBuilder()
        found = [asking.stats(server) for server in range(self.here.count)]
        told = self.servers.ask(asking, "staleness_counts")
        made: dict[int, int] = {}
        for server, number in found:
            for ticks, reads in told.results[server][number]["staleness"].items():
                made[ticks] = made.get(ticks, 0) + reads
        return dict(sorted(made.items()))

    def transaction(self) -> AbstractContextManager[None]:
        """Make all writes of a block one: applied together on all servers, or not at all, and seen so by snapshots.

        They are sent when the block ends; nothing is, if an exception leaves it. What is read inside does not have them.

        Raises:
            UsageError: Inside another one.

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

    # -- inside ------------------------------------------------------------------------------------

    def _require_member(self) -> None:
        """Do nothing: every worker is a member."""

    def _send_queued(self) -> None:
        """Do nothing: no write of these variables waits in a queue."""

    def _checked(self, variables: Iterable[Any], what: str) -> list[tuple[ServerVariable, Any]]:
        chosen = [
            one if isinstance(one, tuple) and len(one) == 2 else (one, None) for one in variables
        ]
        for one, _ in chosen:
            if not isinstance(one, ServerVariable) or one.strategy.here is not self.here:
                raise ConfigError(
                    f"{what} takes variables on servers that this strategy has made, not {one!r:.80}"
                )
        return chosen

    def _read(
        self, chosen: list[tuple[ServerVariable, Any]], *, snapshot: bool
    ) -> list[NDArray[Any]]:
        what = (
            "snapshot"
            if snapshot
            else f"reading {', '.join(repr(one.name) for one, _ in chosen[:3])}"
        )
        self.servers.require_place(what)
        asking = RequestBuilder()
        reads = Reads(asking)
        for one, indices in chosen:
            reads.add(one, indices)
        parts = asking.parts()
        ticket = self.here.session.request(parts, snapshot=snapshot) if parts else Ticket({})
        return reads.arrays(self.here.session.wait(ticket, what, self.timeout) if parts else ticket)


# -- the way to the servers ------------------------------------------------------------------------

_of_process: dict[int, ServersHere] = {}  # by the id of the process: one that is forked has none
_making = threading.Lock()


def _servers_here() -> ServersHere:
    """Return this worker's way to the servers, made when it is first needed."""
    context = joined()
    local: LocalServers | None = None if context is None else context.extras.get("servers")
    if context is not None and local is not None:
        made: ServersHere | None = context.extras.get("servers_here")
        if made is None:
            session = local.session(context.rank, context.config.collective_timeout_s)
            made = context.extras["servers_here"] = ServersHere(
                session, context.rank, context.world_size
            )
            _look_at_calls(context, made)
        return made
    environment = environment_here()
    if (environment is None or not environment.servers) and current().world_size > 1:
        raise UsageError(
            f"ParameterServerStrategy: {current().world_size} workers and no servers to hold their variables; start them with "
            f"syncvar-launch --workers {current().world_size} --servers 1 …"
        )
    with _making:
        made = _of_process.get(os.getpid())
        if made is None:
            made = _of_process[os.getpid()] = _of_job(environment)
        return made


def _of_job(environment: RankEnvironment | None) -> ServersHere:
    if environment is not None and environment.servers:
        from syncvar.parameter_server.client.worker_session import WorkerSession

        config = RuntimeConfig.from_mapping(os.environ).consistent()
        edge = WorkerSession(environment, config, os.environ)
        made = ServersHere(edge, environment.rank, environment.world_size)
        edge.before_end.append(made.settle)
    else:
        made = ServersHere(LocalServers(1).session(0, current().config.collective_timeout_s), 0, 1)
    register_exit(made.leave)

    def join(context: Joined) -> None:
        take_places_along(context)
        _look_at_calls(context, made)

    on_join(join)
    here = joined()
    if here is not None:
        _look_at_calls(here, made)
    return made


def _look_at_calls(context: Joined, here: ServersHere) -> None:
    if context.engine is not None:
        context.engine.before_each_call(here.before_call)
