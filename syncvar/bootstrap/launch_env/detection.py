"""Find the identity of a process that syncvar-launch has not started: which launcher counts.

Launchers nest: srun starts mpirun's daemons, these start the ranks, all in pods of Kubernetes. All
set variables, and the innermost counts. A user may have set the variables of torchrun and
TF_CONFIG by hand, so these two have their classes here. They must agree with each other, with
syncvar-launch and with the launcher that started the process.

A process that takes itself for a world of one by mistake would compute wrong results silently. So
if the variables are not sufficient to meet, that is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.bootstrap.launch_env import (
    LaunchEnvironment,
    LaunchInfo,
    add_host,
    port_of,
    whole,
)
from syncvar.bootstrap.launch_env.schedulers import (
    Flux,
    Horovod,
    Hydra,
    IndexedJob,
    Jsrun,
    Mvapich,
    OpenMpi,
    Pals,
    Pbsdsh,
    Pmix,
    Slurm,
)
from syncvar.core.environment import OWN_SIZE
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar.core.environment import RankEnvironment

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KINDS = ("chief", "master", "worker")


class TfConfig(LaunchEnvironment):
    """The variable TF_CONFIG: the cluster, and this process's task in it, as JSON."""

    name = "TF_CONFIG"
    rank = "TF_CONFIG"

    def is_present(self) -> bool:
        """Return whether it describes a cluster; TensorFlow ignores `{}` and an empty cluster."""
        text = self.environ.get("TF_CONFIG", "").strip()
        if not text:
            return False
        import json

        try:
            config = json.loads(text)
        except ValueError:
            return True  # `info` raises
        return not isinstance(config, dict) or bool(config.get("cluster", {}))

    def info(self) -> LaunchInfo:
        """Return the identity of this process; raise ConfigError if it is not a worker."""
        import json

        try:
            config = json.loads(self.environ["TF_CONFIG"])
            cluster, task = config["cluster"], config["task"]
            task_type, index = task["type"], task["index"]
            tasks = {name: list(cluster[name]) for name in cluster}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"TF_CONFIG cannot be read ({type(error).__name__}: {error}); it has to look like "
                '{"cluster": {"worker": ["host:port", ...]}, '
                '"task": {"type": "worker", "index": 0}}'
            ) from None
        others = sorted(set(tasks) - set(_KINDS))
        if "ps" in (*others, task_type):
            servers = max(1, len(tasks.get("ps", [])))
            raise ConfigError(
                "TF_CONFIG has tasks of type ps, and only syncvar-launch starts parameter servers: "
                "leave TF_CONFIG out, and write syncvar-launch --workers "
                f"{_workers(tasks)} --servers {servers} SCRIPT, with -H for several hosts"
            )
        if others or task_type not in _KINDS:
            raise ConfigError(
                f"TF_CONFIG has tasks of type {', '.join(others) or task_type}: only chief and "
                "worker become ranks; leave the others out"
            )
        everyone: list[tuple[str, int]] = [
            (name, number) for name in _KINDS for number in range(len(tasks.get(name, [])))
        ]
        if isinstance(index, str) and index.isascii() and index.isdigit():
            index = int(index)
        if (task_type, index) not in everyone or isinstance(index, bool):
            raise ConfigError(
                f"TF_CONFIG: there is no task {task_type} {index!r} in its cluster of "
                f"{len(everyone)}"
            )
        addresses = [tasks[name][number] for name, number in everyone]
        hosts, ports = _hosts_and_ports(addresses)
        info = LaunchInfo(
            "TF_CONFIG",
            everyone.index((task_type, index)),
            len(everyone),
            0,
            0,
            -1,
            0,
            hosts[0].strip("[]"),
            ports[0],
            json.dumps(addresses),
        )
        return add_host(info, hosts, hosts, "List the workers host by host")


def _hosts_and_ports(addresses: list[object]) -> tuple[list[str], list[int]]:
    hosts: list[str] = []
    ports: list[int] = []
    for address in addresses:
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not colon or not host:
            raise ConfigError(f"TF_CONFIG: {address!r} is no host:port")
        hosts.append(host)
        ports.append(port_of(port, "TF_CONFIG"))
    return hosts, ports


def _workers(tasks: Mapping[str, Sequence[str]]) -> int:
    return max(1, sum(len(tasks.get(task_type, ())) for task_type in _KINDS))


