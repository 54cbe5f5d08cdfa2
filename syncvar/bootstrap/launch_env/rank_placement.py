"""Where a rank is among the hosts, from what is known of all of them: ranks are numbered host by host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from syncvar.bootstrap.launch_env.base import LaunchInfo

__all__ = ["evenly_placed", "host_of_each", "placed"]

_NAMED = 8


def placed(
    told: LaunchInfo, hosts: Sequence[Hashable], names: Sequence[str], remedy: str
) -> LaunchInfo:
    """Return what is told, with the place of its rank.

    Args:
        told: Of a rank.
        hosts: What tells the host of each rank from the others.
        names: The host of each rank, for messages.
        remedy: What to write where the ranks are in another order.

    Raises:
        ConfigError: The ranks of a host do not follow each other.
    """
    order = list(dict.fromkeys(hosts))
    places = [order.index(one) for one in hosts]
    if places != sorted(places):
        raise ConfigError(
            f"{told.source}: {len(order)} hosts have the ranks in turns, so that those of a host do not follow each other: ranks 0, 1, … are on "
            f"{', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''}. {remedy}"
        )
    place = places[told.rank]
    return told._replace(
        local_rank=told.rank - places.index(place),
        local_world_size=places.count(place),
        host_index=place,
        host_count=len(order),
    )


def evenly_placed(told: LaunchInfo) -> LaunchInfo:
    """Return what is told, with its host's index and the number of hosts, where only its host's ranks are known.

    Raises:
        ConfigError: Hosts of as many ranks, in order, do not make up the world.
    """
    if told.host_index >= 0:
        return told
    first, each = told.rank - told.local_rank, told.local_world_size
    if not each or first % each or told.world_size % each:
        raise ConfigError(
            f"{told.source}: {each} of {told.world_size} ranks are on this host, the first is rank {first}, and nobody says how many are on the "
            f"others; give each host as many, in order, or unset MASTER_PORT: the ranks meet in a folder that all hosts have"
        )
    return told._replace(host_index=first // each, host_count=told.world_size // each)


def host_of_each(mapping: str, size: int) -> list[int]:
    """Return the host of each rank from PMI's mapping of processes: blocks of (first host, hosts, ranks on each).

    Args:
        mapping: For instance "(vector,(0,2,4))"; the blocks are gone through again and again until all ranks have a host.
        size: Ranks in the world.

    Raises:
        RendezvousError: It is no such text.

    Example:
        >>> host_of_each("(vector,(0,1,2),(1,1,1))", 3)
        [0, 0, 1]
    """
    try:
        head, *rest = mapping.replace("(", " ").replace(")", " ").replace(",", " ").split()
        numbers = [int(one) for one in rest]
        blocks = [numbers[index : index + 3] for index in range(0, len(numbers), 3)]
        turn = [
            host
            for first, hosts, each in blocks
            for host in range(first, first + hosts)
            for _ in range(each)
        ]
        if head != "vector" or not turn:
            raise ValueError
    except ValueError:
        raise RendezvousError(
            f"the process manager's mapping of ranks to hosts, {mapping!r}, cannot be understood"
        ) from None
    return [turn[rank % len(turn)] for rank in range(size)]
