"""The operations of input and partitioners; methods of the interpreter's run."""

import numpy as np

import syncvar as sv


class DataOperations:
    """What the interpreter does for steps on datasets and partitioners."""

    def do_distribute_dataset(self, step, _x, place):
        dataset = place.strategy.experimental_distribute_dataset(
            [batch_of(one) for one in step["batches"]]
        )
        return [batch for _ in range(step.get("epochs", 1)) for batch in dataset]

    def do_dataset_reduce(self, step, _x, place):
        strategy = place.strategy
        dataset = strategy.experimental_distribute_dataset(
            [batch_of(one) for one in step["batches"]]
        )
        return [
            strategy.reduce(
                step["reduce_op"],
                strategy.run(lambda b: np.asarray(b).astype(np.float32), (batch,)),
                axis=0,
            )
            for batch in dataset
        ]

    def do_distribute_from_function(self, step, _x, place):
        made = lambda about: [
            batch_of(one) for one in step["per_rank_batches"][about.input_pipeline_id]
        ]
        return list(place.strategy.distribute_datasets_from_function(made))

    def do_dataset_context(self, _step, _x, place):
        seen = []

        def fn(about):
            seen.append(about)
            return [np.zeros(1)]

        list(place.strategy.distribute_datasets_from_function(fn))
        names = ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync")
        return {name: getattr(seen[0], name) for name in names} | {"calls": len(seen)}

    def do_input_context(self, step, _x, _place):
        about = sv.InputContext(*step["args"])
        found = {}
        for size in step["batches"]:
            try:
                found[str(size)] = about.get_per_replica_batch_size(size)
            except sv.ConfigError:
                found[str(size)] = "ConfigError"
        return found

    def do_partition(self, step, _x, _place):
        return getattr(sv.partitioners, step["partitioner"])(**step["args"])(
            tuple(step["shape"]), dtype_of(step["dtype"])
        )

    def do_row_ranges(self, step, _x, _place):
        return sv.partitioners.row_ranges(step["rows"], step["shards"])


def dtype_of(name):
    """Return the dtype that a case names."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def batch_of(value):
    """Return a batch: ints int64, floats float32, structures of these."""
    if isinstance(value, dict) and set(value) == {"tuple"}:
        return tuple(batch_of(item) for item in value["tuple"])
    if isinstance(value, dict):
        return {key: batch_of(item) for key, item in value.items()}
    array = np.asarray(value)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
