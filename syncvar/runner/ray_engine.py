"""Ranks as actors of Ray, one in each bundle of a placement group."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError, LaunchError

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    ray = None  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NEVER_S = 1e6  # Ray rejects an infinite limit


class Actor:
    """Process of a rank. Ray calls its methods one after the other, in its main thread."""

    def arrive(self) -> bytes:
        """Return a packed description of this place."""
        from syncvar.runner.remote_call import arrive

        return arrive(ray.util.get_node_ip_address())

    def play(self, part: bytes) -> bytes:
        """Act as a rank for one call."""
        from syncvar.runner.remote_call import play

        return play(part)


class Ray:
    """Ray as an engine of `sv.run`.

    The cluster is the one that this program is connected to, or that RAY_ADDRESS or this host has.
    Without one, a cluster on this host starts for the time of the call.

    Args:
        cpus: Logical CPUs to reserve for each rank.
        resources: Other resources to reserve for each rank, as {"name": amount}.
        strategy: Placement of ranks on hosts: "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD".

    Raises:
        ConfigError: Ray is not installed, or an argument is wrong.

    Example:
        >>> import syncvar as sv
        >>> engine = sv.engines.Ray(cpus=4, strategy="SPREAD")  # doctest: +SKIP
        >>> results = sv.run(train, workers=8, engine=engine)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
    ) -> None:
        if ray is None:
            raise ConfigError(
                "engine='ray' needs Ray: pip install ray cloudpickle, here and on the hosts of "
                "the cluster"
            )
        if isinstance(cpus, bool) or not isinstance(cpus, int | float) or not 0 < cpus < 1e6:
            raise ConfigError(f"cpus must be a number above 0, not {cpus!r:.100}")
        if strategy not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
            raise ConfigError(
                "strategy must be PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, not "
                f"{strategy!r:.100}"
            )
        self._bundle: dict[str, float] = {"CPU": cpus, **(resources or {})}
        self._strategy = strategy
        self._group: Any = None
        self._actors: list[Any] = []
        self._plays: dict[Any, int] = {}  # future of a place -> its number
        self._is_own = False

    def gather(self, workers: int, timeout_s: float) -> Sequence[bytes]:
        """Reserve a placement group and start an actor in each of its bundles."""
        until = time.monotonic() + min(timeout_s, _NEVER_S)
        self._connect(workers)
        self._group = placement_group(
            [dict(self._bundle) for _ in range(workers)], strategy=self._strategy
        )
        if not self._group.wait(min(timeout_s, _NEVER_S)):
            raise LaunchError(
                f"Ray has not had room for {workers} ranks, each with {self._bundle}, within "
                f"{timeout_s:g} s: the cluster has {_shown(ray.cluster_resources())}, of which "
                f"{_shown(ray.available_resources())} are free; add hosts to it, or ask for less "
                "(workers=, or engine=sv.engines.Ray(cpus=0.5))"
            )
        self._actors = [
            ray.remote(Actor)
            .options(
                num_cpus=self._bundle["CPU"],
                resources={name: amount for name, amount in self._bundle.items() if name != "CPU"},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=number
                ),
            )
            .remote()
            for number in range(workers)
        ]
        try:
            places: list[bytes] = ray.get(
                [actor.arrive.remote() for actor in self._actors],
                timeout=max(1.0, until - time.monotonic()),
            )
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"Ray has room for {workers} ranks, and has not started all within {timeout_s:g} "
                "s (SYNCVAR_RENDEZVOUS_TIMEOUT_S)"
            ) from None
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"Ray could not start all {workers} ranks: {error}; do all hosts of the cluster "
                "have this version of syncvar?"
            ) from error
        return places

    def begin(self, parts: Sequence[bytes]) -> None:
        """Send each actor its part."""
        self._plays = {
            actor.play.remote(part): number
            for number, (actor, part) in enumerate(zip(self._actors, parts, strict=True))
        }

    def ended(self, timeout_s: float) -> Mapping[int, bytes | str]:
        """Wait for an actor's answer or death."""
        done, _ = ray.wait(list(self._plays), timeout=timeout_s)
        return {self._plays.pop(one): _answer(one) for one in done}

    def end(self, grace_s: float) -> None:
        """Kill the actors; those that can end by themselves have had their time."""
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._plays, self._group = [], {}, None

    def close(self) -> None:
        """Stop the cluster that was started here."""
        if self._is_own:
            self._is_own = False
            ray.shutdown()

    def _connect(self, workers: int) -> None:
        if ray.is_initialized():
            return
        try:
            ray.init(address="auto")
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):
                raise LaunchError(
                    f"no cluster of Ray answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
                ) from None
            cpus = workers * self._bundle["CPU"]
            ray.init(num_cpus=max(int(-(-cpus // 1)), os.cpu_count() or 1), include_dashboard=False)
        self._is_own = True


def _answer(reference: Any) -> bytes | str:
    try:
        answer: bytes = ray.get(reference)
    except ray.exceptions.RayError as error:
        return f"its actor is gone: {error}"
    return answer


def _shown(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(
            f"{name} {amount:g}"
            for name, amount in sorted(resources.items())
            if ":" not in name and "memory" not in name
        )
        or "nothing"
    )
