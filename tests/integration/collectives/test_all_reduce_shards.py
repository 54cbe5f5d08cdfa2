"""All-reduce of shards: the bits depend on the shards alone, whoever brings them and however they travel."""

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncvar as sv
from syncvar.testing import run_ranks

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PATHS = {"links": {}, "shm": {"shared": True}, "hosts": {"shared": True, "hosts": 2}}
CUTS = ("in order", "in turn", "one has all", "at random")


def shard(number, dtype, shape=(1003,)):
    """Return a shard whose sum depends on the order of additions."""
    draw = np.random.default_rng(number)
    if np.dtype(dtype).kind in "iu":
        return draw.integers(0, 100, shape).astype(dtype)
    values = draw.normal(size=shape) * 10.0 ** draw.integers(-3, 4, shape)
    return np.asarray(values).astype(dtype)


def tree(parts, lo, hi):
    """Add by the definition of the tree."""
    if hi == lo + 1:
        return parts[lo]
    mid = lo + max(1 << power for power in range((hi - lo).bit_length()) if 1 << power < hi - lo)
    return tree(parts, lo, mid) + tree(parts, mid, hi)


def wanted(parts, op="sum"):
    """Add with the dtype in which the library promises to, and round once."""
    dtype = parts[0].dtype
    accumulate = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    accumulate = np.dtype(np.float64) if op == "mean" and dtype.kind in "iu" else accumulate
    total = np.asarray(tree([part.astype(accumulate) for part in parts], 0, len(parts)))
    if op == "mean":
        return (total / accumulate.type(len(parts))).astype(
            accumulate if dtype.kind in "iu" else dtype
        )
    return total.astype(dtype)


def owners(cut, size, count):
    draw = random.Random(count * 31 + size)
    ways = {
        "in order": lambda number: number * size // count,
        "in turn": lambda number: number % size,
        "one has all": lambda _: size - 1,
        "at random": lambda _: draw.randrange(size),
    }
    return [ways[cut](number) for number in range(count)]


def everywhere(size, fn, **path):
    results = run_ranks(size, fn, timeout_s=120, **path)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def mine(of, make):
    return {number: make(number) for number, rank in enumerate(of) if rank == sv.rank()}


@pytest.mark.parametrize(
    ("size", "path"), [(1, "links"), *((size, path) for size in (2, 3, 5, 8) for path in PATHS)]
)
def test_24_shards_have_the_same_bits_however_they_are_cut(size, path):
    dtypes = [np.dtype("float32"), np.dtype("float64"), BFLOAT16]
    of = {cut: owners(cut, size, 24) for cut in CUTS}

    def program():
        return [
            sv.all_reduce_shards(
                mine(of[cut], lambda number, d=dtype, n=count: shard(number, d, (n,)))
            ).tobytes()
            for dtype in dtypes
            for cut in CUTS
            for count in (3, 2003)
        ]

    expected = [
        wanted([shard(number, dtype, (count,)) for number in range(24)]).tobytes()
        for dtype in dtypes
        for _ in CUTS
        for count in (3, 2003)
    ]
    for got in everywhere(size, program, **PATHS[path]):
        assert got == expected


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_cut_of_any_number_of_shards(data):
    size = data.draw(st.integers(1, 4), label="ranks")
    path = PATHS[data.draw(st.sampled_from(["links", "shm"]), label="path")] if size > 1 else {}
    calls = []
    for _ in range(4):
        count = data.draw(st.integers(1, 20), label="shards")
        of = data.draw(
            st.lists(st.integers(0, size - 1), min_size=count, max_size=count), label="owners"
        )
        dtype = np.dtype(
            data.draw(
                st.sampled_from(["float32", "float64", "float16", BFLOAT16, "int16", "complex64"]),
                label="dtype",
            )
        )
        shape = data.draw(st.sampled_from([(), (0,), (1,), (2, 3), (4001,), (3, 0)]), label="shape")
        calls.append((of, dtype, shape, data.draw(st.sampled_from(["sum", "mean"]), label="op")))

    def program():
        made = [
            sv.all_reduce_shards(mine(of, lambda one, d=dtype, s=shape: shard(one, d, s)), op)
            for of, dtype, shape, op in calls
        ]
        return [(one.dtype, one.shape, one.tobytes()) for one in made]

    expected = [
        wanted([shard(one, dtype, shape) for one in range(len(of))], op)
        for of, dtype, shape, op in calls
    ]
    for got in everywhere(size, program, **path):
        assert got == [(one.dtype, one.shape, one.tobytes()) for one in expected]


