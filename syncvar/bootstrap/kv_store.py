"""Key-value stores through which ranks of several hosts find rank 0, if no port is configured.

The first rank of each host puts an entry with its host's name and size. Rank 0 puts one with its
address and the secret. `ProcessManager` uses PMI 1.1 (Flux RFC 13; MPICH, Flux) on an inherited
descriptor. `FolderStore` uses a private folder that all hosts see, named after the run.

With SYNCVAR_TRANSPORT=mpi, processes that mpirun has started learn their ranks and hosts from the
MPI library (`join`), and exchange entries by MPI collectives (`MpiStore`). Afterwards rank 0 runs
the rendezvous server over its own channel, because MPI does not report ended ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import select
import shutil
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.launch_env import MPI, LaunchInfo, add_host, host_of_each
from syncvar.bootstrap.launch_env.detection import launcher_info, started_with_others
from syncvar.core.errors import ConfigError, RendezvousError, UsageError
from syncvar.core.exit_status import is_failing
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.output_files import PRIVATE, make_private_folder, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.mpi_transport import Fabric

_VARIABLE = "SYNCVAR_RENDEZVOUS_DIR"
_FOLDER_NAME = "folder in which the ranks meet"
_REMEDY = f"set {_VARIABLE} to a folder that all hosts have, and in which you may make one"
_STALE_S = 7 * 86400.0
_PAUSE_S = 0.05
_ENTRY_MAX = 4096
_LINE_MAX = 4096
_RECORD_NBYTES = 4096
_MPI_REMEDY = "Let mpirun fill host after host: --map-by slot (Open MPI), -ppn N or host:N (MPICH)"
_joined: list[MpiStore] = []  # at most one: a process joins again after `shutdown`


def shared_folder(environ: Mapping[str, str]) -> Path:
    """Return the private folder that all hosts see; raise ConfigError if it is not private."""
    path = Path(environ.get("HOME") or "/") / ".syncvar"
    if folder := environ.get(_VARIABLE, ""):
        path = Path(folder) / f"syncvar-{os.getuid()}"
    make_private_folder(path, _FOLDER_NAME, _REMEDY)
    return path


class KeyValueStore:
    """A store for small texts; subclasses define where they are."""

    def add_host(self, info: LaunchInfo) -> LaunchInfo:
        """Add what the store knows about the hosts to the identity of this rank."""
        return info

    def put(self, key: str, text: str) -> None:
        """Put an entry that all ranks can read after the next `fence`."""
        raise NotImplementedError

    def read(self, key: str, owner: str) -> str:
        """Return an entry once it is there; `owner` names the rank that puts it, for messages."""
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until all ranks have put their entries."""

    def done(self) -> None:
        """Declare that this rank has read what it needs."""

    def remove(self) -> None:
        """Remove the entries; rank 0 calls this when all ranks have met. Idempotent."""


class FolderStore(KeyValueStore):
    """Entries as files in a private folder. Readers wait for a file, so there are no fences."""

    def __init__(self, environ: Mapping[str, str], run: str, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        name = hashlib.blake2b(run.encode(), digest_size=12).hexdigest()
        self._path = shared_folder(environ) / name
        make_private_folder(self._path, _FOLDER_NAME, _REMEDY)
        with contextlib.suppress(OSError):
            now = self._path.lstat().st_mtime
            for other in self._path.parent.iterdir():  # left over by runs that were killed
                is_stale = now - other.lstat().st_mtime > _STALE_S
                if is_stale and other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other)

    def put(self, key: str, text: str) -> None:
        """Put an entry atomically."""
        write_file(self._path, key, text, PRIVATE)

    def read(self, key: str, owner: str) -> str:
        """Return an entry once it exists."""
        while True:
            with contextlib.suppress(OSError):
                os.listdir(self._path)  # refreshes the cache of a network file system
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(self._path / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                with os.fdopen(descriptor, "rb") as file:
                    status = os.fstat(descriptor)
                    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                        raise ConfigError(f"{self._path / key} is not of this user")
                    return file.read(_ENTRY_MAX).decode("ascii", "replace")
            if time.monotonic() > self._until:
                raise RendezvousError(
                    f"{owner} has written nothing to {self._path} for {self._timeout_s:g} s; do "
                    f"all ranks run, and do all hosts have this folder? {_VARIABLE} names "
                    "another; or set MASTER_ADDR and MASTER_PORT to a free port of rank 0's "
                    "host, and SYNCVAR_KEY_FILE"
                )
            time.sleep(_PAUSE_S)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._path, ignore_errors=True)


