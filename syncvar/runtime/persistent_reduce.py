"""Persistent reductions in shared memory, of small and of long arrays; see `persistent_builder`."""

from __future__ import annotations

from functools import partial
from math import prod
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from syncvar.algorithms.reproducible_tree import tree_order
from syncvar.core.errors import SyncvarError
from syncvar.core.pytree import PyTree
from syncvar.core.reduce_ops import quiet_caller, reduction
from syncvar.runtime.arithmetic import HALVES, gil_monitor, store_parts
from syncvar.runtime.block_transfer import NOTHING
from syncvar.runtime.compile_reduce import EVERYWHERE, BufferPlacement, ResultPlacement
from syncvar.runtime.persistent_builder import builder_for, run_while_spinning
from syncvar.runtime.program_runner import agreed
from syncvar.runtime.shm_reduce import (
    ReduceBuffers,
    add_native_program,
    flat_of,
    is_direct,
    reduce_published,
    reduce_shared,
)
from syncvar.shm.channel_table import CHECK, DONE, MASK, PHASE, SPREAD, TARGET, WIDE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.persistent_builder import CallLabel, PersistentCallBuilder
    from syncvar.shm.group_channel import GroupChannel

    # Left operand, right operand, room; None stands for the array of the result.
    Levels = list[tuple[Any, Any, Any]]


def prepare_reduction(  # noqa: PLR0913, PLR0917  (one spec object will replace them)
    communicator: Communicator,
    reduction: Reduction,
    shape: tuple[int, ...],
    digest: int,
    label: str,
    apply: np.ufunc | None = None,
    ends: ResultPlacement = EVERYWHERE,
    neutral: Any = None,
    leaves: PyTree | None = None,
) -> PreparedCall | None:
    """Build the persistent call of a reduction, or return None if there is none.

    Args:
        communicator: The group.
        reduction: The reduction.
        shape: Shape of the arrays.
        digest: Fingerprint of the call, as on the slow path.
        label: Text of the call.
        apply: `out`, which must then be given, becomes apply(out, result).
        ends: Which ranks get which result; a rank without a result gets an empty array.
        neutral: Result of a rank that combines nothing, if all ranks get a result.
        leaves: Example arrays of a call with several short arrays.

    Returns:
        A function of (x, out, label, timeout). x is a native array of this dtype and shape, or a
        `PyTree` of such arrays; `out` is None or anything. Its `label` is (text, fingerprint) of
        this call, None for those given here. `timeout` is in seconds, None for the job's default;
        `is_seconds` must hold for it. The function returns the result, or None if it did nothing:
        take the slow path then.
    """
    nbytes = prod(shape) * reduction.accumulate.itemsize
    is_small = is_direct(nbytes, communicator.size)
    ground = builder_for(communicator, label, digest, nbytes, "shm small" if is_small else "shm")
    if ground is None:
        return None
    output_spec = OutputSpec(
        ends, ends.terms(ground.channel.rank, ground.channel.size), None, neutral
    )
    if ends.collective == "reduce" and not output_spec.terms:
        output_spec = output_spec._replace(nothing=NOTHING)
    if is_small:
        return _small(ground, reduction, shape, apply, output_spec, leaves)
    return _long(ground, reduction, shape, apply, output_spec)


def prepare_barrier(communicator: Communicator, digest: int, label: str) -> PreparedCall | None:
    """Build the persistent call of a barrier, a reduction of empty arrays, or return None."""
    ground = builder_for(communicator, label, digest, 0, "shm")
    if ground is None:
        return None
    output_spec = OutputSpec(EVERYWHERE, range(communicator.size), NOTHING)
    return _small(ground, reduction("sum", np.dtype(np.uint8)), (0,), None, output_spec, None)


class OutputSpec(NamedTuple):
    """Result of a reduction on this rank."""

    ends: ResultPlacement  # which ranks get which result
    terms: range  # ranks whose inputs are combined here
    # Result of a rank that gets none; None if this rank gets a result
    nothing: NDArray[Any] | None = None
    neutral: Any = None  # elements of the result if there are no terms

    def filled(self, output: Any) -> Any:
        """Return the result, neutral if nothing has been combined."""
        if not self.terms and self.nothing is None:
            output[...] = self.neutral
        return output


