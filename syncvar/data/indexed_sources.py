"""Sources whose elements can be read in any order: batches, shards and shuffles of them are arithmetic on indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.data.batches import as_batch, map_leaves, rows_of, stacked
from syncvar.data.shuffle_order import permutation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray


class Indexed(ABC):
    """Elements 0 to `count` - 1 of each epoch, in any order.

    Args:
        count: Elements of an epoch.
        seeds: Seeds of the shuffles, from the innermost.
    """

    is_endless = False

    def __init__(self, count: int, seeds: tuple[int, ...] = ()) -> None:
        self.count = count
        self.seeds = seeds

    @abstractmethod
    def element(self, epoch: int, index: int) -> Any:
        """Return one element of an epoch."""

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return a batch of some elements of an epoch, at least one."""
        return stacked([self.element(epoch, int(index)) for index in indices])

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of an epoch from position `start` on."""
        for index in range(start, self.count):
            yield self.element(epoch, index)


class ArrayRows(Indexed):
    """The rows of arrays. What is read is a copy, so that writing to it does not change the data."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = as_batch(arrays)
        super().__init__(rows_of(self._arrays))

    def element(self, epoch: int, index: int) -> Any:
        """Return a row."""
        return map_leaves(lambda array: np.array(array[index]), self._arrays)

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return some rows."""
        return map_leaves(lambda array: array[indices], self._arrays)


class IndexedShuffle(Indexed):
    """Elements in the order of (seed, epoch)."""

    def __init__(self, inner: Indexed, seed: int) -> None:
        super().__init__(inner.count, (*inner.seeds, seed))
        self._inner = inner
        self._seed = seed
        self._last: tuple[int, NDArray[np.intp]] = (
            -1,
            np.empty(0, np.intp),
        )  # replaced as a whole: threads may read it

    def _order(self, epoch: int) -> NDArray[np.intp]:
        known, order = self._last
        if known != epoch:
            order = permutation(self.count, self._seed, epoch)
            self._last = (epoch, order)
        return order

    def element(self, epoch: int, index: int) -> Any:
        """Return the element at a place of the order."""
        return self._inner.element(epoch, int(self._order(epoch)[index]))

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return the elements at some places of the order."""
        return self._inner.take(epoch, self._order(epoch)[indices])


class IndexedShard(Indexed):
    """Every n-th element, from element `index` on."""

    def __init__(self, inner: Indexed, shards: int, index: int) -> None:
        super().__init__(len(range(index, inner.count, shards)), inner.seeds)
        self._inner = inner
        self._shards = shards
        self._index = index

    def element(self, epoch: int, index: int) -> Any:
        """Return an element of the shard."""
        return self._inner.element(epoch, index * self._shards + self._index)

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return some elements of the shard."""
        return self._inner.take(epoch, indices * self._shards + self._index)


class IndexedBatches(Indexed):
    """Consecutive elements as batches; the last one may be short."""

    def __init__(self, inner: Indexed, size: int, *, drop_remainder: bool) -> None:
        whole, rest = divmod(inner.count, size)
        super().__init__(whole + (rest > 0 and not drop_remainder), inner.seeds)
        self._inner = inner
        self._size = size

    def element(self, epoch: int, index: int) -> Any:
        """Return a batch."""
        start = index * self._size
        return self._inner.take(epoch, np.arange(start, min(start + self._size, self._inner.count)))


class IndexedMap(Indexed):
    """What a function makes of each element."""

    def __init__(self, inner: Indexed, fn: Callable[[Any], Any]) -> None:
        super().__init__(inner.count, inner.seeds)
        self._inner = inner
        self._fn = fn

    def element(self, epoch: int, index: int) -> Any:
        """Return what the function makes of an element."""
        return self._fn(self._inner.element(epoch, index))


class IndexedRepeat(Indexed):
    """Several passes one after the other, each an epoch of what is repeated, with an order of its own."""

    def __init__(self, inner: Indexed, times: int) -> None:
        super().__init__(inner.count * times, inner.seeds)
        self._inner = inner
        self._times = times

    def element(self, epoch: int, index: int) -> Any:
        """Return an element of one of the passes."""
        number, place = divmod(index, self._inner.count)
        return self._inner.element(epoch * self._times + number, place)

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return some elements; those of one pass at once."""
        numbers, places = np.divmod(indices, self._inner.count)
        if (numbers == numbers[0]).all():
            return self._inner.take(epoch * self._times + int(numbers[0]), places)
        return super().take(epoch, indices)
