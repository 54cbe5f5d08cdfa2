"""Every collective through shared memory, by ranks that are threads: the same values as over links, the same bytes everywhere.

Inputs are small whole numbers, so that results are exact in every order and are compared by their bytes. Segments are
made short, so that vectors of several segments cost little.
"""

import itertools
import sys
import time

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar._native import run as native_run
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import program_runner
from syncvar.runtime.shm_reduce import is_direct
from syncvar.testing import run_ranks

SOON = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
SIZES = [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 5))]
FOLD = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
REALS = [
    np.dtype(one)
    for one in (
        "f8",
        "f4",
        "f2",
        ml_dtypes.bfloat16,
        "i8",
        "i4",
        "i2",
        "i1",
        "u8",
        "u4",
        "u2",
        "u1",
    )
]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
SEGMENT_BYTES = 96 << 10
FURTHER = [(2, "f8"), (2, "f2"), (3, "f4"), (4, "f4")]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments are short."""
    for name, module in list(sys.modules.items()):
        if name.startswith("syncvar.") and hasattr(module, "SEGMENT_BYTES"):
            monkeypatch.setattr(module, "SEGMENT_BYTES", SEGMENT_BYTES)


def results(size, fn, *, shared=True, **more):
    """Run ranks of which none may fail."""
    out = run_ranks(size, fn, shared=shared, config=SOON, timeout_s=60, **more)
    for one in out:
        if isinstance(one, BaseException):
            raise one
    return out


def part(rank, count, dtype, seed=0):
    """Whole numbers from 0 to 3: sums and products of five are exact in every dtype."""
    return ((np.arange(count) * 7 + rank * 5 + seed) % 4).astype(dtype)


def reduced(parts, op):
    """Combine exactly; half types are divided in float32 and rounded once."""
    dtype = parts[0].dtype
    wide = (
        dtype if dtype.kind in "bc" else {"i": np.int64, "u": np.uint64}.get(dtype.kind, np.float64)
    )
    total = FOLD[op].reduce([one.astype(wide) for one in parts])
    if op != "mean":
        return total.astype(dtype)
    kind = (
        np.dtype(np.float64)
        if dtype.kind in "iu"
        else np.dtype(np.float32)
        if dtype.itemsize == 2
        else dtype
    )
    return (total.astype(kind) / kind.type(len(parts))).astype(
        np.float64 if dtype.kind in "iu" else dtype
    )


def same(got, wanted, what=""):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    assert got.tobytes() == wanted.tobytes(), (
        f"{what}: {np.flatnonzero(got.reshape(-1) != wanted.reshape(-1))[:5]}"
    )


def counts_around_the_limits(size, itemsize):
    """Return the counts at which another way is taken: everybody sums, segments, a second and a third segment."""
    small = max(count for count in range(70_000 // itemsize) if is_direct(count * itemsize, size))
    segment = SEGMENT_BYTES // itemsize
    around = {
        small - 1,
        small,
        small + 1,
        segment - 1,
        segment,
        segment + 1,
        2 * segment,
        2 * segment + 1,
    }
    return sorted(around | {0, 1, max(0, size - 1), size, size + 1})


# -- all-reduce ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_op_of_every_dtype(size):
    counts = [0, 1, size - 1, size + 1, 6_007] if size == 2 else [size + 1]
    dtypes = (
        [*REALS, *COMPLEX, np.dtype(bool)]
        if size in (2, 3)
        else [np.dtype(one) for one in ("f2", "f4", "i8", "c8", "?")]
    )

    def fn():
        assert current().transport.startswith("shared memory") == (size > 1)
        for dtype, op, count in itertools.product(dtypes, FOLD, counts):
            if (
                op not in ("min", "max")
                if dtype.kind == "b"
                else dtype.kind == "c" and op in ("min", "max")
            ):
                with pytest.raises(sv.ConfigError):
                    sv.all_reduce(part(0, count, dtype), op)
                continue
            parts = [part(rank, count, dtype) for rank in range(size)]
            mine = parts[sv.rank()].copy()
            for reproducible in (False, True, False):  # the last time by the short way
                what = f"{op} {dtype} {count} reproducible={reproducible}"
                same(sv.all_reduce(mine, op, reproducible=reproducible), reduced(parts, op), what)
            same(mine, parts[sv.rank()], "the input")

    results(size, fn)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, "f4"),
        (2, "u1"),
        (3, "f2"),
        (5, "f8"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in FURTHER),
    ],
)
def test_sizes_around_the_limits(size, dtype):
    dtype = np.dtype(dtype)
    counts = counts_around_the_limits(size, max(4 if dtype == "f2" else 1, dtype.itemsize))

    def fn():
        rank = sv.rank()
        for turn, count in enumerate([*counts, *reversed(counts)]):
            parts = [part(one, count, dtype, turn) for one in range(size)]
            wanted = reduced(parts, "max" if dtype == "u1" else "sum")
            same(sv.all_reduce(parts[rank], "max" if dtype == "u1" else "sum"), wanted, f"{count}")

    results(size, fn)


WAYS = {
    "returned": lambda x, op: sv.all_reduce(x, op),
    "started": lambda x, op: sv.all_reduce(x, op, async_op=True).wait(),
    "with a timeout": lambda x, op: sv.all_reduce(x, op, timeout=10.0),
    "out": lambda x, op: sv.all_reduce(x, op, out=np.full_like(x, 9)),
    "out is x": lambda x, op: sv.all_reduce(y := x.copy(), op, out=y),
    "out is x, resident": lambda x, op: sv.all_reduce(y := resident(x), op, out=y),
    "resident": lambda x, op: sv.all_reduce(resident(x), op),
    "resident to resident": lambda x, op: sv.all_reduce(
        resident(x), op, out=resident(np.zeros_like(x))
    ),
    "x is a view": lambda x, op: sv.all_reduce(np.repeat(x, 2)[::2], op),
    "out is a view": lambda x, op: sv.all_reduce(x, op, out=np.zeros(2 * x.size, x.dtype)[::2]),
    "reversed": lambda x, op: sv.all_reduce(x[::-1], op)[::-1],
    "other bytes": lambda x, op: sv.all_reduce(x.astype(x.dtype.newbyteorder()), op),
    "2-d": lambda x, op: sv.all_reduce(x.reshape(1, -1), op)[0],
    "fortran": lambda x, op: sv.all_reduce(np.asfortranarray(np.stack([x, x])), op)[1],
    "structure": lambda x, op: sv.all_reduce({"a": x, "b": [np.float32(1), (x,)]}, op)["b"][1][0],
    "out beyond x": lambda x, op: sv.all_reduce(
        (y := np.concatenate([x, x]))[: x.size], op, out=y[x.size :]
    ),
    "out overlaps x": lambda x, op: overlapping(x, op, 1),
    "out overlaps x from below": lambda x, op: overlapping(x, op, -1),
}


def resident(x):
    shm = current().shm
    if shm is None:
        return x.copy()
    made = shm.empty(x.shape, x.dtype)
    made[...] = x
    return made


def overlapping(x, op, shift):
    buffer = np.zeros(x.size + 1, x.dtype)
    source, out = (buffer[:-1], buffer[1:]) if shift > 0 else (buffer[1:], buffer[:-1])
    source[...] = x
    return sv.all_reduce(source, op, out=out)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_at_every_size(way):
    def fn(counts):
        rank, size = sv.rank(), sv.world_size()
        for turn, (kind, count) in enumerate(
            itertools.product(("f4 sum", "f2 mean", "i8 max"), counts)
        ):
            dtype, op = kind.split()
            for seed in (turn, turn + 1):
                parts = [part(one, count, dtype, seed) for one in range(size)]
                mine = parts[rank].copy()
                same(WAYS[way](mine, op), reduced(parts, op), f"{kind} {count}")
                same(mine, parts[rank], "the input")

    results(2, lambda: fn((0, 1, 3, 5_000, 70_001)))
    results(3, lambda: fn((3, 5_000)))


def test_ranks_may_take_different_ways_in_one_call():
    names = list(WAYS)

    def fn():
        rank, size = sv.rank(), sv.world_size()
        for turn, count in itertools.product(range(len(names)), [3, 10_000, 30_001]):
            parts = [part(one, count, "f4", turn) for one in range(size)]
            way = names[(turn * (rank + 1) + rank) % len(names)]
            if way in (
                "2-d",
                "fortran",
                "structure",
                "reversed",
            ):  # these are other calls, or other elements
                way = "out is x, resident"
            same(WAYS[way](parts[rank], "sum"), reduced(parts, "sum"), f"{way} {count}")

    for size in (2, 3):
        results(size, fn)


@pytest.mark.parametrize("size", SIZES)
def test_0_d_and_numbers_and_empty_shapes(size):
    def fn():
        rank = sv.rank()
        for make in (
            np.array,
            np.float32,
            int,
            float,
            np.complex64,
            lambda _: np.zeros((0, 3)),
            lambda _: np.zeros((2, 0, 4), "i2"),
        ):
            for turn in range(3):
                x = make(rank + turn)
                array = np.asarray(x)
                wanted = (
                    array
                    if array.size == 0
                    else np.asarray(array.dtype.type(size * (size - 1) / 2 + turn * size))
                )
                same(sv.all_reduce(x), wanted, repr(x))
        out = np.empty(())
        assert sv.all_reduce(np.array(1.0), out=out) is out
        same(out, np.array(float(size)))

    results(size, fn)


@pytest.mark.parametrize("size", SIZES)
def test_reproducible_sums_are_those_of_the_links_to_the_bit(size):
    counts = [1, 7, 2_000, 6_007, 30_001]

    def fn():
        rank = sv.rank()
        draw = np.random.default_rng(rank)
        seen = []
        for count, dtype in itertools.product(counts, ["f4", "f8", "f2", ml_dtypes.bfloat16, "c8"]):
            x = (draw.standard_normal(count) * 10.0 ** draw.integers(-2, 3, count)).astype(dtype)
            for op in ("sum", "mean") if dtype == "f4" else ("sum",):
                seen.append(sv.all_reduce(x, op, reproducible=True).tobytes())
            seen.append(sv.all_reduce(x, reproducible=True).tobytes())
        return seen

    def plain():
        draw = np.random.default_rng(sv.rank())
        return [
            sv.all_reduce(draw.standard_normal(count).astype("f4")).tobytes()
            for count in (1, 5, 5000, 30_001)
            for _ in range(2)
        ]

    with np.errstate(over="ignore"):
        shared, links = results(size, fn), results(size, fn, shared=False)
    assert all(one == links[0] for one in [*shared, *links])
    equal = results(size, plain)
    assert all(one == equal[0] for one in equal)


@pytest.mark.parametrize("size", SIZES)
def test_nan_payloads_and_zeros_of_both_signs_are_the_same_bytes_everywhere(size):
    def fn():
        rank = sv.rank()
        seen = []
        for count, kind in itertools.product([1, 9, 3000, 30_001], ["u4", "u8"]):
            floats = np.dtype(kind.replace("u", "f"))
            quiet = 0x7FC00000 if kind == "u4" else 0x7FF8000000000000
            draw = np.random.default_rng([rank, count])
            bits = np.full(count, quiet, kind) | draw.integers(1, 1000, count).astype(kind)
            x = np.where(
                draw.random(count) < 0.5, bits.view(floats), draw.choice([0.0, -0.0], count)
            ).astype(floats)
            with np.errstate(invalid="ignore"):
                for op in FOLD:
                    for reproducible in (False, True, False) if count == 9 else (False,):
                        seen.append(sv.all_reduce(x, op, reproducible=reproducible).tobytes())
        return seen

    out = results(size, fn)
    assert all(one == out[0] for one in out)


# -- the others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size):
    def fn():
        rank = sv.rank()
        for count, dtype in itertools.product(
            [0, 1, size - 1, size + 1, 10_007, 60_001], ["f4", ml_dtypes.bfloat16]
        ):
            parts = [part(one, count, dtype) for one in range(size)]
            same(sv.all_gather(parts[rank]), np.concatenate(parts))
            lengths = [(one * 37 + count) % (count + 1) for one in range(size)]
            parts = [part(one, length, dtype) for one, length in enumerate(lengths)]
            same(sv.all_gather(parts[rank]), np.concatenate(parts), f"{lengths}")
            same(
                sv.all_gather(parts[rank], async_op=True).wait(),
                np.concatenate(parts),
                f"{lengths}",
            )
        for axis in (0, 1, -1):
            shapes = [
                (2, one, 3) if axis == 1 else (one, 2, 3) if axis == 0 else (2, 3, one)
                for one in range(size)
            ]
            blocks = [np.full(shape, one, np.float64) for one, shape in enumerate(shapes)]
            same(sv.all_gather(blocks[rank], axis=axis), np.concatenate(blocks, axis=axis))
        same(sv.all_gather(float(rank)), np.arange(size, dtype=np.float64))

    results(size, fn)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(size):
    def fn():
        rank = sv.rank()
        for root, count, dtype in itertools.product(
            range(size), [0, 1, size, 8_193, 30_001], ["f4", "?"]
        ):
            wanted = part(root, count, dtype, 1)
            same(sv.broadcast(part(rank, count, dtype, 1), root=root), wanted)
            same(
                sv.broadcast(wanted if rank == root else None, root=root, async_op=True).wait(),
                wanted,
            )
            out = np.empty_like(wanted)
            assert sv.broadcast(wanted if rank == root else None, root=root, out=out) is out
            same(out, wanted)
        got = sv.broadcast(
            {"x": np.full(3, rank), "y": [rank, 2.5], "z": part(rank, 40_000, "f4")}, root=size - 1
        )
        same(got["x"], np.full(3, size - 1))
        same(got["y"], np.array([size - 1, 2.5]))
        same(got["z"], part(size - 1, 40_000, "f4"))

    results(size, fn)


@pytest.mark.parametrize("size", SIZES)
def test_objects_and_barriers(size):
    def fn():
        rank = sv.rank()
        for length in (0, 100, 40_000, 400_000):
            sv.barrier()
            mine = {
                "rank": rank,
                "bytes": b"\x01" * (length * (rank + 1) // size),
                "list": [1, None, True, 2.5],
            }
            everyone = sv.all_gather_object(mine)
            assert [one["rank"] for one in everyone] == list(range(size))
            assert [len(one["bytes"]) for one in everyone] == [
                length * (one + 1) // size for one in range(size)
            ]
            assert (
                sv.broadcast_object(mine if rank == size - 1 else None, root=size - 1)["bytes"]
                == b"\x01" * length
            )
            gathered = sv.gather_object((rank, mine["bytes"]), root=size - 1)
            assert (
                gathered is None
                if rank != size - 1
                else [one[0] for one in gathered] == list(range(size))
            )
            assert (
                sv.scatter_object([b"\x02" * one for one in range(size)] if rank == 0 else None)
                == b"\x02" * rank
            )
        sv.barrier(timeout=60.0)

    results(size, fn)


@pytest.mark.parametrize("size", SIZES)
def test_structures(size):
    leaves = [1, 0, 5, 5_000, 30_001, 3, 14_000]

    def fn():
        rank = sv.rank()
        tree = {
            "a": [part(rank, count, "f8") for count in leaves],
            "b": (np.float32(rank), {"c": part(rank, 9_000, "f2")}),
        }
        for op in ("sum", "mean", "max"):
            total = sv.all_reduce(tree, op)
            for count, one in zip(leaves, total["a"], strict=True):
                same(
                    one,
                    reduced([part(other, count, "f8") for other in range(size)], op),
                    f"{op} {count}",
                )
            same(
                total["b"][1]["c"], reduced([part(other, 9_000, "f2") for other in range(size)], op)
            )
        out = {
            "a": [np.empty(count) for count in leaves],
            "b": (np.empty((), "f4"), {"c": np.empty(9_000, "f2")}),
        }
        total = sv.all_reduce(tree, out=out)
        assert total["a"][4] is out["a"][4]
        same(out["a"][4], reduced([part(other, 30_001, "f8") for other in range(size)], "sum"))

    results(size, fn)


def test_calls_of_all_kinds_and_sizes_one_after_another():
    """What a call leaves in slots and segments is not seen by the next one, whatever it is."""
    kinds = {
        "small": lambda rank, turn: sv.all_reduce(part(rank, 50, "f4", turn)),
        "long": lambda rank, turn: sv.all_reduce(part(rank, 20_000 + turn, "f4", turn)),
        "several segments": lambda rank, turn: sv.all_reduce(part(rank, 28_000 + turn, "f4", turn)),
        "half": lambda rank, turn: sv.all_reduce(part(rank, 50_000, "f2", turn)),
        "in place": lambda rank, turn: sv.all_reduce(
            x := resident(part(rank, 70_000, "f4", turn)), out=x
        ),
        "gather": lambda rank, turn: sv.all_gather(
            part(rank, 30_000 * (rank + turn % 2), "f4", turn)
        ),
        "large gather": lambda rank, turn: sv.all_gather(part(rank, 60_000, "f4", turn)),
        "broadcast": lambda rank, turn: sv.broadcast(part(rank, 60_000, "f4", turn), root=turn % 2),
        "small broadcast": lambda rank, turn: sv.broadcast(
            part(rank, 30, "f4", turn), root=turn % 2
        ),
        "structure": lambda rank, turn: sv.all_reduce(
            [part(rank, n, "f4", turn) for n in (5, 20_000, 6, 60_000)]
        )[3],
        "started": lambda rank, turn: sv.all_reduce(
            part(rank, 60_000, "f4", turn), async_op=True
        ).wait(),
        "object": lambda rank, turn: np.array(sv.all_gather_object([turn] * (rank * 2_000))[1]),
    }

    def fn():
        order = np.random.default_rng(1).choice(list(kinds), 70)
        return [kinds[name](sv.rank(), turn).tobytes() for turn, name in enumerate(order)]

    for size in (2, 3):
        shared, links = results(size, fn), results(size, fn, shared=False)
        for one in (*shared, *links):
            assert [a == b for a, b in zip(one, links[0], strict=True)] == [True] * 70


def test_what_follows_in_a_call_waits_for_slow_readers(monkeypatch):
    """A structure of several dtypes is reduced dtype by dtype: what is put for the second must not cover up what some still read of the first."""
    copier = program_runner.copier

    def slow(*, hold=False):
        if sv.rank() == 1:
            time.sleep(0.002)
        return copier(hold=hold)

    monkeypatch.setattr(program_runner, "copier", slow)
    monkeypatch.setattr(
        program_runner, "run", lambda *given, **how: (slow(), native_run(*given, **how))[1]
    )

    def fn():
        for turn in range(20):
            parts = [
                {
                    "a": part(rank, 20_000, np.dtype("f2"), turn),
                    "b": part(rank, 60_000, np.dtype("f4"), turn),
                }
                for rank in range(2)
            ]
            sv.all_reduce(parts[sv.rank()]["b"], "max")  # the sides of the cells are used in turn
            made = sv.all_reduce(parts[sv.rank()], "max")
            for key in made:
                same(made[key], reduced([one[key] for one in parts], "max"), f"{turn} {key}")

    results(2, fn)