def _small(  # noqa: C901, PLR0914, PLR0915  (locals of closures: a call takes a microsecond)
    ground: PersistentCallBuilder,
    reduction: Reduction,
    shape: tuple[int, ...],
    apply: np.ufunc | None,
    output_spec: OutputSpec,
    leaves: PyTree | None,
) -> PreparedCall:
    """Build the persistent call of a vector that goes through slots."""
    ends, terms, nothing, _ = output_spec
    _, channel, engine, call_info = ground
    words, entry, others, wait = channel.words, channel.entry, channel.others, channel.wait
    size, rank = channel.size, channel.rank
    ufunc, kind, empty, ndarray = reduction.ufunc, reduction.result, np.empty, np.ndarray
    accumulate = reduction.accumulate
    digest, add, clock = call_info.fingerprint, engine.recorder.add, monotonic_ns
    count = prod(shape)
    slots = [
        [channel.small(other, side, count, accumulate).reshape(shape) for side in (0, 1)]
        for other in range(size)
    ]
    mine = slots[rank]
    checks = [tuple(other + CHECK + side for other in others) for side in (0, 1)]
    # Words with the locations of wide vectors.
    puts = [tuple(other + TARGET + side for other in (entry, *others)) for side in (0, 1)]
    quietly, copy, divide = quiet_caller(), np.copyto, np.divide
    # Integers have no floating-point errors to silence.
    combine: Callable[..., Any] = ufunc if accumulate.kind in "biu" else partial(quietly, ufunc)
    is_cast = kind != accumulate
    divisor = np.asarray(ends.divisor(rank, size), accumulate) if reduction.is_mean else None
    straight = not is_cast and not reduction.is_mean and apply is None
    whole = count * accumulate.itemsize
    is_wide = whole > WIDE_BYTES
    levels = [
        _levels(channel, side, [slots[one][side] for one in terms], shape, accumulate)
        for side in (0, 1)
    ]
    pairs = [steps[0][:2] if straight and len(terms) == 2 else None for steps in levels]

    def combined(steps: Levels, out: Any) -> NDArray[Any]:
        if not steps:
            if nothing is not None:
                return nothing
            return output_spec.filled(empty(shape, kind) if out is None else out)  # type: ignore[no-any-return]
        total: NDArray[Any] = (
            (empty(shape, kind) if out is None else out) if straight else empty(shape, accumulate)
        )
        for left, right, room in steps:
            if right is None:
                copy(total, left)
                break
            combine(total if left is None else left, right, out=total if room is None else room)
        if straight:
            return total
        if divisor is not None:
            quietly(divide, total, divisor, out=total)
        if apply is not None:
            quietly(apply, out, total, out=out, casting="same_kind")
            return out  # type: ignore[no-any-return]
        if out is None:
            return quietly(total.astype, kind) if is_cast else total
        quietly(copy, out, total, "unsafe")  # rounds half types, once
        return out  # type: ignore[no-any-return]

    def rest(check: int, target: int, out: Any) -> Generator[int, None, NDArray[Any]]:
        yield from agreed(channel, check, target)
        return combined(_one_by_one(terms_now(), shape, accumulate), out)

    def terms_now() -> list[NDArray[Any]]:
        now = channel.smalls_now(count, accumulate)[terms.start : terms.stop]
        return [one.reshape(shape) for one in now]

    def finished(side: int, check: int, target: int, out: Any) -> NDArray[Any] | None:
        """Return the result of a published call, or None if the others are late or differ."""
        for other in others:
            if words[other] < target and not wait(others, target):
                return None
        # Ranks without abandoned calls have their check on the same side.
        for place in checks[side]:
            if words[place] != check:
                return None
        if is_wide and max(map(words.__getitem__, puts[side])):
            return combined(_one_by_one(terms_now(), shape, accumulate), out)
        pair = pairs[side]
        if pair is None:
            return combined(levels[side], out)
        return combine(*pair, out=empty(shape, kind) if out is None else out)  # type: ignore[no-any-return]

    def arrays_of(x: NDArray[Any], out: Any) -> tuple[NDArray[Any], Any] | None:
        if nothing is not None:
            return x, None
        if out is not None and (  # noqa: PLR0916  (asked in every call)
            type(out) is not ndarray
            or out.shape != shape
            or (out.dtype is not kind and out.dtype != kind)
            or not out.flags.writeable
        ):
            return None
        return x, out

    def attempt(
        number: int, check: int, arrays: tuple[NDArray[Any], Any]
    ) -> tuple[Any, Any, int, None]:
        x, out = arrays
        side = channel.side = channel.side ^ 1
        if is_cast:
            quietly(copy, mine[side], x)
        else:
            mine[side][...] = x
        words[entry + CHECK + side] = check
        if is_wide:
            words[entry + TARGET + side] = 0  # the vector is in the fixed slot
        target = channel.last = (number << 1) + 2
        if channel.phase or words[entry + DONE]:
            words[entry + DONE] = channel.phase
            channel.phase = words[entry + PHASE] = 0
        words[entry] = target | side
        result = finished(side, check, target, out)
        if result is None:
            return (None, rest(check, target, out), target, None)
        return (result, None, 0, None)

    call = ground.build_python(arrays_of, attempt)
    if leaves is not None:
        call = _concatenate_leaves(call, leaves)

    def later(
        number: int,
        begin: int,
        _x: Any,
        _out: Any,
        output: Any,
        label: CallLabel | None,
        _run: None,
        _native: Any,
    ) -> tuple[bool, Any]:
        """Continue a call that C has published; return (is over, result or steps)."""
        side, target = channel.side, channel.last
        check = words[entry + CHECK + side]
        result = finished(side, check, target, output if leaves is None else None)
        if result is None:
            return False, left(check, target, output)
        if leaves is not None:
            store_parts(flat_of(output), result, None)
        info = call_info if label is None else ground.with_label(label).info
        add((info, number, begin, clock(), get_ident()))
        return True, result if leaves is None else output

    def left(check: int, target: int, output: Any) -> Generator[int, None, Any]:
        """Continue as `rest`; return the result, a tuple for several arrays."""
        result = yield from rest(check, target, output if leaves is None else None)
        if leaves is None:
            return result
        store_parts(flat_of(output), result, None)
        return output

    def adopted(number: int, output: Any) -> Generator[int, None, Any]:
        """Continue an asynchronous call, and return the caller's result."""
        result = yield from left((digest + number * SPREAD) & MASK, (number << 1) + 2, output)
        return result if leaves is None else leaves.with_arrays(result)

    # C takes equal dtypes of input and result only.
    if reduction.source != kind.name or (not terms and (nothing is None or is_cast)):
        return call
    native = ground.build_native(
        call,
        later,
        input_form=(kind, shape),
        output_form=(kind, shape) if nothing is None else (nothing.dtype, nothing.shape),
        puts=((0, 0, whole, rank),),
        terms=tuple((0, 0, whole, other) for other in terms),
        fold=ufunc if terms else None,
        divisor=divisor if terms else None,
        apply=apply,
        ring=channel.ring_of(whole),
        nothing=nothing,
        half=HALVES[kind.name] if is_cast else 0,
        steps=None if nothing is not None or ends != EVERYWHERE else adopted,
        leaves=leaves,
    )
    return native or call


