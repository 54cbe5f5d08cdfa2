"""Reads arrays in the memory of another process of the host: one copy instead of two.

process_vm_readv(2) follows the rules for debuggers: the same user, and permission by the target
where Yama restricts debuggers to descendants (ptrace_scope 1). A worker permits the process that
started it, and with it the other workers. A probe finds out whether reading works: the reader looks
for a random number at a published address. If it fails, data go through shared memory.
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

_PR_SET_PTRACER = 0x59616D61
_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _functions() -> tuple[Any, Any] | None:
    """Return process_vm_readv without and with the interpreter lock; None if unsupported."""
    found = []
    for library in (ctypes.CDLL, ctypes.PyDLL):
        try:
            function: Any = library(None, use_errno=True).process_vm_readv
        except AttributeError:
            return None
        iovecs = (ctypes.c_void_p, ctypes.c_ulong)
        function.argtypes = (ctypes.c_int, *iovecs, *iovecs, ctypes.c_ulong)
        function.restype = ctypes.c_ssize_t
        found.append(function)
    return found[0], found[1]


class ProbeCell:
    """A random number in this process's memory: others read it to find out whether they can.

    Attributes:
        process: Process id.
        address: Address of the number.
        number: The number, 64 bits.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.number = int.from_bytes(os.urandom(8), "little")
        self._memory = ctypes.c_uint64(self.number)
        self.address = ctypes.addressof(self._memory)

    @staticmethod
    def permit_reading() -> None:
        """Permit this process's parent and the parent's descendants to read it under Yama.

        Yama knows no permission to read only: who may read may also attach as a debugger, as the
        same user.
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
        processes: Process ids of a group's ranks, in rank order.

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
        self._here, self._there = _IoVec(), _IoVec()
        self._places = ctypes.addressof(self._here), ctypes.addressof(self._there)

    def finds(self, rank: int, address: int, number: int) -> bool:
        """Return whether a rank's memory is readable: this number is at this address."""
        value = ctypes.c_uint64()
        try:
            is_read = self._read(rank, address, ctypes.addressof(value), 8, hold=False)
        except SyncvarError:
            return False
        return is_read and value.value == number

    def can_read(self, rank: int, address: int, nbytes: int) -> bool:
        """Return whether the first and last of these bytes are readable; device memory is not."""
        byte = ctypes.c_uint64()
        into = ctypes.addressof(byte)
        ends = (address, address + max(1, nbytes) - 1)
        try:
            return all(self._read(rank, end, into, 1, hold=True) for end in ends)
        except SyncvarError:
            return False

    def read(self, rank: int, address: int, target: NDArray[Any], *, hold: bool = False) -> bool:
        """Copy bytes at `address` of a rank into a contiguous array.

        Return False if the process is gone.

        After False the content of the array is undefined. `hold` keeps the interpreter lock.

        Cost: about 1 us, and 0.1 us for each page in addition to the copy.
        """
        into = target.__array_interface__["data"][0]
        return self._read(rank, address, into, target.nbytes, hold=hold)

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
                reason = os.strerror(number) if number else "it ends there"
                raise SyncvarError(
                    f"the memory of rank {rank} of the group (process {process}) cannot be read "
                    f"any more ({reason}); set SYNCVAR_SINGLE_COPY=off for all ranks"
                )
            into, address, nbytes = into + done, address + done, nbytes - done
        return True
