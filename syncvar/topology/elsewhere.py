"""Who a process is that another launcher has started: the variables of torchrun, and TF_CONFIG.

Several sources may say it at once. They must agree, with each other and with what syncvar-launch says; which one is
wrong nobody can know, so that a contradiction is refused, naming both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.env import RankEnvironment

__all__ = ["Told", "told_elsewhere"]

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCH_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PORT_MAX = 65535


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
    told = Told(
        source, rank, world_size, local_rank, local_world_size, host_index, host_count, environ["MASTER_ADDR"], port,
        environ.get("TORCHELASTIC_RUN_ID", "") + environ.get("TORCHELASTIC_RESTART_COUNT", ""),
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
