"""Compressors: how the values of an all-reduce travel in fewer bytes (`sv.compressors`).

Pass one, or its name, as `compress=` of `sv.all_reduce`, an optimizer or a variable. All work on
float32: float64 values are rounded first. A codec encodes a flat array into a number of bytes that
follows from its length alone. So all ranks know how many bytes arrive, and how many elements they
hold.

Example:
    >>> import syncvar as sv
    >>> w = sv.Variable([1.0, 2.0])
    >>> optimizer = sv.optimizers.SGD(0.5, compress=sv.compressors.Int8(block=64))
    >>> optimizer.apply_gradients([([2.0, 4.0], w)])
    >>> w.numpy()
    array([0., 0.], dtype=float32)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from syncvar.core.errors import ConfigError, WireError
from syncvar.runtime.arithmetic import widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Values = NDArray[np.float32]
    Data = NDArray[np.uint8]

__all__ = ["BFloat16", "Codec", "Float16", "Int8", "PowerSGD", "TopK"]

_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
_CACHED = 1 << 15  # elements
_INT8_NAN = -128  # the code of NaN
_SIZE, _INFINITY, _QUIET = map(np.uint32, (0x7FFFFFFF, 0x7F800000, 0x7FC00000))
# Bits of halves, and of float32 numbers: 2**-14, 0.5, and what moves the exponent and rounds up
# what is above a tie.
_HALF_INFINITY, _HALF_NAN = map(np.uint32, (0x7C00, 0x7E00))
_HALF_NORMAL, _HALF_OF_ONE, _REBIAS = map(np.uint32, (0x38800000, 0x3F000000, 0x38000000 - 0xFFF))


def _parts(count: int) -> list[slice]:
    """Return the slices of an array whose intermediate results stay in the cache."""
    return [slice(start, start + _CACHED) for start in range(0, count, _CACHED)]


def _halves(values: Values) -> NDArray[np.uint32]:
    """Return the bits of values as halves, rounded to nearest even.

    NumPy rounds to subnormal halves fifty times slower. Below 2**-14 a half is a multiple of
    2**-24, to which adding 0.5 rounds: the lower bits of the sum are the half.
    """
    bits = values.view(np.uint32)
    sizes = bits & _SIZE
    halves: NDArray[np.uint32] = (sizes >> np.uint32(13)) & np.uint32(1)
    halves += sizes
    halves -= _REBIAS
    halves >>= 13
    np.minimum(halves, _HALF_INFINITY, out=halves)
    is_small = sizes < _HALF_NORMAL
    small = (np.abs(values) + np.float32(0.5)).view(np.uint32)
    np.subtract(small, _HALF_OF_ONE, out=halves, where=is_small)
    halves[sizes > _INFINITY] = _HALF_NAN
    halves |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    return halves


def _upper_halves(values: Values) -> NDArray[np.uint32]:
    """Return the bits of values as bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint32] = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    rounded[np.isnan(values)] = _QUIET >> 16
    return rounded


@runtime_checkable
class Codec(Protocol):
    """The members of a compressor; write a class that has them to make your own.

    `decode(encode(values), values.size)` is close to `values`. Its result depends on the bytes and
    the count alone, so that it is the same on all ranks. With `bucket_bytes=`, another thread calls
    `encode`.

    Attributes:
        name: Name with all parameters, such as "int8(block=256)". Ranks compare it.
        in_pieces: True: each rank sums one piece of the array, and encodes the sum once more. Each
            rank then sends 2(n-1)/n of the encoded array. False: each rank gets the encoded arrays
            of all others, and sums them. Each rank then receives n-1 encoded arrays.
        keeps_error: Whether optimizers add what `encode` has lost to the gradient of the next step,
            and variables to the next write.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> class Signs:
        ...     name, in_pieces, keeps_error = "signs", False, True
        ...     def encoded_bytes(self, count):
        ...         return 4 + count
        ...     def encode(self, values):
        ...         scale = np.abs(values).mean(keepdims=True).astype(np.float32)
        ...         return np.concatenate([scale.view(np.uint8), (values < 0).view(np.uint8)])
        ...     def decode(self, data, count):
        ...         return np.where(data[4:], -1, 1).astype(np.float32) * data[:4].view(np.float32)
        >>> isinstance(Signs(), sv.compressors.Codec)
        True
        >>> sv.all_reduce(np.array([0.5, -2.0]), compress=Signs())  # one rank sends nothing
        array([ 0.5, -2. ])
    """

    @property
    def name(self) -> str:
        """Name with all parameters."""

    @property
    def in_pieces(self) -> bool:
        """Whether each rank sums one piece."""

    @property
    def keeps_error(self) -> bool:
        """Whether optimizers keep the error."""

    def encoded_bytes(self, count: int) -> int:
        """Return the number of bytes that `encode` makes of `count` elements."""

    def encode(self, values: Values) -> Data:
        """Return a flat float32 array of at least one element as bytes; do not change it."""

    def decode(self, data: Data, count: int) -> Values:
        """Return `count` elements as a new flat float32 array."""


