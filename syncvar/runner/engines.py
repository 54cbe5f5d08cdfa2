"""The engines of `sv.run` besides this machine: Ray and Dask.

`base` is the protocol, `call_parts` the messages, `engine_worker` runs in the engine's worker,
`engine_driver` is the loop, and `ray_engine` and `dask_engine` are the engines.

The ranks meet by themselves, as those of torchrun, with rank 0's address and the job's secret.
Engines carry our bytes. They pickle them, but syncvar unpickles nothing of it except the function.
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
    """Return an engine by name, or the given engine.

    Raises:
        ConfigError: The name is unknown, or packages of the engine are missing.
    """
    if isinstance(name, Engine):
        return name
    if not isinstance(name, str) or name not in _ENGINES:
        raise ConfigError(
            f"engine must be one of local, {', '.join(_ENGINES)}, or an object of sv.engines, not "
            f"{name!r:.100}"
        )
    home, class_name = _ENGINES[name]
    make: Callable[[], Engine] = getattr(importlib.import_module(home), class_name)
    return make()


def __getattr__(name: str) -> object:
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
