"""Times of TensorFlow's all-reduce: `python bench/peers/launch_by_variables.py --workers 2 bench/peers/peer_tensorflow.py`.

MultiWorkerMirroredStrategy with the ring of CollectiveOps: each call is a `tf.function` that runs
the replica context's `all_reduce` of one tensor in `strategy.run`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from timing import Case, Refused, Team, arguments, finish, measure_all, show_versions

if TYPE_CHECKING:
    from values import Values

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def tensorflow_team() -> tuple[Any, Any, Team]:
    """Join the others; returns the strategy, its sum of a tensor over the workers, and the ranks of the job."""
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    @tf.function
    def total(value: Any) -> Any:
        def reduce(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            here = tf.identity(value)  # on the replica's device, which an argument has not
            return context.all_reduce(tf.distribute.ReduceOp.SUM, here, options)

        return strategy.run(reduce, args=(value,))

    rank, world = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    one, none = tf.constant(1), tf.constant(0)

    def agree(number: int) -> int:
        return int(total(tf.constant(number) if rank == 0 else none))

    def largest(number: int) -> int:
        return int(max(total(tf.one_hot(rank, world, number, 0, dtype=tf.int64))))

    return strategy, total, Team(rank, world, lambda: int(total(one)), agree, largest)


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    import tensorflow as tf

    if chosen.versions:
        show_versions(tensorflow=tf.__version__)
        return
    _, total, team = tensorflow_team()
    none = tf.constant(0)

    def make(_kind: str, values: Values) -> Case:
        if values.collective != "all_reduce":
            raise Refused("its public interface is all_reduce")
        x, result = none, none

        def fill(numbers: Any) -> None:
            nonlocal x
            x = tf.cast(tf.constant(np.broadcast_to(numbers, values.count)), values.dtype)

        def call() -> None:
            nonlocal result
            result = total(x)

        return Case(fill, call, lambda: tf.cast(result, tf.float32).numpy())

    results, refused = measure_all(team, chosen, make)
    finish(team, chosen, results, refused=refused)


if __name__ == "__main__":
    main()
