"""Input data: datasets with the same global batches for every number of replicas.

    dataset = sv.data.from_arrays({"x": images, "y": labels}, batch_size=128, shuffle=True)
    for batch in strategy.experimental_distribute_dataset(dataset.prefetch(2)):
        strategy.run(step, args=(batch,))    # each replica gets its part of the global batch

A dataset knows nothing of replicas. `strategy.experimental_distribute_dataset` splits its batches;
`strategy.distribute_datasets_from_function` gives each replica a dataset of its own, see `shard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.data.dataset import Dataset, DatasetIterator, from_arrays, from_generator

__all__ = ["Dataset", "DatasetIterator", "from_arrays", "from_generator"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing_attribute

        raise missing_attribute("sv.data", name, __all__)
