"""`syncvar rules`: the decision table of variables (`variables.policy`) in Markdown."""

from __future__ import annotations

from syncvar.variables.policy import (
    AccessKind,
    Action,
    CallContext,
    Effect,
    Travel,
    VariableAggregation,
    VariableSynchronization,
    decide,
)

_WORDS = {
    (Travel.NOTHING, Effect.RETURN): "own copy",
    (Travel.MEETING, Effect.RETURN): "own copy, when all have met",
    (Travel.SUM, Effect.RETURN): "sum of the copies",
    (Travel.MEAN, Effect.RETURN): "mean of the copies",
    (Travel.FIRST, Effect.RETURN): "replica 0's copy",
    (Travel.NOTHING, Effect.CHANGE): "own copy changes, nothing sent",
    (Travel.SUM, Effect.CHANGE): "sum of what all pass",
    (Travel.MEAN, Effect.CHANGE): "mean of what all pass",
    (Travel.FIRST, Effect.CHANGE): "what replica 0 passes",
    (Travel.SAME, Effect.CHANGE): "x, the same on all (compared)",
    (Travel.FIRST, Effect.SHARE): "what replica 0 passes, split",
    (Travel.SAME, Effect.SHARE): "x, the same on all, split",
    (Travel.SAME, Effect.SPLIT_ANEW): "sum changed by the same rows, split anew",
    (Travel.ALL_ROWS, Effect.CHANGE): "rows of all replicas",
    (Travel.MEAN_ROWS, Effect.CHANGE): "rows of all replicas, scaled by 1/N",
    (Travel.FIRST_ROWS, Effect.CHANGE): "rows of replica 0",
    (Travel.QUESTION, Effect.RETURN): "that replica's copy, asked for",
}
_CONTEXTS = (CallContext.REPLICA, CallContext.CROSS, CallContext.MERGE, CallContext.SPMD)
_Cells = tuple[str, ...]


def rules_text() -> str:
    """Return the table; rows and columns with equal cells are joined."""
    joined = _columns()
    titles = ["operation", "synchronization", "aggregation"]
    titles += [", ".join(context.value for context in same) for same in joined]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for operations, rows in _operations():
        for synchronizations, aggregations, cells in rows:
            shown = [cells[_CONTEXTS.index(same[0])] for same in joined]
            row = " | ".join([operations, synchronizations, aggregations, *shown])
            lines.append(f"| {row} |")
    return "\n".join(lines) + "\n"


def _cell(action: Action) -> str:
    if action.error is not None:
        return action.error.__name__
    return _WORDS[action.travel, action.effect]


def _cells(s: VariableSynchronization, a: VariableAggregation, o: AccessKind) -> _Cells:
    return tuple(_cell(decide(s, a, context, o)) for context in _CONTEXTS)


def _columns() -> list[list[CallContext]]:
    """Return the contexts, in groups that agree in every cell."""
    joined: list[list[CallContext]] = []
    for context in _CONTEXTS:
        for same in joined:
            if all(
                decide(s, a, context, o) == decide(s, a, same[0], o)
                for s in VariableSynchronization
                for a in VariableAggregation
                for o in AccessKind
            ):
                same.append(context)
                break
        else:
            joined.append([context])
    return joined


def _operations() -> list[tuple[str, list[tuple[str, str, _Cells]]]]:
    """Return the operations with their rows, in groups with equal rows."""
    groups: list[tuple[list[str], list[tuple[str, str, _Cells]]]] = []
    for operation in AccessKind:
        rows = _rows(operation)
        for names, known in groups:
            if known == rows:
                names.append(operation.value)
                break
        else:
            groups.append(([operation.value], rows))
    return [(", ".join(names), rows) for names, rows in groups]


def _rows(operation: AccessKind) -> list[tuple[str, str, _Cells]]:
    """Return (synchronizations, aggregations, cells), joined over aggregations first."""
    by_aggregations: dict[tuple[str, _Cells], list[str]] = {}
    for synchronization in VariableSynchronization:
        same: dict[_Cells, list[str]] = {}
        for aggregation in VariableAggregation:
            cells = _cells(synchronization, aggregation, operation)
            same.setdefault(cells, []).append(aggregation.name)
        for cells, aggregations in same.items():
            every = len(aggregations) == len(VariableAggregation)
            shown = "any" if every else ", ".join(aggregations)
            by_aggregations.setdefault((shown, cells), []).append(synchronization.name)
    return [
        ("any" if len(names) == len(VariableSynchronization) else ", ".join(names), shown, cells)
        for (shown, cells), names in by_aggregations.items()
    ]
