"""Persistent reductions of pytrees with long arrays, or with arrays of several dtypes.

Short arrays of all dtypes share the slots; see `persistent_builder` for the rest of a call.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from syncvar._native.constants import KINDS_MAX
from syncvar.core.pytree import PyTree
from syncvar.runtime.arithmetic import HALVES, gil_monitor
from syncvar.runtime.compile_reduce import EVERYWHERE, BufferPlacement
from syncvar.runtime.persistent_builder import DtypeGroup, builder_for
from syncvar.runtime.persistent_reduce import OutputSpec, has_segments, reducing, then
from syncvar.runtime.program_runner import agreed
from syncvar.runtime.shm_reduce import (
    ReduceBuffers,
    add_native_program,
    combine_small,
    flat_of,
    places_of,
    reduce_published,
    reduce_shared,
    reduce_small,
)
from syncvar.shm.channel_table import MASK, SPREAD

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.persistent_builder import CallLabel, PersistentCallBuilder
    from syncvar.shm.group_channel import GroupChannel


def prepare_kinds(
    communicator: Communicator,
    kinds: Mapping[Reduction, Sequence[int]],
    sizes: Sequence[int],
    longest: int | None,
    leaves: PyTree,
    digest: int,
    label: str,
) -> PreparedCall | None:
    """Build the persistent call of arrays of several dtypes, or of long ones of one dtype.

    Args:
        communicator: The group.
        kinds: Indices of the arrays of each reduction.
        sizes: Bytes of each kind in a slot.
        longest: The kind with long arrays; None if all arrays are short.
        leaves: Example arrays.
        digest: Fingerprint of the call, as on the slow path.
        label: Text of the call.
    """
    order = sorted(range(len(sizes)), key=lambda number: number != longest)  # the long one first
    ordered = [list(kinds.items())[number] for number in order]
    sizes = [sizes[number] for number in order]
    ground = builder_for(
        communicator, label, digest, sum(sizes), "shm small" if longest is None else "shm"
    )
    if ground is None:
        return None
    return (_short if longest is None else _long)(
        ground, _Kinds(ordered, sizes, leaves, communicator.size)
    )


class _Kinds(NamedTuple):
    """Arrays of several kinds: reductions with indices, bytes, examples, and group size."""

    kinds: Sequence[tuple[Reduction, Sequence[int]]]
    sizes: Sequence[int]
    leaves: PyTree
    size: int

    def vectors_of(
        self, arrays: Sequence[NDArray[Any]], output: Sequence[NDArray[Any]]
    ) -> list[ReduceBuffers]:
        """Return the buffers of each kind."""
        return [
            ReduceBuffers.of(
                flat_of([arrays[place] for place in places]),
                flat_of([output[place] for place in places]),
                reduction.ufunc,
                reduction.accumulate,
                self.size if reduction.is_mean else 0,
            )
            for reduction, places in self.kinds
        ]

    def buffers_of(self, x: Any, out: Any) -> tuple[list[ReduceBuffers], Any] | None:
        """Return the buffers and the result of a call's (x, out), or None for the slow path."""
        if out is not None or not isinstance(x, PyTree):
            return None
        output: list[Any] = [None] * len(x.arrays)
        for reduction, places in self.kinds:
            for place in places:
                output[place] = np.empty(x.arrays[place].shape, reduction.result)
        return self.vectors_of(x.arrays, output), x.with_arrays(output)

    @property
    def are_native(self) -> bool:
        """Whether C takes so many kinds, whose inputs and results have equal dtypes."""
        return len(self.kinds) <= KINDS_MAX and all(
            reduction.source == reduction.result.name for reduction, _ in self.kinds
        )

    def dtype_groups(self, first: int) -> list[DtypeGroup]:
        """Return the kinds for C; those from `first` on use the slots."""
        starts = [0] * first + list(places_of(self.sizes[first:])[0])
        return [
            DtypeGroup(_arithmetic(reduction, self.size), reduction.result, start, places)
            for (reduction, places), start in zip(self.kinds, starts, strict=True)
        ]


