"""Meeting by MPI: processes that an mpirun has started learn from the MPI library itself who they are and who is on their host.

What else they tell each other are the cards of `meeting`, handed round by collectives of MPI. From then on rank 0 keeps the roll
over its own channel: it tells of a rank that ends, which MPI does not.
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
from syncvar.bootstrap.launch_env.detection import started_with_others, told_elsewhere
from syncvar.bootstrap.launch_env.rank_placement import placed
from syncvar.core.errors import ConfigError, RendezvousError, UsageError
from syncvar.core.exit_codes import is_failing
from syncvar.core.fork_cleanup import register_exit
from syncvar.runtime.flight_recorder.recorder import boot_identity
from syncvar.transports.mpi_transport import Fabric, pause_after

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.settings import RuntimeConfig

__all__ = ["MpiCards", "join"]

_RECORD_NBYTES = 4096
_REMEDY = "Let mpirun fill host after host: --map-by slot (Open MPI), -ppn N or host:N (MPICH)"
_kept: list[MpiCards] = []  # at most one: a process joins again after `shutdown`


class MpiCards(KeyValueStore):
    """Cards that collectives of MPI hand round: each turn is one, and all ranks take part in it.

    Args:
        fabric: This process's end of MPI.
        timeout_s: Longest wait for all ranks, in seconds, for all turns together.

    Attributes:
        told: Who this process is, by MPI.
    """

    told: LaunchInfo

    def __init__(self, fabric: Fabric, timeout_s: float) -> None:
        self.fabric = fabric
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._own: dict[str, str] = {}
        self._all: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Put a card down."""
        self._own[key] = text

    def turn(self) -> None:
        """Wait until all ranks have come as far, and take the cards of all."""
        for cards in self.exchange(self._own):
            self._all |= cards
        self._own = {}

    def read(self, key: str, whose: str) -> str:
        """Return a card that was put down before the last turn."""
        if key not in self._all:
            raise RendezvousError(f"{whose} has put down no card {key!r}, by MPI")
        return self._all[key]

    def exchange(self, own: dict[str, str]) -> list[dict[str, str]]:
        """Return what each rank says."""
        byte, comm = self.fabric.mpi.BYTE, self.fabric.comm
        said = json.dumps(own).encode().ljust(_RECORD_NBYTES)
        heard = bytearray(_RECORD_NBYTES * comm.size)
        request = comm.Iallgather([said, byte], [heard, byte])
        _await(
            request,
            self._until,
            f"process {comm.rank} of MPI waited {self._timeout_s:g} s to hear of all {comm.size} of them",
        )
        return [
            json.loads(heard[start : start + _RECORD_NBYTES])
            for start in range(0, len(heard), _RECORD_NBYTES)
        ]


def join(config: RuntimeConfig, environ: Mapping[str, str]) -> MpiCards | None:
    """Learn by MPI who this process is; all processes of MPI_COMM_WORLD do it together, once in their lives.

    Args:
        config: Deadlines.
        environ: What engines say, to be compared; MASTER_ADDR, where rank 0 listens for other hosts, if that is to be chosen.

    Returns:
        The cards by which it meets the others; None where MPI has no other process.

    Raises:
        ConfigError: There is no MPI, it is not the one whose mpirun has started this process, it allows no threads, or the
            ranks of a host do not follow each other.
        RendezvousError: Not all processes came in time.
        UsageError: The program has finalized MPI.
    """
    if not _kept:
        joined = _join(config, environ)
        if joined is None:
            return None
        _kept.append(joined)
    return _kept[0]


def _join(config: RuntimeConfig, environ: Mapping[str, str]) -> MpiCards | None:
    if environ.get("SYNCVAR_ENCRYPTION") == "required":
        raise ConfigError(
            "SYNCVAR_ENCRYPTION=required contradicts SYNCVAR_TRANSPORT=mpi: what MPI carries it does not encrypt. Unset it, or set "
            "SYNCVAR_ENCRYPTION=control-only"
        )
    mpi, is_ours = _library()
    if is_ours:  # before those of the meeting and the context are registered: it runs after them
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
        f"process {rank} of MPI waited {config.rendezvous_timeout_s:g} s for all {size} of them to come to sv.init()",
    )
    comm.Set_errhandler(
        mpi.ERRORS_RETURN
    )  # which mpi4py raises as exceptions; else MPI would end the job
    cards = MpiCards(Fabric(mpi, comm), config.rendezvous_timeout_s)
    everyone = cards.exchange(
        {"host": socket.gethostname(), "boot": boot_identity(), "run": secrets.token_hex(8)}
    )
    told = LaunchInfo(
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
    cards.told = placed(
        told,
        [(one["host"], one["boot"]) for one in everyone],
        [one["host"] for one in everyone],
        _REMEDY,
    )
    return cards


def _library() -> tuple[Any, bool]:
    """Return the module of mpi4py, with MPI initialized, and whether it is for us to finalize."""
    is_ours = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if is_ours:
            mpi4py.rc.finalize = (
                False  # a rank that fails must not wait for the others in MPI_Finalize
            )
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"SYNCVAR_TRANSPORT=mpi needs mpi4py and an MPI library ({error}): pip install mpi4py, and have the library of "
            f"the mpirun that starts the job found first (MPI4PY_MPIABI, LD_LIBRARY_PATH)"
        ) from error
    if MPI.Is_finalized():
        raise UsageError("this process has finalized MPI: it cannot join by it any more")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigError(
            "SYNCVAR_TRANSPORT=mpi needs MPI_THREAD_SERIALIZED at least, and MPI was initialized with less: leave "
            "mpi4py.rc.thread_level as it is, and MPI4PY_RC_THREAD_LEVEL unset"
        )
    return MPI, is_ours


def _finalize(mpi: Any, process: int, timeout_s: float) -> None:
    """End MPI in order; not where this rank fails or let go of its links: MPI_Finalize waits for all, and some may be gone."""
    if os.getpid() != process or mpi.Is_finalized() or is_failing():
        return
    if _kept:
        fabric = _kept[0].fabric
        if fabric.is_broken:
            return
        with contextlib.suppress(RendezvousError):  # MPI_Finalize waits on, with a whole core
            _await(fabric.comm.Ibarrier(), time.monotonic() + timeout_s, "")
        fabric.close()
    mpi.Finalize()


def _compare(rank: int, size: int, library: str, environ: Mapping[str, str]) -> None:
    """Refuse an MPI library that says otherwise than the launchers."""
    told = told_elsewhere(environ)
    if told is not None and (told.rank, told.world_size) != (rank, size):
        raise ConfigError(
            f"{told.source} says rank {told.rank} of {told.world_size}, {library} says rank {rank} of {size}: the MPI library is not that "
            f"of the mpirun that started this process (MPI4PY_MPIABI, LD_LIBRARY_PATH), or variables are left over from another launcher"
        )
    seen = started_with_others(environ) if size == 1 and told is None else None
    if seen is not None:
        raise ConfigError(
            f"{seen[0]}, and {library} says that it is alone: the MPI library is not that of the mpirun that started this process "
            f"(MPI4PY_MPIABI, LD_LIBRARY_PATH)"
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
