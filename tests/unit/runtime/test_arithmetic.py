"""Halves by integer operations: to the bit what NumPy's conversions and float32 make of them."""

import ml_dtypes
import numpy as np
import pytest

from syncvar.runtime.arithmetic import (
    are_scalable,
    combine,
    combine_widened,
    round_scaled,
    ufunc_holding,
    widen,
    widen_scaled,
)

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = ALL[np.isfinite(ALL)]
SCALE = np.float64(2.0**-112)


def bits(halves):
    return halves.view(np.uint16)


def same(ours, numpys):
    """Equal to the bit, but that one NaN may be another."""
    is_nan = np.isnan(numpys)
    return bool(
        np.all(np.isnan(ours) == is_nan) and np.all(bits(ours)[~is_nan] == bits(numpys)[~is_nan])
    )


def rounded(scaled):
    out = np.empty(scaled.size, np.float16)
    round_scaled(scaled.copy(), out, np.empty_like(scaled))
    return out


def test_all_halves_are_widened_as_numpy_does():
    out = np.empty(ALL.size, np.float32)
    widen(ALL, out)
    assert np.array_equal(out.view(np.uint32), ALL.astype(np.float32).view(np.uint32))


def test_all_finite_halves_are_scaled_exactly_and_come_back():
    out = np.empty(FINITE.size, np.float32)
    widen_scaled(FINITE, out)
    assert np.array_equal(out.astype(np.float64), FINITE.astype(np.float64) * SCALE)
    assert np.array_equal(np.signbit(out), np.signbit(FINITE))
    assert np.array_equal(bits(rounded(out)), bits(FINITE))


@pytest.mark.parametrize("steps", [-2, -1, 0, 1, 2])
def test_beside_every_tie_between_neighbours_the_rounding_is_numpys(steps):
    positive = np.sort(FINITE[~np.signbit(FINITE)]).astype(np.float64)
    ties = np.concatenate([(positive[1:] + positive[:-1]) / 2, positive])
    scaled = (ties * SCALE).astype(np.float32)
    scaled = np.maximum(scaled.view(np.int32) + steps, 0).view(np.float32)
    scaled = np.minimum(scaled, np.float32(65504 * SCALE))
    for signed in (scaled, -scaled):
        exact = (signed.astype(np.float64) / SCALE).astype(np.float16)
        assert np.array_equal(bits(rounded(signed)), bits(exact))


def test_random_scaled_values_are_rounded_as_numpy_does():
    patterns = np.random.default_rng(3).integers(0, 31 << 23, 1 << 18, dtype=np.int32)
    scaled = np.minimum(patterns.view(np.float32), np.float32(65504 * SCALE))
    exact = (scaled.astype(np.float64) / SCALE).astype(np.float16)
    assert np.array_equal(bits(rounded(scaled)), bits(exact))


@pytest.mark.parametrize(
    ("values", "is_so"),
    [
        ([[0.0, -0.0], [1.0, -1.0]], True),
        ([[65504.0], [0.0]], True),
        ([[-60000.0], [5504.0]], True),
        ([[65504.0], [2.0**-24]], False),
        ([[-60000.0], [6000.0]], False),
        ([[1.0, np.inf], [0.0, 0.0]], False),
        ([[1.0, -np.inf], [0.0, 0.0]], False),
        ([[0.0, 0.0], [np.nan, -1.0]], False),
        ([[0.0, 0.0], [-np.nan, 1.0]], False),
    ],
)
def test_what_may_be_scaled(values, is_so):
    terms = [np.array(one, np.float16) for one in values]
    assert are_scalable(terms, np.add, 0) is is_so
    assert are_scalable(terms, np.minimum, 4096) is is_so
    assert not are_scalable(terms, np.multiply, 0)
    assert not are_scalable(terms, np.add, 4097)


