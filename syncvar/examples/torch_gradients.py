"""Gradients from PyTorch, variables and all-reduce from syncvar.

    pip install torch
    syncvar-launch --workers 4 -m syncvar.examples.torch_gradients

On each worker PyTorch computes in its own memory and knows nothing of the other workers. The
weights are variables. Before each step their values are copied into the parameters; after it
`apply_gradients` takes the gradients without a copy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import syncvar as sv
from syncvar.examples.spirals import make_points, report, train

if TYPE_CHECKING:
    from numpy.typing import NDArray


def main() -> None:
    """Train and report; every worker runs it."""
    try:
        import torch
    except ImportError:
        sys.exit("this example computes gradients with PyTorch: pip install torch")
    from torch.nn import functional

    sv.init()  # before PyTorch computes, because it sets the number of threads
    parameters: list[Any] = []

    def load(weights: list[NDArray[Any]]) -> None:
        """Copy the values of the variables into the parameters."""
        if not parameters:
            parameters.extend(torch.empty(value.shape, requires_grad=True) for value in weights)
        for parameter, value in zip(parameters, weights, strict=True):
            parameter.detach().numpy()[...] = value

    def scores(inputs: NDArray[Any]) -> Any:
        hidden = torch.from_numpy(inputs)
        for matrix, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            hidden = torch.tanh(hidden @ matrix + bias)
        return hidden @ parameters[-2] + parameters[-1]

    def gradients(
        weights: list[NDArray[Any]], inputs: NDArray[Any], labels: NDArray[Any]
    ) -> tuple[float, list[Any]]:
        load(weights)
        loss = functional.cross_entropy(scores(inputs), torch.from_numpy(labels))
        return loss.item(), list(torch.autograd.grad(loss, parameters))

    def accuracy(weights: list[NDArray[Any]], inputs: NDArray[Any], labels: NDArray[Any]) -> float:
        load(weights)
        with torch.no_grad():
            return float((scores(inputs).argmax(dim=1).numpy() == labels).mean())

    report(train(make_points(), gradients, accuracy), f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
