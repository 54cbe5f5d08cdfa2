"""Reading arrays where they lie in the memory of another process of the host: one copy instead of two.

Linux lets a process read another one's memory (process_vm_readv(2), since 3.2) under the rules of a debugger: the same
user and, where Yama restricts debuggers to descendants (ptrace_scope 1), leave by the process that is read. A worker gives
leave to the process that started it and to that one's descendants: the other workers. Whether it works is tried out, by
reading a random number of which the other process tells the place; where it does not, data go through shared memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import SyncvarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["ProbeCell", "ProcessReader"]

_PR_SET_PTRACER = 0x59616D61
_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


class _Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _functions() -> tuple[Any, Any] | None:
    """Return the system call without and with the interpreter's lock; None where the system has none."""
    found = []
    for library in (ctypes.CDLL, ctypes.PyDLL):
        try:
            function: Any = library(None, use_errno=True).process_vm_readv
        except AttributeError:
            return None
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
        function.restype = ctypes.c_ssize_t
        found.append(function)
    return found[0], found[1]


class ProbeCell:
    """A random number in this process's memory, by which another process finds out whether it can read there.

    Attributes:
        process: This process.
        address: Where the number is.
        number: The number, of 64 bits.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.number = int.from_bytes(os.urandom(8), "little")
        self._memory = ctypes.c_uint64(self.number)
        self.address = ctypes.addressof(self._memory)

    @staticmethod
    def give_leave() -> None:
        """Let the process that started this one, and what that started, trace this one, where Yama would refuse it.

        Yama knows no leave to read only: who may read may also attach as a debugger, for processes of the same user.
        """
        parent = os.getppid()
        try:
            with open(_SCOPE, encoding="ascii") as file:
                scope = file.read().strip()
        except OSError:  # the system has no Yama
            return
        if scope == "1" and parent > 1:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)


class ProcessReader:
    """Reads the memory of other processes. One thread at a time.

    Args:
        processes: Of the ranks of a group, in their order.

    Example:
        >>> import os
        >>> import numpy as np
        >>> spot, here = ProbeCell(), np.zeros(1, np.uint64)
        >>> ProcessReader([os.getpid()]).read(0, spot.address, here)
        True
        >>> int(here[0]) == spot.number
        True
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self.processes = tuple(processes)
        self._here, self._there = _Stretch(), _Stretch()
        self._places = ctypes.addressof(self._here), ctypes.addressof(self._there)

    def finds(self, rank: int, address: int, number: int) -> bool:
        """Return whether the memory of a rank can be read: there is this number at this address."""
        made = ctypes.c_uint64()
        try:
            return (
                self._read(rank, address, ctypes.addressof(made), 8, hold=False)
                and made.value == number
            )
        except SyncvarError:
            return False

    def can_read(self, rank: int, address: int, nbytes: int) -> bool:
        """Return whether the first and the last of some bytes of a rank's memory can be read: not those of a device."""
        made = ctypes.c_uint64()
        into = ctypes.addressof(made)
        try:
            return all(
                self._read(rank, place, into, 1, hold=True)
                for place in (address, address + max(1, nbytes) - 1)
            )
        except SyncvarError:
            return False

    def read(self, rank: int, address: int, target: NDArray[Any], *, hold: bool = False) -> bool:
        """Copy what lies at `address` of a rank's memory into an array in one piece.

        Args:
            rank: Whose memory.
            address: Where, in its process.
            target: As many bytes are read as it has.
            hold: Keep the interpreter's lock.

        Returns:
            False where the process is no more: what the target holds is worth nothing.

        Raises:
            SyncvarError: The system refuses.

        Cost: about 1 us, and 0.1 us for each page beside the copy.
        """
        return self._read(
            rank, address, target.__array_interface__["data"][0], target.nbytes, hold=hold
        )

    def _read(self, rank: int, address: int, into: int, nbytes: int, *, hold: bool) -> bool:
        functions = _functions()
        here, there = self._here, self._there
        mine, theirs = self._places
        process = self.processes[rank]
        if functions is None:
            raise SyncvarError("this system cannot read the memory of another process")
        function = functions[hold]
        while nbytes:
            here.base, here.length = into, nbytes
            there.base, there.length = address, nbytes
            done = function(process, mine, 1, theirs, 1, 0)
            if done <= 0:
                number = ctypes.get_errno() if done else 0
                if number == errno.ESRCH:
                    return False
                raise SyncvarError(
                    f"the memory of rank {rank} of the group (process {process}) cannot be read any more "
                    f"({os.strerror(number) if number else 'it ends there'}); set SYNCVAR_SINGLE_COPY=off for all ranks"
                )
            into, address, nbytes = into + done, address + done, nbytes - done
        return True
