"""`Strategy`, the base class of all strategies: its scope, `run`, and the collectives on values."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.html_table import html_table
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.communicator import begin_epochs
from syncvar.runtime.state import send_queued
from syncvar.runtime.work import checked_timeout
from syncvar.strategies.distributed_dataset import (
    DistributedDataset,
    InputContext,
    distributed,
    distributed_from_function,
)
from syncvar.strategies.value_reduction import (
    ValueContext,
    gather_values,
    local_part,
    own_part,
    reduce_values,
)
from syncvar.variables.policy import CallContext
from syncvar.variables.registry import VariableRegistry
from syncvar.variables.storage import Storage
from syncvar.variables.values import PerReplica
from syncvar.variables.variable_owner import (
    ScopeEntry,
    ScopeStack,
    current_scope,
    scope_stack,
    stacks_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.deferred_writes import WriteQueue
    from syncvar.variables.policy import VariableSynchronization

_REPLICA = CallContext.REPLICA
# Module and name of the base class of all models, by library.
_MODELS = (("torch.nn", "Module"), ("keras.layers", "Layer"), ("tf_keras.layers", "Layer"))
_checked: weakref.WeakSet[Strategy] = weakref.WeakSet()  # whose first scope has begun


class Strategy(MigrationHintsMixin):
    """A group of replicas that stay in sync, one process each.

    Args:
        communicator: Communicator of the group.
        strict: Whether initial values that differ between replicas are an error.
        check_cross_writes: Whether to compare what the replicas write in cross context.
        reproducible: Whether to sum by the tree over replicas, independent of algorithm and hosts.
        timeout: Seconds that a call waits; None means the job's default.
        is_default: Whether this is the strategy of a program that enters no scope.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.get_strategy()
        >>> isinstance(strategy, sv.Strategy), strategy.num_replicas_in_sync
        (True, 1)
    """

    _has_copies = True  # every replica has a copy of every variable

    def __init__(
        self,
        communicator: Communicator,
        *,
        strict: bool = False,
        check_cross_writes: bool = True,
        reproducible: bool = False,
        timeout: float | None = None,
        is_default: bool = False,
    ) -> None:
        flags = {"strict": strict, "check_cross_writes": check_cross_writes}
        for name, flag in {**flags, "reproducible": reproducible}.items():
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} must be True or False, not {flag!r}")
        self.strict: bool = strict
        self.check_cross_writes: bool = check_cross_writes
        self.reproducible: bool = reproducible
        self.timeout: float | None = None if timeout is None else checked_timeout(timeout)
        self.is_default: bool = is_default
        # `VariableOwner` has these methods; as attributes they stay out of the public class.
        self.variable_class, self.create_storage = self._variable_class, self._create_storage
        self.move_to_world = self._move_to_world
        self.spans_world = self._spans_world
        self._replica = ScopeEntry(self, _REPLICA)
        self._join(communicator)
        self._check_every = self.context.config.check_every

    def _join(self, communicator: Communicator) -> None:
        """Begin to work in the current job, over the ranks of a communicator."""
        context = current()
        self._communicator, self.context = communicator, context
        self.places: ScopeStack = stacks_of(context)
        self.queue: WriteQueue | None = None
        self.registry: VariableRegistry | None = None
        world = context.world
        # `run` keeps the calls of these groups aligned: this one, and a world of the same ranks.
        is_beside = communicator is not world and communicator.members == world.members
        beside = (world,) if is_beside else ()
        self._aligned: tuple[Communicator, ...] = (communicator, *beside)
        before: list[weakref.ref[Strategy]] = context.extras.setdefault("strategies_in_order", [])
        before.append(weakref.ref(self))
        if self._has_copies and communicator.rank is not None and communicator.size > 1:
            self.registry = VariableRegistry(self)
            _known(context).add(self)

    def _move_to_world(self) -> None:
        """Move to the world that this process has joined since; sends nothing.

        Variables stay behind, see `move_variable`. The scopes that the program has entered in the
        old world stay entered.
        """
        context = current()
        if self.context is context:
            return
        if self.context.uneven is not None:
            raise UsageError(
                "the job has changed its members inside `with sv.uneven():`. Such a block belongs "
                "to the ranks that enter it: write it inside the function of sv.elastic.run"
            )
        if not self._spans_world:
            raise UsageError(
                f"{self!r} has explicit ranks ({list(self._communicator.members)}), and the job "
                "has other members now. Make the strategy, and its variables, inside the function "
                "of sv.elastic.run; or leave out group=, then it follows the members"
            )
        context.extras.setdefault("scope_stacks", self.places)
        self._join(self._communicator_here())

    @property
    def _spans_world(self) -> bool:
        """Whether the ranks follow from the world, so that they can follow another world."""
        return True

    def _communicator_here(self) -> Communicator:
        """Return the communicator for the same kind of strategy in the current world."""
        context = current()
        if context.extras.setdefault("default_strategy", self) is not self:
            raise UsageError(
                "the default strategy cannot move to this world, which has another one already: "
                "between sv.init() and the move, the program has made variables or calls outside "
                "every scope. Make them before sv.elastic.run, or inside its function"
            )
        return context.world

    @property
    def check_every(self) -> int:
        """Number of runs in which replicas compare every replicated variable once; 0 for never.

        Replicas compare digests of all bytes. Set it to the same number on every replica.
        `SYNCVAR_CHECK_EVERY` sets it for all strategies (default 100). If the
        variables have up to 1 MiB together, every N-th run compares all of them. Otherwise the runs
        compare them 1 MiB at a time.
        A run compares a variable before its first write, and the rest at its end. Outside `run`,
        steps count instead: the writes of the variable that is written most often.

        Where copies differ, the write or `run` raises MismatchError on every replica. A comparison
        misses a difference that a write has covered before (an `assign`, or a rounded sum).
        With 1, replicas compare before the first write of every run.

        Raises:
            ConfigError: The new value is not a whole number of at least 0.

        Cost: one digest of all variables in so many runs. A run with something to compare makes
            two or three small exchanges more.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.MirroredStrategy()
            >>> strategy.check_every = 10
        """
        return self._check_every

    @check_every.setter
    def check_every(self, runs: int) -> None:
        if isinstance(runs, bool) or not isinstance(runs, int) or runs < 0:
            raise ConfigError(
                f"check_every must be a whole number of runs of at least 0 (0 for never), "
                f"not {runs!r}"
            )
        self._check_every = runs
        if self.registry is not None:
            self.registry.rebuild_schedule()

    @property
    def communicator(self) -> Communicator:
        """The communicator of the replicas' group, for code that extends syncvar.

        Raises:
            UsageError: The process has left the job in which the strategy was made.
        """
        if self.context.is_closed:
            raise UsageError(
                "this strategy and its variables belong to a job that this process has left "
                "(sv.shutdown); make them again after sv.init(). `v.local_value()` still gives "
                "this replica's copy"
            )
        return self._communicator

    def _variable_class(self, synchronization: Any) -> type[Any] | None:
        """Return the class of variables with a synchronization mode, None for the usual one."""
        del synchronization
        return None

    def _create_storage(
        self, value: NDArray[Any], synchronization: VariableSynchronization
    ) -> Storage:
        """Return the memory of a new variable's copy."""
        del synchronization
        return Storage(self.context, value)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of this strategy."""
        return len(self._communicator.whole)

    def __repr__(self) -> str:
        return f"<sv.{type(self).__name__} of {self.num_replicas_in_sync} replicas>"

    def _repr_html_(self) -> str:
        rows = [
            ("replicas in sync", self.num_replicas_in_sync),
            ("ranks", list(self._communicator.members)),
            ("rank of this replica", self._communicator.member_rank),
        ]
        return html_table(f"sv.{type(self).__name__}", rows)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        instead = "sv.get_strategy()" if self.is_default else f"sv.{type(self).__name__}()"
        raise TypeError(
            f"{self!r} cannot be copied or pickled: its group and variables belong to this "
            f"process. Use the same strategy in the copy, or write {instead} there"
        )

    # -- contexts ----------------------------------------------------------------------------------

    def scope(self) -> Scope:
        """Return a context manager for code in cross context.

        Variables made in it belong to this strategy. A program may enter it again, also inside
        itself. Each thread has its own scope.

        Returns:
            The context manager; `with ... as strategy` gives this strategy.

        Raises:
            UsageError: The first block of this strategy made a model of PyTorch or Keras, which
                no strategy synchronizes. The end of the block raises it.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.MirroredStrategy()
            >>> with strategy.scope():
            ...     v = sv.Variable(1.0)
            >>> v.strategy is strategy
            True
        """
        return Scope(self, self._require_member)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Call `fn(*args, **kwargs)` as this replica, in replica context. Collective.

        Args:
            fn: Function that makes the same collective calls and writes on every replica, each
                with its own values.
            args: Tuple or list. `fn` gets this process's part of a PerReplica or Mirrored in it,
                also inside pytrees.
            kwargs: Dict or None.

        Returns:
            The result of `fn` in this process.

        Raises:
            UsageError: The call is inside `run` or `merge_call`, or under another strategy.
            ConfigError: args or kwargs have another type.
            MismatchError: An exception left `fn` on another replica while this one waited for it;
                or copies of a variable differ (see `check_every`).

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.MirroredStrategy()
            >>> strategy.run(lambda x: x + 1, args=(sv.PerReplica(2),))
            3
        """
        if not isinstance(args, tuple | list):
            found = type(args).__name__
            raise ConfigError(f"args must be a tuple or list, not {found}: write args=(x,)")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise ConfigError(f"kwargs must be a dict or None, not {type(kwargs).__name__}")
        if self.places.stack or self.context.is_closed or self._communicator.rank is None:
            self._require("run")
        if self.registry is not None:
            self.registry.runs += 1  # failed runs count too: the number is the same on all replicas
        own_args = [own_part(one) for one in args] if args else ()
        own_kwargs = {name: own_part(one) for name, one in kwargs.items()} if kwargs else {}
        aligned, queue = self._aligned, self.queue
        flush_error: SyncvarError | None = None
        if queue is not None:
            try:
                self._send_queued()
            except SyncvarError as error:
                flush_error = error
            queue.begin()
            aligned = (*aligned, queue.calls)
        begin_epochs(aligned, is_run=True)
        try:
            result = self._call(fn, own_args, own_kwargs, flush_error)
        except BaseException as error:
            for communicator in aligned:
                communicator.leave_epoch(error)
            raise
        begin_epochs(aligned, is_run=False)
        return result

    def _call(
        self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], error: SyncvarError | None
    ) -> Any:
        """Call `fn` in replica context, between the checks and flushes of a run.

        An earlier error is raised here, inside the epoch, so that call numbers stay the same.
        """
        registry, stack = self.registry, self.places.stack
        depth = len(stack)
        stack.append(self._replica)
        try:
            if error is not None:
                raise error
            if registry is not None:
                registry.begin_run(self._check_every)
            result = fn(*args, **kwargs)
            if self.queue is not None:  # `fn` may have made the queue
                self._send_queued()
            if registry is not None:
                registry.end_run(self._check_every)
        except BaseException as raised:
            self._flush_after(raised)
            raise
        finally:
            del stack[depth:]
            if registry is not None:
                registry.leave_run()
        return result

    # -- values ------------------------------------------------------------------------------------

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Combine a value of all replicas. Collective.

        Args:
            reduce_op: A ReduceOp or its name.
            value: This replica's array, PerReplica, Mirrored or variable, or a pytree of these.
            axis: None combines elementwise over the replicas. An int or a tuple reduces this
                replica's part along it first. MEAN is then the total sum over the total count, so
                uneven and empty parts have the right weight.

        Returns:
            The combined value, the same on all replicas.

        Raises:
            UsageError: The call is in replica context.
            ConfigError: This replica's op, axis or value is invalid; the others raise
                MismatchError.
            MismatchError: The replicas' values differ in pytree, shape or dtype.

        Example:
            >>> import syncvar as sv
            >>> sv.MirroredStrategy().reduce("MEAN", [1.0, 3.0], axis=0)
            array(2.)
        """
        if self.places.stack or self.context.is_closed or self._communicator.rank is None:
            self._require("reduce")
        return reduce_values(self, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value of all replicas, in their order. Collective.

        Args:
            value: This replica's array, PerReplica, Mirrored or variable, or a pytree of these.
            axis: Axis to concatenate along; may be negative. Lengths along it may differ.

        Returns:
            The concatenated value, the same on all replicas.

        Raises:
            UsageError: The call is in replica context.
            ConfigError: The value is a scalar or has no such axis; the others raise MismatchError.
        """
        self._require("gather")
        return gather_values(self._communicator, value, axis, self.timeout, "gather")

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of this process's part of a value.

        A pytree keeps its form, and a variable gives this replica's copy.
        """
        return (local_part(value),)

    def experimental_distribute_values_from_function(
        self, fn: Callable[[ValueContext], Any]
    ) -> PerReplica:
        """Return a PerReplica of the value that `fn` returns for this replica.

        Args:
            fn: Function of a ValueContext, called once.
        """
        return PerReplica(fn(ValueContext(self._communicator.home_rank, self.num_replicas_in_sync)))

    # -- input -------------------------------------------------------------------------------------

    def experimental_distribute_dataset(self, dataset: Any) -> DistributedDataset:
        """Return a dataset of this replica's part of each global batch. Collective.

        Every row of every batch goes to one replica. Parts differ by at most one row, and the
        first replicas get the longer ones. A replica without rows gets empty arrays, so all take
        the same steps; `reduce` with an axis weighs by row. Each step of reading is collective.

        Args:
            dataset: Iterable of *global* batches, the same on every replica: `sv.data.Dataset`,
                or arrays or pytrees of arrays, with a first axis.

        Returns:
            The dataset of this replica's parts.

        Raises:
            UsageError: The call is in replica context.
            ConfigError: `dataset` is not iterable. While reading: a batch has no first axis. The
                other replicas raise MismatchError.
            MismatchError: While reading: replicas read different batches.

        Cost: a barrier; then for each step an all-reduce of 96 bytes. No batch travels.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> strategy = sv.MirroredStrategy()
            >>> batches = sv.data.from_arrays(np.arange(4), batch_size=3)
            >>> [part.tolist() for part in strategy.experimental_distribute_dataset(batches)]
            [[0, 1, 2], [3]]
        """
        self._require("experimental_distribute_dataset")
        return distributed(self, dataset)

    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Any]
    ) -> DistributedDataset:
        """Return a dataset of the batches that `fn` makes for this replica. Collective.

        The replicas' datasets may have different lengths. A dataset that has ended gives arrays
        without rows until all have ended. Each step of reading is collective.

        Args:
            fn: Function of an InputContext, called once in every process. It returns an iterable
                of this replica's batches.

        Returns:
            The dataset of this replica's batches.

        Raises:
            UsageError: The call is in replica context.
            ConfigError: `fn` returns nothing iterable; the other replicas raise MismatchError.
            MismatchError: While reading: the batches of replicas differ in pytree, dtype or shape
                of a row.

        Cost: a barrier; then for each step an all-reduce of 96 bytes. No batch travels.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> rows = sv.data.from_arrays(np.arange(4), batch_size=None)
            >>> def mine(context):
            ...     shard = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            ...     return shard.batch(context.get_per_replica_batch_size(2))
            >>> strategy = sv.get_strategy()
            >>> [batch.tolist() for batch in strategy.distribute_datasets_from_function(mine)]
            [[0, 1], [2, 3]]
        """
        self._require("distribute_datasets_from_function")
        return distributed_from_function(self, fn)

    # -- inside ------------------------------------------------------------------------------------

    def _require_member(self) -> None:
        """Raise UsageError if this process is no replica of this strategy."""
        self.communicator.member_rank  # noqa: B018  (raises for ranks outside the group)

    @property
    def replica_id(self) -> int:
        """Number of this replica, 0 to `num_replicas_in_sync` - 1."""
        return self.communicator.home_rank

    def _require(self, method: str) -> list[ScopeEntry]:
        """Return this thread's scope stack; raise UsageError where it forbids `method`."""
        self._require_member()
        stack = self.places.stack
        if not stack:
            return stack
        place = stack[-1]
        if place.owner is not self:
            raise UsageError(
                f"strategy.{method} is called under another strategy; leave its scope or run "
                f"first, or call sv.get_strategy().{method}"
            )
        if place.context is _REPLICA:
            instead = {
                "run": "call the function directly",
                "reduce": "write sv.get_replica_context().all_reduce(op, x)",
                "gather": "write sv.get_replica_context().all_gather(x, axis)",
            }.get(method, "do it outside")
            raise UsageError(f"strategy.{method} is called inside run; {instead}")
        if place.context is CallContext.MERGE and method == "run":
            raise UsageError("strategy.run is called inside merge_call; call the function directly")
        return stack

    def _send_queued(self) -> None:
        engine = self._communicator.engine
        if engine is not None and engine.queues:
            send_queued(engine.queues, self.queue)

    def _flush_after(self, error: BaseException) -> None:
        """Send the deferred writes of a run that failed; other replicas may wait for them.

        An interruption does not wait for slow replicas.
        """
        queue = self.queue
        if queue is None or not len(queue):
            return
        with contextlib.suppress(SyncvarError):
            if isinstance(error, Exception):
                self._send_queued()
            else:
                queue.start()


