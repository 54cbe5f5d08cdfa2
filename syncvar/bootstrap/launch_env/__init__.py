"""Read rank, size and addresses from the environment of another launcher or scheduler.

A launch environment stands for a launcher, scheduler or cluster manager. It answers four questions:
Is it present? Which rank is this, of how many, and which on this host? Where is rank 0? How do the
ranks meet?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

# How ranks of several hosts meet. ADDRESS: at a configured port of rank 0. FOLDER: by files in a
# folder that all hosts see. PMI: by the process manager's key-value store (PMI_FD). MPI: by
# collectives of MPI.
ADDRESS, FOLDER, PMI, MPI = "address", "folder", "pmi", "mpi"

_PORT_MAX = 65535
_NAMED_MAX = 8  # hosts in a message
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


class LaunchInfo(NamedTuple):
    """The identity of a process, as its launcher's variables describe it.

    Args:
        source: The variables, for messages.
        rank: 0-based rank in the world.
        world_size: Ranks in the world.
        local_rank: 0-based rank among the ranks of this host.
        local_world_size: Ranks on this host; 0 if only the process manager knows.
        host_index: 0-based index of this host; -1 if the ranks find out when they meet.
        host_count: Hosts; 0 if the ranks find out when they meet.
        address: Name or address of rank 0; empty if unknown.
        port: Port for this job on rank 0; 0 if unknown.
        run: Identity of this run.
        restarts: How often the ranks have been restarted.
        way: How ranks of several hosts meet: ADDRESS, FOLDER, PMI or MPI.
        program: 0-based index of its program in a job of several; 0 if unknown.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_index: int
    host_count: int
    address: str
    port: int
    run: str = ""
    restarts: int = 0
    way: str = ADDRESS
    program: int = 0


class LaunchEnvironment:
    """One launcher, for one environment.

    Attributes:
        name: Common name of the launcher.
        rank: Variable that each of its processes has.
        sizes: Variables with the number of processes; the first that is set counts.
        local_rank: Variable with the rank on the host.
        local_sizes: Variables with the number of processes on this host.
        remedy: Advice if its variables are not sufficient to meet.
    """

    name: str
    rank: str
    sizes: tuple[str, ...] = ()
    local_rank: str = ""
    local_sizes: tuple[str, ...] = ()
    remedy: str = ""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def is_present(self) -> bool:
        """Return whether this launcher has started this process."""
        return any(name in self.environ for name in (self.rank, *self.sizes, *self.local_sizes))

    def size(self) -> int:
        """Return the number of its processes; 0 if unknown."""
        name = self.named(self.sizes)
        return whole(self.environ, name) if name else 0

    def run(self) -> str:
        """Return the identity of this run, equal on all its ranks; empty if unknown."""
        return ""

    def way(self) -> str:
        """Return how the ranks of several hosts meet."""
        return FOLDER

    def program(self, rank: int) -> int:  # noqa: ARG002  (launchers that know it need the rank)
        """Return the index of a rank's program; 0 if unknown."""
        return 0

    def info(self) -> LaunchInfo | None:
        """Return the identity of this process; None if the variables are not sufficient to meet."""
        size, local_size = self.size(), self.named(self.local_sizes)
        if not size or self.rank not in self.environ:
            return None
        rank = whole(self.environ, self.rank)
        if size > 1 and not (
            self.local_rank in self.environ and local_size and (self.run() or self.way() == PMI)
        ):
            return None
        local_rank = (
            whole(self.environ, self.local_rank)
            if self.local_rank in self.environ and size > 1
            else 0
        )
        return self._checked(
            rank,
            size,
            local_rank,
            whole(self.environ, local_size) if local_size and size > 1 else 1,
        )

    def seen(self) -> tuple[str, str] | None:
        """Return a text and a count if the launcher has, or may have, started several processes."""
        for name in (*self.sizes, *self.local_sizes):
            count = whole(self.environ, name) if name in self.environ else 0
            if count > 1:
                is_all = name in self.sizes
                here = "" if is_all else " on this host"
                text = f"{name}={count}: {self.name} has started {count} processes{here}"
                return text, str(count) if is_all else "N"
            if count == 1 and name in self.sizes:
                return None
        if self.rank not in self.environ:
            return None
        rank = whole(self.environ, self.rank)
        sure = "has" if rank else "may have"
        return f"{self.rank}={rank}: {self.name} {sure} started more processes than this one", "N"

    def named(self, names: tuple[str, ...]) -> str:
        """Return the first of some variables that is set; empty if none is."""
        return next((name for name in names if name in self.environ), "")

    def _checked(
        self, rank: int, size: int, local_rank: int, local_size: int, **more: Any
    ) -> LaunchInfo:
        """Return the identity after comparing its numbers; on one host the rest follows."""
        for name, value, limit in (
            (self.rank, rank, size),
            (self.local_rank, local_rank, local_size or size),
        ):
            if value >= limit:
                raise ConfigError(f"{name}={value} is outside of {limit} ({self.source()})")
        if local_size > size or local_rank > rank:
            raise ConfigError(
                f"{self.local_rank}={local_rank} of {local_size} contradicts {self.rank}={rank} "
                f"of {size}"
            )
        is_one_host = local_size == size
        address, port = self._master()
        answers = {
            "host_index": 0 if is_one_host else -1,
            "host_count": int(is_one_host),
            "run": self.run(),
            "way": self.way(),
            "program": self.program(rank),
            "address": address,
            "port": port,
        }
        return LaunchInfo(self.source(), rank, size, local_rank, local_size, **(answers | more))

    def source(self) -> str:
        """Return the variables that identify it, for messages."""
        return ", ".join(name for name in (self.rank, self.named(self.sizes)) if name)

    def _master(self) -> tuple[str, int]:
        """Return address and port of rank 0, if the user has set them as for torch.distributed."""
        if any(name not in self.environ for name in _MASTER):
            return "", 0
        return self.environ["MASTER_ADDR"], port_of(self.environ["MASTER_PORT"], "MASTER_PORT")


