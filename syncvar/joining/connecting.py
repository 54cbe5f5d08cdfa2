"""Connecting: from what tells a process who it is to its context, with the sockets, the arena and the keys that this needs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from syncvar.arena.mapping import Arena
from syncvar.env import RankEnvironment
from syncvar.errors import ArenaUnavailable, ConfigError, UsageError
from syncvar.joining.context import Context
from syncvar.joining.secret import job_secret
from syncvar.logs import log_at
from syncvar.topology import is_meant_alone, told_elsewhere, why_not_alone

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    import zmq

    from syncvar.config import RuntimeConfig
    from syncvar.transports import Transport
    from syncvar.transports.curve import LinkKeys
    from syncvar.transports.mpi import Fabric

__all__ = ["connect"]

_log = logging.getLogger("syncvar")


def connect(environ: MutableMapping[str, str], generations: int, *, alone: bool) -> Context:
    """Return the context of this process, which has joined its job.

    Args:
        environ: What tells this process who it is.
        generations: How often it has joined before.
        alone: As a world of one, whatever it is told.

    Raises:
        RendezvousError: Not all ranks came in time.
        ConfigError: The environment or a setting is wrong, launchers contradict each other, or a secret is missing.
        UsageError: This process is a server.
    """
    from syncvar.config import RuntimeConfig, doubtful_variables

    environment = RankEnvironment.from_mapping(environ)
    if environment is not None and environment.role == "server":
        raise UsageError(f"server {environment.rank} is none of the ranks: an update rule that runs there makes no call of syncvar")
    if alone and environment is not None and environment.world_size > 1:
        raise ConfigError(
            f"sv.init(alone=True) contradicts SYNCVAR_RANK={environment.rank} and SYNCVAR_WORLD_SIZE={environment.world_size}: "
            f"syncvar-launch has started this process with others. Leave alone=True out, or start the script with plain python"
        )
    config = RuntimeConfig.from_mapping(environ).consistent()
    log_at(config.log_level)
    keeper = 0 if environment is None else None  # of the roll: rank 0's process, or the launcher
    if environment is None:  # syncvar-launch, which hands its settings on, has said so itself
        for sentence in doubtful_variables(environ):
            _log.warning("%s", sentence)
    secret: bytes | None = None
    fabric: Fabric | None = None
    if config.uses_mpi:
        environment, secret, fabric = _met_by_mpi(config, environ, environment, alone=alone)
    elif environment is None and not (alone or is_meant_alone(environ)):
        environment, secret = _met(config, environ)
    elif environment is not None:
        told_elsewhere(environ, environment)  # refuses a launcher that says otherwise
    if environment is None or (environment.world_size == 1 and environment.host_count == 1):
        return Context(environment, config)
    if secret is None and _leaves_the_host(environment):
        secret = job_secret(environ)
    return _wired(environment, config, environment.generation + generations, secret, fabric, keeper)


def _met(config: RuntimeConfig, environ: MutableMapping[str, str]) -> tuple[RankEnvironment | None, bytes | None]:
    """Return who this process is by what another launcher says, and the job's secret; nothing where it is alone."""
    told = told_elsewhere(environ, None)
    if told is None:
        reason = why_not_alone(environ)
        if reason:
            raise ConfigError(reason)
    if told is None or told.world_size == 1:
        return None, None
    from syncvar.joining.meeting import meet

    return meet(told, config, environ, job_secret(environ))


