"""Kill servers and workers while a job starts: from its first process on, at random moments.

    python -m tests.fuzz.killed_starts          # 100 runs, seeds 0 to 99
    python -m tests.fuzz.killed_starts 20 1000  # 20 runs from seed 1000
    python -m tests.fuzz.killed_starts 20 0 helpers  # kill what the launcher starts for itself

The seed chooses the layout, the victims and the moments. Each run ends in one of two ways. Either
all workers read the exact sums, or the launcher names a process that was killed and ends with
another code than 0. Nothing of a job is left afterwards.
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.support.launching import PATIENT
from tests.support.paths import PROFILE

WORKERS, SERVERS, STEPS = 2, 2, 4
LIMIT_S = 120.0  # of a run that takes about 2 s
AT_ONCE = 4
HELPERS = {  # what the launcher starts for itself, by a word of the command line
    "guardian": b"process_sessions.py",
    "fork server": b"syncvar.bootstrap.fork_server",
    "agent": b"syncvar_launcher.hosts.agent_main",
}
HELPER_WORDS = {  # what the launcher says when one of them is missed
    "guardian": (),
    "fork server": ("was killed by signal 9 (SIGKILL)",),
    "agent": ("its agent has ended", "the agent ended with -9"),
}

SCRIPT = f"""
import sys, time
import numpy as np
import syncvar as sv

strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
with strategy.scope():
    table = sv.Variable(np.zeros((20_000, 2), np.int64), name="table")
    done = sv.Variable(np.zeros({WORKERS}, np.int64), name="done")
me = strategy.replica_id
if "barrier" in sys.argv:
    sv.barrier()
for step in range(int(done.lookup([me])[0]), {STEPS}):
    with strategy.transaction():
        table.assign_add(np.full((20_000, 2), step + 1))
        done.scatter_add([me], [1])
until = time.monotonic() + 40
while not (done.numpy() == {STEPS}).all():
    assert time.monotonic() < until, done.numpy()
    time.sleep(0.01)
