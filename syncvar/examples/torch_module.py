"""Train a PyTorch module with PyTorch's own optimizer, on all workers.

    pip install torch
    syncvar-launch --workers 4 -m syncvar.examples.torch_module [FOLDER]

Three changes make a program for one process run on many. All workers start with rank 0's
parameters. Each worker takes its part of a batch. Before each step, an all-reduce averages the
gradients in place. With FOLDER, module and optimizer are restored from there and saved to it,
on any number of workers.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import numpy as np

import syncvar as sv
from syncvar.examples.spirals import (
    BATCH,
    HIDDEN,
    LEARNING_RATE,
    STEPS,
    Trained,
    make_points,
    report,
)


def main() -> None:
    """Train and report; every worker runs it."""
    try:
        import torch
    except ImportError:
        sys.exit("this example trains a module of PyTorch: pip install torch")
    from torch import nn
    from torch.nn import functional

    sv.init()  # before PyTorch computes, because it sets the number of threads
    rank, workers = sv.rank(), sv.world_size()
    points = make_points()
    inputs, labels = torch.from_numpy(points.inputs), torch.from_numpy(points.labels)

    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    checkpoint = sv.Checkpoint(model=model, optimizer=optimizer)
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    if folder is not None and os.path.exists(folder):
        checkpoint.restore(folder)
    for parameter in model.parameters():
        sv.broadcast(parameter, out=parameter)

    draw = np.random.default_rng(2)  # all workers draw the same batches, and take their part
    own = 0.0  # loss of the last step, summed over this worker's rows
    for _ in range(STEPS):
        mine = np.array_split(draw.choice(len(labels), BATCH), workers)[rank]
        optimizer.zero_grad()
        # Parts may be uneven (with five workers), so scale to the mean over the whole batch.
        loss = functional.cross_entropy(model(inputs[mine]), labels[mine], reduction="sum")
        (loss * workers / BATCH).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        sv.all_reduce(gradients, "mean", out=gradients)  # one call for all gradients
        optimizer.step()
        own = loss.item()

    if folder is not None:
        checkpoint.save(folder)
    with torch.no_grad():
        accuracy = float((model(inputs).argmax(dim=1) == labels).float().mean())
    loss = float(sv.all_reduce(own)) / BATCH
    report(Trained(loss, accuracy, digest_of(model)), f"torch {torch.__version__}, module")


def digest_of(model: Any) -> str:
    """Return the SHA-256 of the weights."""
    weights = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    main()
