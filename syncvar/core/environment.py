"""The variables that the launcher hands to a worker: a contract, in one place.

`RankEnvironment.from_mapping` is the only reader and `RankEnvironment.to_mapping` the only writer, so that both
sides of the contract cannot drift apart. Knobs are not here: they are in `syncvar.core.settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "SYNCVAR_"

_INTEGERS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "host_index": "HOST_INDEX",
    "host_count": "HOST_COUNT",
    "generation": "GENERATION",
    "restarts": "RESTARTS",
    "servers": "SERVERS",
    "server_replicas": "SERVER_REPLICAS",
    "incarnation": "INCARNATION",
}
_MAY_BE_ABSENT = {
    "host_count": "1",
    "restarts": "0",
    "servers": "0",
    "server_replicas": "0",
    "incarnation": "0",
}
_TEXTS = {
    "rendezvous": "RENDEZVOUS",
    "job_id": "JOB_ID",
    "role": "ROLE",
    "host": "HOST",
    "flight_dir": "FLIGHT_DIR",
    "host_directory": "HOST_DIRECTORY",
    "host_address": "HOST_ADDRESS",
    "stats_dir": "STATS_DIR",
}
_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankEnvironment(NamedTuple):
    """Who a worker is, and where it meets the others; or who a server is, that serves them.

    Args:
        rank: 0-based identity in the world; of a server, among the servers.
        world_size: Ranks in the world.
        local_rank: 0-based identity among the ranks of this host.
        local_world_size: Ranks on this host.
        host_index: 0-based index of this host.
        host_count: Hosts of the job.
        generation: Version of the membership, 0 at first; it grows when the ranks meet anew and when they are started again.
        rendezvous: ZeroMQ endpoint of the store in the launcher.
        job_id: The job's random identity; frames of another job are refused.
        role: "worker" or "server".
        host: Name of this host, for messages.
        flight_dir: Folder for the flight record of a worker that fails; empty for none.
        host_directory: Private folder of this host's sockets; empty for that of the rendezvous.
        host_address: Where this host listens for the others, for instance "10.0.0.7"; empty for a job of one host.
        stats_dir: Folder for the totals of a worker's calls, or of what a server has done (`--stats`); empty for none.
        restarts: How often the job's ranks have been started again before (`--max-restarts`), 0 at first.
        servers: How many servers the job has.
        server_replicas: On how many other servers each one's variables have copies.
        incarnation: How often this process alone has been started again in place of one that failed, 0 at first.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_index: int
    host_count: int
    generation: int
    rendezvous: str
    job_id: str
    role: str = "worker"
    host: str = "localhost"
    flight_dir: str = ""
    host_directory: str = ""
    host_address: str = ""
    restarts: int = 0
    stats_dir: str = ""
    servers: int = 0
    server_replicas: int = 0
    incarnation: int = 0

    @property
    def socket_directory(self) -> str:
        """The folder of this host's sockets."""
        return self.host_directory or self.rendezvous.removeprefix("ipc://").rpartition("/")[0]

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> RankEnvironment | None:
        """Read the contract from an environment.

        Returns:
            None when no launcher started this process (`SYNCVAR_RANK` is absent).

        Raises:
            ConfigError: The contract is incomplete or a value is not what it should be.

        Example:
            >>> RankEnvironment.from_mapping({"PATH": "/bin"}) is None
            True
        """
        if PREFIX + "RANK" not in environ:
            return None
        values: dict[str, int | str] = {}
        for field, name in _INTEGERS.items():
            text = environ.get(PREFIX + name)
            if text is None:
                text = _MAY_BE_ABSENT.get(field)
            if text is None:
                raise ConfigError(
                    f"{PREFIX}RANK is set but {PREFIX}{name} is not: start the script with syncvar-launch, "
                    f"or unset {PREFIX}RANK and set {PREFIX}WORLD_SIZE=1 to run it as a world of one"
                )
            if not (text.isascii() and text.isdigit()):
                raise ConfigError(f"{PREFIX}{name} must be a non-negative integer, not {text!r}")
            values[field] = int(text)
        for field, name in _TEXTS.items():
            text = environ.get(PREFIX + name)
            if text is None and field in ("rendezvous", "job_id"):
                raise ConfigError(
                    f"{PREFIX}{name} is not set: start the script with syncvar-launch"
                )
            if text is not None:
                values[field] = text
        result = cls(**values)  # type: ignore[arg-type]
        if result.role == "server":
            if result.rank >= result.servers:
                raise ConfigError(f"{PREFIX}RANK={result.rank} is outside {result.servers} servers")
            return result
        if result.rank >= result.world_size:
            raise ConfigError(
                f"{PREFIX}RANK={result.rank} is outside a world of {result.world_size}"
            )
        if result.local_rank >= result.local_world_size:
            raise ConfigError(
                f"{PREFIX}LOCAL_RANK={result.local_rank} is outside a host of {result.local_world_size} ranks"
            )
        if PREFIX + "HOST_COUNT" in environ and result.host_index >= result.host_count:
            raise ConfigError(
                f"{PREFIX}HOST_INDEX={result.host_index} is outside a job of {result.host_count} hosts"
            )
        return result

    def to_mapping(self) -> dict[str, str]:
        """Return the variables that state this contract, the plain names of torchrun included.

        Example:
            >>> me = RankEnvironment(1, 2, 1, 2, 0, 1, 0, "ipc:///x", "j")
            >>> RankEnvironment.from_mapping(me.to_mapping()) == me
            True
        """
        result = {
            PREFIX + name: str(getattr(self, field)) for field, name in (_INTEGERS | _TEXTS).items()
        }
        for name in _PLAIN:
            result[name] = result[PREFIX + name]
        return result
