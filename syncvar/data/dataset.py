"""The public classes and functions of `sv.data`: datasets, their steps, and iterators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.core.lazy_import import ClassWithHints, MigrationHintsMixin
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.data.batches import integer_of, read_state
from syncvar.data.indexed_sources import (
    ArrayRows,
    Indexed,
    IndexedBatches,
    IndexedMap,
    IndexedRepeat,
    IndexedShard,
    IndexedShuffle,
)
from syncvar.data.prefetch import Prefetched
from syncvar.data.stream_sources import (
    Generated,
    Stream,
    StreamBatches,
    StreamMap,
    StreamRepeat,
    StreamShard,
    StreamShuffle,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from syncvar.data.stream_sources import Source


def from_arrays(
    arrays: Any,
    *,
    batch_size: int | None,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
    **_foreign: Never,
) -> Dataset:
    """Return a dataset of batches of arrays, cut along their first axis.

    Under a strategy these are *global* batches: `strategy.experimental_distribute_dataset` gives
    each replica its part.

    Args:
        arrays: Array or pytree of arrays with first axes of one length. They are not copied;
            batches are copies.
        batch_size: Rows of a batch, at least 1; the last batch may be short. None: elements are
            single rows, for `shuffle`, `shard`, `map` and `batch`. With batches `shuffle` and
            `shard` raise an error: they would reorder whole batches.
        shuffle: Whether to read the rows in an order that follows from (seed, epoch). It is the
            same on every replica, for any number of replicas.
        seed: Seed of the order, at least 0.
        drop_remainder: Whether to leave out a short last batch.

    Returns:
        The dataset.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> dataset = sv.data.from_arrays({"x": np.arange(5), "y": np.arange(5) % 2}, batch_size=2)
        >>> [batch["x"].tolist() for batch in dataset]
        [[0, 1], [2, 3], [4]]
    """
    if _foreign:
        raise unexpected_keyword(from_arrays, _foreign)
    _flag("shuffle", shuffle)
    _flag("drop_remainder", drop_remainder)
    integer_of("seed", seed, 0)
    source: Indexed = ArrayRows(arrays)
    if shuffle:
        source = IndexedShuffle(source, int(seed))
    if batch_size is None:
        return Dataset(source)
    size = integer_of("the batch size", batch_size, 1)
    return Dataset(IndexedBatches(source, size, drop_remainder=bool(drop_remainder)), rows=size)


def from_generator(fn: Callable[[], Iterable[Any]]) -> Dataset:
    """Return a dataset of the elements that a function yields.

    Args:
        fn: Function without arguments that returns an iterable of elements. It is called at the
            start of each epoch. An iterator that continues at a position produces the elements
            before it again and drops them.

    Returns:
        The dataset.

    Raises:
        ConfigError: `fn` cannot be called.

    Example:
        >>> import syncvar as sv
        >>> [batch.tolist() for batch in sv.data.from_generator(lambda: range(5)).batch(3)]
        [[0, 1, 2], [3, 4]]
    """
    _check_function(fn, "write sv.data.from_generator(lambda: iterable)")
    return Dataset(Generated(fn))


class Dataset(MigrationHintsMixin, metaclass=ClassWithHints):
    """A sequence of elements (batches, or rows to batch) that can be read any number of times.

    `sv.data.from_arrays` and `sv.data.from_generator` create it, and each step returns a new
    dataset. Each reading from the start is an epoch. Epochs are counted from 0, and shuffles have
    another order in each, a pure function of (seed, epoch).

    An endless dataset (`repeat()`) reads elements as they come. `shuffle` needs all elements and
    raises ConfigError for it; `len` raises TypeError.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> rows = sv.data.from_arrays(np.arange(6), batch_size=None)
        >>> dataset = rows.shuffle(seed=1).shard(2, 0).batch(2).map(lambda x: x * 10).prefetch(1)
        >>> len(dataset)
        2
        >>> [batch.shape for batch in dataset]
        [(2,), (1,)]
    """

    def __init__(self, source: Source, *, rows: int | None = None) -> None:
        self._source = source
        self._rows = rows  # batch size of `from_arrays`; None if it did not make batches
        self._next_epoch = 0

    def shuffle(self, buffer_size: None = None, *, seed: int = 0, **_foreign: Never) -> Dataset:
        """Return the elements in the order of (seed, epoch), the same for any number of replicas.

        It shuffles all elements of an epoch: those of `from_arrays` by index; others are all kept
        in memory for an epoch. Elements are the results of earlier steps: rows, or whole batches
        after `batch`.

        Args:
            buffer_size: Not supported, because there is no buffer.
            seed: Seed of the order, at least 0.

        Returns:
            The shuffled dataset.

        Raises:
            ConfigError: An argument is wrong, the dataset repeats without end (shuffle before
                `repeat`), or `from_arrays` has made batches. While reading: a generator has
                yielded a million elements without an end.
        """
        if _foreign:
            raise unexpected_keyword(Dataset.shuffle, _foreign)
        if buffer_size is not None:
            raise ConfigError(
                f"shuffle has no buffer, so buffer_size={buffer_size!r:.100} has no meaning: it "
                f"shuffles all elements of an epoch; write dataset.shuffle(), or "
                f"dataset.shuffle(seed=1) for another order"
                f"{', and before repeat, which has no end' if self._source.is_endless else ''}"
            )
        seed = integer_of("seed", seed, 0)
        rows = f"sv.data.from_arrays(x, batch_size={self._rows}, shuffle=True, seed={seed})"
        self._refuse_batches("shuffle", "reorder", rows)
        return Dataset(self._step(IndexedShuffle, StreamShuffle, seed))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every `num_shards`-th element, starting with element `index`.

        Elements are the results of earlier steps: rows, or whole batches after `batch`.

        Args:
            num_shards: Number of shards, at least 1; `InputContext.num_input_pipelines`, say.
            index: Shard to return, 0 to `num_shards` - 1; `InputContext.input_pipeline_id`, say.

        Returns:
            The shard.

        Raises:
            ConfigError: An argument is wrong, or `from_arrays` has made batches.
        """
        shards = integer_of("num_shards", num_shards, 1)
        index = integer_of("index", index, 0)
        if index >= shards:
            raise ConfigError(f"index {index} is outside {shards} shards: 0 to {shards - 1}")
        step = f"shard({shards}, {index})"
        rows = f"sv.data.from_arrays(x, batch_size=None).{step}.batch({self._rows})"
        self._refuse_batches("shard", "distribute", rows)
        return Dataset(self._step(IndexedShard, StreamShard, shards, index))

    def batch(self, size: int, *, drop_remainder: bool = False, **_foreign: Never) -> Dataset:
        """Return batches of consecutive elements; their arrays get a new first axis.

        Args:
            size: Elements of a batch, at least 1; the last batch may be short.
            drop_remainder: Whether to leave out a short last batch.

        Returns:
            The batches.

        Raises:
            ConfigError: An argument is wrong. While reading: elements differ in structure or shape.
        """
        if _foreign:
            raise unexpected_keyword(Dataset.batch, _foreign)
        size = integer_of("the batch size", size, 1)
        drop = _flag("drop_remainder", drop_remainder)
        return Dataset(self._step(IndexedBatches, StreamBatches, size, drop_remainder=drop))

    def map(self, fn: Callable[[Any], Any], **_foreign: Never) -> Dataset:
        """Return the results of a function of each element.

        Args:
            fn: Function of one element, called in order. After `prefetch` it runs in a thread,
                in which it must not call collectives.

        Returns:
            The dataset of results.

        Raises:
            ConfigError: `fn` cannot be called.
        """
        if _foreign:
            raise unexpected_keyword(Dataset.map, _foreign)
        _check_function(fn, "write dataset.map(lambda batch: …)")
        return Dataset(self._step(IndexedMap, StreamMap, fn), rows=self._rows)

    def repeat(self, times: int | None = None) -> Dataset:
        """Return the elements several times in a row, as one epoch; each pass has its own order.

        Args:
            times: Number of passes, at least 1. None repeats without end; then no later step may
                need all elements, so `shuffle` comes before.

        Returns:
            The repeated dataset.

        Raises:
            ConfigError: `times` is not such an integer.
        """
        if times is None:
            return Dataset(StreamRepeat(self._source, None), rows=self._rows)
        times = integer_of("times", times, 1)
        return Dataset(self._step(IndexedRepeat, StreamRepeat, times), rows=self._rows)

    def prefetch(self, size: int = 2) -> Dataset:
        """Return the same elements, read ahead in a thread while the program computes.

        The thread ends at the end of the elements, and when the iterator is closed or dropped. An
        exception ends it too, and the program gets it at that element.

        Args:
            size: Number of elements to hold, at least 1; one more may be in progress.

        Returns:
            The dataset.

        Raises:
            ConfigError: The size is not such an integer.
        """
        size = integer_of("the size", size, 1)
        return Dataset(Prefetched(self._source, size), rows=self._rows)

    def _step(
        self, indexed: type[Indexed], stream: type[Stream], *arguments: Any, **options: Any
    ) -> Source:
        """Return a step on the source, with random access if the source has it."""
        kind: Any = indexed if isinstance(self._source, Indexed) else stream
        source: Source = kind(self._source, *arguments, **options)
        return source

    def _refuse_batches(self, step: str, does: str, by_rows: str) -> None:
        if self._rows is not None:
            size = self._rows
            raise ConfigError(
                f"{step} would {does} whole batches, because sv.data.from_arrays has made batches "
                f"of {size} rows: for rows write {by_rows}; for whole batches write "
                f"sv.data.from_arrays(x, batch_size=None).batch({size}).{step}(…)"
            )

    @property
    def seed(self) -> str:
        """Seeds of the shuffles, joined by commas; saved positions contain it."""
        return _seed_of(self._source)

    def at(self, epoch: int, position: int = 0) -> DatasetIterator:
        """Return an iterator that starts at a position of an epoch, without counting an epoch.

        Args:
            epoch: Epoch, at least 0.
            position: Number of elements to skip, at least 0.

        Returns:
            The iterator.

        Raises:
            ConfigError: An argument is wrong.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> list(sv.data.from_arrays(np.arange(4), batch_size=2).at(epoch=0, position=1))
            [array([2, 3])]
        """
        position = integer_of("position", position, 0)
        epoch = integer_of("epoch", epoch, 0)
        return DatasetIterator(self._source, epoch, position, self._continue_after)

    def __iter__(self) -> DatasetIterator:
        epoch = self._next_epoch
        self._continue_after(epoch)
        return DatasetIterator(self._source, epoch, 0, self._continue_after)

    def _continue_after(self, epoch: int) -> None:
        self._next_epoch = epoch + 1

    def __len__(self) -> int:
        source = self._source
        if source.count is None:
            reason = "it repeats without end" if source.is_endless else "its elements are generated"
            raise TypeError(f"this dataset does not know its length: {reason}")
        return source.count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        count, is_endless = self._source.count, self._source.is_endless
        unknown = "endless length" if is_endless else "unknown length"
        return f"<sv.data.Dataset of {unknown if count is None else f'{count} elements'}>"


