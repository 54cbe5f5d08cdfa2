"""The strategy whose variables live on servers: workers push and pull, each at its own pace."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.config import RuntimeConfig
from syncvar.engine.timeouts import checked_timeout
from syncvar.errors import ConfigError, SyncvarError, UsageError
from syncvar.fork_cleanup import register_exit
from syncvar.joining.process import current, environment_here, joined, on_join
from syncvar.loading import unexpected
from syncvar.optimizers.slots import compute_dtype
from syncvar.servers import Ticket
from syncvar.servers.asking import Asking
from syncvar.servers.local import LocalServers
from syncvar.strategies.base import Strategy
from syncvar.strategies.server_variables import Reads, ServerVariable
from syncvar.variables.casting import operand_array
from syncvar.variables.names import Names
from syncvar.variables.places import Place, current_place, stacks_here, take_places_along
from syncvar.variables.policy import Context, Operation, VariableSynchronization
from syncvar.variables.rows import checked_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.env import RankEnvironment
    from syncvar.joining.context import Context as Joined
    from syncvar.servers import Session
    from syncvar.variables import Variable

__all__ = ["ParameterServerStrategy", "ServersHere"]

_log = logging.getLogger("syncvar")
_PUSHES_MAX = 32  # of one strategy that may be under way
_WORLD = 0
_APART = (VariableSynchronization.ON_READ, VariableSynchronization.NONE)


class ServersHere:
    """This worker's way to the servers of its job; one for each process, or each rank of a world of threads.

    Args:
        session: The way.
        rank: This worker.
        workers: How many there are.
    """

    def __init__(self, session: Session, rank: int, workers: int) -> None:
        self.session, self.rank, self.workers = session, rank, workers
        self.count = session.client.servers
        self.names = Names()
        self.next_server = 0
        self.clock = 0
        self.restorings = 0  # from checkpoints, which all workers count alike
        self.meets = False  # there has been a variable with staleness 0, whose readers have to know of barriers
        self.pushes: deque[tuple[Ticket, str]] = deque()
        self.lock = threading.RLock()
        if session.client.incarnation:
            self._find_itself()

    def _find_itself(self) -> None:
        """Ask the servers where this worker is."""
        asking = Asking()
        places = [asking.where(server) for server in range(self.count)]
        ticket = self.session.wait(self.session.request(asking.parts()), "asking servers where this worker was")
        told = [ticket.results[server][number] for server, number in places]
        self.clock = max(self.clock, *(one["clock"] for one in told))
        self.session.client.pushes = sum(one["pushes"] for one in told)

    def went_back(self, path: str | None) -> None:
        """Go on from a checkpoint, and say what is lost where all were started again.

        Args:
            path: Of the checkpoint; None where there was none.
        """
        self.settle("restoring", None)
        self._find_itself()
        before, self.session.pushes_before = self.session.pushes_before, 0
        there = self.session.client.pushes
        if before > there:
            _log.warning(
                "rank %d %s: %d of the %d pushes that it had made are lost, number %d and later",
                self.rank, f"goes on from {path}" if path else "begins anew, as nothing was saved", before - there, before, there + 1,
            )  # fmt: skip

    def settle(self, what: str, timeout: float | None) -> None:
        """Wait until what was pushed is acknowledged.

        Raises:
            SyncvarError: A push was refused.
        """
        while True:
            with self.lock:
                if not self.pushes:
                    return
                ticket, pushed = self.pushes[0]
            try:
                self.session.wait(ticket, f"{what}: {pushed}", timeout)
            finally:
                with self.lock, contextlib.suppress(ValueError):
                    self.pushes.remove((ticket, pushed))

    def before_call(self, group: int, name: str) -> None:
        """Wait for pushes before this worker waits for the others; a barrier ends what staleness 0 combines."""
        if group == _WORLD and name == "barrier" and self.meets:
            asking = Asking()
            for server in range(self.count):
                asking.meet(server)
            self.pushes.append((self.session.request(asking.parts()), "barrier"))
        self.settle(name, None)

    def leave(self) -> None:
        """Tell the servers that this worker takes no part any more."""
        with contextlib.suppress(SyncvarError):
            self.settle("leaving the servers", None)
            asking = Asking()
            for server in range(self.count):
                asking.leave(server)
            self.session.wait(self.session.request(asking.parts()), "leaving the servers")


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

    has_copies = False

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
            from syncvar.foreign_names import object_hint

            hint = object_hint(variable_partitioner)
            if hint or not callable(variable_partitioner):
                raise ConfigError(
                    "variable_partitioner must be a partitioner or None, not "
                    f"{variable_partitioner!r:.80}{hint or ': write sv.partitioners.FixedShards(2)'}"
                )
        self._partitioner = variable_partitioner
        self.staleness = self.checked_staleness(staleness)
        self.timeout = None if timeout is None else checked_timeout(timeout)
        self.strict, self.check_cross_writes, self.reproducible, self.is_default = False, False, True, False
        self._check_every = 0
        self._aligned, self._replica = (), Place(self, Context.REPLICA)  # `run` is no meeting: each worker goes at its own pace
        self.queue = self.roster = None
        self.here = _servers_here()
        self.places = stacks_here()
        self._rules: set[str] = set()  # update rules of the program that the servers have
        self._open: Asking | None = None  # the transaction that is being put together
        self._is_one = False  # a function runs that a coordinator has scheduled

    def __getattr__(self, name: str) -> Any:
        if name in ("context", "_communicator"):  # joining is for what needs the other workers
            self.context = current()
            self._communicator = self.context.world
            return self.__dict__[name]
        return super().__getattr__(name)  # type: ignore[misc]

    # -- what variables need ----------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The way to the servers; of use to this package only."""
        return self.here.session

    @property
    def is_chief(self) -> bool:
        """Whether this worker gives variables their initial values."""
        return self.here.rank == 0

    @property
    def names(self) -> Names:
        """The names of variables on the servers; of use to this package only."""
        return self.here.names

    @property
    def server_count(self) -> int:
        """How many servers the job has."""
        return self.here.count

    @property
    def next_server(self) -> int:
        """Where the next part goes; of use to this package only."""
        return self.here.next_server

    @next_server.setter
    def next_server(self, server: int) -> None:
        self.here.next_server = server

    @property
    def num_replicas_in_sync(self) -> int:
        """Workers of the job; 1 in a function that a ClusterCoordinator has scheduled."""
        return 1 if self._is_one else self.here.workers

    @property
    def replica_id(self) -> int:
        """This worker."""
        return 0 if self._is_one else self.here.rank

    def kind_of_variable(self, synchronization: Any) -> type[Any] | None:
        """Return the class of its variables: those that are each worker's own are the usual ones; of use to this package only."""
        name = getattr(synchronization, "name", synchronization)
        return None if isinstance(name, str) and name.upper() in [one.name for one in _APART] else ServerVariable

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """Let a scheduled function see this worker as the only one; of use to this package only."""
        before, self._is_one = self._is_one, True
        try:
            yield
        finally:
            self._is_one = before

    def checked_staleness(self, staleness: Any) -> int | None:
        """Return a bound of staleness.

        Raises:
            ConfigError: It is none.
        """
        if staleness is None:
            return None
        if isinstance(staleness, bool) or not isinstance(staleness, int | np.integer) or staleness < 0:
            raise ConfigError(f"staleness must be a number of ticks of at least 0, or None for any number, not {staleness!r:.80}")
        return int(staleness)

    def partition(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return into how many parts a variable is cut; of use to this package only.

        Raises:
            ConfigError: The partitioner returned something else.
        """
        if self._partitioner is None or not shape:
            return 1
        parts = self._partitioner(shape, dtype)
        is_list = isinstance(parts, list | tuple) and len(parts) == len(shape)
        if not is_list or any(isinstance(one, bool) or not isinstance(one, int | np.integer) or one < 1 for one in parts):
            raise ConfigError(f"variable_partitioner returned {parts!r:.80} for shape {shape}: it must return {len(shape)} numbers of at least 1")
        if any(one > 1 for one in parts[1:]):
            raise ConfigError(f"variable_partitioner returned {parts!r:.80}: variables are cut along their first axis only")
        return int(min(parts[0], max(1, shape[0])))

    # -- requests -------------------------------------------------------------------------------------------------

    def ask(self, asking: Asking, what: str, *, snapshot: bool = False, timeout: float | None = None) -> Ticket:
        """Make a request and wait for it; of use to this package only."""
        self._require_place(what)
        ticket = self.session.request(asking.parts(), snapshot=snapshot)
        return self.session.wait(ticket, what, self.timeout if timeout is None else timeout)

    @contextlib.contextmanager
    def pushing(self, what: str) -> Iterator[Asking]:
        """Give a request to which writes are added, and send it; of use to this package only."""
        if self._open is not None:
            yield self._open
            return
        asking = Asking()
        yield asking
        self.push(asking, what)

    def push(self, asking: Asking, what: str) -> None:
        """Make a request that nobody waits for now; of use to this package only."""
        self._require_place(what)
        here = self.here
        if not asking:
            return
        while here.pushes and here.pushes[0][0].is_over:
            ticket, pushed = here.pushes.popleft()
            self.session.wait(ticket, pushed)  # raises what it failed with
        if len(here.pushes) >= _PUSHES_MAX:
            here.settle(what, self.timeout)
        here.pushes.append((self.session.request(asking.parts()), what))

    def _require_place(self, what: str) -> None:
        place = current_place()
        if place is not None and place.owner is not self and not place.owner.is_default:
            raise UsageError(
                f"{what}: the variable belongs to another strategy than the scope it is used in; use it under "
                f"`with variable.strategy.scope():`, or outside every scope"
            )

    # -- what programs call -----------------------------------------------------------------------------------------

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
        asking = Asking()
        for server in range(here.count):
            asking.tick(server, here.clock)
        here.pushes.append((self.session.request(asking.parts()), "tick"))

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
        asking = Asking()
        found = [asking.stats(server) for server in range(self.here.count)]
        told = self.ask(asking, "staleness_counts")
        made: dict[int, int] = {}
        for server, number in found:
            for ticks, reads in told.results[server][number]["staleness"].items():
                made[ticks] = made.get(ticks, 0) + reads
        return dict(sorted(made.items()))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
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
        if self._open is not None:
            raise UsageError("a transaction is begun inside another one")
        asking = self._open = Asking()
        try:
            yield
        finally:
            self._open = None
        self.push(asking, "transaction")

    def step(self, rule: tuple[str, dict[str, Any]], rate: float, pairs: list[tuple[Any, Any]], combine: str) -> None:
        """Push gradients, with which the servers make an optimizer's step of each variable; `apply_gradients` calls this."""
        self.prepare(rule)
        checked: list[tuple[ServerVariable, NDArray[Any], NDArray[Any] | None]] = []
        for gradient, variable in pairs:
            if gradient is None:
                continue
            if variable.dtype.kind not in "fV":
                raise ConfigError(f"variable {variable.name!r} is {variable.dtype.name}; an optimizer steps real floating numbers")
            what, dtype = f"gradient of variable {variable.name!r}", compute_dtype(variable.dtype)
            if isinstance(gradient, tuple) and len(gradient) == 2:
                rows = checked_rows(Operation.SCATTER_ADD, *gradient, variable.shape, dtype, what)
                checked.append((variable, rows.values, rows.indices))
            else:
                checked.append((variable, operand_array(gradient, variable.shape, dtype, what), None))
        with self.pushing("apply_gradients") as asking:
            for variable, value, indices in checked:
                variable.add_push(asking, "step", value, indices, rule=rule, rate=rate, combine=combine)

    def prepare(self, rule: tuple[str, dict[str, Any]]) -> None:
        """Let every server import a program's own update rule, before the first step by it; of use to this package only."""
        name = rule[1].get("rule", "")
        if not name or name in self._rules:
            return
        if name.startswith("__main__:"):
            raise ConfigError(
                f"update rule {name.partition(':')[2]!r} is in the script itself, which servers do not run: put it into a module beside the "
                f"script and import it from there"
            )
        asking = Asking()
        for server in range(self.here.count):
            asking.rule(server, rule)
        self.ask(asking, f"asking servers for update rule {name}")
        self._rules.add(name)

    # -- inside ---------------------------------------------------------------------------------------------------

    def require_member(self) -> None:
        """Do nothing: every worker is a member."""

    def _send_queued(self) -> None:
        """Do nothing: no write of these variables waits in a queue."""

    def _checked(self, variables: Iterable[Any], what: str) -> list[tuple[ServerVariable, Any]]:
        chosen = [one if isinstance(one, tuple) and len(one) == 2 else (one, None) for one in variables]
        for one, _ in chosen:
            if not isinstance(one, ServerVariable) or one.strategy.here is not self.here:
                raise ConfigError(f"{what} takes variables on servers that this strategy has made, not {one!r:.80}")
        return chosen

    def _read(self, chosen: list[tuple[ServerVariable, Any]], *, snapshot: bool) -> list[NDArray[Any]]:
        what = "snapshot" if snapshot else f"reading {', '.join(repr(one.name) for one, _ in chosen[:3])}"
        self._require_place(what)
        asking = Asking()
        reads = Reads(asking)
        for one, indices in chosen:
            reads.add(one, indices)
        parts = asking.parts()
        ticket = self.session.request(parts, snapshot=snapshot) if parts else Ticket({})
        return reads.arrays(self.session.wait(ticket, what, self.timeout) if parts else ticket)


# -- the way to the servers -----------------------------------------------------------------------------------------

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
            made = context.extras["servers_here"] = ServersHere(session, context.rank, context.world_size)
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
        from syncvar.serving.edge import Edge

        config = RuntimeConfig.from_mapping(os.environ).consistent()
        edge = Edge(environment, config, os.environ)
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
