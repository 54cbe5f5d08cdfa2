"""Who a process is that syncvar-launch has not started: what the engines around it say, and which of them counts.

Engines nest: srun starts mpirun's daemons, these the ranks, in pods of Kubernetes. All have their variables in the
environment then, and the innermost counts. Of what a program may have set by hand, the variables of torchrun and
TF_CONFIG, it cannot be known which is wrong: they have to agree, with each other, with what syncvar-launch says, and
with the engine that has started the process; a contradiction is refused, naming both.

A process of several that took itself for a world of one would compute wrong numbers, and nobody would see it: where an
engine does not say enough to meet, that is refused too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, whole
from syncvar.bootstrap.launch_env.launcher_order import BY_HAND, ENGINES
from syncvar.bootstrap.launch_env.torchrun import Torchrun
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.environment import RankEnvironment

__all__ = ["is_meant_alone", "started_with_others", "told_elsewhere", "why_not_alone"]

_OWN_SIZE = "SYNCVAR_WORLD_SIZE"
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _Said(NamedTuple):
    """What is compared of an engine that has started this process."""

    rank: int
    world_size: int


def told_elsewhere(
    environ: Mapping[str, str], own: RankEnvironment | None = None
) -> LaunchInfo | None:
    """Return what the innermost engine says of this process, or None where none does, or not enough to meet.

    Args:
        environ: The environment.
        own: What syncvar-launch says, where it has started this process: then nobody but it counts.

    Raises:
        ConfigError: An engine is incomplete or wrong, or two contradict each other.

    Example:
        >>> told_elsewhere({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).rank
        1
        >>> told_elsewhere({"PATH": "/bin"}) is None
        True
    """
    around = _present(environ)
    by_hand = [one for one in around if isinstance(one, BY_HAND)]
    found = [told for told in (one.told() for one in by_hand) if told is not None]
    if len(found) == 2:
        _compare(found[0].source, found[0], found[1].source, found[1], ("rank", "world_size"))
    if own is not None:
        for told in found:
            _compare(
                told.source,
                told,
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
    return outer.told()


def is_meant_alone(environ: Mapping[str, str]) -> bool:
    """Return whether a process that syncvar-launch did not start is told to be a world of one.

    Example:
        >>> is_meant_alone({"SYNCVAR_WORLD_SIZE": "1"})
        True
    """
    return environ.get(_OWN_SIZE) == "1"


def why_not_alone(environ: Mapping[str, str]) -> str:
    """Return why a process that nobody says who it is, to join it, must not be a world of one; empty where it may.

    It may not where an engine says that it has started several, or cannot say that it has started one.

    Args:
        environ: The environment of a process of which neither syncvar-launch nor `told_elsewhere` knows enough.

    Raises:
        ConfigError: A number of processes is none.

    Example:
        >>> why_not_alone({"PMIX_RANK": "1"}).partition(", and")[0]
        'PMIX_RANK=1: a launcher that speaks PMIx has started more processes than this one'
        >>> why_not_alone({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # a shell of salloc: no srun has been here
        ''
    """
    seen = started_with_others(environ)
    own = environ.get(_OWN_SIZE)
    if own and (seen is None or not seen[2]):
        return (
            ""
            if own == "1"
            else (
                f"{_OWN_SIZE}={own} is set and SYNCVAR_RANK is not: syncvar-launch has not started this process. Start it with "
                f"syncvar-launch --workers {own} script.py; or set {_OWN_SIZE}=1 where it is alone on purpose"
            )
        )
    if seen is not None:
        return "" if own == "1" else _refusal(*seen)
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if (
        rank.isdecimal() and size.isdecimal() and int(size) > 1
    ):  # RANK alone is set by many programs
        missing = " and ".join(name for name in _TORCH if name not in environ)
        return (
            f"RANK={rank} and WORLD_SIZE={size} are set, as torchrun sets them, and {missing or 'the rest'} not: set MASTER_ADDR and MASTER_PORT "
            f"to where rank 0 can be reached, the same for all {size}. Where each is alone on purpose, set {_OWN_SIZE}=1, or call "
            f"sv.init(alone=True)"
        )
    return ""


def started_with_others(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return that an engine has started several of this process, or cannot say that it has started one.

    Variables that a program may have set by hand are left out.

    Args:
        environ: The environment.

    Returns:
        What is seen, in words; the number of processes as text; and what to write, where the engine has more to say of
        that. None where nothing is seen.

    Raises:
        ConfigError: A number of processes is none.
    """
    outer = next((one for one in _present(environ) if not isinstance(one, BY_HAND)), None)
    seen = None if outer is None else outer.seen()
    return None if outer is None or seen is None else (*seen, outer.remedy)


def _present(environ: Mapping[str, str]) -> list[LaunchEnvironment]:
    """Return the engines that are there, the innermost first."""
    return [one for one in (kind(environ) for kind in ENGINES) if one.is_present()]


def _refusal(seen: str, workers: str, remedy: str) -> str:
    others = (
        remedy
        or f"Or, on several hosts, give each process what torchrun gives ({', '.join((*_TORCH, 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))})"
    )
    return (
        f"{seen}, and it is not said how they meet: each would be a world of one, with numbers of its own. Start them instead with\n"
        f"    syncvar-launch --workers {workers} script.py\n"
        f"{others}. Where each is alone on purpose, set {_OWN_SIZE}=1, or call sv.init(alone=True)"
    )


def _compare_with_outer(
    inner: LaunchEnvironment, told: LaunchInfo, outer: LaunchEnvironment
) -> None:
    """Refuse variables that contradict the engine that has started the process, or what has set them.

    Each of its processes may have started several ranks, so that it may be fewer. Where they are as many, each is the rank
    that it is; but torchrun numbers those that it starts as they come.
    """
    size = outer.size()
    if not size or outer.rank not in outer.environ:
        return
    said = _Said(whole(outer.environ, outer.rank), size)
    if told.world_size < size:
        _compare(told.source, told, outer.source(), said, ("world_size",))
    if told.world_size == size and isinstance(inner, Torchrun) and not inner.is_torchrun:
        _compare(told.source, told, outer.source(), said, ("rank",))


def _compare(
    one_source: str, one: Any, other_source: str, other: Any, names: tuple[str, ...]
) -> None:
    for name in names:
        if getattr(one, name) != getattr(other, name):
            raise ConfigError(
                f"{one_source} says {name} {getattr(one, name)}, {other_source} says {name} {getattr(other, name)}: unset "
                f"the variables of the launcher that did not start this process"
            )
