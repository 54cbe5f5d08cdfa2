"""Pickles functions without an importable name, and values of `sv.run(..., pickle=True)`.

This is the only module that pickles. `sv.run` uses it for functions of notebooks, and for arguments
and results if the caller asks for it. The bytes travel only between this process and workers that
it starts: by private descriptors and folders, the agent of `hosts=`, or Ray or Dask. Data from a
socket of a job or from a checkpoint never comes here.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import sys
from collections import ChainMap
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_loaded_main: list[Any] = []  # in a worker: the caller's __main__ as imported here


def pack_function(fn: Callable[..., Any]) -> tuple[bytes, dict[str, str]]:
    """Return a pickled function, and the source of its notebook cells by name."""
    pickler = _pickler(
        f"{getattr(fn, '__qualname__', fn)!r} cannot be found by name in a module, as functions "
        "of a notebook or inner functions: define it at the top of a file, or pip install "
        "cloudpickle"
    )
    try:
        data, places = _dumped(fn, pickler, ())
    except Exception as error:  # captured objects raise anything
        raise ConfigError(_refusal(fn, error, pickler)) from None
    cells = {cell: "".join(linecache.getlines(cell)) for cell in places if not os.path.isfile(cell)}
    return data, {cell: source for cell, source in cells.items() if source}


def unpack_function(data: bytes, cells: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function that `pack_function` of the parent process has pickled."""
    import cloudpickle

    for cell, source in cells.items():
        linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    return cast("Callable[..., Any]", cloudpickle.loads(data))


def pack_values(values: Any, label: str, main_names: Sequence[str]) -> bytes:
    """Return pickled values; `label` names them in the error.

    Classes and functions of `main_names`, the modules that are the caller's `__main__`, travel by
    name. It is empty if the other side does not import it.
    """
    pickler = _pickler("pickle=True needs the package cloudpickle: pip install cloudpickle")
    try:
        return _dumped(values, pickler, main_names)[0]
    except Exception as error:  # objects raise anything
        raise ConfigError(f"{label} cannot be pickled: {type(error).__name__}: {error}") from None


def unpack_values(data: bytes, label: str) -> Any:
    """Return the values that `pack_values` has pickled."""
    import cloudpickle

    try:
        return cloudpickle.loads(data)
    except Exception as error:  # likewise
        raise ConfigError(
            f"{label} cannot be unpickled here: {type(error).__name__}: {error}"
        ) from None


@contextlib.contextmanager
def loaded_main(namespace: Any) -> Iterator[None]:
    """Make unpickled values use the worker's import of the caller's `__main__`, if it has one."""
    _loaded_main[:] = [] if namespace is None else [namespace]
    try:
        yield
    finally:
        _loaded_main.clear()


def _refusal(fn: Any, error: Exception, pickler: Any) -> str:
    """Return which variable of a function cannot be copied, and what to do."""
    shown = repr(getattr(fn, "__qualname__", fn))
    name, value, cause = _found_culprit(fn, pickler, set()) or ("", None, error)
    if not name:
        return f"{shown} cannot be copied to the workers: {error}"
    if type(value).__module__.partition(".")[0] == "syncvar":
        return (
            f"{shown} uses {name!r}, a {type(value).__name__} that was made outside of it and "
            f"cannot be copied to the workers: make strategies and variables inside the function"
        )
    return (
        f"{shown} uses {name!r}, which cannot be copied to the workers ({type(cause).__name__}: "
        f"{cause}): make it inside the function, as strategies and variables"
    )


def _found_culprit(fn: Any, pickler: Any, seen: set[int]) -> tuple[str, Any, Exception] | None:
    """Return name, value and error of the first variable of a function that cannot be pickled."""
    seen.add(id(fn))
    for name, value in _used(fn):
        try:
            _dumped(value, pickler, ())
        except Exception as error:  # likewise
            inner = None
            if isinstance(value, FunctionType) and id(value) not in seen:
                inner = _found_culprit(value, pickler, seen)
            return inner or (name, value, error)
    return None


def _used(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function uses: of its closure, defaults and module."""
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, FunctionType):
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            yield name, cell.cell_contents
    parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    yield from zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()
    codes = [fn.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        yield from (
            (name, fn.__globals__[name]) for name in code.co_names if name in fn.__globals__
        )


def _pickler(refusal: str) -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(refusal) from None
    return cloudpickle.CloudPickler


def _of_main(name: str) -> Any:
    """Return a class or function of the caller's `__main__`, in the caller and in its workers."""
    found: Any = _loaded_main[0] if _loaded_main else sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _is_of_main(value: Any) -> bool:
    try:
        return _of_main(value.__qualname__) is value
    except AttributeError:
        return False


def _dumped(value: Any, pickler: Any, main_names: Sequence[str]) -> tuple[bytes, set[str]]:
    """Return a pickled value, and the files and cells of the functions in it."""
    reduce_code = pickler.dispatch_table[CodeType]
    places: set[str] = set()

    def reduce_with_name(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
        """Keep the name of a cell, which cloudpickle would replace by <dynamic-code>."""
        make, parts = reduce_code(code)
        places.add(code.co_filename)
        return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    class MainPickler(pickler):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap(
            {CodeType: reduce_with_name}, pickler.dispatch_table
        )

        def reducer_override(self, obj: Any) -> Any:
            has_name = isinstance(obj, type | FunctionType) and obj.__module__ in main_names
            if has_name and _is_of_main(obj):
                return _of_main, (obj.__qualname__,)
            return super().reducer_override(obj)

    file = io.BytesIO()
    MainPickler(file).dump(value)
    return file.getvalue(), places
