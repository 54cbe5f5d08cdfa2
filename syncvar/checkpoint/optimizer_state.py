"""The state of optimizers as entries of a checkpoint.

The key of a slot consists of the checkpoint's own keys: "<optimizer>/<variable>/<slot>", such as
"optimizer/w/momentum". It does not use names of variables, because they depend on the order in
which a program creates its variables. The entry "<optimizer>/rule" lists the optimizer's slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.checkpoint.trackables import KEEP, PlainLeaf, VariableLeaf
from syncvar.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from syncvar.checkpoint.checkpoint_format import ManifestEntry
    from syncvar.checkpoint.trackables import CheckpointGroup, Leaf, Reader
    from syncvar.optimizers import Optimizer
    from syncvar.optimizers.slots import SavedSlot
    from syncvar.variables.variable import Variable


class StagedSlot(NamedTuple):
    """New state of a slot."""

    value: NDArray[Any] | None  # this replica's copy; None for the initial value of the slot
    is_replica_local: bool  # whether the optimizer steps NONE variables only


class SlotLeaf(VariableLeaf):
    """A slot of an optimizer, whether or not its variable exists yet.

    A checkpoint that has the state of this optimizer and variable has all keys of `owners`; the
    key of the rule comes first.
    """

    is_optional = True

    def __init__(self, key: str, slot: SavedSlot, owners: tuple[str, ...]) -> None:
        super().__init__(key, slot)  # type: ignore[arg-type]  # has the attributes that it reads
        self.slot, self.are_parts = slot, slot.are_parts
        self._owners = owners

    @property
    def rule_key(self) -> str:
        """Key of the entry that lists the optimizer's slots."""
        return self._owners[0]

    @property
    def is_present(self) -> bool:
        """Whether a checkpoint must save it."""
        return self.slot.is_present

    def stage(
        self, entry: ManifestEntry, read: Reader, policy: str, communicator: CheckpointGroup
    ) -> Any:
        """Return what `put` takes, or KEEP."""
        is_replica_local = entry.mode.startswith("NONE")
        if self.slot.is_own and not self.slot.is_built:
            self.is_own = self.is_own or is_replica_local
        value = super().stage(entry, read, policy, communicator)
        return StagedSlot(value, is_replica_local) if value is not KEEP else value

    def stage_absent(self, saved: Collection[str], prefix: str) -> Any:
        """Return what `put` takes if the checkpoint has no entry for the slot, or KEEP."""
        if all(prefix + owner in saved for owner in self._owners):
            return StagedSlot(None, self.slot.is_replica_local)
        return KEEP

    def now(self) -> Any:
        """Return what `put` takes to restore the current state."""
        value = self.slot.local_value() if self.slot.has_value else None
        return StagedSlot(value, self.slot.is_replica_local)

    def put(self, staged: Any) -> None:
        """Set the staged state; sends nothing."""
        self.slot.replace(staged.value, is_replica_local=staged.is_replica_local)


class RuleLeaf(PlainLeaf):
    """The list of an optimizer's slots, which must be equal in program and checkpoint."""

    def __init__(self, key: str, optimizer: Optimizer) -> None:
        super().__init__(f"{key}/rule", "state", self._describe, self._ignore, self._check_rule)
        self.below = f"{key}/"
        self._optimizer_key, self._optimizer = key, optimizer

    def _describe(self) -> dict[str, Any]:
        rule, slots = type(self._optimizer).__name__, self._optimizer.slots.rule_slots
        return {"rule": rule, "slots": slots}

    def _ignore(self, state: Any) -> None:
        """Change nothing: the rule is a part of the program."""

    def _check_rule(self, state: Any) -> None:
        mine = self._describe()
        if not isinstance(state, dict) or state.get("slots") != mine["slots"]:
            saved = state if isinstance(state, dict) else {}
            raise CheckpointError(
                f"{self._optimizer_key!r}: the checkpoint has the state of "
                f"{saved.get('rule')!s:.40} ({_listed(saved.get('slots') or [])}), and this "
                f"program has {mine['rule']} ({_listed(mine['slots'])}), which cannot use it. Make "
                "the optimizer that was saved, or leave this one unchanged: restore(…, "
                "partial=True)"
            )


def _listed(slots: list[str]) -> str:
    return f"slots {', '.join(map(str, slots))}"[:200] if slots else "no slots"


def local_leaves(
    key: str, optimizer: Optimizer, variables: Mapping[str, Variable], *, has_own: bool
) -> Iterator[Leaf]:
    """Yield the leaves of an optimizer for variables that are not server-side."""
    slots, rule = optimizer.slots, f"{key}/rule"
    for below, variable in variables.items():
        for name, slot in slots.saved_slots(variable).items():
            yield SlotLeaf(f"{key}/{below}/{name}", slot, (rule, below))
    home = next(iter([*slots.stepped, *variables.values()]), None)
    if has_own and home is not None:
        for name, slot in slots.saved_own(home.strategy).items():
            yield SlotLeaf(f"{key}/{name}", slot, (rule,))


def require_saved_variables(
    optimizers: Iterable[tuple[str, Optimizer]], saved: Collection[int]
) -> None:
    """Raise ConfigError if an optimizer has state for a variable that is not saved with it."""
    for key, optimizer in optimizers:
        left_out = [one for one in optimizer.slots.stepped if id(one) not in saved]
        if left_out:
            name = left_out[0].name
            raise ConfigError(
                f"{key!r} has state of the variable {name!r}, which is not part of the checkpoint. "
                "A restore finds state by the key of its variable: add the variable, "
                f"sv.Checkpoint(…, {key}={key}, name=variable)"
            )


def ownerless_keys(leaves: Iterable[Leaf], saved: Collection[str], prefix: str) -> list[str]:
    """Return the keys of saved state that no optimizer of this program uses."""
    leaves = list(leaves)
    below = tuple(prefix + leaf.below for leaf in leaves if isinstance(leaf, RuleLeaf))
    used = {prefix + leaf.key for leaf in leaves}
    return sorted(key for key in saved if below and key.startswith(below) and key not in used)


def refuse_ownerless(path: str, ownerless: list[str]) -> None:
    """Raise CheckpointError about state that no optimizer of this program uses."""
    if ownerless:
        raise CheckpointError(
            f"the checkpoint at {path} has state for which this program has no variable or slot: "
            f"{', '.join(map(repr, ownerless[:8]))}{', …' if len(ownerless) > 8 else ''}. State is "
            "found by the names that sv.Checkpoint(name=variable, …) had when it was saved. Give "
            "the same names; add variables before their optimizer; or leave this state out: "
            "restore(…, partial=True)"
        )
