"""A part of a variable on one server: how pushes change it, and who may read it when.

With `staleness` None or above 0 a push changes the array when it is executed. With 0 the pushes of a step wait until those of all
workers have come, and are combined as a synchronous collective combines them, so that every run gives the same bits: a *round* is
the j-th push of each worker in its present step, and it is over when each worker has brought it or has gone on to a later step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.tree_sum import tree_combined
from syncvar.core.errors import ConfigError, SyncvarError
from syncvar.core.reduce_ops import quiet
from syncvar.optimizers.rules.update_rule import compute_dtype
from syncvar.parameter_server.server.server_rules import ServerRule, is_users, rule_of, slot_names
from syncvar.variables.policy import AccessKind
from syncvar.variables.row_updates import RowSelection, applied

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from syncvar.parameter_server.server.server_rules import RuleValidator

    Room = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]

__all__ = ["Position", "Push", "RuleKey", "Shard", "ShardSlots", "Spec", "check_slots"]

Position = tuple[int, int]
"""Where a worker is: how often it has ticked, and at how many barriers it was since."""

RuleKey = tuple[str, tuple[tuple[str, Any], ...]]
"""An optimizer as a shard knows it: its class name and its settings."""

_PLAIN = {
    AccessKind.ASSIGN.value: None,
    AccessKind.ASSIGN_ADD.value: np.add,
    AccessKind.ASSIGN_SUB.value: np.subtract,
}
_SCATTERS = {one.value: one for one in AccessKind if one.value.startswith("scatter_")}
_STEP = "step"


class Spec(NamedTuple):
    """What a shard is.

    Args:
        shape: Of this part.
        dtype: Its name.
        aggregation: How pushes of one round become one, where staleness is 0; the name of a VariableAggregation.
        whole: Shape of the variable; start: the first of its rows that is here.
        start: See whole.
        shards: How many the variable has.
    """

    shape: tuple[int, ...]
    dtype: str
    aggregation: str
    whole: tuple[int, ...]
    start: int
    shards: int = 1


class Push(NamedTuple):
    """One change.

    Args:
        how: "assign", "assign_add", "assign_sub", a scatter, or "step" (of an optimizer).
        value: As large as the shard, or its named rows.
        rows: int64, counted from the first of this shard; None for all.
        rule: For "step": class name and settings.
        rate: For "step": learning rate.
        combine: For "step", in a round: "mean" or "sum" of the workers' gradients.
    """

    how: str
    value: NDArray[Any]
    rows: NDArray[Any] | None = None
    rule: RuleKey = ("", ())
    rate: float = 0.0
    combine: str = "mean"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What pushes have in common that can be combined."""
        return self.how, self.rows is None, self.rule, self.combine


class ShardSlots(NamedTuple):
    """What one optimizer keeps of a shard.

    Args:
        steps: How many it has made; 0: none, and there are no slots.
        slots: By name, of the shard's shape.
    """

    steps: int
    slots: dict[str, NDArray[Any]]


def check_slots(rule: RuleKey, slots: ShardSlots, value: NDArray[Any]) -> None:
    """Raise ConfigError unless an optimizer can have such slots of a shard of this value."""
    names, dtype = (
        slot_names(rule_of(rule[0], dict(rule[1])), value.dtype),
        compute_dtype(value.dtype),
    )
    for name, slot in slots.slots.items():
        if name not in names or slot.shape != value.shape or slot.dtype != dtype:
            raise ConfigError(
                f"slot {name!r:.40} of {rule[0]}, {slot.dtype.name}{list(slot.shape)}, does not fit a shard {value.dtype.name}{list(value.shape)}"
            )


