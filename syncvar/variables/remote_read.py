"""One-sided reads: fetch another replica's copy while its program goes on.

Each process publishes its ON_READ and NONE variables under a key of the replicas and the name. Its
engine answers from them. An answer never holds half of a local write; see `storage`.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.all_gather import gather_request
from syncvar.collectives.tree_sum import tree_combined
from syncvar.core.array_types import dtype_from_index, dtype_index
from syncvar.core.errors import ConfigError, UsageError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.communicator import fingerprint
from syncvar.variables.policy import Travel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.runtime.communicator import CollectiveSpec
    from syncvar.variables.storage import Storage
    from syncvar.variables.variable_owner import VariableOwner


def publish(owner: VariableOwner, namespace: Any, state: Any) -> None:
    """Let other replicas read this process's copy of a variable for as long as its state exists."""
    context = owner.context
    if context.engine is None:
        return
    published: weakref.WeakValueDictionary[int, Any] | None = context.extras.get("published_copies")
    if published is None:
        published = context.extras["published_copies"] = weakref.WeakValueDictionary()
        context.engine.publish(_finder(published))
    published[_key(namespace, state.name)] = state


def fetch(owner: VariableOwner, namespace: Any, name: str, replica: int, what: str) -> NDArray[Any]:
    """Return another replica's copy, read-only.

    Raises:
        UsageError: That replica has no such variable.
        DeadlineExceeded: It does not answer; the group stays usable.
        PeerLost: It has failed.
    """
    communicator = owner.communicator
    engine = communicator.engine
    assert engine is not None
    rank = communicator.whole[replica]
    answer = engine.ask(rank, _key(namespace, name), what, owner.timeout)
    if answer is None:
        raise UsageError(
            f"{what}: replica {replica} (rank {rank}) has no variable of this name and mode now. "
            "Make it there too (a NONE variable may exist on some replicas only), under the same "
            f"name: name={name!r}"
        )
    index, shape = unpack_object(answer[0])
    made: NDArray[Any] = np.frombuffer(answer[1], dtype_from_index(index)).reshape(shape)
    made.flags.writeable = False
    return made


def combine_with_absent(
    owner: VariableOwner, namespace: Any, name: str, mine: NDArray[Any], travel: Travel, what: str
) -> NDArray[Any]:
    """Return the aggregate of all copies, where some replicas have left a block of sv.uneven.

    Collective over the active replicas; the others' copies are fetched.
    """
    communicator = owner.communicator

    def check() -> CollectiveSpec:
        return gather_request(communicator, mine[np.newaxis], name=what)

    gathered = communicator.perform(what, check, owner.timeout)
    copies: dict[int, NDArray[Any]] = dict(zip(communicator.present, gathered, strict=True))
    for replica in [0] if travel is Travel.FIRST else range(len(communicator.whole)):
        if replica not in copies:
            copies[replica] = fetch(owner, namespace, name, replica, what)
    if travel is Travel.FIRST:
        return copies[0].copy()
    ordered = [copies[replica] for replica in sorted(copies)]
    return tree_combined(ordered, "sum" if travel is Travel.SUM else "mean")


def checked_replica(rank: Any, count: int, what: str) -> int:
    """Return a replica's number."""
    try:
        replica = operator.index(rank)
    except TypeError:
        raise ConfigError(f"{what}: rank must be an integer, not {rank!r}") from None
    if isinstance(rank, bool | np.bool_) or not 0 <= replica < count:
        raise ConfigError(
            f"{what}: rank must be 0 to {count - 1} (a replica of the variable's strategy), not "
            f"{rank!r}"
        )
    return replica


def _key(namespace: Any, name: str) -> int:
    return fingerprint("copy", namespace, name)


def _finder(published: weakref.WeakValueDictionary[int, Any]) -> Any:
    def find(key: int) -> tuple[bytes, memoryview] | None:
        state = published.get(key)
        if state is None:
            return None
        storage: Storage = state.storage
        copy = storage.expose().copy()  # it may be under way for longer than the memory is mapped
        return pack_object([dtype_index(copy.dtype), list(copy.shape)]), copy.reshape(-1).view(
            np.uint8
        ).data

    return find
