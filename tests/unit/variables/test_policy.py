"""The whole table of the variable layer. What programs see of it is in tests/verification/programs/reference_model.py."""

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
