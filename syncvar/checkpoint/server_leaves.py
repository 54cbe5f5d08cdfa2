"""Variables on servers, and what optimizers keep of them there, as parts of a checkpoint.

They are saved from one snapshot and restored in one transaction, by one worker: the servers have them once, and the other workers go
on meanwhile. Their keys are those that the same program has under any other strategy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.checkpoint.optimizer_state import RuleLeaf, local_leaves, require_saved_variables
from syncvar.checkpoint.participants import SoloGroup
from syncvar.checkpoint.save_plan import LeafHeader
from syncvar.checkpoint.trackables import (
    KEEP,
    Leaf,
    VariableLeaf,
    communicator_of_leaves,
    require_fit,
    require_kind,
)
from syncvar.core.errors import ConfigError
from syncvar.optimizers.rules.update_rule import compute_dtype
from syncvar.parameter_server.server.server_rules import rule_of, slot_names
from syncvar.parameter_server.server.shard import ShardSlots
from syncvar.parameter_server.server_variables import ServerVariable
from syncvar.parameter_server.snapshot import SavedVariable, give_back, rule_key, take

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.checkpoint.manifest import ManifestEntry, Stored
    from syncvar.checkpoint.participants import Together
    from syncvar.optimizers import Optimizer
    from syncvar.parameter_server.server.shard import RuleKey
    from syncvar.parameter_server.snapshot import ServerState
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.variable import Variable

__all__ = [
    "Collected",
    "OnServers",
    "ServerOptimizerLeaf",
    "ServerVariableLeaf",
    "Walked",
    "sorted_out",
    "taken_alone",
]

_MODE = "ON_WRITE NONE"  # what other strategies make of such a variable
_STEPS = "steps"


class _ArrayLeaf:
    """A variable on servers, or a slot of it.

    Args:
        key: Its key.
        shape: Of the whole.
        dtype: Its dtype.
        is_optional: Whether there may be no entry for it.
    """

    def __init__(
        self, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, is_optional: bool
    ) -> None:
        self.key = key
        self.shape, self.dtype, self.is_optional = shape, dtype, is_optional
        self.array: NDArray[Any] | None = None  # of the snapshot, or what is to be restored

    def bring(self, communicator: Together) -> LeafHeader:
        """Return what it is; the first rank of a save has it alone."""
        del communicator
        return LeafHeader("variable", _MODE, self.dtype.name, self.shape, 0, (0,), own=False)

    def snapshot(self) -> NDArray[Any]:
        """Return what the snapshot had."""
        assert self.array is not None, "a snapshot is taken before it is saved"
        return self.array

    def stage(
        self,
        entry: ManifestEntry,
        read: Callable[[Stored], NDArray[Any]],
        policy: str,
        communicator: Together,
    ) -> Any:
        """Return its value, on the rank that restores what is on servers."""
        if communicator.member_rank:
            return KEEP
        require_kind(self.key, entry, "variable", "a variable on servers")
        stored = entry.choose(self.key, 0, 1, policy, own=False)
        assert stored is not None, "with own=False there is one, or an error"
        require_fit(self.key, stored, self.dtype.name, self.shape, "the variable on servers")
        return read(stored)

    def now(self) -> Any:
        """Return nothing: it is changed last, and by no halves."""
        return None

    def put(self, staged: Any) -> None:
        """Note what it is to be."""
        self.array = staged


class _IterationsLeaf(_ArrayLeaf):
    """How many steps an optimizer of variables on servers has made; each worker counts its own."""

    def __init__(self, key: str, optimizer: Optimizer) -> None:
        super().__init__(key, (), np.dtype(np.int64), is_optional=optimizer.iterations == 0)
        self._optimizer = optimizer
        self.told: list[Any] = []

    def stage(
        self,
        entry: ManifestEntry,
        read: Callable[[Stored], NDArray[Any]],
        policy: str,
        communicator: Together,
    ) -> Any:
        """Return the number, on every rank."""
        del communicator
        require_kind(self.key, entry, "variable", "the iterations of an optimizer")
        stored = entry.choose(self.key, 0, 1, policy, own=False)
        assert stored is not None, "with own=False there is one, or an error"
        require_fit(self.key, stored, "int64", (), "the number of steps")
        self.told = [int(read(stored))]
        return self.told[0]

    def accept(self, told: Any) -> Any:
        """Return what another worker has told of it."""
        return told

    def now(self) -> Any:
        """Return the number of this worker's steps."""
        return self._optimizer.iterations

    def put(self, staged: Any) -> None:
        """Go on counting from there."""
        elsewhere = self._optimizer.elsewhere
        assert elsewhere is not None, "it steps variables on servers"
        elsewhere.steps = staged
        self._optimizer.slots.expect_iterations(staged)


