"""The checker is checked: each planted bug is found within a few programs."""

import numpy as np
import pytest

import syncvar.collectives.buckets as fused_module
import syncvar.core.reduce_ops as ops_module
import syncvar.variables.create as creation_module
import syncvar.variables.replica_call as requests_module
import syncvar.variables.variable as variable_module
import syncvar.variables.variable_state as state_module
import syncvar.variables.variable_writes as writes_module
from syncvar.core.errors import MismatchError
from syncvar.runtime.communicator import CollectiveSpec
from syncvar.variables.policy import AccessKind, Effect, Travel
from tests.verification.programs.program_generator import seeded_program
from tests.verification.programs.reusable_world import Worlds

PROGRAMS_MAX = 500

pytestmark = pytest.mark.filterwarnings("ignore:variable .*initial value:UserWarning")


def sum_assigns_own_value(patch):
    right = writes_module.request_of

    def wrong(action, communicator, x, what, hint, **options):
        request = right(action, communicator, x, what, hint, **options)
        if action.travel is not Travel.SUM or action.effect is not Effect.CHANGE:
            return request

        def body():
            yield from request.body
            options["out"][...] = x
            return x

        return CollectiveSpec(request.label, request.digest, body())

    patch.setattr(writes_module, "request_of", wrong)


def mean_divides_by_one_more(patch):
    right = ops_module.divide_mean
    for module in (ops_module, fused_module):
        patch.setattr(module, "divide_mean", lambda how, total, count: right(how, total, count + 1))


def split_loses_a_unit(patch):
    right = creation_module.share_of

    def wrong(value, count, index):
        share = right(value, count, index)
        loses = index == 0 and value.dtype.kind in "iu" and np.any(value % value.dtype.type(count))
        return share - share.dtype.type(1) if loses else share

    patch.setattr(creation_module, "share_of", wrong)
    patch.setattr(state_module, "share_of", wrong)


def first_replica_is_the_last(patch):
    right = requests_module.broadcast_request

    def wrong(communicator, x, root, **options):
        return right(communicator, x, root=communicator.size - 1, **options)

    patch.setattr(requests_module, "broadcast_request", wrong)


def a_failed_write_changes_the_copy(patch):
    right = writes_module.ReplicaWrite.execute

    def wrong(self, *arguments):
        try:
            return right(self, *arguments)
        except MismatchError:
            self.state.keep(np.zeros_like(self.state.storage.array))
            raise

    patch.setattr(writes_module.ReplicaWrite, "execute", wrong)


def cross_writes_are_not_compared(patch):
    patch.setattr(requests_module, "digest_of", lambda array: 0)


def rows_of_a_mean_are_not_scaled(patch):
    right = writes_module.apply_rows
    patch.setattr(
        writes_module,
        "apply_rows",
        lambda operation, copy, rows, divisor=1: right(operation, copy, rows),
    )


def row_update_takes_the_first_of_two(patch):
    right = writes_module.apply_rows

    def wrong(operation, copy, rows, divisor=1):
        if operation is AccessKind.SCATTER_UPDATE:
            rows = type(rows)(rows.indices[::-1], rows.values[::-1])
        return right(operation, copy, rows, divisor)

    patch.setattr(writes_module, "apply_rows", wrong)


def a_deep_copy_is_the_same_variable(patch):
    patch.setattr(variable_module.Variable, "__deepcopy__", lambda self, memo: self)


PLANTED = (
    sum_assigns_own_value,
    mean_divides_by_one_more,
    split_loses_a_unit,
    first_replica_is_the_last,
    a_failed_write_changes_the_copy,
    cross_writes_are_not_compared,
    rows_of_a_mean_are_not_scaled,
    row_update_takes_the_first_of_two,
    a_deep_copy_is_the_same_variable,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with Worlds() as worlds:
        for number in range(PROGRAMS_MAX):
            difference = worlds.difference(seeded_program(number, sizes=(2, 3)))
            if difference is not None:
                print(f"found by program {number + 1}: {difference}")
                return
    raise AssertionError(f"{plant.__name__} was not found by {PROGRAMS_MAX} programs")
