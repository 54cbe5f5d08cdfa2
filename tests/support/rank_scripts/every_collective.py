"""Every collective with every count that could be a corner, checked with == against NumPy; run as a rank by test_every_collective.py.

What ranks bring and what calls must give are those of `syncvar test`: made on every rank, so that the expectation needs no
communication, and small integers, which every dtype holds exactly.
"""

import sys

import numpy as np

import syncvar as sv
from syncvar.collectives.collective_registry import (
    COLLECTIVES,
    Case,
    CollectiveKind,
    available,
    ops_of,
)

RANK, SIZE = sv.rank(), sv.world_size()
COUNTS = sorted({0, 1, max(0, SIZE - 1), SIZE, SIZE + 1, 10_007})
OPS = ("sum", "prod", "min", "max", "and", "or", "xor")
DTYPES = ["float32", "float64", "int32", "uint8", "complex64", "float16", "bfloat16", "bool"]
checks = 0


def same(got, wanted, *about):
    global checks
    checks += 1
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape or got.dtype != wanted.dtype or not (got == wanted).all():
        raise SystemExit(
            f"rank {RANK} of {SIZE}: {about}: got {got!r:.200}, wanted {wanted!r:.200}"
        )


def whole(got):
    """Return a result whose lists are joined, for one comparison."""
    return np.concatenate(got) if isinstance(got, list) else got


def registered(case, ops):
    """Check every collective of the registry that has arrays; those with an op with these ops."""
    for one in available():
        if not one.has_arrays or (one.kind is CollectiveKind.MESSAGE and case.size == 1):
            continue
        for op in (
            [op for op in ops if op in ops_of(one, case.dtype)] if one.takes("op") else ["sum"]
        ):
            turn = case._replace(op=op)
            got, wanted = one.bound(turn, one.contribution(turn))(), one.wanted(turn)
            if wanted is None:
                assert got is None
            else:
                same(whole(got), whole(wanted), one.name, op, case.dtype, case.shape)


def moving(count, dtype, root):
    def of(rank, length):
        return Case(RANK, SIZE, (length,), dtype).part(rank)

    parts = [of(rank, count) for rank in range(SIZE)]
    about = (dtype, count)
    if dtype != "bool":
        into = np.empty_like(parts[RANK])
        assert sv.all_reduce(parts[RANK], out=into) is into
        same(into, Case(RANK, SIZE, (count,), dtype).combined(), "all_reduce out", *about)
    uneven = [of(rank, (count + rank) % (count + 2)) for rank in range(SIZE)]
    same(sv.all_gather(uneven[RANK]), np.concatenate(uneven), "all_gather uneven", *about)
    got = sv.gather(uneven[RANK], root=root)
    if root == RANK:
        same(got, np.concatenate(uneven), "gather", *about)
    else:
        assert got is None
    same(sv.scatter(uneven if root == RANK else None, root=root), uneven[RANK], "scatter", *about)
    outgoing = [
        [of(s * SIZE + d, (count + s + 2 * d) % (count + 3)) for d in range(SIZE)]
        for s in range(SIZE)
    ]
    for source, got in enumerate(sv.all_to_all(outgoing[RANK])):
        same(got, outgoing[source][RANK], "all_to_all", source, *about)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    same(sv.sendrecv(parts[RANK], right, left), parts[left], "sendrecv", *about)
    if SIZE > 1:
        work = sv.send(parts[RANK], right, tag=count, async_op=True)
        same(sv.recv(left, tag=count), parts[left], "send and recv", *about)
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
            ops = [op for op in OPS if op in ops_of(COLLECTIVES["all_reduce"], dtype)]
            all_ops = not few or (
                count == SIZE + 1 and (number + SIZE) % 2 == 0
            )  # `--few`: of every other dtype, by size
            case = Case(RANK, SIZE, (count,), dtype, root=root)
            registered(case, ops if all_ops else [ops[(index + number) % len(ops)]])
            moving(count, dtype, root)
    odd()
    sv.barrier()
    if RANK == 0:
        print(f"checked {checks}", flush=True)


if __name__ == "__main__":
    main()
