"""What an engine has to do: find places, hand out parts, tell of ends, end the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Engine"]


@runtime_checkable
class Engine(Protocol):
    """Where ranks run. `driving.drive` calls the methods in this order; `gather` to `end` once for each start.

    Places are numbered from 0 in the order in which `gather` returns them. Each is a process of its own.
    """

    def gather(self, workers: int, timeout_s: float) -> Sequence[bytes]:
        """Take a place for each of so many ranks, and return what `place.arrive` says there.

        Args:
            workers: How many places.
            timeout_s: Longest wait for all of them, in seconds.

        Raises:
            LaunchError: There are not as many; what there is, and what to do, is told.
        """

    def begin(self, parts: Sequence[bytes]) -> None:
        """Run `place.play` with a part at each place, all at once."""

    def ended(self, timeout_s: float) -> Mapping[int, bytes | str]:
        """Wait until something has ended that was not told of before, but no longer than this.

        Returns:
            For each place what `place.play` returned there; or in words why its process is gone.
        """

    def end(self, grace_s: float) -> None:
        """End what still runs and give the places back. Idempotent.

        Args:
            grace_s: Where ranks can be asked to end, how long until they are killed, in seconds.
        """

    def close(self) -> None:
        """Let go of the engine; end it if it was started here. Idempotent."""
