"""`syncvar doctor` on hosts of which most have a fault: each is named, and the others are checked all the same."""

import json
import subprocess
import sys
import tempfile

import pytest

from tests.support.host_testbed import Hosts
from tests.support.launching import LIMIT_S

GOOD, SHIFTED, NEAR, DEAF, NO_PYTHON = range(
    5
)  # hosts of the testbed; the doctor runs on the first
ABSENT = "10.77.0.99"

CLOCK = """
import time

_read = time.time_ns
time.time_ns = lambda: _read() + 5_000_000_000
"""


def doctor(prefix, *options):
    """Run the command in some namespace; return its exit code and its checks."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "syncvar", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["checks"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Return the testbed, the exit code and the checks of hosts with faults."""
    made = Hosts(tmp_path_factory.mktemp("doctor"), 5)
    try:
        folder = made.folder
        stand_in = folder / "stand_in"  # another msgpack, and a clock that is ahead
        (stand_in / "msgpack-1.0.9.dist-info").mkdir(parents=True)
        metadata = "Metadata-Version: 2.1\nName: msgpack\nVersion: 1.0.9\n"
        (stand_in / "msgpack-1.0.9.dist-info/METADATA").write_text(metadata)
        (stand_in / "sitecustomize.py").write_text(CLOCK)
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={stand_in} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        for address in (made.names[NEAR], made.names_6[NEAR]):
            made.vanish(DEAF, address)
        lines = [
            made.names[GOOD],
            f"{made.names[SHIFTED]} python={python}",
            made.names[NEAR],
            made.names[DEAF],
            f"{made.names[NO_PYTHON]} python=/nowhere/python",
            ABSENT,
        ]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        code, checks = doctor(made.prefix, "--hostfile", str(folder / "hosts"), *made.ssh)
        left = made.await_quiet()
        assert not left, left
        yield made, code, checks
    finally:
        made.close()


def find(checks, name, host):
    """Return the check of a name and a host, or pair of hosts."""
    found = [one for one in checks if (one["name"], one["host"]) == (name, host)]
    assert len(found) == 1, checks
    return found[0]


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_and_one_without_python_are_named(planted):
    made, code, checks = planted
    assert code == 1
    absent = find(checks, "login", ABSENT)
    assert not absent["is_ok"]
    assert "cannot be reached" in absent["value"], absent
    bare = find(checks, "login", made.names[NO_PYTHON])
    assert "no /nowhere/python there" in bare["value"], bare
    assert "python=PATH" in bare["remedy"], bare


@pytest.mark.slow
def test_a_blocked_port_between_two_hosts_is_named(planted):
    made, _, checks = planted
    near, deaf = made.names[NEAR], made.names[DEAF]
    for pair in (f"{near} to {deaf}", f"{deaf} to {near}"):
        check = find(checks, "ports", pair)
        assert not check["is_ok"], check
        assert "reaches none of" in check["value"], check
        assert "32768 to 60999" in check["remedy"], check
    assert find(checks, "ports", f"{made.names[GOOD]} to {near}")["is_ok"]


@pytest.mark.slow
def test_another_version_and_a_wrong_clock_are_named(planted):
    made, _, checks = planted
    version = find(checks, "versions", made.names[SHIFTED])
    assert version["value"].startswith("msgpack 1.0.9, here "), version
    assert "pip install msgpack==" in version["remedy"], version
    clock = find(checks, "clock", made.names[SHIFTED])
    assert not clock["is_ok"]
    assert 4.5 < float(clock["value"].split()[0]) < 5.5, clock


@pytest.mark.slow
def test_the_other_hosts_are_checked_and_measured(planted):
    made, _, checks = planted
    for index in (GOOD, SHIFTED, NEAR, DEAF):
        assert find(checks, "cores", made.names[index])["host"]
        assert find(checks, "two ranks", made.names[index])["value"].startswith("8 bytes in ")
    links = [one for one in checks if one["name"] == "link"]
    assert links
    assert all(" MB/s" in one["value"] for one in links), links
    good = {made.names[index] for index in (GOOD, SHIFTED)}
    assert good <= {name for one in links for name in one["host"].split(" to ")}, links


@pytest.mark.slow
def test_small_folders_are_named():
    """In a mount namespace of its own, whose folders are small or cannot run programs."""
    with tempfile.TemporaryDirectory(prefix="sv", dir="/tmp") as tiny:  # short, as for sockets
        check_small_folders(tiny)


def check_small_folders(tiny):
    """Look with a full folder for temporary files, and with a small /dev/shm."""
    mounts = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && "
        f"mount -t tmpfs -o size=64k,noexec tmpfs {tiny} && "
        f"head -c 64k /dev/zero > {tiny}/full; "
        f'XDG_RUNTIME_DIR= TMPDIR={tiny} exec "$@"'
    )
    prefix = ["unshare", "-m", "sh", "-c", mounts, "sh"]
    code, checks = doctor(prefix, "--no-job")
    assert code == 1
    shm = find(checks, "/dev/shm", "")
    assert not shm["is_ok"]
    assert "1 MiB" in shm["value"], shm
    folder = find(checks, "temporary folder", "")
    assert not folder["is_ok"]
    assert tiny in folder["value"], folder
    assert "noexec" in folder["value"], folder
    assert "TMPDIR" in folder["remedy"], folder
