"""Flat buckets: small variables that are often written together travel as one array.

A grouped write is one all-reduce of one flat array. After the first one, each replica keeps the
copies of these variables one after another in one piece of memory, which the call changes in place.
If a view of a copy is alive, the result is copied to each variable instead. From time to time the
copies then move into a new flat array.
"""

from __future__ import annotations

import threading
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import group_of, which
from syncvar.collectives.all_reduce import reduce_request
from syncvar.collectives.reduce_args import ReduceOptions, reduction_of
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.runtime.persistent.persistent_reduce import prepare_reduction
from syncvar.variables.policy import CallContext
from syncvar.variables.storage import refuse_overlap
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar._native import VariableCounters
    from syncvar.variables.storage import Storage
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import VariableState

SMALL_BYTES = 64 << 10  # larger variables are reduced in place, each by itself
_TOGETHER_BYTES = 16 << 20
_REPLICA = CallContext.REPLICA


class PyFlatBucket:
    """Checks and loads the variables of a group; `_native/variable_access.c` does the same in C."""

    def __init__(
        self,
        variables: Sequence[weakref.ref[Any]],
        storages: Sequence[Storage],
        tallies: Sequence[VariableCounters],
        parts: Sequence[NDArray[Any]],
    ) -> None:
        self._members = list(zip(variables, parts, strict=True))
        self._storages, self._tallies = storages, tallies
        self._moves = [-1] * len(storages)

    def load(self, pairs: Any) -> bool:
        """Copy the values of (variable, value) pairs to the flat input; False if one is unusual."""
        if type(pairs) is not list or len(pairs) != len(self._members):
            return False
        for pair, (reference, part) in zip(pairs, self._members, strict=True):
            if type(pair) is not tuple or len(pair) != 2 or pair[0] is not reference():
                return False
            x = pair[1]
            if type(x) is not np.ndarray or x.dtype is not part.dtype or x.shape != part.shape:
                return False
            part[...] = x
        return True

    def lay(self) -> None:
        """Record that the copies lie one after another."""
        self._moves = [-1 if storage.moves % 2 else storage.moves for storage in self._storages]

    def begin(self) -> bool:
        """Mark the copies as being written; False if they are not flat or a view is alive."""
        for number, storage in enumerate(self._storages):
            if not storage.mark():  # it is another thread's
                for one in self._storages[:number]:
                    one.is_being_written = False
                return False
        for storage, moves in zip(self._storages, self._moves, strict=True):
            if storage.moves != moves or storage.is_exposed:
                self.end(False)
                return False
        return True

    def end(self, is_done: bool) -> None:
        """Remove the marks, and count the write if it was made."""
        for storage in self._storages:
            storage.is_being_written = False
        if is_done:
            for tally in self._tallies:
                tally.writes += 1
                tally.collectives += 1


