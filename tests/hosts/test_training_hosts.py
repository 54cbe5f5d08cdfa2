"""Training on real hosts: to the very weights of one host, with a host that is lost and ranks that are told to end on the way."""

import re

import pytest
from launching import Job

pytestmark = pytest.mark.slow

DIGITS = ["-m", "syncvar.examples.digits", "--epochs", "8"]


def weights(job):
    assert job.wait(110) == 0, job
    (found,) = re.findall(r"weights_sha256=([0-9a-f]{64})", job.out)
    return found


def test_digits_ends_with_the_weights_of_one_host_on_even_and_uneven_hosts(hosts, tmp_path):
    folders = [tmp_path / name for name in ("one", "even", "uneven")]
    for folder in folders:
        folder.mkdir()
    one = weights(Job(folders[0], target=DIGITS, workers=1))
    for folder, slots in zip(folders[1:], [(0, 2, 2), (1, 3, 1)], strict=True):
        lines = [f"{name} slots={count}\n" for name, count in zip(hosts.names, slots, strict=True) if count]
        (folder / "hosts").write_text("".join(lines))
        job = Job(folder, target=DIGITS, workers=sum(slots), prefix=hosts.prefix, options=(*hosts.ssh, "--hostfile", str(folder / "hosts")))
        assert weights(job) == one
        assert f"workers={sum(slots)} " in job.out
