"""Numbers and names of a job's processes: ranks run the program, servers hold variables for them.

The launcher numbers both together: a rank has its rank, server `i` has `SERVER_0 + i`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVING = "serving"  # state of a server that has started
SERVER_0 = 1 << 16  # number of the first server; the number of ranks is smaller


def server_number(server: int) -> int:
    """Return the process number of a server."""
    return SERVER_0 + server


def is_server(number: int) -> bool:
    """Return whether a process number belongs to a server."""
    return number >= SERVER_0


def process_name(number: int) -> str:
    """Return the name of a process, "rank 3" or "server 0"."""
    return f"server {number - SERVER_0}" if is_server(number) else f"rank {number}"


def short_name(number: int) -> str:
    """Return the prefix of a process's output lines."""
    return process_name(number) if is_server(number) else str(number)


def server_hosts(servers: int, hosts: int) -> tuple[int, ...]:
    """Return the host index of each server, round-robin."""
    return tuple(server % hosts for server in range(servers))


def failover_order(server: int, hosts: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Return the servers that can replace a server, in failover order; () without replicas.

    They are those that follow it, with those of other hosts first, because a failed host takes
    all its servers along. `hosts` is the host of each server.

    Example:
        >>> failover_order(1, (0, 0, 0), 1), failover_order(0, (0, 0, 1, 1), 1)
        ((2, 0), (2, 3, 1))
    """
    following = [(server + step) % len(hosts) for step in range(1, len(hosts))]
    following.sort(key=lambda other: hosts[other] == hosts[server])  # stable
    return tuple(following if replicas else ())


def replica_holders(server: int, hosts: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Return the servers that hold replicas of a server's state while all live: its first heirs."""
    return failover_order(server, hosts, replicas)[:replicas]
