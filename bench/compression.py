"""What compression is worth between two hosts: all-reduces, and training on the digits.

python bench/compression.py                          needs root: makes network namespaces
python bench/compression.py --rates 100 --epochs 2   links of 100 Mbit/s only

The network has 4096 hidden units, 1.2 MiB of gradients a step. Both workers start from the same
weights for every compressor, and see the same batches. Times are medians of rank 0: an array of
4 MiB, a list of 64 arrays of 256 KiB, the same in buckets of 1 MiB, and a step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np
from comparison.namespaces import NoHosts, gigabit

import syncvar as sv
from syncvar.examples import digits

HIDDEN, BATCH, RATE = 4096, 120, 0.05
SIDE = 1024  # of the matrix of 4 MiB
KINDS = {
    "none": lambda: None,
    "float16": lambda: "float16",
    "bfloat16": lambda: "bfloat16",
    "int8": lambda: "int8",
    "topk, 1 %": lambda: sv.compressors.TopK(0.01),
    "powersgd, rank 2": lambda: sv.compressors.PowerSGD(2),
}


def main() -> int:
    """Start a job for each rate; a worker measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="100,1000", help="Mbit/s of the links")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        measure(chosen.calls, chosen.epochs)
        return 0
    try:
        with gigabit(2) as hosts:
            for rate in map(int, chosen.rates.split(",")):
                for index in range(2):
                    hosts.made.set_rate(index, rate)
                print(f"{rate} Mbit/s", flush=True)
                own = [__file__, "--worker", "--calls", chosen.calls, "--epochs", chosen.epochs]
                launcher = [sys.executable, "-m", "syncvar_launcher", *hosts.made.ssh]
                names = ["--hosts", ",".join(hosts.made.names), "--workers", "2"]
                command = [*hosts.made.prefix, *launcher, *names, *map(str, own)]
                subprocess.run(command, check=True, timeout=3600)
    except NoHosts as error:
        print(error)
        return 1
    return 0


def measure(calls: int, epochs: int) -> None:
    """Print a row for each compressor, as rank 0."""
    for name, make in KINDS.items():
        rng = np.random.default_rng(sv.rank())
        array = rng.normal(size=(SIDE, SIDE)).astype(np.float32)
        arrays = list(rng.normal(size=(64, SIDE // 4, SIDE // 4)).astype(np.float32))
        times = [
            all_reduce_s(array, make(), calls),
            all_reduce_s(arrays, make(), calls),
            all_reduce_s(arrays, make(), calls, bucket_bytes=1 << 20),
        ]
        step_s, accuracy = training(make(), epochs)
        if sv.rank() == 0:
            cells = " | ".join(f"{one * 1e3:.1f}" for one in [*times, step_s])
            print(f"| {name} | {cells} | {accuracy:.3f} |", flush=True)


def all_reduce_s(value: object, compress: object, calls: int, **options: int) -> float:
    """Return the median time of an all-reduce."""
    if compress is not None:
        options["compress"] = compress
    times = []
    for _ in range(calls + 2):
        sv.barrier()
        begin = time.perf_counter()
        sv.all_reduce(value, "mean", **options)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def training(compress: object, epochs: int) -> tuple[float, float]:
    """Train on the digits; return the median time of a step, and the test accuracy."""
    data, rng = digits.load(), np.random.default_rng(1)
    shapes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
    starts = [rng.normal(0, (2 / shape[0]) ** 0.5, shape) for shape in shapes]
    weights = [
        sv.Variable((one * (one.ndim > 1)).astype(np.float32), name=f"w{index}")
        for index, one in enumerate(starts)
    ]
    options = {} if compress is None else {"compress": compress}
    optimizer = sv.optimizers.SGD(RATE, **options)
    size, rank, times = sv.world_size(), sv.rank(), []
    for _ in range(epochs):
        order = rng.permutation(len(data.train_labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            begin = time.perf_counter()
            mine = order[start + rank : start + BATCH : size]
            images, labels = data.train_images[mine], data.train_labels[mine]
            found, _, _ = digits.gradients([one.numpy() for one in weights], images, labels)
            scale = np.float32(digits.ROWS / len(mine))
            scaled = [one * scale for one in found]
            optimizer.apply_gradients(zip(scaled, weights, strict=True))
            times.append(time.perf_counter() - begin)
    _, likely = digits.forward([one.numpy() for one in weights], data.test_images)
    return statistics.median(times[2:]), float(np.mean(likely.argmax(1) == data.test_labels))


if __name__ == "__main__":
    sys.exit(main())
