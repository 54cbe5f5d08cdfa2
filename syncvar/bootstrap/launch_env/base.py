"""What every engine that starts processes is asked, and what it answers.

An engine is what started this process and others: a launcher, a scheduler, a cluster manager. Each is a small class that
reads its own variables and answers four questions: is it there; which rank is this, of how many, and which on this host;
who is rank 0; and how do the ranks meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ADDRESS", "FOLDER", "MPI", "PMI", "LaunchEnvironment", "LaunchInfo", "port_of", "whole"]

ADDRESS, FOLDER, PMI, MPI = "address", "folder", "pmi", "mpi"
"""How ranks of several hosts meet: where rank 0 is said to listen; by cards in a folder that all hosts have, named after
the run; by cards that the process manager hands round, over the descriptor that it left open (PMI_FD); by cards that the
MPI library does."""

_PORT_MAX = 65535
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


class LaunchInfo(NamedTuple):
    """What an engine says.

    Args:
        source: The variables, for messages.
        rank: 0-based identity in the world.
        world_size: Ranks in the world.
        local_rank: 0-based identity among the ranks of this host.
        local_world_size: Ranks on this host; 0 where only the process manager knows.
        host_index: 0-based index of this host; -1 where the ranks find out when they meet.
        host_count: Hosts; 0 likewise.
        address: Where rank 0 can be reached, a name or an address; empty where nobody has said it.
        port: A port there that is meant for this job; 0 likewise.
        run: What tells this run from others.
        restarts: How often the ranks have been started again before.
        way: How ranks of several hosts meet: ADDRESS, FOLDER, PMI or MPI.
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


class LaunchEnvironment:
    """One engine, for one environment.

    Args:
        environ: The environment of the process.

    Attributes:
        name: What people call that which starts the processes.
        rank: The variable that each of its processes has.
        sizes: Variables with the number of its processes; the first that is set counts.
        local_rank: The variable with the number of a process on its host.
        local_sizes: Variables with the number of its processes on this host.
        remedy: What to write where it does not say enough to meet.
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
        """Return whether this engine has started this process."""
        return any(name in self.environ for name in (self.rank, *self.sizes, *self.local_sizes))

    def size(self) -> int:
        """Return the number of its processes; 0 where it does not say."""
        name = self.named(self.sizes)
        return whole(self.environ, name) if name else 0

    def run(self) -> str:
        """Return what tells this run from all others of its engine, the same on all its ranks; empty where nothing does."""
        return ""

    def way(self) -> str:
        """Return how the ranks of several hosts meet."""
        return FOLDER

    def told(self) -> LaunchInfo | None:
        """Return what it says of this process; None where that is not enough to meet.

        Raises:
            ConfigError: What it says is wrong, or cannot be joined.
        """
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
        """Return that it has started several processes, or cannot say that it has started one: in words, and how many as text."""
        for name in (*self.sizes, *self.local_sizes):
            count = whole(self.environ, name) if name in self.environ else 0
            if count > 1:
                is_all = name in self.sizes
                here = "" if is_all else " on this host"
                return f"{name}={count}: {self.name} has started {count} processes{here}", str(
                    count
                ) if is_all else "N"
            if count == 1 and name in self.sizes:
                return None
        if self.rank not in self.environ:
            return None
        rank = whole(self.environ, self.rank)
        return (
            f"{self.rank}={rank}: {self.name} {'has' if rank else 'may have'} started more processes than this one",
            "N",
        )

    def named(self, names: tuple[str, ...]) -> str:
        """Return the first of some variables that is set; empty where none is."""
        return next((name for name in names if name in self.environ), "")

    def _checked(
        self, rank: int, size: int, local_rank: int, local_size: int, **more: Any
    ) -> LaunchInfo:
        """Return what is told, with its numbers compared; on one host everything else follows from them."""
        for name, value, limit in (
            (self.rank, rank, size),
            (self.local_rank, local_rank, local_size or size),
        ):
            if value >= limit:
                raise ConfigError(f"{name}={value} is outside of {limit} ({self.source()})")
        if local_size > size or local_rank > rank:
            raise ConfigError(
                f"{self.local_rank}={local_rank} of {local_size} contradicts {self.rank}={rank} of {size}"
            )
        is_one_host = local_size == size
        address, port = self._master()
        answers = {
            "host_index": 0 if is_one_host else -1,
            "host_count": int(is_one_host),
            "run": self.run(),
            "way": self.way(),
            "address": address,
            "port": port,
        }
        return LaunchInfo(self.source(), rank, size, local_rank, local_size, **(answers | more))

    def source(self) -> str:
        """Return the variables that it is known by, for messages."""
        return ", ".join(name for name in (self.rank, self.named(self.sizes)) if name)

    def _master(self) -> tuple[str, int]:
        """Return the address of rank 0 and a port there, where the user has set them as for torch.distributed."""
        if any(name not in self.environ for name in _MASTER):
            return "", 0
        return self.environ["MASTER_ADDR"], port_of(self.environ["MASTER_PORT"], "MASTER_PORT")


def whole(environ: Mapping[str, str], name: str) -> int:
    """Return the number that a variable holds.

    Raises:
        ConfigError: It holds none.
    """
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} must be a non-negative integer, not {text!r}")
    return int(text)


def port_of(text: str, name: str) -> int:
    """Return the port that a text holds.

    Raises:
        ConfigError: It holds none.
    """
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= _PORT_MAX:
        raise ConfigError(f"{name} has {text!r} for a port: it must be 1 to {_PORT_MAX}")
    return int(text)
