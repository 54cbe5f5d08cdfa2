"""What collectives take and give besides plain arrays: kinds of input, views, structures, objects; other settings.

That each collective gives what it must at every count is test_every_collective.py's claim.

Inputs are exactly representable, so that results are compared with `==`. The reference is what every rank can compute
by itself, because the contribution of each rank is a function of its number.
"""

import json

import pytest

SLOW = pytest.mark.slow  # test_every_collective.py has other numbers of ranks

CHECKS = r"""
import itertools, json, sys
import numpy as np
import probe, syncvar as sv

rank, n = sv.rank(), sv.world_size()
failed, done = [], 0


def check(name, got, wanted):
    global done
    done += 1
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape or got.dtype != wanted.dtype or got.tobytes() != wanted.tobytes():
        failed.append(f"{name}: {got.dtype}{got.shape} {got.reshape(-1)[:5]} instead of {wanted.dtype}{wanted.shape} {wanted.reshape(-1)[:5]}")


def part(who, count, dtype, seed=0):
    # Small whole numbers: sums and products are exact in every order.
    draw = np.random.default_rng([who, count, seed])
    if dtype == np.bool_:
        return draw.integers(0, 2, count).astype(dtype)
    low = 0 if np.dtype(dtype).kind == "u" else -3
    return draw.integers(low, 4, count).astype(dtype)


FOLD = {"sum": np.add, "max": np.maximum}
COUNTS = sorted({0, 1, n - 1, n, n + 1, 10_007})

for op in ("sum", "mean", "prod"):
    try:
        sv.all_reduce(part(rank, 1, np.bool_), op)
        failed.append(f"{op} of bool was accepted")
    except sv.ConfigError:
        pass

# Shapes and kinds of input.
for x in (np.float32(rank), rank, float(rank), True, np.array(rank), np.zeros((0, 3)), [[1, rank], [2, 3]],
          np.arange(24.0).reshape(2, 3, 4), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(20.0)[::2],
          np.arange(4, dtype=">f8"), memoryview(bytearray(8))):
    op = "max" if x is True else "sum"
    array = np.asarray(x)
    parts = [np.asarray(y).astype(array.dtype.newbyteorder("=")) for y in sv.all_gather_object(array.tolist())]
    wanted = parts[0].reshape(array.shape)
    for one in parts[1:]:
        wanted = np.asarray(FOLD[op](wanted, one.reshape(array.shape)))
    check(f"all_reduce of {type(x).__name__} {array.shape}", sv.all_reduce(x, op), wanted)

# In place, and a view as the target.
x = np.arange(100.0) + rank
sv.all_reduce(x, out=x)
check("in place", x, n * np.arange(100.0) + n * (n - 1) / 2)
grid = np.zeros((10, 10))
sv.all_reduce(np.ones((10, 5)) * rank, out=grid[:, ::2])
check("a view", grid[:, ::2], np.full((10, 5), n * (n - 1) / 2))
check("beside a view", grid[:, 1::2], np.zeros((10, 5)))

# Reproducible: the tree over all contributions, to the bit, also where sums are not exact.
for count in COUNTS:
    for dtype in (np.float32, np.float64):
        parts = [np.random.default_rng([who, count]).standard_normal(count).astype(dtype) * 10.0 ** (who - 1) for who in range(n)]
        parts = [one.astype(dtype) for one in parts]
        wanted = sv.tree_sum(parts)
        check(f"reproducible {dtype} {count}", sv.all_reduce(parts[rank], reproducible=True), wanted)
        ordinary = sv.all_reduce(parts[rank])
        assert len(set(sv.all_gather_object(ordinary.tobytes().hex()))) == 1, "other bytes on other ranks"

# Structures.
tree = {"b": [np.arange(3.0) * rank, (np.asarray(rank), np.float32(2))], "a": {"c": np.ones((2, 2), np.int32)}}
total = sv.all_reduce(tree)
check("structure b0", total["b"][0], np.arange(3.0) * (n * (n - 1) / 2))
check("structure b1", total["b"][1][0], np.asarray(n * (n - 1) // 2))
check("structure b2", total["b"][1][1], np.asarray(2 * n, np.float32))
check("structure a", total["a"]["c"], np.full((2, 2), n, np.int32))
assert list(total) == ["a", "b"] or set(total) == {"a", "b"}
assert isinstance(total["b"][1], tuple)

# Broadcast.
out = np.zeros((3, 4), np.float32)
check("broadcast out", sv.broadcast(np.full((3, 4), rank, np.float32), root=n - 1, out=out), np.full((3, 4), n - 1, np.float32))
got = sv.broadcast({"x": np.full(3, rank), "y": [rank, 2.5]}, root=n - 1)
check("broadcast structure", got["x"], np.full(3, n - 1))
check("broadcast structure: numbers are one array", got["y"], np.array([n - 1, 2.5]))
check("broadcast async", sv.broadcast(np.full(7, rank), root=0, async_op=True).wait(), np.zeros(7, np.int64))

# All-gather along each axis.
for axis in (0, 1, -1):
    blocks = [np.full((2, who, 3) if axis == 1 else (who, 2, 3) if axis == 0 else (2, 3, who), who, np.float64) for who in range(n)]
    check(f"all_gather axis {axis}", sv.all_gather(blocks[rank], axis=axis), np.concatenate(blocks, axis=axis))
check("all_gather of numbers", sv.all_gather(float(rank)), np.arange(n, dtype=np.float64))

# Objects.
mine = {"rank": rank, "list": [1, None, True, 2.5, "\u00e4"], "bytes": b"\x00" * rank, "tuple": [rank] * rank}
everything = sv.all_gather_object(mine)
assert [one["rank"] for one in everything] == list(range(n))
assert everything[-1]["bytes"] == b"\x00" * (n - 1)
assert sv.broadcast_object(mine if rank == n - 1 else None, root=n - 1)["rank"] == n - 1
gathered = sv.gather_object(rank * 10, root=n - 1)
assert gathered == ([who * 10 for who in range(n)] if rank == n - 1 else None)
assert sv.scatter_object([f"for {who}" for who in range(n)] if rank == 0 else None) == f"for {rank}"

# Groups: every subset of the ranks, in the order given; groups within groups; one rank twice is refused.
for size in range(1, n + 1):
    for members in itertools.combinations(range(n), size):
        group = sv.new_group(members)
        if rank in members:
            check(f"group {members}", sv.all_reduce(np.full(11, 10.0 ** rank), group=group), np.full(11, sum(10.0 ** who for who in members)))
            check(f"order of group {members}", sv.all_gather(rank, group=group), np.array(members))
            check(f"root of group {members}", sv.broadcast(rank, root=len(members) - 1, group=group), np.asarray(members[-1]))
        elif size > 1:
            try:
                sv.all_reduce(1, group=group)
                failed.append(f"rank {rank} took part in group {members}")
            except sv.SyncvarError:
                pass
backward = sv.new_group(range(n - 1, -1, -1))
check("backward", sv.all_gather(rank, group=backward), np.arange(n - 1, -1, -1))

# Started work of several groups, waited for in another order on each rank.
first, second = sv.new_group(range(n)), sv.new_group(range(n))
works = [sv.all_reduce(np.full(1000 * k, k + rank), group=group, async_op=True) for k in range(4) for group in (first, second)]
for index in sorted(range(8), key=lambda k: (k * (rank + 1)) % 7):
    k = index // 2
    check(f"started {index}", works[index].wait(), np.full(1000 * k, n * k + n * (n - 1) // 2))
    assert works[index].done() and works[index].exception() is None

# The value is taken when the call is made.
x = np.full(50_000, 1.0)
work = sv.all_reduce(x, async_op=True)
x[:] = 99
check("taken at the call", work.wait(), np.full(50_000, float(n)))

# More than one segment, and more than the window holds.
big = np.arange(3_000_001, dtype=np.float32) % 1000
check("big", sv.all_reduce(big), big * np.float32(n))
check("big gather", sv.all_gather(big[: 100_000 * (rank + 1)]), np.concatenate([big[: 100_000 * (who + 1)] for who in range(n)]))

sv.barrier()
probe.note("checks", done=done, failed=failed[:20])
"""


