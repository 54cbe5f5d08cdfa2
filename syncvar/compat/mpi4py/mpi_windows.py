"""Windows of shared memory, and the parts of MPI that this layer does not have."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from functools import partialmethod
from typing import TYPE_CHECKING, Any, NoReturn, Self

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_buffers import buffer
from syncvar.compat.mpi4py.mpi_datatypes import AttributesMixin
from syncvar.compat.mpi4py.mpi_errors import (
    FILES,
    INTERCOMM,
    REMOTE,
    HandlerMixin,
    MpiException,
    UnsupportedByLayer,
    constant,
    reduced,
)
from syncvar.compat.mpi4py.mpi_groups import INFO_NULL, Info, MpiGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOCK_SLEEP_S = 2e-4


class LockFile:
    """Locks between the processes of a host, one for each rank: ranges of a file without a name.

    The operating system gives them up when a process ends.
    """

    def __init__(self, comm: Any) -> None:
        path = None
        if comm.rank == 0:
            descriptor, path = tempfile.mkstemp(prefix="syncvar-window-")
            os.close(descriptor)
        path = comm.allgather_plain(path)[0]
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        comm.allgather_plain(None)
        if comm.rank == 0:
            os.unlink(path)
        self.locked: set[int] = set()

    def lock(self, rank: int, *, is_exclusive: bool) -> None:
        """Wait for the lock of a rank."""
        kind = fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH
        timeout_s = current().config.collective_timeout_s
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, rank)
                self.locked.add(rank)
                return
            if time.monotonic() > until:
                raise sv.DeadlineExceeded(
                    f"Win.Lock({rank}) did not get the lock within {timeout_s} s: a rank that "
                    f"holds it has not called Unlock",
                    timeout_s=timeout_s,
                )
            time.sleep(_LOCK_SLEEP_S)

    def unlock(self, rank: int) -> None:
        """Give up the lock of a rank."""
        if rank not in self.locked:
            raise MpiException(const.ERR_RMA_SYNC, f"rank {rank} is not locked")
        self.locked.remove(rank)
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)

    def close(self) -> None:
        """Give up all locks."""
        os.close(self._descriptor)


class SharedWindow:
    """Memory that the ranks of a communicator share: a part of each rank, one behind the other.

    Args:
        comm: Communicator; its ranks are on one host.
        nbytes: Bytes of this rank's part.
        unit: Bytes of one step of a displacement.
    """

    def __init__(self, comm: Any, nbytes: int, unit: int) -> None:
        self.comm = comm.Dup()
        parts = self.comm.allgather_plain((int(nbytes), int(unit)))
        self.sizes = [size for size, _ in parts]
        self.units = [one for _, one in parts]
        group = self.comm.state.group
        total = max(1, sum(self.sizes))
        self.memory: NDArray[Any] = sv.shared_array(total, "uint8", group=group)
        self.locks = LockFile(self.comm)
        self.name = ""
        self.attributes: dict[int, Any] = {}

    def part(self, rank: int) -> buffer:
        """Return the memory of a rank."""
        start = sum(self.sizes[:rank])
        return buffer(self.memory[start : start + self.sizes[rank]])


class Win(AttributesMixin, HandlerMixin):
    """A window: memory that the ranks of a host share, from `Allocate_shared`.

    Args:
        win: Window to refer to; None for a null window.
    """

    _window: SharedWindow | None = None

    def __new__(cls, win: Win | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if win is not None:
            if not isinstance(win, Win):
                raise TypeError(f"{win!r} is no Win")
            self._window = win._window
        return self

    @property
    def window(self) -> SharedWindow:
        """The memory; raises for a null window."""
        if self._window is None:
            raise MpiException(const.ERR_WIN, "the window is WIN_NULL")
        return self._window

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None
    ) -> Win:
        """Return a window of memory that all ranks of a communicator share.

        Args:
            size: Bytes of this rank's part.
            disp_unit: Bytes of one step of a displacement.
            info: Hints, which this layer ignores: the parts lie one behind the other.
            comm: Communicator of ranks on one host; None means COMM_SELF.
        """
        win = cls()
        communicator = constant("COMM_SELF") if comm is None else comm
        win._window = SharedWindow(communicator, size, disp_unit)
        return win

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """Return the memory of a rank and its unit; PROC_NULL means the first that has memory."""
        window = self.window
        if rank == const.PROC_NULL:
            rank = next((one for one, size in enumerate(window.sizes) if size), 0)
        if not 0 <= rank < len(window.sizes):
            raise MpiException(const.ERR_RANK, f"rank {rank} is not in the window")
        return window.part(rank), window.units[rank]

    def tomemory(self) -> buffer:
        """Return the memory of this rank."""
        return self.window.part(self.window.comm.rank)

    def Free(self) -> None:
        """Give up the window, when all ranks do."""
        window = self.window
        self._delete_attributes()
        window.comm.Barrier()
        window.locks.close()
        window.comm.Free()
        self._window = None

    def free(self) -> None:
        """Give up the window if it is not null."""
        if self._window is not None:
            self.Free()

    # -- synchronization

    def Fence(self, assertion: int = 0) -> None:
        """Wait for all ranks; writes before it are visible behind it."""
        self.window.comm.Barrier()

    def Sync(self) -> None:
        """Make writes visible; the processors of this layer need no step for it."""
        assert self.window is not None

    Flush_all = Flush_local_all = Sync

    def Flush(self, rank: int) -> None:
        """Make writes visible; the processors of this layer need no step for it."""
        self.Sync()

    Flush_local = Flush

    def Lock(self, rank: int, lock_type: int = const.LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Wait for the lock of a rank's memory."""
        if lock_type not in (const.LOCK_EXCLUSIVE, const.LOCK_SHARED):
            raise MpiException(const.ERR_LOCKTYPE, f"{lock_type} is no kind of lock")
        locks = self.window.locks
        if rank in locks.locked:
            raise MpiException(const.ERR_RMA_SYNC, f"rank {rank} is locked already")
        locks.lock(rank, is_exclusive=lock_type == const.LOCK_EXCLUSIVE)

    def Unlock(self, rank: int) -> None:
        """Give up the lock of a rank's memory."""
        self.window.locks.unlock(rank)

    def Lock_all(self, assertion: int = 0) -> None:
        """Wait for the shared locks of all ranks."""
        for rank in range(len(self.window.sizes)):
            self.Lock(rank, const.LOCK_SHARED)

    def Unlock_all(self) -> None:
        """Give up the locks of all ranks."""
        for rank in range(len(self.window.sizes)):
            self.Unlock(rank)

    # -- description

    def Get_group(self) -> MpiGroup:
        """Return the group of the ranks."""
        group: MpiGroup = self.window.comm.Get_group()
        return group

    group = property(Get_group)

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return len(self.window.sizes)

    @property
    def group_rank(self) -> int:
        """This process's rank."""
        rank: int = self.window.comm.rank
        return rank

    @property
    def attrs(self) -> tuple[int, int, int]:
        """Address, size and unit of this rank's memory."""
        rank = self.group_rank
        window = self.window
        return window.part(rank).address, window.sizes[rank], window.units[rank]

    flavor = const.WIN_FLAVOR_SHARED
    model = const.WIN_UNIFIED

    def Get_attr(self, keyval: int) -> Any:
        """Return the value of a key, or None."""
        known = dict(
            zip((const.WIN_BASE, const.WIN_SIZE, const.WIN_DISP_UNIT), self.attrs, strict=True)
        )
        known[const.WIN_CREATE_FLAVOR], known[const.WIN_MODEL] = self.flavor, self.model
        return known[keyval] if keyval in known else super().Get_attr(keyval)

    @property
    def _attributes(self) -> dict[int, Any]:  # type: ignore[override]
        return self.window.attributes

    def Get_info(self) -> Info:
        """Return an empty info."""
        return Info.Create()

    def Set_info(self, info: Info) -> None:
        """Ignore hints."""

    info = property(Get_info, Set_info)

    def Get_name(self) -> str:
        """Return the name."""
        return "MPI_WIN_NULL" if self._window is None else self._window.name

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self.window.name = name

    name = property(Get_name, Set_name)

    @property
    def handle(self) -> int:
        """A number of the window."""
        return 0 if self._window is None else id(self._window)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Win):
            return NotImplemented
        return self._window is other._window

    def __hash__(self) -> int:
        return hash(self.handle)

    def __bool__(self) -> bool:
        return self._window is not None

    def __reduce__(self) -> Any:
        if self:
            raise ValueError("cannot pickle a window")
        return reduced(self, "WIN_NULL")

    # -- what the layer does not have

    @classmethod
    def _refuse(cls, name: str, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedByLayer(f"Win.{name}", REMOTE)

    def _refused(self, name: str, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedByLayer(f"Win.{name}", REMOTE)

    @classmethod
    def Create(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise: the layer has shared windows only."""
        cls._refuse("Create")

    @classmethod
    def Allocate(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise: the layer has shared windows only."""
        cls._refuse("Allocate")

    @classmethod
    def Create_dynamic(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise: the layer has shared windows only."""
        cls._refuse("Create_dynamic")

    Put = partialmethod(_refused, "Put")
    Get = partialmethod(_refused, "Get")
    Accumulate = partialmethod(_refused, "Accumulate")
    Get_accumulate = partialmethod(_refused, "Get_accumulate")
    Fetch_and_op = partialmethod(_refused, "Fetch_and_op")
    Compare_and_swap = partialmethod(_refused, "Compare_and_swap")
    Rput = partialmethod(_refused, "Rput")
    Rget = partialmethod(_refused, "Rget")
    Raccumulate = partialmethod(_refused, "Raccumulate")
    Rget_accumulate = partialmethod(_refused, "Rget_accumulate")
    Start = partialmethod(_refused, "Start")
    Complete = partialmethod(_refused, "Complete")
    Post = partialmethod(_refused, "Post")
    Wait = partialmethod(_refused, "Wait")
    Test = partialmethod(_refused, "Test")


class File:
    """Stands for MPI's files, which this layer does not have."""

    @classmethod
    def Open(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise: the layer has no files."""
        raise UnsupportedByLayer("File.Open", FILES)

    @classmethod
    def Delete(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise: the layer has no files."""
        raise UnsupportedByLayer("File.Delete", "os.unlink on one rank")

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File)

    def __hash__(self) -> int:
        return 0


class MpiSession:
    """Stands for MPI's sessions, which this layer does not have."""

    @classmethod
    def Init(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise: the layer has no sessions."""
        raise UnsupportedByLayer("Session.Init", "MPI.COMM_WORLD, which exists from the import on")

    def __bool__(self) -> bool:
        return False


def refuse_ports(*args: Any, **options: Any) -> NoReturn:
    """Raise: the layer has no ports."""
    raise UnsupportedByLayer("Open_port", INTERCOMM)


def refuse_names(*args: Any, **options: Any) -> NoReturn:
    """Raise: the layer has no names of services."""
    raise UnsupportedByLayer("Publish_name", INTERCOMM)


def refuse_datarep(*args: Any, **options: Any) -> NoReturn:
    """Raise: the layer has no files."""
    raise UnsupportedByLayer("Register_datarep", FILES)


WIN_NULL = Win()
FILE_NULL = File()
SESSION_NULL = MpiSession()
