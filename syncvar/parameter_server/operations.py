"""What operations of requests say, as shards take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.parameter_server.server.shard import Push, ShardSlots, Spec

if TYPE_CHECKING:
    from syncvar.parameter_server.messages import Arrays
    from syncvar.parameter_server.server.shard import RuleKey


def rule_key_of(told: list[Any]) -> RuleKey:
    """Return the optimizer that an operation names."""
    return told[0], tuple(sorted(told[1].items()))


def slots_of(operation: dict[str, Any], arrays: Arrays) -> dict[RuleKey, ShardSlots]:
    """Return what optimizers are to keep of a shard that is restored."""
    return {
        rule_key_of(rule): ShardSlots(
            steps, {name: arrays[number] for name, number in slots.items()}
        )
        for rule, steps, slots in operation["rules"]
    }


def push_of(operation: dict[str, Any], arrays: Arrays) -> Push:
    """Return the change that an operation makes."""
    rows, rule = operation["rows"], operation.get("rule")
    return Push(
        operation["how"],
        arrays[operation["value"]],
        None if rows is None else arrays[rows],
        ("", ()) if rule is None else rule_key_of(rule),
        operation.get("rate", 0.0),
        operation.get("combine", "mean"),
    )


def spec_of(operation: dict[str, Any]) -> Spec:
    """Return the shard that an operation names."""
    return Spec(
        tuple(operation["shape"]),
        operation["dtype"],
        operation["aggregation"],
        tuple(operation["whole"]),
        operation["start"],
        operation.get("shards", 1),
    )
