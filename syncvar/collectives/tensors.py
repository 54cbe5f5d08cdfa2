"""Calls with arrays of other libraries: NumPy views of their memory go in, such arrays come out.

A collective calls itself again with NumPy arrays on the same memory, so its persistent call serves.
No other module knows another library, and calls with NumPy arrays pay nothing for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.array_arguments import error_text
from syncvar.core.array_types import UnsupportedLibrary, library_of
from syncvar.core.pytree import children_of, is_structure, rebuild
from syncvar.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable


def is_foreign(x: Any, out: Any = None) -> bool:
    """Return whether the input or output is, or holds, an array of another library.

    False if the look fails: the call then raises the error and informs the group.
    """
    try:
        return _holds(x) or (out is not None and _holds(out))
    except Exception:  # of the caller's own classes, or of a list that holds itself
        return False


def _holds(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray or value is None:
        return False
    if library_of(value) is not None:
        return True
    if kind in (list, tuple):  # usually of numbers, which have few types
        if all(one in _PLAIN for one in set(map(type, value))):
            return False
    elif not is_structure(value):
        return False
    return any(_holds(part) for part in children_of(value))


_PLAIN = {bool, int, float, complex, np.ndarray, np.float64, np.float32, np.int64}


def call_with_numpy(call: Callable[..., Any], x: Any, out: Any = None) -> Any:
    """Make `call` with NumPy arrays in place of other libraries' arrays; convert its result back.

    It takes (x), or (x, out=out). The result is the caller's own `out`, if there is one.
    """
    places: dict[int, tuple[Any, Any]] = {}
    mine = _to_numpy(x, places if out is None else {})
    if out is None:
        result = call(mine)
        if isinstance(result, Work):
            return result.then(partial(convert_back, _library_arrays(x)))
        return convert_back(x, result)
    result = call(mine, out=_to_numpy(out, places))
    if isinstance(result, Work):
        return result.then(partial(_written, _library_arrays(out), places))
    return _written(out, places, result)


def _library_arrays(value: Any) -> Any:
    """Return the arrays of libraries in a value, in containers of our own."""
    if is_structure(value):
        return rebuild(value, [_library_arrays(part) for part in children_of(value)])
    return None if library_of(value) is None else value


def _to_numpy(value: Any, places: dict[int, tuple[Any, Any]]) -> Any:
    """Replace arrays by NumPy arrays, noted in `places` as id -> (NumPy array, original).

    A value that cannot be converted becomes one that the call refuses, which informs the group.
    """
    try:
        return _converted(value, places)
    except Exception as error:  # of a container: it holds itself, or is of the caller's own class
        return _unsupported(value, error)


def _unsupported(value: Any, error: Exception) -> UnsupportedLibrary:
    name = type(value).__name__
    return UnsupportedLibrary(f"of type {name} cannot be an array: {error_text(error)}")


def _converted(value: Any, places: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        places[id(value)] = value, value
        return value
    library = library_of(value)
    if library is None:
        if is_structure(value):
            return rebuild(value, [_converted(part, places) for part in children_of(value)])
        return value
    try:
        array = library.take(value)
    except Exception as error:  # whatever the library raises: the call informs the group
        return _unsupported(value, error)
    places[id(array)] = array, value
    return array


def convert_back(like: Any, result: Any) -> Any:
    """Replace NumPy arrays in a result by arrays of the libraries in `like`, the input."""
    if result is None or like is None or type(like) is np.ndarray:
        return result
    library = library_of(like)
    if library is not None:
        return result if library.give is None else _each(library.give, like, result)
    if not is_structure(like):
        return result
    parts = children_of(like)
    if isinstance(result, np.ndarray):  # one array of several, as scatter gives it
        return convert_back(parts[0], result) if parts else result
    if isinstance(result, dict):
        return rebuild(result, [convert_back(like[key], part) for key, part in result.items()])
    pairs = zip(parts, children_of(result), strict=True)
    return rebuild(result, [convert_back(part, part_of_result) for part, part_of_result in pairs])


def _each(give: Callable[[Any, Any], Any], like: Any, result: Any) -> Any:
    """Convert one array, or a list or tuple of them, as minloc and all_to_all return it."""
    if isinstance(result, list | tuple):
        return type(result)(give(part, like) for part in result)
    return give(result, like)


def _written(out: Any, places: dict[int, tuple[Any, Any]], result: Any) -> Any:
    """Return the caller's own `out` arrays after a call wrote to them."""
    for _, value in places.values():
        library = library_of(value)
        if library is not None:
            library.wrote(value)
    return _caller_arrays(out, places, result)


def _caller_arrays(out: Any, places: dict[int, tuple[Any, Any]], result: Any) -> Any:
    if isinstance(result, np.ndarray):
        found = places.get(id(result))
        # Not found: the result is a piece of an array that was cut.
        return convert_back(out, result) if found is None else found[1]
    if is_structure(result):
        return rebuild(result, [_caller_arrays(out, places, one) for one in children_of(result)])
    return result
