"""What a checkpoint can hold, as leaves: how each type is saved, checked and restored.

* Variables, by their mode. Objects with `tracked()` (optimizers): the variables that it returns.
  Checkpoints, and dicts, lists and tuples that hold objects.
* `numpy.random.Generator` and objects with `state_dict()` and `load_state_dict(state)`: their
  state.
* Plain data (numbers, texts, arrays, tensors, dates, and containers of them): a restore replaces
  it.

States and plain data are saved once if all ranks have the same, else once per rank.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.checkpoint.checkpoint_format import digest_of
from syncvar.checkpoint.save_plan import LeafHeader
from syncvar.collectives.stage_builders import gather_objects
from syncvar.core.errors import CheckpointError, ConfigError, WireError
from syncvar.protocol.object_codec import is_plain, pack_object, unpack_object
from syncvar.runtime.communicator import Communicator
from syncvar.variables.create import share_of
from syncvar.variables.grouped_writes import are_parts, replace_copy
from syncvar.variables.policy import (
    AccessKind,
    CallContext,
    Effect,
    Travel,
    VariableSynchronization,
    decide,
)
from syncvar.variables.variable import Variable
from syncvar.variables.variable_owner import scope_stack
from syncvar.variables.variable_reads import exact_value
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from numpy.typing import NDArray

    from syncvar.checkpoint.checkpoint_format import ManifestEntry, Stored

    Reader = Callable[[Stored], NDArray[Any]]

_log = logging.getLogger("syncvar")

KEEP = object()  # staged: this replica keeps what it has


class SoloGroup:
    """Group of one worker that saves or restores for all, or leaves that to rank 0."""

    size = 1

    def __init__(self, rank: int, workers: int) -> None:
        self.rank = self.member_rank = rank
        self.workers = workers
        self.members = (rank,)

    def require_all(self, action: str, instead: str = "") -> None:
        """Do nothing: this group needs no other rank."""


CheckpointGroup = Communicator | SoloGroup


class Leaf(Protocol):
    """One object under one key."""

    key: str
    is_optional: bool  # whether a checkpoint may have no entry for it

    def describe(self, communicator: CheckpointGroup) -> LeafHeader:
        """Return the header of this rank's value; raise ConfigError if it cannot be saved."""

    def snapshot(self) -> NDArray[Any]:
        """Return the array to save, which never changes; may be a collective of the replicas."""

    def stage(
        self, entry: ManifestEntry, read: Reader, policy: str, communicator: CheckpointGroup
    ) -> Any:
        """Return what `put` takes, or KEEP, and change nothing."""

    def now(self) -> Any:
        """Return what `put` would take to restore the current value."""

    def put(self, staged: Any) -> None:
        """Set the staged value."""


class VariableLeaf:
    """A replicated variable."""

    is_optional = False

    def __init__(self, key: str, variable: Variable) -> None:
        self.key, self.variable = key, variable
        self._reading = decide(
            variable.synchronization, variable.aggregation, CallContext.CROSS, AccessKind.SYNC
        )
        self.is_own = (
            variable.synchronization is VariableSynchronization.NONE
            or self._reading.error is not None
        )
        self.are_parts = isinstance(variable, Variable) and are_parts(variable)

    def describe(self, communicator: CheckpointGroup) -> LeafHeader:
        """Return its mode, dtype and shape."""
        variable = self.variable
        replicas = variable.strategy.communicator
        if variable.dtype.kind == "b" and self._reading.travel in (Travel.SUM, Travel.MEAN):
            raise ConfigError(
                f"{self.key!r}: bool variable {variable.name!r} is ON_READ with aggregation "
                f"{variable.aggregation.name}, and bools have no sum to save; make it with "
                f"dtype='int64', or with aggregation ONLY_FIRST_REPLICA or NONE"
            )
        mode = f"{variable.synchronization.name} {variable.aggregation.name}"
        members = tuple(communicator.members.index(member) for member in replicas.members)
        dtype, shape, rank = variable.dtype.name, variable.shape, replicas.member_rank
        return LeafHeader("variable", mode, dtype, shape, rank, members, self.is_own)

    def snapshot(self) -> NDArray[Any]:
        """Return the variable's value, or this replica's copy."""
        if self.is_own:
            return self.variable.local_value()
        if self.variable.synchronization is VariableSynchronization.ON_READ:
            return exact_value(state_of(self.variable))
        return self.variable.read_value()

    def stage(
        self, entry: ManifestEntry, read: Reader, policy: str, communicator: CheckpointGroup
    ) -> Any:
        """Return this replica's new copy."""
        del communicator  # its own replicas count
        variable = self.variable
        replicas = variable.strategy.communicator
        title = f"variable {variable.name!r}"
        rank, size = replicas.member_rank, replicas.size
        require_kind(self.key, entry, "variable", title)
        stored = entry.choose(self.key, rank, size, policy, own=self.is_own)
        parts = [] if stored is None else [stored]
        if self.are_parts and entry.copies and entry.replicas != size:
            parts = [entry.copies[replica] for replica in sorted(entry.copies)]
        if not parts:
            return KEEP
        for one in parts:
            require_fit(self.key, one, variable.dtype.name, variable.shape, title)
        value = _mean_of([read(one) for one in parts])
        mode = variable.synchronization, variable.aggregation
        action = decide(*mode, CallContext.CROSS, AccessKind.ASSIGN)
        return share_of(value, size, rank) if action.effect is Effect.SHARE else value

    def now(self) -> Any:
        """Return this replica's copy, after all deferred writes."""
        return self.variable.local_value()

    def put(self, staged: Any) -> None:
        """Set this replica's copy; sends nothing."""
        replace_copy(self.variable, staged)


