"""Numbers and names of a job's processes: ranks run the program, servers hold variables for them.

The launcher numbers both together: a rank has its rank, server `i` has `SERVER_0 + i`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SERVING = "serving"  # state of a server that has started
SERVER_0 = 1 << 16  # number of the first server; the number of ranks is smaller


def server_number(server: int) -> int:
    """Return the process number of a server."""
    return SERVER_0 + server


def is_server(number: int) -> bool:
    """Return whether a process number belongs to a server."""
    return number >= SERVER_0


class ProcessNames(NamedTuple):
    """What sentences call the processes of a job: by rank, or by worker in an elastic job.

    Ranks change with each generation of an elastic job, and the numbers of its workers stay.

    Example:
        >>> process_list([0, 1], ProcessNames("worker", (2, 5)))
        'workers 2, 5'
    """

    word: str = "rank"
    workers: Sequence[int] = ()  # the worker that has each rank; empty if numbers need no change

    def number(self, number: int) -> int:
        """Return the number of a process as sentences have it."""
        return self.workers[number] if number < len(self.workers) else number


RANKS = ProcessNames()
WORKERS = ProcessNames("worker")


def process_name(number: int, names: ProcessNames = RANKS) -> str:
    """Return the name of a process, "rank 3" or "server 0"."""
    if is_server(number):
        return f"server {number - SERVER_0}"
    return f"{names.word} {names.number(number)}"


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
    """Return the servers that hold replicas of a server's state while all live."""
    return failover_order(server, hosts, replicas)[:replicas]


def rank_list(ranks: Iterable[int], names: ProcessNames = RANKS) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0-2, 5"."""
    distinct = {names.number(rank) for rank in ranks}
    return f"{names.word}{'s' * (len(distinct) != 1)} {rank_spans(distinct)}"


def process_list(numbers: Iterable[int], names: ProcessNames = RANKS) -> str:
    """Return processes as text, such as "ranks 0, 1, 3 and servers 0, 1"."""
    distinct = set(numbers)
    servers = {number for number in distinct if is_server(number)}
    texts = [rank_list(distinct - servers, names)] if distinct - servers else []
    if servers:
        spans = rank_spans(number - SERVER_0 for number in servers)
        texts.append(f"server{'s' * (len(servers) > 1)} {spans}")
    return " and ".join(texts)


def rank_spans(ranks: Iterable[int]) -> str:
    """Return ranks as text such as "0-3, 7"; three or more in a row become a span."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(
        str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans
    )
