"""Input: datasets that give every number of replicas the same global batches, and can be continued at a place.

    dataset = sv.data.from_arrays({"x": images, "y": labels}, batch_size=128, shuffle=True, seed=7).prefetch(2)
    for batch in strategy.experimental_distribute_dataset(dataset):      # this replica's part of each global batch
        strategy.run(step, args=(batch,))

* `from_arrays`, `from_generator`: where elements come from. `Dataset`: shuffle, shard, batch, map, repeat, prefetch.
* `order`: the order of an epoch, a pure function of (count, seed, epoch). `batches`: what a batch is, cutting and stacking.
* `indexed`: sources that can be read in any order. `streams`: those that cannot. Both are pure.
* `prefetching`: the one thread of this room.

A dataset knows nothing of replicas: `strategy.experimental_distribute_dataset` cuts its batches, `strategy.
distribute_datasets_from_function` gives each replica a dataset of its own (`shard` is for those).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.data.dataset import Dataset, DatasetIterator, from_arrays, from_generator

__all__ = ["Dataset", "DatasetIterator", "from_arrays", "from_generator"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing

        raise missing("sv.data", name, __all__)
