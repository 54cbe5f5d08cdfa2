"""Random programs of variables give what the model predicts, call by call and copy by copy, on every replica."""

from itertools import product

import pytest
from hypothesis import HealthCheck, given, note, settings

from syncvar.transports.in_memory import Faults
from tests.verification.programs.program_generator import (
    AGGREGATIONS,
    SYNCHRONIZATIONS,
    programs,
    seeded_program,
)
from tests.verification.programs.program_language import shown
from tests.verification.programs.reference_model import FOREIGN, Model, context_of
from tests.verification.programs.reusable_world import Worlds

PROGRAMS = 2_000  # in each world, nightly
PROGRAMS_OVER_LINKS = 300
PROGRAMS_IN_SHM = 80  # threads that wait for words of one another are slow
PROGRAMS_DELAYED = 150
PREDICTED = 2_000

# Replicas that pass different initial values are warned; that is another test's claim.
pytestmark = pytest.mark.filterwarnings("ignore:variable .*initial value:UserWarning")


def check(worlds, examples):
    """Let hypothesis look for a program that differs from the model."""

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def agree(program):
        note(shown(program))
        assert worlds.difference(program) is None

    agree()


@pytest.mark.parametrize(
    "shared", [pytest.param(False, marks=pytest.mark.slow), True], ids=["links", "shm"]
)
def test_programs_do_what_the_model_says(shared):
    with Worlds(shared=shared) as worlds:
        check(worlds, PROGRAMS_IN_SHM if shared else PROGRAMS_OVER_LINKS)


def test_programs_on_a_network_that_delays_and_reorders():
    with Worlds(Faults(seed=7, delay_max=4, reorder=0.2)) as worlds:
        for seed in range(1_000_000, 1_000_000 + PROGRAMS_DELAYED):
            program = seeded_program(seed)
            difference = worlds.difference(program)
            assert difference is None, f"seed {seed}: {difference}\n{shown(program)}"


def test_programs_visit_every_cell():
    """Every mode and aggregation in every context, for reads, assignments and scatters."""
    visited = set()

    class Visitor(Model):
        def everywhere(self, block, step, gone):
            if (
                step.kind in ("read", "write", "scatter")
                and self.variables[step.variable] is not None
            ):
                variable = self.variables[step.variable]
                context = context_of(variable.owner, block.strategy, block.place)
                visited.add((variable.synchronization, variable.aggregation, context, step.kind))
            return super().everywhere(block, step, gone)

    for seed in range(PREDICTED):
        Visitor(seeded_program(seed)).predict()
    modes = set(SYNCHRONIZATIONS) - {"AUTO"}
    contexts = ("replica", "cross", "merge", "spmd")
    missing = set(product(modes, AGGREGATIONS, contexts, ("read", "write", "scatter"))) - visited
    assert not missing
    assert {context for _, _, context, _ in visited} == {*contexts, FOREIGN}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("faults", "shared"),
    [(None, False), (Faults(seed=3, delay_max=3, reorder=0.1), False), (None, True)],
    ids=["calm", "faults", "shm"],
)
def test_many_programs(faults, shared):
    with Worlds(faults, shared=shared) as worlds:
        check(worlds, PROGRAMS)