@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)],
)
def test_what_collectives_take_and_give(launch, workers):
    job = launch(CHECKS, workers=workers)
    assert job.wait(120) == 0, str(job)
    checks = job.events("checks")
    assert {event["rank"] for event in checks} == set(range(workers)), str(job)
    assert not [words for event in checks for words in event["failed"]], json.dumps(
        checks, indent=1
    )


TRANSPORT = """
import numpy as np
import syncvar as sv
for count in (1, 1000, 300_000):
    assert (sv.all_reduce(np.full(count, sv.rank() + 1.0)) == 6).all()
"""


@pytest.mark.parametrize(
    "env",
    [
        {"SYNCVAR_TRANSPORT": "zmq"},
        {"SYNCVAR_SEGMENT_BYTES": "1024"},
        {"SYNCVAR_SEGMENT_BYTES": "65536", "SYNCVAR_WINDOW_BYTES": "65536"},
        {"SYNCVAR_SEGMENT_BYTES": "65536", "SYNCVAR_WINDOW_BYTES": "4096"},
    ],
    ids=["zmq", "small segments", "small window", "window below a segment"],
)
def test_other_settings(launch, env):
    job = launch(TRANSPORT, workers=3, env=env)
    assert job.wait() == 0, str(job)


MEAN = """
import numpy as np
import probe, syncvar as sv
n, rank = sv.world_size(), sv.rank()
for call in range(100):
    x = np.full(200_000, 1.0 + rank)
    got = sv.all_reduce(x, "mean")
    assert (got == 1.5).all(), (call, got[got != 1.5][:3], int((got != 1.5).sum()))
"""


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=SLOW), "zmq"])
def test_a_mean_does_not_divide_memory_that_is_still_being_sent(launch, transport):
    job = launch(MEAN, workers=2, env={"SYNCVAR_TRANSPORT": transport})
    assert job.wait() == 0, str(job)
