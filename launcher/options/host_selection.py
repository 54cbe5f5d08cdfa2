"""Choosing the hosts of a job: from `-H`, a host file or the job of a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar_launcher.options.hostfile import Hosts, parse_hostfile, parse_hosts, select_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from syncvar_launcher.options.hostfile import Host


class Starter(NamedTuple):
    """The program of a scheduler that starts an agent on a host of the job, in place of ssh.

    Args:
        program: "srun", "blaunch" or "pbsdsh".
        where: Its arguments for a host; {host} stands for the name and {place} for the index.
        joins: Whether the agent has no pipes to the launcher, so that the host joins by TCP.
        unset: Variables to remove, because they would change what the program does.
    """

    program: str
    where: tuple[str, ...]
    joins: bool = False
    unset: tuple[str, ...] = ()

    def command(self, host: Host, place: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host.

        Example:
            >>> from syncvar_launcher.options.hostfile import Host
            >>> Starter("pbsdsh", ("-n", "{place}", "--")).command(Host("n1"), 4, ["true"])
            ['pbsdsh', '-n', '4', '--', 'true']
        """
        where = [
            word.replace("{host}", host.name).replace("{place}", str(place)) for word in self.where
        ]
        return [self.program, *where, *words]


class Allocation(NamedTuple):
    """The job of a scheduler.

    Args:
        name: The name for messages, for instance "job 7 of Slurm".
        hosts: The hosts with their slots, in the scheduler's order.
        places: The index of each host for the scheduler; empty for one that uses names.
        here: The host on which the launcher runs; empty for a host outside of the job.
        starter: The program that starts agents on the other hosts.
    """

    name: str
    hosts: tuple[Host, ...]
    places: dict[str, int]
    here: str
    starter: Starter

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host of the job."""
        return self.starter.command(host, self.places.get(host.name, 0), words)


def restrict_hosts(
    allocation: Allocation, named: Sequence[Host]
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts of an allocation that a host file or -H names, and notices for the user.

    A file can remove hosts and slots and adds nothing. The order is the file's.
    """
    known = {short_name(one.name): one for one in allocation.hosts}
    kept, notices = [], []
    for one in named:
        found = known.get(short_name(one.name))
        if found is None:
            names = ", ".join(each.name for each in allocation.hosts)
            raise ConfigError(
                f"{one.origin} names {one.name}, which is not in {allocation.name} ({names}); "
                "leave it out, or give --allocation off"
            )
        slots, most = found.slots or 1, found.max_slots or found.slots or 1
        if one.slots is not None and one.slots > most:
            notices.append(
                f"{one.origin} gives {one.name} {one.slots} slots, and {allocation.name} has "
                f"{most} there: {most} count"
            )
        kept.append(
            one._replace(
                name=found.name,
                slots=min(one.slots, most) if one.slots is not None else slots,
                max_slots=min(one.max_slots, most) if one.max_slots else None,
                origin=f"{one.origin}, within {found.origin}",
            )
        )
    return tuple(kept), tuple(notices)


def short_name(name: str) -> str:
    """Return a host's name without its domain."""
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


_HOSTFILE_NBYTES_MAX = 1 << 20


def select_hosts(
    values: Mapping[str, Any], base: Path, job: Allocation | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts to use, and notices about them for the user.

    Args:
        values: The values of the options, by key.
        base: The folder to which the path of the host file is relative.
        job: The job of a scheduler whose hosts limit the choice, or None.
    """
    hostfile, listed = values["hostfile"], values["hosts"]
    include, exclude = values["include"], values["exclude"]
    if hostfile is None and listed is None:
        if job is not None:
            return select_named(job.hosts, include, exclude), ()
        option = "--include" if include is not None else "--exclude"
        raise ConfigError(
            f"{option} selects among the hosts of --hostfile or -H, and there are none"
        )
    if hostfile is not None and listed is not None:
        raise ConfigError(
            f"--hostfile {hostfile} and -H {listed} both name hosts; leave one out "
            "(--include selects)"
        )
    found = parse_hosts(listed) if listed is not None else _read_hostfile(base, hostfile)
    named = select_named(found.hosts, include, exclude)
    if job is not None:
        kept, notices = restrict_hosts(job, named)
        return kept, (*found.notices, *notices)
    if listed is not None:  # as for mpirun
        named = tuple(one._replace(slots=one.slots or 1) for one in named)
    return named, found.notices


def _read_hostfile(base: Path, name: str) -> Hosts:
    path = base / name
    try:
        with path.open("rb") as file:
            content = file.read(_HOSTFILE_NBYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from None
    if len(content) > _HOSTFILE_NBYTES_MAX:
        raise ConfigError(
            f"--hostfile {path}: it has more than {_HOSTFILE_NBYTES_MAX} bytes; is it a host file?"
        )
    return parse_hostfile(content, name)
