"""Distributed datasets: this replica's batches, in equally many steps on all replicas.

Each `next` is one small all-reduce of the replicas' `BatchHeader`s. If they are equal, nothing more
is needed. Else the replicas exchange the headers, and each makes the same decision (`decide_step`).
So no replica waits in a step that another never makes, and all get an exception while reading.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import agree
from syncvar.collectives.stage_builders import exchange, gather_objects, meet
from syncvar.core.errors import ConfigError, MismatchError, UsageError, error_line
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.data.batches import (
    BatchPolicy,
    content_digest,
    even_part,
    inspect_batch,
    integer_of,
    no_rows,
    read_state,
)
from syncvar.data.dataset import Dataset
from syncvar.protocol.fixed_records import ARRAY, InputRecord
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint
from syncvar.runtime.communicator import CheckedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.strategies.value_reduction import ReplicaGroup

_LARGEST = (1 << 64) - 1
_NEXT = "next batch of a distributed dataset"
_END = object()


@dataclass(frozen=True, slots=True)
class InputContext:
    """The replica for which `distribute_datasets_from_function` makes a dataset.

    Args:
        num_input_pipelines: Number of datasets, one for each process.
        input_pipeline_id: Number of this dataset.
        num_replicas_in_sync: Number of replicas of the strategy.

    Example:
        >>> import syncvar as sv
        >>> context = sv.InputContext(num_input_pipelines=4, num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of one replica's batch.

        Args:
            global_batch_size: Rows of all replicas' batches together, at least 0.

        Returns:
            Rows of one replica's batch.

        Raises:
            ConfigError: The number of replicas does not divide the batch.
        """
        size = integer_of("global_batch_size", global_batch_size, 0)
        replicas = self.num_replicas_in_sync
        each, rest = divmod(size, replicas)
        if rest:
            raise ConfigError(
                f"{size} rows cannot be shared evenly by {replicas} replicas; take {size - rest} "
                f"or {size - rest + replicas}, or distribute global batches with "
                f"strategy.experimental_distribute_dataset, which cuts any size"
            )
        return each


class BatchHeader(NamedTuple):
    """One replica's input for a step."""

    has_batch: bool  # whether it has a batch; else its dataset has ended
    rows: int  # rows of the batch
    epoch: int  # epoch that the iterator reads
    position: int  # batches that it has returned before
    kind: int  # digest of the batch's pytree and dtypes, or of the last known one; 0 for none
    content: int = 0  # digest of an iterator's first batch, for global batches; else 0

    def sides(self, *, is_global: bool) -> NDArray[np.uint64]:
        """Return the fields and their complements, for `is_unanimous`.

        `rows` counts for global batches only.
        """
        rows = self.rows if is_global else 0
        values = (int(self.has_batch), rows, self.epoch, self.position, self.kind, self.content)
        return np.array((*values, *(_LARGEST - value for value in values)), np.uint64)

    def record(self) -> InputRecord:
        """Return the header as a record for an exchange."""
        shape = self.rows, self.epoch, self.position, self.content
        return InputRecord(ARRAY, int(self.has_batch), shape, self.kind)

    @staticmethod
    def from_record(record: InputRecord) -> BatchHeader:
        """Return the header in a record."""
        rows, epoch, position, content = record.shape
        return BatchHeader(bool(record.dtype), rows, epoch, position, record.nbytes, content)


class BatchDecision(NamedTuple):
    """What all replicas do in a step."""

    disagreement: str = ""  # why the headers do not fit together; empty if they do
    is_over: bool = False  # whether all datasets have ended
    # replica that describes its batch to replicas without one; None if all know it
    describer: int | None = None
    differs: bool = False  # whether replicas read different contents of global batches


def is_unanimous(largest: NDArray[Any]) -> bool:
    """Return whether all replicas have equal headers."""
    high, low = largest.reshape(2, -1).tolist()
    return all(one + other == _LARGEST for one, other in zip(high, low, strict=True))


def decide_step(headers: Sequence[BatchHeader], *, is_global: bool) -> BatchDecision:
    """Return what all replicas do; a pure function of the headers of all replicas."""
    if len({(header.epoch, header.position) for header in headers}) > 1:
        return BatchDecision("the replicas are at different places of their datasets")
    live = [place for place, header in enumerate(headers) if header.has_batch]
    if not live:
        return BatchDecision(is_over=True)
    if is_global and len(live) < len(headers):
        return BatchDecision("the dataset has ended on some replicas and not on others")
    kinds = {headers[place].kind for place in live}
    if len(kinds) > 1:
        return BatchDecision("the replicas' batches differ in structure, dtype or shape of a row")
    if is_global and len({header.rows for header in headers}) > 1:
        return BatchDecision("the replicas' global batches differ in length")
    needed = any(header.kind not in kinds for header in headers)
    differs = is_global and len({header.content for header in headers}) > 1
    return BatchDecision(describer=live[0] if needed else None, differs=differs)


class Feed:
    """The source of a distributed dataset: batches, and whether all replicas read the same."""

    def __init__(self, strategy: ReplicaGroup, dataset: Any, *, is_global: bool) -> None:
        self.strategy = strategy
        self.dataset = dataset
        self.is_global = is_global
        self.kind = "global batches" if is_global else "batches from a function"
        self.seed = dataset.seed if isinstance(dataset, Dataset) else ""
        self.next_epoch = 0
        self._was_opened = False
        communicator = strategy.communicator
        self._home = len(communicator.whole), communicator.home_rank

    def require_home(self) -> None:
        """Raise UsageError if a function has made the batches for another replica than this one."""
        communicator = self.strategy.communicator
        home = len(communicator.whole), communicator.home_rank
        if not self.is_global and home != self._home:
            raise UsageError(
                f"distribute_datasets_from_function has made these batches for replica "
                f"{self._home[1]} of {self._home[0]}, and this is replica {home[1]} of {home[0]} "
                "now. Call it inside the function of sv.elastic.run, which begins anew when the "
                "members change; or take experimental_distribute_dataset, which divides global "
                "batches among the members"
            )

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, from a position on."""
        dataset = self.dataset
        if isinstance(dataset, Dataset):
            return dataset.at(epoch, position)
        elements: Iterator[Any] = iter(dataset)
        if elements is dataset:
            if self._was_opened:
                raise UsageError(
                    "the distributed dataset is an iterator, which can be read once; distribute a "
                    "list, or sv.data.from_generator(fn), whose fn is called for each epoch"
                )
            self._was_opened = True
        for _ in range(position):
            if next(elements, _END) is _END:
                break
        return elements


class DistributedDataset:
    """This replica's batches of each step. It can be read as often as its source.

    From `strategy.experimental_distribute_dataset` or `distribute_datasets_from_function`.

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
                "the number of steps is that of the longest dataset, which is known only after "
                "reading them"
            )
        return len(self._feed.dataset)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<sv.DistributedDataset of {self._feed.kind} for {self._feed.strategy!r}>"


