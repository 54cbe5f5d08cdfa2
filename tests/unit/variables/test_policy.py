"""The whole table of the variable layer, against a second writing of the contract."""

from itertools import product

import pytest

from syncvar.core.errors import ConfigError, NoAggregation, UsageError
from syncvar.variables import policy
from syncvar.variables.policy import (
    AccessKind,
    CallContext,
    Effect,
    Travel,
    VariableAggregation,
    VariableSynchronization,
    as_member,
    decide,
    resolve,
    table,
)

ASSIGNS = ("ASSIGN", "ASSIGN_ADD", "ASSIGN_SUB")
SCATTERS = tuple(name for name in AccessKind.__members__ if name.startswith("SCATTER"))


def cell(synchronization, aggregation, context, operation):
    action = decide(
        VariableSynchronization[synchronization],
        VariableAggregation[aggregation],
        CallContext[context],
        AccessKind[operation],
    )
    return action.error.__name__ if action.error else f"{action.travel.name} {action.effect.name}"


def test_every_call_matches_exactly_one_row():
    for call in product(VariableSynchronization, VariableAggregation, CallContext, AccessKind):
        rows = [
            row
            for row in policy._TABLE
            if all(part in allowed for part, allowed in zip(call, row[:4], strict=True))
        ]
        assert len(rows) == 1, call


def test_the_table_lists_every_cell_once_and_each_can_be_read():
    rules = list(table())
    calls = {
        (rule.synchronization, rule.aggregation, rule.context, rule.operation) for rule in rules
    }
    assert len(rules) == len(calls) == 4 * 4 * 4 * len(AccessKind)
    for rule in rules:
        assert rule.action.rule in str(rule)
        assert rule.operation.value in str(rule)


def test_auto_behaves_as_on_write():
    for aggregation, context, operation in product(VariableAggregation, CallContext, AccessKind):
        auto = decide(VariableSynchronization.AUTO, aggregation, context, operation)
        assert auto is decide(VariableSynchronization.ON_WRITE, aggregation, context, operation)
    assert resolve(VariableSynchronization.AUTO)[0] is VariableSynchronization.ON_WRITE
    assert resolve(VariableSynchronization.NONE) == (VariableSynchronization.NONE, "as requested")


def test_none_never_sends_and_is_never_refused():
    for aggregation, context, operation in product(VariableAggregation, CallContext, AccessKind):
        action = decide(VariableSynchronization.NONE, aggregation, context, operation)
        assert (action.travel is Travel.NOTHING) is (operation is not AccessKind.READ_FROM)
        assert action.error is None


def test_reading_on_write_and_local_values_never_sends():
    for aggregation, context in product(VariableAggregation, CallContext):
        assert (
            decide(VariableSynchronization.ON_WRITE, aggregation, context, AccessKind.READ).travel
            is Travel.NOTHING
        )
        for synchronization in VariableSynchronization:
            action = decide(synchronization, aggregation, context, AccessKind.LOCAL)
            assert (action.travel, action.effect) == (Travel.NOTHING, Effect.RETURN)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("SUM", "SUM RETURN"),
        ("MEAN", "MEAN RETURN"),
        ("ONLY_FIRST_REPLICA", "FIRST RETURN"),
        ("NONE", "NoAggregation"),
    ],
)
def test_reading_on_read_combines_outside_replica_context(aggregation, expected):
    assert cell("ON_READ", aggregation, "REPLICA", "READ") == "NOTHING RETURN"
    for context in ("CROSS", "MERGE", "SPMD"):
        assert cell("ON_READ", aggregation, context, "READ") == expected
    for context in CallContext.__members__:
        assert cell("ON_READ", aggregation, context, "SYNC") == expected


def test_read_from_asks_one_replica_where_copies_differ():
    for aggregation, context in product(VariableAggregation.__members__, CallContext.__members__):
        assert cell("ON_WRITE", aggregation, context, "READ_FROM") == "NOTHING RETURN"
        for mode in ("ON_READ", "NONE"):
            assert cell(mode, aggregation, context, "READ_FROM") == "QUESTION RETURN"


def test_sync_of_on_write_is_a_meeting():
    assert cell("ON_WRITE", "NONE", "REPLICA", "SYNC") == "MEETING RETURN"


