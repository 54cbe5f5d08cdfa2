"""Who a process is that another launcher has started: the variables of torchrun, and TF_CONFIG.

Several sources may say it at once. They must agree, with each other and with what syncvar-launch says; which one is
wrong nobody can know, so that a contradiction is refused, naming both.

Launchers that are not joined (those of MPI, Slurm, Kubernetes) are known by their variables too: a process of theirs
that took itself for a world of one would compute wrong numbers, and nobody would see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.env import RankEnvironment

__all__ = ["Told", "is_meant_alone", "started_with_others", "told_elsewhere", "why_not_alone"]

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCH_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PORT_MAX = 65535
_OWN_SIZE = "SYNCVAR_WORLD_SIZE"
_STEP_MAX = 0xFFFFFFF0  # Slurm's numbers from here on are its own steps: of batch scripts, interactive, extern, pending


class _Launcher(NamedTuple):
    """A launcher that is not joined.

    Args:
        name: For messages.
        rank: The variable that each of its processes has.
        sizes: Variables with the number of its processes; the first that is set counts.
        local_sizes: Those with their number on this host: more than one is more than one.
    """

    name: str
    rank: str
    sizes: tuple[str, ...] = ()
    local_sizes: tuple[str, ...] = ()


_SLURM = _Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
_LAUNCHERS = (  # the innermost first, as one starts the other: mpirun on what srun has started, in a pod of Kubernetes
    _Launcher("horovodrun", "HOROVOD_RANK", ("HOROVOD_SIZE",), ("HOROVOD_LOCAL_SIZE",)),
    _Launcher("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    _Launcher("mpirun of MVAPICH2", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
    _Launcher("mpiexec of PALS", "PALS_RANKID", ("PALS_SIZE",), ("PALS_LOCAL_SIZE",)),
    _Launcher("flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",)),
    _Launcher("mpiexec, by PMI as of MPICH and Intel MPI,", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALNRANKS",)),
    _Launcher("jsrun", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",)),
    _SLURM,
    _Launcher("a launcher that speaks PMIx", "PMIX_RANK"),
    _Launcher("an indexed job of Kubernetes", "JOB_COMPLETION_INDEX"),
)


class Told(NamedTuple):
    """What one source says.

    Args:
        source: The variables, for messages.
        rank: 0-based identity in the world.
        world_size: Ranks in the world.
        local_rank: 0-based identity among the ranks of this host.
        local_world_size: Ranks on this host.
        host_index: 0-based index of this host.
        host_count: Hosts.
        address: Where rank 0 can be reached: a name or an address.
        port: A port there that is meant for this job.
        run: What else tells this run from others.
        restarts: How often the ranks have been started again before.
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


def told_elsewhere(environ: Mapping[str, str], own: RankEnvironment | None = None) -> Told | None:
    """Return what other launchers say of this process, or None where none does.

    Args:
        environ: The environment.
        own: What syncvar-launch says, where it has started this process.

    Raises:
        ConfigError: A source is incomplete or wrong, or two contradict each other.

    Example:
        >>> told_elsewhere({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).rank
        1
        >>> told_elsewhere({"PATH": "/bin"}) is None
        True
    """
    found = [one for one in (_torchrun(environ), _tf_config(environ)) if one is not None]
    if len(found) == 2:
        _compare(found[0].source, found[0], found[1].source, found[1], ("rank", "world_size"))
    if own is not None:
        for one in found:
            _compare(one.source, one, "SYNCVAR_RANK and its like, of syncvar-launch,", own, ("rank", "world_size"))
    return found[0] if found else None


def is_meant_alone(environ: Mapping[str, str]) -> bool:
    """Return whether a process that syncvar-launch did not start is told to be a world of one.

    Example:
        >>> is_meant_alone({"SYNCVAR_WORLD_SIZE": "1"})
        True
    """
    return environ.get(_OWN_SIZE) == "1"


