"""Buffers of mpi4py calls: what programs pass as a buffer, as counted elements of a datatype.

A buffer is an object with memory (NumPy array, bytes, array.array, DLPack, array interface), or a
list of it with counts, displacements and a datatype, as in mpi4py.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_datatypes import (
    BYTE,
    TYPE_CODES,
    Datatype,
    datatype_of,
    datatype_of_spec,
)
from syncvar.compat.mpi4py.mpi_errors import MpiException, constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.compat.mpi4py.mpi_datatypes import TypeLayout

    Bytes = NDArray[np.uint8]

_NONE = np.empty(0, np.uint8)


class BottomType(int):
    """Type of `MPI.BOTTOM`: address 0, for datatypes with absolute addresses."""

    def __new__(cls) -> BottomType:
        """Return an object equal to 0."""
        return super().__new__(cls, 0)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "BOTTOM"

    def __reduce__(self) -> Any:
        return constant, ("BOTTOM",)


class InPlaceType(int):
    """Type of `MPI.IN_PLACE`: the input is in the receive buffer."""

    def __new__(cls) -> InPlaceType:
        """Return an object equal to no address."""
        return super().__new__(cls, -1)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "IN_PLACE"

    def __reduce__(self) -> Any:
        return constant, ("IN_PLACE",)


class BufferAutomaticType(int):
    """Type of `MPI.BUFFER_AUTOMATIC`: MPI finds room for buffered messages."""

    def __new__(cls) -> BufferAutomaticType:
        """Return an object equal to no address."""
        return super().__new__(cls, -2)

    def __repr__(self) -> str:
        return "BUFFER_AUTOMATIC"

    def __reduce__(self) -> Any:
        return constant, ("BUFFER_AUTOMATIC",)


BOTTOM = BottomType()
IN_PLACE = InPlaceType()
BUFFER_AUTOMATIC = BufferAutomaticType()


class BufferMemory(NamedTuple):
    """The memory of an object as bytes, and the datatype of its elements."""

    bytes: Bytes
    nbytes: int
    datatype: Datatype


def memory_of(value: Any) -> BufferMemory:
    """Return the memory of an object; raise TypeError or BufferError if it has none.

    The object must be contiguous. The bytes are writable if the object's memory is.
    """
    if isinstance(value, np.ndarray):
        return _memory_of_array(value.view(np.ndarray))
    if value is None:
        return BufferMemory(_NONE, 0, BYTE)
    if isinstance(value, int):  # BOTTOM, IN_PLACE
        raise TypeError(f"message: {value!r} is no buffer here")
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _memory_of_dlpack(value)
    for name in ("__cuda_array_interface__", "__array_interface__"):
        if hasattr(value, name) and not isinstance(value, np.generic):
            return _memory_of_interface(getattr(value, name), is_host=name[2] == "a")
    return _memory_of_view(memoryview(value))


def _memory_of_array(array: NDArray[Any]) -> BufferMemory:
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        raise BufferError("message: the array is not contiguous; pass a copy, or a datatype")
    datatype = datatype_of(array.dtype)
    flat = array.reshape(-1) if flags.c_contiguous else array.T.reshape(-1)
    if not flat.size or not array.itemsize:
        return BufferMemory(_NONE, 0, datatype)
    return BufferMemory(flat.view(np.uint8), array.nbytes, datatype)


def _memory_of_view(view: memoryview) -> BufferMemory:
    if not view.contiguous:
        raise BufferError("message: the buffer is not contiguous")
    code = view.format.lstrip("=<@|")
    datatype = BYTE if code in ("c", "s") else TYPE_CODES.get(code, BYTE)
    if not view.nbytes:
        return BufferMemory(_NONE, 0, datatype)
    flat = np.frombuffer(view, np.uint8) if view.c_contiguous else np.asarray(view).T.reshape(-1)
    return BufferMemory(flat.view(np.uint8), view.nbytes, datatype)


def bytes_at(address: int, nbytes: int, owner: Any = None, *, readonly: bool = False) -> Bytes:
    """Return the memory at an address as an array of bytes; `owner` lives as long as it."""
    if nbytes <= 0:
        return _NONE
    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    raw._owner = owner  # type: ignore[attr-defined]
    found: Bytes = np.frombuffer(raw, np.uint8)  # type: ignore[call-overload]
    if readonly:
        found.flags.writeable = False
    return found


class _DLPackTensor(ctypes.Structure):
    """DLTensor of the DLPack standard, version 0."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DLPACK_CODES = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_HOST_DEVICES = (1, 3, 11, 13)  # CPU, and memory of CUDA and ROCm that the CPU reads