class Float16:
    """Half precision: 2 bytes for an element.

    Each input, and the result once more, is rounded by at most 2**-11 of its absolute value, or by
    2**-25 if that is more. The error of the sum is at most the sum of these, plus the roundings of
    float32. An absolute value of 65520 or more becomes infinity, in an input or in the result. NaN
    and infinity stay.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> codec = sv.compressors.Float16()
        >>> codec.decode(codec.encode(np.float32([1 / 3, 1e6])), 2).tolist()
        [0.333251953125, inf]
    """

    name, in_pieces, keeps_error = "float16", True, False

    def encoded_bytes(self, count: int) -> int:
        """Return 2 * count."""
        return 2 * count

    def encode(self, values: Values) -> Data:
        """Round to nearest even."""
        result = np.empty(values.size, np.uint16)
        for part in _parts(values.size):
            result[part] = _halves(values[part])
        return result.view(np.uint8)

    def decode(self, data: Data, count: int) -> Values:
        """Return the halves as float32."""
        result: Values = np.empty(count, np.float32)
        widen(data.view(np.float16), result)
        return result


class BFloat16:
    """bfloat16: 2 bytes for an element, with the range of float32.

    Each input, and the result once more, is rounded by at most 2**-8 of its absolute value, or by
    2**-134 if that is more. The error of the sum is at most the sum of these, plus the roundings of
    float32. NaN and infinity stay. It needs no package.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> codec = sv.compressors.BFloat16()
        >>> codec.decode(codec.encode(np.float32([1 / 3, 1e6])), 2).tolist()
        [0.333984375, 999424.0]
    """

    name, in_pieces, keeps_error = "bfloat16", True, False

    def encoded_bytes(self, count: int) -> int:
        """Return 2 * count."""
        return 2 * count

    def encode(self, values: Values) -> Data:
        """Round to nearest even."""
        result = np.empty(values.size, np.uint16)
        for part in _parts(values.size):
            result[part] = _upper_halves(values[part])
        return result.view(np.uint8)

    def decode(self, data: Data, count: int) -> Values:
        """Return the values as float32."""
        bits = data.view(np.uint16)[:count].astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)


