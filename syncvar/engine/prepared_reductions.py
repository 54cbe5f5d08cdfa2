"""The short way of a blocking all-reduce in shared memory: everything that repeats is prepared once.

A small all-reduce of two ranks takes about two microseconds, so the path of a call has no object to make, no name to
look up and no lock to wait for. What is unusual (a known refusal, queued calls, an odd `out`) is left to the long way, and so
is a wait that takes long: the engine goes on from where the prepared call stands, and looks at the deadline.
"""

from __future__ import annotations

from functools import partial
from math import prod
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from syncvar.arena.channels import CHECK, DONE, MASK, PHASE, SPREAD, TARGET, WIDE_BYTES
from syncvar.engine.call_sites import site_of
from syncvar.engine.recorder import Told
from syncvar.engine.shared_operation import SharedOperation
from syncvar.engine.timeouts import checked_timeout
from syncvar.engine.work import Work
from syncvar.execution.gil import crowd
from syncvar.execution.kernels import quiet, quiet_caller, reduction
from syncvar.execution.lower_reduce import Places
from syncvar.execution.phases import DISAGREE, agreed
from syncvar.execution.reductions import Vector, is_direct, reduce_published, reduce_shared, teach
from syncvar.plans import tree_order

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.engine.engine import Engine
    from syncvar.engine.group import Communicator
    from syncvar.execution.kernels import Reduction

    Said = tuple[str, int]  # a call in words, and its fingerprint
    PreparedCall = Callable[..., NDArray[Any] | None]
    Attempt = Callable[[int, int, Any], tuple[Any, Any, int, Any]]
    Levels = list[tuple[Any, Any, Any]]  # left operand, right operand, room; None is the array of the result

__all__ = ["Preparation", "PreparedCall", "as_far_as_others_come", "preparation_of", "prepare_barrier", "prepare_reduction"]


def prepare_reduction(
    communicator: Communicator,
    how: Reduction,
    shape: tuple[int, ...],
    digest: int,
    what: str,
    apply: np.ufunc | None = None,
) -> PreparedCall | None:
    """Return the prepared call of an all-reduce, or None where there is none.

    Args:
        communicator: The group.
        how: The reduction.
        shape: Of the arrays.
        digest: Fingerprint of the call, as the long way makes it.
        what: The call in words.
        apply: `out`, which must then be given, becomes apply(out, result).

    Returns:
        A function of (x, out): x a native array of this dtype and shape, out None or anything. It returns the result,
        or None when it has done nothing and the long way has to be taken. A third argument, (words, fingerprint), is
        for a call that is not the same each time: it has these instead of `what` and `digest`. A fourth one is the
        timeout in seconds, None for the job's default; `is_seconds` must hold of it.
    """
    nbytes = prod(shape) * how.accumulate.itemsize
    make, way = (_small, "arena small") if is_direct(nbytes, communicator.size) else (_long, "arena")
    ground = preparation_of(communicator, what, digest, nbytes, way)
    return None if ground is None else make(ground, how, shape, apply)


def prepare_barrier(communicator: Communicator, digest: int, what: str) -> PreparedCall | None:
    """Return the prepared call of a barrier, or None where there is none: it reduces arrays without elements.

    Args:
        communicator: The group.
        digest: Fingerprint of the call, as the long way makes it.
        what: The call in words.
    """
    ground = preparation_of(communicator, what, digest, 0, "arena")
    return None if ground is None else _small(ground, reduction("sum", np.dtype(np.uint8)), (0,), None)


def preparation_of(communicator: Communicator, what: str, digest: int, nbytes: int, way: str) -> Preparation | None:
    """Return what a prepared call stands on; None where there is no channel to others."""
    channel, engine = communicator.channel, communicator.engine
    if channel is None or engine is None or not channel.is_open or channel.size == 1:
        return None
    told = Told(what, communicator.identity, communicator.members, digest, nbytes, way)
    return Preparation(communicator, channel, engine, told)


