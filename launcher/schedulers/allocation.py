"""The job of a scheduler in which the launcher runs: its hosts, how many workers each has place for, and what starts there.

Slurm, PBS and LSF give a job hosts, and a command that starts something on them within the job: counted with it, and ended
with it. Data in, data out: who reads the environment and files is told what they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.bootstrap.launch_env.slurm import counts
from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.ssh import agent_words, remote_command
from syncvar_launcher.options.hostfile import Host, expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Allocation", "Starter", "allocation", "within"]

_OF_SRUN = (
    "SLURM_LABELIO",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SLURM_STDERRMODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_EXACT",
    "SLURM_DISTRIBUTION",
)
"""Options of srun, said to the whole job: an agent's pipes go through it as they are, and it gets all that the job has on its host."""


class Starter(NamedTuple):
    """What starts an agent on a host of the job, in place of ssh.

    Args:
        program: "srun", "blaunch" or "pbsdsh".
        where: Its words for a host, in which {host} stands for the name and {place} for its place among the job's.
        joins: What it starts has no pipes to us, so that the host has to join by tcp.
        unset: Variables that would change what the program does.
    """

    program: str
    where: tuple[str, ...]
    joins: bool = False
    unset: tuple[str, ...] = ()

    def command(self, host: Host, place: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs some words on a host.

        Example:
            >>> Starter("pbsdsh", ("-n", "{place}", "--")).command(Host("n1"), 4, ["true"])
            ['pbsdsh', '-n', '4', '--', 'true']
        """
        return [
            self.program,
            *(
                word.replace("{host}", host.name).replace("{place}", str(place))
                for word in self.where
            ),
            *words,
        ]


class Allocation(NamedTuple):
    """The job.

    Args:
        name: For messages, for instance "job 7 of Slurm".
        hosts: Its hosts with their slots, in its order.
        places: Where each host stands among what the scheduler counts, by name; empty where it goes by names.
        here: The host on which the launcher runs; empty where it is none of them.
        starter: What starts on the others.
    """

    name: str
    hosts: tuple[Host, ...]
    places: dict[str, int]
    here: str
    starter: Starter

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Return the command line that runs some words on a host of the job."""
        return self.starter.command(host, self.places.get(host.name, 0), words)

    def agent_command(self, host: Host, python: str) -> list[str]:
        """Return the command line that starts an agent on a host of the job, by an interpreter there.

        Example:
            >>> job = allocation({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"}, "a", str)
            >>> job.agent_command(job.hosts[1], "python3")[:2]
            ['blaunch', 'b']
        """
        # srun hands its words over as they are; blaunch, as ssh, to a shell there
        words = (
            agent_words(host.python or python)
            if self.starter.program == "srun"
            else [remote_command(host.python or python)]
        )
        return self.command(host, words)


def allocation(
    environ: Mapping[str, str], own_name: str, read: Callable[[str], str]
) -> Allocation | None:
    """Return the job of a scheduler in which this process runs; None where it runs in none.

    Args:
        environ: The environment.
        own_name: What this host calls itself.
        read: Returns what a file holds.

    Raises:
        ConfigError: What the scheduler says cannot be understood, or is not all here.

    Example:
        >>> job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
        >>> [(one.name, one.slots) for one in allocation(job, "login", str).hosts]
        [('n1', 2), ('n2', 1)]
    """
    return _slurm(environ, own_name) or _lsf(environ, own_name) or _pbs(environ, own_name, read)


def within(
    allocation: Allocation, named: Sequence[Host]
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts of an allocation that a host file or -H names, and what is to be said of them.

    A file takes away, hosts and slots, and adds nothing. The order is the file's.

    Raises:
        ConfigError: A host is not in the allocation, or is to be logged in to by another user or port.
    """
    known = {_short(one.name): one for one in allocation.hosts}
    kept, said = [], []
    for one in named:
        found = known.get(_short(one.name))
        if found is None:
            raise ConfigError(
                f"{one.origin} names {one.name}, which is not in {allocation.name} ({', '.join(each.name for each in allocation.hosts)}); "
                f"leave it out, or give --allocation off"
            )
        slots, most = found.slots or 1, found.max_slots or found.slots or 1
        if one.slots is not None and one.slots > most:
            said.append(
                f"{one.origin} gives {one.name} {one.slots} slots, and {allocation.name} has {most} there: {most} count"
            )
        kept.append(
            found._replace(
                slots=min(one.slots, most) if one.slots is not None else slots,
                max_slots=min(one.max_slots, most) if one.max_slots else None,
                addr=one.addr,
                python=one.python,
                cwd=one.cwd,
                user=one.user,
                port=one.port,
                origin=f"{one.origin}, within {found.origin}",
            )
        )
    return tuple(kept), tuple(said)


def _short(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _here(hosts: Sequence[Host], own_name: str) -> str:
    return next((one.name for one in hosts if _short(one.name) == _short(own_name)), "")


def _slurm(environ: Mapping[str, str], own_name: str) -> Allocation | None:
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
    listed = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    if not job or listed not in environ:
        return None
    names = _names(environ[listed], listed)
    cpus = _spread(environ, "SLURM_JOB_CPUS_PER_NODE", names)
    if "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ:
        slots, told = _spread(environ, "SLURM_TASKS_PER_NODE", names), "SLURM_TASKS_PER_NODE"
    else:
        each = _number(environ.get("SLURM_CPUS_PER_TASK", "1"), "SLURM_CPUS_PER_TASK")
        slots, told = [max(1, one // each) for one in cpus or ()], "SLURM_JOB_CPUS_PER_NODE"
    if not slots:
        raise ConfigError(
            f"{listed}={environ[listed]} names the hosts of job {job} of Slurm, and {told} is not set: give -H, or --allocation off"
        )
    hosts = tuple(
        Host(name, count, max(count, cpus[place]) if cpus else None, origin=f"{listed}, {told}")
        for place, (name, count) in enumerate(zip(names, slots, strict=True))
    )
    words = (
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--nodelist={host}",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--unbuffered",
    )
    here = environ.get("SLURMD_NODENAME") or _here(hosts, own_name)
    return Allocation(
        f"job {job} of Slurm", hosts, {}, here, Starter("srun", words, unset=_OF_SRUN)
    )


def _lsf(environ: Mapping[str, str], own_name: str) -> Allocation | None:
    if "LSB_JOBID" not in environ or "LSB_MCPU_HOSTS" not in environ:
        return None
    text = environ["LSB_MCPU_HOSTS"]
    words = text.split()
    if not words or len(words) % 2:
        raise ConfigError(
            f"LSB_MCPU_HOSTS={text} cannot be understood: it is to have a host and a number in turns"
        )
    hosts = tuple(
        Host(name, _number(count, "LSB_MCPU_HOSTS"), origin="LSB_MCPU_HOSTS")
        for name, count in zip(words[::2], words[1::2], strict=True)
    )
    return Allocation(
        f"job {environ['LSB_JOBID']} of LSF",
        hosts,
        {},
        _here(hosts, own_name),
        Starter("blaunch", ("{host}",)),
    )


def _pbs(
    environ: Mapping[str, str], own_name: str, read: Callable[[str], str]
) -> Allocation | None:
    if "PBS_JOBID" not in environ or "PBS_NODEFILE" not in environ:
        return None
    path = environ["PBS_NODEFILE"]
    try:
        lines = read(path).split()
    except OSError as error:
        raise ConfigError(
            f"PBS_NODEFILE={path} cannot be read: {error.strerror}; it is only on the first host of the job: start syncvar-launch in the job's script, "
            f"or give --allocation off"
        ) from None
    if not lines:
        raise ConfigError(f"PBS_NODEFILE={path} names no host")
    origin = f"PBS_NODEFILE={path}"
    hosts = tuple(Host(name, lines.count(name), origin=origin) for name in dict.fromkeys(lines))
    places = {one.name: lines.index(one.name) for one in hosts}
    starter = Starter("pbsdsh", ("-n", "{place}", "--"), joins=True)
    return Allocation(
        f"job {environ['PBS_JOBID']} of PBS", hosts, places, _here(hosts, own_name), starter
    )


def _names(text: str, source: str) -> list[str]:
    """Return the names of a list of hosts, with ranges in brackets, as Slurm writes it."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            words.append("")
        else:
            words[-1] += letter
    try:
        return [name for word in words for name in expanded(word)]
    except ValueError as error:
        raise ConfigError(f"{source}={text} cannot be understood: {error}") from None


def _spread(environ: Mapping[str, str], name: str, hosts: Sequence[str]) -> list[int]:
    """Return the number for each host; empty where the variable is not set."""
    if name not in environ:
        return []
    found = counts(environ[name], name)
    if len(found) != len(hosts):
        raise ConfigError(
            f"{name}={environ[name]} has {len(found)} numbers, and the job has {len(hosts)} hosts ({', '.join(hosts)})"
        )
    return found


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"{name} has {text!r} where a whole number from 1 on is to be")
    return int(text)
