"""Placement of ranks on hosts: consecutive ranks, host after host."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def split_evenly(workers: int, hosts: int) -> tuple[int, ...]:
    """Return the ranks per host when `workers` are spread evenly; the first hosts get one more.

    Raises:
        ConfigError: There are fewer workers than hosts.
    """
    if not 1 <= hosts <= workers:
        raise ConfigError(
            f"{workers} workers cannot be divided over {hosts} hosts: each host needs at least one"
        )
    each, more = divmod(workers, hosts)
    return tuple(each + (host < more) for host in range(hosts))


class HostMap(NamedTuple):
    """The hosts of a world.

    Args:
        sizes: Number of ranks on each host, in host order; rank 0 is the first of host 0.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of_places(cls, places: Mapping[int, int]) -> HostMap:
        """Return the map for `places`, the host index of each rank.

        Raises:
            ConfigError: The ranks of a host are not consecutive, or hosts are out of order.
        """
        sizes: list[int] = []
        for rank in range(len(places)):
            host = places.get(rank, -1)
            if host == len(sizes):
                sizes.append(0)
            elif host < 0 or host != len(sizes) - 1:
                expected = f"{max(0, len(sizes) - 1)} or {len(sizes)}"
                raise ConfigError(
                    f"rank {rank} is on host {host}, but ranks are numbered host by host, so host "
                    f"{expected} was expected (SYNCVAR_HOST_INDEX)"
                )
            sizes[host] += 1
        return cls(tuple(sizes))

    @property
    def starts(self) -> tuple[int, ...]:
        """First rank of each host."""
        return (0, *accumulate(self.sizes[:-1]))

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return max(host for host, start in enumerate(self.starts) if start <= rank)

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        start = self.starts[host]
        return tuple(range(start, start + self.sizes[host]))

    def local_rank(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its host."""
        return rank - self.starts[self.host_of(rank)]

    def blocks(self, members: Sequence[int]) -> tuple[int, ...] | None:
        """Return the sizes of runs of consecutive members on one host, in group order.

        None if the members of a host are not consecutive in the group.

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