class FlatBucket:
    """Variables of one dtype that are written together, by one operation and op."""

    def __init__(
        self,
        owner: VariableOwner,
        variables: Sequence[Any],
        name: str,
        op: str,
        ufunc: np.ufunc | None,
    ) -> None:
        self._owner, self._op, self._ufunc = owner, op, ufunc
        states = [state_of(one) for one in variables]
        self._storages = tuple([state.storage for state in states])
        self._tallies = tuple([state.tally for state in states])
        shapes = tuple([state.shape for state in states])
        ends = list(accumulate(storage.array.size for storage in self._storages))
        self._places = [
            (end - storage.array.size, end)
            for end, storage in zip(ends, self._storages, strict=True)
        ]
        self._staging = self._memory(ends[-1])
        self._scratch = np.empty_like(self._staging)
        self._flat = self._scratch  # the copies, while they lie one after another
        self._parts = tuple(
            [
                self._staging[start:stop].reshape(shape)
                for (start, stop), shape in zip(self._places, shapes, strict=True)
            ]
        )
        references = tuple([weakref.ref(one) for one in variables])
        group = None
        if which(owner.context.config.call_runner) == "c":
            group = group_of(references, self._storages, self._tallies, self._parts)
        self._group: Any = group or PyFlatBucket(
            references, self._storages, self._tallies, self._parts
        )
        self._failures = 0
        self._turn = threading.Lock()  # held by the thread that uses `_staging`
        communicator = owner.communicator
        self._communicator, self._channel = communicator, communicator.channel
        names = tuple([state.name for state in states])
        shown = ", ".join(map(repr, names[:3])) + (
            f", … ({len(names)} variables)" if len(names) > 3 else ""
        )
        self._what = f"{name} of {shown}"
        self._digest = fingerprint(
            name, names, shapes, self._staging.dtype.name, op, owner.reproducible
        )
        how = reduction_of(self._staging, op)
        self._call = prepare_reduction(
            communicator, how, self._staging.shape, self._digest, self._what, ufunc
        )

    @staticmethod
    def takes(owner: VariableOwner, states: Sequence[VariableState], ops: Sequence[str]) -> bool:
        """Return whether variables can be written so; the same answer on every replica."""
        communicator = owner.communicator
        if (
            communicator.channel is None
            or communicator.size == 1
            or len(states) < 2
            or communicator.uneven is not None
        ):
            return False
        storages = [state.storage for state in states]
        sizes = [storage.array.nbytes for storage in storages]
        dtypes = {state.dtype for state in states}
        is_plain = (
            len(set(ops)) == len(dtypes) == 1
            and dtypes.pop().kind != "b"
            and not any(storage.is_shared for storage in storages)
        )
        return is_plain and max(sizes) <= SMALL_BYTES and 0 < sum(sizes) <= _TOGETHER_BYTES

    def is_of(self, states: Sequence[VariableState]) -> bool:
        """Return whether these are its variables."""
        return len(states) == len(self._storages) and all(
            state.storage is storage for state, storage in zip(states, self._storages, strict=True)
        )

    def _memory(self, count: int) -> NDArray[Any]:
        first = self._storages[0]
        return first.memory((count,), first.array.dtype)

    def write(self, pairs: Any) -> bool:
        """Make a cached write; False if nothing was done, and the policy table has to make it."""
        owner, call = self._owner, self._call
        stack, registry = owner.places.stack, owner.registry
        if call is None or self._communicator.channel is not self._channel:
            return False
        if not stack:
            if not owner.is_default:
                return False
        elif stack[-1].owner is not owner or stack[-1].context is not _REPLICA:
            return False
        tally = self._tallies[0]
        is_counted = registry is not None and not registry.is_free
        if is_counted and tally.steps >= registry.until:  # type: ignore[union-attr]
            return False
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if not self._group.load(pairs):
                return False
            is_done, is_flat = False, self._group.begin()
            target = self._flat if is_flat else self._gathered()
            try:
                is_done = call(self._staging, target, None, owner.timeout) is not None
            finally:
                if is_flat:
                    self._group.end(is_done)
            if is_done and not is_flat:
                self._spread()
            if is_done and is_counted:
                registry.count(tally)  # type: ignore[union-attr]
            return is_done
        finally:
            self._turn.release()

    def perform(self, name: str, operand: Callable[[int], NDArray[Any]]) -> None:
        """Make the checked write by the same call."""
        owner = self._owner

        def check() -> CollectiveSpec:
            for number, part in enumerate(self._parts):
                part[...] = operand(number)
            request = reduce_request(
                owner.communicator,
                self._staging,
                self._op,
                out=self._gathered(),
                options=ReduceOptions(owner.reproducible, apply=self._ufunc),
            )
            return CollectiveSpec(self._what, self._digest, request.body)

        if not self._turn.acquire(blocking=False):
            refuse_overlap(owner.communicator, name)
        try:
            owner.communicator.perform(name, check, owner.timeout)
            self._spread()
        finally:
            self._turn.release()

    def _gathered(self) -> NDArray[Any]:
        """Return an array with the values of all copies, if the operation needs them."""
        if self._ufunc is not None:
            for storage, (start, stop) in zip(self._storages, self._places, strict=True):
                self._scratch[start:stop] = storage.array.reshape(-1)
        return self._scratch

    def _spread(self) -> None:
        """Copy the result to each variable.

        At the failures 1, 2, 4, 8, ... also move the copies into a new flat array.
        """
        self._failures += 1
        is_time = not self._failures & (self._failures - 1)
        flat = self._memory(self._scratch.size) if is_time else self._scratch
        for storage, tally, (start, stop) in zip(
            self._storages, self._tallies, self._places, strict=True
        ):
            value = self._scratch[start:stop].reshape(storage.array.shape)
            with storage:
                if is_time:
                    storage.move_to(flat[start:stop].reshape(storage.array.shape), value)
                else:
                    storage.writable(keep=False)[...] = value
            tally.writes += 1
            tally.collectives += 1
        if is_time:
            self._flat = flat
            self._group.lay()
