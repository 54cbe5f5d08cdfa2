"""Processing of the combined gradients before the step: weights, non-finite values, limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncvar.optimizers.rules.exact_math import norm

if TYPE_CHECKING:
    from syncvar.optimizers.gradient_buckets import Bucket, BucketPlan


class Clipping(NamedTuple):
    """Limits of gradients.

    Args:
        norm_max: Maximum 2-norm of all of them; None for no limit.
        value_max: Maximum absolute value of an element; None for no limit.
        skips: Leave out steps whose gradients hold an infinity or NaN.
    """

    norm_max: float | None
    value_max: float | None
    skips: bool

    def apply(
        self, buckets: list[Bucket], plan: BucketPlan, weight: float | None, *, divide: bool
    ) -> bool:
        """Scale and clip gradients in place; return whether to make a step with them."""
        flats = [bucket.flat for bucket in buckets]
        if weight is not None:
            if weight == 0.0:
                return False
            if divide:
                for flat in flats:
                    np.divide(flat, weight, out=flat)
        if self.skips and not all(bool(np.isfinite(flat).all()) for flat in flats):
            return False
        if self.value_max is not None:
            for flat in flats:
                np.minimum(flat, self.value_max, out=flat)
                np.maximum(flat, -self.value_max, out=flat)
        if self.norm_max is not None:
            length = norm(flats, plan.room)
            if length > self.norm_max:
                for flat in flats:
                    np.multiply(flat, self.norm_max / length, out=flat)
        return True
