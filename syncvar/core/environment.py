"""A process's place in its job: its environment variables, and the hosts of all ranks.

`RankEnvironment.from_mapping` is the only reader and `to_mapping` the only writer, so both sides
agree. Runtime settings are in `syncvar.core.settings`. Programs that a rank starts inherit its
variables but are no ranks (`environment_of`).
"""

from __future__ import annotations

import os
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

PREFIX = "SYNCVAR_"
OWN_SIZE = PREFIX + "WORLD_SIZE"
_CLAIM = PREFIX + "PROCESS"
_START_FIELD = 19  # field of /proc/PID/stat after the name

_INTEGERS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "host_index": "HOST_INDEX",
    "host_count": "HOST_COUNT",
    "generation": "GENERATION",
    "restarts": "RESTARTS",
    "servers": "SERVERS",
    "server_replicas": "SERVER_REPLICAS",
    "incarnation": "INCARNATION",
    "program": "PROGRAM",
    "elastic": "ELASTIC",
}
_MAY_BE_ABSENT = {
    "host_count": "1",
    "restarts": "0",
    "servers": "0",
    "server_replicas": "0",
    "incarnation": "0",
    "program": "0",
    "elastic": "0",
}
_TEXTS = {
    "rendezvous": "RENDEZVOUS",
    "job_id": "JOB_ID",
    "role": "ROLE",
    "host": "HOST",
    "flight_dir": "FLIGHT_DIR",
    "host_directory": "HOST_DIRECTORY",
    "host_address": "HOST_ADDRESS",
    "stats_dir": "STATS_DIR",
}
_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankEnvironment(NamedTuple):
    """Identity of a worker or server, and where it joins the job.

    Args:
        rank: 0-based index in the world; for a server: among the servers.
        world_size: Number of ranks.
        local_rank: 0-based index among the ranks of this host.
        local_world_size: Number of ranks on this host.
        host_index: 0-based index of this host.
        host_count: Number of hosts.
        generation: Version of the membership, from 0. It grows when ranks join again and when the
            launcher restarts them.
        rendezvous: ZeroMQ endpoint of the launcher.
        job_id: Random identity of the job. Frames of other jobs are refused.
        role: "worker" or "server".
        host: Name of this host, for messages.
        flight_dir: Folder for the flight record of a worker that fails; empty for none.
        host_directory: Private folder for this host's sockets; empty for that of the rendezvous.
        host_address: Address where this host listens for others, for instance "10.0.0.7"; empty
            for a job on one host.
        restarts: Number of earlier attempts (`--max-restarts`).
        stats_dir: Folder for statistics of calls (`--stats`); empty for none.
        servers: Number of servers.
        server_replicas: Number of other servers that hold a replica of each server's variables.
        incarnation: Number of earlier processes that this one replaces, for a server.
        program: 0-based index of its program in a job of several (MPI_APPNUM).
        elastic: Fewest members of an elastic job, in which this process is a world of one until it
            enrolls, and `rank` is the number of its worker; 0 for other jobs.
        worker: Number of this worker in a generation of an elastic job; -1 elsewhere.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_index: int
    host_count: int
    generation: int
    rendezvous: str
    job_id: str
    role: str = "worker"
    host: str = "localhost"
    flight_dir: str = ""
    host_directory: str = ""
    host_address: str = ""
    restarts: int = 0
    stats_dir: str = ""
    servers: int = 0
    server_replicas: int = 0
    incarnation: int = 0
    program: int = 0
    elastic: int = 0
    worker: int = -1

    @property
    def is_world_of_one(self) -> bool:
        """Whether this process begins as a world of one."""
        return self.elastic > 0 or (self.world_size == 1 and self.host_count == 1)

    @property
    def socket_directory(self) -> str:
        """Folder of this host's sockets."""
        return self.host_directory or self.rendezvous.removeprefix("ipc://").rpartition("/")[0]

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> RankEnvironment | None:
        """Return the identity in an environment, or raise ConfigError; None without a launcher."""
        if PREFIX + "RANK" not in environ:
            return None
        values: dict[str, int | str] = {}
        for field, name in _INTEGERS.items():
            text = environ.get(PREFIX + name, _MAY_BE_ABSENT.get(field))
            if text is None:
                raise ConfigError(
                    f"{PREFIX}RANK is set but {PREFIX}{name} is not: start the script with "
                    f"syncvar-launch, or unset {PREFIX}RANK and set {PREFIX}WORLD_SIZE=1 to run it "
                    f"as a world of one"
                )
            if not (text.isascii() and text.isdigit()):
                raise ConfigError(f"{PREFIX}{name} must be a non-negative integer, not {text!r}")
            values[field] = int(text)
        for field, name in _TEXTS.items():
            text = environ.get(PREFIX + name)
            if text is None and field in ("rendezvous", "job_id"):
                raise ConfigError(
                    f"{PREFIX}{name} is not set: start the script with syncvar-launch"
                )
            if text is not None:
                values[field] = text
        result = cls(**values)  # type: ignore[arg-type]
        result._check_ranges(has_host_count=PREFIX + "HOST_COUNT" in environ)
        return result

    def _check_ranges(self, *, has_host_count: bool) -> None:
        if self.role == "server":
            if self.rank >= self.servers:
                raise ConfigError(f"{PREFIX}RANK={self.rank} is outside {self.servers} servers")
            return
        size, local = self.world_size, self.local_world_size
        if self.rank >= size:
            raise ConfigError(f"{PREFIX}RANK={self.rank} is outside a world of {size}")
        if self.local_rank >= local:
            raise ConfigError(
                f"{PREFIX}LOCAL_RANK={self.local_rank} is outside a host of {local} ranks"
            )
        if has_host_count and self.host_index >= self.host_count:
            raise ConfigError(
                f"{PREFIX}HOST_INDEX={self.host_index} is outside a job of {self.host_count} hosts"
            )

    def to_mapping(self) -> dict[str, str]:
        """Return the environment variables of this identity, including those of torchrun."""
        result = {
            PREFIX + name: str(getattr(self, field)) for field, name in (_INTEGERS | _TEXTS).items()
        }
        for name in _PLAIN:
            result[name] = result[PREFIX + name]
        return result


