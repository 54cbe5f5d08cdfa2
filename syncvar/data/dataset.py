"""Datasets as programs see them: composed of steps, read any number of times, continued at a place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.core.lazy_import import ClassWithHints, MigrationHintsMixin, unexpected
from syncvar.data.indexed_sources import (
    ArrayRows,
    Indexed,
    IndexedBatches,
    IndexedMap,
    IndexedRepeat,
    IndexedShard,
    IndexedShuffle,
)
from syncvar.data.iterator_state import integer_of, read_state
from syncvar.data.prefetch import Prefetched
from syncvar.data.stream_sources import (
    Generated,
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

    Under a strategy these are *global* batches: `strategy.experimental_distribute_dataset` gives each replica its part.

    Args:
        arrays: Array or structure of arrays with first axes of one length. They are not copied; batches are copies.
        batch_size: Rows of a batch, at least 1; the last batch may be short. None: the elements are single rows, for
            `shuffle`, `shard`, `map` and `batch`. (`shuffle` and `shard` are refused where batches have been made: they
            would reorder and deal out whole batches.)
        shuffle: Read the rows in the order of (seed, epoch): the same on every replica, for any number of them.
        seed: Of the order, at least 0.
        drop_remainder: Leave a short last batch out.

    Raises:
        ConfigError: A wrong argument.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> dataset = sv.data.from_arrays({"x": np.arange(5), "y": np.arange(5) % 2}, batch_size=2)
        >>> [batch["x"].tolist() for batch in dataset]
        [[0, 1], [2, 3], [4]]
    """
    if _foreign:
        raise unexpected(from_arrays, _foreign)
    _flag("shuffle", shuffle)
    _flag("drop_remainder", drop_remainder)
    integer_of("seed", seed, 0)
    dataset = Dataset(ArrayRows(arrays))
    if shuffle:
        dataset = dataset.shuffle(seed=seed)
    if batch_size is None:
        return dataset
    source = dataset.batch(batch_size, drop_remainder=drop_remainder)._source  # noqa: SLF001
    return Dataset(source, rows=int(batch_size))


def from_generator(fn: Callable[[], Iterable[Any]]) -> Dataset:
    """Return a dataset of what a function yields.

    Args:
        fn: Called without arguments at the beginning of each epoch; returns an iterable of elements. To continue at a
            place, the elements before it are made again and dropped.

    Raises:
        ConfigError: `fn` cannot be called.

    Example:
        >>> import syncvar as sv
        >>> [batch.tolist() for batch in sv.data.from_generator(lambda: range(5)).batch(3)]
        [[0, 1, 2], [3, 4]]
    """
    _function("fn", fn, "write sv.data.from_generator(lambda: iterable)")
    return Dataset(Generated(fn))