def _met_by_mpi(
    config: RuntimeConfig, environ: MutableMapping[str, str], environment: RankEnvironment | None, *, alone: bool
) -> tuple[RankEnvironment | None, bytes | None, Fabric | None]:
    """Return who this process is by what MPI says, the job's secret, and the process's end of MPI; nothing where it is alone."""
    if environment is not None:
        raise ConfigError(
            f"SYNCVAR_TRANSPORT={config.transport} contradicts SYNCVAR_RANK={environment.rank}: syncvar-launch starts no processes of MPI. "
            f"Start the script with mpirun, or unset SYNCVAR_TRANSPORT"
        )
    if alone or is_meant_alone(environ):
        return None, None, None
    from syncvar.joining.mpi_meeting import join

    joined = join(config, environ)
    if joined is None:
        return None, None, None
    from syncvar.joining.meeting import meet

    return *meet(joined.told, config, environ, job_secret(environ), joined.cards), joined.cards.fabric


def _leaves_the_host(environment: RankEnvironment) -> bool:
    return environment.host_count > 1 or environment.rendezvous.startswith("tcp://")


def _link_keys(environment: RankEnvironment, config: RuntimeConfig, secret: bytes | None) -> LinkKeys | None:
    """Return the keys by which this process speaks with other hosts; None where nothing is encrypted."""
    if not _leaves_the_host(environment) or config.encryption == "off":
        return None
    if secret is None:
        raise ConfigError(
            f"rank {environment.rank} is to speak with other hosts and has no secret (SYNCVAR_KEY_FD, SYNCVAR_KEY_FILE "
            f"or SYNCVAR_KEY): start the script with syncvar-launch"
        )
    from syncvar.transports.curve import link_keys

    return link_keys(secret, environment.job_id)


def _wired(
    environment: RankEnvironment, config: RuntimeConfig, generation: int, secret: bytes | None, fabric: Fabric | None, keeper: int | None
) -> Context:
    """Return the context of a rank that has others, with its control channel, its transport and its host's arena.

    Args:
        environment: Who it is.
        config: Deadlines and limits.
        generation: Version of the membership.
        secret: The job's; None where there is none.
        fabric: Its end of MPI, where that is the transport.
        keeper: The rank that keeps the roll; None for the launcher.
    """
    import zmq

    from syncvar.transports.zeromq import ZeromqControl, ZeromqTransport, tcp_endpoint

    keys = _link_keys(environment, config, secret)
    outside = tcp_endpoint(environment.host_address) if environment.host_count > 1 else ""
    zeromq: zmq.Context[Any] = zmq.Context()
    control: ZeromqControl | None = None
    transport: Transport | None = None
    arena: Arena | str = ""
    try:
        control = ZeromqControl(zeromq, environment.rendezvous, environment.rank, config, keys, keeper)
        if fabric is not None:
            from syncvar.transports.mpi import MpiTransport, tag_of

            transport = MpiTransport(fabric, environment.rank, tag_of(generation), config.segment_bytes, control)
        else:
            transport = ZeromqTransport(
                zeromq, environment.rank, f"ipc://{environment.socket_directory}", environment.job_id, config, control,
                outside=outside, keys=keys if outside else None,
            )  # fmt: skip
        arena = _attach(environment, config, generation)
        context = Context(environment, config, transport, control, generation, arena)
    except BaseException:
        if isinstance(arena, Arena):
            arena.close()
        if transport is not None:
            transport.close(0)
        if control is not None:
            control.close(0)
        zeromq.term()
        raise
    context.take_zeromq(zeromq)
    return context


def _attach(environment: RankEnvironment, config: RuntimeConfig, generation: int) -> Arena | str:
    """Return the arena of this host, or in words why there is none."""
    if not config.shares_memory:
        return f"SYNCVAR_TRANSPORT={config.transport} asks for it"
    if environment.local_world_size == 1:
        return "there is one rank on this host"
    from syncvar.arena.handing import arena_path, fetch

    path = arena_path(environment.socket_directory)
    fd, reason = fetch(
        path, environment.job_id, generation, environment.local_rank, min(config.handshake_timeout_s, 3600.0)
    )
    if fd is None:
        return reason or "the launcher gave no reason"
    try:
        return Arena.attach(fd, environment.local_rank, checks=config.check_arena == "on")
    except ArenaUnavailable as error:
        return str(error)
