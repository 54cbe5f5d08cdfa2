"""Gradients from JAX, variables and all-reduce from syncvar.

    pip install jax
    syncvar-launch --workers 4 -m syncvar.examples.jax_gradients

On each worker JAX compiles the loss and its gradients once, for the CPU. Its inputs are the values
of the variables as NumPy arrays. `apply_gradients` takes JAX arrays as they are.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.examples.spirals import make_points, report, train

if TYPE_CHECKING:
    from numpy.typing import NDArray


def main() -> None:
    """Train and report; every worker runs it."""
    try:
        import jax
    except ImportError:
        sys.exit("this example computes gradients with JAX: pip install jax")
    from jax import numpy as jnp

    sv.init()
    jax.config.update("jax_platforms", "cpu")

    def scores(weights: list[Any], inputs: Any) -> Any:
        hidden = inputs
        for matrix, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            hidden = jnp.tanh(hidden @ matrix + bias)
        return hidden @ weights[-2] + weights[-1]

    def mean_loss(weights: list[Any], inputs: Any, labels: Any) -> Any:
        likely = jax.nn.log_softmax(scores(weights, inputs))
        return -jnp.take_along_axis(likely, labels[:, None], axis=1).mean()

    compiled = jax.jit(jax.value_and_grad(mean_loss))

    def gradients(
        weights: list[NDArray[Any]], inputs: NDArray[Any], labels: NDArray[Any]
    ) -> tuple[float, list[Any]]:
        loss, found = compiled(weights, inputs, labels.astype(np.int32))
        return float(loss), found

    def accuracy(weights: list[NDArray[Any]], inputs: NDArray[Any], labels: NDArray[Any]) -> float:
        return float((np.asarray(scores(weights, inputs)).argmax(axis=1) == labels).mean())

    report(train(make_points(), gradients, accuracy), f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
