"""Input under a strategy: this replica's batches, and the agreement that makes all replicas take the same steps.

Every `next` is one small call: each replica says what it offers, a batch of some kind or its end. Where all offer the
same, nothing more is needed; else they exchange their offers and come to the same verdict (`offers`, pure). So nobody waits in a step that another replica never makes, and an
exception while reading is told to all.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncvar.collectives.all_reduce import agree
from syncvar.collectives.stage_builders import exchange
from syncvar.collectives.sync_points import gather_objects, meet
from syncvar.core.errors import ConfigError, MismatchError, SyncvarError, UsageError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.data.batches import BatchPolicy, content_digest, even_part, inspected, no_rows
from syncvar.data.dataset import Dataset
from syncvar.data.iterator_state import integer_of, read_state
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.strategies.batch_agreement import BatchHeader, is_unanimous, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from syncvar.strategies.base import Strategy

_NEXT = "next batch of a distributed dataset"


@dataclass(frozen=True, slots=True)
class InputContext:
    """For which replica a dataset is made.

    Args:
        num_input_pipelines: How many datasets there are, one for each process.
        input_pipeline_id: Which of them this is.
        num_replicas_in_sync: Replicas of the strategy.

    Example:
        >>> import syncvar as sv
        >>> sv.InputContext(num_input_pipelines=4, num_replicas_in_sync=4).get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of one replica's batch.

        Args:
            global_batch_size: Rows of all replicas' batches together, at least 0.

        Raises:
            ConfigError: The replicas cannot share them evenly.
        """
        size = integer_of("global_batch_size", global_batch_size, 0)
        each, rest = divmod(size, self.num_replicas_in_sync)
        if rest:
            raise ConfigError(
                f"{size} rows cannot be shared evenly by {self.num_replicas_in_sync} replicas; take "
                f"{size - rest} or {size - rest + self.num_replicas_in_sync}, or distribute global batches with "
                f"strategy.experimental_distribute_dataset, which cuts any size"
            )
        return each


_END = object()


class Feed:
    """What is distributed, and how.

    Args:
        strategy: Whose replicas read it.
        dataset: An iterable of batches.
        is_global: All replicas read the same batches and take their part of each.
    """

    def __init__(self, strategy: Strategy, dataset: Any, *, is_global: bool) -> None:
        self.strategy = strategy
        self.dataset = dataset
        self.is_global = is_global
        self.what = "global batches" if is_global else "batches from a function"
        self.seed = dataset.seed if isinstance(dataset, Dataset) else ""
        self.next_epoch = 0
        self._was_opened = False

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, from a position on.

        Raises:
            UsageError: They can be read once only, and have been.
        """
        dataset = self.dataset
        if isinstance(dataset, Dataset):
            return dataset.at(epoch, position)
        elements: Iterator[Any] = iter(dataset)
        if elements is dataset:
            if self._was_opened:
                raise UsageError(
                    "what was distributed is an iterator, which can be read once; distribute a list, or "
                    "sv.data.from_generator(fn), whose fn is called for each epoch"
                )
            self._was_opened = True
        for _ in range(position):
            if next(elements, _END) is _END:
                break
        return elements


