"""`syncvar doctor` on this machine, with faults that are really there."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import LIMIT_S, free_ports
from tests.support.loopback_sshd import Sshd, why_no_sshd


def doctor(*options, **keywords):
    """Run the command; return its exit code and name -> checks."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("SYNCVAR_")}
    done = subprocess.run(
        [sys.executable, "-m", "syncvar", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        **{**keywords, "env": {**environ, **keywords.get("env", {})}},
    )
    assert done.returncode in (0, 1), done.stderr
    found = {}
    for check in json.loads(done.stdout)["checks"]:
        found.setdefault(check["name"], []).append(check)
    return done.returncode, found


def limit():
    """Plant faults in the process of the doctor."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


SLURM_BESIDE_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Return the checks of a process with several faults at once."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "hosts").write_text("a slots=2\nb slots=many\n")
    (folder / "state/syncvar").mkdir(parents=True)
    (folder / "state/syncvar").chmod(0o777)
    environ = {
        "OMP_NUM_THREADS": "4096",
        "SYNCVAR_CALL_RUNNER": "python",
        "SYNCVAR_LOST_AFTER": "5",
        "XDG_STATE_HOME": str(folder / "state"),
        **SLURM_BESIDE_TORCHRUN,
    }
    code, found = doctor(
        "--hostfile", str(folder / "hosts"), "--no-job", preexec_fn=limit, env=environ
    )
    assert code == 1
    return found


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("open files", "64 allowed", "limits.conf"),
        ("locked memory", "0 B", "ulimit -l"),
        ("BLAS threads", "OMP_NUM_THREADS=4096", "unset OMP_NUM_THREADS"),
        ("C extension", "not used", "SYNCVAR_CALL_RUNNER"),
        ("settings", "SYNCVAR_CALL_RUNNER", "SYNCVAR_LOST_AFTER_S"),
        ("launcher around this process", "srun", "unset the variables of the launcher"),
        ("flight records", "in /", "others may write"),
        ("hosts", "hosts:2:9", "slots"),
    ],
)
def test_a_planted_fault_is_named(faulty, name, value, remedy):
    (check,) = faulty[name]
    assert not check["is_ok"], check
    assert value in check["value"], check
    assert remedy in check["remedy"], check
    assert check["reason"]


def test_an_affinity_of_one_core_is_named(faulty):
    (check,) = faulty["cores"]
    assert check["is_ok"] is ((os.cpu_count() or 1) == 1), check
    assert check["value"].startswith("1 of "), check


def test_a_job_of_two_ranks_measures_this_machine():
    _, found = doctor()
    (pair,) = found["two ranks"]
    assert " MB/s over shared memory" in pair["value"], pair
    (copy,) = found["single copy between ranks"]
    assert copy["value"] == "works between 2 ranks"
    assert "job" not in found


@pytest.mark.slow
def test_a_host_that_is_unknown_and_one_that_refuses_the_key_stop_no_other(tmp_path_factory):
    assert not why_no_sshd()
    good, bad = (
        Sshd(tmp_path_factory.mktemp("sshd"), free_ports(), takes=takes) for takes in (True, False)
    )
    try:
        folder = tmp_path_factory.mktemp("hosts")
        config = folder / "config"
        lines = []
        for name, sshd in (("good", good), ("bad", bad)):
            own = sshd.ssh[1].partition("-F ")[2]
            settings = Path(own).read_text().replace("\n", "\n  ")
            lines.append(f"Host {name}\n  HostName 127.0.0.1\n  Port {sshd.port}\n  {settings}\n")
        config.write_text("".join(lines))
        (folder / "hosts").write_text("good\nbad\nnosuch.invalid\n")
        code, found = doctor(
            *("--hostfile", str(folder / "hosts"), "--ssh", f"ssh -F {config}"),
            env={"SYNCVAR_LAUNCH_SSH_ALWAYS": "1"},
        )
    finally:
        good.close()
        bad.close()
    assert code == 1
    logins = {check["host"]: check for check in found["login"]}
    assert logins["good"]["is_ok"], logins
    assert "the login is refused" in logins["bad"]["value"], logins
    assert "its name is unknown" in logins["nosuch.invalid"]["value"], logins
    assert [check["host"] for check in found["versions"]] == ["good"], found
    assert [check["host"] for check in found["two ranks"]] == ["good"], found


@pytest.mark.slow
def test_the_hosts_of_a_schedulers_job_are_measured(tmp_path):
    blaunch = tmp_path / "blaunch"  # in place of LSF's: the other host is this machine too
    blaunch.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    blaunch.chmod(0o755)
    own = socket.gethostname()
    _, found = doctor(
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LSB_JOBID": "7",
            "LSB_MCPU_HOSTS": f"{own} 2 127.0.0.1 2",
        }
    )
    (scheduler,) = found["scheduler"]
    assert "job 7 of LSF" in scheduler["value"], scheduler
    assert "blaunch starts ranks" in scheduler["value"], scheduler
    assert [check["host"] for check in found["versions"]] == [own], found
    assert {check["host"] for check in found["two ranks"]} == {"", own}, found
    assert "job" not in found
