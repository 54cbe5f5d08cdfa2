"""Times of torch's collectives over gloo: `torchrun --nproc-per-node 2 bench/peers/peer_torch.py`.

torch reduces in place only. Calls that need another result array would also pay for a copy; that is
not measured.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from timing import Case, Refused, Team, arguments, finish, measure_all, show_versions

if TYPE_CHECKING:
    from values import Values


def torch_team() -> Team:
    """Join the others over gloo."""
    dist.init_process_group("gloo")

    def agree(number: int) -> int:
        box = torch.tensor([number])
        dist.broadcast(box, src=0)
        return int(box[0])

    def largest(number: int) -> int:
        box = torch.tensor([number])
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return int(box[0])

    return Team(dist.get_rank(), dist.get_world_size(), dist.barrier, agree, largest)


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    if chosen.versions:
        show_versions(torch=str(torch.__version__))
        return
    team = torch_team()
    results, refused = measure_all(team, chosen, _case)
    finish(team, chosen, results, refused=refused, threads=torch.get_num_threads())
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # now and then a thread of gloo is alive, and aborts the process as it ends


def _case(_kind: str, values: Values) -> Case:
    kind = getattr(torch, values.dtype)
    x = torch.zeros(values.brought_count, dtype=kind)
    gather, scatter = _calls_on_one_tensor()
    out = (
        x
        if values.collective in ("all_reduce", "broadcast", "barrier")
        else torch.zeros(values.result_count, dtype=kind)
    )
    call = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, src=0),
        "barrier": dist.barrier,
        "all_gather": lambda: gather(out, x),
        "reduce_scatter": lambda: scatter(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
    }[values.collective]
    try:
        call()
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ) as problem:  # what gloo lacks it says before it sends
        raise Refused(str(problem).strip().splitlines()[0]) from problem
    return Case(
        lambda numbers: (
            x.fill_(0) if isinstance(numbers, int) else x.copy_(torch.from_numpy(numbers))
        ),
        call,
        lambda: out.to(torch.float32).numpy(),
        in_place=values.collective == "all_reduce",
    )


def _calls_on_one_tensor() -> tuple[Any, Any]:
    """Return the all-gather and the reduce-scatter of one tensor, which torch 2.13 names anew."""
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single, dist.reduce_scatter_single
    return dist.all_gather_into_tensor, dist.reduce_scatter_tensor


if __name__ == "__main__":
    main()