def why_not_alone(environ: Mapping[str, str]) -> str:
    """Return why a process that nobody says who it is, to join it, must not be a world of one; empty where it may.

    It may not where a launcher says that it has started several, or cannot say that it has started one.

    Args:
        environ: The environment of a process of which neither syncvar-launch nor `told_elsewhere` knows anything.

    Raises:
        ConfigError: A number of processes is none.

    Example:
        >>> why_not_alone({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}).partition(",")[0]
        'OMPI_COMM_WORLD_SIZE=2: mpirun of Open MPI has started 2 processes'
        >>> why_not_alone({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # a shell of salloc: no srun has been here
        ''
    """
    own = environ.get(_OWN_SIZE)
    if own:
        return "" if own == "1" else (
            f"{_OWN_SIZE}={own} is set and SYNCVAR_RANK is not: syncvar-launch has not started this process. Start it with "
            f"syncvar-launch --workers {own} script.py; or set {_OWN_SIZE}=1 where it is alone on purpose"
        )
    seen = started_with_others(environ)
    if seen is not None:
        return _refusal(*seen)
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:  # RANK alone is set by many programs
        missing = " and ".join(name for name in _TORCH if name not in environ)
        return (
            f"RANK={rank} and WORLD_SIZE={size} are set, as torchrun sets them, and {missing or 'the rest'} not: set MASTER_ADDR and MASTER_PORT "
            f"to where rank 0 can be reached, the same for all {size}. Where each is alone on purpose, set {_OWN_SIZE}=1, or call "
            f"sv.init(alone=True)"
        )
    return ""


