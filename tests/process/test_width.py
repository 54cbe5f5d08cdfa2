"""Every collective over real processes: ranks 1 to 8, all paths, one launch for each."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("every_collective.py")


@pytest.mark.parametrize("transport", ["auto", "zmq"])
@pytest.mark.parametrize("workers", range(1, 9))
def test_every_collective(launch, workers, transport):
    job = launch(
        None, workers=workers, target=[str(SCRIPT)], arguments=["--few"], env={"SYNCVAR_TRANSPORT": transport}
    )
    assert job.wait(60) == 0, str(job)
    assert int(job.out.split("checked ")[1].split()[0]) > 300


@pytest.mark.parametrize(("workers", "hosts"), [(2, 2), (3, 2), (4, 2), (7, 3)])
def test_every_collective_over_hosts(launch, workers, hosts):
    job = launch(
        None, workers=workers, target=[str(SCRIPT)], arguments=["--few"], options=["--fake-hosts", str(hosts)]
    )
    assert job.wait(60) == 0, str(job)
    assert int(job.out.split("checked ")[1].split()[0]) > 300
