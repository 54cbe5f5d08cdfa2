"""A commit in memory: the values of all objects of a state at one point of the program.

A value is shared or a rank's own. All ranks have the same shared values. Own are the copies of NONE
variables and of ON_READ variables without aggregation. Plain data is own where the ranks have
different data, such as generators that each rank seeds differently.

Parts are own values of which only the total matters, such as what compression has lost. When other
replicas take over, each of them gets the mean.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.checkpoint.checkpoint_format import ManifestEntry, Stored
from syncvar.checkpoint.optimizer_state import SlotLeaf
from syncvar.checkpoint.trackables import (
    KEEP,
    FeedbackLeaf,
    SoloGroup,
    VariableLeaf,
    leaf_of,
)
from syncvar.collectives.all_reduce import AllReduceCall
from syncvar.core.errors import ConfigError
from syncvar.optimizers import Optimizer
from syncvar.optimizers.slots import ERROR, OptimizerSlots
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.variables.policy import VariableSynchronization
from syncvar.variables.variable import Variable
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from syncvar.checkpoint.checkpoint import CheckpointCore
    from syncvar.checkpoint.save_plan import LeafHeader
    from syncvar.checkpoint.trackables import Leaf
    from syncvar.runtime.communicator import Communicator

PARTS = "parts of sv.elastic.State"
_POLICY = "same_rank_or_initial"
_SINGLE = SoloGroup(0, 1)
_ON_READ = VariableSynchronization.ON_READ
_NUMBERS = (int, float, bool, str, bytes, type(None))


class HeldValue(NamedTuple):
    """The value of one object."""

    kind: str  # "variable", "generator", "state" or "value"
    mode: str  # synchronization and aggregation of a variable; "" otherwise
    array: NDArray[Any]  # private to the snapshot; packed bytes of plain data
    is_own: bool  # whether it is this rank's own copy of a variable
    is_part: bool = False  # whether only the total over the replicas matters
    digest: str = ""  # of plain data

    @property
    def is_plain(self) -> bool:
        """Whether it is plain data, which is own where the ranks differ."""
        return self.kind != "variable"


class StateSnapshot:
    """The values of one commit.

    Args:
        generation: Generation in which it was taken.
        number: Number of the commit.
        ranks: Size of the world in which it was taken.
        values: Key -> value.
        own: Keys of plain data in which the ranks differ; None while nobody has compared it.
    """

    def __init__(
        self,
        generation: int,
        number: int,
        ranks: int,
        values: dict[str, HeldValue],
        own: frozenset[str] | None = None,
    ) -> None:
        self.generation, self.number, self.ranks = generation, number, ranks
        self.values, self.own = values, own

    @property
    def identity(self) -> tuple[int, int]:
        """Generation and number; ranks that have the same have the same commit."""
        return self.generation, self.number

    def plain(self) -> dict[str, str]:
        """Return the digests of plain data, by key."""
        return {key: one.digest for key, one in self.values.items() if one.is_plain}

    def shared(self) -> dict[str, HeldValue]:
        """Return the values that all ranks share."""
        own = self.own or ()
        return {key: one for key, one in self.values.items() if not one.is_own and key not in own}

    def parts(self) -> dict[str, HeldValue]:
        """Return the values of which only the total matters."""
        return {key: one for key, one in self.values.items() if one.is_part}


class LeafCache:
    """The leaves of a state's objects, made again when the state has other objects or slots."""

    def __init__(self, core: CheckpointCore) -> None:
        self._core = core
        self._key: tuple[Any, ...] | None = None
        self._objects: list[Any] = []  # keeps their identities valid
        self._leaves: list[Leaf] = []

    def leaves(self) -> list[Leaf]:
        """Return the leaves; raise ConfigError for an object that a state cannot hold."""
        key = self._key_now()
        if key is None or key != self._key:
            self._leaves, self._key = self._fresh(), key
            self._objects = list(self._core.objects.values())
            return self._leaves
        objects = self._core.objects
        for place, leaf in enumerate(self._leaves):
            if leaf.key in objects and type(objects[leaf.key]) in _NUMBERS:  # perhaps a new one
                put = partial(objects.__setitem__, leaf.key)
                self._leaves[place] = leaf_of(leaf.key, objects[leaf.key], put)
        return self._leaves

    def _key_now(self) -> tuple[Any, ...] | None:
        """Return what the leaves depend on; None if that takes longer than to make them."""
        key: list[Any] = []
        for name, value in self._core.objects.items():
            if type(value) in _NUMBERS:
                key.append(name)
                continue
            slots = value.slots if isinstance(value, Optimizer) else None
            if type(slots) is OptimizerSlots:
                key += name, id(value), len(slots.built), len(slots.waiting)
            elif slots is None and isinstance(value, Variable | np.random.Generator | np.ndarray):
                key += name, id(value)
            else:
                return None
        return tuple(key)

    def _fresh(self) -> list[Leaf]:
        leaves, refused, on_servers, unsaved = self._core.objects_here()
        if on_servers is not None:
            raise ConfigError(
                "sv.elastic.State got a variable that servers hold: they keep it when workers come "
                "and go, so leave it out, and save it by a checkpoint"
            )
        for error in (refused, unsaved):
            if error is not None:
                raise error
        return leaves