assert (table.numpy() == {WORKERS * STEPS * (STEPS + 1) // 2}).all(), table.numpy()
print("exact", flush=True)
"""


class Kill(NamedTuple):
    """One kill: the victim, and the moment.

    Args:
        victim: ("server", index), ("rank", rank), or ("helper", name).
        process_count: Processes of the job that run when the delay begins.
        delay: How long it is, in times that the launcher took to start the first process.
    """

    victim: tuple[str, int]
    process_count: int
    delay: float


def draw(dice):
    """Return the options of the launcher, the kills, and the arguments of the script."""
    options = ["--start-method", dice.choice(["spawn", "fork"])]
    options += ["--max-restarts", dice.choice(["0", "4"])]
    options += dice.choice([[], ["--fake-hosts", "2"]])
    servers = [("server", index) for index in range(SERVERS)]
    ranks = [("rank", rank) for rank in range(WORKERS)]
    victims = dice.choice([[dice.choice(servers)], [dice.choice(ranks)], servers + ranks])
    dice.shuffle(victims)
    kills = [
        Kill(victim, dice.randint(1, WORKERS + SERVERS), dice.uniform(0.0, 5.0))
        for victim in victims[: dice.choice([1, 2, 2, 3])]
    ]
    return options, kills, dice.choice([[], ["barrier"]])


def draw_helper(dice):
    """Return the options of the launcher, the kill of a helper, and the arguments of the script."""
    name = dice.choice(list(HELPERS))
    method = "fork" if name == "fork server" else dice.choice(["spawn", "fork"])
    options = ["--start-method", method, "--max-restarts", dice.choice(["0", "4"])]
    alone = [] if name == "agent" else ["--fake-hosts=2"]
    options += dice.choice([alone or ["-H", "localhost:2"], ["-H", "localhost:2"]])
    kill = Kill(("helper", name), 0, dice.uniform(0.0, 5.0))
    return options, [kill], dice.choice([[], ["barrier"]])


def helpers(launcher):
    """Return the helpers of a launcher: ("helper", name) -> pid; of several the last.

    A child that a helper has just forked still has the helper's command line. It is not one.
    """
    parents, words = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1])
            words[int(entry.name)] = (entry / "cmdline").read_bytes()
    found = {}
    for pid, line in words.items():
        above = parents[pid]
        while above in parents and above != launcher:
            above = parents[above]
        for name, word in HELPERS.items():
            if above == launcher and word in line and word not in words.get(parents[pid], b""):
                found["helper", name] = pid
    return found


def started(events):
    """Return the processes that have been started: ("server", index) or ("rank", rank) -> pid."""
    found = {}
    with contextlib.suppress(OSError):
        for line in events.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                kind = event["event"].removesuffix("_start")
                if kind in ("server", "rank") and event["event"].endswith("_start"):
                    found[kind, event[kind]] = event["pid"]
    return found


def left_behind(folder, launcher):
    """Return the processes of a job beside its launcher, by their environment."""
    found = []
    mark = f"SYNCVAR_TEST_RUN={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            has_mark = mark in (entry / "environ").read_bytes().split(b"\0")
            if has_mark and int(entry.name) != launcher and (entry / "cmdline").read_bytes():
                found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found


def kill_at_moments(job, events, kills):
    """Kill the victims of a job one after the other; return what was done, in words."""
    done, begins = [], {}
    waiting, unit, began = list(kills), 0.0, time.monotonic()
    has_helper = any(kill.victim[0] == "helper" for kill in kills)
    while waiting and job.poll() is None:
        found, now = helpers(job.pid) if has_helper else started(events), time.monotonic()
        unit = unit or (now - began if found else 0.0)
        for kill in list(waiting):
            if len(found) >= kill.process_count:
                begins.setdefault(kill, now)
            if kill in begins and now >= begins[kill] + kill.delay * unit and kill.victim in found:
                waiting.remove(kill)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[kill.victim], signal.SIGKILL)
                    done.append(kill)
        time.sleep(0.002)
    return done


def run(seed, folder, draw=draw):
    """Run one job; return its exit code, the kills, and the seconds that it took.

    Args:
        seed: Of all that is chosen.
        folder: Where the job gets a folder of its own.
        draw: `draw` or `draw_helper`.

    Raises:
        AssertionError: It ended neither with exact sums nor with a failure that names a victim,
            or it left something behind.
    """
    options, kills, arguments = draw(random.Random(seed))
    folder = Path(folder) / f"run{seed}"
    (folder / "runtime").mkdir(parents=True, mode=0o700)
    (folder / "script.py").write_text(SCRIPT)
    events = folder / "events"
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--config",
        str(PROFILE),
        "--no-timestamps",
        "--workers",
        str(WORKERS),
        "--servers",
        str(SERVERS),
        "--server-replicas",
        "1",
        "--events",
        str(events),
        *options,
        str(folder / "script.py"),
        *arguments,
    ]
    environ = {
        **os.environ,
        "SYNCVAR_RESTART_DELAY_S": "0.05",
        **PATIENT,
        "SYNCVAR_HANDSHAKE_TIMEOUT_S": "10",
        "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "60",
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
        "SYNCVAR_TEST_RUN": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    began = time.monotonic()
    with (folder / "out").open("w+b") as out:
        job = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=environ, cwd=folder)
        try:
            done = kill_at_moments(job, events, kills)
            code = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            job.kill()
            job.wait()
    seconds = time.monotonic() - began
    text = (folder / "out").read_text(errors="replace")
    case = f"seed {seed}: {options}, {arguments}, {done}, exit {code} after {seconds:.1f} s\n{text}"
    check(code, text, done, case)
    until = time.monotonic() + 30
    while left := left_behind(folder, job.pid):
        assert time.monotonic() < until, f"{left} are left of {case}"
        time.sleep(0.01)
    return code, (options, arguments, *done), seconds


def check(code, text, done, case):
    """Fail unless a job was exact, or failed and named a victim."""
    assert code is not None, f"no end within {LIMIT_S:g} s: {case}"
    if code == 0:  # a worker that is killed after it has read the sums reads them again
        exact = {one.split("]")[0] for one in text.splitlines() if one.endswith("] exact")}
        assert len(exact) == WORKERS, case
        return
    helper = [name for (kind, name), _, _ in done if kind == "helper"]
    if helper:
        assert any(one in text for one in HELPER_WORDS[helper[0]]), case
        assert "Traceback" not in text, case
        return
    names = [f"{kind} {number}" for (kind, number), _, _ in done]
    report = [
        one
        for one in text.splitlines()
        if one.startswith("syncvar: ") and "is started again alone" not in one
    ]
    assert any(one.startswith(f"syncvar: {name} ") for one in report for name in names), case
    assert code == 128 + signal.SIGKILL, case
    assert "AssertionError" not in text, case
    assert "InternalError" not in text, case


def run_many(seeds, folder, draw=draw):
    """Run several jobs, some at the same time; return the result of each."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda seed: run(seed, folder, draw), seeds))


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    chosen = draw_helper if "helpers" in sys.argv else draw
    began, faults = time.monotonic(), 0
    codes = collections.Counter()
    with (
        tempfile.TemporaryDirectory(prefix="sv-") as folder,
        concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        runs = [pool.submit(run, seed, folder, chosen) for seed in range(first, first + count)]
        for one in runs:
            try:
                code, done, seconds = one.result()
            except AssertionError as error:
                faults += 1
                print(error, flush=True)
            else:
                codes[code] += 1
                print(f"exit {code} after {seconds:.1f} s: {done}", flush=True)
    print(f"{faults} faults; ends by code {dict(codes)}; {time.monotonic() - began:.0f} s")
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