class Int8:
    """Integers of 8 bits, with one float32 scale for each block of elements.

    An element travels as round(value / scale), where scale is the largest absolute value of its
    block, divided by 127. So each input, and the result once more, is rounded by at most 1/254 of
    the largest absolute value of its block, and by 2**-142. The error of the sum is at most the sum
    of these, plus the roundings of float32. NaN stays, and an infinity becomes NaN; neither changes
    the scale. The arrays of a pytree are one vector, so a block may cover the end of one array and
    the beginning of the next.

    Args:
        block: Elements of a block. Each takes 4 bytes more.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> codec = sv.compressors.Int8()
        >>> codec.decode(codec.encode(np.float32([127, 1.4, np.inf])), 3).tolist()
        [127.0, 1.0, nan]
    """

    in_pieces, keeps_error = True, False

    def __init__(self, block: int = 256) -> None:
        self._block = _checked_count("block", block)
        self.name = f"int8(block={self._block})"

    def encoded_bytes(self, count: int) -> int:
        """Return count, and 4 for each block."""
        return count + 4 * -(-count // self._block)

    def encode(self, values: Values) -> Data:
        """Return the scales, then the codes."""
        count, block = values.size, self._block
        blocks = -(-count // block)
        scales: Values = np.empty(blocks, np.float32)
        codes: NDArray[np.int8] = np.empty(blocks * block, np.int8)
        whole = count // block  # blocks that are full
        step = max(1, _CACHED // block)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            rows = values[first * block : last * block].reshape(-1, block)
            scales[first:last], part = _scaled(rows)
            codes[first * block : last * block] = part.reshape(-1)
        if whole < blocks:
            scales[whole:], part = _scaled(values[whole * block :].reshape(1, -1))
            codes[whole * block : count] = part[0]
        return np.concatenate([scales.view(np.uint8), codes[:count].view(np.uint8)])

    def decode(self, data: Data, count: int) -> Values:
        """Multiply the codes by their scales."""
        block = self._block
        blocks, whole = -(-count // block), count // block
        scales = np.frombuffer(data[: 4 * blocks].tobytes(), np.float32)
        codes = data[4 * blocks : 4 * blocks + count].view(np.int8)
        result: Values = np.empty(count, np.float32)
        result[:] = codes
        rows = result[: whole * block].reshape(whole, block)
        rows *= scales[:whole, None]
        result[whole * block :] *= scales[whole:].repeat(count - whole * block)
        is_nan = codes == _INT8_NAN
        if is_nan.any():
            result[is_nan] = np.nan
        return result


def _scaled(rows: Values) -> tuple[Values, NDArray[np.int8]]:
    """Return the scale of each row, and its codes."""
    largest = np.abs(rows).max(axis=1)
    bad = None
    if not np.isfinite(largest).all():
        bad = ~np.isfinite(rows)
        rows = np.where(bad, np.float32(0), rows)
        largest = np.abs(rows).max(axis=1)
    # A larger scale would decode to infinity.
    scales = np.minimum(largest / np.float32(127), _LARGEST_SCALE)
    divisors = np.where(scales == 0, np.float32(np.inf), scales)  # codes become 0
    quotients = rows / divisors[:, None]
    np.rint(quotients, out=quotients)
    np.clip(quotients, -127, 127, out=quotients)
    codes = quotients.astype(np.int8)
    if bad is not None:
        codes[bad] = _INT8_NAN
    return scales, codes


class TopK:
    """The elements of the largest absolute values, 8 bytes for each; all others count as zero.

    Each rank chooses its own elements, and those are exact in float32. The error of an element of
    the sum is at most the sum of the smallest absolute values that travel, one of each rank. NaN
    and infinity are larger than all numbers, and stay if they travel.

    Optimizers keep the error: they add what did not travel to the gradient of the next step.
    Variables add it to the next write. `sv.all_reduce` forgets it.

    Args:
        ratio: Share of elements that travel, in (0, 1]; at least one does. Each rank receives the
            elements of all others, so it pays while ratio is far below 1 / (number of ranks).

    Source: Stich, Cordonnier, Jaggi 2018 (sparsified SGD with memory).

    Example:
        >>> import numpy as np, syncvar as sv
        >>> codec = sv.compressors.TopK(ratio=0.5)
        >>> codec.decode(codec.encode(np.float32([1, -3, 2, 0])), 4).tolist()
        [0.0, -3.0, 2.0, 0.0]
    """

    in_pieces, keeps_error = False, True

    def __init__(self, ratio: float = 0.01) -> None:
        is_number = isinstance(ratio, int | float | np.number) and not isinstance(ratio, bool)
        if not is_number or not 0 < ratio <= 1:
            raise ConfigError(f"ratio must be a number in (0, 1], not {ratio!r}")
        self._ratio = float(ratio)
        self.name = f"topk(ratio={self._ratio!r})"

    def _chosen(self, count: int) -> int:
        return min(count, max(1, math.ceil(self._ratio * count)))

    def encoded_bytes(self, count: int) -> int:
        """Return 8 for each element that travels."""
        return 8 * self._chosen(count)

    def encode(self, values: Values) -> Data:
        """Return the positions in ascending order, then the values."""
        chosen = self._chosen(values.size)
        sizes = np.abs(values)
        sizes[np.isnan(sizes)] = np.inf
        smallest = np.partition(sizes, values.size - chosen)[values.size - chosen]
        larger = np.flatnonzero(sizes > smallest)
        equal = np.flatnonzero(sizes == smallest)[: chosen - larger.size]
        places = np.sort(np.concatenate([larger, equal])).astype(np.uint32)
        return np.concatenate([places.view(np.uint8), values[places].view(np.uint8)])

    def decode(self, data: Data, count: int) -> Values:
        """Return the values at their positions, and zeros."""
        chosen = self._chosen(count)
        places, values = data.view(np.uint32)[:chosen], data.view(np.float32)[chosen:]
        if places.max() >= count:
            raise WireError(f"a position of compressed values is {places.max()}, of {count}")
        result: Values = np.zeros(count, np.float32)
        result[places] = values
        return result


class PowerSGD:
    """Matrices of low rank: (rows + columns) * rank elements instead of rows * columns.

    An array of two or more dimensions is a matrix of shape[0] rows. The ranks find `rank`
    directions, the same for all, and the result is the projection of the sum on them. So the
    2-norm of the error is at most the 2-norm of the sum. If the matrix of the sum has at most that
    rank, there are only the roundings of float32. There is no bound for one element. Arrays that
    would not become shorter, such as vectors, travel as they are. A matrix that holds NaN or
    infinity becomes NaN.

    Optimizers and variables keep the error, as for `TopK`, and begin with the directions of the
    last step or write. `sv.all_reduce` forgets both.

    Args:
        rank: Number of directions.

    Source: Vogels, Karimireddy, Jaggi 2019.

    Example:
        >>> import syncvar as sv
        >>> sv.compressors.PowerSGD(rank=2).factor_shape((64, 10))
        (10, 2)
    """

    keeps_error = True

    def __init__(self, rank: int = 2) -> None:
        self._rank = _checked_count("rank", rank)
        self.name = f"powersgd(rank={self._rank})"

    def factor_shape(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return columns and rank of an array's matrix; None if it travels as it is."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        if (rows + columns) * self._rank >= rows * columns:
            return None
        return columns, self._rank


_BY_NAME: dict[str, Callable[[], Codec | PowerSGD]] = {
    "float16": Float16,
    "bfloat16": BFloat16,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}
_MEMBERS = ("name", "in_pieces", "keeps_error", "encoded_bytes", "encode", "decode")


def _checked_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
    return int(value)


def checked_compressor(value: Any) -> Codec | PowerSGD:
    """Return the compressor of a value of `compress=`; ConfigError if it is none."""
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]()
    if isinstance(value, PowerSGD):
        return value
    if not isinstance(value, type) and isinstance(value, Codec):
        codec: Codec = value
        if isinstance(codec.name, str) and codec.name:
            return codec
        raise ConfigError(f"the name of a compressor must be a word, not {value.name!r}")
    known = ", ".join(map(repr, _BY_NAME))
    missing = [one for one in _MEMBERS if not hasattr(value, one)]
    lacks = "" if isinstance(value, str) or not missing else f", which lacks {', '.join(missing)}"
    raise ConfigError(
        f"compress must be one of {known}, or an object like sv.compressors.Codec, "
        f"not {value!r}{lacks}"
    )


def signature_of(compressor: Codec | PowerSGD) -> tuple[object, ...]:
    """Return what ranks compare of a compressor."""
    return compressor.name, compressor.keeps_error, getattr(compressor, "in_pieces", None)


def encoded(compressor: Codec, values: Values) -> Data:
    """Return the bytes of an array; ConfigError if the compressor breaks its protocol."""
    data = compressor.encode(values)
    expected = compressor.encoded_bytes(values.size)
    is_flat = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1
    if not is_flat or data.size != expected:
        found = f"{data.dtype}{list(data.shape)}" if isinstance(data, np.ndarray) else repr(data)
        raise ConfigError(
            f"the compressor {compressor.name!r} must encode {values.size} elements as "
            f"uint8[{expected}], not as {found:.100}"
        )
    return np.ascontiguousarray(data)


def decoded(compressor: Codec, data: Data, count: int) -> Values:
    """Return the elements in bytes; ConfigError if the compressor breaks its protocol."""
    values = compressor.decode(data, count)
    if not isinstance(values, np.ndarray) or values.shape != (count,) or values.dtype != np.float32:
        raise ConfigError(
            f"the compressor {compressor.name!r} must decode {count} elements as "
            f"float32[{count}], not as {type(values).__name__}"
        )
    return values
