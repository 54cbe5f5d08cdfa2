"""Sums of matrices of low rank: the all-reduce of `sv.compressors.PowerSGD`.

Each rank has a matrix M; a matrix Q is the same on all. The sum of M Q, with its columns made
orthonormal, is P. The sum of transposed(M) P is the new Q, and the result is P transposed(Q). Only
the two sums travel. All ranks compute the same from them, by elementwise operations in a fixed
order, because matrix products of two processors may differ in the last bits.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.buckets import reduce_one
from syncvar.collectives.reduce_args import ReduceOptions
from syncvar.core.reduce_ops import quiet, reduction
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.compressors import PowerSGD, Values
    from syncvar.runtime.communicator import Communicator

_SEED = 20191
_DEPENDENT = 1e-12  # squared length, relative: such a column depends on the ones before it


class LowRankSum:
    """The sum of some arrays of each rank, as the stages of a call.

    `values` has the arrays, one after another; `factors` the Q of each matrix from the last sum, or
    None. Afterwards `factors` has the new ones. Arrays that would not become shorter are exact.
    """

    def __init__(
        self,
        communicator: Communicator,
        values: Values,
        shapes: Sequence[tuple[int, ...]],
        compressor: PowerSGD,
        *,
        mean: bool,
        factors: Sequence[Values | None] = (),
    ) -> None:
        self._communicator, self._is_mean = communicator, mean
        self._values, self._result = values, values
        ends = list(accumulate(map(prod, shapes), initial=0))
        self._parts: list[Values] = []  # matrices, or flat arrays
        self.factors: list[Values | None] = []
        for index, shape in enumerate(shapes):
            part = values[ends[index] : ends[index + 1]]
            factor_shape = compressor.factor_shape(shape)
            if factor_shape is None:
                self._parts.append(part)
                self.factors.append(None)
                continue
            self._parts.append(part.reshape(shape[0], -1))
            last = factors[index] if factors else None
            self.factors.append(_usable(last, factor_shape))

    def stages(self) -> Generator[Stage, None, Values]:
        """Yield the stages, which end with the sum or the mean."""
        communicator, size = self._communicator, self._communicator.size
        if size == 1:
            yield Stage(communicator.plan("barrier", 0), np.empty(0, np.uint8))
            return self._values
        pairs = list(zip(self._parts, self.factors, strict=True))
        with quiet():
            first: list[Values] = [
                part if factor is None else part @ factor for part, factor in pairs
            ]
        sums = yield from self._summed(first)
        bases = {
            index: _orthonormal(sums[index])
            for index, (_, factor) in enumerate(pairs)
            if factor is not None
        }
        with quiet():
            second: list[Values] = [self._parts[index].T @ base for index, base in bases.items()]
        new = (yield from self._summed(second)) if second else []
        divisor = np.float32(size if self._is_mean else 1)
        with quiet():
            for (index, base), factor in zip(bases.items(), new, strict=True):
                self.factors[index] = factor
                sums[index] = _product(base, factor)
            result = _joined(sums) / divisor
            result[np.isnan(result)] = np.nan
        self._result = result
        return result

    def error(self) -> Values:
        """Return what this rank's matrices have lost; 0 where it is not finite."""
        size = 1 if self._is_mean else self._communicator.size
        with quiet():
            lost: Values = self._values - self._result / np.float32(size)
        lost[~np.isfinite(lost)] = 0
        start = 0
        for part in self._parts:
            if part.ndim == 1:  # exact
                lost[start : start + part.size] = 0
            start += part.size
        return lost

    def _summed(self, arrays: list[Values]) -> Generator[Stage, None, list[Values]]:
        """Return the sums of arrays over all ranks, by one ordinary all-reduce."""
        vector = _joined(arrays)
        total: Any = yield from reduce_one(
            self._communicator, vector, reduction("sum", vector.dtype), None, ReduceOptions()
        )
        cuts = list(accumulate(one.size for one in arrays))
        pieces = np.split(total, cuts)[: len(arrays)]
        return [piece.reshape(one.shape) for piece, one in zip(pieces, arrays, strict=True)]


def _joined(arrays: Sequence[Values]) -> Values:
    """Return the elements of arrays as a new flat array."""
    return np.concatenate([np.empty(0, np.float32), *(one.reshape(-1) for one in arrays)])


def _usable(last: Values | None, shape: tuple[int, int]) -> Values:
    """Return a factor without columns that are zero or not finite; those begin anew."""
    # Only exact operations: the numbers are the same on every processor.
    start = (np.random.default_rng(_SEED).random(shape) * 2 - 1).astype(np.float32)
    if last is None:
        return start
    factor: Values = last.reshape(shape).copy()
    is_lost = ~np.isfinite(factor).all(axis=0) | ~factor.any(axis=0)
    factor[:, is_lost] = start[:, is_lost]
    return factor


def _orthonormal(matrix: Values) -> Values:
    """Return the columns, orthogonal and of length 1; 0 for those that depend on others.

    Source: modified Gram-Schmidt.
    """
    columns: NDArray[np.float64] = matrix.T.astype(np.float64)
    with quiet():
        for index, column in enumerate(columns):
            before = _dot(column, column)
            for other in columns[:index]:
                np.subtract(column, _dot(other, column) * other, out=column)
            length = _dot(column, column)
            is_dependent = length <= _DEPENDENT * before
            np.divide(column, np.inf if is_dependent else np.sqrt(length), out=column)
    return np.ascontiguousarray(columns.T.astype(np.float32))


def _dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the dot product, added up in an order that no processor changes."""
    terms = one * other
    while terms.size > 1:
        half = terms.size // 2
        pairs = terms[:half] + terms[half : 2 * half]
        terms = np.concatenate([pairs, terms[2 * half :]])
    return float(terms[0]) if terms.size else 0.0


def _product(base: Values, factor: Values) -> Values:
    """Return base @ transposed(factor), column by column."""
    result: Values = np.zeros((base.shape[0], factor.shape[0]), np.float32)
    for column, row in zip(base.T, factor.T, strict=True):
        result += column[:, None] * row
    return result
