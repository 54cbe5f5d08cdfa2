"""Persistent reductions in shared memory: of an array, or of a pytree; see `persistent_call`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from syncvar._native.constants import DTYPES_MAX
from syncvar.core.errors import InternalError, SyncvarError
from syncvar.core.pytree import PyTree
from syncvar.core.reduce_ops import reduction
from syncvar.runtime.arithmetic import HALVES, Arithmetic
from syncvar.runtime.block_transfer import NO_RESULT
from syncvar.runtime.compile_reduce import EVERYWHERE, BufferPlacement, ResultPlacement
from syncvar.runtime.persistent_call import (
    DtypeGroup,
    NativeCallSpec,
    NativeLeaf,
    PersistentCall,
    may_persist,
)
from syncvar.runtime.program_runner import agreed
from syncvar.runtime.shm_reduce import (
    ReduceBuffers,
    add_native_program,
    flat,
    is_separate,
    places_of,
    reduce_by_slots,
    reduce_published,
    reduce_shared,
    slot_program,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator, Persistent
    from syncvar.runtime.program_runner import Arrays, SlotProgram
    from syncvar.shm.group_channel import GroupChannel

_EMPTY: NDArray[Any] = np.empty(0, np.uint8)


class ReduceForm(NamedTuple):
    """The arrays of a reduction, and what becomes of them; equal for all repetitions."""

    # The reduction of each dtype, with the indices of its arrays. A long vector comes first.
    kinds: Sequence[tuple[Reduction, Sequence[int]]]
    shape: tuple[int, ...]  # of the only array; of a pytree the elements of the first kind
    is_small: bool  # whether all arrays go through slots
    pytree: PyTree | None = None  # example arrays
    apply: np.ufunc | None = None  # `out`, which must then be given, becomes apply(out, result)
    ends: ResultPlacement = EVERYWHERE  # which ranks get which result
    neutral: Any = None  # elements of the result of a rank that combines nothing
    is_discarded: bool = False  # whether no rank gets a result, as of a barrier

    @property
    def sizes(self) -> list[int]:
        """Bytes of each kind in a slot."""
        if self.pytree is None:
            return [prod(self.shape) * self.kinds[0][0].accumulate.itemsize]
        arrays = self.pytree.arrays
        return [
            sum([arrays[place].size for place in places]) * reduction.accumulate.itemsize
            for reduction, places in self.kinds
        ]


def persist_reduction(
    communicator: Communicator, form: ReduceForm, spec: CollectiveSpec
) -> Persistent | None:
    """Build the persistent call of reductions, or return None if there is none.

    Args:
        communicator: The group.
        form: The arrays.
        spec: Description of the call, as on the slow path.

    Returns:
        A function of (x, out, spec, timeout). x is a native array of this dtype and shape, or a
        `PyTree` of such arrays; `out` is None or anything. Its `spec` describes this call, None
        if it is the one given here. `timeout` is in seconds, None for the job's default;
        `is_seconds` must hold for it. The function returns the result, or None if it did nothing:
        take the slow path then.
    """
    if not may_persist(communicator):
        return None
    assert communicator.channel is not None
    path = "shm small" if form.is_small else "shm"
    info = communicator.call_info(spec, sum(form.sizes), path)
    program = ReduceProgram(communicator.channel, form)
    call = PersistentCall(communicator, info, program, is_timed=not form.is_small)
    return program.build_native(call) or call


def persist_barrier(communicator: Communicator, spec: CollectiveSpec) -> Persistent | None:
    """Build the persistent call of a barrier, a reduction of empty arrays, or return None."""
    kinds = [(reduction("sum", np.dtype(np.uint8)), [0])]
    form = ReduceForm(kinds, (0,), is_small=True, is_discarded=True)
    return persist_reduction(communicator, form, spec)


class BoundReduce:
    """The arrays of one reduction.

    Args:
        program: The program.
        output: What becomes the result.
        parts: Flat (SOURCEs, TARGETs) of each kind.
    """

    __slots__ = ("output", "parts", "program")

    held = None
    inputs_differ = False

    def __init__(
        self, program: ReduceProgram, output: Sequence[NDArray[Any]], parts: list[Arrays]
    ) -> None:
        self.program, self.output, self.parts = program, output, parts

    @property
    def result(self) -> Any:
        """The caller's result; neutral if this rank has combined nothing."""
        program = self.program
        pytree = program.form.pytree
        if pytree is not None:
            return pytree.with_arrays(self.output)
        output = self.output[0]
        if program.is_neutral:
            output[...] = program.form.neutral
        return output

    def vectors(self) -> list[ReduceBuffers]:
        """Return the buffers of each kind."""
        arithmetics, ends = self.program.arithmetics(self.parts), self.program.form.ends
        return [
            ReduceBuffers(*both, arithmetic, ends)
            for both, arithmetic in zip(self.parts, arithmetics, strict=True)
        ]

    def slow_path(self) -> Generator[Any, None, Any]:
        """Never called: all inputs have one form."""
        raise InternalError("the inputs of a reduction cannot differ")