def _short(ground: PersistentCallBuilder, several: _Kinds) -> PreparedCall:
    """Build the persistent call of arrays that all go through slots."""
    channel, engine, digest = ground.channel, ground.engine, ground.info.fingerprint
    leaves, nbytes = several.leaves, places_of(several.sizes)[1]

    def left(check: int, target: int, output: Any) -> Generator[int, None, Any]:
        """Continue a call that C has published; return the results as a tuple."""
        yield from agreed(channel, check, target)
        yield from combine_small(channel, several.vectors_of(output, output))
        return output

    def later(
        number: int,
        begin: int,
        _x: Any,
        _out: Any,
        output: Any,
        label: CallLabel | None,
        _run: None,
        native: Any,
    ) -> tuple[bool, Any]:
        """Continue at once: a rank that waits for this one is late in its next call."""
        check = ((digest if label is None else label[1]) + number * SPREAD) & MASK
        target = channel.last
        if not channel.wait(channel.others, target) or not native.end(check, output):
            return False, left(check, target, output)
        engine.recorder.add(
            (ground.with_label(label).info, number, begin, monotonic_ns(), get_ident())
        )
        return True, output

    def adopted(number: int, output: Any) -> Generator[int, None, Any]:
        return leaves.with_arrays(
            (yield from left((digest + number * SPREAD) & MASK, (number << 1) + 2, output))
        )

    call = reducing(
        ground, reduce_small, several.buffers_of, OutputSpec(EVERYWHERE, range(channel.size))
    )
    if not several.are_native:
        return call
    in_slot = (np.dtype(np.uint8), (nbytes,))
    native = ground.build_native(
        call,
        later,
        input_form=in_slot,
        output_form=in_slot,
        puts=((0, 0, nbytes, channel.rank),),
        terms=tuple((0, 0, nbytes, other) for other in range(channel.size)),
        steps=adopted,
        leaves=leaves,
        kinds=several.dtype_groups(0),
    )
    return native or call


def _long(ground: PersistentCallBuilder, several: _Kinds) -> PreparedCall:
    """Build the persistent call whose first kind is a long vector; the other kinds use slots."""
    channel, digest, leaves = ground.channel, ground.info.fingerprint, several.leaves
    output_spec = OutputSpec(EVERYWHERE, range(channel.size))

    def arrays_of(x: Any, out: Any) -> tuple[list[ReduceBuffers], Any] | None:
        return several.buffers_of(x, out) if has_segments(channel) else None

    def reduce(
        channel: GroupChannel, opening: tuple[int, int], vectors: list[ReduceBuffers]
    ) -> Generator[int, None, bool]:
        return reduce_shared(channel, opening, vectors[0], vectors[1:])

    def later(
        number: int,
        _begin: int,
        x: Any,
        _out: Any,
        output: Any,
        label: CallLabel | None,
        run: Any,
        native: Any,
    ) -> tuple[bool, Any]:
        """Continue a call that C has published or begun."""
        if run is not None:
            return False, then(run, output, output_spec)
        vector, *small_vectors = several.vectors_of(x, output)
        check = ((digest if label is None else label[1]) + number * SPREAD) & MASK
        return False, then(
            reduce_published(channel, check, vector, native, small_vectors), output, output_spec
        )

    call = reducing(ground, reduce, arrays_of, output_spec)
    reduction, places = several.kinds[0]
    counts = [leaves.arrays[place].size for place in places]
    like = as_strided(np.empty(1, reduction.result), (sum(counts),), (0,))
    parts = [like[:count] for count in counts]
    divisor = channel.size if reduction.is_mean else 0
    vector = ReduceBuffers.of(parts, parts, reduction.ufunc, reduction.accumulate, divisor)
    if not (several.are_native and channel.are_native and vector.suits_native):
        return call
    form = (reduction.result, (sum(counts),))
    native = ground.build_native(
        call,
        later,
        input_form=form,
        output_form=form,
        gil_monitor=gil_monitor,
        leaves=leaves,
        kinds=several.dtype_groups(1),
    )
    if native is None:
        return call
    add_native_program(channel, vector, BufferPlacement(), native)
    return native


def _arithmetic(reduction: Reduction, size: int) -> tuple[Any, ...]:
    """Return the arithmetic in slots, where halves are float32."""
    division: Any = (None, b"")
    if reduction.is_mean:
        division = (np.divide, np.asarray(size, reduction.accumulate).tobytes())
    half = HALVES[reduction.result.name] if reduction.result != reduction.accumulate else 0
    accumulate = reduction.accumulate
    return accumulate.itemsize, accumulate, half, reduction.ufunc, *division, None