class ServerVariableLeaf(NamedTuple):
    """Stands for a variable on servers, until all that a checkpoint has there is known.

    Args:
        key: Its key.
        variable: It.
    """

    key: str
    variable: ServerVariable


class ServerOptimizerLeaf:
    """Stands for an optimizer, until all variables of a checkpoint are known.

    Args:
        key: Of the optimizer.
        optimizer: The optimizer.
    """

    def __init__(self, key: str, optimizer: Optimizer) -> None:
        self.key = key
        self.optimizer = optimizer

    @property
    def rule(self) -> RuleKey:
        """The optimizer as servers know it."""
        elsewhere = self.optimizer.elsewhere
        assert elsewhere is not None, "it steps variables on servers"
        return rule_key(*elsewhere.rule)

    @property
    def can_be_there(self) -> bool:
        """Whether servers make steps of such optimizers."""
        try:
            rule_of(self.rule[0], dict(self.rule[1]))
        except (ConfigError, TypeError):
            return False
        return True


Walked = Leaf | ServerVariableLeaf | ServerOptimizerLeaf


class OnServers:
    """What a checkpoint has on servers.

    Args:
        found: Its variables.
        steppers: Optimizers that may keep something of them.
        keys: The key of each variable in the whole checkpoint, by its identity.
    """

    def __init__(
        self,
        found: Iterable[ServerVariableLeaf],
        steppers: Iterable[ServerOptimizerLeaf],
        keys: dict[int, str],
    ) -> None:
        variables = dict(found)
        self._variables = {
            key: _ArrayLeaf(key, one.shape, one.dtype, is_optional=False)
            for key, one in variables.items()
        }
        self._found, self._keys = variables, keys
        self._steppers = list(steppers)
        self._slots: dict[
            tuple[str, str], dict[str, _ArrayLeaf]
        ] = {}  # key of an optimizer, key of a variable -> slots
        self._iterations = {
            one.key: _IterationsLeaf(f"{one.key}/iterations", one.optimizer)
            for one in self._steppers
        }
        for stepper in self._steppers:
            rule = rule_of(stepper.rule[0], dict(stepper.rule[1]))
            for variable in variables.values():
                known = keys[id(variable)]
                below = f"{stepper.key}/{known}/"
                slots = {
                    name: _ArrayLeaf(
                        below + name,
                        variable.shape,
                        compute_dtype(variable.dtype),
                        is_optional=True,
                    )
                    for name in slot_names(rule, variable.dtype)
                }
                if rule.counts_steps:  # noqa: SLF001  (a rule as its variables see it)
                    slots[_STEPS] = _ArrayLeaf(
                        below + _STEPS, (), np.dtype(np.int64), is_optional=True
                    )
                self._slots[stepper.key, known] = slots

    @property
    def strategy(self) -> Any:
        """That of the variables."""
        return next(iter(self._found.values())).strategy

    @property
    def group(self) -> SoloGroup:
        """This worker alone."""
        here = self.strategy.here
        return SoloGroup(here.rank, here.workers)

    def leaves(self) -> list[Leaf]:
        """Return all that may be restored."""
        slots = [leaf for one in self._slots.values() for leaf in one.values()]
        return [*self._variables.values(), *self._iterations.values(), *slots]

    def taken(self, timeout: float | None) -> tuple[list[Leaf], dict[int, int]]:
        """Take a snapshot; return what is saved, and how many pushes of each worker are in it.

        Raises:
            ConfigError: An optimizer steps variables that would not be saved.
        """
        _require_variables(self._steppers, {variable.name for variable in self._found.values()})
        rules = [stepper.rule for stepper in self._steppers]
        state: ServerState = take([(variable, rules) for variable in self._found.values()], timeout)
        made: list[Leaf] = []
        steps = dict.fromkeys(self._iterations, 0)
        for leaf, kept in zip(self._variables.values(), state.variables, strict=True):
            leaf.array = kept.value
            made.append(leaf)
            for stepper in self._steppers:
                one = kept.slots[stepper.rule]
                steps[stepper.key] = max(steps[stepper.key], one.steps)
                if not one.steps:
                    continue
                for name, slot in self._slots[stepper.key, self._keys[id(kept.variable)]].items():
                    slot.array = (
                        np.array(one.steps, np.int64) if name == _STEPS else one.slots[name]
                    )
                    made.append(slot)
        for stepper in self._steppers:
            counted = self._iterations[stepper.key]
            counted.array = np.array(stepper.optimizer.iterations or steps[stepper.key], np.int64)
            made.append(counted)
        return made, state.pushes

    def restored_by_all(self, path: str, timeout: float | None) -> Callable[[], None]:
        """Return how the first of the ranks that restore together restores what is on servers."""
        here = self.strategy.here
        here.restorings += 1
        number = here.restorings
        return lambda: self.give_back(
            number,
            {"failure": None, "path": path, "identity": "", "left": [], "own": {}, "pushes": {}},
            timeout,
        )

    def give_back(self, number: int, says: Any, timeout: float | None) -> None:
        """Make everything on servers what was put into the leaves, as one transaction; and keep what is said of it.

        What an optimizer keeps of a variable is taken away where the checkpoint has the optimizer, and nothing of that variable.
        """
        given = []
        for key, leaf in self._variables.items():
            if leaf.array is None:
                continue
            variable = self._found[key]
            slots: dict[RuleKey, ShardSlots] = {}
            for stepper in self._steppers:
                arrays = {
                    name: slot.array
                    for name, slot in self._slots[stepper.key, self._keys[id(variable)]].items()
                    if slot.array is not None
                }
                steps = arrays.pop(_STEPS, None)
                if arrays or steps is not None:
                    count = max(1, stepper.optimizer.iterations if steps is None else int(steps))
                    slots[stepper.rule] = ShardSlots(count, arrays)
                elif self._iterations[stepper.key].told:
                    slots[stepper.rule] = ShardSlots(0, {})
            given.append(SavedVariable(variable, leaf.array, slots))
        give_back(
            self.strategy,
            given,
            number,
            says,
            timeout,
            None if says["path"] is None else says["pushes"],
        )


