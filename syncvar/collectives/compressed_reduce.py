"""All-reduce of compressed values: `compress=` of `sv.all_reduce` and of optimizers.

All arrays of the call are one flat float32 vector. If a codec works in pieces, each rank sends
every other rank its piece, encoded. It sums the pieces that it gets, in float32 and in the order of
ranks. It encodes the sum, and sends that to all. Else all ranks get all encoded vectors, and each
sums them. Either way all ranks decode the same bytes in the same order, and get the same result.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from syncvar.collectives.compressors import (
    PowerSGD,
    checked_compressor,
    decoded,
    encoded,
    signature_of,
)
from syncvar.collectives.dispatch import Persistable
from syncvar.collectives.low_rank_sum import LowRankSum
from syncvar.collectives.reduce_args import (
    BucketLimits,
    ReduceOptions,
    check_finite,
    describe_reduction,
    describe_tree_reduction,
    reduction_of,
)
from syncvar.collectives.stage_builders import all_to_all_flat, gather_flat
from syncvar.core.array_arguments import as_array, checked_output
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import arrays_of, flatten, is_structure, private_copy, unflatten
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec, Data, Values
    from syncvar.core.pytree import TreeDef
    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator

_OPS = ("sum", "mean")
AnySum: TypeAlias = "CompressedSum | LowRankSum | BucketedSum"


class CompressedSum:
    """The sum of a flat float32 vector of each rank, as the stages of a call.

    The vector is encoded at once, before anything is sent. A group of one rank encodes nothing.
    """

    def __init__(
        self, communicator: Communicator, values: Values, compressor: Codec, *, mean: bool
    ) -> None:
        self._communicator, self._compressor = communicator, compressor
        self._values, self._is_mean = values, mean
        size = communicator.size
        parts = size if compressor.in_pieces else 1
        self._piece = max(1, -(-values.size // parts))
        self._sent: Data = np.empty(0, np.uint8)
        if size > 1:
            padded = values
            if values.size != parts * self._piece:
                padded = np.zeros(parts * self._piece, np.float32)
                padded[: values.size] = values
            with quiet():
                pieces = [encoded(compressor, one) for one in padded.reshape(parts, -1)]
            self._sent = np.concatenate(pieces)

    def error(self) -> Values:
        """Return what encoding has lost; 0 where it is not finite."""
        if self._communicator.size == 1:
            return np.zeros_like(self._values)
        with quiet():
            lost: Values = self._values - self._decoded(self._sent)[: self._values.size]
            lost[~np.isfinite(lost)] = 0
        return lost

    def stages(self) -> Generator[Stage, None, Values]:
        """Yield the stages, which end with the sum or the mean."""
        communicator, size = self._communicator, self._communicator.size
        if size == 1:
            yield Stage(communicator.plan("barrier", 0), np.empty(0, np.uint8))
            return self._values
        length = self._compressor.encoded_bytes(self._piece)
        if not self._compressor.in_pieces:
            everything = yield from gather_flat(communicator, self._sent, (length,) * size)
            return self._summed(everything)[: self._values.size]
        matrix = ((length,) * size,) * size
        pieces = yield from all_to_all_flat(communicator, self._sent, matrix)
        total = self._summed(pieces)
        with quiet():
            mine = encoded(self._compressor, total)
        everything = yield from gather_flat(communicator, mine, (length,) * size)
        with quiet():
            return self._decoded(everything)[: self._values.size]

    def _summed(self, everything: Data) -> Values:
        """Return the sum or mean of the encoded pieces of all ranks."""
        parts = everything.reshape(self._communicator.size, -1)
        with quiet():
            total = decoded(self._compressor, parts[0], self._piece)
            for part in parts[1:]:
                np.add(total, decoded(self._compressor, part, self._piece), out=total)
            if self._is_mean:
                np.divide(total, np.float32(len(parts)), out=total)
            total[np.isnan(total)] = np.nan  # NaNs have many bit patterns
        return total

    def _decoded(self, data: Data) -> Values:
        """Return the vector of encoded pieces."""
        length = self._compressor.encoded_bytes(self._piece)
        pieces = [decoded(self._compressor, one, self._piece) for one in data.reshape(-1, length)]
        return np.concatenate(pieces)


class BucketedSum:
    """The sums of some buckets, one after another, in place of `CompressedSum` or `LowRankSum`.

    A thread encodes the next bucket while one travels.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        values: Values,
        shapes: Sequence[tuple[int, ...]],
        factors: Sequence[Values | None],
        buckets: list[list[int]],
    ) -> None:
        ends = list(accumulate(map(prod, shapes), initial=0))
        self._parts = [
            partial(
                make,
                values[ends[bucket[0]] : ends[bucket[-1] + 1]],
                [shapes[index] for index in bucket],
                factors=[factors[index] for index in bucket] if factors else (),
            )
            for bucket in buckets
        ]
        self._counts = list(map(len, buckets))
        self._sums = [self._parts[0]()]

    def stages(self) -> Generator[Stage, None, Values]:
        """Yield the stages of one bucket after the other; end with the sum or the mean."""
        totals = []
        for part in [*self._parts[1:], None]:
            ahead = None if part is None else EncodingThread(part)
            try:
                totals.append((yield from self._sums[-1].stages()))
            finally:
                following = None if ahead is None else ahead.result()
            if following is not None:
                self._sums.append(following)
        return np.concatenate(totals)

    def error(self) -> Values:
        """Return what encoding has lost."""
        return np.concatenate([one.error() for one in self._sums])

    @property
    def factors(self) -> list[Values | None]:
        """The new directions of each array; see `LowRankSum`."""
        return [
            factor
            for one, count in zip(self._sums, self._counts, strict=True)
            for factor in getattr(one, "factors", [None] * count)
        ]


