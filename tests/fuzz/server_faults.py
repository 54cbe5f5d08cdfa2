"""Kill any server or worker of a job at random moments, over and over; what was pushed must be there exactly once.

    python -m tests.fuzz.server_faults          # 200 runs, seeds 0 to 199
    python -m tests.fuzz.server_faults 50 1000  # 50 runs from seed 1000

Each run is a job of three workers and three servers with copies. Its seed says who is killed and when: from the first moment of
the job, before anybody serves, to its last. At most one server is killed, for with one copy a second one would take variables
along. Workers push integers to all servers in one transaction, count their steps there, and go on where they were when they are
started again; at the end each of them reads all sums.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.launching import LENIENT
from tests.support.paths import PROFILE, RANK_SCRIPTS

WORKERS, SERVERS, STEPS, RESTARTS = 3, 3, 40, 8

SCRIPT = f"""
import os, time
import numpy as np
from server_arrays import *

way, servers = edge(), range(ME.servers)
for count in range(begun(way, servers, np.zeros(100, np.int64)), {STEPS}):
    step(way, servers, np.full(100, (ME.rank + 1) * (count + 1), np.int64))
    time.sleep(0.005)
exact, until = {STEPS * (STEPS + 1) // 2 * WORKERS * (WORKERS + 1) // 2}, time.monotonic() + 60
while True:
    found = [sorted(set(map(int, one))) for one in pulled(way, servers)]
    if found == [[exact]] * len(servers):
        break
    assert time.monotonic() < until and max(map(max, found)) <= exact, (found, exact)
    time.sleep(0.01)
print("exact", flush=True)
way.close()
"""


def processes(launcher):
    """Return the ranks and servers of a job that run: ("server", index) or ("rank", rank) -> process."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) != launcher:
                continue
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
            environ = (status.parent / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if b"server" in words:
            found["server", int(words[words.index(b"server") + 1])] = int(status.parent.name)
        else:
            rank = next(
                (int(one[13:]) for one in environ if one.startswith(b"SYNCVAR_RANK=")), None
            )
            if rank is not None:
                found["rank", rank] = int(status.parent.name)
    return found


def run(seed, folder):
    """Run one job; returns who was killed when, and the seconds that it took.

    Raises:
        AssertionError: It did not end in order, or not all workers saw the exact sums.
    """
    dice = random.Random(seed)
    script = Path(folder) / "script.py"
    script.write_text(SCRIPT)
    count = dice.randint(1, 3)
    victims = [
        ("server", dice.randrange(SERVERS)),
        *(("rank", dice.randrange(WORKERS)) for _ in range(2)),
    ]
    dice.shuffle(victims)
    moments = sorted(dice.uniform(0.0, 2.0) for _ in range(count))
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--config",
        str(PROFILE),
        "--workers",
        str(WORKERS),
        "--servers",
        str(SERVERS),
        "--server-replicas",
        "1",
        "--max-restarts",
        str(RESTARTS),
        "--start-method",
        "spawn",
        "--timeout",
        "120",
        "--no-timestamps",
        str(script),
    ]
    path = os.pathsep.join([str(RANK_SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {
        **os.environ,
        **LENIENT,
        "PYTHONPATH": path,
        "SYNCVAR_RESTART_DELAY_S": "0.05",
    }
    began, done = time.monotonic(), []
    with (Path(folder) / "out").open("w+b") as out:
        job = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=environ, cwd=folder)
        try:
            # Moments count from when all have been started: before, there is nobody to kill.
            while (
                job.poll() is None
                and len(processes(job.pid)) < WORKERS + SERVERS
                and time.monotonic() - began < 60
            ):
                time.sleep(0.002)
            started = time.monotonic()
            for victim, moment in zip(victims, moments, strict=False):
                while time.monotonic() - started < moment and job.poll() is None:
                    time.sleep(0.001)
                pid = processes(job.pid).get(victim)
                if pid is not None and job.poll() is None:
                    try:
                        os.kill(pid, signal.SIGKILL)
                        done.append(
                            f"{victim[0]} {victim[1]} at {time.monotonic() - started:.2f} s"
                        )
                    except ProcessLookupError:
                        pass
            job.wait(150)
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
        out.seek(0)
        text = out.read().decode(errors="replace")
    # A worker that is killed after it has seen the sums sees them again.
    seen = {line.split("]")[0] for line in text.splitlines() if line.endswith("] exact")}
    assert job.returncode == 0, f"seed {seed}: {done}, exit {job.returncode}\n{text}"
    assert len(seen) == WORKERS, (
        f"seed {seed}: {done}, only {sorted(seen)} have seen the sums\n{text}"
    )
    return done, time.monotonic() - began


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began, killed = time.monotonic(), 0
    for seed in range(first, first + runs):
        with tempfile.TemporaryDirectory(prefix="sv-") as folder:
            done, seconds = run(seed, folder)
        killed += len(done)
        print(f"seed {seed}: {', '.join(done) or 'nobody'}; {seconds:.1f} s", flush=True)
    print(f"{runs} runs exact, {killed} processes killed, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
