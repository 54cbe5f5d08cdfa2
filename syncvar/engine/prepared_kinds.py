"""Prepared reductions of short arrays of several kinds, which lie side by side in the slots. See `preparation`."""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.arena.channels import MASK, SPREAD
from syncvar.engine.preparation import Kind, preparation_of
from syncvar.engine.prepared_reductions import Fate, reducing
from syncvar.execution.arithmetic import HALVES
from syncvar.execution.lower_reduce import EVERYWHERE
from syncvar.execution.reductions import Vector, combine_small, flat_of, places_of, reduce_small
from syncvar.execution.running import agreed
from syncvar.wire.structures import Leaves

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator, PreparedCall
    from syncvar.engine.preparation import Said
    from syncvar.ops import Reduction

__all__ = ["prepare_kinds"]

_KINDS_MAX = 8  # as in calls.h


def prepare_kinds(
    communicator: Communicator, kinds: Mapping[Reduction, Sequence[int]], sizes: Sequence[int], leaves: Leaves, digest: int, what: str
) -> PreparedCall | None:
    """Return the prepared call of short arrays of several kinds, which are `are_side_by_side`, or None where there is none.

    Args:
        communicator: The group.
        kinds: The places of the arrays that are reduced in each way.
        sizes: Bytes of each kind in a slot.
        leaves: Such arrays.
        digest: Fingerprint of the call, as the long way makes it.
        what: The call in words.
    """
    rank, size = communicator.member_rank, communicator.size
    starts, nbytes = places_of(sizes)
    ground = preparation_of(communicator, what, digest, nbytes, "arena small")
    if ground is None:
        return None
    channel, engine = ground.channel, ground.engine
    results = {place: how.result for how, places in kinds.items() for place in places}

    def vectors_of(arrays: Sequence[NDArray[Any]], made: Sequence[NDArray[Any]]) -> list[Vector]:
        return [
            Vector.of(flat_of([arrays[place] for place in places]), flat_of([made[place] for place in places]), how.ufunc, how.accumulate, size if how.is_mean else 0)
            for how, places in kinds.items()
        ]

    def arrays_of(x: Any, out: Any) -> tuple[list[Vector], Any] | None:
        if out is not None or not isinstance(x, Leaves):
            return None
        made = [np.empty(array.shape, results[place]) for place, array in enumerate(x.arrays)]
        return vectors_of(x.arrays, made), x.with_arrays(made)

    def left(check: int, target: int, made: Any) -> Generator[int, None, Any]:
        """Go on with a call that the C runner has published; returns the results as a tuple."""
        yield from agreed(channel, check, target)
        yield from combine_small(channel, vectors_of(made, made), starts, nbytes)
        return made

    def later(number: int, begin: int, _x: Any, _out: Any, made: Any, said: Said | None, _run: None, native: Any) -> tuple[bool, Any]:
        """Go on with what the C runner has published, without delay: who waits for this rank is late next."""
        check, target = ((digest if said is None else said[1]) + number * SPREAD) & MASK, channel.last
        if not channel.wait(channel.others, target) or not native.end(check, made):
            return False, left(check, target, made)
        engine.recorder.add((ground.saying(said).told, number, begin, monotonic_ns(), get_ident()))
        return True, made

    def adopted(number: int, made: Any) -> Generator[int, None, Any]:
        return leaves.with_arrays((yield from left((digest + number * SPREAD) & MASK, (number << 1) + 2, made)))

    call = reducing(ground, reduce_small, arrays_of, Fate(EVERYWHERE, range(size)))
    if len(kinds) > _KINDS_MAX or any(how.source != how.result.name for how in kinds):
        return call
    in_slot = (np.dtype(np.uint8), (nbytes,))
    native = ground.natively(
        call, later, brought=in_slot, made=in_slot, puts=((0, 0, nbytes, rank),), terms=tuple((0, 0, nbytes, other) for other in range(size)),
        steps=adopted, leaves=leaves,
        kinds=[Kind(_arithmetic(how, size), how.result, start, places) for (how, places), start in zip(kinds.items(), starts, strict=True)],
    )  # fmt: skip
    return native or call


def _arithmetic(how: Reduction, size: int) -> tuple[Any, ...]:
    """Return what becomes of terms in the slots, where halves are float32."""
    division = (np.divide, np.asarray(size, how.accumulate).tobytes()) if how.is_mean else (None, b"")
    half = HALVES[how.result.name] if how.result != how.accumulate else 0
    return how.accumulate.itemsize, how.accumulate, half, how.ufunc, *division, None
