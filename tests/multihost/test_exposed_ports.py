"""What other machines see of a job over hosts: ports at one address only, and nothing for strangers."""

import json
import subprocess
import sys

import pytest
from test_several_hosts import WORLD, at, start

from tests.support.intruder_attacks import LASTING, SUMS, besiege
from tests.support.rank_scripts.intruders import KINDS

pytestmark = pytest.mark.slow

TABLES = """
import ipaddress, json, os, sys, time
seen = set()
print("began", flush=True)
os.set_blocking(0, False)
while sys.stdin.buffer.raw.read(1) is None:
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == "0A":
                    digits, port = fields[1].split(":")
                    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
                    seen.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    time.sleep(0.02)
print(json.dumps(sorted(seen)), flush=True)
"""


STAYS = (
    WORLD
    + """
    probe.gate("go")
    sv.barrier()
"""
)


class Tables:
    """Reads the tables of sockets of all hosts, again and again, until it is asked what listened."""

    def __init__(self, hosts):
        self._readers = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, "-c", TABLES],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for space in hosts.spaces
        ]
        for one in self._readers:
            assert one.stdout.readline() == "began\n"

    def listened(self):
        """Return the addresses at which each host has listened, but for its sshd."""
        told = [one.communicate("\n", timeout=20)[0] for one in self._readers]
        return [{address for address, port in json.loads(lines) if port != 22} for lines in told]

    def close(self):
        for one in self._readers:
            if one.poll() is None:
                one.kill()
            one.communicate()


@pytest.fixture
def tables(hosts):
    made = Tables(hosts)
    yield made
    made.close()


@pytest.fixture
def two_networks(hosts):
    """Give each host a second address, on a second interface."""
    for index, space in enumerate(hosts.spaces):
        for words in (
            ("link", "add", "other0", "type", "bridge"),
            ("addr", "add", f"10.78.0.{10 + index}/24", "dev", "other0"),
            ("link", "set", "other0", "up"),
        ):
            subprocess.run(["ip", "-n", space, *words], check=True, timeout=120)
    yield
    for space in hosts.spaces:
        subprocess.run(["ip", "-n", space, "link", "del", "other0"], check=True, timeout=120)


@pytest.mark.parametrize(
    ("iface", "mode"),
    [
        (None, "required"),
        ("10.77.0.0/24", "required"),
        ("^other0,^lo", "required"),
        ("eth0", "control-only"),
        ("eth0", "off"),
    ],
)
def test_nothing_listens_but_at_the_address_of_its_host(
    hosts, tables, two_networks, tmp_path, mode, iface
):
    chosen = () if iface is None else ("--iface", iface)
    how = ("--encryption", mode, *(["--insecure"] if mode == "off" else []))
    job = start(hosts, tmp_path, STAYS, at(hosts, 0, 2, 1), *chosen, *how)
    job.await_events("met", 3, limit_s=120)
    running = [set(hosts.listening(index)) for index in range(3)]
    job.open_gate("go")
    assert job.wait(120) == 0, job
    seen = tables.listened()
    assert running == [{name} for name in hosts.names]
    for index, name in enumerate(hosts.names):
        tried = (
            {hosts.names_6[index], *([f"10.78.0.{10 + index}"] if iface is None else [])}
            if iface != "10.77.0.0/24"
            else set()
        )
        assert seen[index] - tried <= {name}, (
            "what is tried before the job starts is one of its own too"
        )


def more(job, hosts):
    """Return the launcher and its agents: their memory counts too."""
    return job.process.pid, hosts.agent(1), hosts.agent(2)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, phase, marks=pytest.mark.nightly if phase == "R" else ())
        for kind in KINDS
        for phase in "RC"
        if (kind, phase) != ("again", "R")
    ],  # who comes first, with the secret, is in
)
def test_strangers_cost_a_job_nothing(hosts, tmp_path, kind, phase):
    job = start(hosts, tmp_path, SUMS, at(hosts, 0, 1, 1), env=LASTING)

    def ports():
        found = [hosts.ports(index) for index in range(3)]
        return [place for places in found for place in places] if found[0] and found[1] else []

    try:
        places = besiege(
            job,
            tmp_path,
            kind,
            1000,
            ports,
            size=2,
            prefix=hosts.prefix,
            more=lambda: more(job, hosts),
            while_meeting=phase == "R",
        )
    finally:
        job.close()
    # In phase C two ranks have one port each, and the higher one another for its lane.
    assert len(places) == (2 if phase == "R" else 4), places
