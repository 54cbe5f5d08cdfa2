"""DistributedDataParallel over syncvar and over gloo: `python bench/torch_ddp.py [--workers 2]`.

It measures each case in turns over both backends in the same processes. It prints the medians of
the slowest rank in milliseconds, and gloo's time divided by syncvar's. `backward` is a whole
backward pass of a module without computation, `calls` its all-reduces alone, in buckets of 25 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from first_rank import run_as_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BUCKET_NBYTES = 25 << 20
_ROUNDS = 15
_JSON = "--json"


def resnet50_sizes() -> Iterator[int]:
    """Yield the numbers of elements of ResNet-50's parameters: 25.6 million in 161 tensors."""
    yield from (7 * 7 * 3 * 64, 64, 64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from (inputs * width, width, width)
            yield from (9 * width * width, width, width)
            yield from (width * 4 * width, 4 * width, 4 * width)
            if not block:
                yield from (inputs * 4 * width, 4 * width, 4 * width)
            inputs = 4 * width
    yield from (2048 * 1000, 1000)


def mlp_sizes() -> Iterator[int]:
    """Yield the numbers of elements of 40 tensors of 1 to 100 KiB."""
    yield from (256 + number * (25600 - 256) // 39 for number in range(40))


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = perf_counter()
    call()
    spent = torch.tensor(perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


class BackwardPass:
    """The backward pass of DistributedDataParallel for parameters of given sizes."""

    def __init__(self, sizes: list[int], group: Any) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        class Sums(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

            def forward(self) -> Any:
                return sum(part[0] if len(part) < 2 else part.sum() for part in self.parts)

        self._model = DistributedDataParallel(
            Sums(), process_group=group, gradient_as_bucket_view=True
        )
        self._loss: Any = None

    def prepare(self) -> None:
        """Make the loss."""
        self._loss = self._model()

    def __call__(self) -> None:
        """Run the backward pass."""
        self._loss.backward()


class BucketCalls:
    """The all-reduces of such a pass."""

    def __init__(self, sizes: list[int], group: Any) -> None:
        import torch

        self._group = group
        count, limit = sum(sizes), _BUCKET_NBYTES // 4
        self._buckets = [torch.ones(min(limit, count - start)) for start in range(0, count, limit)]

    def prepare(self) -> None:
        """Do nothing."""

    def __call__(self) -> None:
        """Start all calls, then wait for them."""
        import torch.distributed as dist

        works = [
            dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in self._buckets
        ]
        for work in works:
            work.wait()


def measure(case: str, label: str, kinds: dict[str, Any], rank: int) -> None:
    """Measure a case over both backends; rank 0 prints."""
    found: dict[str, list[float]] = {backend: [] for backend in kinds}
    for number in range(_ROUNDS + 2):
        for backend, call in kinds.items():
            call.prepare()
            spent = seconds(call)
            if number > 1:  # the first ones warm up
                found[backend].append(spent)
    if rank == 0:
        gloo, ours = median(found["gloo"]) * 1e3, median(found["syncvar"]) * 1e3
        row = {"case": case, "kind": label, "gloo_ms": gloo, "syncvar_ms": ours}
        text = f"{f'{case}, {label}':24}{gloo:10.2f}{ours:10.2f}{gloo / ours:8.2f}"
        print(json.dumps(row) if _JSON in sys.argv else text, flush=True)


def work() -> None:
    """Measure all cases, as one rank."""
    import torch
    import torch.distributed as dist

    import syncvar.torch  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group("syncvar")
    rank = dist.get_rank()
    groups = {"gloo": dist.new_group(backend="gloo"), "syncvar": dist.group.WORLD}
    if rank == 0 and _JSON not in sys.argv:
        print(f"{'milliseconds':24}{'gloo':>10}{'syncvar':>10}{'ratio':>8}", flush=True)
    for case, sizes in (("ResNet-50", list(resnet50_sizes())), ("MLP", list(mlp_sizes()))):
        for kind in (BackwardPass, BucketCalls):
            kinds = {backend: kind(sizes, group) for backend, group in groups.items()}
            label = "backward" if kind is BackwardPass else "calls"
            measure(case, label, kinds, rank)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    if "SYNCVAR_RANK" in os.environ:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(_JSON, action="store_true", help="print an object for each row")
    options = parser.parse_args()
    sys.exit(run_as_ranks(__file__, options.workers, *[_JSON] * options.json))


if __name__ == "__main__":
    main()
