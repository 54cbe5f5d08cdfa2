"""The module `MPI` of the mpi4py layer. Importing it initializes syncvar."""

from __future__ import annotations

import platform
import threading
import time
from typing import Any

import syncvar as sv
from syncvar.compat.mpi4py import mpi_constants as _const
from syncvar.compat.mpi4py import mpi_datatypes as _datatypes
from syncvar.compat.mpi4py import mpi_ops as _ops
from syncvar.compat.mpi4py.mpi_buffers import (
    BOTTOM,
    BUFFER_AUTOMATIC,
    IN_PLACE,
    BottomType,
    BufferAutomaticType,
    InPlaceType,
    address_of,
    buffer,
)
from syncvar.compat.mpi4py.mpi_communicator import (
    COMM_NULL,
    MESSAGE_NO_PROC,
    MESSAGE_NULL,
    Comm,
    Intercomm,
    Intracomm,
    Message,
    world_and_self,
)
from syncvar.compat.mpi4py.mpi_constants import *  # noqa: F403  (the names of MPI)
from syncvar.compat.mpi4py.mpi_datatypes import Datatype
from syncvar.compat.mpi4py.mpi_errors import (
    ERRHANDLER_NULL,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    Add_error_class,
    Add_error_code,
    Add_error_string,
    Errhandler,
    Get_error_class,
    Get_error_string,
    MpiException,
    Remove_error_class,
    Remove_error_code,
    Remove_error_string,
)
from syncvar.compat.mpi4py.mpi_groups import GROUP_EMPTY, GROUP_NULL, INFO_NULL, Info, MpiGroup
from syncvar.compat.mpi4py.mpi_objects import Pickle, pickle
from syncvar.compat.mpi4py.mpi_operations import Status
from syncvar.compat.mpi4py.mpi_ops import OP_NULL, Op
from syncvar.compat.mpi4py.mpi_requests import REQUEST_NULL, Grequest, MpiRequest, Prequest
from syncvar.compat.mpi4py.mpi_topology import (
    Cartcomm,
    Compute_dims,
    Distgraphcomm,
    Graphcomm,
    Topocomm,
)
from syncvar.compat.mpi4py.mpi_windows import (
    FILE_NULL,
    SESSION_NULL,
    WIN_NULL,
    File,
    MpiSession,
    Win,
    refuse_datarep,
    refuse_names,
    refuse_ports,
)

globals().update(_const.ERROR_CLASSES)
globals().update(_datatypes.PREDEFINED)
globals().update(_ops.OPS)

Exception = MpiException  # noqa: A001
Group = MpiGroup
Request = MpiRequest
Session = MpiSession
memory = buffer
Get_address = address_of
INFO_ENV = Info.Create()
COMM_WORLD, COMM_SELF = world_and_self()
_typedict = _typedict_c = _datatypes.TYPE_CODES
_typedict_f = dict[str, Datatype]()
_addressof = address_of


class _Lifetime:
    """Whether the program has called Finalize, and the thread that imported MPI."""

    is_finalized = False
    thread = threading.get_ident()


def Aint_add(base: int, disp: int) -> int:
    """Return an address plus a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the distance of two addresses."""
    return addr1 - addr2


def Attach_buffer(buf: Any) -> None:
    """Keep the buffer of buffered sends; this layer needs none."""
    COMM_WORLD.state.attach(buf)


def Detach_buffer() -> Any:
    """Wait for buffered sends, and return the buffer."""
    return COMM_WORLD.state.detach()


def Flush_buffer() -> None:
    """Wait for buffered sends."""
    COMM_WORLD.Flush_buffer()


def Iflush_buffer() -> MpiRequest:
    """Wait for buffered sends; return a request that has ended."""
    return COMM_WORLD.Iflush_buffer()


def Alloc_mem(size: int, info: Info = INFO_NULL) -> buffer:
    """Return new memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Give up memory."""
    mem.release()


def Init() -> None:
    """Do nothing: the import has initialized the layer."""


def Init_thread(required: int = _const.THREAD_MULTIPLE) -> int:
    """Return the level of threads."""
    return Query_thread()


def Finalize() -> None:
    """Wait for all ranks; the process may end."""
    if not _Lifetime.is_finalized:
        COMM_WORLD.Barrier()
        _Lifetime.is_finalized = True


def Query_thread() -> int:
    """Return THREAD_SERIALIZED: one thread at a time may call MPI."""
    return _const.THREAD_SERIALIZED


def Is_thread_main() -> bool:
    """Return whether this thread has imported MPI."""
    return threading.get_ident() == _Lifetime.thread


def Is_initialized() -> bool:
    """Return True."""
    return True


def Is_finalized() -> bool:
    """Return whether the program has called Finalize."""
    return _Lifetime.is_finalized


def Get_version() -> tuple[int, int]:
    """Return the version of MPI whose calls the layer has."""
    return _const.VERSION, _const.SUBVERSION


def Get_library_version() -> str:
    """Return the name and version of syncvar."""
    return f"syncvar {sv.__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return the name and version of syncvar."""
    numbers = [int(one) for one in sv.__version__.split(".")[:3]]
    return "syncvar", (numbers[0], numbers[1], numbers[2])


def Get_processor_name() -> str:
    """Return the name of the host."""
    return platform.node()


def Get_hw_resource_info() -> Info:
    """Return an empty info."""
    return Info.Create()


def Wtime() -> float:
    """Return a time in seconds; only differences mean something."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the resolution of Wtime in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing: it is for profilers."""


def _sizeof(arg: Any) -> int:
    """Return the bytes of a handle in C."""
    return 8


def _handleof(arg: Any) -> int:
    """Return a number of an object."""
    return int(arg.handle)


Open_port = Close_port = refuse_ports
Publish_name = Unpublish_name = Lookup_name = refuse_names
Register_datarep = refuse_datarep
