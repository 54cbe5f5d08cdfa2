"""The random calls of tests/contract/prepared_calls.py on real processes, with segments as long as they are."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "contract" / "prepared_calls.py"
ENV = {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "60", "SYNCVAR_CHECK_ARENA": "on"}
LAYOUTS = {"arena": {"env": ENV}, "zmq": {"env": {**ENV, "SYNCVAR_TRANSPORT": "zmq"}}, "hosts": {"env": ENV, "options": ["--fake-hosts", "2"]}}


@pytest.mark.parametrize(
    ("layout", "workers", "cases"),
    [
        ("arena", 2, 8),
        pytest.param("arena", 3, 100, marks=pytest.mark.slow),
        pytest.param("arena", 4, 100, marks=pytest.mark.slow),
        pytest.param("zmq", 3, 60, marks=pytest.mark.slow),
        pytest.param("hosts", 4, 60, marks=pytest.mark.slow),
        pytest.param("hosts", 3, 60, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(400)
def test_random_calls_on_processes(launch, layout, workers, cases):
    job = launch(None, workers=workers, target=[str(SCRIPT)], arguments=["7", str(cases)], **LAYOUTS[layout])
    assert job.wait(300) == 0, str(job)
    assert "cases over" in job.out
