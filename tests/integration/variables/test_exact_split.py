"""The exact split: whatever the value, the copies sum to it in any order."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks
from syncvar.variables.create import share_of


def values_of(dtype, seed):
    draw = np.random.default_rng(seed)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        near = [limits.min, limits.max, limits.min + 1, limits.max - 1, 0, 1, 7]
        return np.array(
            [*near, *draw.integers(limits.min, limits.max, 60, dtype, endpoint=True)], dtype
        )
    limits = np.finfo(dtype)
    special = [
        0.0,
        -0.0,
        limits.max,
        limits.min,
        limits.tiny,
        limits.smallest_subnormal,
        3 * limits.smallest_subnormal,
        0.1,
    ]
    wide = draw.normal(size=40) * 10.0 ** draw.integers(-4, 4, 40)
    with np.errstate(over="ignore", under="ignore"):
        raw = draw.integers(
            0, 2 ** (8 * dtype.itemsize), 60, f"u{dtype.itemsize}", endpoint=False
        ).view(dtype)
    return np.concatenate([np.array(special, dtype), wide.astype(dtype), raw[np.isfinite(raw)]])


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize(
    "name", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64"]
)
def test_the_sum_of_the_shares_is_the_value_in_any_order(name, count):
    value = values_of(np.dtype(name), seed=count)
    shares = [share_of(value, count, index) for index in range(count)]
    assert all(share.dtype == value.dtype and share.shape == value.shape for share in shares)
    orders = list(
        itertools.islice(itertools.permutations(range(count)), 0, None, max(1, count * count * 3))
    )
    for order in orders:
        total = np.zeros_like(value) if value.dtype.kind in "iu" else np.full_like(value, -0.0)
        for index in order:
            total = total + shares[index]
        assert total.tobytes() == value.tobytes()


@pytest.mark.parametrize("count", range(2, 6))
def test_integers_are_truncated_toward_zero_and_copy_0_takes_the_rest(count):
    for value in range(-20, 21):
        shares = [int(share_of(np.asarray(value), count, index)) for index in range(count)]
        assert shares[1:] == [int(value / count)] * (count - 1)
        assert sum(shares) == value


def test_every_float_share_is_a_multiple_of_the_last_place():
    value = np.float32(1) + np.spacing(np.float32(1))
    shares = [share_of(np.asarray(value), 3, index) for index in range(3)]
    assert all(float(share) % float(np.spacing(value)) == 0 for share in shares)


def test_infinities_and_nan_go_to_every_copy_and_bools_to_copy_0():
    value = np.array([np.inf, -np.inf, np.nan, 2.0])
    for index in range(3):
        share = share_of(value, 3, index)
        assert share[0] == np.inf
        assert share[1] == -np.inf
        assert np.isnan(share[2])
    flags = np.array([True, False])
    assert [share_of(flags, 2, index).tolist() for index in (0, 1)] == [
        [True, False],
        [False, False],
    ]


def test_complex_parts_are_split_apart():
    value = np.array([1.1 - 0.3j, 1e-30 + 5j])
    assert sum(share_of(value, 3, index) for index in range(3)).tobytes() == value.tobytes()


def test_bfloat16():
    value = np.array([1.1, -7.0, 0.3, 1e30, 1e-30], ml_dtypes.bfloat16)
    shares = [share_of(value, 3, index).astype(np.float32) for index in range(3)]
    assert sum(shares).astype(ml_dtypes.bfloat16).tobytes() == value.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reading_gives_back_what_was_written(size):
    draw = np.random.default_rng(size)
    floats = (draw.normal(size=200) * 10.0 ** draw.integers(-20, 20, 200)).astype(np.float32)
    whole = draw.integers(-(2**40), 2**40, 200)

    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(floats, synchronization="ON_READ", aggregation="SUM")
            w = sv.Variable(whole, synchronization="ON_READ", aggregation="SUM")
            same = [v.numpy().tobytes() == floats.tobytes(), np.array_equal(w, whole)]
            same += [
                v.assign(-floats).numpy().tobytes() == (-floats).tobytes(),
                np.array_equal(w.assign(whole + 1), whole + 1),
            ]
        return same

    assert run_ranks(size, program, timeout_s=120) == [[True] * 4] * size
