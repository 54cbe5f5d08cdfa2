"""The policy table of variables: what an access does, for each mode and context, and why.

Pure data. `decide` looks an access up; `table` yields every cell, for documents and programs. A row
says what travels between the replicas, and what happens to this replica's copy. The reads and
writes carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from syncvar.core.array_arguments import matching_word
from syncvar.core.errors import ConfigError, NoAggregation, UsageError
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Named(Enum):
    """Members are hashed by identity, because every access looks into the table."""

    __hash__ = object.__hash__


class VariableSynchronization(Named):
    """When the copies of a variable are made equal.

    * `ON_WRITE`: A write combines what the replicas pass, so all copies stay equal.
    * `ON_READ`: A write changes this replica's copy. A read outside `run` combines the copies.
    * `NONE`: A write changes this replica's copy, and the others never see it.
    * `AUTO`: As `ON_WRITE`, but syncvar may delay increments, so that they travel together.

    Example:
        >>> import syncvar as sv
        >>> sv.Variable(0.0, synchronization="on_read").synchronization
        <VariableSynchronization.ON_READ: 'on_read'>
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(Named):
    """How values of several replicas become one.

    * `NONE`: Not at all. An access that would have to combine values raises NoAggregation.
    * `SUM`: The sum of the values.
    * `MEAN`: The mean of the values.
    * `ONLY_FIRST_REPLICA`: The value of replica 0.

    Example:
        >>> import syncvar as sv
        >>> sv.Variable(0.0, aggregation=sv.VariableAggregation.SUM).aggregation.name
        'SUM'
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class CallContext(Named):
    """The context of an access."""

    REPLICA = "replica"  # inside strategy.run: each replica with its own values
    # inside scope(), or a variable of an explicit strategy outside any: the same values everywhere
    CROSS = "cross"
    MERGE = "merge"  # inside merge_call: as cross
    # no scope, a variable of the default strategy: writes as in replica, reads as in cross
    SPMD = "spmd"


class AccessKind(Named):
    """The kind of an access to a variable."""

    CREATE = "create"
    READ = "read"
    SYNC = "sync"
    LOCAL = "local_value"
    READ_FROM = "read_from"
    ASSIGN = "assign"
    ASSIGN_ADD = "assign_add"
    ASSIGN_SUB = "assign_sub"
    SCATTER_ADD = "scatter_add"
    SCATTER_SUB = "scatter_sub"
    SCATTER_MUL = "scatter_mul"
    SCATTER_DIV = "scatter_div"
    SCATTER_MIN = "scatter_min"
    SCATTER_MAX = "scatter_max"
    SCATTER_UPDATE = "scatter_update"


class Travel(Named):
    """What travels between the replicas."""

    NOTHING = "nothing"
    QUESTION = "a question to one replica, which takes no part"
    MEETING = "nothing, but all meet"
    SUM = "all-reduce, sum"
    MEAN = "all-reduce, mean"
    FIRST = "broadcast from replica 0"
    SAME = "a digest: all must bring the same"
    ALL_ROWS = "the rows of all replicas"
    MEAN_ROWS = "the rows of all replicas, scaled by 1/N"
    FIRST_ROWS = "the rows of replica 0"


class Effect(Named):
    """What happens to this replica's copy, or to the result."""

    RETURN = "is returned"
    CHANGE = "changes the copy"
    SHARE = "changes the copy by its share of the exact split"
    SPLIT_ANEW = "changes the sum of the copies, which is split anew"
    REFUSE = "is refused"


class Action(NamedTuple):
    """What an access does.

    Args:
        travel: What travels between the replicas.
        effect: What happens with it.
        rule: The reason, in a sentence.
        error: Error of an access that is not allowed; else None.
        fix: What to write instead; `{name}` stands for the variable, `{call}` for the access.
    """

    travel: Travel
    effect: Effect
    rule: str
    error: type[UsageError] | None = None
    fix: str = ""


_E = TypeVar("_E", bound=Enum)