class DistributedIterator(MigrationHintsMixin):
    """Iterator over one epoch of a DistributedDataset; it ends on all replicas together.

    A replica whose own dataset has ended gets batches without rows until all have ended. All
    replicas have the same state, and another number of replicas may load it. Reading then continues
    at the same global batch, or, for datasets from a function, at the same batch of each dataset.

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
        self._has_ended = False  # this replica's dataset
        self._is_over = False  # all datasets
        self._failure: str | None = None
        self._is_first = True
        self._rows = 0  # of the last batch
        self._policy: BatchPolicy | None = None  # of the last batch, here or on another replica
        self._no_rows: Any = None  # a batch without rows, for the next policy
        self._no_rows_of: BatchPolicy | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    @property
    def strategy(self) -> ReplicaGroup:
        """The strategy whose replicas read together."""
        return self._feed.strategy

    def __next__(self) -> Any:
        """Return this replica's batch of the next step. Collective.

        Returns:
            This replica's batch.

        Raises:
            StopIteration: The datasets of all replicas have ended.
            ConfigError: An element here is no batch; the others raise MismatchError.
            MismatchError: Reading failed on another replica, or the batches do not fit together.
            UsageError: This iterator failed before.

        Cost: an all-reduce of 96 bytes; one exchange more while the headers of replicas differ.
        """
        if self._failure is not None:
            text = f"this iterator failed earlier ({self._failure})"
            raise UsageError(f"{text}; make another one with iter(dataset)")
        if self._is_over:
            raise StopIteration
        try:
            batch = self._agree(*self._read())
        except BaseException as error:
            self._failure = error_line(error)[:200]
            self._close_elements()
            raise
        if batch is _END:
            self._is_over = True
            self._close_elements()
            raise StopIteration
        self._position += 1
        self._is_first = False
        return batch

    def close(self) -> None:
        """Stop reading, and end the thread of a prefetch. Not collective.

        The next batch is read from the position where reading stopped.
        """
        if not self._is_over and self._failure is None:
            self._close_elements()
            self._has_ended = False

    def state_dict(self) -> dict[str, int | str]:
        """Return the source, the epoch, the position (batches returned in it) and the seed."""
        place = {"epoch": self._epoch, "position": self._position}
        return {"input": self._feed.kind, **place, "seed": self._feed.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a `state_dict`. Not collective.

        Every replica has to load the same state. The dataset continues with the epoch after it.

        Args:
            state: Result of `state_dict`, also under another number of replicas.

        Raises:
            ConfigError: `state` is wrong, or belongs to another dataset. Nothing has changed.
        """
        epoch, position = read_state(state, {"input": self._feed.kind, "seed": self._feed.seed})
        self._close_elements()
        self._restart()
        self._epoch, self._position = epoch, position
        self._feed.next_epoch = epoch + 1

    def _close_elements(self) -> None:
        elements, self._elements = self._elements, None
        close = getattr(elements, "close", None)
        if close is not None:
            close()

    # -- one step ----------------------------------------------------------------------------------

    def _read(self) -> tuple[Any, Exception | None]:
        """Return the next batch or _END, and the exception of reading.

        It runs before the collective, since reading may make calls itself.
        """
        try:
            self._feed.require_home()
            if self._has_ended:
                return _END, None
            if self._elements is None:
                self._elements = self._feed.open(self._epoch, self._position)
            element = next(self._elements, _END)
            if element is _END:
                self._has_ended = True
                return _END, None
            batch, self._rows, self._policy = inspect_batch(element)
        except Exception as error:
            return _END, error
        return batch, None

    def _header(self, batch: Any) -> BatchHeader:
        is_global = self._feed.is_global
        known = 0 if self._policy is None else fingerprint("kind of batch", self._policy)
        has_batch = batch is not _END
        rows = self._rows if has_batch else 0
        content = content_digest(batch) if has_batch and is_global and self._is_first else 0
        return BatchHeader(has_batch, rows, self._epoch, self._position, known, content)

    def _agree(self, batch: Any, error: Exception | None) -> Any:
        """Return this replica's batch, or _END when all datasets have ended."""
        strategy, is_global = self._feed.strategy, self._feed.is_global
        communicator = strategy.communicator
        if communicator.size == 1:
            if error is not None:
                raise error
            return batch
        mine = None if error is not None else self._header(batch)
        if self._is_same_everywhere(mine, error):
            has_ended = batch is _END
        else:
            assert mine is not None  # with an error, _is_same_everywhere has raised it
            has_ended = self._settle(batch, mine)
        if has_ended:
            return _END
        if batch is _END:
            return no_rows(self._no_rows)
        if is_global:
            return even_part(batch, self._rows, communicator.size, communicator.member_rank)
        if self._no_rows_of != self._policy:
            self._no_rows, self._no_rows_of = no_rows(batch), self._policy
        return batch

    def _is_same_everywhere(self, mine: BatchHeader | None, error: Exception | None) -> bool:
        """Return whether all replicas have equal headers; raise `error` if there is one."""
        strategy = self._feed.strategy
        if mine is not None:
            sides = mine.sides(is_global=self._feed.is_global)
            return is_unanimous(agree(strategy.communicator, _NEXT, "max", sides, strategy.timeout))

        def check() -> CheckedCall:
            assert error is not None
            raise error

        return bool(strategy.communicator.perform(_NEXT, check, strategy.timeout))

    def _settle(self, batch: Any, mine: BatchHeader) -> bool:
        """Exchange headers that differ; return whether all datasets have ended."""
        strategy, is_global = self._feed.strategy, self._feed.is_global
        communicator = strategy.communicator
        check = partial(HeaderExchange, communicator, mine, is_global=is_global)
        records = communicator.perform(_NEXT, check, strategy.timeout)
        headers = [BatchHeader.from_record(one) for one in records]
        decision = decide_step(headers, is_global=is_global)
        if decision.disagreement:
            self._disagree(decision.disagreement, batch, headers)
        if decision.differs:
            self._differ(headers)
        if decision.describer is not None:
            policy = self._policy
            mine_plain = None if batch is _END or policy is None else policy.plain()
            known = gather_objects(communicator, _NEXT, lambda: mine_plain, strategy.timeout)
            if batch is _END:
                self._policy = BatchPolicy.from_plain(known[decision.describer])
                self._no_rows, self._no_rows_of = self._policy.no_rows(), self._policy
        return decision.is_over

    def _disagree(self, reason: str, batch: Any, headers: list[BatchHeader]) -> None:
        """Raise MismatchError with the batch of each replica."""
        strategy = self._feed.strategy
        policy = self._policy
        mine = "its end" if batch is _END or policy is None else policy.describe()
        inputs = gather_objects(strategy.communicator, _NEXT, lambda: mine, strategy.timeout)
        table = {}
        for rank, header, text in zip(strategy.communicator.members, headers, inputs, strict=True):
            table[rank] = f"epoch {header.epoch}, batch {header.position}: {text}"
            table[rank] += f", {header.rows} rows" if header.has_batch else ""
        remedy = (
            "every replica has to read the same global batches: make the dataset in the same way "
            "everywhere, with one seed"
            if self._feed.is_global
            else "the function has to make batches of one kind on every replica"
        )
        raise MismatchError(f"{_NEXT}: {reason}; {remedy}", table)

    def _differ(self, headers: list[BatchHeader]) -> None:
        """Warn that the replicas read different global batches; under `strict`, raise."""
        strategy = self._feed.strategy
        text = (
            "the replicas read different global batches, of which each takes its part: examples "
            "are lost or counted twice, unless only their contents vary. Shuffle with one seed "
            "everywhere, or use distribute_datasets_from_function"
        )
        table = {
            rank: f"first batch has digest {header.content:016x}"
            for rank, header in zip(strategy.communicator.members, headers, strict=True)
        }
        if strategy.strict:
            raise MismatchError(text, table)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


