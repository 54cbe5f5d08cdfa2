"""Connect a process to its job: from environment variables to sockets and shared memory.

`process` calls `connect` at `sv.init` or at the first call that needs the job.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.bootstrap.context import ProcessContext
from syncvar.bootstrap.job_private import job_secret, keys_of
from syncvar.bootstrap.launch_env.detection import launcher_info, unknown_identity_reason
from syncvar.core.environment import environment_of, wants_world_of_one
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.exit_status import error_exit_code, is_interactive
from syncvar.core.fork_cleanup import hook_exceptions
from syncvar.core.settings import RuntimeConfig, doubtful_variables, log_at
from syncvar.shm.segment import SharedSegment

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from types import TracebackType

    import zmq

    from syncvar.bootstrap.kv_store import KeyValueStore, MpiStore
    from syncvar.bootstrap.launch_env import LaunchInfo
    from syncvar.core.environment import RankEnvironment
    from syncvar.core.fork_cleanup import ExceptionHook
    from syncvar.transports.base import Transport
    from syncvar.transports.curve import LinkKeys
    from syncvar.transports.mpi_transport import Fabric
    from syncvar.transports.zeromq_transport import ZeromqTransport

_log = logging.getLogger("syncvar")
_hooks_before: list[ExceptionHook] = []  # at most one
_FREED_NBYTES = 31 << 20  # a little less than glibc's largest dynamic threshold


def connect(environ: MutableMapping[str, str], generations: int, *, alone: bool) -> ProcessContext:
    """Return the context of this process, which has joined its job.

    Raise RendezvousError if not all ranks came in time, ConfigError if the environment or a setting
    is wrong, and UsageError in a server or a process that is no rank.
    """
    environment = environment_of(environ, alone=alone)
    if environment is not None and environment.role == "server":
        raise UsageError(
            f"server {environment.rank} is none of the ranks: an update rule that runs there "
            "makes no call of syncvar"
        )
    if alone and environment is not None and environment.world_size > 1:
        raise ConfigError(
            f"sv.init(alone=True) contradicts SYNCVAR_RANK={environment.rank} and "
            f"SYNCVAR_WORLD_SIZE={environment.world_size}: syncvar-launch has started this "
            "process with others. Leave alone=True out, or start the script with plain python"
        )
    config = RuntimeConfig.from_mapping(environ).consistent()
    log_at(config.log_level)
    # Rank whose process runs the rendezvous; None for the launcher.
    keeper = 0 if environment is None else None
    if environment is None:  # syncvar-launch has warned already, and translates exit codes
        _give_exit_codes()
        for sentence in doubtful_variables(environ):
            _log.warning("%s", sentence)
    secret: bytes | None = None
    kv_store: MpiStore | None = None
    if environment is not None and not config.uses_mpi:
        launcher_info(environ, environment)  # raises if another launcher contradicts
    elif environment is not None:
        raise ConfigError(
            f"SYNCVAR_TRANSPORT={config.transport} contradicts SYNCVAR_RANK={environment.rank}: "
            "syncvar-launch starts no processes of MPI. Start the script with mpirun, or unset "
            "SYNCVAR_TRANSPORT"
        )
    elif not (alone or wants_world_of_one(environ)):
        info, kv_store = _launcher_identity(config, environ)
        if info is not None:
            from syncvar.bootstrap.rendezvous import meet

            environment, secret = meet(info, config, environ, job_secret(environ), kv_store)
    if environment is None or environment.is_world_of_one:
        return ProcessContext(None if environment and environment.elastic else environment, config)
    keys = keys_of(environment, config, environ, secret)
    return _wired(
        environment,
        config,
        environment.generation + generations,
        keys,
        None if kv_store is None else kv_store.fabric,
        keeper,
    )


def connect_generation(
    environment: RankEnvironment, config: RuntimeConfig, keys: LinkKeys | None
) -> ProcessContext:
    """Return the context of a member of a generation of an elastic job.

    `environment` has the member's place in it. Raise RendezvousError or PeerLost if another member
    does not come.
    """
    if environment.world_size == 1:
        return ProcessContext(environment, config, generation=environment.generation)
    return _wired(environment, config, environment.generation, keys, None, None)


def connect_as(
    info: LaunchInfo, environ: MutableMapping[str, str], kv_store: KeyValueStore
) -> ProcessContext:
    """Return the context of a rank whose identity the program gives, instead of a launcher.

    The ranks of several hosts meet by `kv_store`. Errors are those of `connect`.
    """
    from syncvar.bootstrap.rendezvous import meet

    config = RuntimeConfig.from_mapping(environ).consistent()
    log_at(config.log_level)
    _give_exit_codes()
    environment, secret = meet(info, config, environ, job_secret(environ), kv_store)
    keys = keys_of(environment, config, environ, secret)
    return _wired(environment, config, 0, keys, None, 0)


def _launcher_identity(
    config: RuntimeConfig, environ: Mapping[str, str]
) -> tuple[LaunchInfo | None, MpiStore | None]:
    """Return the identity that MPI or another launcher gives this process; and MPI's store."""
    if config.uses_mpi:
        from syncvar.bootstrap.kv_store import join

        kv_store = join(config, environ)
        return (None, None) if kv_store is None else (kv_store.info, kv_store)
    info = launcher_info(environ, None)
    if info is None:
        reason = unknown_identity_reason(environ)
        if reason:
            raise ConfigError(reason)
    return None if info is None or info.world_size == 1 else info, None


