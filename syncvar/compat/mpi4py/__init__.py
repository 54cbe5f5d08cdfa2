"""Run mpi4py programs on syncvar, without an MPI library.

`from syncvar.compat.mpi4py import MPI` takes the place of `from mpi4py import MPI`. An unchanged
program runs by `syncvar-launch --workers 4 -m syncvar.compat.mpi4py script.py`.

Example:
    >>> from syncvar.compat.mpi4py import MPI
    >>> MPI.COMM_WORLD.allreduce(2)
    2
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "4.1.0"  # of mpi4py, whose interface this is
_NAMESPACE = "syncvar.compat.mpi4py.mpi_namespace"


class RuntimeSettings:
    """`mpi4py.rc`: settings that a program may change before it imports MPI.

    The layer reads none of them.
    """

    def __init__(self) -> None:
        self.initialize = self.threads = True
        self.thread_level = "multiple"
        self.finalize: bool | None = None
        self.fast_reduce = self.recv_mprobe = True
        self.irecv_bufsz = 32768
        self.errors = "exception"

    def __call__(self, **settings: Any) -> None:
        """Change several settings."""
        for name, value in settings.items():
            if name not in self.__dict__:
                raise TypeError(f"unexpected argument {name!r}")
            setattr(self, name, value)


rc = RuntimeSettings()


def get_config() -> dict[str, str]:
    """Return an empty dict: no MPI library has been used to build this."""
    return {}


def __getattr__(name: str) -> Any:
    if name == "MPI":
        return importlib.import_module(_NAMESPACE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Let `import mpi4py` mean this layer from now on, in this process."""
    namespace = importlib.import_module(_NAMESPACE)
    datatypes = importlib.import_module("syncvar.compat.mpi4py.mpi_datatypes")
    dtlib = ModuleType("mpi4py.util.dtlib")
    dtlib.from_numpy_dtype = datatypes.from_numpy_dtype  # type: ignore[attr-defined]
    dtlib.to_numpy_dtype = datatypes.to_numpy_dtype  # type: ignore[attr-defined]
    util = ModuleType("mpi4py.util")
    util.dtlib = dtlib  # type: ignore[attr-defined]
    util.__path__ = []
    for module in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        del sys.modules[module]
    sys.modules["mpi4py"] = sys.modules[__name__]
    sys.modules["mpi4py.MPI"] = namespace
    sys.modules["mpi4py.util"] = util
    sys.modules["mpi4py.util.dtlib"] = dtlib
