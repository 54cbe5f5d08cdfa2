"""Cached writes and reads: the fast path of an access that all replicas have made before.

Caching fixes what cannot change for a variable: the collective, its description and its signature,
and the memory. Each cached access still checks what can change: scope, form of the operand, channel
of the group. It also checks for a due comparison of the copies, and for views of the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from syncvar._native import AccessScope, LocalCopy, access, which
from syncvar._native.constants import WRITES_PER_DECISION, StoreResult
from syncvar.variables.policy import CallContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar._native import CheckGate, VariableCounters
    from syncvar.runtime.communicator import PreparedCall
    from syncvar.variables.storage import Storage
    from syncvar.variables.variable_owner import VariableOwner

    Look = Callable[[bool], NDArray[Any] | None]
    Read = Callable[[bool], NDArray[Any] | None]
    Write = Callable[..., int]

_FALLBACK, _STORED, _SAMPLE = (int(result) for result in StoreResult)


def uncached_write(_x: Any, *, is_seen: bool = False) -> int:
    """Stand for a write that is not cached."""
    del is_seen
    return _FALLBACK


def uncached_look(_copy: bool) -> None:
    """Stand for a local read that is not cached."""


def cached_look(owner: VariableOwner, storage: Storage, tally: VariableCounters) -> Look:
    """Return a cached local read; its result is None if the policy table has to decide."""
    local, is_default = owner.places, owner.is_default

    def look(copy: bool) -> NDArray[Any] | None:
        stack = local.stack
        if stack and stack[-1].owner is not owner and not is_default:
            return None
        added = tally.added
        if added != tally.turned:
            tally.turned = added
            tally.turns += 1
        tally.reads += 1
        return storage.expose() if copy else storage.view

    if storage.is_shared or which(owner.context.config.call_runner) == "python":
        return look
    local_copy = LocalCopy(storage, tally, storage.array.dtype, storage.array.shape)
    made: Look = access("Look", look, AccessScope(local, owner, is_default), local_copy)
    return made


def cached_write(
    owner: VariableOwner,
    storage: Storage,
    tally: VariableCounters,
    call: PreparedCall,
    *,
    counts: bool,
) -> Write:
    """Return a cached write: a function of the operand that returns a `StoreResult`.

    With `is_seen=True` the caller has checked whether a comparison of the copies is due.
    """
    local, registry, is_default, communicator = (
        owner.places,
        owner.registry,
        owner.is_default,
        owner.communicator,
    )
    channel, shape, dtype, ndarray, replica = (
        communicator.channel,
        storage.array.shape,
        storage.array.dtype,
        np.ndarray,
        CallContext.REPLICA,
    )

    def write(x: NDArray[Any], *, is_seen: bool = False) -> int:
        if (
            type(x) is not ndarray
            or (x.dtype is not dtype and x.dtype != dtype)
            or x.shape != shape
        ):
            return _FALLBACK
        stack = local.stack
        if not stack:
            if not is_default:
                return _FALLBACK
        else:
            place = stack[-1]
            if place.owner is not owner or place.context is not replica:
                return _FALLBACK
        if communicator.channel is not channel:  # in a block of sv.uneven, or after shutdown
            return _FALLBACK
        is_counted = registry is not None and not registry.is_free
        if is_counted and not is_seen and tally.steps >= registry.until:  # type: ignore[union-attr]
            return _FALLBACK
        if not storage.mark():  # another thread is writing
            return _FALLBACK
        try:
            is_made = call(x, storage.writable(), None, owner.timeout) is not None
        finally:
            storage.is_being_written = False
        if not is_made:
            return _FALLBACK
        if is_counted:
            registry.count(tally)  # type: ignore[union-attr]
        tally.writes += 1
        tally.collectives += 1
        if counts:
            tally.added += 1
            if not stack and not tally.added % WRITES_PER_DECISION:
                return _SAMPLE
        return _STORED

    if which(owner.context.config.call_runner) == "python":
        return write
    made: Write = access(
        "Write",
        write,
        AccessScope(local, owner, is_default, communicator, channel, replica),
        LocalCopy(storage, tally, dtype, shape),
        call=call,
        watch=cast("CheckGate | None", registry),
        is_increment=counts,
    )
    return made


def cached_reads(
    owner: VariableOwner, storage: Storage, tally: VariableCounters, call: PreparedCall
) -> tuple[Read, Look]:
    """Return two cached collective reads; each returns None if nothing was done.

    The first is for a known context; the second checks the scope of the thread, and counts the
    read.
    """
    communicator = owner.communicator
    channel = communicator.channel

    def read(_copy: bool) -> NDArray[Any] | None:
        if communicator.channel is not channel or communicator.uneven is not None:
            return None
        array, held = storage.held()  # as long as the second lives, the first is not written
        value = call(array, None, None, owner.timeout)
        del held
        if value is None:
            return None
        tally.collectives += 1
        return read_only(value)

    scope = AccessScope(
        owner.places,
        owner,
        communicator=communicator,
        channel=channel,
        replica=CallContext.REPLICA,
    )
    copy = LocalCopy(storage, tally, storage.array.dtype, storage.array.shape)
    made: Read = access("Read", read, scope._replace(places=None), copy, call=call)
    look: Look = access("Read", uncached_look, scope, copy, call=call)
    return made, look


def read_only(value: NDArray[Any]) -> NDArray[Any]:
    """Return a value as reads return it: nobody can make the view writable."""
    value.setflags(write=False)
    return value.view()