class FeedbackLeaf(VariableLeaf):
    """What a variable with `compress=` keeps for its next sums; `of` is the variable's leaf."""

    is_optional = True

    def __init__(self, of: VariableLeaf, slot: str, variable: Variable) -> None:
        super().__init__(f"{of.key}/{slot}", variable)
        self._of = of

    def snapshot(self) -> NDArray[Any]:
        """Return this replica's copy, after the deferred writes of the variable."""
        self._of.variable.local_value()
        return super().snapshot()

    def stage_absent(self, saved: Collection[str], prefix: str) -> Any:
        """Return what `put` takes if the checkpoint has the variable only, else KEEP."""
        variable = self.variable
        return np.zeros(variable.shape, variable.dtype) if prefix + self._of.key in saved else KEEP


def feedback_leaves(leaf: Leaf) -> list[FeedbackLeaf]:
    """Return the leaves of what a variable keeps besides its value."""
    if not isinstance(leaf, VariableLeaf) or not isinstance(leaf.variable, Variable):
        return []
    compression = state_of(leaf.variable).compression
    slots = {} if compression is None else compression.variables
    return [FeedbackLeaf(leaf, slot, variable) for slot, variable in slots.items()]


class PlainLeaf:
    """An object of `kind` "generator", "state" or "value", whose state is plain data.

    `check`, if any, raises CheckpointError for a state that does not fit.
    """

    is_optional = False

    def __init__(
        self,
        key: str,
        kind: str,
        get: Callable[[], Any],
        put: Callable[[Any], None],
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self.key = key
        self._kind, self._get, self._put, self._check = kind, get, put, check
        self._packed = b""
        # State for each worker, if rank 0 restores for all.
        self.worker_states: list[bytes | None] = []

    def describe(self, communicator: CheckpointGroup) -> LeafHeader:
        """Take the state now, and return its length and digest."""
        self._packed = pack_state(self._get(), self.key)
        everyone = tuple(range(communicator.size))
        shape, digest = (len(self._packed),), digest_of(self._packed)
        return LeafHeader(
            self._kind, "", "uint8", shape, communicator.member_rank, everyone, None, digest
        )

    def snapshot(self) -> NDArray[Any]:
        """Return the packed state."""
        return np.frombuffer(self._packed, np.uint8)

    def stage(
        self, entry: ManifestEntry, read: Reader, policy: str, communicator: CheckpointGroup
    ) -> Any:
        """Return the new state."""
        require_kind(self.key, entry, self._kind, f"a {self._kind}")
        if isinstance(communicator, SoloGroup):
            workers = 1 if entry.value is not None else communicator.workers
            self.worker_states = [
                self._read(entry, read, policy, rank, workers) for rank in range(workers)
            ]
            packed_state = self.worker_states[0]
        else:
            rank, size = communicator.member_rank, communicator.size
            packed_state = self._read(entry, read, policy, rank, size)
        return KEEP if packed_state is None else self.accept(packed_state)

    def _read(
        self, entry: ManifestEntry, read: Reader, policy: str, rank: int, ranks: int
    ) -> bytes | None:
        stored = entry.choose(self.key, rank, ranks, policy, own=True)
        if stored is None:
            _log.warning(
                "%r differed between the %d ranks that saved it, and rank %d keeps its own. "
                "restore_policy='cycle' assigns a saved one, 'error' raises. If the state should "
                "be equal (buffers of a model), make it equal before the save",
                self.key,
                entry.replicas,
                rank,
            )
            return None
        if stored.dtype != "uint8" or len(stored.shape) != 1:
            raise CheckpointError(
                f"{self.key!r}: the checkpoint has {stored.words} instead of the bytes of a state"
            )
        return read(stored).tobytes()

    def accept(self, data: bytes) -> Any:
        """Unpack and check a state."""
        try:
            state = unpack_object(data)
        except (WireError, ConfigError) as error:
            raise CheckpointError(f"{self.key!r}: the state cannot be read: {error}") from error
        if self._check is not None:
            self._check(state)
        return state

    def now(self) -> Any:
        """Return a copy of the state, since the object may change the state that it returned."""
        return unpack_object(pack_state(self._get(), self.key))

    def put(self, staged: Any) -> None:
        """Set the state."""
        self._put(staged)


def pack_state(state: Any, key: str) -> bytes:
    """Return a state as bytes; raise ConfigError if it is more than plain data."""
    try:
        return pack_object(state)
    except ConfigError as error:
        raise ConfigError(f"{key!r} cannot be saved: {error}") from None


def checked_object(name: str, value: Any) -> Any:
    """Return an object if a checkpoint can hold it; raise ConfigError otherwise."""
    if isinstance(value, np.random.RandomState):
        raise ConfigError(
            f"{name!r} is a numpy.random.RandomState, which a checkpoint cannot hold; use "
            f"np.random.default_rng(seed)"
        )
    if (
        isinstance(value, Variable | np.random.Generator)
        or is_plain(value)
        or hasattr(value, "tracked")
        or _has_state(value)
    ):
        return value
    raise ConfigError(
        f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: it takes variables, optimizers, iterators and other objects with "
        "state_dict() and load_state_dict(state), numpy.random.Generator, checkpoints, and plain "
        "data (numbers, texts, arrays, tensors, dates, lists, sets and dicts of them)"
    )


def is_nested(value: Any) -> bool:
    """Return whether a dict, list or tuple holds more than plain data."""
    if not isinstance(value, dict | list | tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(is_nested(item) or not is_plain(item) for item in items)


def leaf_of(key: str, value: Any, replace: Callable[[Any], None] | None) -> Leaf:
    """Return the leaf of an object that holds no others."""
    checked_object(key, value)
    if isinstance(value, Variable):
        return VariableLeaf(key, value)
    if isinstance(value, np.random.Generator):
        return _generator_leaf(key, value)
    if _has_state(value):
        return PlainLeaf(key, "state", value.state_dict, value.load_state_dict)
    if replace is None:
        raise ConfigError(
            f"{key!r} is plain data in a container of objects: give it its own name, "
            f"checkpoint.name = {value!r:.40}"
        )
    return PlainLeaf(key, "value", lambda: value, replace)


def require_fit(key: str, stored: Stored, dtype: str, shape: tuple[int, ...], owner: str) -> None:
    """Raise CheckpointError unless a stored array has this dtype and shape."""
    if stored.dtype != dtype or stored.shape != shape:
        raise CheckpointError(
            f"{key!r}: the checkpoint has {stored.words}, {owner} is {dtype}{list(shape)}"
        )


def require_kind(key: str, entry: ManifestEntry, kind: str, owner: str) -> None:
    """Raise CheckpointError unless an entry has this kind."""
    if entry.kind != kind:
        raise CheckpointError(
            f"{key!r}: the checkpoint has a {entry.kind}, this program has {owner}"
        )


def gather(
    group: CheckpointGroup, name: str, make: Callable[[], Any], timeout: float | None
) -> list[Any]:
    """Return the results of `make` on all ranks of a group; an error of `make` reaches them all."""
    if isinstance(group, SoloGroup):
        return [make()]
    found: list[Any] = gather_objects(group, name, make, timeout)
    return found


def communicator_of_leaves(leaves: list[Leaf], default: Callable[[], Communicator]) -> Communicator:
    """Return the group that saves or restores together: the replicas of the variables.

    Of several groups, it is the widest if that holds all others, else the world; the default
    without variables.
    """
    variables = [leaf for leaf in leaves if isinstance(leaf, VariableLeaf)]
    # NONE variables may exist on some ranks only, so they decide last.
    variables.sort(key=lambda leaf: leaf.variable.synchronization is VariableSynchronization.NONE)
    groups = [leaf.variable.strategy.communicator for leaf in variables]
    if not groups:
        return default()
    widest: Communicator = max(groups, key=lambda group: group.size)
    if all(set(group.members) <= set(widest.members) for group in groups):
        return widest
    return current().world


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Leave every scope for the duration: a checkpoint acts the same in every context."""
    stack = scope_stack()
    before = stack[:]
    del stack[:]
    try:
        yield
    finally:
        stack[:] = before


def _mean_of(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the mean of copies, added in their order; a single copy is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    count = np.asarray(len(parts), parts[0].dtype)
    with np.errstate(all="ignore"):
        mean: NDArray[Any] = functools.reduce(np.add, parts) / count
    return mean


def _generator_leaf(key: str, generator: np.random.Generator) -> Leaf:
    def put(state: Any) -> None:
        generator.bit_generator.state = state

    def check(state: Any) -> None:
        mine = type(generator.bit_generator).__name__
        saved = state.get("bit_generator") if isinstance(state, dict) else None
        if saved != mine:
            raise CheckpointError(
                f"{key!r}: the checkpoint has the state of {saved!r:.40}, the generator is {mine}"
            )

    return PlainLeaf(key, "generator", lambda: generator.bit_generator.state, put, check)


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