class ProcessManager(KeyValueStore):
    """Entries that the process manager keeps for the run, over PMI 1.1; `name` is the run's.

    An MPI library in this process may use the same descriptor, so nothing of it is changed. A
    process that ends without `finalize` counts as crashed, and the manager kills all others. If an
    MPI library is in use, it sends `finalize`.
    """

    def __init__(self, environ: Mapping[str, str], timeout_s: float) -> None:
        text = environ["PMI_FD"]
        self._descriptor = int(text)
        self._timeout_s = timeout_s
        self._rest = b""
        try:
            is_socket = stat.S_ISSOCK(os.fstat(self._descriptor).st_mode)
        except OSError:
            is_socket = False
        if not is_socket:
            raise ConfigError(
                f"PMI_FD={text} is no socket of this process: mpiexec has started another one, "
                "which started this. Let mpiexec start this one, keep the descriptor open "
                "(close_fds=False), or set SYNCVAR_WORLD_SIZE=1 where this process is alone on "
                "purpose"
            )
        self._process = os.getpid()
        self.name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, text: str) -> None:
        """Put an entry."""
        self._ask(
            f"put kvsname={self.name} key=syncvar-{key} value={text.encode().hex()}", "put_result"
        )

    def fence(self) -> None:
        """Wait until all ranks have come here."""
        self._ask("barrier_in", "barrier_out")

    def read(self, key: str, owner: str) -> str:
        """Return an entry that was put before the last fence."""
        try:
            return bytes.fromhex(
                self._ask(f"get kvsname={self.name} key=syncvar-{key}", "get_result")["value"]
            ).decode()
        except (ValueError, RendezvousError) as error:
            raise RendezvousError(
                f"{owner} has put no entry {key!r} with the process manager (PMI): {error}"
            ) from error

    def add_host(self, info: LaunchInfo) -> LaunchInfo:
        """Add the hosts, as the process manager knows them, to the identity of this rank."""
        found = self._ask(f"get kvsname={self.name} key=PMI_process_mapping", "get_result")
        hosts = host_of_each(found["value"], info.world_size)
        remedy = "Give each host all of its ranks at once, for instance by mpiexec -ppn N"
        info = add_host(info, hosts, [f"host {host}" for host in hosts], remedy)
        return info._replace(run=f"{info.run} {self.name}")

    def done(self) -> None:
        """Declare that this rank may end without the others."""
        register_exit(self._finish)

    def _finish(self) -> None:
        # If this process fails, the manager should end the others.
        if os.getpid() == self._process and not is_failing() and not _is_mpi_in_use():
            with contextlib.suppress(RendezvousError):
                self._ask("finalize", "finalize_ack")

    def _ask(self, words: str, expected: str) -> dict[str, str]:
        """Send a request and return the fields of its answer."""
        until = time.monotonic() + self._timeout_s
        line = f"cmd={words}\n".encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            answer = self._line(until)
        except OSError as error:
            raise RendezvousError(
                f"the process manager (PMI_FD={self._descriptor}) cannot be reached: "
                f"{error.strerror}"
            ) from error
        fields = dict(part.partition("=")[::2] for part in answer.split())
        if fields.get("cmd") != expected or fields.get("rc", "0") != "0":
            raise RendezvousError(
                f"the process manager answers {words.partition(' ')[0]!r} with {answer!r}"
            )
        return fields

    def _line(self, until: float) -> str:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        while b"\n" not in self._rest:
            left_s = until - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise RendezvousError(
                    f"the process manager (PMI_FD={self._descriptor}) has not answered for "
                    f"{self._timeout_s:g} s: do all ranks come to sv.init()?"
                )
            more = os.read(self._descriptor, _LINE_MAX)
            if not more or len(self._rest) > _LINE_MAX:
                raise RendezvousError(
                    f"the process manager (PMI_FD={self._descriptor}) has ended, or its answer is "
                    "invalid"
                )
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("ascii", "replace")


