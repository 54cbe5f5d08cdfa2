"""Functions that cannot be found by name, as bytes: the only place that pickles.

`sv.run` uses it for functions of notebooks and interactive sessions. The bytes go to worker processes that this very
process starts, through an inherited descriptor without a name; or, with `engine=`, through Ray or Dask to workers of the
user's own cluster, which get all their functions pickled. Nothing that comes from a socket or a file of ours ever gets here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from syncvar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pack_function", "unpack_function"]


def pack_function(fn: Callable[..., Any]) -> bytes:
    """Return a function as bytes.

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
        return cast("bytes", cloudpickle.dumps(fn))
    except Exception as error:  # cloudpickle raises whatever the captured objects raise
        raise ConfigError(f"{getattr(fn, '__qualname__', fn)!r} cannot be copied to the workers: {error}") from error


def unpack_function(data: bytes) -> Callable[..., Any]:
    """Return the function that `pack_function` of the parent process made into `data`."""
    import cloudpickle

    return cast("Callable[..., Any]", cloudpickle.loads(data))
