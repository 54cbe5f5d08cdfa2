"""What the processes of a job are: ranks, which run the program, and servers, which hold variables for them.

Both have numbers in one row, by which the launcher starts, watches and names them: a rank's is its rank, which is below
`SERVER_0`, and that of server `i` is `SERVER_0 + i`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVING = "serving"
"""What is known of a server that has begun."""

SERVER_0 = 1 << 16
"""The number of the first server: there are fewer ranks."""


def server_number(server: int) -> int:
    """Return the number of a server's process.

    Example:
        >>> process_name(server_number(1))
        'server 1'
    """
    return SERVER_0 + server


def is_server(number: int) -> bool:
    """Return whether a number is a server's."""
    return number >= SERVER_0


def process_name(number: int) -> str:
    """Return what people call a process.

    Example:
        >>> process_name(3), process_name(SERVER_0)
        ('rank 3', 'server 0')
    """
    return f"server {number - SERVER_0}" if is_server(number) else f"rank {number}"


def short_name(number: int) -> str:
    """Return what stands before a line of a process's output.

    Example:
        >>> short_name(3), short_name(SERVER_0)
        ('3', 'server 0')
    """
    return process_name(number) if is_server(number) else str(number)


def server_hosts(servers: int, hosts: int) -> tuple[int, ...]:
    """Return on which host each server runs: in turns.

    Example:
        >>> server_hosts(3, 2)
        (0, 1, 0)
    """
    return tuple(server % hosts for server in range(servers))


def heirs_of(server: int, hosts: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Return the servers that take a server's place, in order; the first of them that lives holds a copy.

    They are those that follow it, first those of other hosts: a host that is lost takes all its servers along.

    Args:
        server: Which one.
        hosts: The host of each server.
        replicas: How many copies; 0: nobody takes its place.

    Example:
        >>> heirs_of(1, (0, 0, 0), 1), heirs_of(0, (0, 0, 1, 1), 1), heirs_of(0, (0, 0), 0)
        ((2, 0), (2, 3, 1), ())
    """
    following = [(server + step) % len(hosts) for step in range(1, len(hosts))]
    following.sort(
        key=lambda other: hosts[other] == hosts[server]
    )  # stable: among equals the next one comes first
    return tuple(following if replicas else ())


def mirrors_of(server: int, hosts: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Return the servers that hold copies of what a server holds as long as all live: the first of its heirs.

    Args:
        server: Which one.
        hosts: The host of each server.
        replicas: How many copies, fewer than servers.

    Example:
        >>> mirrors_of(1, (0, 0, 0), 1), mirrors_of(0, (0, 0, 1, 1), 2)
        ((2,), (2, 3))
    """
    return heirs_of(server, hosts, replicas)[:replicas]
