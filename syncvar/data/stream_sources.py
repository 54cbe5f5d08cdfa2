"""Sequential sources: to start at a position, they read the elements before it and drop them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from itertools import count as counted
from itertools import islice
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.data.batches import stack_elements
from syncvar.data.indexed_sources import Indexed, permutation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

# Most elements that a shuffle of a sequential source keeps; a generator may be endless.
SHUFFLED_MAX = 1 << 20


class Stream(ABC):
    """Elements of each epoch, one after the other."""

    def __init__(
        self, count: int | None, seeds: tuple[int, ...] = (), *, is_endless: bool = False
    ) -> None:
        self.count = count  # of an epoch; None if unknown or endless
        self.seeds = seeds  # of the shuffles, innermost first
        self.is_endless = is_endless  # an epoch is known to have no end

    @abstractmethod
    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of an epoch from position `start`."""


Source = Indexed | Stream


class Generated(Stream):
    """Elements of the iterable that a function returns; it is called for each epoch."""

    def __init__(self, fn: Callable[[], Iterable[Any]]) -> None:
        super().__init__(None)
        self._fn = fn

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements."""
        iterable = self._fn()
        try:
            elements = iter(iterable)
        except TypeError:
            raise ConfigError(
                f"the function of sv.data.from_generator must return an iterable of elements, not "
                f"{type(iterable).__name__}"
            ) from None
        yield from islice(elements, start, None)


class StreamShuffle(Stream):
    """All elements of an epoch in the order of (seed, epoch), kept in memory."""

    def __init__(self, inner: Source, seed: int) -> None:
        if inner.is_endless:
            raise ConfigError(
                "shuffle needs all elements of an epoch, and this dataset repeats without end: "
                "shuffle before repeat, dataset.shuffle(seed=1).repeat(), which gives each pass "
                "its own order"
            )
        super().__init__(inner.count, (*inner.seeds, seed))
        self._inner, self._seed = inner, seed

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements."""
        with closing(self._inner.read(epoch, 0)) as coming:
            elements = list(islice(coming, SHUFFLED_MAX + 1))
        if len(elements) > SHUFFLED_MAX:
            raise ConfigError(
                f"shuffle keeps all elements of an epoch in memory, and this dataset has yielded "
                f"{SHUFFLED_MAX} without an end. If its generator is endless, shuffle the data "
                f"that it draws from. If it has an end, shuffle names or indices inside the "
                f"generator, or use sv.data.from_arrays, which shuffles by index"
            )
        for index in permutation(len(elements), self._seed, epoch)[start:]:
            yield elements[index]


class StreamShard(Stream):
    """Every n-th element, starting with element `index`."""

    def __init__(self, inner: Source, shards: int, index: int) -> None:
        count = None if inner.count is None else len(range(index, inner.count, shards))
        super().__init__(count, inner.seeds, is_endless=inner.is_endless)
        self._inner, self._shards, self._index = inner, shards, index

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements."""
        with closing(self._inner.read(epoch, start * self._shards)) as elements:
            yield from islice(elements, self._index, None, self._shards)


class StreamBatches(Stream):
    """Consecutive elements as batches; the last one may be short."""

    def __init__(self, inner: Source, size: int, *, drop_remainder: bool) -> None:
        more = 0 if drop_remainder else size - 1
        count = None if inner.count is None else (inner.count + more) // size
        super().__init__(count, inner.seeds, is_endless=inner.is_endless)
        self._inner, self._size, self._drop_remainder = inner, size, drop_remainder

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the batches."""
        with closing(self._inner.read(epoch, start * self._size)) as elements:
            while len(found := list(islice(elements, self._size))) == self._size:
                yield stack_elements(found)
            if found and not self._drop_remainder:
                yield stack_elements(found)


class StreamMap(Stream):
    """Results of a function of each element."""

    def __init__(self, inner: Source, fn: Callable[[Any], Any]) -> None:
        super().__init__(inner.count, inner.seeds, is_endless=inner.is_endless)
        self._inner, self._fn = inner, fn

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the results; the function does not see elements before `start`."""
        with closing(self._inner.read(epoch, start)) as elements:
            for element in elements:
                yield self._fn(element)


class StreamRepeat(Stream):
    """Several passes, or passes without end; each is an epoch of the inner source."""

    def __init__(self, inner: Source, times: int | None) -> None:
        count = None if times is None or inner.count is None else inner.count * times
        super().__init__(count, inner.seeds, is_endless=times is None or inner.is_endless)
        self._inner, self._times = inner, times

    def read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of all passes; an empty pass ends an endless repetition."""
        known = self._inner.count
        first, skipped = divmod(start, known) if known else (0, start)
        begin = epoch if self._times is None else epoch * self._times
        for number in counted(first) if self._times is None else range(first, self._times):
            was_empty = True
            with closing(self._inner.read(begin + number, skipped if known else 0)) as elements:
                for element in elements:
                    was_empty = False
                    if known or not skipped:
                        yield element
                    else:
                        skipped -= 1
            if known:
                skipped = 0
            if was_empty and self._times is None:
                return