def whole(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable, or raise ConfigError."""
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} must be a non-negative integer, not {text!r}")
    return int(text)


def port_of(text: str, name: str) -> int:
    """Return the port in a text, or raise ConfigError."""
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= _PORT_MAX:
        raise ConfigError(f"{name} has {text!r} for a port: it must be 1 to {_PORT_MAX}")
    return int(text)


def add_host(
    info: LaunchInfo, hosts: Sequence[Hashable], names: Sequence[str], remedy: str
) -> LaunchInfo:
    """Add host and local rank to an identity; raise ConfigError if a host's ranks are apart."""
    order = list(dict.fromkeys(hosts))
    places = [order.index(one) for one in hosts]
    if places != sorted(places):
        raise ConfigError(
            f"{info.source}: the ranks alternate between {len(order)} hosts, but must be numbered "
            "host by host: ranks 0, 1, … are on "
            f"{', '.join(names[:_NAMED_MAX])}{', …' if len(names) > _NAMED_MAX else ''}. {remedy}"
        )
    index = places[info.rank]
    return info._replace(
        local_rank=info.rank - places.index(index),
        local_world_size=places.count(index),
        host_index=index,
        host_count=len(order),
    )


def assume_equal_hosts(info: LaunchInfo) -> LaunchInfo:
    """Add the host's index and the number of hosts, assuming equal hosts; or raise ConfigError."""
    if info.host_index >= 0:
        return info
    first, each = info.rank - info.local_rank, info.local_world_size
    if not each or first % each or info.world_size % each:
        raise ConfigError(
            f"{info.source}: {each} of {info.world_size} ranks are on this host, the first is "
            f"rank {first}, and no variable says how many are on the others; give each host as "
            "many, in order, or unset MASTER_PORT: the ranks meet in a folder that all hosts have"
        )
    return info._replace(host_index=first // each, host_count=info.world_size // each)


def host_of_each(mapping: str, size: int) -> list[int]:
    """Return the host of each rank from PMI_process_mapping, such as "(vector,(0,2,4))".

    Its blocks (first host, hosts, ranks on each) repeat until all ranks have a host.

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