def _memory_of_dlpack(value: Any) -> BufferMemory:
    device, _ = value.__dlpack_device__()
    if int(device) not in _HOST_DEVICES:
        raise _gpu_error()
    capsule = value.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLPackTensor.from_address(pointer(capsule, b"dltensor"))
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    itemsize = tensor.bits * tensor.lanes // 8
    if tensor.strides:
        steps = [tensor.strides[axis] for axis in range(tensor.ndim)]
        _require_contiguous(shape, steps)
    kind = "c" if tensor.lanes == 2 and tensor.code == 2 else _DLPACK_CODES.get(tensor.code, "V")
    text = f"{kind if tensor.lanes <= 2 else 'V'}{itemsize}"
    datatype = TYPE_CODES.get(text, BYTE)
    nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
    if not nbytes:
        return BufferMemory(_NONE, 0, datatype)
    owner = (capsule, value)
    return BufferMemory(bytes_at(tensor.data + tensor.byte_offset, nbytes, owner), nbytes, datatype)


def _require_contiguous(shape: Sequence[int], steps: Sequence[int]) -> None:
    """Raise BufferError if strides in elements are not those of a C or Fortran array."""
    for axes in (range(len(shape) - 1, -1, -1), range(len(shape))):
        step, fits = 1, True
        for axis in axes:
            fits = fits and (shape[axis] in (0, 1) or steps[axis] == step)
            step *= shape[axis]
        if fits or 0 in shape:
            return
    raise BufferError("message: the buffer is not contiguous")


