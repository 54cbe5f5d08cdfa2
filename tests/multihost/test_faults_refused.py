"""Hosts that cannot be used, and files of hosts that make no sense: all of it is told at once, and nothing is started anywhere."""

import time

import pytest

from tests.support.fault_table import ROWS
from tests.support.host_faults import TIMES
from tests.support.host_testbed import Hosts
from tests.support.launching import Job, check_bound

pytestmark = pytest.mark.slow

SCRIPT = """
    import probe
    import syncvar as sv

    probe.note("is", local=sv.local_rank(), size=sv.local_world_size(), total=int(sv.all_reduce(1)))
"""
SILENT = "10.77.0.98"  # an address whose frames vanish


@pytest.fixture
def four_hosts(tmp_path_factory):
    """Hosts of which the second refuses the login, and the fourth has a key that nobody knows."""
    made = Hosts(tmp_path_factory.mktemp("four"), 4)
    known = made.known.read_text().splitlines(keepends=True)
    made.known.write_text("".join(line for line in known if not line.startswith(made.names[3])))
    made.vanish(0, SILENT)
    yield made
    made.close()


def refused(hosts, folder, lines):
    """Start a job on hosts of which none can be used; return it, and what is told, by host."""
    folder.mkdir()
    (folder / "list").write_text("\n".join(lines))
    began = time.monotonic()
    job = Job(
        folder,
        SCRIPT,
        prefix=hosts.prefix,
        options=(*hosts.ssh, "--hostfile", str(folder / "list")),
    )
    try:
        assert job.wait(120) == 69, job
    finally:
        job.close()
    assert not hosts.await_quiet()
    assert not job.events("began")
    assert f"syncvar-launch: {len(lines)} hosts cannot be used; nothing was started:" in job.err
    told = dict(
        line.strip().split(": ", 1) for line in job.err.splitlines() if line.startswith("  ")
    )
    return (
        job,
        job.ended - began,
        {host.rpartition("list:")[2].rstrip(")"): why for host, why in told.items()},
    )


def test_f19_all_hosts_that_cannot_be_reached_are_told_at_once(four_hosts, tmp_path):
    names = four_hosts.names
    lines = [
        "10.77.0.99",
        "no-such-host.invalid",
        f"{names[2]} port=2222",
        f"nobody@{names[1]}",
        names[3],
    ]
    words = [
        "it cannot be reached",
        "its name is unknown",
        "nobody listens for ssh there",
        "the login is refused",
        "its host key is not known",
    ]
    for number in range(TIMES):
        job, lasted_s, told = refused(four_hosts, tmp_path / f"job{number}", lines)
        assert [told[str(place)].startswith(start) for place, start in enumerate(words, 1)] == [
            True
        ] * 5, job
        check_bound("F19", lasted_s, ROWS["F19"].bound[1])


def test_f19_a_host_that_is_silent(four_hosts, tmp_path):
    """Nobody can know sooner than after the time that ssh is given to connect: the longer bound holds."""
    job, lasted_s, told = refused(
        four_hosts, tmp_path / "job", [SILENT, f"nobody@{four_hosts.names[1]}"]
    )
    assert told["1"].startswith("it cannot be reached"), job
    assert told["2"].startswith("the login is refused"), job
    check_bound("F19, a silent host", lasted_s, ROWS["F19"].bound[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=0", "list:1"),
        ("a\nb:0", "list:2"),
        ("a slots=3 max_slots=2", "list:1"),
        ("a\r\nb slots=x\r\n", "list:2"),
        ("\ufeff# nothing\n", "list"),
        ("", "list"),
    ],
)
def test_f36_a_file_of_hosts_that_makes_no_sense(tmp_path, text, words):
    (tmp_path / "list").write_text(text)
    began = time.monotonic()
    job = Job(tmp_path, SCRIPT, options=("--hostfile", str(tmp_path / "list")))
    try:
        assert job.wait(120) == 78, job
    finally:
        job.close()
    assert job.err.startswith("syncvar-launch: "), job
    assert words in job.err, job
    check_bound("F36", job.ended - began, ROWS["F36"].bound[1])


def test_f36_two_names_of_one_machine(hosts, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        f"Host twin\n  HostName {hosts.names[1]}\n  HostKeyAlias {hosts.names[1]}\nHost *\n{hosts.config.read_text()}"
    )
    job = Job(
        tmp_path,
        SCRIPT,
        prefix=hosts.prefix,
        options=("--ssh", f"ssh -F {config}", "-H", f"{hosts.names[1]}:1,twin:1"),
    )
    try:
        assert job.wait(120) == 0, job
    finally:
        job.close()
    assert f"twin and {hosts.names[1]} are one machine: it counts once, with 2 slots" in job.err
    assert sorted(
        (event["local"], event["size"], event["total"]) for event in job.events("is")
    ) == [(0, 2, 2), (1, 2, 2)]
