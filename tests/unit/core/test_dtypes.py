"""The table of dtypes that travel: every entry round-trips, everything else is refused."""

import ml_dtypes
import numpy as np
import pytest

from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index, dtype_index
from syncvar.core.errors import ConfigError, WireError


def test_every_dtype_of_the_table_has_its_place_and_the_places_never_change():
    assert [dtype_index(dtype_from_index(index)) for index in range(len(DTYPE_NAMES))] == list(
        range(len(DTYPE_NAMES))
    )
    assert DTYPE_NAMES == (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "bfloat16",
    )


def test_bfloat16_is_the_one_of_ml_dtypes():
    assert dtype_from_index(dtype_index(np.dtype(ml_dtypes.bfloat16))) == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "dtype", ["O", "S3", "U3", "V8", "M8[s]", "m8[s]", "i4,f8", "g", ml_dtypes.float8_e4m3fn]
)
def test_other_dtypes_are_refused_with_the_list_of_those_that_travel(dtype):
    with pytest.raises(ConfigError, match="use one of bool, int8"):
        dtype_index(np.dtype(dtype))


@pytest.mark.parametrize("index", [-1, len(DTYPE_NAMES), 255, 1 << 70])
def test_an_index_outside_the_table_is_refused(index):
    with pytest.raises(WireError, match="unknown dtype index"):
        dtype_from_index(index)
