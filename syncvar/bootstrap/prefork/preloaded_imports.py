"""What workers are forked with: modules that were imported once, and are out of sight until a worker's script imports one.

A script may set variables, or `sys.path`, before it imports NumPy. So a forked worker begins without these modules in
`sys.modules`, as a fresh interpreter does. The first import of one of them brings back all, as they were; just then it
is looked at again what NumPy's import reads:

* how many threads its linear algebra may have: set to what a fresh OpenBLAS would take from variables and cores;
* where it lies: modules to which `sys.path` leads no longer are let go of, and the script's import finds its own;
* what it reads once (`READ_ONCE`): a warning says that a change of it came too late.
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

__all__ = ["READ_ONCE", "Preloaded", "blas_threads", "openblas", "why_not_carried"]

THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""In this order OpenBLAS looks for the number of its threads."""

READ_ONCE = re.compile(rf"\b(?!(?:{'|'.join(THREADS)})\b)(?:NPY|NUMPY|OPENBLAS)_[A-Z0-9_]+")
"""Variables that NumPy and OpenBLAS read when they are imported, and that nothing can set later."""

_LINEAR_ALGEBRA = "numpy.linalg._umath_linalg"
_SPELLINGS = [
    (prefix, suffix) for prefix in ("scipy_openblas", "openblas") for suffix in ("64_", "_64", "")
]
_PTHREADS = 1  # what openblas_get_parallel gives: 0 without threads, 2 with OpenMP


class Preloaded:
    """Modules that have been imported for others, and the finder that gives them to who asks.

    While they are imported OpenBLAS is told to have one thread, so that the process that forks has none.

    Args:
        names: What to import; whatever that imports beside the standard library belongs to it.
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
        """Take the modules out of sight; whoever imports one of them brings back all."""
        for name, module in self._modules.items():
            # Theirs from now on: an import that is under way in one thread, while another thread brings all back, would
            # otherwise take the module's own and run it again.
            module.__spec__ = spec = copy.copy(module.__spec__)
            assert spec is not None
            spec.loader = _Again(self, module, spec.loader)  # type: ignore[assignment]  # it has what the protocol asks
            parent, _, child = name.rpartition(".")
            if parent and parent not in self._modules:
                self._attributes.append((sys.modules[parent], child, module))
                delattr(sys.modules[parent], child)
            del sys.modules[name]
        self._read_once, self._path = _read_once(os.environ), list(sys.path)
        sys.meta_path.insert(0, self)

    def seed(self) -> None:
        """Let NumPy's shared generator draw anew, as in every fresh process; `random` sees to itself."""
        found: Any = self._modules.get("numpy.random", sys.modules.get("numpy.random"))
        if found is not None:
            found.seed()

    def find_spec(
        self, name: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how a module of ours is found; part of the protocol of `sys.meta_path`."""
        if name not in self._modules:
            return None
        if sys.path != self._path:
            self._path = list(sys.path)
            self._let_go()
        module = self._modules.get(name)
        return None if module is None else module.__spec__

    def bring_back(self) -> None:
        """Let all of them be found where modules are, and set what a fresh import would have found otherwise."""
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
        changed = sorted(
            name
            for name in now.keys() | self._read_once.keys()
            if now.get(name) != self._read_once.get(name)
        )
        if changed:
            warnings.warn(
                f"{', '.join(changed)} changed after NumPy had been loaded for this worker, which reads it only then: set it by "
                f"--env of syncvar-launch, or start with --start-method spawn",
                RuntimeWarning,
                stacklevel=4,
            )

    def _let_go(self) -> None:
        """Forget what `sys.path` leads to no longer, and all that may use it; NumPy itself cannot be loaded twice."""
        elsewhere = {
            name
            for name, module in self._modules.items()
            if "." not in name and _is_elsewhere(name, module)
        }
        if elsewhere:
            self._modules = {
                name: module
                for name, module in self._modules.items()
                if name.partition(".")[0] == "numpy" and "numpy" not in elsewhere
            }


class _Again:
    """The loader of a module that has been loaded already; for all other questions the one that did it."""

    def __init__(self, preloaded: Preloaded, module: ModuleType, first: Any) -> None:
        self._preloaded = preloaded
        self._module = module
        self._first = first

    def create_module(self, _spec: object) -> ModuleType:
        self._preloaded.bring_back()
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has been executed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class OpenBlas:
    """The functions of a loaded OpenBLAS.

    Args:
        library: What it is found through.
        prefix: How its names begin.
        suffix: How they end.
    """

    def __init__(self, library: ctypes.CDLL, prefix: str, suffix: str) -> None:
        self.get_num_threads, self.set_num_threads, self.get_parallel = (
            getattr(library, f"{prefix}_{name}{suffix}")
            for name in ("get_num_threads", "set_num_threads", "get_parallel")
        )


def openblas() -> OpenBlas | None:
    """Return NumPy's OpenBLAS, None where its linear algebra is another one; imports NumPy."""
    library = ctypes.CDLL(
        importlib.import_module(_LINEAR_ALGEBRA).__file__
    )  # symbols are found in what it needs, too
    for prefix, suffix in _SPELLINGS:
        with contextlib.suppress(AttributeError):
            return OpenBlas(library, prefix, suffix)
    return None


def why_not_carried() -> str:
    """Return why what a script sets before it imports NumPy may not reach a forked worker's; empty where it does."""
    functions = openblas()
    if functions is None:
        return "NumPy's linear algebra is not OpenBLAS, and what a script sets for it could not be set later"
    if functions.get_parallel() > _PTHREADS:
        return "NumPy's OpenBLAS has threads of OpenMP, and what a script sets for them could not be set later"
    return ""


def blas_threads(environ: Mapping[str, str], cores: int) -> int:
    """Return how many threads OpenBLAS takes when it is loaded.

    Args:
        environ: The variables of the process.
        cores: How many it may use.

    Example:
        >>> blas_threads({"OMP_NUM_THREADS": "2"}, 4), blas_threads({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "8"}, 4)
        (2, 4)
    """
    for name in THREADS:
        found = re.match(r"\s*\+?(\d+)", environ.get(name, ""))  # as atoi reads it
        if found and int(found[1]) > 0:
            return min(int(found[1]), cores)
    return cores


def _read_once(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if READ_ONCE.fullmatch(name)}


def _is_elsewhere(name: str, module: ModuleType) -> bool:
    found = importlib.machinery.PathFinder.find_spec(name)
    return (
        found is not None and module.__spec__ is not None and found.origin != module.__spec__.origin
    )


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