@pytest.mark.parametrize("dtype", ["float32", "float64", BFLOAT16], ids=str)
def test_it_is_tree_sum_of_all_shards_also_of_zeros_infinities_and_nan(dtype):
    rows = np.array(
        [[-0.0, np.inf, np.nan, 1e30], [-0.0, -np.inf, 1, 1e30], [-0.0, 3, 4, -1e30]] * 3
    ).astype(dtype)
    of = owners("in turn", 3, 9)
    for got in everywhere(
        3, lambda: sv.all_reduce_shards(mine(of, lambda number: np.resize(rows[number], 50)))
    ):
        assert got.tobytes() == sv.tree_sum([np.resize(row, 50) for row in rows]).tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_structures_and_ranks_that_bring_nothing(path):
    of = [0, 2, 2, 0, 0, 2, 0]  # rank 1 brings nothing, and learns what it gets from the others

    def make(number):
        small, half = shard(number, "float32", (2, 3)), shard(number, BFLOAT16, (5,))
        return {
            "b": [small, {"c": half}],
            "a": (shard(number, "float64", (3000,)), number),
            3: shard(number, "float32", (70, 1)),
        }

    def program():
        got = sv.all_reduce_shards(
            mine(of, lambda number: {key: one for key, one in make(number).items() if key != 3})
        )
        assert list(got) == ["a", "b"]
        assert type(got["a"]) is tuple
        small, half = got["b"][0], got["b"][1]["c"]
        return [small.shape, half.dtype, *(one.tobytes() for one in (small, half, *got["a"]))]

    parts = [make(number) for number in range(7)]
    expected = [
        wanted([np.asarray(pick(part)) for part in parts]).tobytes()
        for pick in (
            lambda part: part["b"][0],
            lambda part: part["b"][1]["c"],
            lambda part: part["a"][0],
            lambda part: part["a"][1],
        )
    ]
    assert everywhere(3, program, **PATHS[path]) == [[(2, 3), BFLOAT16, *expected]] * 3


def test_fewer_shards_than_ranks_and_groups():
    def program():
        group = sv.new_group([3, 1])
        one = sv.all_reduce_shards({0: [1.5, 2.5]} if sv.rank() == 2 else {})
        inner = (
            sv.all_reduce_shards({group.rank: float(sv.rank())}, "mean", group=group)
            if group.is_member
            else None
        )
        return one.tolist(), None if inner is None else float(inner)

    assert everywhere(4, program, shared=True) == [
        ([1.5, 2.5], 2.0 if rank in (1, 3) else None) for rank in range(4)
    ]


def test_the_input_stays_as_it_is_and_the_result_is_new():
    part = np.ones(3)
    got = sv.all_reduce_shards({0: part})
    got += 1
    assert part.tolist() == [1, 1, 1]
    assert sv.all_reduce_shards({1: part[::2], 0: part[1:]}).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([np.ones(2)], "must be a dict of id -> array"),
        ({-1: 1.0}, "must be an integer, 0 or more, not -1"),
        ({"0": 1.0}, "must be an integer, 0 or more, not '0'"),
        ({True: 1.0}, "must be an integer, 0 or more, not True"),
        ({0: None}, "shard 0 must be an array or a number"),
        ({0: np.ones(2), 1: np.ones(3)}, "shard 0 is float64\\[2\\], shard 1 is float64\\[3\\]"),
        ({0: np.ones(2), 1: np.ones(2, np.float32)}, "shard 1 is float32\\[2\\]"),
        ({0: {"a": 1.0}, 1: {"b": 1.0}}, "same structure"),
        ({0: np.ones(2, bool)}, "sum of bool has no meaning"),
        ({}, "nothing to combine"),
        ({0: 1.0, 2: 1.0, 3: 1.0, 6: 1.0}, "no rank has shards 1, 4-5"),
    ],
)
def test_a_refusal_here(shards, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.all_reduce_shards(shards)


def test_an_op_that_is_refused():
    with pytest.raises(sv.ConfigError, match="must be one of sum, mean, not 'max'"):
        sv.all_reduce_shards({0: 1.0}, "max")


@pytest.mark.parametrize("path", PATHS)
def test_what_is_refused_leaves_the_group_usable(path):
    def refused(shards, op="sum"):
        with pytest.raises((sv.ConfigError, sv.MismatchError)) as caught:
            sv.all_reduce_shards(shards, op)
        assert sv.all_reduce_shards({sv.rank(): 1.0}).tolist() == 3.0
        return type(caught.value).__name__, str(caught.value), getattr(caught.value, "table", None)

    def program():
        rank = sv.rank()
        return [
            refused({0: 1.0} if rank != 1 else {1: 1.0}),
            refused({(0, 1, 5)[rank]: 1.0}),
            refused({rank: np.ones(2, np.float32 if rank else np.float64)}),
            refused({rank: np.ones(2 + rank // 2)}),
            refused({}),
            refused({-1: 1.0} if rank == 1 else {rank: 1.0}),
            refused({rank: 1.0}, "sum" if rank else "mean"),
        ]

    results = everywhere(3, program, **PATHS[path])
    twice, hole, dtypes, shapes, nothing, here, ops = zip(*results, strict=True)
    for told in (twice, hole, dtypes, shapes, nothing, ops):
        assert {kind for kind, *_ in told} == {"MismatchError"}
    assert all("ranks 0 and 2 both have shard 0" in words for _, words, _ in twice)
    assert all(
        "no rank has shards 2-4" in words and table[2] == "brings shard 5: float64[]"
        for _, words, table in hole
    )
    assert all(
        table
        == {
            0: "brings shard 0: float64[2]",
            1: "brings shard 1: float32[2]",
            2: "brings shard 2: float32[2]",
        }
        for *_, table in dtypes
    )
    assert all("same structure, shapes and dtypes" in words for _, words, _ in shapes)
    assert all("no rank has a shard" in words for _, words, _ in nothing)
    assert [kind for kind, *_ in here] == ["MismatchError", "ConfigError", "MismatchError"]