class Shard:
    """A part of a variable.

    Args:
        spec: What it is.
        value: What it begins with; copied.
        staleness: Ticks by which a reader may miss other workers' pushes; None for any number.
        room: Makes arrays, by their shape and dtype.
    """

    def __init__(
        self, spec: Spec, value: NDArray[Any], staleness: int | None, room: Room = np.empty
    ) -> None:
        self.spec = spec
        self.array = room(value.shape, value.dtype)
        self.array[...] = value
        self._room = room
        self._is_given = False  # somebody may read the array for as long as he likes
        self.staleness = staleness
        self._rules: dict[RuleKey, ServerRule] = {}
        self._trial: tuple[Push, NDArray[Any] | None, RuleValidator] | None = (
            None  # a step that was made beside the array, as it is now
        )
        self.failures: list[
            tuple[list[int], str, str]
        ] = []  # workers whose pushes have failed, the error and the reason; to be told
        self._rounds: dict[tuple[int, int, int], dict[int, Push]] = {}
        self._counts: dict[int, tuple[Position, int]] = {}  # rank -> where it was, pushes there
        self._settled: tuple[int, int, int] = (0, 0, -1)  # the last round that was applied

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data and arrays, which do not change any more."""
        return {
            "spec": tuple(self.spec),
            "array": self.rows(None),
            "staleness": self.staleness,
            "counts": dict(self._counts),
            "settled": self._settled,
            "rules": {rule: (one.steps, one.slots()) for rule, one in self._rules.items()},
            "rounds": {
                round_: {rank: tuple(push) for rank, push in brought.items()}
                for round_, brought in self._rounds.items()
            },
        }

    @classmethod
    def of_state(cls, state: dict[str, Any], room: Room) -> Shard:
        """Return the shard that had this state."""
        made = cls(Spec(*state["spec"]), state["array"], state["staleness"], room)
        made._counts, made._settled = state["counts"], state["settled"]
        for rule, (steps, slots) in state["rules"].items():
            made._rules[rule] = ServerRule(rule_of(rule[0], dict(rule[1])), made.array)
            made._rules[rule].restore(steps, slots)
        made._rounds = {
            round_: {rank: Push(*push) for rank, push in brought.items()}
            for round_, brought in state["rounds"].items()
        }
        return made

    @property
    def waits(self) -> bool:
        """Whether pushes wait for those of other workers."""
        return bool(self._rounds)

    # -- writing -----------------------------------------------------------------------------------

    def check(self, push: Push) -> None:
        """Raise ConfigError unless a push fits."""
        shape, dtype = self.array.shape, self.array.dtype
        if push.value.dtype != dtype and push.how != _STEP:
            raise ConfigError(f"a push of {push.value.dtype.name} to a shard of {dtype.name}")
        if push.rows is None:
            if push.how not in _PLAIN and push.how != _STEP:
                raise ConfigError(f"servers know no push {push.how!r:.40} of whole variables")
            if push.value.shape != shape:
                raise ConfigError(f"a push of shape {push.value.shape} to a shard of shape {shape}")
        else:
            if push.how not in _SCATTERS and push.how != _STEP:
                raise ConfigError(f"servers know no push {push.how!r:.40} of rows")
            rows = push.rows
            if (
                not shape
                or rows.ndim != 1
                or rows.dtype != np.int64
                or push.value.shape != (rows.size, *shape[1:])
            ):
                raise ConfigError(
                    f"rows of shape {push.value.shape} do not fit a shard of shape {shape}"
                )
            if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < shape[0]:
                raise ConfigError(f"a push names rows outside 0 to {shape[0] - 1}")
        if push.how == _STEP:
            rule_of(push.rule[0], dict(push.rule[1]))
            if self.staleness != 0 and is_users(push.rule[0]):
                self._try(push)

    def _try(self, push: Push) -> None:
        """Make a step by a program's rule beside the array: what it raises is known before anything of a request is done."""
        value, rows = (push.value, None) if push.rows is None else _gradient([push])
        if rows is None or rows.size:
            self._trial = push, rows, self._rule(push).tried(self.array, value, rows, push.rate)

    def push(self, rank: int, place: Position | None, push: Push) -> None:
        """Take a push that fits.

        Args:
            rank: Whose.
            place: Where that worker is; None for one that has no part in rounds.
            push: What.
        """
        if self.staleness != 0 or place is None:
            self._apply([push])
            return
        number = self._count(rank, place)
        self._rounds.setdefault((*place, number), {})[rank] = push
        self._counts[rank] = place, number + 1

    def settle(self, places: Mapping[int, Position]) -> bool:
        """Apply the rounds that are over, in their order; return whether none is left.

        Args:
            places: Where each worker is that takes part.
        """
        while self._rounds:
            first = min(self._rounds)
            brought = self._rounds[first]
            if any(rank not in brought and place <= first[:2] for rank, place in places.items()):
                return False
            self._settled = max(self._settled, first)
            self._end_round(self._rounds.pop(first))
        return True

    def set_staleness(self, staleness: int | None) -> None:
        """Change the bound; what waits is applied first."""
        if staleness == self.staleness:
            return
        for _, brought in sorted(self._rounds.items()):
            self._end_round(brought)
        self._rounds.clear()
        self.staleness = staleness

    def slots(self, rule: RuleKey) -> ShardSlots:
        """Return what an optimizer keeps of this shard now."""
        made = self._rules.get(rule)
        return ShardSlots(0, {}) if made is None else ShardSlots(made.steps, made.slots())

    def restore(self, value: NDArray[Any], slots: Mapping[RuleKey, ShardSlots]) -> None:
        """Make it what it was once; pushes that wait for those of other workers are dropped.

        Args:
            value: Of its shape and dtype.
            slots: Of the optimizers whose slots are to be what they were, too.
        """
        self._rounds.clear()
        self._apply([Push(AccessKind.ASSIGN.value, value)])
        for rule, one in slots.items():
            self._rules.pop(rule, None)
            if one.steps or one.slots:
                self._rules[rule] = ServerRule(rule_of(rule[0], dict(rule[1])), self.array)
                self._rules[rule].restore(one.steps, one.slots)

    def _count(self, rank: int, place: Position) -> int:
        """Return the number of a worker's next round in its present step: none that went on without it, as it was away."""
        where, count = self._counts.get(rank, (place, 0))
        least = self._settled[2] + 1 if self._settled[:2] == place else 0
        return max(least, count if where == place else 0)

    def _end_round(self, brought: dict[int, Push]) -> None:
        try:
            self._combine([push for _, push in sorted(brought.items())])
        except SyncvarError as error:  # of a program's rule; these pushes are acknowledged
            self.failures.append((sorted(brought), type(error).__name__, str(error)))

    def _combine(self, pushes: list[Push]) -> None:
        """Apply a round: as one push where all are of one kind, else one after another by rank."""
        first = pushes[0]
        aggregation = self.spec.aggregation
        if any(push.kind != first.kind for push in pushes):
            for push in pushes:
                self._apply([push])
        elif first.rows is not None:
            self._apply(pushes)
        elif first.how == _STEP:
            self._apply(
                [
                    first._replace(
                        value=tree_combined([push.value for push in pushes], first.combine)
                    )
                ]
            )
        elif aggregation == "ONLY_FIRST_REPLICA":
            self._apply([first])
        elif aggregation == "MEAN":
            self._apply(
                [first._replace(value=tree_combined([push.value for push in pushes], "mean"))]
            )
        elif (
            first.how == AccessKind.ASSIGN.value and aggregation == "NONE"
        ) or self.array.dtype.kind == "b":
            self._apply([pushes[-1]])
        else:
            self._apply(
                [first._replace(value=tree_combined([push.value for push in pushes], "sum"))]
            )

    def _apply(self, pushes: list[Push]) -> None:
        """Change the array by pushes of one kind, in place unless it has been given away; several are of rows."""
        first = pushes[0]
        array, made = self.array, self.array
        trial, self._trial = self._trial, None
        if self._is_given:
            self._is_given = False
            self.array = made = self._room(array.shape, array.dtype)
            if first.rows is not None or first.how == _STEP:
                np.copyto(made, array)
        with quiet():
            if (
                trial is not None
                and first.value is trial[0].value
                and first.kind == trial[0].kind
                and first.rate == trial[0].rate
            ):
                self._rule(first).put(made, *trial[1:])
            elif first.rows is not None:
                self._apply_rows(pushes)
            elif first.how == _STEP:
                self._rule(first).step(made, first.value, None, first.rate)
            elif (ufunc := _PLAIN[first.how]) is None:
                made[...] = first.value
            else:
                ufunc(array, first.value, out=made, casting="same_kind")

    def _apply_rows(self, pushes: list[Push]) -> None:
        first = pushes[0]
        if first.how == _STEP:
            gradient, touched = _gradient(pushes)
            if touched.size:
                self._rule(first).step(self.array, gradient, touched, first.rate)
            return
        rows, values = _rows_of(pushes)
        if rows.size:
            touched, which = np.unique(rows, return_inverse=True)
            self.array[touched] = applied(
                _SCATTERS[first.how], self.array[touched], RowSelection(which.reshape(-1), values)
            )

    def _rule(self, push: Push) -> ServerRule:
        if push.rule not in self._rules:
            self._rules[push.rule] = ServerRule(
                rule_of(push.rule[0], dict(push.rule[1])), self.array
            )
        return self._rules[push.rule]

    # -- reading -----------------------------------------------------------------------------------

    def may_read(self, rank: int, places: Mapping[int, Position]) -> bool:
        """Return whether a worker sees all that its bound of staleness lets it see.

        Args:
            rank: Who reads; one that is not among `places` reads at once.
            places: Where each worker is that takes part.
        """
        here = places.get(rank)
        if here is None or self.staleness is None:
            return True
        if self.staleness:
            return min(place[0] for place in places.values()) >= here[0] - self.staleness
        if min(places.values()) < here:
            return False
        own = (*here, self._count(rank, here))
        return all(round_ >= own for round_ in self._rounds)

    def rows(self, rows: NDArray[Any] | None) -> NDArray[Any]:
        """Return the array as it is now, or the named rows of it in their order; neither changes any more.

        The array itself is given away, without a copy. The next change is made to another one.
        """
        if rows is None:
            self._is_given = True
            given = self.array.view()
            given.flags.writeable = False
            return given
        made = self._room((*rows.shape, *self.array.shape[1:]), self.array.dtype)
        np.take(
            self.array, rows, axis=0, out=made, mode="clip"
        )  # without checks once more, and without a copy in between
        return made


def _rows_of(pushes: list[Push]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows that pushes of one kind name, and what they bring for each."""
    return np.concatenate([push.rows for push in pushes if push.rows is not None]), np.concatenate(
        [push.value for push in pushes]
    )


def _gradient(pushes: list[Push]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the gradient of the rows that steps name, combined, and these rows, each once."""
    rows, values = _rows_of(pushes)
    touched, which = np.unique(rows, return_inverse=True)
    gradient = np.zeros((touched.size, *values.shape[1:]), values.dtype)
    np.add.at(gradient, which.reshape(-1), values)
    if pushes[0].combine == "mean" and len(pushes) > 1:
        gradient /= len(pushes)
    return gradient, touched
