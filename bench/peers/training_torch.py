"""Training with torch's DistributedDataParallel: `torchrun --nproc-per-node 2 bench/peers/training_torch.py ...`.

Kinds: "ddp" (the defaults), "ddp views" (gradients as views of the buckets, a static graph) and
    "alone" (each worker for
itself, its accuracy its own: what is left of a step without communication).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peer_torch import torch_team
from timing import finish, show_versions
from training_nets import inputs, loss_of, momentum, network, scores
from training_task import arguments, measure

if TYPE_CHECKING:
    from training_task import Array, Task

KINDS: dict[str, dict[str, bool] | None] = {
    "ddp": {},
    "ddp views": {"gradient_as_bucket_view": True, "static_graph": True},
    "alone": None,
}


class Parallel:
    """A network, wrapped or not."""

    def __init__(self, task: Task, options: dict[str, bool] | None) -> None:
        self.net = network(task.net)
        self.module = (
            self.net
            if options is None
            else torch.nn.parallel.DistributedDataParallel(self.net, **options)
        )
        self.optimizer = momentum(self.net, task)

    def train(self, images: Array, labels: Array) -> None:
        """Make the steps."""
        for one, label in inputs(images, labels):
            self.optimizer.zero_grad()
            loss_of(self.module, one, label).backward()
            self.optimizer.step()

    def scores(self, images: Array) -> Any:
        """Return the scores of images."""
        return scores(self.net, images)


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    if chosen.versions:
        show_versions(torch=torch.__version__)
        return
    team = torch_team()
    results = measure(
        team, chosen, {kind: partial(Parallel, options=options) for kind, options in KINDS.items()}
    )
    finish(team, chosen, results, threads=torch.get_num_threads())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