def _is_mpi_in_use() -> bool:
    """Return whether an MPI library of this process is initialized; it then finalizes PMI."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines if "/libmpi" in line}
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            flag = ctypes.c_int(0)
            ctypes.CDLL(path).MPI_Initialized(ctypes.byref(flag))
            if flag.value:
                return True
    return False


class MpiStore(KeyValueStore):
    """Key-value entries that MPI collectives exchange; all ranks take part in each fence."""

    info: LaunchInfo  # identity of this process, by MPI

    def __init__(self, fabric: Fabric, timeout_s: float) -> None:
        self.fabric = fabric
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._own: dict[str, str] = {}
        self._all: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Put an entry."""
        self._own[key] = text

    def fence(self) -> None:
        """Exchange the entries of all ranks."""
        for entries in self.exchange(self._own):
            self._all |= entries
        self._own = {}

    def read(self, key: str, owner: str) -> str:
        """Return an entry that was put before the last fence."""
        if key not in self._all:
            raise RendezvousError(f"{owner} has put no entry {key!r}, by MPI")
        return self._all[key]

    def exchange(self, own: dict[str, str]) -> list[dict[str, str]]:
        """Return the entries of each rank."""
        byte, comm = self.fabric.mpi.BYTE, self.fabric.comm
        own_bytes = json.dumps(own).encode().ljust(_RECORD_NBYTES)
        found = bytearray(_RECORD_NBYTES * comm.size)
        request = comm.Iallgather([own_bytes, byte], [found, byte])
        failure = f"process {comm.rank} of MPI waited {self._timeout_s:g} s for the entries of all"
        _await(request, self._until, f"{failure} {comm.size} of them")
        starts = range(0, len(found), _RECORD_NBYTES)
        return [json.loads(found[start : start + _RECORD_NBYTES]) for start in starts]


def join(config: RuntimeConfig, environ: Mapping[str, str]) -> MpiStore | None:
    """Learn the identity of this process by MPI; collective over MPI_COMM_WORLD, once per process.

    Return the key-value store for meeting the other ranks; None if there is no other process.
    `environ` has the variables of launchers, to compare, and MASTER_ADDR, the address of rank 0.
    """
    if not _joined:
        joined = _join(config, environ)
        if joined is None:
            return None
        _joined.append(joined)
    return _joined[0]


def _join(config: RuntimeConfig, environ: Mapping[str, str]) -> MpiStore | None:
    if environ.get("SYNCVAR_ENCRYPTION") == "required":
        raise ConfigError(
            "SYNCVAR_ENCRYPTION=required contradicts SYNCVAR_TRANSPORT=mpi: what MPI carries it "
            "does not encrypt. Unset it, or set SYNCVAR_ENCRYPTION=control-only"
        )
    from syncvar.core.host_clock import boot_identity  # the launcher needs neither
    from syncvar.transports.mpi_transport import Fabric

    mpi, is_ours = _library()
    if is_ours:  # registered before those of rendezvous and context, so it runs after them
        register_exit(_finalize, mpi, os.getpid(), config.rendezvous_timeout_s)
    world = mpi.COMM_WORLD
    rank, size = world.rank, world.size
    library = mpi.Get_library_version().partition("\n")[0].partition(",")[0].strip("\0 ")
    _compare(rank, size, library, environ)
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
    kv_store = MpiStore(Fabric(mpi, comm), config.rendezvous_timeout_s)
    everyone = kv_store.exchange(
        {"host": socket.gethostname(), "boot": boot_identity(), "run": secrets.token_hex(8)}
    )
    address, run = environ.get("MASTER_ADDR", ""), everyone[0]["run"]
    info = LaunchInfo("MPI", rank, size, 0, 0, -1, 0, address, 0, run, way=MPI)
    info = info._replace(program=world.Get_attr(mpi.APPNUM) or 0)
    hosts = [(one["host"], one["boot"]) for one in everyone]
    kv_store.info = add_host(info, hosts, [one["host"] for one in everyone], _MPI_REMEDY)
    return kv_store


def _library() -> tuple[Any, bool]:
    """Return the module of mpi4py with MPI initialized, and whether syncvar has to finalize it."""
    is_ours = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if is_ours:
            # A failing rank must not wait for the others in MPI_Finalize.
            mpi4py.rc.finalize = False
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
    """Finalize MPI, unless this rank fails: MPI_Finalize waits for all, and some may be gone."""
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
    from syncvar.transports.mpi_transport import pause_after

    began = time.monotonic()
    while not request.Test():
        now = time.monotonic()
        if now > deadline:
            raise RendezvousError(
                f"{failure}: with SYNCVAR_TRANSPORT=mpi every process of MPI_COMM_WORLD is a rank"
            )
        time.sleep(pause_after(now - began))
