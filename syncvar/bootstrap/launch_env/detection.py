"""Decides who a process is that syncvar-launch has not started, and which launcher counts.

Launchers nest: srun starts mpirun's daemons, these start the ranks, all in pods of Kubernetes. All
set variables, and the innermost counts. The variables of torchrun and TF_CONFIG may have been set
by hand, so they must agree with each other, with syncvar-launch and with the launcher that started
the process.

A process that takes itself for a world of one by mistake would compute wrong results silently. So
if the variables are not sufficient to meet, that is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, whole
from syncvar.bootstrap.launch_env.kubernetes import IndexedJob
from syncvar.bootstrap.launch_env.mpi_launchers import Horovod, Hydra, Mvapich, OpenMpi, Pmix
from syncvar.bootstrap.launch_env.other_schedulers import Flux, Jsrun, Pals, Pbsdsh
from syncvar.bootstrap.launch_env.slurm import Slurm
from syncvar.bootstrap.launch_env.tf_config import TfConfig
from syncvar.bootstrap.launch_env.torchrun import Torchrun
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.environment import RankEnvironment

_OWN_SIZE = "SYNCVAR_WORLD_SIZE"
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

BY_HAND: tuple[type[LaunchEnvironment], ...] = (Torchrun, TfConfig)
"""Launchers whose variables a user may have set by hand."""

ENGINES: tuple[type[LaunchEnvironment], ...] = (
    *BY_HAND,
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
"""The innermost first, for instance mpirun under srun in a pod of Kubernetes."""


class RankCounts(NamedTuple):
    """The numbers that are compared with another launcher."""

    rank: int
    world_size: int


def launcher_info(
    environ: Mapping[str, str], own: RankEnvironment | None = None
) -> LaunchInfo | None:
    """Return the identity from the innermost launcher; None if unknown or not sufficient to meet.

    Args:
        environ: Environment variables.
        own: Identity by syncvar-launch, if it has started this process; then only that counts.

    Raises:
        ConfigError: A launcher's variables are incomplete or wrong, or two launchers contradict
            each other.

    Example:
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
        >>> launcher_info(env).rank
        1
        >>> launcher_info({"PATH": "/bin"}) is None
        True
    """
    around = _present(environ)
    by_hand = [one for one in around if isinstance(one, BY_HAND)]
    found = [info for info in (one.info() for one in by_hand) if info is not None]
    if len(found) == 2:
        _compare(found[0].source, found[0], found[1].source, found[1], ("rank", "world_size"))
    if own is not None:
        for info in found:
            _compare(
                info.source,
                info,
                "SYNCVAR_RANK and its like, of syncvar-launch,",
                own,
                ("rank", "world_size"),
            )
        return found[0] if found else None
    outer = next((one for one in around if one not in by_hand), None)
    if found and outer is not None:
        _compare_with_outer(by_hand[0], found[0], outer)
    if found or outer is None:
        return found[0] if found else None
    return outer.info()


def wants_world_of_one(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants a world of one, in a process without syncvar-launch.

    Example:
        >>> wants_world_of_one({"SYNCVAR_WORLD_SIZE": "1"})
        True
    """
    return environ.get(_OWN_SIZE) == "1"


def unknown_identity_reason(environ: Mapping[str, str]) -> str:
    """Return why a process without identity must not be a world of one; empty if it may be.

    It must not if a launcher has started several processes, or may have.

    Args:
        environ: Environment variables of a process of which neither syncvar-launch nor
            `launcher_info` knows enough.

    Raises:
        ConfigError: A number of processes is not a number.

    Example:
        >>> unknown_identity_reason({"PMIX_RANK": "1"}).partition(", and")[0]
        'PMIX_RANK=1: a launcher that speaks PMIx has started more processes than this one'
        >>> unknown_identity_reason({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # a shell of salloc
        ''
    """
    seen = started_with_others(environ)
    own = environ.get(_OWN_SIZE)
    if own and (seen is None or not seen[2]):
        return (
            ""
            if own == "1"
            else (
                f"{_OWN_SIZE}={own} is set and SYNCVAR_RANK is not: syncvar-launch has not "
                f"started this process. Start it with syncvar-launch --workers {own} script.py; "
                f"or set {_OWN_SIZE}=1 where it is alone on purpose"
            )
        )
    if seen is not None:
        return "" if own == "1" else _refusal(*seen)
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:  # many programs set RANK alone
        missing = " and ".join(name for name in _TORCH if name not in environ)
        return (
            f"RANK={rank} and WORLD_SIZE={size} are set, as torchrun sets them, and "
            f"{missing or 'the rest'} not: set MASTER_ADDR and MASTER_PORT to where rank 0 can be "
            f"reached, the same for all {size}. Where each is alone on purpose, set "
            f"{_OWN_SIZE}=1, or call sv.init(alone=True)"
        )
    return ""


def started_with_others(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return a description if a launcher has, or may have, started several processes.

    Variables that a program may have set by hand do not count.

    Returns:
        The description; the number of processes as text; the launcher's advice, or an empty text.
        None without such a launcher.

    Raises:
        ConfigError: A number of processes is not a number.
    """
    outer = next((one for one in _present(environ) if not isinstance(one, BY_HAND)), None)
    seen = None if outer is None else outer.seen()
    return None if outer is None or seen is None else (*seen, outer.remedy)


def _present(environ: Mapping[str, str]) -> list[LaunchEnvironment]:
    """Return the launchers that are present, the innermost first."""
    return [
        one
        for one in (environment_class(environ) for environment_class in ENGINES)
        if one.is_present()
    ]


def _refusal(seen: str, workers: str, remedy: str) -> str:
    others = remedy or (
        "Or, on several hosts, give each process what torchrun gives "
        f"({', '.join((*_TORCH, 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))})"
    )
    return (
        f"{seen}, and it is not said how they meet: each would be a world of one, with numbers of "
        f"its own. Start them instead with\n    syncvar-launch --workers {workers} "
        f"script.py\n{others}. Where each is alone on purpose, set {_OWN_SIZE}=1, or call "
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
