"""Every collective over real processes: ranks 1 to 8, all paths, one launch for each.

By default 1 to 3 in shared memory, 2 over links and 3 over two hosts; the others are slow tests.
"""

import pytest

from tests.support.paths import RANK_SCRIPTS

SCRIPT = RANK_SCRIPTS / "every_collective.py"


def _layouts():
    for workers in range(1, 9):
        yield pytest.param(workers, "auto", marks=[pytest.mark.slow] if workers > 3 else [])
        yield pytest.param(workers, "zmq", marks=[pytest.mark.slow] if workers != 2 else [])


@pytest.mark.parametrize(("workers", "transport"), list(_layouts()))
def test_every_collective(launch, workers, transport):
    job = launch(
        None,
        workers=workers,
        target=[str(SCRIPT)],
        arguments=["--few"],
        env={"SYNCVAR_TRANSPORT": transport},
    )
    assert job.wait(120) == 0, str(job)
    assert int(job.out.split("checked ")[1].split()[0]) > 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "hosts"),
    [(3, 2), (2, 2), (4, 2), (5, 3), (7, 3)],
)
def test_every_collective_over_hosts(launch, workers, hosts):
    job = launch(
        None,
        workers=workers,
        target=[str(SCRIPT)],
        arguments=["--few"],
        options=["--fake-hosts", str(hosts)],
    )
    assert job.wait(120) == 0, str(job)
    assert int(job.out.split("checked ")[1].split()[0]) > 300
