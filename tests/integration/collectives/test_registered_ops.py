"""Registered ops: given pieces, or whole elements of a shape; refused at once where neither can be right."""

import functools

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks

SOON = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
LAYOUTS = [("links", 3), ("shm", 2), ("shm", 3), ("hosts", 3)]
HOW = {"links": {}, "shm": {"shared": True}, "hosts": {"shared": True, "hosts": 2}}
COUNTS = [0, 1, 2, 7, 2_500, 40_000]  # of matrices of 32 bytes


def world(layout, size, fn):
    return run_ranks(size, fn, config=SOON, timeout_s=60, **HOW[layout])


def results(layout, size, fn):
    out = world(layout, size, fn)
    errors = [one for one in out if isinstance(one, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return out


def matrices(rank, count):
    """Whole numbers, so that products of three are exact; they do not commute."""
    made = np.zeros((count, 2, 2))
    made[:, 0, 0] = made[:, 1, 1] = 1
    made[:, rank % 2, 1 - rank % 2] = np.arange(count) % 5 + rank + 1
    return made


@pytest.mark.parametrize("layout", ["links", "shm", "hosts"])
def test_products_of_matrices_at_every_size_over_every_path(layout):
    op = "product_of_matrices"
    function = np.matmul if layout == "shm" else lambda left, right: left @ right
    sv.register_op(op, function, element_shape=(2, 2), replace=True)

    def fn():
        rank, size = sv.rank(), sv.world_size()
        for count in COUNTS:
            parts = [matrices(one, count) for one in range(size)]
            wanted = functools.reduce(np.matmul, parts)
            mine = parts[rank].copy()
            out = np.empty_like(mine)
            for got in (
                sv.all_reduce(mine, op),
                sv.all_reduce(np.asfortranarray(mine), op, reproducible=True),
                sv.all_reduce(mine, op, out=out),
                out,
                sv.all_reduce(mine, op, async_op=True).wait(),
                *sv.all_reduce([mine, mine], op),
                sv.all_reduce(mine, op, postscale=1.0),
            ):
                assert np.array_equal(got, wanted), count
            assert np.array_equal(sv.scan(mine, op), functools.reduce(np.matmul, parts[: rank + 1]))
            rooted = sv.reduce(mine, op, root=1)
            assert rooted is None if rank != 1 else np.array_equal(rooted, wanted)
            base, longer = divmod(count, size)
            cuts = np.cumsum([0, *(base + (one < longer) for one in range(size))])
            assert np.array_equal(sv.reduce_scatter(mine, op), wanted[cuts[rank] : cuts[rank + 1]])
            assert np.array_equal(mine, parts[rank])
        one = matrices(rank, 1)[0]
        assert np.array_equal(
            sv.all_reduce(one, op),
            functools.reduce(np.matmul, [matrices(rank, 1)[0] for rank in range(size)]),
        )

    for where, size in LAYOUTS:
        if where == layout:
            results(layout, size, fn)


def test_elements_larger_than_a_frame():
    sv.register_op(
        "looked_up",
        lambda left, right: np.take_along_axis(left, right % 400, axis=1),
        element_shape=(400,),
        replace=True,
    )

    def fn():
        parts = [
            np.random.default_rng(rank).permuted(np.tile(np.arange(400), (50, 1)), axis=1)
            for rank in range(3)
        ]
        wanted = functools.reduce(
            lambda left, right: np.take_along_axis(left, right, axis=1), parts
        )
        assert np.array_equal(sv.all_reduce(parts[sv.rank()], "looked_up"), wanted)

    small = SOON.replaced(segment_bytes=1024)
    assert run_ranks(3, fn, config=small) == [None] * 3
    assert results("shm", 3, fn) == [None] * 3


REFUSED = {
    "pieces that are no matrices": (
        lambda left, right: (left.reshape(-1, 2, 2) @ right.reshape(-1, 2, 2)).reshape(-1),
        (),
        "raised ValueError",
    ),
    "positions": (
        lambda left, right: left + right + np.arange(left.size),
        (),
        "is not elementwise",
    ),
    "a generalized ufunc": (np.matmul, (), "is not elementwise"),
    "another shape": (lambda left, right: np.append(left, right), (), r"returned float64\[6\]"),
    "another dtype": (lambda left, right: left + right * 1j, (), "returned complex128"),
    "its operands": (lambda left, right: np.add(left, right, out=left), (), "raised ValueError"),
    "an error": (lambda left, right: left.nothing, (), "raised AttributeError"),
    "another element": (np.matmul, (3, 2), "raised"),
    "elements together": (
        lambda left, right: left + right.sum(),
        (2,),
        "is not elementwise",
    ),
    "other arrays": (np.matmul, (3, 3), r"was registered for arrays of shape \(..., 3, 3\)"),
    "too long": (np.add, (70_000,), "560000 bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_on_pieces_is_refused_at_once_and_the_group_goes_on(what):
    function, element_shape, words = REFUSED[what]
    sv.register_op("wrong", function, element_shape=element_shape, replace=True)

    def fn():
        for call in (
            sv.all_reduce,
            sv.reduce,
            sv.reduce_scatter,
            sv.scan,
            lambda x, op: sv.all_reduce([x, 2 * x], op),
        ):
            for count in (4, 6_000):
                with pytest.raises(sv.ConfigError, match=words):
                    call(np.ones((count, 2, 2)), "wrong")
        if sv.rank() == 0:
            with pytest.raises(sv.ConfigError, match=words):
                sv.all_reduce(np.ones((2, 2, 2)), "wrong")
        else:
            with pytest.raises(sv.MismatchError, match="op 'wrong'"):
                sv.all_reduce(np.ones((2, 2, 2)))
        return float(sv.all_reduce(1.0))

    assert results("links", 2, fn) == [2.0, 2.0]
    assert results("shm", 2, fn) == [2.0, 2.0]


@pytest.mark.parametrize(("layout", "size"), LAYOUTS)
def test_what_an_op_raises_for_some_values_is_told_in_words(layout, size):
    """It shows only in the middle of a call: then the group is broken, and the rank that has the error says what it was."""

    def picky(left, right):
        if (left == 7).any() or (right == 7).any():
            raise LookupError("seven")
        return left + right

    sv.register_op("picky", picky, replace=True)

    def fn():
        x = np.full(9_000, 1.0)
        x[4_000] = 7.0
        sv.all_reduce(x, "picky")

    errors = world(layout, size, fn)
    assert all(isinstance(error, sv.SyncvarError) for error in errors), errors
    told = [
        error
        for error in errors
        if "the op 'picky' raised LookupError for two arrays of float64" in str(error)
    ]
    assert told


@pytest.mark.parametrize("element_shape", ["ab", (0,), (2, -1), 3.5, 4])
def test_a_wrong_shape_of_elements_is_refused(element_shape):
    with pytest.raises(sv.ConfigError, match="element_shape"):
        sv.register_op("shaped", np.add, element_shape=element_shape, replace=True)


@pytest.mark.parametrize("name", ["average", "Avg"])
def test_a_word_that_is_accepted_for_a_built_in_op_is_refused(name):
    """Calls with it are prepared as that op, and would go on as that op where one of this shape has been made before."""

    def fn():
        x = np.full(4, float(sv.rank()))
        before = [sv.all_reduce(x, name)[0] for _ in range(3)] + [
            sv.reduce_scatter(x, name)[0] for _ in range(3)
        ]
        with pytest.raises(
            sv.ConfigError, match=f"'{name.lower()}' is an alias of the built-in op 'mean'"
        ):
            sv.register_op(name, np.maximum, replace=True)
        return {*before, sv.all_reduce(x, name)[0], sv.all_reduce(np.append(x, 1.0), name)[0]}

    assert results("shm", 2, fn) == [{0.5}] * 2
