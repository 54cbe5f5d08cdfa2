"""Programs of mpi4py over syncvar, without an MPI library, in real processes."""

import pytest

from tests.support.paths import RANK_SCRIPTS, TESTS

PROGRAMS = TESTS / "support" / "mpi4py_programs"
LAYER = ["-m", "syncvar.compat.mpi4py"]


@pytest.mark.parametrize(
    "env",
    [
        {"SYNCVAR_WINDOW_BYTES": "65536"},
        pytest.param({"SYNCVAR_TRANSPORT": "zmq"}, marks=pytest.mark.slow),
        pytest.param({"SYNCVAR_CALL_RUNNER": "python"}, marks=pytest.mark.slow),
    ],
    ids=["shared memory", "links", "without C"],
)
def test_calls_of_the_layer(launch, env):
    job = launch(target=[str(RANK_SCRIPTS / "mpi4py_calls.py")], workers=3, env=env)
    assert job.wait() == 0, job
    assert job.lines(0) == ["checked 12 subjects"]


@pytest.mark.parametrize(
    ("program", "workers", "output"),
    [
        ("heat_grid.py", 4, "heat 17196.621412 hottest 85.582150 in True"),
        ("task_farm.py", 3, "longest 27 sum 441"),
    ],
)
def test_an_unchanged_program(launch, program, workers, output):
    job = launch(target=[*LAYER, str(PROGRAMS / program)], workers=workers)
    assert job.wait() == 0, job
    assert job.lines(0) == [output]