class DatasetIterator:
    """Iterator over an epoch of a dataset; it can save its position and continue there.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> dataset = sv.data.from_arrays(np.arange(6), batch_size=2)
        >>> iterator = iter(dataset)
        >>> _ = next(iterator)
        >>> state = iterator.state_dict()
        >>> state
        {'epoch': 0, 'position': 1, 'seed': ''}
        >>> again = iter(dataset)
        >>> again.load_state_dict(state)
        >>> next(again)
        array([2, 3])
    """

    def __init__(
        self, source: Source, epoch: int, position: int, continue_after: Callable[[int], None]
    ) -> None:
        self._source, self._epoch, self._position = source, epoch, position
        self._continue_after = continue_after  # tells the dataset which epoch was loaded
        self._elements: Generator[Any, None, None] | None = None

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        if self._elements is None:
            self._elements = self._source.read(self._epoch, self._position)
        element = next(self._elements)
        self._position += 1
        return element

    def close(self) -> None:
        """Stop reading; a prefetch thread ends. The next element is read from where it stopped."""
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def state_dict(self) -> dict[str, int | str]:
        """Return the position: epoch, position (elements read in it) and seed."""
        return {"epoch": self._epoch, "position": self._position, "seed": _seed_of(self._source)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; the next epoch of the dataset is the one after it.

        Args:
            state: Result of `state_dict` from a dataset with the same steps.

        Raises:
            ConfigError: It is not such a state, or its seed differs. Nothing changed.
        """
        epoch, position = read_state(state, {"seed": _seed_of(self._source)})
        self.close()
        self._epoch, self._position = epoch, position
        self._continue_after(epoch)


def _seed_of(source: Source) -> str:
    return ",".join(map(str, source.seeds))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _check_function(fn: Any, remedy: str) -> None:
    if not callable(fn):
        raise ConfigError(f"fn must be a function, not {type(fn).__name__}: {remedy}")