class HeaderExchange(CheckedCall):
    """A call in which the replicas exchange the headers of their batches."""

    def __init__(self, communicator: Communicator, header: BatchHeader, *, is_global: bool) -> None:
        super().__init__(CollectiveSpec(_NEXT, options=(is_global,)))
        self._communicator, self._header = communicator, header

    def stages(self) -> Generator[Stage, None, list[InputRecord]]:
        """Return the stages of the exchange."""
        return exchange(self._communicator, self._header.record())


def distributed(strategy: ReplicaGroup, dataset: Any) -> DistributedDataset:
    """Return a DistributedDataset of global batches."""
    method = "experimental_distribute_dataset"
    return _agreed_dataset(strategy, method, dataset, None, is_global=True)


def distributed_from_function(
    strategy: ReplicaGroup, fn: Callable[[InputContext], Any]
) -> DistributedDataset:
    """Return a DistributedDataset of the batches that a function makes for this replica."""
    replicas = strategy.num_replicas_in_sync
    dataset, error = None, None
    try:
        if not callable(fn):
            raise ConfigError(f"fn must be a function of an InputContext, not {type(fn).__name__}")
        dataset = fn(InputContext(replicas, strategy.communicator.home_rank, replicas))
    except Exception as raised:
        error = raised
    method = "distribute_datasets_from_function"
    return _agreed_dataset(strategy, method, dataset, error, is_global=False)


def _agreed_dataset(
    strategy: ReplicaGroup, method: str, dataset: Any, error: Exception | None, *, is_global: bool
) -> DistributedDataset:
    """Return the dataset after a barrier, in which all replicas get the error of any of them."""

    def check() -> None:
        if error is not None:
            raise error
        if isinstance(dataset, str | bytes) or not hasattr(dataset, "__iter__"):
            found = type(dataset).__name__
            raise ConfigError(f"strategy.{method} takes an iterable of batches, not {found}")

    trace = None if error is None else error.__traceback__
    try:
        spec = CollectiveSpec(f"strategy.{method}")
        meet(strategy.communicator, spec, strategy.timeout, check)
    except Exception:
        if error is None:
            raise
    if error is not None:  # also if another rank failed before; then without the frames of `meet`
        raise error.with_traceback(trace)
    return DistributedDataset(Feed(strategy, dataset, is_global=is_global))