class Torchrun(LaunchEnvironment):
    """The variables of torchrun, all of them: many programs set RANK alone."""

    name = "torchrun"
    rank = "RANK"
    sizes = ("WORLD_SIZE",)

    def is_present(self) -> bool:
        """Return whether its variables identify this process."""
        return self.is_torchrun or all(name in self.environ for name in _TORCH)

    @property
    def is_torchrun(self) -> bool:
        """Whether torchrun itself has started this process; it numbers its agents freely."""
        return "TORCHELASTIC_RUN_ID" in self.environ

    def source(self) -> str:
        """Return the variables, for messages."""
        return ", ".join((*_TORCH, *(name for name in _LOCAL if name in self.environ)))

    def run(self) -> str:
        """Return the name of the run and its number of restarts."""
        get = self.environ.get
        return get("TORCHELASTIC_RUN_ID", "") + get("TORCHELASTIC_RESTART_COUNT", "")

    def info(self) -> LaunchInfo:
        """Return the identity of this process, or raise ConfigError."""
        environ = self.environ
        missing = ", ".join(name for name in _TORCH if name not in environ)
        if missing:
            raise ConfigError(
                f"TORCHELASTIC_RUN_ID is set, as by torchrun, but {missing} is not: start all "
                "ranks alike"
            )
        rank, world_size = (whole(environ, name) for name in _TORCH[:2])
        local = [name for name in _LOCAL if name in environ]
        if len(local) == 1:
            raise ConfigError(
                f"of LOCAL_RANK and LOCAL_WORLD_SIZE only {local[0]} is set: set both or none"
            )
        if local:
            local_rank, local_world_size = (whole(environ, name) for name in _LOCAL)
            each = max(1, local_world_size)
            host_index, host_count = (rank - local_rank) // each, -(-world_size // each)
            if "GROUP_RANK" in environ:
                host_index = whole(environ, "GROUP_RANK")
            if "GROUP_WORLD_SIZE" in environ:
                host_count = whole(environ, "GROUP_WORLD_SIZE")
        else:  # as with torch.distributed's env://
            is_here = environ["MASTER_ADDR"] in _LOOPBACK
            local_rank, local_world_size = (rank, world_size) if is_here else (0, 1)
            host_index, host_count = (0, 1) if is_here else (rank, world_size)
        restart = "TORCHELASTIC_RESTART_COUNT"
        restarts = whole(environ, restart) if restart in environ else 0
        info = LaunchInfo(
            self.source(),
            rank,
            world_size,
            local_rank,
            local_world_size,
            host_index,
            host_count,
            environ["MASTER_ADDR"],
            port_of(environ["MASTER_PORT"], "MASTER_PORT"),
            self.run(),
            restarts,
        )
        _check_torchrun(info)
        return info


def _check_torchrun(info: LaunchInfo) -> None:
    for name, value, limit in (
        ("RANK", info.rank, info.world_size),
        ("LOCAL_RANK", info.local_rank, info.local_world_size),
        ("GROUP_RANK", info.host_index, info.host_count),
    ):
        if value >= limit:
            raise ConfigError(f"{name}={value} is outside of {limit} ({info.source})")
    if info.local_world_size > info.world_size or info.local_rank > info.rank:
        raise ConfigError(
            f"LOCAL_RANK={info.local_rank} of {info.local_world_size} contradicts "
            f"RANK={info.rank} of {info.world_size}"
        )


SETTABLE_BY_HAND: tuple[type[LaunchEnvironment], ...] = (Torchrun, TfConfig)
# The innermost first, for instance mpirun under srun in a pod of Kubernetes.
LAUNCHERS: tuple[type[LaunchEnvironment], ...] = (
    *SETTABLE_BY_HAND,
    Horovod,
    OpenMpi,
    Mvapich,
    Hydra,
    Pals,
    Flux,
    Jsrun,
    Slurm,
    Pmix,
    Pbsdsh,
    IndexedJob,
)


class RankCounts(NamedTuple):
    """The numbers that are compared with another launcher."""

    rank: int
    world_size: int