def started_with_others(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return that a launcher which is not joined has started several of this process, or cannot say that it has started one.

    Args:
        environ: The environment.

    Returns:
        What is seen, in words, and the number of processes as text; None where nothing is.

    Raises:
        ConfigError: A number of processes is none.
    """
    undecided: tuple[str, str] | None = None
    for one in _LAUNCHERS:
        if one is _SLURM and not _is_in_step(environ):
            continue
        for name in (*one.sizes, *one.local_sizes):
            size = _whole(environ, name) if name in environ else 0
            if size > 1:
                is_all = name in one.sizes
                here = "" if is_all else " on this host"
                return f"{name}={size}: {one.name} has started {size} processes{here}", str(size) if is_all else "N"
            if size == 1 and name in one.sizes:
                return None
        if one.rank in environ:
            rank = _whole(environ, one.rank)
            said = "has started more processes than this one" if rank else "may have started more processes than this one"
            undecided = undecided or (f"{one.rank}={rank}: {one.name} {said}", "N")
            if rank:
                return undecided
    return undecided


def _refusal(seen: str, workers: str) -> str:
    return (
        f"{seen}, and syncvar does not join them: each would be a world of one, with numbers of its own. Start them instead with\n"
        f"    syncvar-launch --workers {workers} script.py   # on one host\n"
        f"or, on several hosts, give each process what torchrun gives ({', '.join((*_TORCH, *_TORCH_LOCAL))}). Where each is "
        f"alone on purpose, set {_OWN_SIZE}=1, or call sv.init(alone=True)"
    )


def _is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this process, rather than that it merely runs where Slurm has given room.

    A batch script runs once, however many tasks its job has; so does an interactive shell.
    """
    if _SLURM.rank not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None:  # sbatch sets ENVIRONMENT, and the number of its only process
        return environ.get("ENVIRONMENT") != "BATCH" or environ[_SLURM.rank] != "0"
    return step.isdigit() and int(step) < _STEP_MAX


def _compare(one_source: str, one: Any, other_source: str, other: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(one, name) != getattr(other, name):
            raise ConfigError(
                f"{one_source} says {name} {getattr(one, name)}, {other_source} says {name} {getattr(other, name)}: unset "
                f"the variables of the launcher that did not start this process"
            )


def _torchrun(environ: Mapping[str, str]) -> Told | None:
    present = [name for name in _TORCH if name in environ]
    if len(present) < len(_TORCH):
        if "TORCHELASTIC_RUN_ID" in environ:
            missing = ", ".join(name for name in _TORCH if name not in present)
            raise ConfigError(f"TORCHELASTIC_RUN_ID is set, as by torchrun, but {missing} is not: start all ranks alike")
        return None
    local = [name for name in _TORCH_LOCAL if name in environ]
    source = ", ".join((*_TORCH, *local))
    rank, world_size = (_whole(environ, name) for name in _TORCH[:2])
    local_rank = _whole(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None
    local_world_size = _whole(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    if (local_rank is None) != (local_world_size is None):
        raise ConfigError(f"of LOCAL_RANK and LOCAL_WORLD_SIZE only {local[0]} is set: set both or none")
    if local_rank is None or local_world_size is None:  # as torch.distributed's env:// without torchrun
        is_here = environ["MASTER_ADDR"] in _LOOPBACK
        local_rank, local_world_size = (rank, world_size) if is_here else (0, 1)
        host_index, host_count = (0, 1) if is_here else (rank, world_size)
    else:
        host_index = _whole(environ, "GROUP_RANK") if "GROUP_RANK" in environ else (rank - local_rank) // max(1, local_world_size)
        host_count = -(-world_size // max(1, local_world_size))
        if "GROUP_WORLD_SIZE" in environ:
            host_count = _whole(environ, "GROUP_WORLD_SIZE")
    port = _port(environ["MASTER_PORT"], "MASTER_PORT")
    restarts = _whole(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0
    told = Told(
        source, rank, world_size, local_rank, local_world_size, host_index, host_count, environ["MASTER_ADDR"], port,
        environ.get("TORCHELASTIC_RUN_ID", "") + environ.get("TORCHELASTIC_RESTART_COUNT", ""), restarts,
    )  # fmt: skip
    _check(told)
    return told


def _tf_config(environ: Mapping[str, str]) -> Told | None:
    text = environ.get("TF_CONFIG")
    if text is None or not text.strip():
        return None
    import json  # only TF_CONFIG needs it

    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        kind, index = task["type"], task["index"]
        tasks = {name: list(cluster[name]) for name in cluster}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"TF_CONFIG cannot be read ({type(error).__name__}: {error}); it has to look like "
            f'{{"cluster": {{"worker": ["host:port", ...]}}, "task": {{"type": "worker", "index": 0}}}}'
        ) from None
    others = sorted(set(tasks) - {"chief", "master", "worker"})
    if others or kind not in ("chief", "master", "worker"):
        raise ConfigError(
            f"TF_CONFIG has tasks of type {', '.join(others) or kind}: only chief and worker become ranks; leave the "
            f"others out"
        )
    everyone: list[tuple[str, int]] = [(name, number) for name in ("chief", "master", "worker") for number in range(len(tasks.get(name, [])))]
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if (kind, index) not in everyone or isinstance(index, bool):
        raise ConfigError(f"TF_CONFIG: there is no task {kind} {index!r} in its cluster of {len(everyone)}")
    addresses = [tasks[name][number] for name, number in everyone]
    hosts: list[str] = []
    places: list[int] = []
    ports: list[int] = []
    for address in addresses:
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not colon or not host:
            raise ConfigError(f"TF_CONFIG: {address!r} is no host:port")
        if not hosts or host != hosts[-1]:
            if host in hosts:
                raise ConfigError(f"TF_CONFIG: the workers of {host} do not follow each other; list them host by host")
            hosts.append(host)
        places.append(len(hosts) - 1)
        ports.append(_port(port, "TF_CONFIG"))
    rank = everyone.index((kind, index))
    here = [other for other, place in enumerate(places) if place == places[rank]]
    return Told(
        "TF_CONFIG", rank, len(everyone), rank - here[0], len(here), places[rank], len(hosts), hosts[0].strip("[]"),
        ports[0], json.dumps(addresses),
    )  # fmt: skip


def _check(told: Told) -> None:
    for name, value, limit in (
        ("RANK", told.rank, told.world_size),
        ("LOCAL_RANK", told.local_rank, told.local_world_size),
        ("GROUP_RANK", told.host_index, told.host_count),
    ):
        if value >= limit:
            raise ConfigError(f"{name}={value} is outside of {limit} ({told.source})")
    if told.local_world_size > told.world_size or told.local_rank > told.rank:
        raise ConfigError(
            f"LOCAL_RANK={told.local_rank} of {told.local_world_size} contradicts RANK={told.rank} of {told.world_size}"
        )


def _whole(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} must be a non-negative integer, not {text!r}")
    return int(text)


def _port(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= _PORT_MAX:
        raise ConfigError(f"{name} has {text!r} for a port: it must be 1 to {_PORT_MAX}")
    return int(text)