class Dataset(MigrationHintsMixin, metaclass=ClassWithHints):
    """Elements (batches, or what batches are made of) that can be read any number of times.

    Made by `sv.data.from_arrays` and `sv.data.from_generator`. Each step returns another dataset. Reading it from the
    beginning is an epoch, and epochs are counted: shuffles have another order in each, a pure function of (seed, epoch).

    Every step of an endless dataset (`repeat()`) is read as it comes, but for `shuffle`, which needs all elements and is
    refused, and `len`, which raises TypeError.

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
        self._rows = rows  # of the batches that `from_arrays` has made; None elsewhere
        self._next_epoch = 0

    def shuffle(self, buffer_size: None = None, *, seed: int = 0, **_foreign: Never) -> Dataset:
        """Return the elements in the order of (seed, epoch), the same on every replica, for any number of them.

        All elements of an epoch are shuffled, not those of a buffer: those of `from_arrays` by their indices, others are
        all kept in memory for an epoch. Elements are what the steps before make: rows, or whole batches after `batch`.

        Args:
            buffer_size: Not to be given: there is no buffer.
            seed: At least 0.

        Raises:
            ConfigError: A wrong argument; the dataset is repeated without end (shuffle before `repeat`); `from_arrays` has
                made batches; while reading: a generator has yielded a million elements and not come to its end.
        """
        if _foreign:
            raise unexpected(Dataset.shuffle, _foreign)
        if buffer_size is not None:
            raise ConfigError(
                f"shuffle has no buffer whose size could be {buffer_size!r:.100}: all elements of an epoch are shuffled; write "
                f"dataset.shuffle(), or dataset.shuffle(seed=1) for another order"
                + ", and before repeat, which has no end"
                * self._source.is_endless
            )
        seed = integer_of("seed", seed, 0)
        self._refuse_batches(
            "shuffle",
            "reorder",
            f"sv.data.from_arrays(x, batch_size={self._rows}, shuffle=True, seed={seed})",
        )
        inner = self._source
        return Dataset(
            IndexedShuffle(inner, seed)
            if isinstance(inner, Indexed)
            else StreamShuffle(inner, seed)
        )

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every `num_shards`-th element, from element `index` on.

        Elements are what the steps before make: rows, or whole batches after `batch`.

        Args:
            num_shards: Shards that the elements are dealt out to, at least 1; `InputContext.num_input_pipelines`, say.
            index: Which of them, 0 to `num_shards` - 1; `InputContext.input_pipeline_id`.

        Raises:
            ConfigError: A wrong argument, or `from_arrays` has made batches.
        """
        shards = integer_of("num_shards", num_shards, 1)
        index = integer_of("index", index, 0)
        if index >= shards:
            raise ConfigError(
                f"index {index} is none of {shards} shards: they are 0 to {shards - 1}"
            )
        rows = (
            f"sv.data.from_arrays(x, batch_size=None).shard({shards}, {index}).batch({self._rows})"
        )
        self._refuse_batches("shard", "deal out", rows)
        inner = self._source
        kind = (
            IndexedShard(inner, shards, index)
            if isinstance(inner, Indexed)
            else StreamShard(inner, shards, index)
        )
        return Dataset(kind)

    def batch(self, size: int, *, drop_remainder: bool = False, **_foreign: Never) -> Dataset:
        """Return batches of consecutive elements: their arrays get a new first axis.

        Args:
            size: Elements of a batch, at least 1; the last batch may be short.
            drop_remainder: Leave a short last batch out.

        Raises:
            ConfigError: A wrong argument; while reading: elements of different structures or shapes.
        """
        if _foreign:
            raise unexpected(Dataset.batch, _foreign)
        size = integer_of("the batch size", size, 1)
        drop = _flag("drop_remainder", drop_remainder)
        inner = self._source
        if isinstance(inner, Indexed):
            return Dataset(IndexedBatches(inner, size, drop_remainder=drop))
        return Dataset(StreamBatches(inner, size, drop_remainder=drop))

    def map(self, fn: Callable[[Any], Any], **_foreign: Never) -> Dataset:
        """Return what a function makes of each element.

        Args:
            fn: Called with an element, in order; after `prefetch` in its thread, where it must not call collectives.

        Raises:
            ConfigError: `fn` cannot be called.
        """
        if _foreign:
            raise unexpected(Dataset.map, _foreign)
        _function("fn", fn, "write dataset.map(lambda batch: …)")
        inner = self._source
        return self._next(
            IndexedMap(inner, fn) if isinstance(inner, Indexed) else StreamMap(inner, fn)
        )

    def repeat(self, times: int | None = None) -> Dataset:
        """Return the elements several times in a row, in one epoch; each pass is shuffled anew.

        Args:
            times: Passes, at least 1; None repeats without end, so that nothing after it may need all elements: `shuffle`
                comes before.

        Raises:
            ConfigError: `times` is no such integer.
        """
        inner = self._source
        if times is None:
            return self._next(StreamRepeat(inner, None))
        times = integer_of("times", times, 1)
        return self._next(
            IndexedRepeat(inner, times)
            if isinstance(inner, Indexed)
            else StreamRepeat(inner, times)
        )

    def prefetch(self, size: int = 2) -> Dataset:
        """Return the same elements, read ahead in a thread while the program computes.

        The thread ends with the iterator: at the end of the elements, at an exception, which the program sees at that
        place, and when the iterator is closed or dropped.

        Args:
            size: Elements that wait at most, at least 1; one more may be in the making.

        Raises:
            ConfigError: The size is no such integer.
        """
        return self._next(Prefetched(self._source, integer_of("the size", size, 1)))

    def _next(self, source: Source) -> Dataset:
        """Return what a step makes that leaves the batches of `from_arrays` batches."""
        return Dataset(source, rows=self._rows)

    def _refuse_batches(self, step: str, does: str, by_rows: str) -> None:
        if self._rows is not None:
            raise ConfigError(
                f"{step} would {does} whole batches, because sv.data.from_arrays has made batches of {self._rows} rows: for the "
                f"rows write {by_rows}; if whole batches are meant, "
                f"sv.data.from_arrays(x, batch_size=None).batch({self._rows}).{step}(…)"
            )

    @property
    def seed(self) -> str:
        """Seeds of the shuffles, joined by commas; empty without any. Saved positions are compared by it."""
        return ",".join(map(str, self._source.seeds))

    def at(self, epoch: int, position: int = 0) -> DatasetIterator:
        """Return an iterator over an epoch from a position on, without counting an epoch.

        Args:
            epoch: At least 0.
            position: Elements of the epoch to leave out, at least 0.

        Raises:
            ConfigError: A wrong argument.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> list(sv.data.from_arrays(np.arange(4), batch_size=2).at(epoch=0, position=1))
            [array([2, 3])]
        """
        return DatasetIterator(
            self, integer_of("epoch", epoch, 0), integer_of("position", position, 0)
        )

    def __iter__(self) -> DatasetIterator:
        epoch = self._next_epoch
        self._next_epoch = epoch + 1
        return DatasetIterator(self, epoch, 0)

    def __len__(self) -> int:
        count = self._source.count
        if count is None:
            why = (
                "it is repeated without end"
                if self._source.is_endless
                else "its elements are generated"
            )
            raise TypeError(f"this dataset does not know its length: {why}")
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        count = self._source.count
        length = (
            f"{count} elements"
            if count is not None
            else "endless length"
            if self._source.is_endless
            else "unknown length"
        )
        return f"<sv.data.Dataset of {length}>"


