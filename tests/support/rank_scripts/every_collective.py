"""Every collective with every count that could be a corner, checked with == against NumPy; run as a rank by test_every_collective.py.

What ranks bring and what calls must give are those of `syncvar test`: made on every rank, so that the expectation needs no
communication, and small integers, which every dtype holds exactly.
"""

import sys

import numpy as np

import syncvar as sv
from syncvar.cli.collective_registry import Case, combined, cut, part

RANK, SIZE = sv.rank(), sv.world_size()
COUNTS = sorted({0, 1, max(0, SIZE - 1), SIZE, SIZE + 1, 10_007})
DTYPES = ["float32", "float64", "int32", "uint8", "complex64", "float16", "bfloat16", "bool"]
checks = 0


def ops_of(dtype):
    kind = np.dtype(dtype).kind if dtype != "bfloat16" else "V"
    if kind == "c":
        return ["sum", "prod"]
    if kind == "b":
        return ["min", "max", "and", "or", "xor"]
    return ["sum", "prod", "min", "max", *(["and", "or", "xor"] if kind in "iu" else [])]


def same(got, wanted, *about):
    global checks
    checks += 1
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape or got.dtype != wanted.dtype or not (got == wanted).all():
        raise SystemExit(
            f"rank {RANK} of {SIZE}: {about}: got {got!r:.200}, wanted {wanted!r:.200}"
        )


def combining(count, dtype, op, root):
    case = Case(RANK, SIZE, (count,), dtype, op)
    mine, total = part(case, RANK), combined(case, range(SIZE))
    about = (op, dtype, count)
    same(sv.all_reduce(mine, op), total, "all_reduce", *about)
    into = np.empty_like(mine)
    assert sv.all_reduce(mine, op, out=into) is into
    same(into, total, "all_reduce out", *about)
    if op == "sum":
        same(sv.all_reduce_shards({SIZE - 1 - RANK: mine}), total, "all_reduce_shards", *about)
    got = sv.reduce(mine, op, root=root)
    if root == RANK:
        same(got, total, "reduce", *about)
    else:
        assert got is None
    same(sv.reduce_scatter(mine, op), cut(total, SIZE)[RANK], "reduce_scatter", *about)
    same(sv.scan(mine, op), combined(case, range(RANK + 1)), "scan", *about)
    if RANK:
        same(sv.exscan(mine, op), combined(case, range(RANK)), "exscan", *about)
    else:
        assert sv.exscan(mine, op).shape == mine.shape


def moving(count, dtype, root):
    def of(rank, length):
        return part(Case(RANK, SIZE, (length,), dtype), rank)

    parts = [of(rank, count) for rank in range(SIZE)]
    about = (dtype, count)
    same(
        sv.broadcast(parts[root] if root == RANK else None, root=root),
        parts[root],
        "broadcast",
        *about,
    )
    same(sv.all_gather(parts[RANK]), np.concatenate(parts), "all_gather", *about)
    uneven = [of(rank, (count + rank) % (count + 2)) for rank in range(SIZE)]
    same(sv.all_gather(uneven[RANK]), np.concatenate(uneven), "all_gather uneven", *about)
    got = sv.gather(uneven[RANK], root=root)
    if root == RANK:
        same(got, np.concatenate(uneven), "gather", *about)
    else:
        assert got is None
    same(sv.scatter(uneven if root == RANK else None, root=root), uneven[RANK], "scatter", *about)
    same(
        sv.scatter(parts[root] if root == RANK else None, root=root),
        cut(parts[root], SIZE)[RANK],
        "scatter cut",
        *about,
    )
    outgoing = [
        [of(s * SIZE + d, (count + s + 2 * d) % (count + 3)) for d in range(SIZE)]
        for s in range(SIZE)
    ]
    for source, got in enumerate(sv.all_to_all(outgoing[RANK])):
        same(got, outgoing[source][RANK], "all_to_all", source, *about)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    same(sv.sendrecv(parts[RANK], right, left), parts[left], "sendrecv", *about)
    if SIZE > 1:
        work = sv.send(parts[RANK], (RANK + 1) % SIZE, tag=count, async_op=True)
        before = (RANK - 1) % SIZE
        same(sv.recv(before, tag=count), parts[before], "send and recv", *about)
        work.wait()


