"""The call of an optimizer with `compress=`: compressed gradients, and what they have lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.compressed_reduce import compressed_sum, flat_values
from syncvar.collectives.stage_builders import gather_flat
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.communicator import CheckedCall
from syncvar.variables.grouped_writes import change_copies, copy_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec, PowerSGD, Values
    from syncvar.collectives.reduce_args import BucketLimits
    from syncvar.optimizers.gradient_buckets import BucketPlan
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


class CompressedGradients(CheckedCall):
    """The call that combines the gradients of all replicas; `commit` stores the result.

    It changes nothing before, so a call that fails loses no gradient.
    """

    def __init__(
        self,
        communicator: Communicator,
        plan: BucketPlan,
        compressor: Codec | PowerSGD,
        spec: CollectiveSpec,
        *,
        mean: bool,
        weighted: bool,
        limits: BucketLimits | None = None,
    ) -> None:
        super().__init__(spec)
        self._communicator, self._plan, self._is_weighted = communicator, plan, weighted
        self._parts = [part for bucket in plan.shared for part in bucket.parts]
        with quiet():
            values = flat_values([bucket.flat for bucket in plan.shared])
            start = 0
            for part in self._parts:
                stop = start + part.gradient.size
                if part.error is not None:
                    values[start:stop] += copy_of(part.error).reshape(-1)
                start = stop
        factors = [None if part.factor is None else copy_of(part.factor) for part in self._parts]
        shapes = [part.shape for part in self._parts]
        self._sum = compressed_sum(
            communicator, values, shapes, compressor, mean=mean, factors=factors, limits=limits
        )
        self._total: Values = values
        self._weight = plan.shared[0].whole[-1:].astype(np.float64)

    def stages(self) -> Generator[Stage, None, CompressedGradients]:
        """Yield the stages, which end with this call."""
        self._total = yield from self._sum.stages()
        if self._is_weighted and self._communicator.size > 1:
            ones = (1,) * self._communicator.size
            everyone = yield from gather_flat(self._communicator, self._weight, ones)
            self._weight = everyone.cumsum()[-1:]
        return self

    def commit(self) -> None:
        """Store the combined gradients, and what this replica's have lost."""
        start = 0
        lost = self._sum.error()
        factors = getattr(self._sum, "factors", [None] * len(self._parts))
        for part, factor in zip(self._parts, factors, strict=True):
            stop = start + part.gradient.size
            part.gradient[...] = self._total[start:stop].reshape(part.shape)
            if part.error is not None:
                change_copies([part.error], _store, lost[start:stop].reshape(part.shape))
            if part.factor is not None:
                change_copies([part.factor], _store, factor)
            start = stop
        if self._is_weighted:
            self._plan.shared[0].whole[-1] = self._weight[0]


def _store(arrays: list[NDArray[Any]], value: NDArray[Any]) -> None:
    arrays[0][...] = value