def _wired(
    environment: RankEnvironment,
    config: RuntimeConfig,
    generation: int,
    keys: LinkKeys | None,
    fabric: Fabric | None,
    keeper: int | None,
) -> ProcessContext:
    """Return the context of a rank with others: control channel, transport and shared memory."""
    import zmq

    from syncvar.transports.zeromq_links import ZeromqControl
    from syncvar.transports.zeromq_sockets import tcp_endpoint
    from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport

    _keep_freed_memory()
    outside = tcp_endpoint(environment.host_address) if environment.host_count > 1 else ""
    with contextlib.ExitStack() as undoing:  # runs only if connecting fails
        zeromq: zmq.Context[Any] = zmq.Context()
        undoing.callback(zeromq.term)
        control = ZeromqControl(
            zeromq, environment.rendezvous, environment.rank, config, keys, keeper
        )
        undoing.callback(control.close, 0)
        transport: Transport
        if fabric is not None:
            from syncvar.transports.mpi_transport import MpiTransport, tag_of

            transport = MpiTransport(
                fabric, environment.rank, tag_of(generation), config.segment_bytes, control
            )
        else:
            links = ZeromqTransport(
                zeromq,
                environment.rank,
                f"ipc://{environment.socket_directory}",
                environment.job_id,
                config,
                control,
                HostLinks(outside, keys) if outside else None,
            )
            transport = _with_lanes(links, environment.rank, config, keys)
        undoing.callback(transport.close, 0)
        shm = _attach(environment, config, generation)
        if isinstance(shm, SharedSegment):
            undoing.callback(shm.close)
        context = ProcessContext(environment, config, transport, control, generation, shm)
        context.is_rank_served = keeper is not None
        context.ends_sockets = zeromq.term
        undoing.pop_all()
    return context


def _with_lanes(
    links: ZeromqTransport, rank: int, config: RuntimeConfig, keys: LinkKeys | None
) -> Transport:
    """Return a transport with lanes between hosts where there can be some, or the links."""
    if not links.outside:
        return links
    from syncvar.transports.lane_transport import LaneTransport, links_reason

    if reason := links_reason(config):
        _log.info("rank %d: data between hosts use ZeroMQ links: %s", rank, reason)
        return links
    key = None
    if config.encryption == "required":
        assert keys is not None
        key = keys.lanes
    return LaneTransport(links, rank, config, key)


def _attach(
    environment: RankEnvironment, config: RuntimeConfig, generation: int
) -> SharedSegment | str:
    """Return the shared memory of this host, or the reason why there is none."""
    if not config.shares_memory:
        return f"SYNCVAR_TRANSPORT={config.transport} asks for it"
    if environment.local_world_size == 1:
        return "there is one rank on this host"
    from syncvar.shm.fd_passing import fd_socket_path

    path = fd_socket_path(environment.socket_directory)
    return SharedSegment.fetch(path, environment, generation, environment.local_rank, config)


def _give_exit_codes() -> None:
    """Set the exit code for uncaught errors of syncvar; the previous excepthook runs first."""
    if not _hooks_before:
        _hooks_before.append(hook_exceptions(_exit_with_code))


def _exit_with_code(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _hooks_before[0](error_type, error, trace)
    code = error_exit_code(error)
    if code != 1 and not is_interactive():
        raise SystemExit(code)  # the interpreter takes the code and writes nothing


def _keep_freed_memory() -> None:
    """Let the C library reuse freed memory instead of returning it to the system array by array.

    glibc maps arrays of 128 KiB and more anew each time, until it has seen a longer one freed. Then
    it takes arrays of up to that length from its heap, and trims the heap beyond twice as much. A
    page from the system costs four times as much as reducing it. So this frees one untouched array
    of 31 MiB; at most 62 MiB stay. MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ override this;
    other C libraries ignore it.
    """
    np.empty(_FREED_NBYTES, np.uint8)
