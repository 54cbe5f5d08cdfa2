"""torchrun, and programs that set its variables by hand."""

from __future__ import annotations

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, port_of, whole
from syncvar.core.errors import ConfigError

_ALL = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Torchrun(LaunchEnvironment):
    """The variables of torchrun, all of them: many programs set RANK alone."""

    name = "torchrun"
    rank = "RANK"
    sizes = ("WORLD_SIZE",)

    def is_present(self) -> bool:
        """Return whether its variables identify this process."""
        return self.is_torchrun or all(name in self.environ for name in _ALL)

    @property
    def is_torchrun(self) -> bool:
        """Whether torchrun itself has started this process; it numbers its agents freely."""
        return "TORCHELASTIC_RUN_ID" in self.environ

    def source(self) -> str:
        """Return the variables, for messages."""
        return ", ".join((*_ALL, *(name for name in _LOCAL if name in self.environ)))

    def run(self) -> str:
        """Return the name of the run and its number of restarts."""
        return self.environ.get("TORCHELASTIC_RUN_ID", "") + self.environ.get(
            "TORCHELASTIC_RESTART_COUNT", ""
        )

    def info(self) -> LaunchInfo:
        """Return the identity of this process.

        Raises:
            ConfigError: The variables are incomplete or wrong.
        """
        environ = self.environ
        missing = ", ".join(name for name in _ALL if name not in environ)
        if missing:
            raise ConfigError(
                f"TORCHELASTIC_RUN_ID is set, as by torchrun, but {missing} is not: start all "
                "ranks alike"
            )
        rank, world_size = (whole(environ, name) for name in _ALL[:2])
        local = [name for name in _LOCAL if name in environ]
        if len(local) == 1:
            raise ConfigError(
                f"of LOCAL_RANK and LOCAL_WORLD_SIZE only {local[0]} is set: set both or none"
            )
        if local:
            local_rank, local_world_size = (whole(environ, name) for name in _LOCAL)
            host_index = (
                whole(environ, "GROUP_RANK")
                if "GROUP_RANK" in environ
                else (rank - local_rank) // max(1, local_world_size)
            )
            host_count = (
                whole(environ, "GROUP_WORLD_SIZE")
                if "GROUP_WORLD_SIZE" in environ
                else -(-world_size // max(1, local_world_size))
            )
        else:  # as with torch.distributed's env://
            is_here = environ["MASTER_ADDR"] in _LOOPBACK
            local_rank, local_world_size = (rank, world_size) if is_here else (0, 1)
            host_index, host_count = (0, 1) if is_here else (rank, world_size)
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
            whole(environ, "TORCHELASTIC_RESTART_COUNT")
            if "TORCHELASTIC_RESTART_COUNT" in environ
            else 0,
        )
        _check(info)
        return info


def _check(info: LaunchInfo) -> None:
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
