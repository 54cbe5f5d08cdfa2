"""The engines of `sv.run` besides this machine: Ray and Dask.

`Engine` is the protocol, `call_parts` the messages, `engine_worker` runs in the engine's worker,
`engine_driver` is the loop, and `ray_engine` and `dask_engine` are the engines.

The ranks meet by themselves, as those of torchrun, with rank 0's address and the job's secret.
Engines carry our bytes. They pickle them, but syncvar unpickles nothing of it except the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Engine", "engine_of"]

_ENGINES = {
    "ray": ("syncvar.runner.ray_engine", "Ray"),
    "dask": ("syncvar.runner.dask_engine", "Dask"),
}
_CLASSES = {name: home for home, name in _ENGINES.values()}


@runtime_checkable
class Engine(Protocol):
    """A place where ranks run. `engine_driver.drive` calls the methods in this order.

    Places are numbered from 0 in the order of `gather`; each is a process of its own. `gather` to
    `end` run once for each start.
    """

    def gather(self, workers: int, timeout_s: float) -> Sequence[bytes]:
        """Reserve one place per rank, and return what `engine_worker.arrive` returns in each.

        Raises:
            LaunchError: There are too few places; the message says how many, and what to do.
        """

    def begin(self, parts: Sequence[bytes]) -> None:
        """Run `engine_worker.play` with a part in each place, all at once."""

    def ended(self, timeout_s: float) -> Mapping[int, bytes | str]:
        """Wait until a place has ended that was not reported before.

        Returns:
            For each ended place, the result of `engine_worker.play`, or a text that says why its
            process is gone.
        """

    def end(self, grace_s: float) -> None:
        """Terminate what still runs, and release the places. Idempotent.

        Args:
            grace_s: Time until ranks that were asked to end are killed, in seconds.
        """

    def close(self) -> None:
        """Release the engine, and stop its cluster if it was started here. Idempotent."""


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
