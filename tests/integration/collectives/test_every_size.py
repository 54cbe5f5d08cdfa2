"""Collectives, variables and servers with arrays of 8 B, 64 KiB and 1 MiB on several hosts."""

import pytest

from tests.support.paths import RANK_SCRIPTS

SCRIPT = RANK_SCRIPTS / "every_size.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "hosts", "encryption", "few"),
    [
        (4, 2, 2, "required", True),
        (4, 2, 2, "control-only", False),
        (3, 3, 2, "required", False),
        (4, 3, 3, "required", False),
        (5, 2, 3, "control-only", False),
    ],
)
def test_arrays_of_all_sizes_are_right_on_fake_hosts(
    launch, workers, servers, hosts, encryption, few
):
    job = launch(
        None,
        workers=workers,
        target=[str(SCRIPT)],
        arguments=["--few"] if few else [],
        options=[f"--servers={servers}", f"--fake-hosts={hosts}", f"--encryption={encryption}"],
    )
    assert job.wait(120) == 0, job
    assert len(job.out.split("checked ")) == workers + 1, job
