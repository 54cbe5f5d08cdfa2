"""Starts in odd places: long or missing TMPDIR, a lock that somebody holds, programs that a rank starts, wrappers."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

MET = """
import os
import syncvar as sv

assert os.environ.get("TF_CONFIG", "{}") == "{}"
print("sum", float(sv.all_reduce(1.0)))
"""
STARTING = """
import os, subprocess, sys
import syncvar as sv

HELPER = "import syncvar as sv; print('helper', sv.world_size())"


def run(text, **environ):
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120)


def check():
    refused = run(HELPER)
    assert refused.returncode and "is no rank itself" in refused.stderr, refused
    assert run(HELPER, SYNCVAR_WORLD_SIZE="1").stdout == "helper 1\\n", run(HELPER, SYNCVAR_WORLD_SIZE="1")
    child = os.fork()
    if child == 0:
        try:
            sv.rank()
        except sv.UsageError:
            os._exit(5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 5 << 8


check()
assert float(sv.all_reduce(1.0)) == 2.0
check()
print("own place")
"""
WRAPPER = (
    "import subprocess, sys; sys.exit(subprocess.run([sys.executable, sys.argv[1]]).returncode)"
)


@pytest.mark.parametrize("kind", ["long", "missing"])
def test_a_tmpdir_that_does_not_serve_is_passed_over(launch, tmp_path, kind):
    folder = tmp_path / ("x" * 100)
    if kind == "long":
        folder.mkdir()
    job = launch(
        MET, workers=2, env={"TMPDIR": str(folder), "XDG_RUNTIME_DIR": "", "TF_CONFIG": "{}"}
    )
    assert job.wait() == 0, str(job)
    assert job.out.count("sum 2.0") == 2, str(job)


def test_a_program_that_a_rank_starts_does_not_take_its_place(launch):
    job = launch(STARTING, workers=2)
    assert job.wait() == 0, str(job)
    assert job.out.count("own place") == 2, str(job)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_wrapper_that_closes_descriptors_works_on_several_hosts(launch, tmp_path, hosts):
    (tmp_path / "job.py").write_text(MET)
    target = ["--no-python", sys.executable, "-c", WRAPPER, str(tmp_path / "job.py")]
    job = launch(workers=2, options=["--fake-hosts", str(hosts)], target=target)
    assert job.wait() == 0, str(job)
    assert job.out.count("sum 2.0") == 2, str(job)


@pytest.mark.slow
def test_a_start_that_waits_for_a_lock_says_so_and_ends_on_sigterm(launch, runtime):
    base = runtime / "syncvar"
    base.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = launch(MET, workers=2, env={"XDG_RUNTIME_DIR": str(runtime)})
        until = time.monotonic() + 60
        while "waits for the lock" not in job.err and time.monotonic() < until:
            time.sleep(0.05)
        job.send(signal.SIGTERM)
        assert job.wait(120) == 143, str(job)
        assert f"which process {os.getpid()} holds" in job.err, str(job)
        assert "SIGTERM while the launcher waited" in job.err, str(job)
    finally:
        os.close(lock)


def test_tf_config_without_a_cluster_is_a_world_of_one():
    script = "import syncvar as sv; print(sv.rank(), sv.world_size())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TF_CONFIG": "{}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "0 1\n", done.stderr
