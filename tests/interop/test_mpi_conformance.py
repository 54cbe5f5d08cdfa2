"""What a program must see, it sees under mpirun too, whether MPI carries the data or our own links: `pytest -m mpi`."""

import sys

import pytest

from tests.support.mpi_jobs import MPIS, command, environment
from tests.verification.conformance import case_collection, case_launcher

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(590)]

_CASES = [case for case in case_collection.load() if not case_collection.waits(case)]


@pytest.mark.parametrize("replicas", sorted({case["replicas"] for case in _CASES}))
@pytest.mark.parametrize("transport", ["mpi", "mpi-only"])
@pytest.mark.parametrize("mpi", MPIS)
def test_all_cases_pass_under_mpirun(mpi, transport, replicas):
    def start(count, folder, environ):
        own = {name: value for name, value in environ.items() if name.startswith("SYNCVAR_")} | {
            "SYNCVAR_TRANSPORT": transport
        }
        return [*command(mpi, count), sys.executable], environment(mpi, folder, **own)

    cases = [case for case in _CASES if case["replicas"] == replicas]
    launches = []
    found = case_launcher.conduct(cases, launches=launches, start=start)
    failed = [one for one in found.values() if not one.passed]
    assert not failed, f"{len(failed)} of {len(found)} failed\n" + "\n".join(map(str, failed))
    assert len(found) == len(cases)
    assert len(launches) == 1
