"""Times of torch's all-reduce over gloo: `torchrun --nproc-per-node 2 bench/peers/peer_torch.py`.

torch reduces in place only. Calls that need another result array would also pay for a copy; that is not measured.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from timing import Case, Team, arguments, finish, measure_all, show_versions


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    if chosen.versions:
        show_versions(torch=str(torch.__version__))
        return
    dist.init_process_group("gloo")

    def agree(number: int) -> int:
        box = torch.tensor([number])
        dist.broadcast(box, src=0)
        return int(box[0])

    def make(_kind: str, count: int) -> Case:
        tensor = torch.empty(count, dtype=torch.float32)
        array = tensor.numpy()
        return Case(array, lambda: dist.all_reduce(tensor), lambda: array, in_place=True)

    team = Team(dist.get_rank(), dist.get_world_size(), dist.barrier, agree)
    finish(team, chosen, measure_all(team, chosen, make), threads=torch.get_num_threads())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
