"""Start jobs of all kinds beside busy loops, again and again, and look for one that does not end.

    python -m tests.fuzz.repeat_starts --starts 20000 --load 20 --seed 1

Each job is small and ends by itself. For one that has not ended in time, the program prints what it has written, the
stacks that `syncvar stacks` shows, the state of each of its processes, and the stacks that Python writes on SIGABRT.
Then it kills the job and goes on. The exit code is 1 where a job did not end, or ended otherwise than it should.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 300.0  # of a job that takes about a second
SUM = "import syncvar as sv\nassert sv.all_reduce(1) == sv.world_size()\nprint('exact')\n"
FAILS_ONCE = (
    "import os, sys\nif os.environ['SYNCVAR_RESTARTS'] == '0' and os.environ['SYNCVAR_RANK'] == '1':\n    sys.exit(3)\n"
    + SUM
)
HELD = """
import syncvar as sv
with sv.ParameterServerStrategy().scope():
    one = sv.Variable([0.0, 0.0], name="one")
one.assign_add([1.0, 1.0])
print("exact")
"""
CALLER = "import syncvar as sv\ndef work():\n    return sv.all_reduce(1)\nif __name__ == '__main__':\n    assert sv.run(work, workers=2) == [2, 2]\n    print('exact')\n"


class Kind(NamedTuple):
    """One kind of a start.

    Args:
        options: Of the launcher; None for a script that plain Python runs.
        script: What runs.
        is_module: It is named by `-m`.
        count: How many lines "exact" it writes.
        transport: The setting of that name.
    """

    options: tuple[str, ...] | None
    script: str = SUM
    is_module: bool = False
    count: int = 2
    transport: str = "auto"


KINDS = {
    "auto": Kind(("--workers", "2")),
    "fork": Kind(("--workers", "2", "--start-method", "fork")),
    "spawn": Kind(("--workers", "2", "--start-method", "spawn")),
    "module": Kind(("--workers", "2"), is_module=True),
    "spawned module": Kind(("--workers", "3", "--start-method", "spawn"), is_module=True, count=3),
    "sv.run": Kind(None, CALLER, count=1),
    "alone": Kind(None, count=1),
    "one worker": Kind(("--workers", "1"), count=1),
    "four workers": Kind(("--workers", "4"), count=4),
    "servers": Kind(("--workers", "2", "--servers", "1"), HELD),
    "fake hosts": Kind(("--workers", "2", "--fake-hosts", "2")),
    "program": Kind(("--workers", "2", "--no-python", sys.executable)),
    "program on fake hosts": Kind(
        ("--workers", "2", "--fake-hosts", "2", "--no-python", sys.executable)
    ),
    "restarted": Kind(("--workers", "2", "--max-restarts", "1"), FAILS_ONCE),
    "sockets": Kind(("--workers", "2"), transport="zmq"),
}


class End(NamedTuple):
    """How one start ended.

    Args:
        kind: Its name in `KINDS`.
        seconds: How long it took.
        trouble: What was wrong, with all that is known; empty where nothing was.
        is_hang: It did not end.
    """

    kind: str
    seconds: float
    trouble: str = ""
    is_hang: bool = False


def command(kind, folder):
    """Return the command line of a start."""
    (folder / "job.py").write_text(kind.script)
    if kind.options is None:
        return [sys.executable, "job.py"]
    target = ["-m", "job"] if kind.is_module else ["job.py"]
    return [sys.executable, "-m", "syncvar_launcher", *kind.options, *target]


def start(name, folder, limit_s):
    """Start one job, and wait for its end."""
    kind = KINDS[name]
    folder.mkdir(parents=True)
    mark = str(folder)
    environ = {
        **os.environ,
        "PYTHONFAULTHANDLER": "1",
        "SYNCVAR_RESTART_DELAY_S": "0.05",
        "SYNCVAR_TEST_START": mark,
        "SYNCVAR_TRANSPORT": kind.transport,
        "XDG_STATE_HOME": str(folder / "state"),
    }
    began = time.monotonic()
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            command(kind, folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environ,
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        trouble = f"{name}: no end after {limit_s:g} s\n{known(process, mark)}"
        return End(name, time.monotonic() - began, f"{trouble}\n{text_of(folder)}", is_hang=True)
    seconds = time.monotonic() - began
    text = text_of(folder)
    is_right = code == 0 and text.count("exact") == kind.count
    return End(name, seconds, "" if is_right else f"{name}: exit code {code}\n{text}")


def text_of(folder):
    """Return what a job has written."""
    return (folder / "out").read_text(errors="replace")


def processes_of(mark):
    """Return the processes of a job, by their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SYNCVAR_TEST_START={mark}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found


