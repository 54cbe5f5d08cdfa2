"""Training with TensorFlow: `python bench/peers/launch_by_variables.py --workers 2 bench/peers/training_tensorflow.py ...`.

MultiWorkerMirroredStrategy with the ring of CollectiveOps and a custom loop with a Keras network
and a Keras optimizer, which sums the replicas' gradients. Kinds: "step" (a `tf.function` call for
each step) and "loop" (one for an epoch, a loop over its steps inside, as TensorFlow's guide advises
for short steps).
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from peer_tensorflow import tensorflow_team
from timing import finish, show_versions
from training_task import (
    CHANNELS,
    CLASSES,
    HIDDEN,
    MOMENTUM,
    SIDE,
    arguments,
    initial_weights,
    measure,
)

if TYPE_CHECKING:
    from training_task import Array, Task

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def network(net: str) -> Any:
    """Return a Keras network with the first weights."""
    from tensorflow import keras

    layers = keras.layers
    if net == "mlp":
        inner = [layers.Dense(HIDDEN, activation="relu")]
    else:
        convolutions = [
            layers.Conv2D(count, 3, padding="same", activation="relu") for count in CHANNELS[net]
        ]
        inner = [
            layers.Reshape((SIDE, SIDE, 1)),
            *convolutions,
            layers.MaxPool2D(2),
            layers.Flatten(),
        ]
    made = keras.Sequential([keras.Input((SIDE * SIDE,)), *inner, layers.Dense(CLASSES)])
    weights = [_turned(value) for value in initial_weights(net)]
    if net in CHANNELS:  # its last layer takes channels last
        side = SIDE // 2
        last = initial_weights(net)[-2].reshape(CLASSES, CHANNELS[net][-1], side, side)
        weights[-2] = last.transpose(2, 3, 1, 0).reshape(-1, CLASSES)
    made.set_weights(weights)
    return made


def _turned(value: Array) -> Array:
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


class Mirrored:
    """A network of a strategy."""

    def __init__(self, task: Task, strategy: Any, *, loops: bool) -> None:
        import tensorflow as tf
        from tensorflow import keras

        self.tf = tf
        self.loops = loops
        with strategy.scope():
            self.net = network(task.net)
            optimizer = keras.optimizers.SGD(task.learning_rate, momentum=MOMENTUM)
            optimizer.build(self.net.trainable_variables)
        net, weights, world = self.net, self.net.trainable_variables, strategy.num_replicas_in_sync

        def step(images: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels, net(images, training=True)
                )
                loss = tf.reduce_mean(losses) / world  # the optimizer adds up
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        @tf.function(jit_compile=False)
        def one(images: Any, labels: Any) -> None:
            strategy.run(step, args=(images, labels))

        @tf.function(jit_compile=False)
        def many(images: Any, labels: Any) -> None:
            for index in tf.range(tf.shape(labels)[0]):
                strategy.run(step, args=(images[index], labels[index]))

        self.one, self.many = one, many

    def train(self, images: Array, labels: Array) -> None:
        """Make the steps."""
        images, labels = self.tf.constant(images), self.tf.constant(labels)
        if self.loops:
            self.many(images, labels)
            return
        for one, label in zip(self.tf.unstack(images), self.tf.unstack(labels), strict=True):
            self.one(one, label)

    def scores(self, images: Array) -> Array:
        """Return the scores of images."""
        return np.asarray(self.net(images))


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    import tensorflow as tf

    if chosen.versions:
        show_versions(tensorflow=tf.__version__)
        return
    strategy, _, team = tensorflow_team()
    kinds = {
        "step": partial(Mirrored, strategy=strategy, loops=False),
        "loop": partial(Mirrored, strategy=strategy, loops=True),
    }
    finish(team, chosen, measure(team, chosen, kinds))


if __name__ == "__main__":
    main()