class DistributedDataset:
    """This replica's batches of each step; can be read any number of times if what it was made of can.

    Made by `strategy.experimental_distribute_dataset` and `strategy.distribute_datasets_from_function`.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> dataset = sv.data.from_arrays(np.arange(5.0), batch_size=2)
        >>> strategy = sv.MirroredStrategy()
        >>> distributed = strategy.experimental_distribute_dataset(dataset)
        >>> [strategy.reduce("MEAN", batch, axis=0).item() for batch in distributed]
        [0.5, 2.5, 4.0]
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> DistributedIterator:
        epoch = self._feed.next_epoch
        self._feed.next_epoch = epoch + 1
        return DistributedIterator(self._feed, epoch)

    def __len__(self) -> int:
        if not self._feed.is_global:
            raise TypeError(
                "the number of steps is that of the longest dataset, which only reading them tells"
            )
        return len(self._feed.dataset)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<sv.DistributedDataset of {self._feed.what} for {self._feed.strategy!r}>"


class DistributedIterator(MigrationHintsMixin):
    """An epoch of a DistributedDataset being read; all replicas get their batches, and its end, together.

    A replica whose own dataset has ended gets batches without rows until all have ended. The state is the same on every
    replica, and may be loaded under another number of them: reading continues at the same global batch, or, for
    datasets from a function, at the same batch of each replica's dataset.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> dataset = sv.get_strategy().experimental_distribute_dataset([np.ones(2), np.zeros(2)])
        >>> iterator = iter(dataset)
        >>> next(iterator)
        array([1., 1.])
        >>> state = iterator.state_dict()
        >>> state
        {'input': 'global batches', 'epoch': 0, 'position': 1, 'seed': ''}
        >>> again = iter(dataset)
        >>> again.load_state_dict(state)
        >>> next(again)
        array([0., 0.])
    """

    def __init__(self, feed: Feed, epoch: int) -> None:
        self._feed = feed
        self._epoch = epoch
        self._position = 0
        self._restart()

    def _restart(self) -> None:
        self._elements: Iterator[Any] | None = None
        self._has_ended = False  # this replica's own dataset
        self._is_over = False  # all of them
        self._failure: str | None = None
        self._is_first = True
        self._rows = 0  # of the batch that was read last
        self._kind: BatchPolicy | None = None  # of the last batch seen here or told of
        self._no_rows: Any = None  # a batch without rows, of this kind:
        self._no_rows_of: BatchPolicy | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return this replica's batch of the next step. Collective.

        Raises:
            StopIteration: The datasets of all replicas have ended.
            ConfigError: An element here is no batch; the others raise MismatchError.
            MismatchError: Reading failed on another replica, or the replicas' batches do not fit together.
            UsageError: This iterator failed before.

        Cost: an all-reduce of 96 bytes, and one more exchange while the replicas' offers differ; with one replica nothing.
        """
        if self._failure is not None:
            raise UsageError(
                f"this iterator failed earlier ({self._failure}); make another one with iter(dataset)"
            )
        if self._is_over:
            raise StopIteration
        try:
            batch = self._agreed(*self._read())
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"[:200]
            self._let_go()
            raise
        if batch is _END:
            self._is_over = True
            self._let_go()
            raise StopIteration
        self._position += 1
        self._is_first = False
        return batch

    def close(self) -> None:
        """Stop reading: the thread of a prefetch ends. Not collective; the next batch is read from where it stopped."""
        if not self._is_over and self._failure is None:
            self._let_go()
            self._has_ended = False

    def state_dict(self) -> dict[str, int | str]:
        """Return where it is: the kind of input, epoch, position (batches handed out of it) and seed."""
        feed = self._feed
        return {
            "input": feed.what,
            "epoch": self._epoch,
            "position": self._position,
            "seed": feed.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that `state_dict` told; the next epoch of the dataset is the one after it.

        Not collective, but every replica has to load the same state.

        Args:
            state: What `state_dict` returned, also under another number of replicas.

        Raises:
            ConfigError: It is none, or that of another dataset. Nothing changed.
        """
        epoch, position = read_state(state, {"input": self._feed.what, "seed": self._feed.seed})
        self._let_go()
        self._restart()
        self._epoch, self._position = epoch, position
        self._feed.next_epoch = epoch + 1

    def _let_go(self) -> None:
        elements, self._elements = self._elements, None
        close = getattr(elements, "close", None)
        if close is not None:
            close()

    # -- one step ----------------------------------------------------------------------------------

    def _read(self) -> tuple[Any, Exception | None]:
        """Return the next batch, _END, or what reading raised; before the call, since reading may make calls itself."""
        try:
            if self._has_ended:
                return _END, None
            if self._elements is None:
                self._elements = self._feed.open(self._epoch, self._position)
            element = next(self._elements, _END)
            if element is _END:
                self._has_ended = True
                return _END, None
            batch, self._rows, self._kind = inspected(element)
        except Exception as error:
            return _END, error
        return batch, None

    def _offer(self, batch: Any) -> BatchHeader:
        is_global = self._feed.is_global
        known = 0 if self._kind is None else fingerprint("kind of batch", self._kind)
        has_batch = batch is not _END
        rows = self._rows if has_batch else 0
        content = content_digest(batch) if has_batch and is_global and self._is_first else 0
        return BatchHeader(has_batch, rows, self._epoch, self._position, known, content)

    def _agreed(self, batch: Any, error: Exception | None) -> Any:
        """Return this replica's batch, or _END when the datasets of all have ended."""
        strategy, is_global = self._feed.strategy, self._feed.is_global
        communicator = strategy.communicator
        if communicator.size == 1:
            if error is not None:
                raise error
            return batch
        mine = None if error is not None else self._offer(batch)
        if not self._is_same_everywhere(mine, error):
            assert mine is not None  # whoever has an error has raised it
            ended = self._settle(batch, mine)
        else:
            ended = batch is _END
        if ended:
            return _END
        if batch is _END:
            return no_rows(self._no_rows)
        if is_global:
            return even_part(batch, self._rows, communicator.size, communicator.member_rank)
        if self._no_rows_of != self._kind:
            self._no_rows, self._no_rows_of = no_rows(batch), self._kind
        return batch

    def _is_same_everywhere(self, mine: BatchHeader | None, error: Exception | None) -> bool:
        """Return whether all replicas offer the same for this step; the one call that every step has.

        Raises:
            Exception: `error`; the other replicas raise MismatchError.
        """
        strategy = self._feed.strategy
        if mine is not None:
            sides = mine.sides(is_global=self._feed.is_global)
            return is_unanimous(agree(strategy.communicator, _NEXT, "max", sides, strategy.timeout))

        def check() -> CollectiveSpec:
            assert error is not None
            raise error

        return bool(strategy.communicator.perform(_NEXT, check, strategy.timeout))

    def _settle(self, batch: Any, mine: BatchHeader) -> bool:
        """Agree on offers that differ; returns whether all datasets have ended.

        Raises:
            MismatchError: They do not fit together.
        """
        strategy, is_global = self._feed.strategy, self._feed.is_global
        communicator = strategy.communicator

        def check() -> CollectiveSpec:
            return CollectiveSpec(
                _NEXT, fingerprint(_NEXT, is_global), exchange(communicator, mine.record())
            )

        offers = [
            BatchHeader.from_record(one)
            for one in communicator.perform(_NEXT, check, strategy.timeout)
        ]
        decided = verdict(offers, is_global=is_global)
        if decided.disagreement:
            self._disagree(decided.disagreement, batch, offers)
        if decided.differs:
            self._differ(offers)
        if decided.teacher is not None:
            known = gather_objects(
                communicator, _NEXT, lambda: self._known(batch), strategy.timeout
            )
            if batch is _END:
                self._kind = BatchPolicy.from_plain(known[decided.teacher])
                self._no_rows, self._no_rows_of = self._kind.no_rows(), self._kind
        return decided.is_over

    def _known(self, batch: Any) -> list[Any] | None:
        return None if batch is _END or self._kind is None else self._kind.plain()

    def _disagree(self, what: str, batch: Any, offers: list[BatchHeader]) -> None:
        """Raise MismatchError with what each replica brings."""
        strategy = self._feed.strategy
        mine = "its end" if batch is _END or self._kind is None else self._kind.describe()
        kinds = gather_objects(strategy.communicator, _NEXT, lambda: mine, strategy.timeout)
        table = {
            rank: f"epoch {offer.epoch}, batch {offer.position}: {kind}"
            + (f", {offer.rows} rows" if offer.has_batch else "")
            for rank, offer, kind in zip(strategy.communicator.members, offers, kinds, strict=True)
        }
        remedy = (
            "every replica has to read the same global batches: make the dataset in the same way everywhere, with one seed"
            if self._feed.is_global
            else "the function has to make batches of one kind on every replica"
        )
        raise MismatchError(f"{_NEXT}: {what}; {remedy}", table)

    def _differ(self, offers: list[BatchHeader]) -> None:
        """Say that the replicas read different global batches; under `strict` it is an error."""
        strategy = self._feed.strategy
        text = (
            "the replicas read different global batches, of which each takes its part: examples are lost or counted twice, "
            "unless only their contents vary. Shuffle with one seed everywhere, or use distribute_datasets_from_function"
        )
        table = {
            rank: f"first batch has digest {offer.content:016x}"
            for rank, offer in zip(strategy.communicator.members, offers, strict=True)
        }
        if strategy.strict:
            raise MismatchError(text, table)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def distributed(strategy: Strategy, dataset: Any) -> DistributedDataset:
    """Return a DistributedDataset of global batches.

    Raises:
        ConfigError: It cannot be read.
    """
    return _announced(strategy, "experimental_distribute_dataset", dataset, None, is_global=True)


def distributed_from_function(
    strategy: Strategy, fn: Callable[[InputContext], Any]
) -> DistributedDataset:
    """Return a DistributedDataset of what a function makes for this replica."""
    replicas = strategy.num_replicas_in_sync
    dataset, error = None, None
    try:
        if not callable(fn):
            raise ConfigError(f"fn must be a function of an InputContext, not {type(fn).__name__}")
        dataset = fn(InputContext(replicas, strategy.communicator.home_rank, replicas))
    except Exception as raised:
        error = raised
    return _announced(
        strategy, "distribute_datasets_from_function", dataset, error, is_global=False
    )


def _announced(
    strategy: Strategy, what: str, dataset: Any, error: Exception | None, *, is_global: bool
) -> DistributedDataset:
    """Meet the other replicas, so that what is wrong on one of them is known to all."""

    def check() -> None:
        if error is not None:
            raise error
        if isinstance(dataset, str | bytes) or not hasattr(dataset, "__iter__"):
            raise ConfigError(
                f"strategy.{what} takes an iterable of batches, not {type(dataset).__name__}"
            )

    try:
        meet(strategy.communicator, f"strategy.{what}", (what,), strategy.timeout, check)
    except SyncvarError:
        if error is None:
            raise
    if (
        error is not None
    ):  # this rank's own error, also where another rank has failed before it came here
        raise error
    return DistributedDataset(Feed(strategy, dataset, is_global=is_global))
