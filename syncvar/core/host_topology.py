"""Which ranks are on which host: consecutive ranks, host after host."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def divided(workers: int, hosts: int) -> tuple[int, ...]:
    """Divide ranks over hosts as evenly as possible; the first hosts get one more.

    Args:
        workers: Ranks, at least one for each host.
        hosts: How many hosts, at least 1.

    Raises:
        ConfigError: There are fewer ranks than hosts.

    Example:
        >>> divided(5, 2)
        (3, 2)
    """
    if not 1 <= hosts <= workers:
        raise ConfigError(
            f"{workers} workers cannot be divided over {hosts} hosts: each host needs a worker at least"
        )
    each, more = divmod(workers, hosts)
    return tuple(each + (host < more) for host in range(hosts))


class HostMap(NamedTuple):
    """The hosts of a world.

    Args:
        sizes: How many ranks each host has, in the order of the hosts; rank 0 is the first of host 0.

    Example:
        >>> hosts = HostMap((3, 2))
        >>> hosts.host_of(3), hosts.ranks(1), hosts.local_rank(4)
        (1, (3, 4), 1)
    """

    sizes: tuple[int, ...]

    @classmethod
    def of_places(cls, places: Mapping[int, int]) -> HostMap:
        """Make the map of a world from the host of each rank.

        Args:
            places: rank -> index of its host, for all ranks.

        Raises:
            ConfigError: The ranks of a host do not follow each other, or the hosts are not in the order of their ranks.

        Example:
            >>> HostMap.of_places({0: 0, 1: 0, 2: 1})
            HostMap(sizes=(2, 1))
        """
        sizes: list[int] = []
        for rank in range(len(places)):
            host = places.get(rank, -1)
            if host == len(sizes):
                sizes.append(0)
            elif host < 0 or host != len(sizes) - 1:
                raise ConfigError(
                    f"rank {rank} says that it is on host {host}: ranks are numbered host by host, so host "
                    f"{max(0, len(sizes) - 1)} or {len(sizes)} was expected (SYNCVAR_HOST_INDEX)"
                )
            sizes[host] += 1
        return cls(tuple(sizes))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return (0, *accumulate(self.sizes[:-1]))

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return max(host for host, start in enumerate(self.starts) if start <= rank)

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        start = self.starts[host]
        return tuple(range(start, start + self.sizes[host]))

    def local_rank(self, rank: int) -> int:
        """Return the place of a rank among those of its host."""
        return rank - self.starts[self.host_of(rank)]

    def blocks(self, members: Sequence[int]) -> tuple[int, ...] | None:
        """Return how many ranks of a group are on each host in turn, in the group's order.

        Args:
            members: Ranks of the world, in the group's order.

        Returns:
            The sizes of the blocks; None where the ranks of one host do not follow each other in the group.

        Example:
            >>> HostMap((2, 2)).blocks((2, 3, 1)), HostMap((2, 2)).blocks((0, 2, 1))
            ((2, 1), None)
        """
        order: list[int] = []
        sizes: list[int] = []
        for member in members:
            host = self.host_of(member)
            if not order or host != order[-1]:
                if host in order:
                    return None
                order.append(host)
                sizes.append(0)
            sizes[-1] += 1
        return tuple(sizes)
