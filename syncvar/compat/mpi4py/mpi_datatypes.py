"""Datatypes: predefined ones, derived ones, and how their bytes lie in a buffer.

A `TypeLayout` is the type map of MPI as runs of bytes. NumPy packs and unpacks by index arrays, so
a derived datatype costs one copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_errors import MpiException, reduced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Offsets = NDArray[np.intp]

_UNITS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


class Envelope(NamedTuple):
    """The constructor call of a datatype."""

    combiner: int
    integers: tuple[int, ...] = ()
    addresses: tuple[int, ...] = ()
    datatypes: tuple[Any, ...] = ()


class TypeLayout:
    """Where the bytes of one element of a datatype lie, as runs in the order of the type map.

    Args:
        starts: Offset of each run in bytes.
        lengths: Length of each run in bytes.
        bounds: Lower bound and upper bound in bytes.
        basics: Sizes in bytes of the basic elements; one size if all are equal.
        dtype: dtype of the basic elements, if all have one.
        alignment: Largest alignment in bytes of the basic elements; 0 if the program set bounds.
    """

    def __init__(
        self,
        starts: Offsets,
        lengths: Offsets,
        bounds: tuple[int, int],
        basics: tuple[int, ...],
        dtype: np.dtype[Any] | None,
        alignment: int = 1,
    ) -> None:
        self.starts, self.lengths = _merged(starts, lengths)
        self.lb, self.ub = bounds
        self.extent = self.ub - self.lb
        self.size = int(self.lengths.sum())
        self.true_lb = int(self.starts.min()) if len(self.starts) else 0
        self.true_ub = int((self.starts + self.lengths).max()) if len(self.starts) else 0
        self.basics = basics
        self.dtype = dtype
        self.alignment = alignment
        self.is_dense = (
            self.size == self.extent
            and len(self.starts) == 1
            and self.starts[0] == 0
            and self.lb == 0
        )
        self._indices: tuple[int, int, int, Offsets] | None = None  # of one count

    @property
    def elements(self) -> int:
        """Number of basic elements in one element."""
        if len(self.basics) == 1:
            return self.size // self.basics[0] if self.basics[0] else 0
        return len(self.basics)

    def span(self, count: int) -> tuple[int, int]:
        """Return the first and the last offset in bytes of some elements."""
        if not count or not self.size:
            return 0, 0
        last = (count - 1) * self.extent
        return min(0, last) + self.true_lb, max(0, last) + self.true_ub

    def repeated_at(self, shifts: Offsets, bounds: tuple[int, int] | None = None) -> TypeLayout:
        """Return the layout of elements at some offsets, in this order."""
        starts = (shifts[:, None] + self.starts[None, :]).ravel()
        if bounds is None:
            low = int(shifts.min()) if len(shifts) else 0
            high = int(shifts.max()) if len(shifts) else 0
            bounds = (self.lb + low, self.ub + high) if len(shifts) else (0, 0)
        basics = self.basics if len(self.basics) == 1 else self.basics * len(shifts)
        lengths = np.tile(self.lengths, len(shifts))
        return TypeLayout(starts, lengths, bounds, basics, self.dtype, self.alignment)

    def pack(self, memory: Bytes, origin: int, count: int) -> Bytes:
        """Return the bytes of elements; a view if they are contiguous."""
        if self.is_dense:
            return memory[origin : origin + count * self.size]
        window, indices = self._window(memory, origin, count)
        return window[indices].view(np.uint8)

    def unpack(self, packed: Bytes, memory: Bytes, origin: int) -> None:
        """Write packed bytes to their places; the last element may be incomplete."""
        if self.is_dense:
            memory[origin : origin + packed.size] = packed
            return
        count = -(-packed.size // self.size) if self.size else 0
        whole = packed.size // self.size if self.size else 0
        if whole:
            window, indices = self._window(memory, origin, whole)
            window[indices] = packed[: whole * self.size].view(window.dtype)
        if count > whole:
            rest = packed[whole * self.size :]
            places = _byte_indices(self.starts, self.lengths, 1)[: rest.size]
            memory[origin + whole * self.extent + places] = rest

    def _window(self, memory: Bytes, origin: int, count: int) -> tuple[NDArray[Any], Offsets]:
        """Return the memory around some elements in units, and the index of each unit."""
        if self._indices is None or self._indices[0] != count:
            shifts = np.arange(count, dtype=np.intp) * self.extent
            starts = (shifts[:, None] + self.starts[None, :]).ravel()
            lengths = np.tile(self.lengths, count)
            low = int(starts.min()) if len(starts) else 0
            numbers = np.concatenate((starts - low, lengths, [8])).astype(np.int64)
            unit = int(np.gcd.reduce(numbers))
            self._indices = count, low, unit, _byte_indices(starts - low, lengths, unit)
        _, low, unit, indices = self._indices
        high = (int(indices.max()) + 1) * unit if len(indices) else 0
        window = memory[origin + low : origin + low + high].view(_UNITS[unit])
        return window, indices


def _byte_indices(starts: Offsets, lengths: Offsets, unit: int) -> Offsets:
    """Return the index of each unit of some runs."""
    counts = lengths // unit
    before = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.intp) - np.repeat(before, counts)
    indices: Offsets = np.repeat(starts // unit, counts) + within
    return indices


def _merged(starts: Offsets, lengths: Offsets) -> tuple[Offsets, Offsets]:
    """Join runs that follow each other, and drop empty ones."""
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    if len(starts) < 2:
        return starts, lengths
    first = np.concatenate(([True], starts[1:] != starts[:-1] + lengths[:-1]))
    places = np.flatnonzero(first)
    return starts[places], np.add.reduceat(lengths, places)


def _basic_layout(dtype: np.dtype[Any]) -> TypeLayout:
    if dtype.names:
        fields = [dtype.fields[name] for name in dtype.names]  # type: ignore[index]
        sizes = [field[0].itemsize for field in fields]
        starts = np.array([field[1] for field in fields], np.intp)
        layout = TypeLayout(
            starts,
            np.array(sizes, np.intp),
            (0, dtype.itemsize),
            tuple(sizes),
            None,
            dtype.alignment,
        )
        layout.dtype = np.dtype([(name, dtype[name]) for name in dtype.names])  # as packed
        return layout
    size = dtype.itemsize
    runs = np.array([0], np.intp), np.array([size], np.intp)
    return TypeLayout(*runs, (0, size), (size,), dtype, dtype.alignment)


class Datatype:
    """An MPI datatype: a reference to a layout, which other references may share."""

    _layout: TypeLayout | None = None
    _envelope = Envelope(const.COMBINER_NAMED)
    _name = ""
    _typecode = ""
    _is_committed = True

    def __new__(cls, datatype: Datatype | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if datatype is not None:
            if not isinstance(datatype, Datatype):
                raise TypeError(f"{datatype!r} is no Datatype")
            self.__dict__.update(datatype.__dict__)
        return self

    @property
    def layout(self) -> TypeLayout:
        """The layout; raises for a null datatype."""
        if self._layout is None:
            raise MpiException(const.ERR_TYPE, "the datatype is DATATYPE_NULL")
        return self._layout

    def _derived(self, layout: TypeLayout, envelope: Envelope) -> Datatype:
        struct = Datatype()
        struct._layout, struct._envelope, struct._is_committed = layout, envelope, False
        return struct

    # -- sizes

    def Get_size(self) -> int:
        """Return the bytes of data in one element."""
        return self.layout.size

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent in bytes."""
        return self.layout.lb, self.layout.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return the first byte of data and the distance to the last one."""
        return self.layout.true_lb, self.layout.true_ub - self.layout.true_lb

    @property
    def size(self) -> int:
        """Bytes of data in one element."""
        return self.layout.size

    @property
    def extent(self) -> int:
        """Distance in bytes between two elements."""
        return self.layout.extent

    @property
    def lb(self) -> int:
        """Lower bound in bytes."""
        return self.layout.lb

    @property
    def ub(self) -> int:
        """Upper bound in bytes."""
        return self.layout.ub

    @property
    def true_lb(self) -> int:
        """Offset of the first byte of data."""
        return self.layout.true_lb

    @property
    def true_ub(self) -> int:
        """Offset behind the last byte of data."""
        return self.layout.true_ub

    @property
    def true_extent(self) -> int:
        """Distance from the first to the last byte of data."""
        return self.layout.true_ub - self.layout.true_lb

    # -- constructors

    def Dup(self) -> Datatype:
        """Return a copy."""
        dup = self._derived(self.layout, Envelope(const.COMBINER_DUP, (), (), (self,)))
        dup._is_committed, dup._typecode = self._is_committed, self._typecode
        return dup

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Datatype:
        """Return the type of elements that follow each other."""
        shifts = np.arange(_count(count), dtype=np.intp) * self.layout.extent
        envelope = Envelope(const.COMBINER_CONTIGUOUS, (count,), (), (self,))
        return self._derived(self.layout.repeated_at(shifts), envelope)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Datatype:
        """Return the type of blocks at a stride, in elements."""
        layout = self._blocks(blocklength, _steps(count, stride * self.layout.extent))
        integers = (count, blocklength, stride)
        return self._derived(layout, Envelope(const.COMBINER_VECTOR, integers, (), (self,)))

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Datatype:
        """Return the type of blocks at a stride, in bytes."""
        layout = self._blocks(blocklength, _steps(count, stride))
        envelope = Envelope(const.COMBINER_HVECTOR, (count, blocklength), (stride,), (self,))
        return self._derived(layout, envelope)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Datatype:
        """Return the type of blocks at displacements, in elements."""
        places = np.asarray(displacements, np.intp) * self.layout.extent
        integers = (len(blocklengths), *blocklengths, *displacements)
        envelope = Envelope(const.COMBINER_INDEXED, integers, (), (self,))
        return self._derived(self._uneven_blocks(blocklengths, places), envelope)

    def Create_hindexed(
        self, blocklengths: Sequence[int], displacements: Sequence[int]
    ) -> Datatype:
        """Return the type of blocks at displacements, in bytes."""
        layout = self._uneven_blocks(blocklengths, np.asarray(displacements, np.intp))
        integers = (len(blocklengths), *blocklengths)
        envelope = Envelope(const.COMBINER_HINDEXED, integers, tuple(displacements), (self,))
        return self._derived(layout, envelope)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Datatype:
        """Return the type of equal blocks at displacements, in elements."""
        places = np.asarray(displacements, np.intp) * self.layout.extent
        integers = (len(displacements), blocklength, *displacements)
        envelope = Envelope(const.COMBINER_INDEXED_BLOCK, integers, (), (self,))
        return self._derived(self._blocks(blocklength, places), envelope)

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Datatype:
        """Return the type of equal blocks at displacements, in bytes."""
        layout = self._blocks(blocklength, np.asarray(displacements, np.intp))
        integers = (len(displacements), blocklength)
        envelope = Envelope(const.COMBINER_HINDEXED_BLOCK, integers, tuple(displacements), (self,))
        return self._derived(layout, envelope)

    @classmethod
    def Create_struct(
        cls,
        blocklengths: Sequence[int],
        displacements: Sequence[int],
        datatypes: Sequence[Datatype],
    ) -> Datatype:
        """Return the type of blocks of several datatypes at displacements, in bytes."""
        parts = [
            datatype._blocks(length, np.array([place], np.intp))
            for length, place, datatype in zip(blocklengths, displacements, datatypes, strict=True)
        ]
        integers = (len(blocklengths), *blocklengths)
        places, types = tuple(displacements), tuple(datatypes)
        envelope = Envelope(const.COMBINER_STRUCT, integers, places, types)
        return cls()._derived(_joined(parts), envelope)

    def Create_subarray(
        self,
        sizes: Sequence[int],
        subsizes: Sequence[int],
        starts: Sequence[int],
        order: int = const.ORDER_C,
    ) -> Datatype:
        """Return the type of a block of a larger array."""
        extent = self.layout.extent
        numbers = np.arange(math.prod(sizes), dtype=np.intp) * extent
        letter: Any = "F" if order == const.ORDER_FORTRAN else "C"
        grid = np.reshape(numbers, tuple(sizes), order=letter)
        cut = tuple(
            slice(start, start + length) for start, length in zip(starts, subsizes, strict=True)
        )
        shifts = grid[cut].ravel(order=letter)
        layout = self.layout.repeated_at(shifts, (0, math.prod(sizes) * extent))
        integers = (len(sizes), *sizes, *subsizes, *starts, order)
        return self._derived(layout, Envelope(const.COMBINER_SUBARRAY, integers, (), (self,)))

    def Create_darray(  # noqa: PLR0913, PLR0917  (MPI's signature)
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = const.ORDER_C,
    ) -> Datatype:
        """Return the type of a rank's part of an array that is distributed in blocks or cycles."""
        places = np.unravel_index(rank, tuple(psizes))
        parts = [_owned(*one) for one in zip(gsizes, distribs, dargs, psizes, places, strict=True)]
        extent = self.layout.extent
        letter: Any = "F" if order == const.ORDER_FORTRAN else "C"
        numbers = np.arange(math.prod(gsizes), dtype=np.intp) * extent
        grid = np.reshape(numbers, tuple(gsizes), order=letter)
        shifts = grid[np.ix_(*parts)].ravel(order=letter)
        layout = self.layout.repeated_at(shifts, (0, math.prod(gsizes) * extent))
        lists = (*gsizes, *distribs, *dargs, *psizes)
        integers = (size, rank, len(gsizes), *lists, order)
        return self._derived(layout, Envelope(const.COMBINER_DARRAY, integers, (), (self,)))

    def Create_resized(self, lb: int, extent: int) -> Datatype:
        """Return the same data with another lower bound and extent."""
        old = self.layout
        bounds = lb, lb + extent
        layout = TypeLayout(old.starts, old.lengths, bounds, old.basics, old.dtype, alignment=0)
        envelope = Envelope(const.COMBINER_RESIZED, (), (lb, extent), (self,))
        return self._derived(layout, envelope)

    Resized = Create_resized

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """Return the predefined datatype of a class and size."""
        letters = {
            const.TYPECLASS_INTEGER: "i",
            const.TYPECLASS_REAL: "f",
            const.TYPECLASS_COMPLEX: "c",
            const.TYPECLASS_LOGICAL: "i",
        }
        try:
            return datatype_of(np.dtype(f"{letters[typeclass]}{size}"))
        except (KeyError, TypeError):
            raise MpiException(const.ERR_ARG, f"no such datatype of {size} bytes") from None

    def _blocks(self, length: int, places: Offsets) -> TypeLayout:
        """Return the layout of equal blocks that begin at offsets in bytes."""
        within = np.arange(_count(length), dtype=np.intp) * self.layout.extent
        return self.layout.repeated_at((places[:, None] + within[None, :]).ravel())

    def _uneven_blocks(self, lengths: Sequence[int], places: Offsets) -> TypeLayout:
        counts = np.asarray(lengths, np.intp)
        before = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum()), dtype=np.intp) - np.repeat(before, counts)
        return self.layout.repeated_at(np.repeat(places, counts) + within * self.layout.extent)

    # -- state and description

    def Commit(self) -> Datatype:
        """Declare the datatype ready; this layer needs no step for it."""
        self._is_committed = True
        return self

    def Free(self) -> None:
        """Make this a null datatype."""
        self._layout, self._name, self._typecode = None, "", ""

    free = Free

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return the numbers of integers, addresses, counts and datatypes, and the combiner."""
        one = self._envelope
        return len(one.integers), len(one.addresses), 0, len(one.datatypes), one.combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the integers, addresses, counts and datatypes of the constructor."""
        one = self._envelope
        if one.combiner == const.COMBINER_NAMED:
            raise MpiException(const.ERR_TYPE, "a predefined datatype has no contents")
        datatypes = [Datatype(part) for part in one.datatypes]
        return list(one.integers), list(one.addresses), [], datatypes

    envelope = property(Get_envelope)
    contents = property(Get_contents)

    @property
    def combiner(self) -> int:
        """The constructor, such as `MPI.COMBINER_VECTOR`."""
        return self._envelope.combiner

    @property
    def is_named(self) -> bool:
        """Whether the datatype is predefined."""
        return self._envelope.combiner == const.COMBINER_NAMED

    @property
    def is_predefined(self) -> bool:
        """Whether the datatype is predefined or null."""
        return self._layout is None or self.is_named

    def Get_name(self) -> str:
        """Return the name."""
        return self._name

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._name = name

    name = property(Get_name, Set_name)

    @property
    def typechar(self) -> str:
        """Character of the NumPy dtype; "V" if there is none."""
        dtype = self.layout.dtype
        return "V" if dtype is None or not self.is_named else dtype.char

    @property
    def typestr(self) -> str:
        """String of the NumPy dtype, such as "<f8"."""
        dtype = self.layout.dtype
        return f"V{self.extent}" if dtype is None or not self.is_named else dtype.str[1:]

    def tocode(self) -> str:
        """Return the character of the type."""
        code = self._typecode
        if not code:
            raise ValueError("the datatype has no type code")
        return code

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the datatype of a type character, such as "d"."""
        return TYPE_CODES[code]

    @property
    def handle(self) -> int:
        """A number of the layout."""
        return 0 if self._layout is None else id(self._layout)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Datatype):
            return NotImplemented
        return self._layout is other._layout

    def __hash__(self) -> int:
        return hash(self.handle)

    def __bool__(self) -> bool:
        return self._layout is not None

    def __reduce__(self) -> Any:
        if not self.is_named or not self._name:
            raise ValueError("cannot pickle a derived datatype")
        return reduced(self, self._name.removeprefix("MPI_"))

    def __repr__(self) -> str:
        return f"<Datatype {self._name or 'derived'}>"

    # -- packing

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Append elements to a buffer of bytes; return the new position."""
        source, target = _plain_bytes(inbuf), _plain_bytes(outbuf)
        count = source.size // self.extent if self.extent else 0
        packed = self.layout.pack(source, 0, count)
        if position + packed.size > target.size:
            raise MpiException(const.ERR_TRUNCATE, "the buffer has no room")
        target[position : position + packed.size] = packed
        return int(position + packed.size)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Take elements from a buffer of bytes; return the new position."""
        source, target = _plain_bytes(inbuf), _plain_bytes(outbuf)
        count = target.size // self.extent if self.extent else 0
        stop = position + count * self.size
        if stop > source.size:
            raise MpiException(const.ERR_TRUNCATE, "the buffer holds fewer elements")
        self.layout.unpack(source[position:stop], target, 0)
        return int(stop)

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the bytes that packed elements need."""
        return count * self.size

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """Append elements in the byte order of "external32"; return the new position."""
        target = _plain_bytes(outbuf)
        stop = self.Pack(inbuf, outbuf, position, None)
        target[position:stop] = self._swapped(target[position:stop])
        return stop

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """Take elements in the byte order of "external32"; return the new position."""
        source = _plain_bytes(inbuf)
        swapped = np.concatenate((source[:position], self._swapped(source[position:])))
        return self.Unpack(swapped, position, outbuf, None)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Return the bytes that packed elements need."""
        return count * self.size

    def _swapped(self, data: Bytes) -> Bytes:
        """Return packed elements in the other byte order."""
        dtype = self.layout.dtype
        if dtype is None or dtype.names:
            raise MpiException(const.ERR_TYPE, "external32 takes elements of one basic type")
        width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
        whole = data.size - data.size % width
        swapped = data.copy()
        swapped[:whole] = data[:whole].reshape(-1, width)[:, ::-1].ravel()
        return swapped


def _plain_bytes(value: Any) -> Bytes:
    """Return the memory of a contiguous buffer."""
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray).reshape(-1).view(np.uint8)
    return np.frombuffer(value, np.uint8)


def _count(count: int) -> int:
    if count < 0:
        raise MpiException(const.ERR_COUNT, f"a count must not be negative: {count}")
    return int(count)


def _steps(count: int, stride: int) -> Offsets:
    return np.arange(_count(count), dtype=np.intp) * stride


def _joined(parts: list[TypeLayout]) -> TypeLayout:
    """Return the layout of several layouts one after another.

    As in C, the end is padded to the largest alignment, unless the program has set bounds.
    """
    filled = [part for part in parts if len(part.starts)]
    basics: tuple[int, ...]
    if not filled:
        empty = np.zeros(0, np.intp)
        return TypeLayout(empty, empty, (0, 0), (1,), None)
    starts = np.concatenate([part.starts for part in filled])
    lengths = np.concatenate([part.lengths for part in filled])
    low, high = min(part.lb for part in filled), max(part.ub for part in filled)
    alignments = [part.alignment for part in filled]
    alignment = max(alignments) if all(alignments) else 0
    if alignment:
        high = low - (low - high) // alignment * alignment
    bounds = low, high
    dtypes = {part.dtype for part in filled}
    if len(dtypes) == 1 and all(len(part.basics) == 1 for part in filled):
        basics, dtype = filled[0].basics, dtypes.pop()
        return TypeLayout(starts, lengths, bounds, basics, dtype, alignment)
    basics = ()
    for part in filled:
        repeat = part.elements if len(part.basics) == 1 else 1
        basics += part.basics * repeat
    return TypeLayout(starts, lengths, bounds, basics, None, alignment)


def _owned(length: int, distribution: int, argument: int, ranks: int, place: Any) -> Offsets:
    """Return the indices along one axis of a distributed array that one rank owns."""
    if distribution == const.DISTRIBUTE_NONE:
        return np.arange(length, dtype=np.intp)
    is_block = distribution == const.DISTRIBUTE_BLOCK
    block = argument
    if argument == const.DISTRIBUTE_DFLT_DARG:
        block = -(-length // ranks) if is_block else 1
    indices = np.arange(length, dtype=np.intp)
    owned: Offsets = indices[(indices // block) % ranks == int(place)]
    return owned


# -- predefined datatypes --------------------------------------------------------------------------

_BASIC = """
BYTE:B:u1 PACKED:B:u1 CHAR:c:i1 WCHAR:u:i4 AINT:p:i8 OFFSET:q:i8 COUNT:q:i8
SIGNED_CHAR:b:b SHORT:h:h INT:i:i LONG:l:l LONG_LONG:q:q UNSIGNED_CHAR:B:B UNSIGNED_SHORT:H:H
UNSIGNED:I:I UNSIGNED_LONG:L:L UNSIGNED_LONG_LONG:Q:Q FLOAT:f:f DOUBLE:d:d LONG_DOUBLE:g:g
C_BOOL:?:? INT8_T:b:i1 INT16_T:h:i2 INT32_T:i:i4 INT64_T:l:i8 UINT8_T:B:u1 UINT16_T:H:u2
UINT32_T:I:u4 UINT64_T:L:u8 FLOAT16_T:e:f2 FLOAT32_T:f:f4 FLOAT64_T:d:f8 C_COMPLEX:F:F
C_FLOAT_COMPLEX:F:F C_DOUBLE_COMPLEX:D:D C_LONG_DOUBLE_COMPLEX:G:G CXX_BOOL:?:?
CXX_FLOAT_COMPLEX:F:F CXX_DOUBLE_COMPLEX:D:D CXX_LONG_DOUBLE_COMPLEX:G:G CHARACTER:c:i1
LOGICAL:i:i4 INTEGER:i:i4 REAL:f:f4 DOUBLE_PRECISION:d:f8 COMPLEX:F:c8 DOUBLE_COMPLEX:D:c16
LOGICAL1:b:i1 LOGICAL2:h:i2 LOGICAL4:i:i4 LOGICAL8:l:i8 INTEGER1:b:i1 INTEGER2:h:i2
INTEGER4:i:i4 INTEGER8:l:i8 REAL2:e:f2 REAL4:f:f4 REAL8:d:f8 REAL16:g:g COMPLEX8:F:c8
COMPLEX16:D:c16 COMPLEX32:G:G
"""  # name:type code:dtype
_PAIRS = "SHORT_INT:i2 LONG_INT:i8 FLOAT_INT:f4 DOUBLE_INT:f8 TWOINT:i4 LONG_DOUBLE_INT:g"
_ALIASES = """
UNSIGNED_INT:UNSIGNED SIGNED_SHORT:SHORT SIGNED_INT:INT SIGNED_LONG:LONG BOOL:C_BOOL
SIGNED_LONG_LONG:LONG_LONG SINT8_T:INT8_T SINT16_T:INT16_T SINT32_T:INT32_T SINT64_T:INT64_T
F_BOOL:LOGICAL F_INT:INTEGER F_FLOAT:REAL F_DOUBLE:DOUBLE_PRECISION F_COMPLEX:COMPLEX
F_FLOAT_COMPLEX:COMPLEX F_DOUBLE_COMPLEX:DOUBLE_COMPLEX INT_INT:TWOINT
"""
_ABSENT = ("LOGICAL16", "INTEGER16", "COMPLEX4", "BFLOAT16_T")


def _predefined(name: str, dtype: np.dtype[Any], code: str) -> Datatype:
    datatype = Datatype()
    datatype._layout, datatype._name = _basic_layout(dtype), f"MPI_{name}"
    datatype._typecode = code
    return datatype


def _table(text: str) -> list[list[str]]:
    return [one.split(":") for one in text.split()]


def _all_predefined() -> dict[str, Datatype]:
    found = {name: _predefined(name, np.dtype(dt), code) for name, code, dt in _table(_BASIC)}
    for name, value in _table(_PAIRS):
        record = np.dtype([("value", value), ("index", "i4")], align=True)
        found[name] = _predefined(name, record, "")
    found.update((alias, found[name]) for alias, name in _table(_ALIASES))
    null = Datatype()
    null._name = "MPI_DATATYPE_NULL"
    found["DATATYPE_NULL"] = null
    for name in _ABSENT:
        found[name] = null
    return found


PREDEFINED = _all_predefined()
BYTE = PREDEFINED["BYTE"]
_BY_CODE = """
?:C_BOOL b:SIGNED_CHAR h:SHORT i:INT l:LONG q:LONG_LONG B:UNSIGNED_CHAR H:UNSIGNED_SHORT I:UNSIGNED
L:UNSIGNED_LONG Q:UNSIGNED_LONG_LONG e:FLOAT16_T f:FLOAT d:DOUBLE g:LONG_DOUBLE F:C_FLOAT_COMPLEX
D:C_DOUBLE_COMPLEX G:C_LONG_DOUBLE_COMPLEX Zf:C_FLOAT_COMPLEX Zd:C_DOUBLE_COMPLEX
Zg:C_LONG_DOUBLE_COMPLEX c:CHAR S:CHAR u:WCHAR U:WCHAR p:AINT n:AINT N:UNSIGNED_LONG
"""
TYPE_CODES = {code: PREDEFINED[name] for code, name in _table(_BY_CODE)}
TYPE_CODES |= {
    f"{kind}{size}": TYPE_CODES[np.dtype(f"{kind}{size}").char]
    for kind, sizes in {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16)}.items()
    for size in sizes
}
TYPE_CODES |= {"c8": TYPE_CODES["F"], "c16": TYPE_CODES["D"], "c32": TYPE_CODES["G"]}
TYPE_CODES |= {"b1": TYPE_CODES["?"]}
_OF_DTYPE: dict[np.dtype[Any], Datatype] = {}


def datatype_of(dtype: np.dtype[Any]) -> Datatype:
    """Return the datatype of a NumPy dtype; for records a struct, and bytes for other types."""
    found = _OF_DTYPE.get(dtype)
    if found is None:
        found = _OF_DTYPE[dtype] = from_numpy_dtype(dtype)
    return found


def datatype_of_spec(spec: Any) -> Datatype:
    """Return the datatype that a program passes: a Datatype, a code, or a NumPy dtype."""
    if isinstance(spec, Datatype):
        return spec
    if isinstance(spec, str):
        try:
            return TYPE_CODES[spec.lstrip("=<@|")]
        except KeyError:
            raise KeyError(spec) from None
    return datatype_of(np.dtype(spec))


# -- mpi4py.util.dtlib -----------------------------------------------------------------------------


def from_numpy_dtype(dtype: Any) -> Datatype:
    """Return the datatype of a NumPy dtype, as mpi4py.util.dtlib does."""
    kind = np.dtype(dtype)
    if kind.subdtype is not None:
        base, shape = kind.subdtype
        return from_numpy_dtype(base).Create_contiguous(math.prod(shape)).Commit()
    if kind.names:
        fields = [kind.fields[name] for name in kind.names]
        types = [from_numpy_dtype(field[0]) for field in fields]
        struct = Datatype.Create_struct([1] * len(types), [field[1] for field in fields], types)
        return struct.Create_resized(0, kind.itemsize).Commit()
    known = TYPE_CODES.get(kind.char)
    if known is not None and known.extent == kind.itemsize and kind.isnative:
        return known
    return BYTE if kind.itemsize == 1 else BYTE.Create_contiguous(kind.itemsize).Commit()


def to_numpy_dtype(datatype: Datatype) -> np.dtype[Any]:
    """Return the NumPy dtype of a datatype, as mpi4py.util.dtlib does."""
    layout, envelope = datatype.layout, datatype._envelope
    if envelope.combiner == const.COMBINER_NAMED:
        assert layout.dtype is not None
        return layout.dtype
    parts = envelope.datatypes
    if envelope.combiner == const.COMBINER_DUP:
        return to_numpy_dtype(parts[0])
    if envelope.combiner == const.COMBINER_CONTIGUOUS:
        return np.dtype((to_numpy_dtype(parts[0]), (envelope.integers[0],)))
    if envelope.combiner == const.COMBINER_RESIZED:
        inner = to_numpy_dtype(parts[0])
        return _record(inner, layout.extent)
    if envelope.combiner == const.COMBINER_STRUCT:
        lengths = envelope.integers[1:]
        formats = [
            to_numpy_dtype(one) if length == 1 else np.dtype((to_numpy_dtype(one), (length,)))
            for one, length in zip(parts, lengths, strict=True)
        ]
        names = [f"f{number}" for number in range(len(formats))]
        record = {"names": names, "formats": formats, "offsets": list(envelope.addresses)}
        return np.dtype(record | {"itemsize": layout.extent})  # type: ignore[call-overload, no-any-return]
    raise ValueError("NumPy has no dtype for this datatype")


def _record(inner: np.dtype[Any], itemsize: int) -> np.dtype[Any]:
    """Return a dtype with another item size."""
    if inner.itemsize == itemsize:
        return inner
    if inner.names:
        fields = [inner.fields[name] for name in inner.names]  # type: ignore[index]
        formats, offsets = [one[0] for one in fields], [one[1] for one in fields]
        parts = {"names": list(inner.names), "formats": formats, "offsets": offsets}
    else:
        parts = {"names": ["f0"], "formats": [inner], "offsets": [0]}
    return np.dtype(parts | {"itemsize": itemsize})  # type: ignore[call-overload, no-any-return]


# -- attributes ------------------------------------------------------------------------------------


class AttributeKey(NamedTuple):
    """A key of attributes, with the functions that copy and delete a value."""

    copy: Any  # function of (object, key, value), or True
    delete: Callable[[Any, int, Any], None] | None


class AttributeKeys:
    """The keys of attributes of this process."""

    def __init__(self) -> None:
        self._keys: dict[int, AttributeKey] = {}
        self._next = 5000

    def create(self, key: AttributeKey) -> int:
        """Return the number of a new key."""
        self._next += 1
        self._keys[self._next] = key
        return self._next

    def find(self, keyval: int) -> AttributeKey:
        """Return a key that exists."""
        try:
            return self._keys[keyval]
        except KeyError:
            raise MpiException(const.ERR_KEYVAL, f"{keyval} is no key of an attribute") from None


KEYS = AttributeKeys()


class AttributesMixin:
    """Attributes of datatypes, communicators and windows."""

    _attributes: dict[int, Any]

    @classmethod
    def Create_keyval(
        cls, copy_fn: Any = None, delete_fn: Any = None, nopython: bool = False
    ) -> int:
        """Return a key; `copy_fn(object, key, value)` returns the value of a duplicate."""
        return KEYS.create(AttributeKey(copy_fn, delete_fn))

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Give up a key; values that exist stay."""
        KEYS.find(keyval)
        return const.KEYVAL_INVALID

    def Get_attr(self, keyval: int) -> Any:
        """Return the value of a key, or None."""
        return self._attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the value of a key."""
        KEYS.find(keyval)
        if keyval in self._attributes:
            self.Delete_attr(keyval)
        self._attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a key."""
        key = KEYS.find(keyval)
        if keyval in self._attributes:
            value = self._attributes[keyval]
            if callable(key.delete):
                key.delete(self, keyval, value)
            self._attributes.pop(keyval, None)

    def _copied_attributes(self) -> dict[int, Any]:
        """Return the attributes of a duplicate."""
        copied: dict[int, Any] = {}
        for keyval, value in self._attributes.items():
            copy = KEYS.find(keyval).copy
            if copy is True:
                copied[keyval] = value
            elif callable(copy):
                result = copy(self, keyval, value)
                if result is not NotImplemented:
                    copied[keyval] = result
        return copied

    def _delete_attributes(self, keyvals: Iterable[int] | None = None) -> None:
        for keyval in list(self._attributes if keyvals is None else keyvals):
            self.Delete_attr(keyval)