def _memory_of_interface(interface: dict[str, Any], *, is_host: bool) -> BufferMemory:
    """Return the memory of an array interface; that of CUDA must be readable by this process."""
    dtype = np.dtype(interface["typestr"])
    shape = interface["shape"]
    strides = interface.get("strides")
    if strides is not None:
        _require_contiguous(shape, [step // dtype.itemsize for step in strides])
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    datatype = datatype_of(dtype)
    if not nbytes:
        return BufferMemory(_NONE, 0, datatype)
    address, readonly = interface["data"]
    if not is_host and not _is_readable(address, nbytes):
        raise _gpu_error()
    return BufferMemory(bytes_at(address, nbytes, interface, readonly=readonly), nbytes, datatype)


def _is_readable(address: int, nbytes: int) -> bool:
    """Return whether this process may read memory: the kernel copies its first and last byte."""
    reader, writer = os.pipe()
    try:
        for place in (address, address + nbytes - 1):
            os.write(writer, bytes_at(place, 1).data)
    except OSError:
        return False
    finally:
        os.close(reader)
        os.close(writer)
    return True


def _gpu_error() -> MpiException:
    return MpiException(
        const.ERR_BUFFER, "the buffer is in the memory of a GPU; copy it to the host first"
    )


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):  # noqa: N801  (mpi4py's name)
    """Memory as a sequence of bytes, with its address.

    Args:
        buf: Object with memory; None for an empty buffer.
    """

    def __new__(cls, buf: Any = None) -> buffer:
        """Return the memory of an object."""
        return memory_of(buf).bytes.view(cls)

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """Return new memory."""
        if nbytes < 0:
            raise ValueError("expecting non-negative size")
        return (np.zeros if clear else np.empty)(nbytes, np.uint8).view(buffer)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """Return the memory of an object."""
        found = buffer(obj)
        return found.toreadonly() if readonly else found

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Return the memory at an address, which must stay valid."""
        if nbytes < 0:
            raise ValueError("expecting non-negative buffer length")
        if nbytes and not address:
            raise ValueError("expecting non-NULL address")
        return bytes_at(address, nbytes, readonly=readonly).view(buffer)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.ctypes.data) if self.size else 0

    @property
    def obj(self) -> Any:
        """Object that owns the memory."""
        return self.base

    @property
    def readonly(self) -> bool:
        """Whether the memory cannot be written."""
        return not self.flags.writeable

    format = "B"

    def cast(self, format: str, shape: Any = ()) -> memoryview:  # noqa: A002  (mpi4py's name)
        """Return a memoryview of another format."""
        view = self.data
        return view.cast(format, shape) if shape else view.cast(format)  # type: ignore[call-overload, no-any-return]

    def toreadonly(self) -> buffer:
        """Return the same memory, which cannot be written."""
        view = self[:]
        view.flags.writeable = False
        return view  # type: ignore[no-any-return]

    def release(self) -> None:
        """Do nothing: the memory is freed with its last reference."""

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        return found if isinstance(found, buffer) else int(found)

    def __setitem__(self, item: Any, value: Any) -> None:
        if isinstance(item, slice) and not isinstance(value, int):
            value = memory_of(value).bytes
        super().__setitem__(item, value)

    def __eq__(self, other: object) -> Any:
        return isinstance(other, buffer) and self.tobytes() == other.tobytes()

    def __bool__(self) -> bool:
        return self.size > 0

    __hash__ = None


class Region(NamedTuple):
    """Elements of a datatype in memory: what one rank sends to or receives from one other.

    Args:
        memory: Bytes around the elements.
        origin: Offset in bytes of the first element.
        count: Number of elements.
        layout: Layout of the datatype.
    """

    memory: Bytes
    origin: int
    count: int  # type: ignore[assignment]
    layout: TypeLayout

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.count * self.layout.size

    def packed(self) -> Bytes:
        """Return the data as bytes; a view if they are contiguous."""
        return self.layout.pack(self.memory, self.origin, self.count)

    def fill(self, packed: Bytes) -> None:
        """Write data, at most `nbytes` of them."""
        if packed.size > self.nbytes:
            raise MpiException(
                const.ERR_TRUNCATE,
                f"{packed.size} bytes came, and the buffer has room for {self.nbytes}",
            )
        if packed.size:
            self.layout.unpack(packed, self.memory, self.origin)

    def values(self, packed: Bytes) -> NDArray[Any]:
        """Return packed data as an array of the datatype's elements."""
        dtype = self.layout.dtype
        return packed if dtype is None else packed.view(dtype)


def address_of(value: Any) -> int:
    """Return the address of an object's memory, as MPI_Get_address."""
    if isinstance(value, BottomType):
        return 0
    memory = memory_of(value).bytes
    return int(memory.ctypes.data) if memory.size else 0


def _region(
    memory: BufferMemory | None, displacement: int, count: int, datatype: Datatype
) -> Region:
    """Return elements of a buffer; None for absolute addresses. `displacement` is in bytes."""
    layout = datatype.layout
    low, high = layout.span(count)
    low, high = low + displacement, high + displacement
    if memory is None:
        return Region(bytes_at(low, high - low), displacement - low, count, layout)
    if high > memory.nbytes:
        raise ValueError(
            f"message: the buffer has {memory.nbytes} bytes, too few for the {high} of the "
            f"requested count"
        )
    if low < 0 and high > low:
        start = int(memory.bytes.ctypes.data) + low
        whole = bytes_at(start, high - low, memory.bytes)
        return Region(whole, displacement - low, count, layout)
    return Region(memory.bytes, displacement, count, layout)


def _opened(value: Any) -> tuple[BufferMemory | None, Datatype]:
    """Return the memory of the object in a message, and the datatype that follows from it."""
    if isinstance(value, BottomType):
        return None, BYTE
    memory = memory_of(value)
    return memory, memory.datatype


_LAYOUTS = {np.dtype(code): TYPE_CODES[code].layout for code in "?bhilqBHILQefdgFDG"}


def simple_region(message: Any, blocks: int = 1) -> Region:
    """Return the elements of a buffer with one count.

    Args:
        message: A buffer, or a list [buffer, count, datatype], [buffer, datatype], [buffer, count],
            [buffer, (count, displacement), datatype]. The datatype may be a code such as "d".
        blocks: Number of equal blocks; then the count is that of one block.

    Returns:
        The elements of all blocks.
    """
    if type(message) is np.ndarray and blocks == 1 and message.flags.c_contiguous:
        layout = _LAYOUTS.get(message.dtype)
        if layout is not None:
            return Region(message.reshape(-1).view(np.uint8), 0, message.size, layout)
    if not isinstance(message, list | tuple):
        memory, datatype = _opened(message)
        count, displacement = None, 0
    else:
        memory, datatype, count, displacement = _simple_parts(message)
    extent = datatype.layout.extent
    if count is not None:
        return _region(memory, displacement * extent, count * blocks, datatype)
    if memory is None:
        raise ValueError("message: a count is needed with BOTTOM")
    room = memory.nbytes - displacement * extent
    if extent <= 0 or not room:
        return _region(memory, displacement * extent, 0, datatype)
    if room % extent:
        raise ValueError(
            f"message: buffer length {memory.nbytes} is not a multiple of the extent {extent}"
        )
    if room // extent % blocks:
        raise ValueError(f"message: {room // extent} elements cannot be cut into {blocks} blocks")
    return _region(memory, displacement * extent, room // extent, datatype)


def writable_region(message: Any) -> Region:
    """Return the elements of a buffer for a receive; raise BufferError if it is read-only."""
    region = simple_region(message)
    if not region.memory.flags.writeable:
        raise BufferError("message: the buffer of a receive must be writable")
    return region


def _simple_parts(message: Sequence[Any]) -> tuple[BufferMemory | None, Datatype, int | None, int]:
    parts = list(message)
    if not 1 <= len(parts) <= 4:
        raise ValueError("message: expecting 1 to 4 items: buffer, count, displacement, datatype")
    memory, datatype = _opened(parts.pop(0))
    if parts and not _is_count(parts[-1]):
        last = parts.pop()
        if last is not None:
            datatype = datatype_of_spec(last)
    numbers: list[Any] = []
    for one in parts:
        numbers.extend(one if isinstance(one, list | tuple) else [one])
    if len(numbers) > 2:
        raise ValueError("message: expecting a count and a displacement")
    count, displacement = (*numbers, None, None)[:2]
    if count is not None and int(count) < 0:
        raise ValueError(f"message: negative count {count}")
    if displacement is not None and int(displacement) < 0:
        raise ValueError(f"message: negative displacement {displacement}")
    return memory, datatype, None if count is None else int(count), int(displacement or 0)


def _is_count(value: Any) -> bool:
    """Return whether an item of a message is a count or counts, not a datatype."""
    return isinstance(value, int | np.integer | list | tuple | np.ndarray) or (
        value is not None and not isinstance(value, str | Datatype | np.dtype | type)
    )


def vector_regions(message: Any, blocks: int) -> list[Region]:
    """Return the elements of a buffer with a count and a displacement for each rank.

    Args:
        message: A buffer, or a list [buffer, counts], [buffer, (counts, displacements)],
            [buffer, counts, displacements, datatype] and so on. One count is that of every rank,
            and one displacement the distance between two ranks, in elements.
        blocks: Number of ranks.
    """
    counts: Any = None
    displacements: Any = None
    if isinstance(message, list | tuple):
        parts = list(message)
        if not 1 <= len(parts) <= 4:
            raise ValueError("message: expecting 1 to 4 items")
        memory, datatype = _opened(parts.pop(0))
        if parts and not _is_count(parts[-1]):
            last = parts.pop()
            if last is not None:
                datatype = datatype_of_spec(last)
        if len(parts) == 1 and isinstance(parts[0], tuple) and len(parts[0]) == 2:
            counts, displacements = parts[0]
        elif parts:
            counts, displacements = (*parts, None)[:2]
    else:
        memory, datatype = _opened(message)
    extent = datatype.layout.extent
    if counts is None:
        total = memory.nbytes // extent if memory is not None and extent > 0 else 0
        numbers = [total // blocks + (rank < total % blocks) for rank in range(blocks)]
    else:
        numbers = _numbers(counts, blocks, "counts")
    places = _places(displacements, numbers)
    return [
        _region(memory, place * extent, count, datatype)
        for count, place in zip(numbers, places, strict=True)
    ]


def _numbers(value: Any, blocks: int, name: str) -> list[int]:
    if isinstance(value, int | np.integer):
        return [int(value)] * blocks
    numbers = [int(one) for one in (np.asarray(value).ravel() if blocks else value)]
    if len(numbers) != blocks:
        raise ValueError(f"message: expecting {blocks} {name}, not {len(numbers)}")
    return numbers


def _places(displacements: Any, counts: list[int]) -> list[int]:
    if displacements is None:
        return [sum(counts[:rank]) for rank in range(len(counts))]
    if isinstance(displacements, int | np.integer):
        return [rank * int(displacements) for rank in range(len(counts))]
    return _numbers(displacements, len(counts), "displacements")


def typed_regions(message: Any, blocks: int) -> list[Region]:
    """Return the elements of a buffer with a count, displacement and datatype for each rank.

    Args:
        message: A list [buffer, counts, displacements, datatypes], [buffer, (counts,
            displacements), datatypes] or [buffer, datatypes]. Displacements are in bytes.
        blocks: Number of ranks.
    """
    parts = list(message)
    if not 2 <= len(parts) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    memory, _ = _opened(parts.pop(0))
    datatypes = parts.pop()
    if isinstance(datatypes, Datatype | str):
        datatypes = [datatypes] * blocks
    datatypes = [datatype_of_spec(one) for one in datatypes]
    counts: Any = 1
    displacements: Any = [0] * blocks
    if len(parts) == 1 and parts[0] is not None:
        counts, displacements = parts[0]
    elif parts:
        counts, displacements = parts
    if len(datatypes) != blocks:
        raise ValueError(f"message: expecting {blocks} datatypes, not {len(datatypes)}")
    numbers = _numbers(counts, blocks, "counts")
    places = _numbers(displacements, blocks, "displacements")
    return [
        _region(memory, place, count, datatype)
        for count, place, datatype in zip(numbers, places, datatypes, strict=True)
    ]


def is_in_place(message: Any) -> bool:
    """Return whether a program passes IN_PLACE."""
    return isinstance(message, InPlaceType)
