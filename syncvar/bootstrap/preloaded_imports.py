"""Preloaded modules of forked workers, hidden until a worker's script imports one of them.

A script may set variables or `sys.path` before it imports NumPy. So a forked worker starts without
these modules in `sys.modules`. The first import of one of them restores all. Then three things that
NumPy's import reads are checked again:

* The number of OpenBLAS threads: set as a fresh OpenBLAS would choose it.
* The location: modules that `sys.path` no longer leads to are dropped, and imported normally.
* Variables that NumPy reads once (`READ_ONCE`): a warning says that a change came too late.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import importlib.machinery
import os
import re
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

# Variables with the number of OpenBLAS threads, in its order.
THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Variables that NumPy and OpenBLAS read at import; nothing can change them later.
READ_ONCE = re.compile(rf"\b(?!(?:{'|'.join(THREADS)})\b)(?:NPY|NUMPY|OPENBLAS)_[A-Z0-9_]+")

_LINEAR_ALGEBRA = "numpy.linalg._umath_linalg"
_SPELLINGS = [
    (prefix, suffix) for prefix in ("scipy_openblas", "openblas") for suffix in ("64_", "_64", "")
]
_PTHREADS = 1  # openblas_get_parallel: 0 without threads, 2 with OpenMP


class Preloaded:
    """Imported modules, and the finder that gives them to the first import.

    What the named modules import outside the standard library belongs to them. While importing,
    OpenBLAS has one thread, so that the forking process has none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        there = set(sys.modules)
        with _one_thread():
            for name in names:
                importlib.import_module(name)
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in there
            and name.partition(".")[0] not in sys.stdlib_module_names
            and getattr(module, "__spec__", None)
        }
        self._attributes: list[tuple[ModuleType, str, ModuleType]] = []
        self._read_once: dict[str, str] = {}
        self._path: list[str] = []
        self._lock = threading.Lock()

    def hide(self) -> None:
        """Remove the modules from `sys.modules`; the first import of one restores all."""
        for name, module in self._modules.items():
            # Own copies of the specs: an import under way in one thread, while another thread
            # restores all, would otherwise execute the module again.
            module.__spec__ = spec = copy.copy(module.__spec__)
            assert spec is not None
            spec.loader = _LoaderOfLoaded(self, module, spec.loader)  # type: ignore[assignment]  # it has what the protocol asks
            parent, _, child = name.rpartition(".")
            if parent and parent not in self._modules:
                self._attributes.append((sys.modules[parent], child, module))
                delattr(sys.modules[parent], child)
            del sys.modules[name]
        self._read_once, self._path = _read_once(os.environ), list(sys.path)
        sys.meta_path.insert(0, self)

    def seed(self) -> None:
        """Reseed NumPy's shared generator, as in every fresh process; `random` does so itself."""
        found: Any = self._modules.get("numpy.random", sys.modules.get("numpy.random"))
        if found is not None:
            found.seed()

    def find_spec(
        self, name: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a preloaded module; part of the protocol of `sys.meta_path`."""
        if name not in self._modules:
            return None
        if sys.path != self._path:
            self._path = list(sys.path)
            self._drop_moved()
        module = self._modules.get(name)
        return None if module is None else module.__spec__

    def restore(self) -> None:
        """Restore the modules in `sys.modules`, and update what a fresh import would have read."""
        with self._lock:
            if self not in sys.meta_path:
                return
            for name, module in self._modules.items():
                sys.modules.setdefault(name, module)
            for parent, child, module in self._attributes:
                if sys.modules.get(f"{parent.__name__}.{child}") is module:
                    setattr(parent, child, module)
            sys.meta_path.remove(self)
            if "numpy" in self._modules:
                self._set_up_numpy()

    def _set_up_numpy(self) -> None:
        functions = openblas()
        if functions is not None:
            wanted = blas_threads(os.environ, len(os.sched_getaffinity(0)))
            if wanted != functions.get_num_threads():
                functions.set_num_threads(wanted)
        now = _read_once(os.environ)
        before = self._read_once
        changed = sorted(
            name for name in now.keys() | before.keys() if now.get(name) != before.get(name)
        )
        if changed:
            warnings.warn(
                f"{', '.join(changed)} changed after NumPy had been loaded for this worker, which "
                "reads it only then: set it by --env of syncvar-launch, or start with "
                "--start-method spawn",
                RuntimeWarning,
                stacklevel=4,
            )

    def _drop_moved(self) -> None:
        """Drop all modules if one has moved; NumPy stays unless it has moved itself."""
        modules = self._modules.items()
        moved = {name for name, module in modules if "." not in name and _is_moved(name, module)}
        if moved:
            self._modules = {
                name: module
                for name, module in modules
                if name.partition(".")[0] == "numpy" and "numpy" not in moved
            }


class _LoaderOfLoaded:
    """Loader of a loaded module; other attributes are those of the original loader."""

    def __init__(self, preloaded: Preloaded, module: ModuleType, first: Any) -> None:
        self._preloaded = preloaded
        self._module = module
        self._first = first

    def create_module(self, _spec: object) -> ModuleType:
        self._preloaded.restore()
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class OpenBlas:
    """The functions of a loaded OpenBLAS."""

    def __init__(self, library: ctypes.CDLL, prefix: str, suffix: str) -> None:
        self.get_num_threads, self.set_num_threads, self.get_parallel = (
            getattr(library, f"{prefix}_{name}{suffix}")
            for name in ("get_num_threads", "set_num_threads", "get_parallel")
        )


def openblas() -> OpenBlas | None:
    """Return NumPy's OpenBLAS; None for another library. Imports NumPy."""
    # Finds symbols of its dependencies too.
    library = ctypes.CDLL(importlib.import_module(_LINEAR_ALGEBRA).__file__)
    for prefix, suffix in _SPELLINGS:
        with contextlib.suppress(AttributeError):
            return OpenBlas(library, prefix, suffix)
    return None


def unsupported_blas_reason() -> str:
    """Return why a script's settings for linear algebra cannot reach a forked worker, or ""."""
    functions = openblas()
    if functions is None:
        return (
            "NumPy's linear algebra is not OpenBLAS, and what a script sets for it could not be "
            "set later"
        )
    if functions.get_parallel() > _PTHREADS:
        return (
            "NumPy's OpenBLAS has threads of OpenMP, and what a script sets for them could not "
            "be set later"
        )
    return ""


def blas_threads(environ: Mapping[str, str], cores: int) -> int:
    """Return the number of threads that OpenBLAS chooses when it is loaded.

    Example:
        >>> blas_threads({"OMP_NUM_THREADS": "2"}, 4)
        2
        >>> blas_threads({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "8"}, 4)
        4
    """
    for name in THREADS:
        found = re.match(r"\s*\+?(\d+)", environ.get(name, ""))  # parsed as by atoi
        if found and int(found[1]) > 0:
            return min(int(found[1]), cores)
    return cores


def _read_once(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if READ_ONCE.fullmatch(name)}


def _is_moved(name: str, module: ModuleType) -> bool:
    found, spec = importlib.machinery.PathFinder.find_spec(name), module.__spec__
    return found is not None and spec is not None and found.origin != spec.origin


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get(THREADS[0])
    os.environ[THREADS[0]] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS[0]]
        else:
            os.environ[THREADS[0]] = before
