"""The bounds that compressors state, for any values, and the errors of compressors that break the protocol."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import syncvar as sv
from syncvar.collectives.compressors import checked_compressor, decoded, encoded

VALUES = arrays.arrays(np.float32, st.integers(1, 700), elements=st.floats(width=32))


def back(codec, values):
    with np.errstate(all="ignore"):
        data = encoded(codec, values)
        assert data.size == codec.encoded_bytes(values.size)
        return decoded(codec, data, values.size)


def test_all_halves_and_their_ties_round_as_numpy_rounds_them():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = np.sort(halves[np.isfinite(halves)].astype(np.float32))
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate(
        [numbers, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e6, dtype=np.float32)]
    )
    values = np.concatenate([values, np.float32([65519, 65520, np.inf, -np.inf, 1e-45])])
    data = encoded(sv.compressors.Float16(), values)
    with np.errstate(all="ignore"):
        assert data.tobytes() == values.astype(np.float16).tobytes()


def same_nans(found, values):
    assert np.array_equal(np.isnan(found), np.isnan(values))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_half_precision_rounds_within_its_bound(values):
    found = back(sv.compressors.Float16(), values)
    same_nans(found, values)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    assert found[~np.isnan(values)].tobytes() == expected[~np.isnan(values)].tobytes()
    is_large = np.abs(values) >= 65520
    assert np.array_equal(found[is_large], np.copysign(np.float32(np.inf), values[is_large]))
    rest = ~is_large & ~np.isnan(values)
    exact = values[rest].astype(np.float64)
    assert np.all(np.abs(found[rest] - exact) <= np.maximum(2.0**-11 * np.abs(exact), 2.0**-25))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_bfloat16_rounds_to_nearest_even_as_ml_dtypes_does(values):
    import ml_dtypes

    found = back(sv.compressors.BFloat16(), values)
    same_nans(found, values)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    numbers = ~np.isnan(values)
    assert found[numbers].tobytes() == expected[numbers].tobytes()
    finite = np.isfinite(found)
    exact = values[finite].astype(np.float64)
    assert np.all(np.abs(found[finite] - exact) <= np.maximum(2.0**-8 * np.abs(exact), 2.0**-134))


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from([1, 7, 256]))
def test_int8_rounds_within_the_bound_of_its_block(values, block):
    found = back(sv.compressors.Int8(block), values)
    assert np.array_equal(np.isnan(found), ~np.isfinite(values))
    for start in range(0, values.size, block):
        part, result = values[start : start + block], found[start : start + block]
        finite = np.isfinite(part)
        exact = part[finite].astype(np.float64)
        largest = np.abs(exact).max(initial=0.0)
        bound = largest / 254 + 2.0**-142 + 2.0**-22 * largest
        assert np.all(np.abs(result[finite] - exact) <= bound)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from([0.001, 0.3, 1.0]))
def test_topk_sends_the_largest_exactly(values, ratio):
    codec = sv.compressors.TopK(ratio)
    found = back(codec, values)
    sizes = np.where(np.isnan(values), np.inf, np.abs(values))
    count = codec.encoded_bytes(values.size) // 8
    is_sent = (found != 0) | np.isnan(found)
    assert np.count_nonzero(is_sent) <= count
    same = np.isnan(found[is_sent]) | (found[is_sent] == values[is_sent])
    assert same.all()
    smallest = np.sort(sizes)[-count]
    assert np.all(sizes[~is_sent] <= smallest)


def test_scales_of_the_largest_numbers_stay_finite():
    largest = np.finfo(np.float32).max
    found = back(sv.compressors.Int8(), np.array([largest, -largest, 1], np.float32))
    assert np.isfinite(found).all()
    assert found[0] == -found[1] >= largest * (1 - 2.0**-20)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sv.compressors.TopK(0), "ratio must be a number in (0, 1]"),
        (lambda: sv.compressors.TopK(ratio=True), "ratio must be a number in (0, 1]"),
        (lambda: sv.compressors.Int8(0), "block must be an integer of at least 1"),
        (lambda: checked_compressor("int4"), "compress must be one of 'float16'"),
        (lambda: checked_compressor(sv.compressors.Int8), "compress must be one of"),
        (lambda: checked_compressor(object()), "which lacks name, in_pieces"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(sv.ConfigError) as caught:
        make()
    assert text in str(caught.value)


def test_a_position_outside_the_array_is_refused():
    data = np.array([7], np.uint32).view(np.uint8)
    data = np.concatenate([data, np.float32([1]).view(np.uint8)])
    with pytest.raises(sv.SyncvarError, match="position"):
        sv.compressors.TopK(0.1).decode(data, 4)
