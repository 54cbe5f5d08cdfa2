"""Processes that only a store of torch connects: `python torch_store_ranks.py FOLDER SIZE`.

The parent starts them with torch.multiprocessing. They make and destroy the default group twice, the second time with
their ranks in reverse order. The parent prints what each rank got.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing

import syncvar.torch  # noqa: F401


def run(number, size, folder):
    lines = []
    for start in range(2):
        rank = size - 1 - number if start else number
        dist.init_process_group(
            "syncvar", init_method=f"file://{folder}/store{start}", rank=rank, world_size=size
        )
        parts = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(parts, torch.full((1,), float(number)))
        pair = dist.new_group([0, size - 1])
        total = torch.ones(2, dtype=torch.bfloat16)
        if rank in (0, size - 1):
            dist.all_reduce(total, group=pair)
        lines.append([int(part) for part in parts] + [int(total[0])])
        dist.destroy_process_group()
    with open(f"{folder}/rank{number}", "w") as file:
        file.write(str(lines))


if __name__ == "__main__":
    folder, size = sys.argv[1], int(sys.argv[2])
    torch.multiprocessing.spawn(run, (size, folder), nprocs=size)
    for number in range(size):
        with open(f"{folder}/rank{number}") as file:
            print(file.read())