def present(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Return the leaves that have a value now."""
    return [leaf for leaf in leaves if not isinstance(leaf, SlotLeaf) or leaf.is_present]


def described(leaves: Iterable[Leaf]) -> list[tuple[Leaf, LeafHeader | None]]:
    """Return the leaves that have a value, with the headers of plain data; sends nothing.

    Raise ConfigError for a value that cannot be held.
    """
    return [(leaf, _described(leaf) if _has_checks(leaf) else None) for leaf in present(leaves)]


def take(
    found: Iterable[tuple[Leaf, LeafHeader | None]], reusable: dict[str, HeldValue]
) -> dict[str, HeldValue]:
    """Return the values of leaves, in memory of their own; `reusable` is a snapshot to overwrite.

    Collective over the replicas of ON_READ variables with an aggregation, and for the gradients of
    an incomplete step.
    """
    return {leaf.key: _held_value(leaf, one, reusable.get(leaf.key)) for leaf, one in found}


def take_here(leaves: Iterable[Leaf], *, is_whole: bool) -> dict[str, HeldValue]:
    """Return the values of leaves from this rank's copies; sends nothing.

    Args:
        leaves: Leaves, also of variables of a job that this process has left.
        is_whole: Whether this rank's copies are the whole values, as in a world of one. Otherwise
            the result lacks the values that several copies make together.
    """
    values = {}
    for leaf in present(leaves):
        if isinstance(leaf, VariableLeaf):
            is_value = leaf.is_own or leaf.variable.synchronization is not _ON_READ
            if is_value or is_whole:
                array = np.array(leaf.variable.local_value())
                mode = _mode_of(leaf)
                values[leaf.key] = HeldValue("variable", mode, array, leaf.is_own, leaf.are_parts)
        else:
            values[leaf.key] = _plain_value(leaf, _described(leaf))
    return values


def staged(
    leaves: Iterable[Leaf], snapshot: StateSnapshot, group: Communicator
) -> Iterator[tuple[Leaf, Any]]:
    """Yield each leaf with what its `put` takes; changes nothing."""
    for leaf in leaves:
        value = snapshot.values.get(leaf.key)
        if value is not None:
            replicas = _replicas_of(leaf) if isinstance(leaf, VariableLeaf) else group
            is_own = value.is_own or leaf.key in (snapshot.own or ())
            read = partial(_array, value)
            found = leaf.stage(_entry(value, replicas, is_own=is_own), read, _POLICY, group)
        elif isinstance(leaf, SlotLeaf | FeedbackLeaf):
            found = leaf.stage_absent(snapshot.values, "")
        else:
            found = KEEP
        if found is not KEEP:
            yield leaf, found


def mean_parts(
    communicator: Communicator, value: HeldValue, holders: int, *, has_part: bool
) -> HeldValue:
    """Return the mean of the parts of the ranks that have one. Collective."""
    mine = value.array if has_part else np.zeros_like(value.array)
    total = _combined(communicator, mine, "sum")
    mean = (total / holders).astype(value.array.dtype)
    return value._replace(array=mean)


def _described(leaf: Leaf) -> LeafHeader:
    """Return the header of a value, and pack plain data; ConfigError if it cannot be held."""
    return leaf.describe(_replicas_of(leaf) if isinstance(leaf, VariableLeaf) else _SINGLE)


def _has_checks(leaf: Leaf) -> bool:
    return not isinstance(leaf, VariableLeaf) or leaf.variable.dtype.kind == "b"


def _held_value(leaf: Leaf, header: LeafHeader | None, before: HeldValue | None) -> HeldValue:
    if not isinstance(leaf, VariableLeaf):
        assert header is not None, "plain data has been described"
        return _plain_value(leaf, header)
    is_error = isinstance(leaf, SlotLeaf) and leaf.slot.slot_name == ERROR
    is_split = leaf.are_parts and not is_error and not isinstance(leaf, FeedbackLeaf)
    is_combined = leaf.variable.synchronization is _ON_READ and not leaf.is_own
    value = leaf.snapshot() if is_combined else _copy_of(leaf)
    if is_split:  # gradients of an incomplete step: those of a lost replica must not be lost
        array = _combined(_replicas_of(leaf), value, "mean")
        return HeldValue("variable", _mode_of(leaf), array, is_own=False)
    if before is not None and before.is_own == leaf.is_own and before.is_part == leaf.are_parts:
        array = before.array
        if array.shape == value.shape and array.dtype == value.dtype:
            np.copyto(array, value)
            return before
    return HeldValue("variable", _mode_of(leaf), np.array(value), leaf.is_own, leaf.are_parts)


def _copy_of(leaf: VariableLeaf) -> NDArray[Any]:
    """Return this replica's copy after all deferred writes, to read now and not to keep."""
    variable = leaf.slot.variable if isinstance(leaf, SlotLeaf) else leaf.variable
    if variable is None:  # a slot whose value waits for the next step
        return leaf.snapshot()
    state = state_of(variable)
    state.flush()
    array: NDArray[Any] = state.storage.array
    return array


def _plain_value(leaf: Leaf, header: LeafHeader) -> HeldValue:
    return HeldValue(header.kind, "", leaf.snapshot(), is_own=False, digest=header.digest)


def _entry(value: HeldValue, replicas: Communicator, *, is_own: bool) -> ManifestEntry:
    """Return the entry of a checkpoint in which this replica's value is the one to restore."""
    stored = Stored(value.array.dtype.name, value.array.shape, ())
    if not is_own:
        return ManifestEntry(value.kind, value.mode, replicas.size, stored)
    copies = {replicas.member_rank: stored}
    return ManifestEntry(value.kind, value.mode, replicas.size, None, copies)


def _array(value: HeldValue, stored: Stored) -> NDArray[Any]:
    del stored
    return value.array


def _combined(communicator: Communicator, value: NDArray[Any], op: str) -> NDArray[Any]:
    check = partial(AllReduceCall, communicator, np.array(value), op, name=PARTS)
    array: NDArray[Any] = communicator.perform(CollectiveSpec(PARTS), check, None)
    return array


def _replicas_of(leaf: VariableLeaf) -> Communicator:
    communicator: Communicator = leaf.variable.strategy.communicator
    return communicator


def _mode_of(leaf: VariableLeaf) -> str:
    variable = leaf.variable
    return f"{variable.synchronization.name} {variable.aggregation.name}"
