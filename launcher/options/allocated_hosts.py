"""The job of a scheduler as a value: its hosts, and the program that starts agents on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