def split_evenly(workers: int, hosts: int) -> tuple[int, ...]:
    """Return the ranks per host, spread evenly, or raise ConfigError; the first hosts get more."""
    if not 1 <= hosts <= workers:
        raise ConfigError(
            f"{workers} workers cannot be divided over {hosts} hosts: each host needs at least one"
        )
    each, more = divmod(workers, hosts)
    return tuple(each + (host < more) for host in range(hosts))


class HostMap(NamedTuple):
    """The hosts of a world: the number of ranks on each; rank 0 is the first of host 0."""

    sizes: tuple[int, ...]

    @classmethod
    def of_places(cls, places: Mapping[int, int]) -> HostMap:
        """Return the map for the host index of each rank; ConfigError if they are out of order."""
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


def wants_world_of_one(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants a world of one, in a process without syncvar-launch.

    Example:
        >>> wants_world_of_one({"SYNCVAR_WORLD_SIZE": "1"})
        True
    """
    return environ.get(OWN_SIZE) == "1"


def claim_rank(environ: MutableMapping[str, str]) -> None:
    """Record in the environment that this process is the rank of its variables."""
    environ[_CLAIM] = _identity()


def environment_of(environ: Mapping[str, str], *, alone: bool = False) -> RankEnvironment | None:
    """Return the rank that a launcher has made this process; None for a possible world of one.

    Raises UsageError in a program that a rank has started and that asks for no world of one.
    """
    claimed = environ.get(_CLAIM)
    if claimed is None or claimed == _identity():
        return RankEnvironment.from_mapping(environ)
    if alone or wants_world_of_one(environ):
        return None
    raise UsageError(
        f"process {os.getpid()} was started by rank {environ.get(PREFIX + 'RANK')} (process "
        f"{claimed.partition(':')[0]}) and is no rank itself: a rank is one process, and its "
        "variables are inherited. To use syncvar there as a world of one, call "
        f"sv.init(alone=True) first, or start it with {PREFIX}WORLD_SIZE=1. Where it should be "
        "the rank, and what started it is a wrapper, start the wrapper with syncvar-launch "
        "--no-python"
    )


def _identity() -> str:
    """Return PID and start time of this process, because the system reuses PIDs."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        return f"{os.getpid()}:{file.read().rpartition(')')[2].split()[_START_FIELD]}"