def _require_variables(steppers: Iterable[ServerOptimizerLeaf], names: Collection[str]) -> None:
    """Raise ConfigError if an optimizer steps variables on servers that a checkpoint does not have."""
    for stepper in steppers:
        elsewhere = stepper.optimizer.elsewhere
        left_out = [] if elsewhere is None else sorted(set(elsewhere.variables) - set(names))
        if left_out:
            raise ConfigError(
                f"{stepper.key!r} steps variable {left_out[0]!r}, of which it keeps something on servers, and the checkpoint does not have "
                f"that variable: write sv.Checkpoint(…, {stepper.key}={stepper.key}, {re.sub('[^a-zA-Z0-9_]', '_', left_out[0])}=…)"
            )


def taken_alone(
    variables: list[ServerVariable], optimizers: list[Optimizer]
) -> tuple[dict[int, NDArray[Any]], dict[int, dict[str, NDArray[Any]]]]:
    """Take one snapshot for a worker that writes a file of its own.

    Args:
        variables: Which; those that the optimizers have stepped are taken too.
        optimizers: Whose slots are taken as well.

    Returns:
        (value by the identity of its variable, slots by the identity of their optimizer, under the keys of `tracked()`).
    """
    steppers = [
        (one, ServerOptimizerLeaf("", one)) for one in optimizers if one.elsewhere is not None
    ]
    steppers = [(one, leaf) for one, leaf in steppers if leaf.can_be_there]
    found = {id(one): one for one in variables}
    for one, _ in steppers:
        assert one.elsewhere is not None
        found |= {
            id(variable): variable
            for variable in one.elsewhere.variables.values()
            if isinstance(variable, ServerVariable)
        }
    if not found:
        return {}, {}
    chosen = list(found.values())
    state = take([(variable, [leaf.rule for _, leaf in steppers]) for variable in chosen], None)
    slots: dict[int, dict[str, NDArray[Any]]] = {}
    for one, leaf in steppers:
        counts = rule_of(leaf.rule[0], dict(leaf.rule[1])).counts_steps
        kept = {
            kept.variable.name: kept.slots[leaf.rule]
            for kept in state.variables
            if kept.slots[leaf.rule].steps
        }
        slots[id(one)] = {
            "iterations": np.array(
                one.iterations or max((each.steps for each in kept.values()), default=0), np.int64
            )
        }
        for name, each in kept.items():
            slots[id(one)] |= {f"{name}/{slot}": array for slot, array in each.slots.items()}
            slots[id(one)] |= {f"{name}/{_STEPS}": np.array(each.steps, np.int64)} if counts else {}
    return {id(kept.variable): kept.value for kept in state.variables}, slots


