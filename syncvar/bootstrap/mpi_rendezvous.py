"""Rendezvous by MPI.

Processes that mpirun has started learn their ranks and hosts from the MPI library.

They exchange key-value entries by MPI collectives. Afterwards rank 0 runs the rendezvous server
over its own channel, because MPI does not report ended ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.kv_store import KeyValueStore
from syncvar.bootstrap.launch_env.base import MPI, LaunchInfo
from syncvar.bootstrap.launch_env.detection import launcher_info, started_with_others
from syncvar.bootstrap.launch_env.rank_placement import add_host
from syncvar.core.errors import ConfigError, RendezvousError, UsageError
from syncvar.core.exit_status import is_failing
from syncvar.core.fork_cleanup import register_exit
from syncvar.runtime.recorder import boot_identity
from syncvar.transports.mpi_transport import Fabric, pause_after

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.settings import RuntimeConfig

_RECORD_NBYTES = 4096
_REMEDY = "Let mpirun fill host after host: --map-by slot (Open MPI), -ppn N or host:N (MPICH)"
_joined: list[MpiCards] = []  # at most one: a process joins again after `shutdown`


class MpiCards(KeyValueStore):
    """Key-value entries that MPI collectives exchange; all ranks take part in each turn.

    Attributes:
        told: Identity of this process, by MPI.
    """

    info: LaunchInfo

    def __init__(self, fabric: Fabric, timeout_s: float) -> None:
        self.fabric = fabric
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._own: dict[str, str] = {}
        self._all: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Put an entry."""
        self._own[key] = text

    def turn(self) -> None:
        """Exchange the entries of all ranks."""
        for kv_store in self.exchange(self._own):
            self._all |= kv_store
        self._own = {}

    def read(self, key: str, owner: str) -> str:
        """Return an entry that was put before the last turn."""
        if key not in self._all:
            raise RendezvousError(f"{owner} has put no entry {key!r}, by MPI")
        return self._all[key]

    def exchange(self, own: dict[str, str]) -> list[dict[str, str]]:
        """Return the entries of each rank."""
        byte, comm = self.fabric.mpi.BYTE, self.fabric.comm
        own_bytes = json.dumps(own).encode().ljust(_RECORD_NBYTES)
        heard = bytearray(_RECORD_NBYTES * comm.size)
        request = comm.Iallgather([own_bytes, byte], [heard, byte])
        _await(
            request,
            self._until,
            f"process {comm.rank} of MPI waited {self._timeout_s:g} s to hear of all {comm.size} "
            "of them",
        )
        return [
            json.loads(heard[start : start + _RECORD_NBYTES])
            for start in range(0, len(heard), _RECORD_NBYTES)
        ]


def join(config: RuntimeConfig, environ: Mapping[str, str]) -> MpiCards | None:
    """Learn the identity of this process by MPI; collective over MPI_COMM_WORLD, once per process.

    Args:
        config: Deadlines.
        environ: Environment variables: those of launchers, to compare, and MASTER_ADDR, the address
            of rank 0.

    Returns:
        The key-value store for meeting the other ranks; None if there is no other process.

    Raises:
        ConfigError: MPI is missing, belongs to another mpirun, or allows no threads; or the ranks
            of a host do not follow each other.
        RendezvousError: Not all processes came in time.
        UsageError: The program has finalized MPI.
    """
    if not _joined:
        joined = _join(config, environ)
        if joined is None:
            return None
        _joined.append(joined)
    return _joined[0]