class Preparation(NamedTuple):
    """What a prepared call stands on, and how the engine takes over from it."""

    communicator: Communicator
    channel: Channel
    engine: Engine
    told: Told

    def saying(self, said: Said | None) -> Preparation:
        """Return the same for a call with words and a fingerprint of its own."""
        return self if said is None else self._replace(told=self.told._replace(what=said[0], fingerprint=said[1]))

    def _operation(self, number: int, begin: int, steps: Any, need: int) -> SharedOperation:
        communicator, told = self.communicator, self.told
        entry = self.engine.recorder.begin(told, number, begin)
        operation = SharedOperation(
            self.channel, communicator.identity, communicator.members, number, told.fingerprint, told.what, steps, need
        )
        operation.entry = entry
        return operation

    def go_on(
        self, number: int, begin: int, steps: Any, need: int, held: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Let the engine wait: it hears the launcher, advances other calls, and knows deadlines."""
        operation = self._operation(number, begin, steps, need)
        operation.held = held
        return self.engine.take_over(operation, None if timeout is None else checked_timeout(timeout))

    def plainly(self, arrays_of: Callable[[Any, Any], Any], attempt: Attempt, *, notes: bool = False) -> PreparedCall:
        """Return what makes such calls in Python: it guards, numbers, records and hands over, whatever the call does.

        Args:
            arrays_of: Of (x, out): what a call works on, or None where the general way has to be taken; it tells nobody anything.
            attempt: Of (number, check, what it works on): publishes the call, and goes on as long as the others come soon. It returns
                (result, None, 0, None); or (_, steps, need, held) where the engine has to go on: what is left of the call, whose return
                value is its result, what the others have to reach first, and what they may read as long as the call is under way.
            notes: How long a call took tells whether other threads hold the interpreter's lock.
        """
        communicator, channel, engine, told = self
        queue, busy, digest, add, clock = channel.queue, communicator.busy, told.fingerprint, engine.recorder.add, monotonic_ns

        def call(x: NDArray[Any], out: Any, said: Said | None = None, timeout: float | None = None) -> Any:
            if queue or busy.locked() or not (engine.is_quiet and channel.is_settled):
                return None
            arrays = arrays_of(x, out)
            if arrays is None:
                return None
            with busy:
                if queue:
                    return None
                number = communicator.next_call
                communicator.next_call = number + 1
                begin = clock()
                try:
                    made, steps, need, held = attempt(number, ((digest if said is None else said[1]) + number * SPREAD) & MASK, arrays)
                    if steps is None:
                        add((told if said is None else self.saying(said).told, number, begin, clock(), get_ident()))
                        return made
                except BaseException as error:
                    self.saying(said).interrupt(number, begin, error)
                    raise
                made = self.saying(said).go_on(number, begin, steps, need, held, timeout=timeout)
                if notes:
                    crowd.note((clock() - begin) / 1e9, told.nbytes)
                return made

        return call

    def natively(
        self, plain: PreparedCall, later: Any, *, divisor: NDArray[Any] | None = None, fold: Any = None, apply: Any = None, detail: int = 0,
        tells: bool = False, steps: Callable[[int, Any], Any] | None = None, **copies: Any,
    ) -> PreparedCall | None:
        """Return what runs a call through small slots in C, or None where Python has to.

        Args:
            plain: Runs it in Python; takes every call that is unusual, before anything has been changed.
            later: Of (number, begin, x, out, where the result goes, said, run, the C runner): goes on with a call that has been published, and
                whose run, if it is not None, has begun; returns (True, result), or (False, steps) where the engine has to go on.
            divisor: What a mean is divided by, as an array of no dimensions.
            fold: The ufunc by which terms are combined; None where nothing is.
            apply: The result becomes apply(out, combination).
            detail: What may differ between ranks, see `Layout` of `moves`.
            tells: The call's own check is published beside the one with the detail.
            steps: Of (number, where the result goes): what is left of a call that has been published; None where calls cannot be begun and
                waited for later.
            copies: The forms of what is brought and made, and what goes where: see `native.c`.
        """  # fmt: skip

        def hand_over(number: int, begin: int, steps: Any, said: Said | None, timeout: float | None) -> Any:
            made = self.saying(said).go_on(number, begin, steps, self.channel.last, timeout=timeout)
            if copies.get("crowd") is not None:
                crowd.note((monotonic_ns() - begin) / 1e9, self.told.nbytes)
            return made

        def interrupt(number: int, begin: int, error: BaseException, said: Said | None) -> None:
            self.saying(said).interrupt(number, begin, error)

        def adopt(number: int, begin: int, made: Any, timeout: float | None, site: Any, instruction: int | None) -> SharedOperation:
            """Let the engine go on with a call that is first in the channel's queue, and stays it."""
            assert steps is not None
            operation = self._operation(number, begin, steps(number, made), self.channel.last)
            operation.site = site if instruction is None else site_of(site, instruction)
            self.channel.queue.popleft()
            self.engine.start(operation, None if timeout is None else checked_timeout(timeout), begin / 1e9)
            return operation

        made: PreparedCall | None = self.channel.slot_call(
            engine=self.engine, communicator=self.communicator, busy=self.communicator.busy, add=self.engine.recorder.add, told=self.told,
            digest=self.told.fingerprint, detail=detail, tells=tells, fold=fold,
            divide=None if divisor is None else np.divide, divisor=b"" if divisor is None else divisor.tobytes(), apply=apply,
            make=np.empty, plain=plain, later=later, hand_over=hand_over, interrupt=interrupt, saying=lambda said: self.saying(said).told,
            begun=self.engine.begun, work=Work, adopt=None if steps is None else adopt,
            **{"crowd": None, "puts": (), "takes": (), "terms": (), "ring": -1, **copies},
        )  # fmt: skip
        return made

    def interrupt(self, number: int, begin: int, error: BaseException) -> None:
        """Break the generation: an exception has left a call that others take part in."""
        operation = self._operation(number, begin, iter(()), 0)
        self.channel.queue.clear()
        self.engine.interrupted(operation, error)


def _small(ground: Preparation, how: Reduction, shape: tuple[int, ...], apply: np.ufunc | None) -> PreparedCall:
    _, channel, engine, told = ground
    words, entry, others, wait = channel.words, channel.entry, channel.others, channel.wait
    size, rank = channel.size, channel.rank
    ufunc, kind, empty, ndarray = how.ufunc, how.result, np.empty, np.ndarray
    accumulate = how.accumulate
    digest, add, clock = told.fingerprint, engine.recorder.add, monotonic_ns
    count = prod(shape)
    slots = [
        [channel.small(other, side, count, accumulate).reshape(shape) for side in (0, 1)] for other in range(size)
    ]
    mine = slots[rank]
    checks = [tuple(other + CHECK + side for other in others) for side in (0, 1)]
    puts = [tuple(other + TARGET + side for other in (entry, *others)) for side in (0, 1)]  # where a rank has put a wide vector
    quietly, copy, divide = quiet_caller(), np.copyto, np.divide
    combine: Callable[..., Any] = ufunc if accumulate.kind in "biu" else partial(quietly, ufunc)  # integers have no states
    is_cast = kind != accumulate
    divisor = np.asarray(size, accumulate) if how.is_mean else None
    straight = not is_cast and not how.is_mean and apply is None
    whole = count * accumulate.itemsize
    is_wide = whole > WIDE_BYTES
    levels = [_levels(channel, side, [one[side] for one in slots], shape, accumulate) for side in (0, 1)]
    pairs = [steps[0][:2] if straight and len(steps) == 1 else None for steps in levels]  # of two ranks

    def combined(steps: Levels, out: Any) -> NDArray[Any]:
        total: NDArray[Any] = (empty(shape, kind) if out is None else out) if straight else empty(shape, accumulate)
        for left, right, room in steps:
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
        quietly(copy, out, total, "unsafe")  # half types are rounded here, once
        return out  # type: ignore[no-any-return]

    def rest(check: int, target: int, out: Any) -> Generator[int, None, NDArray[Any]]:
        yield from agreed(channel, check, target)
        return combined(_one_by_one(terms_now(), shape, accumulate), out)

    def terms_now() -> list[NDArray[Any]]:
        return [one.reshape(shape) for one in channel.smalls_now(count, accumulate)]

    def finished(side: int, check: int, target: int, out: Any) -> NDArray[Any] | None:
        """Return the result of a call that has been published, or None where the others do not come soon, or differ."""
        for other in others:
            if words[other] < target and not wait(others, target):
                return None
        # A rank that has not been given up a call has its check on the same side.
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
        if out is not None and (
            type(out) is not ndarray
            or out.shape != shape
            or (out.dtype is not kind and out.dtype != kind)
            or not out.flags.writeable
        ):
            return None
        return x, out

    def attempt(number: int, check: int, arrays: tuple[NDArray[Any], Any]) -> tuple[Any, Any, int, None]:
        x, out = arrays
        side = channel.side = channel.side ^ 1
        if is_cast:
            quietly(copy, mine[side], x)
        else:
            mine[side][...] = x
        words[entry + CHECK + side] = check
        if is_wide:
            words[entry + TARGET + side] = 0  # it is where slots always are
        target = channel.last = (number << 1) + 2
        if channel.phase or words[entry + DONE]:
            words[entry + DONE] = channel.phase
            channel.phase = words[entry + PHASE] = 0
        words[entry] = target | side
        result = finished(side, check, target, out)
        return (None, rest(check, target, out), target, None) if result is None else (result, None, 0, None)

    call = ground.plainly(arrays_of, attempt)

    def later(number: int, begin: int, _x: Any, _out: Any, made: Any, said: Said | None, _run: None, _native: Any) -> tuple[bool, Any]:
        """Go on with what the C runner has published: the result, or (False, steps) where the engine has to go on."""
        side, target = channel.side, channel.last
        check = words[entry + CHECK + side]
        result = finished(side, check, target, made)
        if result is None:
            return False, rest(check, target, made)
        add((told if said is None else ground.saying(said).told, number, begin, clock(), get_ident()))
        return True, result

    if is_cast:
        return call
    native = ground.natively(
        call, later, brought=(kind, shape), made=(kind, shape), puts=((0, 0, whole, rank),), takes=(),
        terms=tuple((0, 0, whole, other) for other in range(size)), fold=ufunc, divisor=divisor, apply=apply, ring=channel.ring_of(whole),
        steps=lambda number, made: rest((digest + number * SPREAD) & MASK, (number << 1) + 2, made),
    )  # fmt: skip
    return native or call


def _levels(
    channel: Channel, side: int, terms: list[NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Levels:
    """Return the steps of the tree T(0, n): (left, right, room), None for the array of the result.

    Where the slots are evenly spaced and the ranks a power of two, a whole level of the tree is one step.
    """
    size = channel.size
    if size & (size - 1):
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
    return [*steps, (rows[0, ...], rows[1, ...], None)]  # with an ellipsis, because rows[0] of numbers is no view


def _one_by_one(terms: list[NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Levels:
    steps: list[tuple[Any, Any, Any]] = []
    held: list[Any] = list(terms)
    for left, right in tree_order(0, len(terms)):
        room = None if left == 0 else held[left] if held[left] is not terms[left] else np.empty(shape, dtype)
        steps.append((held[left], held[right], room))
        held[left] = room
    return steps


def _long(ground: Preparation, how: Reduction, shape: tuple[int, ...], apply: np.ufunc | None) -> PreparedCall:
    _, channel, _, told = ground
    kind, accumulate, ufunc = how.result, how.accumulate, how.ufunc
    digest = told.fingerprint
    divisor = channel.size if how.is_mean else 0
    is_flat = len(shape) == 1

    def vector_of(flat: NDArray[Any], flat_out: NDArray[Any]) -> Vector:
        return Vector([flat], [flat_out], ufunc, accumulate, divisor, apply)

    def arrays_of(x: NDArray[Any], out: Any) -> tuple[Vector, NDArray[Any]] | None:
        if out is None:
            made = np.empty(shape, kind)
        elif (
            type(out) is not np.ndarray
            or out.shape != shape
            or out.dtype != kind
            or not out.flags.writeable
            or not out.flags.c_contiguous
        ):
            return None
        else:
            made = out
        flat_out = made if is_flat else made.reshape(-1)
        if x is made:
            flat = flat_out
        else:
            flat = x if is_flat and x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1)
            if out is not None and np.may_share_memory(flat, flat_out):
                flat = flat.copy()
        return vector_of(flat, flat_out), made

    def attempt(number: int, check: int, arrays: tuple[Vector, NDArray[Any]]) -> tuple[Any, Any, int, None]:
        vector, made = arrays
        steps = reduce_shared(channel, (number, check), vector)
        need = as_far_as_others_come(channel, steps, number)
        return (made, None, 0, None) if need is None else (None, _then(steps, made), need, None)

    call = ground.plainly(arrays_of, attempt, notes=True)

    def later(number: int, _begin: int, x: Any, _out: Any, made: Any, said: Said | None, run: Any, native: Any) -> tuple[bool, Any]:
        """Go on with what the C runner has published, or begun."""
        if run is not None:
            return False, _then(run, made)
        vector = vector_of(x.reshape(-1), made.reshape(-1))
        check = ((digest if said is None else said[1]) + number * SPREAD) & MASK
        return False, _then(reduce_published(channel, check, vector, native), made)

    like = as_strided(np.empty(1, kind), (prod(shape),), (0,))
    vector = vector_of(like, like)
    if how.source != kind.name or not channel.are_native or not vector.suits_native(vector.arithmetic):
        return call
    native = ground.natively(call, later, brought=(kind, shape), made=(kind, shape), crowd=crowd)
    if native is None:
        return call
    teach(channel, vector, Places(), native)
    return native


def as_far_as_others_come(channel: Channel, steps: Iterable[int], number: int) -> int | None:
    """Go on with a call as long as the others come soon; returns what they have to reach then, or None at its end."""
    wait, others, limit = channel.hold if crowd.holds() else channel.wait, channel.others, (number << 1) + 4
    with quiet():  # what overflows is infinite, on all ranks
        for need in steps:
            if need == DISAGREE or not wait(others, need, limit):
                return need
    return None


def _then(steps: Any, made: NDArray[Any]) -> Generator[int, None, NDArray[Any]]:
    yield from steps
    return made
