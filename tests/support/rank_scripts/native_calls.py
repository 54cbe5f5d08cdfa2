"""Persistent calls of every op and dtype, with odd values, into every kind of result; says what came of them as one digest."""

import contextlib
import hashlib
import json
import sys

import ml_dtypes
import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.reduce_ops import reduction

DTYPES = [
    np.bool_,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
]
SIZES = {"few": [1, 17], "many": [0, 1, 2, 3, 15, 16, 17, 1000, 4096 + 5], "long": [70_001]}
ODD = [np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-310, 1e308, 65504.0, 3.0]


def ops(dtype):
    """Return the ops that have a meaning for a dtype."""
    found = []
    for op in ("sum", "prod", "min", "max", "and", "or", "xor", "mean"):
        with contextlib.suppress(sv.ConfigError):
            found.append(reduction(op, np.dtype(dtype)).name)
    return found


def values(draw, dtype, shape, *, are_ordinary=False):
    """Return random bits, and for floating point odd values among them; or ordinary numbers, whose products and sums are rounded.

    Two ranks bring NaN of all kinds, where their arrays are not longer than a block of 8 KiB. Else there is one kind: which of two NumPy's loops
    keep depends on whether they are in the last, odd elements and on whether the result lies where an operand does. The two runners cut long arrays
    into other pieces, and keep what some of several ranks have brought in other places.
    """
    if are_ordinary and np.dtype(dtype).kind in "fVc":
        made = draw.normal(size=shape)
        return (
            made + 1j * draw.normal(size=shape) if np.dtype(dtype).kind == "c" else made
        ).astype(dtype)
    made = (
        np.frombuffer(draw.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
        .reshape(shape)
        .copy()
    )
    if dtype is np.bool_:
        return (made.view(np.uint8) & 1).astype(bool)
    with np.errstate(all="ignore"):
        if made.dtype.kind in "fVc" and made.size:
            places = draw.integers(0, made.size, 1 + made.size // 3)
            made.reshape(-1)[places] = draw.choice(ODD, places.size).astype(made.real.dtype)
            if made.nbytes > 8192 or sv.world_size() > 2:
                for part in (made.real, made.imag) if made.dtype.kind == "c" else (made,):
                    part[np.isnan(part)] = -np.nan  # as the processor makes it
    return made


def main():
    digest, calls, native = hashlib.sha256(), 0, 0
    size, rank = sv.world_size(), sv.rank()
    draw = np.random.default_rng([int(sys.argv[1]), sv.rank()])

    def take(result):
        nonlocal calls, native
        calls += 1
        if calls % 100 == 0:  # the table is emptied when it is full
            native = max(
                native,
                sum(
                    type(one).__name__ == "NativeCall"
                    for one in current().world.persistent_calls.values()
                ),
            )
        digest.update(np.ascontiguousarray(result).tobytes())

    for dtype in DTYPES:
        for count in SIZES[sys.argv[2]]:
            shape = (count,) if count % 2 else (2, count // 2)
            for op in ops(dtype):
                for turn in range(
                    10 if count == 1 else 3
                ):  # the long way, which prepares; then prepared
                    x = values(draw, dtype, shape, are_ordinary=turn > 1)
                    take(sv.all_reduce(x, op))
                x = values(draw, dtype, shape)
                take(sv.all_reduce(x, op=op, timeout=30.0))
                made = sv.all_reduce(x, op)
                out = np.zeros_like(made)
                assert sv.all_reduce(x, op, out=out) is out
                take(out)
                wide = np.zeros((*made.shape, 2), made.dtype)[..., 0]  # not in one piece
                sv.all_reduce(x, op, out=wide)
                take(wide)
                take(sv.all_reduce(np.asfortranarray(x), op))
                started = [
                    sv.all_reduce(x, op, async_op=True),
                    sv.all_reduce(x, op=op, out=np.empty_like(made), async_op=True, timeout=30.0),
                ]
                x[...] = 0  # it was taken
                for work in started[:: rank % 2 * 2 - 1]:
                    work.wait()
                for work in started:
                    take(work.wait())
                if made.dtype == x.dtype:
                    same = x.copy()
                    sv.all_reduce(same, op, out=same)
                    take(same)
                    longer = np.concatenate([x.reshape(-1), x.reshape(-1)[:1]])
                    if count > 1 and len(shape) == 1:
                        sv.all_reduce(longer[:-1], op, out=longer[1:])  # overlaps what is brought
                        take(longer[1:])
    for dtype in DTYPES:
        for rows in SIZES[sys.argv[2]]:
            x = values(draw, dtype, (rows, 2))
            for root in range(size):
                for _ in range(3):
                    take(sv.broadcast(x, root=root))
                same = x.copy()
                take(sv.broadcast(same, root=root, out=same))
                twice = np.concatenate([x, x])
                take(sv.broadcast(twice[:rows], root=root, out=twice[rows // 2 : rows // 2 + rows]))
            for _ in range(3):
                take(sv.all_gather(x))
            out = np.empty((size * rows, 2), dtype)
            take(sv.all_gather(x, out=out))
            out[:rows] = x
            take(sv.all_gather(out[:rows], out=out))
            own = x[: rows - (rank == 0 and rows > 0)]  # of other lengths on other ranks
            for _ in range(2):
                take(sv.all_gather(own))
                take(sv.all_gather(x))
            y = values(draw, dtype, (rows * size, 3))
            for op in ops(dtype):
                for _ in range(3):
                    part = sv.reduce_scatter(y, op)
                    take(sv.all_gather(part))
                out = np.zeros_like(part)
                sv.reduce_scatter(y, op, out=out)
                take(sv.all_gather(out))
                if part.dtype == y.dtype:
                    z = y.copy()
                    sv.reduce_scatter(
                        z, op, out=z[rows // 2 : rows // 2 + rows]
                    )  # overlaps what is brought
                    take(sv.all_gather(z[rows // 2 : rows // 2 + rows].copy()))
    for number in (
        1.5,
        3,
        True,
        -0.0,
        2**62,
        2**70 + 0.0,
        np.float32(0.1),
        [1.0, 2.0, 3.0],
        (1, 2),
        [True, False],
        [0.5, 1],
        [[1.0], [2.0]],
        np.array([1.0]),
    ):
        for _ in range(3):
            for op in ("min", "max"):
                made = sv.all_reduce(number, op)
                take(made[0] if isinstance(made, list) else made)
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        plain = sv.Variable(np.zeros(100), aggregation=sv.VariableAggregation.MEAN)
        inside = sv.Variable(np.zeros(100), aggregation=sv.VariableAggregation.SUM)

    def write(step):
        inside.assign_add(np.full(100, 0.1 * step + sv.rank()))

    for step in range(6):
        plain.assign_add(np.full(100, 0.1 * step))
        plain.assign_sub(np.full(100, 0.3))
        strategy.run(write, args=(step,))
        take(plain.numpy())
        take(inside.numpy())
        assert sv.barrier() is None
        assert sv.barrier(timeout=30.0) is None
    sys.stdout.write(
        json.dumps({"digest": digest.hexdigest(), "calls": calls, "native": native}) + "\n"
    )


if __name__ == "__main__":
    main()
