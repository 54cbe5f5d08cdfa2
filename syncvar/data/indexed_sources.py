"""Sources with random access: batches, shards and shuffles of them are arithmetic on indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.data.batches import inspect_batch, map_leaves, stack_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """Return every index below `count` once, in the order of an epoch.

    The order is the same on every machine: it sorts raw numbers of a bit generator, whose streams
    NumPy promises not to change. For `Generator.permutation` NumPy promises nothing.

    Cost: count log count; 0.1 s for a million.
    """
    bits: Any = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(count), kind="stable")


class Indexed(ABC):
    """Elements 0 to `count` - 1 of each epoch, readable in any order."""

    is_endless = False

    def __init__(self, count: int, seeds: tuple[int, ...] = ()) -> None:
        self.count, self.seeds = count, seeds  # seeds of the shuffles, innermost first

    @abstractmethod
    def element(self, epoch: int, index: int) -> Any:
        """Return one element of an epoch."""

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return a batch of some elements of an epoch, at least one."""
        return stack_elements([self.element(epoch, int(index)) for index in indices])

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of an epoch from position `start`."""
        for index in range(start, self.count):
            yield self.element(epoch, index)


class ArrayRows(Indexed):
    """Rows of arrays, as copies, so that a program may write to them."""

    def __init__(self, arrays: Any) -> None:
        self._arrays, rows, _ = inspect_batch(arrays)
        super().__init__(rows)

    def element(self, epoch: int, index: int) -> Any:
        """Return a row."""
        return map_leaves(lambda array: np.array(array[index]), self._arrays)

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return some rows."""
        return map_leaves(lambda array: array[indices], self._arrays)


class Reordered(Indexed):
    """Elements of another source in another order, or some of them."""

    def __init__(self, inner: Indexed, count: int, seeds: tuple[int, ...]) -> None:
        super().__init__(count, seeds)
        self._inner = inner

    @abstractmethod
    def place(self, epoch: int, index: Any) -> Any:
        """Return where the inner source has the elements of one index, or of an array of them."""

    def element(self, epoch: int, index: int) -> Any:
        """Return one element of an epoch."""
        return self._inner.element(epoch, int(self.place(epoch, index)))

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return a batch of some elements of an epoch, at least one."""
        return self._inner.take(epoch, self.place(epoch, indices))


class IndexedShuffle(Reordered):
    """Elements in the order of (seed, epoch)."""

    def __init__(self, inner: Indexed, seed: int) -> None:
        super().__init__(inner, inner.count, (*inner.seeds, seed))
        self._seed = seed
        # (epoch, its order); threads may read it, so it is replaced as a whole.
        self._last: tuple[int, NDArray[np.intp]] = (-1, np.empty(0, np.intp))

    def place(self, epoch: int, index: Any) -> Any:
        """Return the index in the order of the epoch."""
        known, order = self._last
        if known != epoch:
            order = permutation(self.count, self._seed, epoch)
            self._last = (epoch, order)
        return order[index]


class IndexedShard(Reordered):
    """Every n-th element, starting with element `index`."""

    def __init__(self, inner: Indexed, shards: int, index: int) -> None:
        super().__init__(inner, len(range(index, inner.count, shards)), inner.seeds)
        self._shards, self._index = shards, index

    def place(self, epoch: int, index: Any) -> Any:
        """Return the index among all elements."""
        del epoch
        return index * self._shards + self._index


class IndexedBatches(Indexed):
    """Consecutive elements as batches; the last one may be short."""

    def __init__(self, inner: Indexed, size: int, *, drop_remainder: bool) -> None:
        whole, rest = divmod(inner.count, size)
        super().__init__(whole + (rest > 0 and not drop_remainder), inner.seeds)
        self._inner, self._size = inner, size

    def element(self, epoch: int, index: int) -> Any:
        """Return a batch."""
        start = index * self._size
        return self._inner.take(epoch, np.arange(start, min(start + self._size, self._inner.count)))


class IndexedMap(Indexed):
    """Results of a function of each element."""

    def __init__(self, inner: Indexed, fn: Callable[[Any], Any]) -> None:
        super().__init__(inner.count, inner.seeds)
        self._inner, self._fn = inner, fn

    def element(self, epoch: int, index: int) -> Any:
        """Return the function's result for an element."""
        return self._fn(self._inner.element(epoch, index))


class IndexedRepeat(Indexed):
    """Several passes in a row; each is an epoch of the inner source with its own order."""

    def __init__(self, inner: Indexed, times: int) -> None:
        super().__init__(inner.count * times, inner.seeds)
        self._inner, self._times = inner, times

    def element(self, epoch: int, index: int) -> Any:
        """Return an element of one of the passes."""
        number, inner_index = divmod(index, self._inner.count)
        return self._inner.element(epoch * self._times + number, inner_index)

    def take(self, epoch: int, indices: NDArray[np.intp]) -> Any:
        """Return some elements, at once if they are of one pass."""
        numbers, inner_indices = np.divmod(indices, self._inner.count)
        if (numbers == numbers[0]).all():
            return self._inner.take(epoch * self._times + int(numbers[0]), inner_indices)
        return super().take(epoch, indices)
