"""What every strategy is: a group of replicas, its scope, `run`, and the collectives on values."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.communicator import begin_epochs
from syncvar.runtime.deferred_queues import send_queued
from syncvar.runtime.timeouts import checked_timeout
from syncvar.strategies.contexts import ValueContext
from syncvar.strategies.distributed_dataset import (
    DistributedDataset,
    InputContext,
    distributed,
    distributed_from_function,
)
from syncvar.strategies.scope_check import model_ids, refuse_new_models
from syncvar.strategies.value_reduction import gather_values, local_part, own_part, reduce_values
from syncvar.variables.policy import CallContext
from syncvar.variables.registry import VariableRegistry
from syncvar.variables.scope import ScopeEntry, ScopeStack, current_place, places, stacks
from syncvar.variables.storage import Storage
from syncvar.variables.values import PerReplica

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext as Joined
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.deferred_writes import WriteQueue
    from syncvar.variables.policy import VariableSynchronization

__all__ = ["Strategy", "strategies_of"]

_REPLICA = CallContext.REPLICA


class Strategy(MigrationHintsMixin):
    """Replicas in sync: one process each, all members of one group.

    Args:
        communicator: The calls of the group.
        strict: Initial values that differ between replicas are an error.
        check_cross_writes: Compare what the replicas write in cross context.
        reproducible: Sum by the tree over replicas, independent of algorithm and hosts.
        timeout: Seconds that a call waits; None means the job's default.
        is_default: It is the strategy of a program that enters no scope.
    """

    _has_copies = True  # of every variable on every replica
    _has_checked_scope = False  # for models of other libraries

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
        for name, flag in (
            ("strict", strict),
            ("check_cross_writes", check_cross_writes),
            ("reproducible", reproducible),
        ):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} must be True or False, not {flag!r}")
        self._communicator = communicator
        self.context = current()
        self.places: ScopeStack = stacks(self.context)
        self.strict: bool = strict
        self.check_cross_writes: bool = check_cross_writes
        self.reproducible: bool = reproducible
        self.timeout: float | None = None if timeout is None else checked_timeout(timeout)
        self.is_default: bool = is_default
        self._check_every = self.context.config.check_every
        self.queue: WriteQueue | None = None
        self.roster: VariableRegistry | None = None
        world = self.context.world
        # the groups whose calls inside `run` are kept aligned: this one, and the world if it has the same ranks
        is_beside = communicator is not world and communicator.members == world.members
        self._aligned: tuple[Communicator, ...] = (
            (communicator, world) if is_beside else (communicator,)
        )
        self._replica = ScopeEntry(self, _REPLICA)
        if self._has_copies and communicator.rank is not None and communicator.size > 1:
            self.roster = VariableRegistry(self)
            _known(self.context).add(self)

    @property
    def check_every(self) -> int:
        """In so many runs all copies of every variable that is kept equal are compared once, by digests of all bytes; 0 for never.

        May be set, to the same on every replica. `SYNCVAR_CHECK_EVERY` sets it for all strategies (default 100). A model of up
        to a MiB is compared in the runs whose number it divides, a larger one a MiB at a time, in one run after another. There
        a variable is compared before it is first written, and at the end. Outside runs steps count: as many as the variable
        that is written most often has had writes; what is due is compared before that write. Where copies differ, the write or
        `run` raises MismatchError on every replica. What differs and is covered up by a write before the next comparison (by
        `assign`, or because a sum is rounded) is not found: 1 compares before every first write of a run.

        Cost: 0.2 to 0.4 ns for each byte of all variables in so many runs (100 MiB: 20 to 40 ms in 100), half of it outside runs,
            and two or three small exchanges in each run where something is due; below 2 % of a step of training at the default.

        Raises:
            ConfigError: It is set to anything but a whole number of at least 0.

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
                f"check_every must be a whole number of runs of at least 0 (0 for never), not {runs!r}"
            )
        self._check_every = runs
        if self.roster is not None:
            self.roster.look_again()

    @property
    def communicator(self) -> Communicator:
        """The calls of the replicas' group, for code that extends syncvar.

        Raises:
            UsageError: The process has left the job that the strategy was made in.
        """
        if self.context.is_closed:
            raise UsageError(
                "this strategy and its variables belong to a job that this process has left (sv.shutdown); make them "
                "again after sv.init(). `v.local_value()` still gives this replica's copy"
            )
        return self._communicator

    def _kind_of_variable(self, synchronization: Any) -> type[Any] | None:
        """Return the class of the variables that it makes with a mode, None for the usual."""
        del synchronization
        return None

    def _make_storage(
        self, value: NDArray[Any], synchronization: VariableSynchronization
    ) -> Storage:
        """Return the memory for a variable's copy."""
        del synchronization
        return Storage(self.context, value)

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of this strategy."""
        return len(self._communicator.whole)

    def __repr__(self) -> str:
        return f"<sv.{type(self).__name__} of {self.num_replicas_in_sync} replicas>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        instead = "sv.get_strategy()" if self.is_default else f"sv.{type(self).__name__}()"
        raise TypeError(
            f"{self!r} cannot be copied or pickled: its group and variables belong to this process. Use the "
            f"same strategy in the copy, or write {instead} there"
        )

    # -- contexts ----------------------------------------------------------------------------------

    def scope(self) -> Scope:
        """Return a context manager: variables made in it belong to this strategy, and code in it is in cross context.

        It may be entered again, also inside itself. Scope is per thread.

        Raises:
            UsageError: At the end of the strategy's first block: it has made a model of PyTorch or
                Keras, which no strategy synchronizes.

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.MirroredStrategy()
            >>> with strategy.scope():
            ...     v = sv.Variable(1.0)
            >>> v.strategy is strategy
            True
        """
        return Scope(self)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Call `fn(*args, **kwargs)` as this replica, in replica context; every replica does the same.

        Args:
            fn: Makes the same collective calls and writes on every replica, with its own values.
            args: Tuple or list; a PerReplica or Mirrored in it, also inside structures, becomes this process's part.
            kwargs: Dict or None.

        Returns:
            What `fn` returns here.

        Raises:
            UsageError: Inside `run` or `merge_call`, or under another strategy.
            ConfigError: args or kwargs of another type.
            MismatchError: An exception left `fn` on another replica while this one waited for it; or copies of a variable
                differ (see `check_every`).

        Example:
            >>> import syncvar as sv
            >>> strategy = sv.MirroredStrategy()
            >>> strategy.run(lambda x: x + 1, args=(sv.PerReplica(2),))
            3
        """
        if not isinstance(args, tuple | list):
            raise ConfigError(
                f"args must be a tuple or list, not {type(args).__name__}: write args=(x,)"
            )
        if kwargs is not None and not isinstance(kwargs, dict):
            raise ConfigError(f"kwargs must be a dict or None, not {type(kwargs).__name__}")
        stack = self.places.stack
        if stack or self.context.is_closed or self._communicator.rank is None:
            self._require("run")
        roster, queue = self.roster, self.queue
        if roster is not None:
            roster.runs += 1  # also of a run that fails: the replicas' numbers stay the same
        given = [own_part(one) for one in args] if args else ()
        named = {name: own_part(one) for name, one in kwargs.items()} if kwargs else {}
        aligned = self._aligned
        refused: SyncvarError | None = None
        if queue is not None:
            try:
                self._send_queued()
            except SyncvarError as error:
                refused = error
            queue.begin()
            aligned = (*aligned, queue.calls)
        begin_epochs(aligned)
        depth = len(stack)
        stack.append(self._replica)
        try:
            if (
                refused is not None
            ):  # a block of calls has begun: the replicas' numbers stay the same
                raise refused
            if roster is not None:
                roster.begin_run(self._check_every)
            result = fn(*given, **named)
            if self.queue is not None:  # perhaps only since
                self._send_queued()
            if roster is not None:
                roster.end_run(self._check_every)
        except BaseException as error:
            self._send_what_was_written(error)
            for communicator in aligned:
                communicator.leave_epoch(error)
            raise
        finally:
            del stack[depth:]
            if roster is not None:
                roster.leave_run()
        begin_epochs(aligned)
        return result

    # -- values ------------------------------------------------------------------------------------

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Combine a value of all replicas, and give it to all. Collective.

        Args:
            reduce_op: A ReduceOp or its name.
            value: This replica's array, PerReplica, Mirrored or variable, or a structure of these.
            axis: None combines elementwise over the replicas. An int or a tuple reduces this replica's part along it
                first; MEAN is then the total sum over the total count, so uneven and empty parts weigh right.

        Raises:
            UsageError: In replica context.
            ConfigError: A bad op, axis or value here; the others raise MismatchError.
            MismatchError: The replicas' values do not fit together.

        Example:
            >>> import syncvar as sv
            >>> sv.MirroredStrategy().reduce("MEAN", [1.0, 3.0], axis=0)
            array(2.)
        """
        if self.places.stack or self.context.is_closed or self._communicator.rank is None:
            self._require("reduce")
        return reduce_values(self, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value of all replicas, in their order, and give it to all. Collective.

        Args:
            value: This replica's array, PerReplica, Mirrored or variable, or a structure of these.
            axis: Where to concatenate; may be negative. Lengths along it may differ.

        Raises:
            UsageError: In replica context.
            ConfigError: A scalar, or an axis that the value does not have; the others raise MismatchError.
        """
        self._require("gather")
        return gather_values(self._communicator, value, axis, self.timeout, "gather")

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of this process's part of a value; structures stay structures, a variable gives its copy."""
        return (local_part(value),)

    def experimental_distribute_values_from_function(
        self, fn: Callable[[ValueContext], Any]
    ) -> PerReplica:
        """Return a PerReplica of what `fn` makes for this replica.

        Args:
            fn: Called once with a ValueContext.
        """
        return PerReplica(fn(ValueContext(self._communicator.home_rank, self.num_replicas_in_sync)))

    # -- input -------------------------------------------------------------------------------------

    def experimental_distribute_dataset(self, dataset: Any) -> DistributedDataset:
        """Return a dataset of this replica's part of each batch: parts differ by one row at most, the first are longer.

        Every row of every batch goes to one replica. A replica for which none is left gets arrays without rows, so all
        take the same steps; `reduce` with an axis weighs by row. Collective, and so is every step of reading it.

        Args:
            dataset: Iterable of *global* batches, the same on every replica: `sv.data.Dataset`, or any other whose
                elements are arrays, or structures of arrays, with a first axis.

        Raises:
            UsageError: In replica context.
            ConfigError: It cannot be read; while reading: an element has no first axis. The others raise MismatchError.
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
        """Return a dataset of the batches that a function makes for this replica.

        The replicas' datasets may have different lengths: one that has ended gives arrays without rows until all have.
        Collective, and so is every step of reading it.

        Args:
            fn: Called once in every process with its InputContext; returns an iterable of this replica's batches.

        Raises:
            UsageError: In replica context.
            ConfigError: `fn` returns nothing that can be read; the others raise MismatchError.
            MismatchError: While reading: the replicas' batches differ in structure, dtype or shape of a row.

        Cost: a barrier; then for each step an all-reduce of 96 bytes. No batch travels.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> rows = sv.data.from_arrays(np.arange(4), batch_size=None)
            >>> def mine(context):
            ...     shard = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            ...     return shard.batch(context.get_per_replica_batch_size(2))
            >>> [batch.tolist() for batch in sv.get_strategy().distribute_datasets_from_function(mine)]
            [[0, 1], [2, 3]]
        """
        self._require("distribute_datasets_from_function")
        return distributed_from_function(self, fn)

    # -- inside ------------------------------------------------------------------------------------

    def _require_member(self) -> None:
        """Raise UsageError where this process is no replica of this strategy."""
        self.communicator.member_rank  # noqa: B018  (raises for ranks outside the group)

    @property
    def replica_id(self) -> int:
        """This replica, 0 to `num_replicas_in_sync` - 1."""
        return self.communicator.home_rank

    def _require(self, what: str) -> list[ScopeEntry]:
        """Return this thread's stack of places; raise UsageError unless `what` may be called here."""
        self._require_member()
        stack = self.places.stack
        if not stack:
            return stack
        place = stack[-1]
        if place.owner is not self:
            raise UsageError(
                f"strategy.{what} is called under another strategy; leave its scope or run first, or call "
                f"sv.get_strategy().{what}"
            )
        if place.context is _REPLICA:
            instead = {
                "run": "call the function directly",
                "reduce": "write sv.get_replica_context().all_reduce(op, x)",
                "gather": "write sv.get_replica_context().all_gather(x, axis)",
            }
            raise UsageError(
                f"strategy.{what} is called inside run; {instead.get(what, 'do it outside')}"
            )
        if place.context is CallContext.MERGE and what == "run":
            raise UsageError("strategy.run is called inside merge_call; call the function directly")
        return stack

    def _send_queued(self) -> None:
        engine = self._communicator.engine
        if engine is not None and engine.queues:
            send_queued(engine.queues, self.queue)

    def _send_what_was_written(self, error: BaseException) -> None:
        """Send what was written before an exception left `run`: the others have written it too, and may wait for it.

        An interruption is not held up by replicas that are slow.
        """
        queue = self.queue
        if queue is None or not len(queue):
            return
        with contextlib.suppress(SyncvarError):
            if isinstance(error, Exception):
                self._send_queued()
            else:
                queue.start()