_AUTO, _NONE = VariableSynchronization.AUTO, VariableSynchronization.NONE
_ON_WRITE, _ON_READ = VariableSynchronization.ON_WRITE, VariableSynchronization.ON_READ
_WRITTEN = (_AUTO, _ON_WRITE)
_SHARED = (_AUTO, _ON_WRITE, _ON_READ)
_NO_AGG = VariableAggregation.NONE
_SUM, _MEAN, _FIRST = (
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
_ANY_SYNC, _ANY_AGG, _ANYWHERE = (
    tuple(VariableSynchronization),
    tuple(VariableAggregation),
    tuple(CallContext),
)
OWN_VALUES = (CallContext.REPLICA, CallContext.SPMD)
"""Contexts in which each replica writes its own value; rows differ for aggregation NONE only."""
_SAME_VALUES = (CallContext.CROSS, CallContext.MERGE)
_THE_VALUE = (CallContext.CROSS, CallContext.MERGE, CallContext.SPMD)
_IN_REPLICA, _IN_SPMD = (CallContext.REPLICA,), (CallContext.SPMD,)
_O = AccessKind
_CREATE, _READ, _SYNC, _LOCAL = (_O.CREATE,), (_O.READ,), (_O.SYNC,), (_O.LOCAL,)
_READ_FROM = (_O.READ_FROM,)
_ASSIGNS = (_O.ASSIGN, _O.ASSIGN_ADD, _O.ASSIGN_SUB)
_ADDING = (_O.SCATTER_ADD, _O.SCATTER_SUB)
_FACTORS = (_O.SCATTER_MUL, _O.SCATTER_DIV)
_BOUNDS = (_O.SCATTER_MIN, _O.SCATTER_MAX)
_REPLACING = (_O.SCATTER_UPDATE,)
_SCATTERS = (*_ADDING, *_FACTORS, *_BOUNDS, *_REPLACING)
_WRITES = (*_ASSIGNS, *_SCATTERS)

_NO_COMBINATION = Action(
    Travel.NOTHING,
    Effect.REFUSE,
    "the copies would have to be combined, but the variable has aggregation NONE",
    NoAggregation,
    "{name}.local_value()   # this replica's copy; or strategy.gather({name}, axis=0) for all of "
    "them",
)
_NO_AGREEMENT = Action(
    Travel.NOTHING,
    Effect.REFUSE,
    "each replica may bring another value, and aggregation NONE does not say how they become one",
    NoAggregation,
    "sv.Variable(…, name='{name}', aggregation=sv.VariableAggregation.SUM)   # or MEAN, or "
    "ONLY_FIRST_REPLICA",
)
_NO_ORDER = Action(
    Travel.NOTHING,
    Effect.REFUSE,
    "the replicas' rows would have to be combined, which has no meaning for this operation",
    UsageError,
    "sv.Variable(…, name='{name}', aggregation=sv.VariableAggregation.ONLY_FIRST_REPLICA)   # or "
    "{call} in `with strategy.scope():`, with the same rows on every replica",
)

# (synchronizations, aggregations, contexts, operations) -> action. Every call matches exactly one
# row (a test looks).
_TABLE: tuple[
    tuple[
        tuple[VariableSynchronization, ...],
        tuple[VariableAggregation, ...],
        tuple[CallContext, ...],
        tuple[AccessKind, ...],
        Action,
    ],
    ...,
] = (
    # -- creation (SEMANTICS 2)
    (_WRITTEN, _ANY_AGG, _ANYWHERE, _CREATE,
     Action(Travel.FIRST, Effect.CHANGE, "every copy starts with the chief's value")),
    ((_ON_READ,), (_SUM,), _ANYWHERE, _CREATE,
     Action(Travel.FIRST, Effect.SHARE,
            "the chief's value is split over the copies, so that reading gives it back")),
    ((_ON_READ,), (_NO_AGG, _MEAN, _FIRST), _ANYWHERE, _CREATE,
     Action(Travel.FIRST, Effect.CHANGE, "every copy starts with the chief's value")),
    ((_NONE,), _ANY_AGG, _ANYWHERE, _CREATE,
     Action(Travel.NOTHING, Effect.CHANGE,
            "each replica keeps its own value; NONE never sends a message")),
    # -- reading (SEMANTICS 3)
    (_ANY_SYNC, _ANY_AGG, _ANYWHERE, _LOCAL,
     Action(Travel.NOTHING, Effect.RETURN, "this replica's copy, in every context")),
    (_WRITTEN, _ANY_AGG, _ANYWHERE, (*_READ, *_READ_FROM),
     Action(Travel.NOTHING, Effect.RETURN, "all copies are equal: every write made them so")),
    ((_ON_READ, _NONE), _ANY_AGG, _ANYWHERE, _READ_FROM,
     Action(Travel.QUESTION, Effect.RETURN,
            "the copy of the replica that is named, which takes no part in the call")),
    ((_ON_READ,), _ANY_AGG, _IN_REPLICA, _READ,
     Action(Travel.NOTHING, Effect.RETURN, "a replica reads its own copy")),
    ((_ON_READ,), (_SUM,), _THE_VALUE, _READ,
     Action(Travel.SUM, Effect.RETURN, "reading the variable sums the copies of all replicas")),
    ((_ON_READ,), (_MEAN,), _THE_VALUE, _READ,
     Action(Travel.MEAN, Effect.RETURN,
            "reading the variable averages the copies of all replicas")),
    ((_ON_READ,), (_FIRST,), _THE_VALUE, _READ,
     Action(Travel.FIRST, Effect.RETURN, "the value is replica 0's copy")),
    ((_ON_READ,), (_NO_AGG,), _THE_VALUE, _READ, _NO_COMBINATION),
    ((_NONE,), _ANY_AGG, _ANYWHERE, (*_READ, *_SYNC),
     Action(Travel.NOTHING, Effect.RETURN, "NONE: the copies are independent on purpose")),
    (_WRITTEN, _ANY_AGG, _ANYWHERE, _SYNC,
     Action(Travel.MEETING, Effect.RETURN, "all meet; their copies are equal")),
    ((_ON_READ,), (_SUM,), _ANYWHERE, _SYNC,
     Action(Travel.SUM, Effect.RETURN, "sync sums the copies, in every context")),
    ((_ON_READ,), (_MEAN,), _ANYWHERE, _SYNC,
     Action(Travel.MEAN, Effect.RETURN, "sync averages the copies, in every context")),
    ((_ON_READ,), (_FIRST,), _ANYWHERE, _SYNC,
     Action(Travel.FIRST, Effect.RETURN, "sync gives replica 0's copy, in every context")),
    ((_ON_READ,), (_NO_AGG,), _ANYWHERE, _SYNC, _NO_COMBINATION),
    # -- writing own values (SEMANTICS 4)
    (_WRITTEN, (_SUM,), OWN_VALUES, _ASSIGNS,
     Action(Travel.SUM, Effect.CHANGE,
            "the sum of what the replicas pass is written to every copy")),
    (_WRITTEN, (_MEAN,), OWN_VALUES, _ASSIGNS,
     Action(Travel.MEAN, Effect.CHANGE,
            "the mean of what the replicas pass is written to every copy")),
    (_WRITTEN, (_FIRST,), OWN_VALUES, _ASSIGNS,
     Action(Travel.FIRST, Effect.CHANGE, "what replica 0 passes is written to every copy")),
    (_WRITTEN, (_NO_AGG,), _IN_REPLICA, _WRITES, _NO_AGREEMENT),
    (_WRITTEN, (_NO_AGG,), _IN_SPMD, _WRITES,
     Action(Travel.SAME, Effect.CHANGE, "with aggregation NONE all replicas must write the same")),
    ((_ON_READ,), _ANY_AGG, OWN_VALUES, _WRITES,
     Action(Travel.NOTHING, Effect.CHANGE, "a replica writes its own copy; reading combines")),
    ((_NONE,), _ANY_AGG, _ANYWHERE, _WRITES,
     Action(Travel.NOTHING, Effect.CHANGE,
            "NONE: each replica writes its own copy and never sends a message")),
    # -- writing the variable's value (SEMANTICS 5)
    (_WRITTEN, _ANY_AGG, _SAME_VALUES, _WRITES,
     Action(Travel.SAME, Effect.CHANGE, "every replica writes the same value to its copy")),
    ((_ON_READ,), (_SUM,), _SAME_VALUES, _ASSIGNS,
     Action(Travel.SAME, Effect.SHARE,
            "the value is split over the copies, so that reading gives it back")),
    ((_ON_READ,), (_SUM,), _SAME_VALUES, _SCATTERS,
     Action(Travel.SAME, Effect.SPLIT_ANEW, "the copies are summed, changed once and split anew")),
    ((_ON_READ,), (_NO_AGG, _MEAN, _FIRST), _SAME_VALUES, _WRITES,
     Action(Travel.SAME, Effect.CHANGE, "the same write is made to every copy")),
    # -- rows (SEMANTICS 6)
    (_WRITTEN, (_SUM,), OWN_VALUES, (*_ADDING, *_BOUNDS),
     Action(Travel.ALL_ROWS, Effect.CHANGE,
            "all replicas' rows are applied, in the order of replicas")),
    (_WRITTEN, (_MEAN,), OWN_VALUES, _ADDING,
     Action(Travel.MEAN_ROWS, Effect.CHANGE, "all replicas' rows are scaled by 1/N and applied")),
    (_WRITTEN, (_MEAN,), OWN_VALUES, _BOUNDS,
     Action(Travel.ALL_ROWS, Effect.CHANGE,
            "all replicas' rows are applied, in the order of replicas")),
    (_WRITTEN, (_FIRST,), OWN_VALUES, _SCATTERS,
     Action(Travel.FIRST_ROWS, Effect.CHANGE, "replica 0's rows are applied to every copy")),
    (_WRITTEN, (_SUM, _MEAN), OWN_VALUES, (*_FACTORS, *_REPLACING), _NO_ORDER),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PolicyCell:
    """One cell of the table, for printing."""

    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    context: CallContext
    operation: AccessKind
    action: Action

    def __str__(self) -> str:
        action = self.action
        mode = f"{self.synchronization.name} + {self.aggregation.name}"
        call = f"{self.operation.value} on {mode} in {self.context.value}"
        if action.error is not None:
            return f"{call}: {action.error.__name__}, because {action.rule}"
        return f"{call}: {action.travel.value}; it {action.effect.value}: {action.rule}"


@lru_cache(maxsize=1024)
def decide(
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    context: CallContext,
    operation: AccessKind,
) -> Action:
    """Return what an access does, and why.

    Example:
        >>> mode = VariableSynchronization.ON_WRITE, VariableAggregation.SUM
        >>> decide(*mode, CallContext.REPLICA, AccessKind.ASSIGN).rule
        'the sum of what the replicas pass is written to every copy'
    """
    for synchronizations, aggregations, contexts, operations, action in _TABLE:
        if (
            synchronization in synchronizations
            and aggregation in aggregations
            and context in contexts
            and operation in operations
        ):
            return action
    raise AssertionError(
        f"no rule for {operation} on {synchronization}, {aggregation} in {context}"
    )


def table() -> Iterator[PolicyCell]:
    """Yield the whole table, cell by cell.

    Example:
        >>> rule = next(rule for rule in table() if rule.action.travel is Travel.SUM)
        >>> print(rule)  # doctest: +ELLIPSIS
        assign on AUTO + SUM in replica: all-reduce, sum; it changes the copy: the sum of ...
    """
    for synchronization, aggregation, context, operation in product(
        _ANY_SYNC, _ANY_AGG, _ANYWHERE, tuple(AccessKind)
    ):
        action = decide(synchronization, aggregation, context, operation)
        yield PolicyCell(synchronization, aggregation, context, operation, action)


def resolve(synchronization: VariableSynchronization) -> tuple[VariableSynchronization, str]:
    """Return the mode in force for a requested one, and why.

    Example:
        >>> resolve(VariableSynchronization.AUTO)[0].name
        'ON_WRITE'
    """
    if synchronization is _AUTO:
        return _ON_WRITE, "AUTO behaves as ON_WRITE; only when its communication happens may differ"
    return synchronization, "as requested"


def as_member(kind: type[_E], value: Any, label: str) -> _E:
    """Return a member of an enumeration, given by its name or as a member of another one.

    Raises:
        ConfigError: Neither of them.

    Example:
        >>> as_member(VariableAggregation, "Mean", "aggregation").name
        'MEAN'
    """
    if isinstance(value, kind):
        return value
    names = list(kind.__members__)
    if (word := matching_word(value, names)) is not None:
        return kind[word]
    hint = nearest(value.upper(), names) if isinstance(value, str) else ""
    if "MEAN" in names and not hint:  # of ops, for which others have words of their own
        from syncvar.core.migration_hints import op_hint, op_of

        if isinstance(value, str) and op_of(value.lower()).upper() in names:
            return kind[op_of(value.lower()).upper()]
        hint = op_hint(value, map(str.lower, names))
    raise ConfigError(f"{label} must be one of {', '.join(names)}, not {value!r}{hint}")
