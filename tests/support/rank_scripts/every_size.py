"""Collectives, variables and servers with arrays of 8 B, 64 KiB and 1 MiB, compared with ==.

Tests run it as a rank. Long arrays move through shared memory or in pieces, short ones in frames:
the sizes reach all of these ways. `--few` leaves out half of the collectives' dtypes.
"""

import sys

import every_collective
import numpy as np
from every_collective import RANK, SIZE, same

import syncvar as sv
from syncvar.collectives.collective_registry import Case

NBYTES = (8, 64 << 10, 1 << 20)
TOTAL = SIZE * (SIZE + 1) // 2  # what one addition of (rank + 1) by every rank adds
ALWAYS = ("float64",)
MORE = ("int32", "float16")
STEPS = 3


def check_collectives(nbytes, number):
    """Run every collective with contributions of this length."""
    for index, dtype in enumerate(ALWAYS if "--few" in sys.argv else ALWAYS + MORE):
        count, root = nbytes // np.dtype(dtype).itemsize, (number + index) % SIZE
        case = Case(RANK, SIZE, (count,), dtype, root=root)
        every_collective.registered(case, ("sum", "max"))
        every_collective.moving(count, dtype, root)
    count = nbytes // 8
    objects = sv.all_gather_object({"rank": RANK, "array": np.full(count, float(RANK))})
    for rank, one in enumerate(objects):
        same(one["array"], np.full(count, float(rank)), "all_gather_object", nbytes)
    started = [sv.all_reduce(np.full(count, RANK + offset), async_op=True) for offset in (1.0, 2.0)]
    for offset, work in enumerate(started):
        same(work.wait(), np.full(count, TOTAL + 1.0 * offset * SIZE), "started all_reduce", nbytes)
    everyone = sv.new_group(range(SIZE))
    for color_of in (lambda rank: rank % 2, lambda rank: rank // 2):  # over hosts, and beside
        group = everyone.split(color_of(RANK))
        check_group(group, [one for one in range(SIZE) if color_of(one) == color_of(RANK)], count)


def check_group(group, ranks, count):
    """Run calls of some of the ranks, on one host or on several."""
    total = np.full(count, sum(ranks) + 1.0 * len(ranks))
    same(sv.all_reduce(np.full(count, RANK + 1.0), group=group), total, "group", ranks, count)
    gathered = sv.all_gather(np.full(count, 1.0 * RANK), group=group)
    same(gathered, np.repeat(np.array(ranks, float), count), "group", ranks, count)


def check_replicated(nbytes, strategy):
    """Write and read variables of which every rank has a copy."""
    count, name = nbytes // 8, f"{type(strategy).__name__}-{nbytes}"
    with strategy.scope():
        summed = sv.Variable(np.full(count, 7.0), name=f"sum-{name}", aggregation="SUM")
        first = sv.Variable(
            np.full(count, 2.0), name=f"first-{name}", aggregation="ONLY_FIRST_REPLICA"
        )
        mean = sv.Variable(np.zeros(count), name=f"mean-{name}", aggregation="MEAN")
        local = sv.Variable(
            np.zeros(count), name=f"local-{name}", synchronization="ON_READ", aggregation="SUM"
        )

    def write(step):
        summed.assign_add(np.full(count, RANK + 1.0))
        first.assign(np.full(count, 100.0 * step + RANK))
        mean.assign_sub(np.full(count, float(RANK * SIZE)))
        local.assign_add(np.full(count, RANK + 1.0))

    for step in range(STEPS):
        strategy.run(write, (step,))
        same(summed.numpy(), np.full(count, 7.0 + (step + 1) * TOTAL), "assign_add", name, step)
        same(first.numpy(), np.full(count, 100.0 * step), "assign", name, step)
        wanted = np.full(count, -(step + 1.0) * (TOTAL - SIZE))
        same(mean.numpy(), wanted, "assign_sub of the mean", name, step)
    same(local.numpy(), np.full(count, float(STEPS * TOTAL)), "ON_READ", name)


def check_servers(nbytes, plain, sharded):
    """Write and read variables on servers: whole ones on each server, and one that they share."""
    count = nbytes // 8
    with plain.scope():
        whole = [
            sv.Variable(np.full(count, 7.0 + index), name=f"whole-{nbytes}-{index}")
            for index in range(4)
        ]
        stepped = sv.Variable(np.zeros(count), name=f"stepped-{nbytes}")
        table = sv.Variable(np.zeros((4, count)), name=f"table-{nbytes}")
    with sharded.scope():
        cut = sv.Variable(np.full((max(2, count), 1), 5.0), name=f"cut-{nbytes}")
    sgd = sv.optimizers.SGD(1.0)
    sv.barrier()
    for index, one in enumerate(whole):
        same(one.read_value(), np.full(count, 7.0 + index), "initial value", nbytes, index)
    sv.barrier()
    for step in range(1, STEPS + 1):
        for one in whole:
            one.assign_add(np.full(count, RANK + 1.0))
        with sharded.transaction():
            cut.assign_add(np.full(cut.shape, RANK + 1.0))
        sgd.apply_gradients([(np.full(count, -1.0), stepped)])
        table.scatter_add([3, 1], np.full((2, count), [[3.0], [1.0]]))
        sv.barrier()
        for index, one in enumerate(whole):
            wanted = np.full(count, 7.0 + index + step * TOTAL)
            same(one.read_value(), wanted, "assign_add on a server", nbytes, index, step)
        same(cut.numpy(), np.full(cut.shape, 5.0 + step * TOTAL), "sharded", nbytes, step)
        same(stepped.read_value(), np.full(count, 1.0 * step * SIZE), "SGD", nbytes, step)
        rows, again = np.full((2, count), [[1.0], [3.0]]) * step * SIZE, [(table, [1, 3]), stepped]
        same(table.lookup([1, 3]), rows, "lookup", nbytes, step)
        for one, wanted in zip(plain.read_all(again), (rows, stepped.read_value()), strict=True):
            same(one, wanted, "read_all", nbytes, step)
        sv.barrier()
    both = plain.snapshot(whole[:2])
    for index, one in enumerate(both):
        wanted = np.full(count, 7.0 + index + STEPS * TOTAL)
        same(one, wanted, "snapshot", nbytes, index)
    sv.barrier()
    if RANK == SIZE - 1:
        whole[1].assign(np.arange(float(count)))
    sv.barrier()
    same(whole[1].read_value(), np.arange(float(count)), "assign on a server", nbytes)


def main():
    sv.init()
    mirrored = sv.MultiWorkerMirroredStrategy()
    plain = sv.ParameterServerStrategy(staleness=None)
    sharded = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
    for number, nbytes in enumerate(NBYTES):
        check_collectives(nbytes, number)
        check_replicated(nbytes, mirrored)
        check_servers(nbytes, plain, sharded)
    sv.barrier()
    print(f"checked {every_collective.checks}", flush=True)


main()