def _known(context: Joined) -> weakref.WeakSet[Strategy]:
    found: weakref.WeakSet[Strategy] = context.extras.setdefault("strategies", weakref.WeakSet())
    return found


def strategies_of(context: Joined) -> list[Strategy]:
    """Return the strategies of this process whose replicas are several and have copies."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread makes one meanwhile
            return list(_known(context))


class Scope:
    """The context manager of `Strategy.scope`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._models: set[int] | None = (
            None  # those that there were; None where this block is not checked
        )

    def __enter__(self) -> Strategy:
        strategy = self._strategy
        strategy._require_member()  # noqa: SLF001  (of its own scope)
        place = current_place()
        if place is not None:
            if place.owner is not strategy:
                raise UsageError(
                    "a scope is entered under another strategy; leave that one's scope first, or take the strategy in "
                    "force: sv.get_strategy()"
                )
            if place.context is not CallContext.CROSS:
                raise UsageError(
                    "a scope is entered inside strategy.run; enter it around run, and make variables there:\n"
                    "    with strategy.scope():\n        v = sv.Variable(…)\n        strategy.run(fn)"
                )
        if not strategy._has_checked_scope:  # noqa: SLF001
            strategy._has_checked_scope = True  # noqa: SLF001
            self._models = model_ids()
        places().append(ScopeEntry(strategy, CallContext.CROSS))
        return strategy

    def __exit__(self, *error: object) -> None:
        places().pop()
        if self._models is not None:
            known, self._models = self._models, None
            if error[0] is None:
                refuse_new_models(known)
