"""Every collective over real processes: ranks 1 to 8, both paths, one launch for each."""

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