class ReduceProgram:
    """The program of a reduction on this rank; see `SharedProgram`."""

    def __init__(self, channel: GroupChannel, form: ReduceForm) -> None:
        self.channel, self.form = channel, form
        self.terms = form.ends.terms(channel.rank, channel.size)  # ranks that are combined here
        is_left_out = form.is_discarded or (form.ends.collective == "reduce" and not self.terms)
        self.no_result = NO_RESULT if is_left_out else None  # output of a rank that gets none
        self.is_neutral = not self.terms and not is_left_out
        self._slot_bytes = places_of(form.sizes)[1] if form.is_small else 0
        self._arithmetics: list[Arithmetic] = []  # made by the first call in Python
        self._slots: SlotProgram | None = None

    # -- arrays ------------------------------------------------------------------------------------

    def bind(self, x: Any, out: Any) -> BoundReduce | None:
        """Return the arrays of a call; None for the slow path."""
        form = self.form
        if not form.is_small and not _has_segments(self.channel):
            return None
        if form.pytree is not None:
            if out is not None or not isinstance(x, PyTree):
                return None
            outputs: list[Any] = [None] * len(x.arrays)
            for reduction, places in form.kinds:
                for place in places:
                    outputs[place] = np.empty(x.arrays[place].shape, reduction.result)
            return BoundReduce(self, outputs, self._parts(x.arrays, outputs))
        output = self._output_for(out)
        if output is None:
            return None
        if not form.is_small and x is not output and np.may_share_memory(x, output):
            x = x.copy()
        return BoundReduce(self, (output,), [self._part(x, output)])

    def bind_copy(self, x: Any, out: Any) -> BoundReduce | None:
        """Return the arrays of an asynchronous call; the copy of the input may be the output."""
        form = self.form
        if form.pytree is not None:
            if not isinstance(x, PyTree):
                return None
            return self.bind(x._replace(arrays=[array.copy() for array in x.arrays]), out)
        if x is out:
            return self.bind(x, out)
        x = x.copy()
        becomes_output = (
            out is None
            and form.ends == EVERYWHERE
            and self.no_result is None
            and x.dtype == form.kinds[0][0].result
        )
        return self.bind(x, x if becomes_output else out)

    def bind_output(self, x: Any, out: Any, output: Any) -> BoundReduce:
        """Return the arrays of a call that the C extension has begun.

        It has copied a small input, which may have changed since.
        """
        form = self.form
        if form.is_small and self.no_result is None:
            x = output
        elif x is None:  # only its form matters
            x = np.empty(form.shape, form.kinds[0][0].result)
        if form.pytree is None:
            return BoundReduce(self, (output,), [self._part(x, output)])
        return BoundReduce(self, output, self._parts(list(x), output))

    def _output_for(self, out: Any) -> NDArray[Any] | None:
        """Return the output of one array; None if `out` does not serve."""
        shape, dtype = self.form.shape, self.form.kinds[0][0].result
        if self.no_result is not None:
            return self.no_result
        if out is None:
            return np.empty(shape, dtype)
        is_fit = (
            type(out) is np.ndarray
            and out.shape == shape
            and out.dtype == dtype
            and out.flags.carray
        )
        return out if is_fit else None

    def _part(self, x: NDArray[Any], output: NDArray[Any]) -> Arrays:
        target = flat(output)
        source = target if x is output else flat(x)
        if self.no_result is not None:
            target = _EMPTY.view(self.form.kinds[0][0].result)
        return (source,), (target,)

    def _parts(
        self, arrays: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]
    ) -> list[Arrays]:
        parts: list[Arrays] = []
        for _, places in self.form.kinds:
            both = [self._part(arrays[place], outputs[place]) for place in places]
            parts.append(([part[0][0] for part in both], [part[1][0] for part in both]))
        return parts

    def arithmetics(self, parts: list[Arrays]) -> list[Arithmetic]:
        """Return the arithmetic of each kind; `parts` are the arrays of any call."""
        if not self._arithmetics:
            self._arithmetics = [
                self._buffers(reduction, *both).arithmetic
                for (reduction, _), both in zip(self.form.kinds, parts, strict=True)
            ]
        return self._arithmetics

    def _buffers(
        self, kind: Reduction, sources: Sequence[Any], targets: Sequence[Any]
    ) -> ReduceBuffers:
        form, channel = self.form, self.channel
        divisor = form.ends.divisor(channel.rank, channel.size) if kind.is_mean else 0
        return ReduceBuffers.of(
            sources, targets, kind.ufunc, kind.accumulate, divisor, form.apply, form.ends
        )

    # -- running -----------------------------------------------------------------------------------

    def run(self, opening: tuple[int, int], arrays: BoundReduce) -> Iterator[int]:
        """Return the steps of a whole call."""
        if self.form.is_small:
            return reduce_by_slots(self._slots_of(arrays), opening, arrays.parts)
        first, *others = arrays.vectors()
        return reduce_shared(self.channel, opening, first, others)

    def resume(self, check: int, arrays: BoundReduce, suspended: Any, native: Any) -> Iterator[int]:
        """Return the rest of a call that the C extension has published."""
        if suspended is not None:
            return iter(suspended)
        if self.form.is_small:
            return self._combine_published(check, arrays)
        first, *others = arrays.vectors()
        return reduce_published(self.channel, check, first, native, others)

    def _combine_published(self, check: int, arrays: BoundReduce) -> Iterator[int]:
        yield from agreed(self.channel, check, self.channel.last)
        self._slots_of(arrays).run(arrays.parts)

    def _slots_of(self, arrays: BoundReduce) -> SlotProgram:
        if self._slots is None:
            vectors = arrays.vectors()
            uses_ring = len(vectors) == 1
            self._slots = slot_program(self.channel, vectors, uses_ring=uses_ring)
        return self._slots

    # -- the C extension ---------------------------------------------------------------------------

    def build_native(self, call: PersistentCall) -> Persistent | None:
        """Return the call in C, or None. It takes equal dtypes of input and result only."""
        form = self.form
        are_plain = all(reduction.source == reduction.result.name for reduction, _ in form.kinds)
        if not are_plain or len(form.kinds) > DTYPES_MAX:
            return None
        if self.is_neutral:
            return None
        return self._build_small(call) if form.is_small else self._build_long(call)

    def _build_small(self, call: PersistentCall) -> Persistent | None:
        form, channel, no_result = self.form, self.channel, self.no_result
        reduction, _ = form.kinds[0]
        kind, whole = reduction.result, self._slot_bytes
        if no_result is not None and kind != reduction.accumulate:
            return None
        array = (kind, form.shape)
        if len(form.kinds) > 1:  # the slot is a vector of bytes
            array = (np.dtype(np.uint8), (whole,))
        combines = bool(self.terms) and len(form.kinds) == 1
        spec = NativeCallSpec(
            call,
            array,
            array if no_result is None else (no_result.dtype, no_result.shape),
            self._arithmetic(reduction) if combines else None,
            puts=((0, 0, whole, channel.rank),),
            terms=[(0, 0, whole, other) for other in self.terms],
            ring=channel.ring_of(whole) if len(form.kinds) == 1 else -1,
            no_result=no_result,
            pytree=form.pytree,
            leaves=self._leaves(),
            groups=self._groups(0),
        )
        native: Persistent | None = spec.build()
        return native

    def _build_long(self, call: PersistentCall) -> Persistent | None:
        form, channel, no_result = self.form, self.channel, self.no_result
        reduction, places = form.kinds[0]
        counts = [prod(form.shape)]
        if form.pytree is not None:
            counts = [form.pytree.arrays[place].size for place in places]
        like = as_strided(np.empty(1, reduction.result), (sum(counts),), (0,))
        parts = [like[:count] for count in counts]
        targets = parts if no_result is None else [_EMPTY.view(reduction.result)]
        vector = self._buffers(reduction, parts, targets)
        if not channel.are_native or not vector.suits_native:
            return None
        array = (reduction.result, form.shape if form.pytree is None else (sum(counts),))
        spec = NativeCallSpec(
            call,
            array,
            array if no_result is None else (no_result.dtype, no_result.shape),
            is_long=True,
            is_everywhere=form.ends == EVERYWHERE,
            no_result=no_result,
            pytree=form.pytree,
            leaves=self._leaves(),
            groups=self._groups(1),
        )
        native: Persistent | None = spec.build()
        if native is not None:
            add_native_program(channel, vector, BufferPlacement(), native)
        return native

    def _leaves(self) -> list[NativeLeaf]:
        form = self.form
        if form.pytree is None:
            return []
        group_of = {place: group for group, kind in enumerate(form.kinds) for place in kind[1]}
        shares = [len(places) > 1 for _, places in form.kinds]  # with other arrays of its dtype
        return [
            NativeLeaf(array.shape, shares[group_of[place]] and is_separate(array), group_of[place])
            for place, array in enumerate(form.pytree.arrays)
        ]

    def _groups(self, first: int) -> list[DtypeGroup]:
        """Return the kinds of a pytree; those from `first` on use the slots."""
        form = self.form
        if form.pytree is None:
            return []
        arrays = form.pytree.arrays
        starts = [0] * first + list(places_of(form.sizes[first:])[0])
        return [
            DtypeGroup(
                self._arithmetic(reduction),
                reduction.result,
                start,
                sum([arrays[place].size for place in places]),
            )
            for (reduction, places), start in zip(form.kinds, starts, strict=True)
        ]

    def _arithmetic(self, reduction: Reduction) -> tuple[Any, ...]:
        """Return the arithmetic in slots, where halves are float32."""
        form, channel, accumulate = self.form, self.channel, reduction.accumulate
        division: tuple[Any, bytes] = (None, b"")
        divisor = form.ends.divisor(channel.rank, channel.size) if reduction.is_mean else 0
        if divisor:
            division = (np.divide, np.asarray(divisor, accumulate).tobytes())
        half = HALVES[reduction.result.name] if reduction.result != accumulate else 0
        return accumulate.itemsize, accumulate, half, reduction.ufunc, *division, form.apply


def _has_segments(channel: GroupChannel) -> bool:
    """Return whether there is memory for cells; the slow path reports why not."""
    try:
        channel.reserve_segments()
    except SyncvarError:
        return False
    return True
