"""Host index and local rank of a rank, from the hosts of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from syncvar.bootstrap.launch_env.base import LaunchInfo

_NAMED = 8


def add_host(
    info: LaunchInfo, hosts: Sequence[Hashable], names: Sequence[str], remedy: str
) -> LaunchInfo:
    """Add the host and local rank to an identity.

    Raises:
        ConfigError: The ranks of a host do not follow each other.
    """
    order = list(dict.fromkeys(hosts))
    places = [order.index(one) for one in hosts]
    if places != sorted(places):
        raise ConfigError(
            f"{info.source}: the ranks alternate between {len(order)} hosts, but must be numbered "
            "host by host: ranks 0, 1, … are on "
            f"{', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''}. {remedy}"
        )
    index = places[info.rank]
    return info._replace(
        local_rank=info.rank - places.index(index),
        local_world_size=places.count(index),
        host_index=index,
        host_count=len(order),
    )


def assume_equal_hosts(info: LaunchInfo) -> LaunchInfo:
    """Add the host's index and the number of hosts to an identity, assuming equal hosts.

    Raises:
        ConfigError: Equal hosts, in order, do not make up the world.
    """
    if info.host_index >= 0:
        return info
    first, each = info.rank - info.local_rank, info.local_world_size
    if not each or first % each or info.world_size % each:
        raise ConfigError(
            f"{info.source}: {each} of {info.world_size} ranks are on this host, the first is "
            f"rank {first}, and nobody says how many are on the others; give each host as many, "
            "in order, or unset MASTER_PORT: the ranks meet in a folder that all hosts have"
        )
    return info._replace(host_index=first // each, host_count=info.world_size // each)


def host_of_each(mapping: str, size: int) -> list[int]:
    """Return the host of each rank from PMI_process_mapping.

    Blocks of (first host, hosts, ranks on each).

    Args:
        mapping: For instance "(vector,(0,2,4))"; the blocks repeat until all ranks have a host.
        size: Ranks in the world.

    Raises:
        RendezvousError: The mapping cannot be parsed.

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