class Collected(NamedTuple):
    """Everything that a checkpoint holds.

    Args:
        leaves: By key, in their order; without what is on servers.
        group: Who saves it.
        refused: What cannot be saved, for the group to be told; or None.
        there: What is on servers, or None.
        unsaved: State of an optimizer that a save would leave out, as an error; or None.
    """

    leaves: list[Leaf]
    group: Together
    refused: Exception | None
    there: OnServers | None
    unsaved: ConfigError | None = None


def sorted_out(
    found: Sequence[Walked],
    default: Callable[[], Communicator],
    refused: Exception | None = None,
    *,
    prefix: str = "",
    only: Collection[str] | None = None,
) -> Collected:
    """Return what a checkpoint holds, sorted out.

    Args:
        found: All of it.
        default: Returns the group of a checkpoint without variables.
        refused: What cannot be saved.
        prefix: What the keys in a restored checkpoint have before those of `found`.
        only: The keys in that checkpoint to which the result is limited; None for no limit.
    """
    variables = [one for one in found if isinstance(one, ServerVariableLeaf)]
    steppers = [one for one in found if isinstance(one, ServerOptimizerLeaf)]
    leaves: list[Leaf] = [
        one for one in found if not isinstance(one, ServerVariableLeaf | ServerOptimizerLeaf)
    ]
    keys: dict[int, str] = {}
    local: dict[str, Variable] = {}
    for one in found:
        if (
            isinstance(one, ServerVariableLeaf | VariableLeaf)
            and keys.setdefault(id(one.variable), prefix + one.key) == prefix + one.key
        ):
            local |= {prefix + one.key: one.variable} if isinstance(one, VariableLeaf) else {}
    steppers_there = [
        one
        for one in steppers
        if variables and one.optimizer.elsewhere is not None and one.can_be_there
    ]
    for stepper in steppers:
        leaves.append(RuleLeaf(stepper.key, stepper.optimizer))
        leaves += local_leaves(
            stepper.key, stepper.optimizer, local, has_own=stepper not in steppers_there
        )
    leaves.sort(key=lambda leaf: leaf.key)
    if only is not None:
        leaves = [leaf for leaf in leaves if prefix + leaf.key in only]
        variables = [one for one in variables if prefix + one.key in only]
    there = OnServers(variables, steppers_there, keys) if variables else None
    if there is None and only is None:
        try:
            _require_variables(steppers, ())
        except ConfigError as error:
            refused = refused or error
    group: Together
    if there is not None and not any(isinstance(leaf, VariableLeaf) for leaf in leaves):
        group = there.group
    else:
        group = communicator_of_leaves(leaves, default)
    unsaved = None
    try:
        require_saved_variables([(one.key, one.optimizer) for one in steppers], keys)
    except ConfigError as error:
        unsaved = error
    return Collected(leaves, group, refused, there, unsaved)