class DatasetIterator:
    """An epoch of a dataset being read.

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

    def __init__(self, dataset: Dataset, epoch: int, position: int) -> None:
        self._dataset = dataset
        self._epoch = epoch
        self._position = position
        self._elements: Generator[Any, None, None] | None = None

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        if self._elements is None:
            self._elements = self._dataset._source.read(self._epoch, self._position)  # noqa: SLF001  (its iterator)
        element = next(self._elements)
        self._position += 1
        return element

    def close(self) -> None:
        """Stop reading: the thread of a prefetch ends. The next element is read from where it stopped."""
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def state_dict(self) -> dict[str, int | str]:
        """Return where it is: epoch, position (elements read of it) and seed."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._dataset.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that `state_dict` told; the dataset's next epoch is the one after it.

        Args:
            state: What `state_dict` returned, of a dataset with the same steps.

        Raises:
            ConfigError: It is none, or its seed is another one. Nothing changed.
        """
        epoch, position = read_state(state, {"seed": self._dataset.seed})
        self.close()
        self._epoch, self._position = epoch, position
        self._dataset._next_epoch = epoch + 1  # noqa: SLF001  (its iterator)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _function(name: str, value: Any, remedy: str) -> None:
    if not callable(value):
        raise ConfigError(f"{name} must be a function, not {type(value).__name__}: {remedy}")
