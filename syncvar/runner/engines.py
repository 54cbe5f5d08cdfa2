"""The engines that `sv.run` starts ranks on, besides this machine: Ray and Dask.

An engine answers four questions, and nothing else differs between them: where are N places for one rank each, how does a
rank's part get there, which ranks have ended and how, how are the rest ended (`base.Engine`, one class for each engine).

* `part`: what a rank is given (who it is, the call, the settings) and what comes back, as bytes; who is which rank. Pure.
* `place`: what runs in the engine's worker: tell about the place, then be a rank there for one call.
* `driving`: start, wait, weigh failures, end the others, start again. The same for every engine.
* `ray_engine`, `dask_engine`: the engines.

The ranks meet by themselves, as those that torchrun starts: each is told rank, sizes, rank 0's address and the job's secret.
What engines carry is bytes of ours; they pickle them, and nothing of them is unpickled by us but the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError
from syncvar.runner.base import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Engine", "engine_of"]

_ENGINES = {
    "ray": ("syncvar.runner.ray_engine", "Ray"),
    "dask": ("syncvar.runner.dask_engine", "Dask"),
}
_CLASSES = {name: home for home, name in _ENGINES.values()}


def engine_of(name: str | Engine) -> Engine:
    """Return an engine by its name, or the one that is given.

    Raises:
        ConfigError: There is none of this name, or its packages are not installed.
    """
    if isinstance(name, Engine):
        return name
    if not isinstance(name, str) or name not in _ENGINES:
        raise ConfigError(
            f"engine must be one of local, {', '.join(_ENGINES)}, or an object of sv.engines, not {name!r:.100}"
        )
    home, kind = _ENGINES[name]
    make: Callable[[], Engine] = getattr(importlib.import_module(home), kind)
    return make()


def __getattr__(name: str) -> object:
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
