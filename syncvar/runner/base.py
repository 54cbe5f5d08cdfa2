"""The protocol of engines that run ranks: Ray and Dask implement it, `engine_driver` calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