def odd():
    root = SIZE - 1
    base = np.arange(24.0).reshape(4, 6) + RANK
    turned = [(np.arange(24.0).reshape(4, 6) + rank).T[::2] for rank in range(SIZE)]
    assert not turned[RANK].flags.c_contiguous
    same(sv.all_reduce(base.T[::2]), sum(turned), "all_reduce strided")
    frozen = turned[RANK].copy()
    frozen.flags.writeable = False
    same(sv.all_reduce(frozen), sum(turned), "all_reduce read-only")
    same(sv.all_gather(base.T[::2], axis=1), np.concatenate(turned, axis=1), "all_gather axis 1")
    gathered = sv.gather(np.asfortranarray(base), root=root, axis=-1)
    if root == RANK:
        same(
            gathered,
            np.concatenate([np.arange(24.0).reshape(4, 6) + r for r in range(SIZE)], axis=-1),
            "gather axis -1",
        )
    same(sv.all_reduce(np.float32(RANK)), np.float32(SIZE * (SIZE - 1) / 2), "0-d")
    same(sv.scan(RANK + 1), np.asarray(sum(range(RANK + 2))), "scan 0-d")
    mean = sv.all_reduce(np.full(3, RANK, np.int64), "mean")
    same(mean, np.full(3, (SIZE - 1) / 2), "mean of integers")
    values, ranks = sv.all_reduce(np.array([RANK, -RANK, 0.0]), "maxloc")
    same(values, np.array([SIZE - 1.0, 0.0, 0.0]), "maxloc values")
    same(ranks, np.array([SIZE - 1, 0, 0]), "maxloc ranks")
    assert sv.all_reduce(np.array([RANK == 0, True]), "and").tolist() == [SIZE == 1, True]
    assert sv.all_reduce(np.array([RANK == 0, False]), "xor").tolist() == [True, False]
    lengths = [(rank + 1) % 3 for rank in range(SIZE)]
    rows = np.arange(sum(lengths) * 2.0).reshape(-1, 2)
    bounds = np.cumsum([0, *lengths])
    wanted = rows[bounds[RANK] : bounds[RANK + 1]] * SIZE
    same(sv.reduce_scatter(rows, lengths=lengths), wanted, "reduce_scatter uneven")
    assert sv.all_gather_object({"rank": RANK, "x": np.arange(RANK)})[root]["rank"] == root
    assert sv.gather_object(RANK, root=root) == (list(range(SIZE)) if root == RANK else None)
    assert (
        sv.scatter_object(
            [f"for {rank}" for rank in range(SIZE)] if root == RANK else None, root=root
        )
        == f"for {RANK}"
    )
    sv.send_object({"from": RANK}, (RANK + 1) % SIZE)
    assert sv.recv_object((RANK - 1) % SIZE) == {"from": (RANK - 1) % SIZE}
    assert sv.broadcast_object([root, "x"] if root == RANK else None, root=root) == [root, "x"]
    pending = [
        sv.all_reduce(np.full(9, RANK), async_op=True),
        sv.reduce(np.ones(3), async_op=True),
        sv.broadcast(np.ones(2), async_op=True),
        sv.all_gather(RANK, async_op=True),
        sv.gather(RANK, async_op=True),
        sv.scatter(list(range(SIZE)), async_op=True),
        sv.reduce_scatter(np.ones(SIZE), async_op=True),
        sv.all_to_all(np.arange(SIZE), async_op=True),
        sv.scan(1, async_op=True),
        sv.exscan(1, async_op=True),
        sv.barrier(async_op=True),
    ]
    results = [work.wait() for work in pending]
    same(results[0], np.full(9, SIZE * (SIZE - 1) // 2), "async all_reduce")
    same(results[5], np.asarray(RANK), "async scatter")
    same(results[6], np.array([float(SIZE)]), "async reduce_scatter")
    same(results[8], np.asarray(RANK + 1), "async scan")
    same(results[9], np.asarray(RANK), "async exscan")


def main():
    few = "--few" in sys.argv
    for index, count in enumerate(COUNTS):
        for number, dtype in enumerate(DTYPES):
            if (
                few and SIZE > 4 and (index + number) % 2
            ):  # every count and every dtype, half of the pairs
                continue
            root = (index + number) % SIZE
            ops = ops_of(dtype)
            all_ops = not few or (
                count == SIZE + 1 and (number + SIZE) % 2 == 0
            )  # `--few`: of every other dtype, by size
            for op in ops if all_ops else [ops[(index + number) % len(ops)]]:
                combining(count, dtype, op, root)
            moving(count, dtype, root)
    odd()
    sv.barrier()
    if RANK == 0:
        print(f"checked {checks}", flush=True)


if __name__ == "__main__":
    main()