class EncodingThread(threading.Thread):
    """A thread that makes one sum, which encodes its values."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(name="syncvar-encode", daemon=True)
        self._make = make
        self._sum: AnySum | None = None
        self._failure: Exception | None = None
        self.start()

    def run(self) -> None:
        """Make the sum."""
        try:
            self._sum = self._make()
        except Exception as error:  # raised by `result`
            self._failure = error

    def result(self) -> Any:
        """Wait, and return the sum."""
        self.join()
        if self._failure is not None:
            raise self._failure
        return self._sum


class CompressedCall(Persistable):
    """An all-reduce with `compress=`; it always takes the slow path."""

    def __init__(
        self,
        communicator: Communicator,
        x: Any,
        out: Any,
        op: str,
        *options: Any,
        keep: bool,
    ) -> None:
        compress, others, sizes = options
        compressor, limits = checked_compressor(compress), BucketLimits.checked(*sizes)
        if others:
            raise ConfigError(
                f"compress= does not go together with {', '.join(others)}: scale the input or the "
                "result yourself, or leave out compress="
            )
        self._structure: TreeDef | None = None
        arrays, outs = [], [out]
        if is_structure(x):
            self._structure, leaves = flatten(x)
            arrays = arrays_of(x, leaves)
            outs = [None] * len(arrays) if out is None else self._checked_outs(out)
        else:
            arrays = [as_array(x)]
        self._like = private_copy(self._structure, x) if keep and self._structure is not None else x
        self._shapes = [array.shape for array in arrays]
        self._reducers = [_checked_reduction(array, op) for array in arrays]
        self._targets = [
            None if one is None else checked_output(one, array.shape, reducer.result)
            for one, array, reducer in zip(outs, arrays, self._reducers, strict=True)
        ]
        for array in arrays:
            check_finite(array, "all_reduce")
        with quiet():
            values = flat_values(arrays)
        mean = any(reducer.is_mean for reducer in self._reducers)
        self._sum = compressed_sum(
            communicator, values, self._shapes, compressor, mean=mean, limits=limits
        )
        super().__init__(self._described(arrays, op, compressor, limits))

    def _checked_outs(self, out: Any) -> list[Any]:
        structure, outs = flatten(out)
        if structure != self._structure:
            raise ConfigError("out must have the same structure as the value")
        return outs

    def _described(
        self,
        arrays: list[NDArray[Any]],
        op: str,
        compressor: Codec | PowerSGD,
        limits: BucketLimits | None,
    ) -> CollectiveSpec:
        plain = ReduceOptions(limits=limits)
        if self._structure is None:
            _, spec = describe_reduction(arrays[0], op, "all_reduce", plain)
        else:
            kinds = self._structure, arrays, self._reducers
            spec = describe_tree_reduction(*kinds, op, "all_reduce", plain)
        return with_compressor(spec, compressor)

    def stages(self) -> Generator[Stage, None, Any]:
        """Yield the stages, which end with the results."""
        total = yield from self._sum.stages()
        results: list[NDArray[Any]] = []
        ends = accumulate(int(np.prod(shape, dtype=np.int64)) for shape in self._shapes)
        start = 0
        with quiet():
            for shape, reducer, target, end in zip(
                self._shapes, self._reducers, self._targets, ends, strict=True
            ):
                result = np.empty(shape, reducer.result) if target is None else target
                result[...] = total[start:end].reshape(shape)
                results.append(result)
                start = end
        if self._structure is None:
            return results[0]
        return unflatten(self._structure, results, self._like)


def with_compressor(spec: CollectiveSpec, compressor: Codec | PowerSGD) -> CollectiveSpec:
    """Return the description of a reduction whose values a compressor encodes."""
    options = *spec.options, *signature_of(compressor)
    return spec._replace(options=options, shown=(spec.label, compressor.name), text=_label)


def compressed_sum(
    communicator: Communicator,
    values: Values,
    shapes: Sequence[tuple[int, ...]],
    compressor: Codec | PowerSGD,
    *,
    mean: bool,
    factors: Sequence[Values | None] = (),
    limits: BucketLimits | None = None,
) -> AnySum:
    """Return the sum of arrays that follow one another in a flat vector; see `LowRankSum`."""
    if limits is not None and communicator.size > 1:
        buckets = limits.divide((4 * prod(shape), None) for shape in shapes)
        if len(buckets) > 1:
            make = partial(compressed_sum, communicator, compressor=compressor, mean=mean)
            return BucketedSum(make, values, shapes, factors, buckets)
    if isinstance(compressor, PowerSGD):
        return LowRankSum(communicator, values, shapes, compressor, mean=mean, factors=factors)
    return CompressedSum(communicator, values, compressor, mean=mean)


def flat_values(arrays: Sequence[NDArray[Any]]) -> Values:
    """Return the elements of arrays as a new flat float32 array."""
    if not arrays:
        return np.empty(0, np.float32)
    flat = [array.reshape(-1).astype(np.float32) for array in arrays]
    return np.concatenate(flat)


def _checked_reduction(array: NDArray[Any], op: str) -> Reduction:
    if array.dtype.kind not in "fV":
        raise ConfigError(
            f"compress= rounds, and {array.dtype.name} is exact or complex: leave out compress=, "
            "or convert to float32 yourself"
        )
    reducer = reduction_of(array, op)
    if reducer.name not in _OPS:
        raise ConfigError(f"compress= goes with op 'sum' or 'mean', not {reducer.name!r}")
    return reducer


def _label(spec: CollectiveSpec) -> str:
    label, name = spec.shown
    return f"{str(label)[:-1]}, compress {name})"