def contributions(kind, ranks, count):
    source = np.random.default_rng(ranks)
    if kind == "bits":
        return [
            source.integers(0, 1 << 16, count, dtype=np.uint16).view(np.float16)
            for _ in range(ranks)
        ]
    if kind == "special":
        return [
            source.choice([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 65504.0], count).astype(
                np.float16
            )
            for _ in range(ranks)
        ]
    scale = {"subnormal": 2e-5, "tiny": 1e-7, "usual": 1.0, "large": 2e4}[kind]
    return [
        np.clip(source.normal(size=count) * scale, -65504, 65504).astype(np.float16)
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("ufunc", [np.add, np.minimum, np.maximum, np.multiply])
@pytest.mark.parametrize("kind", ["usual", "subnormal", "tiny", "large", "special", "bits"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_halves_of_all_ranks_are_combined_as_float32_and_rounded_once(kind, ranks, ufunc, hold):
    terms = contributions(kind, ranks, 70_001 if ufunc is np.add and not hold else 1001)
    with np.errstate(all="ignore"):
        for divisor in (0, ranks):
            expected = np.empty(terms[0].size, np.float32)
            combine([term.astype(np.float32) for term in terms], ufunc, expected)
            if divisor:
                expected /= np.float32(divisor)
            out = np.empty_like(terms[0])
            combine_widened(terms, ufunc, out, np.dtype(np.float32), divisor, hold=hold)
            assert same(out, expected.astype(np.float16))


@pytest.mark.parametrize("divisor", [3, 7, 1000, 4095, 4096])
def test_quotients_of_subnormal_sums_are_rounded_as_those_of_float32(divisor):
    lower = np.random.default_rng(1).integers(0, 2048, 30_000, dtype=np.uint16)
    terms = [np.arange(30_000, dtype=np.uint16).view(np.float16), lower.view(np.float16)]
    out = np.empty_like(terms[0])
    assert are_scalable(terms, np.add, divisor)
    combine_widened(terms, np.add, out, np.dtype(np.float32), divisor, hold=False)
    total = terms[0].astype(np.float32) + terms[1].astype(np.float32)
    assert np.array_equal(bits(out), bits((total / np.float32(divisor)).astype(np.float16)))


def test_the_result_may_go_where_the_first_term_lies_and_the_others_stay():
    terms = contributions("usual", 3, 40_000)
    kept = [term.copy() for term in terms]
    expected = np.empty_like(terms[0])
    combine_widened(terms, np.add, expected, np.dtype(np.float32), 0, hold=False)
    assert all(map(np.array_equal, terms, kept))
    combine_widened(terms, np.add, terms[0], np.dtype(np.float32), 0, hold=False)
    assert np.array_equal(bits(terms[0]), bits(expected))
    assert all(map(np.array_equal, terms[1:], kept[1:]))


def test_bfloat16_is_combined_by_its_own_conversions():
    terms = [
        np.array([1.0, 256.0, np.inf], ml_dtypes.bfloat16),
        np.array([2.0, 1.0, 1.0], ml_dtypes.bfloat16),
    ]
    out = np.empty_like(terms[0])
    combine_widened(terms, np.add, out, np.dtype(np.float32), 0, hold=False)
    assert out.tolist() == [3.0, 256.0, np.inf]


@pytest.mark.parametrize("kind", ["u4", "u8"])
@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.minimum, np.maximum])
@pytest.mark.parametrize("count", [9, 3_000, 30_001])
def test_pieces_keep_the_payloads_of_nans(kind, ufunc, count):
    """Else ranks that keep the GIL have other bytes than the others."""
    quiet = {"u4": 0x7FC00000, "u8": 0x7FF8000000000000}[kind]
    draw = np.random.default_rng(count)
    floats = np.dtype(kind.replace("u", "f"))
    one, other = (
        (np.full(count, quiet, kind) | draw.integers(1, 1000, count).astype(kind)).view(floats)
        for _ in range(2)
    )
    out = np.empty(count, floats)
    ufunc_holding(ufunc, one, other, out)
    assert out.tobytes() == ufunc(one, other).tobytes()