def _known(context: ProcessContext) -> weakref.WeakSet[Strategy]:
    found: weakref.WeakSet[Strategy] = context.extras.setdefault("strategies", weakref.WeakSet())
    return found


def strategies_in_order(context: ProcessContext) -> list[Strategy]:
    """Return the living strategies of this process, in the order in which it has made them."""
    found = [reference() for reference in context.extras.get("strategies_in_order", ())]
    return [one for one in found if one is not None]


def strategies_of(context: ProcessContext) -> list[Strategy]:
    """Return the strategies of this process with several replicas and a copy on each."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread adds one during the iteration
            return list(_known(context))


class Scope:
    """The context manager of `Strategy.scope`.

    It finds models of PyTorch and Keras that its first block makes: no strategy synchronizes them.
    """

    def __init__(self, strategy: Strategy, require_member: Callable[[], None]) -> None:
        self._strategy, self._require_member = strategy, require_member
        # Models that existed before the block; None where the block is not checked.
        self._models: set[int] | None = None

    def __enter__(self) -> Strategy:
        strategy = self._strategy
        self._require_member()
        place = current_scope()
        if place is not None:
            if place.owner is not strategy:
                raise UsageError(
                    "a scope is entered under another strategy; leave that one's scope first, "
                    "or take the strategy in force: sv.get_strategy()"
                )
            if place.context is not CallContext.CROSS:
                raise UsageError(
                    "a scope is entered inside strategy.run; enter it around run, and make "
                    "variables there:\n    with strategy.scope():\n        v = sv.Variable(…)\n"
                    "        strategy.run(fn)"
                )
        if strategy not in _checked:
            _checked.add(strategy)
            self._models = {id(one) for one in _models()}
        scope_stack().append(ScopeEntry(strategy, CallContext.CROSS))
        return strategy

    def __exit__(self, *error: object) -> None:
        scope_stack().pop()
        known, self._models = self._models, None
        if known is None or error[0] is not None:
            return
        kinds = {type(one) for one in _models() if id(one) not in known}
        if kinds:
            names = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
            raise UsageError(
                f"this block of strategy.scope() makes a model of another library "
                f"({', '.join(names[:4])}). A strategy synchronizes variables of sv only, so each "
                "rank would train its own copy. Make the model outside the block, and average its "
                'gradients: "A module of PyTorch" in docs/migration/torch-distributed.md, and '
                '"A model of Keras" in docs/migration/tf-distribute.md'
            )


def _models() -> list[Any]:
    """Return all models of this process. It visits every object of the garbage collector."""
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in _MODELS)
    bases = tuple(base for base in loaded if isinstance(base, type))
    return [one for one in gc.get_objects() if issubclass(type(one), bases)] if bases else []