def launcher_info(
    environ: Mapping[str, str], own: RankEnvironment | None = None
) -> LaunchInfo | None:
    """Return the identity from the innermost launcher; None if unknown or not sufficient to meet.

    `own` is the identity by syncvar-launch, if it has started this process; then only that counts.
    Raises ConfigError if two launchers contradict each other.

    Example:
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
        >>> launcher_info(env).rank
        1
        >>> launcher_info({"PATH": "/bin"}) is None
        True
    """
    around = _present(environ)
    by_hand = [one for one in around if isinstance(one, SETTABLE_BY_HAND)]
    found = [info for info in (one.info() for one in by_hand) if info is not None]
    if len(found) == 2:
        _compare(found[0].source, found[0], found[1].source, found[1], ("rank", "world_size"))
    if own is not None:
        ours = "syncvar-launch (SYNCVAR_RANK, SYNCVAR_WORLD_SIZE)"
        for info in found:
            _compare(info.source, info, ours, own, ("rank", "world_size"))
        return found[0] if found else None
    outer = next((one for one in around if one not in by_hand), None)
    if found and outer is not None:
        _compare_with_outer(by_hand[0], found[0], outer)
    if found or outer is None:
        return found[0] if found else None
    return outer.info()


def unknown_identity_reason(environ: Mapping[str, str]) -> str:
    """Return why a process without identity must not be a world of one; empty if it may be.

    It must not if a launcher has started several processes, or may have.

    Example:
        >>> unknown_identity_reason({"PMIX_RANK": "1"}).partition(", and")[0]
        'PMIX_RANK=1: a launcher that speaks PMIx has started more processes than this one'
        >>> unknown_identity_reason({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # a shell of salloc
        ''
    """
    seen = started_with_others(environ)
    own = environ.get(OWN_SIZE)
    if own and (seen is None or not seen[2]):
        if own == "1":
            return ""
        return (
            f"{OWN_SIZE}={own} is set and SYNCVAR_RANK is not: syncvar-launch has not started this "
            f"process. Start it with syncvar-launch --workers {own} script.py; or set {OWN_SIZE}=1 "
            "where it is alone on purpose"
        )
    if seen is not None:
        return "" if own == "1" else _refusal(*seen)
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:  # many programs set RANK alone
        missing = [name for name in _TORCH if name not in environ]
        verb = "is" if len(missing) == 1 else "are"
        return (
            f"RANK={rank} and WORLD_SIZE={size} are set, but {' and '.join(missing)} {verb} not: "
            "set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached, the same for all "
            f"{size} processes. Where each is alone on purpose, set {OWN_SIZE}=1, or call "
            "sv.init(alone=True)"
        )
    return ""


def started_with_others(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return a description, a count as text and advice if a launcher has started several processes.

    None without such a launcher; variables that a program may have set by hand do not count.
    """
    outer = next((one for one in _present(environ) if not isinstance(one, SETTABLE_BY_HAND)), None)
    seen = None if outer is None else outer.seen()
    return None if outer is None or seen is None else (*seen, outer.remedy)


def _present(environ: Mapping[str, str]) -> list[LaunchEnvironment]:
    """Return the launchers that are present, the innermost first."""
    return [one for one in (launcher(environ) for launcher in LAUNCHERS) if one.is_present()]


def _refusal(seen: str, workers: str, remedy: str) -> str:
    others = remedy or (
        "Or, on several hosts, give each process what torchrun gives "
        f"({', '.join((*_TORCH, 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))})"
    )
    return (
        f"{seen}, and no variable says how they meet: each would be a world of one, with results "
        f"of its own. Start them instead with\n    syncvar-launch --workers {workers} "
        f"script.py\n{others}. Where each is alone on purpose, set {OWN_SIZE}=1, or call "
        "sv.init(alone=True)"
    )


def _compare_with_outer(
    inner: LaunchEnvironment, info: LaunchInfo, outer: LaunchEnvironment
) -> None:
    """Raise ConfigError if variables contradict the launcher that has started the process.

    Each of the outer launcher's processes may have started several ranks, so its number may be
    smaller. With equal numbers the ranks must be equal; but torchrun numbers its processes freely.
    """
    size = outer.size()
    if not size or outer.rank not in outer.environ:
        return
    counts = RankCounts(whole(outer.environ, outer.rank), size)
    if info.world_size < size:
        _compare(info.source, info, outer.source(), counts, ("world_size",))
    if info.world_size == size and isinstance(inner, Torchrun) and not inner.is_torchrun:
        _compare(info.source, info, outer.source(), counts, ("rank",))


def _compare(
    one_source: str, one: Any, other_source: str, other: Any, names: tuple[str, ...]
) -> None:
    for name in names:
        if getattr(one, name) != getattr(other, name):
            raise ConfigError(
                f"{one_source} says {name} {getattr(one, name)}, {other_source} says {name} "
                f"{getattr(other, name)}: unset the variables of the launcher that did not start "
                "this process"
            )
