"""Input data: datasets with the same global batches for every number of replicas.

A dataset does not know the replicas. `strategy.experimental_distribute_dataset` splits its batches;
`strategy.distribute_datasets_from_function` gives each replica a dataset of its own, see `shard`.

Example:
    >>> import numpy as np, syncvar as sv
    >>> dataset = sv.data.from_arrays({"x": np.arange(4.0)}, batch_size=2, shuffle=True)
    >>> strategy = sv.MirroredStrategy()
    >>> for batch in strategy.experimental_distribute_dataset(dataset.prefetch(2)):
    ...     print(strategy.run(lambda batch: batch["x"].shape, args=(batch,)))
    (2,)
    (2,)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.data.dataset import Dataset, DatasetIterator, from_arrays, from_generator

__all__ = ["Dataset", "DatasetIterator", "from_arrays", "from_generator"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing_attribute

        raise missing_attribute("sv.data", name, __all__)
