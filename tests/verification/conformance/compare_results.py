"""Is a result what a case expects? The answer is a text that says what differs, or an empty one."""

import builtins
import math

import numpy as np

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_RELATIVE = {"float64": 1e-12, "complex128": 1e-12, "float16": 1e-3, "bfloat16": 1e-2}
_ABSOLUTE = 1e-30


def is_complex(value):
    """Return whether a value of a case is a complex number."""
    return isinstance(value, dict) and set(value) == {"re", "im"}


def number(value):
    """Return a number of a case, given in the ways that JSON cannot write, and anything else as it is."""
    if is_complex(value):
        return complex(number(value["re"]), number(value["im"]))
    if isinstance(value, str):
        return _SPECIAL.get(value, value)
    return value


def numbers(value):
    """Return a number or nested list of numbers of a case for NumPy."""
    return [numbers(item) for item in value] if isinstance(value, list) else number(value)


def tolerance(dtype):
    """Return the relative tolerance for results of a dtype, by its name; None where none is given."""
    return _RELATIVE.get(dtype, 1e-6)


def wrong_value(expected, actual, dtype=None):
    """Say what is wrong with a result; "" for nothing.

    Args:
        expected: A value of a case: number, list, dict, None, text.
        actual: What a program got: array, number, structure.
        dtype: Name of the dtype that it must have; None where the case gives none.
    """
    if dtype is not None:
        if not isinstance(actual, np.ndarray | np.generic):
            return f"{type(actual).__name__} {actual!r} is no array of {dtype}"
        if actual.dtype.name != dtype:
            return f"has dtype {actual.dtype.name}, not {dtype}: {actual!r}"
    return _wrong(expected, actual, tolerance(dtype), "")


def _wrong(expected, actual, relative, place):
    at = f"at {place}: " if place else ""
    if isinstance(expected, dict) and not is_complex(expected):
        if not isinstance(actual, dict):
            return f"{at}{actual!r} is no dict {expected!r}"
        if set(actual) != set(expected):
            return f"{at}has keys {sorted(actual)}, not {sorted(expected)}"
        return _first(
            _wrong(expected[key], actual[key], relative, f"{place}[{key!r}]") for key in expected
        )
    if isinstance(expected, list) and isinstance(actual, list | tuple):
        if len(actual) != len(expected):
            return f"{at}has {len(actual)} items, not {len(expected)}: {actual!r} instead of {expected!r}"
        pairs = enumerate(zip(expected, actual, strict=True))
        return _first(
            _wrong(want, got, relative, f"{place}[{index}]") for index, (want, got) in pairs
        )
    if expected is None:
        return "" if actual is None else f"{at}{actual!r} instead of None"
    if isinstance(expected, str) and expected not in _SPECIAL:
        return (
            ""
            if isinstance(actual, str) and actual == expected
            else f"{at}{actual!r} instead of {expected!r}"
        )
    return _wrong_array(expected, actual, relative, at)


def _wrong_array(expected, actual, relative, at):
    if not isinstance(actual, np.ndarray | np.generic | bool | int | float | complex):
        return f"{at}{type(actual).__name__} {actual!r} instead of {expected!r}"
    got = np.asarray(actual)
    want = np.asarray(numbers(expected))
    differs = f"{at}{got.tolist()!r} instead of {expected!r}"
    if got.size == 0 or want.size == 0:  # a list cannot tell (0, 3) from (0,)
        return "" if got.tolist() == expected else differs
    if got.shape != want.shape:
        return (
            f"{at}has shape {got.shape}, not {want.shape}: {got.tolist()!r} instead of {expected!r}"
        )
    if (got.dtype.kind == "b") != (want.dtype.kind == "b"):
        return differs
    if want.dtype.kind in "biu" and got.dtype.kind in "biu":
        return "" if got.tolist() == want.tolist() else differs
    left, right = got.astype(np.complex128), want.astype(np.complex128)
    with np.errstate(invalid="ignore"):
        close = np.isfinite(right) & (np.abs(left - right) <= _ABSOLUTE + relative * np.abs(right))
    close |= (left == right) | (np.isnan(left) & np.isnan(right))
    return "" if bool(close.all()) else differs


def _first(texts):
    return next((text for text in texts if text), "")


def error_class(name, public):
    """Return the exception class of that name, public or Python's own.

    Raises:
        LookupError: There is none.
    """
    found = getattr(public, name, None) or getattr(builtins, name, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise LookupError(f"there is no exception {name!r}")
    return found
