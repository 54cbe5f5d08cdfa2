"""Functions that cannot be found by name, as bytes: the only place that pickles.

`sv.run` uses it for functions of notebooks and interactive sessions. The bytes go to worker processes that this very
process starts, through an inherited descriptor without a name; or, with `engine=`, through Ray or Dask to workers of the
user's own cluster, which get all their functions pickled. Nothing that comes from a socket or a file of ours ever gets here.
"""

from __future__ import annotations

import io
import linecache
import os
from collections import ChainMap
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from syncvar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["pack_function", "unpack_function"]


def pack_function(fn: Callable[..., Any]) -> tuple[bytes, dict[str, str]]:
    """Return a function as bytes, and the source of its cells by their names.

    Raises:
        ConfigError: The package cloudpickle is missing, or the function holds something that cannot be copied.
    """
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)!r} cannot be found by name in a module, as functions of a notebook or "
            f"inner functions: define it at the top of a file, or pip install cloudpickle"
        ) from None
    try:
        data, places = _dumped(fn, cloudpickle.CloudPickler)
    except Exception as error:  # cloudpickle raises whatever the captured objects raise
        raise ConfigError(f"{getattr(fn, '__qualname__', fn)!r} cannot be copied to the workers: {error}") from None
    cells = {place: "".join(linecache.getlines(place)) for place in places if not os.path.isfile(place)}
    return data, {place: source for place, source in cells.items() if source}


def unpack_function(data: bytes, cells: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function that `pack_function` of the parent process made into `data`.

    Args:
        data: The function.
        cells: The source of its cells, which tracebacks show.
    """
    import cloudpickle

    for place, source in cells.items():
        linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    return cast("Callable[..., Any]", cloudpickle.loads(data))


def _dumped(value: Any, pickler: Any) -> tuple[bytes, set[str]]:
    """Return a value as bytes, and the files and cells of the functions in it."""
    reduce_code = pickler.dispatch_table[CodeType]
    places: set[str] = set()

    def reduce_with_place(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
        """Keep the name of a cell: cloudpickle writes <dynamic-code>, so that equal code is equal bytes."""
        make, parts = reduce_code(code)
        places.add(code.co_filename)
        return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    class PlacedPickler(pickler):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap(
            {CodeType: reduce_with_place}, pickler.dispatch_table
        )

    file = io.BytesIO()
    PlacedPickler(file).dump(value)
    return file.getvalue(), places
