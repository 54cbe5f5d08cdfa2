"""The job of a scheduler (Slurm, PBS or LSF) in which the launcher runs.

Such a job gives hosts, and a command that starts processes on them. The scheduler counts these
processes as part of the job, and ends them with it. To add a scheduler, add a function like
`_slurm`, call it in `allocation`, and name its variable in `_SCHEDULER_VARIABLES` of `main.py`.
The launcher imports this module only where one of these variables is set.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.bootstrap.launch_env.detection import started_with_others
from syncvar.bootstrap.launch_env.schedulers import counts
from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.agent_connection import agent_command_line, remote_command
from syncvar_launcher.options.hostfile import Host, expand_ranges
from syncvar_launcher.options.launch_options import Allocation, Starter, short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Options of srun for the whole job. An agent needs its pipes unchanged and all resources of the job
# on its host.
_SRUN_VARIABLES = (
    "SLURM_LABELIO",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SLURM_STDERRMODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_EXACT",
    "SLURM_DISTRIBUTION",
)
_SRUN_OPTIONS = (
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


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job of a scheduler whose hosts the launcher uses.

    None outside of a job, and where the scheduler has started this process beside others.
    """
    if started_with_others(environ) is not None:
        return None
    import socket  # only a job of a scheduler needs it

    return allocation(environ, socket.gethostname(), lambda path: Path(path).read_text("utf-8"))


def agent_command(job: Allocation, host: Host, python: str) -> list[str]:
    """Return the command line that starts an agent on a host of the job.

    Example:
        >>> job = allocation({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"}, "a", str)
        >>> agent_command(job, job.hosts[1], "python3")[:2]
        ['blaunch', 'b']
    """
    # srun passes its arguments on unchanged; blaunch passes them to a shell, as ssh does.
    python = host.python or python
    is_srun = job.starter.program == "srun"
    return job.command(host, agent_command_line(python) if is_srun else [remote_command(python)])


def allocation(
    environ: Mapping[str, str], own_name: str, read: Callable[[str], str]
) -> Allocation | None:
    """Return the job of a scheduler in which this process runs, or None.

    Example:
        >>> job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3"}
        >>> job |= {"SLURM_TASKS_PER_NODE": "2,1"}
        >>> [(one.name, one.slots) for one in allocation(job, "login", str).hosts]
        [('n1', 2), ('n2', 1)]
    """
    return _slurm(environ, own_name) or _lsf(environ, own_name) or _pbs(environ, own_name, read)


def _here(hosts: Sequence[Host], own_name: str) -> str:
    return next((one.name for one in hosts if short_name(one.name) == short_name(own_name)), "")


def _slurm(environ: Mapping[str, str], own_name: str) -> Allocation | None:
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
    listed = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    if not job or listed not in environ:
        return None
    names = _names(environ[listed], listed)
    cpus = _spread(environ, "SLURM_JOB_CPUS_PER_NODE", names)
    if "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ:
        slots, counts_in = _spread(environ, "SLURM_TASKS_PER_NODE", names), "SLURM_TASKS_PER_NODE"
    else:
        each = _number(environ.get("SLURM_CPUS_PER_TASK", "1"), "SLURM_CPUS_PER_TASK")
        slots, counts_in = [max(1, one // each) for one in cpus or ()], "SLURM_JOB_CPUS_PER_NODE"
    if not slots:
        raise ConfigError(
            f"{listed}={environ[listed]} names the hosts of job {job} of Slurm, and {counts_in} is "
            "not set: give -H, or --allocation off"
        )
    hosts = tuple(
        Host(
            name, count, max(count, cpus[place]) if cpus else None, origin=f"{listed}, {counts_in}"
        )
        for place, (name, count) in enumerate(zip(names, slots, strict=True))
    )
    here = environ.get("SLURMD_NODENAME") or _here(hosts, own_name)
    starter = Starter("srun", _SRUN_OPTIONS, unset=_SRUN_VARIABLES)
    return Allocation(f"job {job} of Slurm", hosts, {}, here, starter)


def _lsf(environ: Mapping[str, str], own_name: str) -> Allocation | None:
    if "LSB_JOBID" not in environ or "LSB_MCPU_HOSTS" not in environ:
        return None
    text = environ["LSB_MCPU_HOSTS"]
    words = text.split()
    if not words or len(words) % 2:
        raise ConfigError(
            f"LSB_MCPU_HOSTS={text} cannot be understood: it must have pairs of a host and a number"
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
            f"PBS_NODEFILE={path} cannot be read: {error.strerror}; it is only on the first host "
            "of the job: start syncvar-launch in the job's script, "
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
    """Return the names of a host list as Slurm writes it, with ranges in brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            words.append("")
        else:
            words[-1] += letter
    try:
        return [name for word in words for name in expand_ranges(word)]
    except ValueError as error:
        raise ConfigError(f"{source}={text} cannot be understood: {error}") from None


def _spread(environ: Mapping[str, str], name: str, hosts: Sequence[str]) -> list[int]:
    """Return the number of each host; empty if the variable is not set."""
    if name not in environ:
        return []
    found = counts(environ[name], name)
    if len(found) != len(hosts):
        raise ConfigError(
            f"{name}={environ[name]} has {len(found)} numbers, and the job has {len(hosts)} hosts "
            f"({', '.join(hosts)})"
        )
    return found


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"{name} has {text!r} where a whole number of at least 1 must be")
    return int(text)
