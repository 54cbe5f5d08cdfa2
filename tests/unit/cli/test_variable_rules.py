from syncvar.cli.printed_tables import rules_text
from syncvar.variables.policy import (
    AccessKind,
    CallContext,
    VariableAggregation,
    VariableSynchronization,
    decide,
)


def test_the_table_has_every_operation_once_for_each_mode_and_aggregation():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rules_text().splitlines()[2:]
    ]
    for operation in AccessKind:
        for synchronization in VariableSynchronization:
            for aggregation in VariableAggregation:
                found = [
                    row
                    for row in rows
                    if operation.value in row[0].split(", ")
                    and (row[1] == "any" or synchronization.name in row[1].split(", "))
                    and (row[2] == "any" or aggregation.name in row[2].split(", "))
                ]
                assert len(found) == 1, (operation, synchronization, aggregation)
                refused = decide(synchronization, aggregation, CallContext.REPLICA, operation).error
                assert (
                    (found[0][3] == refused.__name__)
                    if refused
                    else not found[0][3].endswith("Error")
                )
