"""Random programs of variables give what the model predicts, call by call and copy by copy, on every replica."""

import os

import pytest
from hypothesis import HealthCheck, given, note, settings
from language import shown
from strategies import programs, seeded_program
from worlds import Worlds

from syncvar.transports.memory import Faults

PROGRAMS = 2_000
PROGRAMS_NIGHTLY = 20_000

# Replicas that pass different initial values are warned; that is another test's claim.
pytestmark = pytest.mark.filterwarnings("ignore:variable .*initial value:UserWarning")


def check(worlds, examples):
    """Let hypothesis look for a program that differs from the model."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not os.environ.get("SYNCVAR_TEST_RANDOM"),
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def agree(program):
        note(shown(program))
        assert worlds.difference(program) is None

    agree()


def test_programs_do_what_the_model_says():
    with Worlds() as worlds:
        check(worlds, PROGRAMS)


def test_programs_on_a_network_that_delays_and_reorders():
    with Worlds(Faults(seed=7, delay_max=4, reorder=0.2)) as worlds:
        for seed in range(1_000_000, 1_000_200):
            program = seeded_program(seed)
            difference = worlds.difference(program)
            assert difference is None, f"seed {seed}: {difference}\n{shown(program)}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("faults", [None, Faults(seed=3, delay_max=3, reorder=0.1)], ids=["calm", "faults"])
def test_many_programs(faults):
    with Worlds(faults) as worlds:
        check(worlds, PROGRAMS_NIGHTLY // 2)