@pytest.mark.parametrize("operation", ASSIGNS)
def test_writes_of_own_values(operation):
    for context in ("REPLICA", "SPMD"):
        assert cell("ON_WRITE", "SUM", context, operation) == "SUM CHANGE"
        assert cell("ON_WRITE", "MEAN", context, operation) == "MEAN CHANGE"
        assert cell("ON_WRITE", "ONLY_FIRST_REPLICA", context, operation) == "FIRST CHANGE"
        for aggregation in VariableAggregation.__members__:
            assert cell("ON_READ", aggregation, context, operation) == "NOTHING CHANGE"
    assert cell("ON_WRITE", "NONE", "REPLICA", operation) == "NoAggregation"
    assert cell("ON_WRITE", "NONE", "SPMD", operation) == "SAME CHANGE"


@pytest.mark.parametrize("operation", ASSIGNS)
@pytest.mark.parametrize("context", ["CROSS", "MERGE"])
def test_writes_of_the_value(operation, context):
    for aggregation in VariableAggregation.__members__:
        assert cell("ON_WRITE", aggregation, context, operation) == "SAME CHANGE"
        share = "SAME SHARE" if aggregation == "SUM" else "SAME CHANGE"
        assert cell("ON_READ", aggregation, context, operation) == share


@pytest.mark.parametrize("operation", SCATTERS)
def test_scatter(operation):
    kind = operation.removeprefix("SCATTER_")
    in_sum = {
        "ADD": "ALL_ROWS CHANGE",
        "SUB": "ALL_ROWS CHANGE",
        "MIN": "ALL_ROWS CHANGE",
        "MAX": "ALL_ROWS CHANGE",
    }
    in_mean = {**in_sum, "ADD": "MEAN_ROWS CHANGE", "SUB": "MEAN_ROWS CHANGE"}
    for context in ("REPLICA", "SPMD"):
        assert cell("ON_WRITE", "SUM", context, operation) == in_sum.get(kind, "UsageError")
        assert cell("ON_WRITE", "MEAN", context, operation) == in_mean.get(kind, "UsageError")
        assert cell("ON_WRITE", "ONLY_FIRST_REPLICA", context, operation) == "FIRST_ROWS CHANGE"
        assert cell("ON_READ", "SUM", context, operation) == "NOTHING CHANGE"
    assert cell("ON_WRITE", "NONE", "REPLICA", operation) == "NoAggregation"
    for context in ("CROSS", "MERGE"):
        assert cell("ON_WRITE", "SUM", context, operation) == "SAME CHANGE"
        assert cell("ON_READ", "SUM", context, operation) == "SAME SPLIT_ANEW"
        assert cell("ON_READ", "MEAN", context, operation) == "SAME CHANGE"


def test_creation():
    for context in CallContext.__members__:
        for aggregation in VariableAggregation.__members__:
            assert cell("ON_WRITE", aggregation, context, "CREATE") == "FIRST CHANGE"
            assert cell("NONE", aggregation, context, "CREATE") == "NOTHING CHANGE"
        assert cell("ON_READ", "SUM", context, "CREATE") == "FIRST SHARE"
        assert cell("ON_READ", "MEAN", context, "CREATE") == "FIRST CHANGE"


def test_every_refusal_says_what_to_write_instead():
    refusals = {rule.action for rule in table() if rule.action.error}
    assert {action.error for action in refusals} == {NoAggregation, UsageError}
    for action in refusals:
        assert action.effect is Effect.REFUSE
        assert action.travel is Travel.NOTHING
        assert "v" in action.fix.format(name="v", call="v.assign(…)")


def test_members_are_taken_by_name_in_any_case():
    assert (
        as_member(VariableAggregation, "only_first_replica", "x")
        is VariableAggregation.ONLY_FIRST_REPLICA
    )
    assert as_member(VariableAggregation, VariableAggregation.SUM, "x") is VariableAggregation.SUM
    for wrong in ("ON_WRIT", 3, None, VariableAggregation.SUM):
        with pytest.raises(
            ConfigError, match="synchronization must be one of AUTO, NONE, ON_WRITE, ON_READ"
        ):
            as_member(VariableSynchronization, wrong, "synchronization")
    with pytest.raises(ConfigError, match="did you mean ON_WRITE"):
        as_member(VariableSynchronization, "on_writ", "synchronization")