def _join(config: RuntimeConfig, environ: Mapping[str, str]) -> MpiCards | None:
    if environ.get("SYNCVAR_ENCRYPTION") == "required":
        raise ConfigError(
            "SYNCVAR_ENCRYPTION=required contradicts SYNCVAR_TRANSPORT=mpi: what MPI carries it "
            "does not encrypt. Unset it, or set SYNCVAR_ENCRYPTION=control-only"
        )
    mpi, is_ours = _library()
    if is_ours:  # registered before those of rendezvous and context, so it runs after them
        register_exit(_finalize, mpi, os.getpid(), config.rendezvous_timeout_s)
    world = mpi.COMM_WORLD
    rank, size = world.rank, world.size
    _compare(
        rank,
        size,
        mpi.Get_library_version().partition("\n")[0].partition(",")[0].strip("\0 "),
        environ,
    )
    if size == 1:
        return None
    comm, request = world.Idup()
    until = time.monotonic() + config.rendezvous_timeout_s
    _await(
        request,
        until,
        f"process {rank} of MPI waited {config.rendezvous_timeout_s:g} s for all {size} of them "
        "to come to sv.init()",
    )
    # mpi4py raises exceptions; otherwise MPI would end the job.
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    kv_store = MpiCards(Fabric(mpi, comm), config.rendezvous_timeout_s)
    everyone = kv_store.exchange(
        {"host": socket.gethostname(), "boot": boot_identity(), "run": secrets.token_hex(8)}
    )
    info = LaunchInfo(
        "MPI",
        rank,
        size,
        0,
        0,
        -1,
        0,
        environ.get("MASTER_ADDR", ""),
        0,
        everyone[0]["run"],
        way=MPI,
    )
    kv_store.info = add_host(
        info,
        [(one["host"], one["boot"]) for one in everyone],
        [one["host"] for one in everyone],
        _REMEDY,
    )
    return kv_store


def _library() -> tuple[Any, bool]:
    """Return the module of mpi4py with MPI initialized, and whether syncvar has to finalize it."""
    is_ours = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if is_ours:
            mpi4py.rc.finalize = (
                False  # a failing rank must not wait for the others in MPI_Finalize
            )
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"SYNCVAR_TRANSPORT=mpi needs mpi4py and an MPI library ({error}): pip install "
            "mpi4py, and have the library of the mpirun that starts the job found first "
            "(MPI4PY_MPIABI, LD_LIBRARY_PATH)"
        ) from error
    if MPI.Is_finalized():
        raise UsageError("this process has finalized MPI: it cannot join by it any more")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigError(
            "SYNCVAR_TRANSPORT=mpi needs MPI_THREAD_SERIALIZED at least, and MPI was initialized "
            "with less: leave mpi4py.rc.thread_level as it is, and MPI4PY_RC_THREAD_LEVEL unset"
        )
    return MPI, is_ours


def _finalize(mpi: Any, process: int, timeout_s: float) -> None:
    """Finalize MPI, unless this rank fails.

    MPI_Finalize waits for all ranks, and some may be gone.
    """
    if os.getpid() != process or mpi.Is_finalized() or is_failing():
        return
    if _joined:
        fabric = _joined[0].fabric
        if fabric.is_broken:
            return
        with contextlib.suppress(RendezvousError):  # MPI_Finalize itself would busy-wait
            _await(fabric.comm.Ibarrier(), time.monotonic() + timeout_s, "")
        fabric.close()
    mpi.Finalize()


def _compare(rank: int, size: int, library: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the MPI library contradicts the launchers."""
    info = launcher_info(environ)
    if info is not None and (info.rank, info.world_size) != (rank, size):
        raise ConfigError(
            f"{info.source} says rank {info.rank} of {info.world_size}, {library} says rank "
            f"{rank} of {size}: the MPI library is not that of the mpirun that started this "
            "process (MPI4PY_MPIABI, LD_LIBRARY_PATH), or variables are left over from another "
            "launcher"
        )
    seen = started_with_others(environ) if size == 1 and info is None else None
    if seen is not None:
        raise ConfigError(
            f"{seen[0]}, and {library} says that it is alone: the MPI library is not that of the "
            "mpirun that started this process (MPI4PY_MPIABI, LD_LIBRARY_PATH)"
        )


def _await(request: Any, deadline: float, failure: str) -> None:
    began = time.monotonic()
    while not request.Test():
        now = time.monotonic()
        if now > deadline:
            raise RendezvousError(
                f"{failure}: with SYNCVAR_TRANSPORT=mpi every process of MPI_COMM_WORLD is a rank"
            )
        time.sleep(pause_after(now - began))
