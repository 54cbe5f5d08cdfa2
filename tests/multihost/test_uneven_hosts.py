"""Hosts with different numbers of slots: all collectives right there, and each byte over the network once a host."""

import pytest
from test_several_hosts import at, start

from tests.support.launching import Job
from tests.support.paths import RANK_SCRIPTS

pytestmark = pytest.mark.slow

EVERY = RANK_SCRIPTS / "every_collective.py"


@pytest.mark.parametrize("slots", [(0, 1, 3), (1, 1, 3), (2, 5, 0)], ids=str)
def test_every_collective_is_right_on_uneven_hosts(hosts, tmp_path, slots):
    lines = [
        f"{name} slots={count}\n" for name, count in zip(hosts.names, slots, strict=True) if count
    ]
    (tmp_path / "hosts").write_text("".join(lines))
    job = Job(
        tmp_path,
        target=[str(EVERY)],
        workers=sum(slots),
        prefix=hosts.prefix,
        arguments=["--few"],
        options=(*hosts.ssh, "--hostfile", str(tmp_path / "hosts")),
    )
    assert job.wait(120) == 0, job
    assert int(job.out.split("checked ")[1].split()[0]) > 300


CROSSES = """
    import numpy as np
    import probe
    import syncvar as sv

    def sent():
        with open("/proc/net/dev") as file:
            return sum(int(line.split()[9]) for line in file if line.strip().startswith("eth0:"))

    x = np.full(1 << 20, sv.rank() + 1.0)
    part, is_first = x[: len(x) // 4], sv.rank() == 0
    calls = {
        "all_reduce": lambda: sv.all_reduce(x),
        "all_reduce reproducible": lambda: sv.all_reduce(x, reproducible=True),
        "broadcast": lambda: sv.broadcast(x if is_first else None),
        "all_gather": lambda: sv.all_gather(part),
        "gather": lambda: sv.gather(part),
        "scatter": lambda: sv.scatter(x if is_first else None),
        "all_to_all": lambda: sv.all_to_all(x),
    }
    for name, call in calls.items():
        call()
        sv.barrier()
        before = sent()
        sv.barrier()
        for _ in range(3):
            call()
        sv.barrier()
        if sv.local_rank() == 0:
            probe.note("sent", call=name, times=(sent() - before) / 3 / x.nbytes)
        sv.barrier()
"""


def test_each_byte_crosses_once_a_host(hosts, tmp_path):
    # What each of two hosts with two ranks must send, as a multiple of 8 MiB: the whole sum between them in halves and back,
    # one copy of what all of a host get, what its ranks have for those of the other, and nothing that stays on the host.
    expected = {
        "all_reduce": (1, 1),
        "all_reduce reproducible": (1, 1),
        "broadcast": (1, 0),
        "all_gather": (0.5, 0.5),
        "gather": (0, 0.5),
        "scatter": (0.5, 0),
        "all_to_all": (1, 1),
    }
    job = start(hosts, tmp_path, CROSSES, at(hosts, 0, 2, 2))
    assert job.wait(120) == 0, job
    sent = {(event["call"], event["rank"] // 2): event["times"] for event in job.events("sent")}
    assert sent.keys() == {(call, host) for call in expected for host in (0, 1)}
    for call, host in sent:
        wanted = expected[call][host]
        assert wanted <= sent[call, host] <= 1.06 * wanted + 0.03, (
            call,
            host,
            sent,
        )  # headers, and signs of life
