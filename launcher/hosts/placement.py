"""The number of workers of each host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class HostCapacity(NamedTuple):
    """The slots of a host.

    Args:
        name: The name for messages.
        slots: The slots, at least 1.
        max_slots: The limit when all slots of all hosts are taken; None for `slots`.
    """

    name: str
    slots: int
    max_slots: int | None = None


def place_workers(
    rooms: Sequence[HostCapacity], workers: int | None, map_by: str = "slot"
) -> tuple[int, ...]:
    """Return the number of workers of each host; 0 for a host without any.

    Ranks are numbered host by host, so those of one host are neighbours.

    Args:
        rooms: The hosts in their order.
        workers: The number of workers; None for all slots.
        map_by: "slot" fills a host before the next one. "host" gives each one worker in turn.

    Example:
        >>> two = [HostCapacity("a", 4), HostCapacity("b", 4)]
        >>> place_workers(two, 5), place_workers(two, 5, "host")
        ((4, 1), (3, 2))
    """
    if workers is None:
        return tuple(one.slots for one in rooms)
    soft = sum(one.slots for one in rooms)
    most = [max(one.slots, one.max_slots or 0) for one in rooms]
    if workers > sum(most):
        there = ", ".join(f"{one.name} {limit}" for one, limit in zip(rooms, most, strict=True))
        raise ConfigError(
            f"{workers} workers have no place: the hosts have {sum(most)} slots ({there}); "
            f"write --workers {sum(most)}, or give a host more: name:N in -H, "
            "slots=N or max_slots=N in a host file"
        )
    limits = [one.slots for one in rooms]
    given = _dealt(limits, min(workers, soft), map_by)
    if workers > soft:
        more = _dealt(
            [limit - slots for limit, slots in zip(most, limits, strict=True)],
            workers - soft,
            map_by,
        )
        given = [first + second for first, second in zip(given, more, strict=True)]
    return tuple(given)


def _dealt(limits: Sequence[int], workers: int, map_by: str) -> list[int]:
    given = [0] * len(limits)
    while workers:
        for index, limit in enumerate(limits):
            share = min(limit - given[index], workers if map_by == "slot" else 1, workers)
            given[index] += share
            workers -= share
    return given
