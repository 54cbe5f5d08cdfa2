"""Calls with arrays of other libraries: their memory goes in and is written to, and such arrays come out.

A collective that is given one calls itself with NumPy arrays on the same memory, by its prepared way if it has one; so
nothing below this file knows of any other library, and a call with NumPy arrays pays nothing for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.array_arguments import told
from syncvar.core.array_interop import UnsupportedLibrary, library_of
from syncvar.core.pytree import is_structure, parts_of, rebuilt
from syncvar.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["given_back", "in_kind", "is_foreign"]


def is_foreign(x: Any, out: Any = None) -> bool:
    """Return whether a value or where its result goes is, or holds, an array of another library.

    Of what cannot be looked through it is not: the call refuses that itself, with its number, and tells the group.
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
    if kind in (list, tuple):  # of numbers, as a rule: their types are few
        if all(one in _PLAIN for one in set(map(type, value))):
            return False
    elif not is_structure(value):
        return False
    return any(_holds(part) for part in parts_of(value))


_PLAIN = {bool, int, float, complex, np.ndarray, np.float64, np.float32, np.int64}


def in_kind(call: Callable[..., Any], x: Any, out: Any = None) -> Any:
    """Make a call with NumPy arrays in place of those of other libraries, and return its result in their kind.

    Args:
        call: The public call: of (x), or of (x, out=out) where there is an out.
        x: What the caller gave, or a rank.
        out: What the caller gave; what of it has been written to is the result, and comes back as the caller's own.
    """
    places: dict[int, tuple[Any, Any]] = {}
    mine = _taken(x, places if out is None else {})
    if out is None:
        result = call(mine)
        return (
            result.then(partial(given_back, _kept(x)))
            if isinstance(result, Work)
            else given_back(x, result)
        )
    result = call(mine, out=_taken(out, places))
    return (
        result.then(partial(_written, _kept(out), places))
        if isinstance(result, Work)
        else _written(out, places, result)
    )


def _kept(value: Any) -> Any:
    """Return what a call that has been started keeps of a value: its arrays of libraries, in containers of our own."""
    if is_structure(value):
        return rebuilt(value, [_kept(part) for part in parts_of(value)])
    return None if library_of(value) is None else value


def _taken(value: Any, places: dict[int, tuple[Any, Any]]) -> Any:
    """Return a value with NumPy arrays in place of others, noted as id -> (NumPy array, what it is of).

    What cannot be taken is replaced by what the checks of the call refuse, so that the group is told.
    """
    try:
        return _exchanged(value, places)
    except Exception as error:  # of a container: it holds itself, or is of the caller's own class
        return _untaken(value, error)


def _untaken(value: Any, error: Exception) -> UnsupportedLibrary:
    return UnsupportedLibrary(f"of type {type(value).__name__} cannot be an array: {told(error)}")


def _exchanged(value: Any, places: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        places[id(value)] = value, value
        return value
    library = library_of(value)
    if library is None:
        return (
            rebuilt(value, [_exchanged(part, places) for part in parts_of(value)])
            if is_structure(value)
            else value
        )
    try:
        array = library.take(value)
    except Exception as error:  # whatever the library raises: the group has to be told
        return _untaken(value, error)
    places[id(array)] = array, value
    return array


def given_back(like: Any, result: Any) -> Any:
    """Return a result with arrays of the libraries in place of NumPy's where `like`, which went in, had such."""
    if result is None or like is None or type(like) is np.ndarray:
        return result
    library = library_of(like)
    if library is not None:
        return result if library.give is None else _each(library.give, like, result)
    if not is_structure(like):
        return result
    parts = parts_of(like)
    if isinstance(result, np.ndarray):  # one array of several, as scatter gives it
        return given_back(parts[0], result) if parts else result
    if isinstance(result, dict):
        return rebuilt(result, [given_back(like[key], part) for key, part in result.items()])
    return rebuilt(
        result, [given_back(part, made) for part, made in zip(parts, parts_of(result), strict=True)]
    )


def _each(give: Callable[[Any, Any], Any], like: Any, result: Any) -> Any:
    """Return one array, or a list or tuple of them as minloc and all_to_all have it, in the kind of `like`."""
    if isinstance(result, list | tuple):
        return type(result)(give(part, like) for part in result)
    return give(result, like)


def _written(out: Any, places: dict[int, tuple[Any, Any]], result: Any) -> Any:
    """Return a result that lies in `out`: the caller's own arrays, where they are whole."""
    for _, value in places.values():
        library = library_of(value)
        if library is not None:
            library.wrote(value)
    return _own(out, places, result)


def _own(out: Any, places: dict[int, tuple[Any, Any]], result: Any) -> Any:
    if isinstance(result, np.ndarray):
        found = places.get(id(result))
        return (
            given_back(out, result) if found is None else found[1]
        )  # it is a piece of an array that was cut, or the whole
    return (
        rebuilt(result, [_own(out, places, one) for one in parts_of(result)])
        if is_structure(result)
        else result
    )
