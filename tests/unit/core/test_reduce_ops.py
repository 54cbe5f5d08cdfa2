"""Which op takes which dtype, in which dtype it accumulates and what comes out: the whole table."""

import ml_dtypes
import numpy as np
import pytest

from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import OPS as ALL_OPS
from syncvar.core.reduce_ops import finish, reduction

OPS = ALL_OPS[:5]  # those that every number has; the others are tested with the messages and groups
HALVES = {"float16", "bfloat16"}
INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


def expected(op, name):
    """(accumulates in, comes out as), or None where the op has no meaning."""
    if name == "bool":
        return ("bool", "bool") if op in ("min", "max") else None
    if name.startswith("complex") and op in ("min", "max"):
        return None
    if name in HALVES:
        return "float32", name
    if op == "mean" and name in INTEGERS:
        return "float64", "float64"
    return name, name


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("op", OPS)
def test_the_table_of_ops_and_dtypes(op, name):
    dtype = dtype_from_index(DTYPE_NAMES.index(name))
    want = expected(op, name)
    if want is None:
        with pytest.raises(ConfigError, match="has no meaning"):
            reduction(op, dtype)
        return
    how = reduction(op, dtype)
    assert (how.accumulate.name, how.result.name, how.source, how.is_mean) == (
        *want,
        name,
        op == "mean",
    )
    assert how.ufunc in (np.add, np.multiply, np.minimum, np.maximum)


@pytest.mark.parametrize("name", [name for name in DTYPE_NAMES if name != "bool"])
def test_a_fold_and_its_end_give_the_exact_result_in_the_right_dtype(name):
    dtype = dtype_from_index(DTYPE_NAMES.index(name))
    parts = [np.array([1, 2, 3]).astype(dtype), np.array([3, 2, 1]).astype(dtype)]
    for op in OPS:
        if expected(op, name) is None:
            continue
        how = reduction(op, dtype)
        total = parts[0].astype(how.accumulate)
        how.ufunc(total, parts[1].astype(how.accumulate), out=total)
        result = finish(how, total, 2)
        want = {
            "sum": [4, 4, 4],
            "mean": [2, 2, 2],
            "prod": [3, 4, 3],
            "min": [1, 2, 1],
            "max": [3, 2, 3],
        }[op]
        assert result.dtype == how.result
        assert [complex(one) for one in result] == want


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_halves_are_added_in_single_precision_and_rounded_once(dtype):
    """One large and many small parts: rounding at each step would lose every small one."""
    big, small = (2048.0, 1.0) if dtype == np.float16 else (256.0, 1.0)
    how = reduction("sum", dtype)
    total = np.array([big]).astype(dtype).astype(how.accumulate)
    stepwise = np.array([big]).astype(dtype)
    for _ in range(8):
        how.ufunc(total, np.array([small]).astype(dtype).astype(how.accumulate), out=total)
        stepwise = (stepwise + np.array([small]).astype(dtype)).astype(dtype)
    assert float(finish(how, total, 1)[0]) == big + 8
    assert float(stepwise[0]) == big


@pytest.mark.parametrize(
    ("op", "hint"),
    [("summ", "did you mean sum"), ("", "op must be one of"), (3, "not 3"), (None, "not None")],
)
def test_an_unknown_op_is_refused_with_the_list_of_those_there_are(op, hint):
    with pytest.raises(ConfigError, match=hint):
        reduction(op, np.dtype("f8"))


def test_ops_are_read_in_any_case_and_other_dtypes_are_refused():
    assert reduction("SUM", np.dtype("f8")) == reduction("sum", np.dtype("f8"))
    with pytest.raises(ConfigError, match="cannot be communicated"):
        reduction("sum", np.dtype("M8[s]"))