def _levels(
    channel: GroupChannel,
    side: int,
    terms: list[NDArray[Any]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Levels:
    """Return the steps (left, right, room) of the tree over the slots; None stands for the result.

    If the slots are evenly spaced and the ranks a power of two, a step is a whole level of the
    tree. One term is (term, None, None).
    """
    size = channel.size
    # One element is combined as in C, so that the same NaN is kept.
    if len(terms) < size or size & (size - 1) or prod(shape) == 1:
        return _one_by_one(terms, shape, dtype)
    try:
        rows = channel.smalls(side, shape, dtype)
    except ValueError:
        return _one_by_one(terms, shape, dtype)
    steps: list[tuple[Any, Any, Any]] = []
    while len(rows) > 2:
        room = np.empty((len(rows) // 2, *shape), dtype)
        steps.append((rows[0::2], rows[1::2], room))
        rows = room
    # The ellipsis makes views: rows[0] of a flat array would be a number.
    return [*steps, (rows[0, ...], rows[1, ...], None)]


def _one_by_one(terms: list[NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Levels:
    if len(terms) == 1:
        return [(terms[0], None, None)]
    steps: list[tuple[Any, Any, Any]] = []
    held: list[Any] = list(terms)
    order = list(tree_order(0, len(terms)))
    # NumPy rounds an in-place product of one complex number differently.
    is_one_complex = prod(shape) == 1 and dtype.kind == "c"
    for left, right in order:
        if left == 0:
            room = None
        else:
            room = held[left] if held[left] is not terms[left] else np.empty(shape, dtype)
        if is_one_complex and (left, right) != order[-1]:
            room = np.empty(shape, dtype)
        steps.append((held[left], held[right], room))
        held[left] = room
    return steps


def _concatenate_leaves(flat: PreparedCall, leaves: PyTree) -> PreparedCall:
    """Return a call of several small arrays, given the call of their concatenation."""

    def call(x: Any, out: Any, label: CallLabel | None = None, timeout: float | None = None) -> Any:
        if out is not None or not isinstance(x, PyTree):
            return None
        output = flat(np.concatenate(flat_of(x.arrays)), None, label, timeout)
        if output is None:
            return None
        parts = [np.empty(array.shape, output.dtype) for array in x.arrays]
        store_parts(flat_of(parts), output, None)
        return leaves.with_arrays(parts)

    return call


def _long(  # noqa: C901, PLR0914  (locals of closures)
    ground: PersistentCallBuilder,
    reduction: Reduction,
    shape: tuple[int, ...],
    apply: np.ufunc | None,
    output_spec: OutputSpec,
) -> PreparedCall:
    _, channel, _, call_info = ground
    ends, terms, nothing, _ = output_spec
    kind, accumulate, ufunc = reduction.result, reduction.accumulate, reduction.ufunc
    digest = call_info.fingerprint
    divisor = ends.divisor(channel.rank, channel.size) if reduction.is_mean else 0
    nowhere: NDArray[Any] = np.empty(0, kind)
    is_flat = len(shape) == 1

    def vector_of(flat: NDArray[Any], flat_out: NDArray[Any]) -> ReduceBuffers:
        targets = [flat_out if nothing is None else nowhere]
        return ReduceBuffers.of([flat], targets, ufunc, accumulate, divisor, apply, ends)

    def arrays_of(x: NDArray[Any], out: Any) -> tuple[ReduceBuffers, NDArray[Any]] | None:
        if not has_segments(channel):
            return None
        if nothing is not None:
            return vector_of(np.ascontiguousarray(x).reshape(-1), nowhere), nothing
        if out is None:
            output = np.empty(shape, kind)
        elif (
            type(out) is not np.ndarray
            or out.shape != shape
            or out.dtype != kind
            or not out.flags.writeable
            or not out.flags.c_contiguous
        ):
            return None
        else:
            output = out
        flat_out = output if is_flat else output.reshape(-1)
        if x is output:
            flat = flat_out
        else:
            flat = x if is_flat and x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1)
            if out is not None and np.may_share_memory(flat, flat_out):
                flat = flat.copy()
        return vector_of(flat, flat_out), output

    call = reducing(ground, reduce_shared, arrays_of, output_spec)

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
        check = ((digest if label is None else label[1]) + number * SPREAD) & MASK
        vector = vector_of(x.reshape(-1), output.reshape(-1))
        return False, then(reduce_published(channel, check, vector, native), output, output_spec)

    like = as_strided(np.empty(1, kind), (prod(shape),), (0,))
    vector = vector_of(like, like)
    if (
        reduction.source != kind.name
        or (nothing is None and not terms)
        or not channel.are_native
        or not vector.suits_native
    ):
        return call
    output = (kind, shape) if nothing is None else (nothing.dtype, nothing.shape)
    native = ground.build_native(
        call,
        later,
        input_form=(kind, shape),
        output_form=output,
        gil_monitor=gil_monitor,
        everyone=ends == EVERYWHERE,
        nothing=nothing,
    )
    if native is None:
        return call
    add_native_program(channel, vector, BufferPlacement(), native)
    return native


def reducing(
    ground: PersistentCallBuilder,
    reduce: Callable[[GroupChannel, tuple[int, int], Any], Iterator[int]],
    arrays_of: Callable[[Any, Any], tuple[Any, Any] | None],
    output_spec: OutputSpec,
) -> PreparedCall:
    """Build a reduction in Python; `arrays_of` maps (x, out) to (input of `reduce`, result)."""
    channel = ground.channel

    def attempt(number: int, check: int, arrays: tuple[Any, Any]) -> tuple[Any, Any, int, None]:
        vector, output = arrays
        steps = reduce(channel, (number, check), vector)
        need = run_while_spinning(channel, steps, number)
        if need is None:
            return (output_spec.filled(output), None, 0, None)
        return (None, then(steps, output, output_spec), need, None)

    return ground.build_python(arrays_of, attempt, notes=True)


def has_segments(channel: GroupChannel) -> bool:
    """Return whether there is memory for cells; the slow path reports why not."""
    try:
        channel.reserve_segments()
    except SyncvarError:
        return False
    return True


def then(steps: Any, output: Any, output_spec: OutputSpec) -> Generator[int, None, Any]:
    """Run the remaining steps of a call, and return its result."""
    yield from steps
    return output_spec.filled(output)