def known(process, mark):
    """Return what can be known of a job that does not end; kill it."""
    lines, pids = [], processes_of(mark)
    for pid in pids:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if b"syncvar_launcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ask = [sys.executable, "-m", "syncvar", "stacks", str(pid)]
                asked = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
                lines += [asked.stdout, asked.stderr]
    for pid in pids:
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}")
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            waits = (place / "wchan").read_text()
            lines.append(
                f"process {pid}, parent {fields[1]}, state {fields[0]}, waits in {waits}: {words}"
            )
    for pid in sorted(
        pids, key=process.pid.__eq__
    ):  # the launcher last: it passes on what the ranks write
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGABRT)
        time.sleep(0.5)
    for pid in processes_of(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    return "\n".join(lines)


@contextlib.contextmanager
def busy_loops(count):
    """Let so many processes compute; each ends with this one."""
    text = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    loops = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", text, str(os.getpid())])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


def run_many(count, load, seed, *, limit_s=LIMIT_S, at_once=2, kinds=tuple(KINDS)):
    """Start so many jobs; yield the end of each.

    Args:
        count: How many.
        load: How many busy loops run beside them.
        seed: Of the order of the kinds; all come equally often.
        limit_s: The longest wait for one, in seconds.
        at_once: How many jobs run at the same time.
        kinds: Names in `KINDS`.
    """
    names = [kinds[number % len(kinds)] for number in range(count)]
    random.Random(seed).shuffle(names)
    with (
        tempfile.TemporaryDirectory(prefix="sv-") as folder,
        busy_loops(load),
        concurrent.futures.ThreadPoolExecutor(at_once) as pool,
    ):
        runs = [
            pool.submit(start, name, Path(folder) / str(number), limit_s)
            for number, name in enumerate(names)
        ]
        for one in concurrent.futures.as_completed(runs):
            yield one.result()


def main():
    """Start jobs, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--load", type=int, default=0, help="busy loops beside the jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="longest wait for one job, in seconds"
    )
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time")
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, separated by commas")
    chosen = parser.parse_args()
    slowest, counts, hangs, wrong = End("", 0.0), collections.Counter(), 0, 0
    options = {
        "limit_s": chosen.limit,
        "at_once": chosen.at_once,
        "kinds": tuple(chosen.kinds.split(",")),
    }
    for end in run_many(chosen.starts, chosen.load, chosen.seed, **options):
        counts[end.kind] += 1
        slowest = max(slowest, end, key=lambda one: one.seconds)
        hangs += end.is_hang
        wrong += bool(end.trouble) and not end.is_hang
        if end.trouble:
            print(f"--- {end.trouble}", flush=True)
        if sum(counts.values()) % 100 == 0:
            print(f"{sum(counts.values())} starts, {hangs} hangs, {wrong} wrong ends", flush=True)
    started = sum(counts.values())
    print(
        f"{started} started, {started - hangs} ended, {wrong} of them wrong; {dict(sorted(counts.items()))}"
    )
    print(f"the slowest took {slowest.seconds:.1f} s: {slowest.kind}")
    return int(hangs + wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
