"""Kill ranks of the example at random moments, let the launcher start them again, and compare the last weights with those of a run
that was left alone. A script: python -m tests.fuzz.repeat_restarts [SEED [SECONDS [LAUNCH OPTION...]]], for instance 1 600 --fake-hosts 2

A line for each run: workers, who was sent which signal, how often they were started again. Ends with 1 at the first difference.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import PROFILE

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
LIMIT_S = 120.0


def ranks(launcher):
    """Return the ranks that run: rank -> process."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {
            int(one[13:]): int(child) for one in variables if one.startswith(b"SYNCVAR_RANK=")
        }
    return found


def run(workers, folder, draw, kills, options):
    """Run the example once; return (exit code, its last line, whom it was sent what, all it wrote)."""
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--config",
        str(PROFILE),
        "--no-timestamps",
        "-n",
        str(workers),
        "--max-restarts",
        "20",
        *options,
        "-m",
        "syncvar.examples.resume",
        str(folder),
        "--steps",
        "160",
        "--pause",
        "0.003",
    ]
    told = []
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, cwd=folder.parent)
        for _ in range(kills):
            time.sleep(draw.uniform(0.1, 1.6))
            alive = sorted(ranks(process.pid).items()) if process.poll() is None else []
            if alive:
                rank, pid = draw.choice(alive)
                number = draw.choice(SIGNALS)
                told.append((rank, number.name))
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    told.pop()
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    last = [one for one in text.split("\n") if "weights_sha256=" in one]
    return code, last, told, text


def main(seed=1, seconds=60.0, *options):
    draw = random.Random(int(seed))
    until = time.monotonic() + float(seconds)
    expected = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = (
            folder / "runtime"
        )  # not where the jobs start: a folder "syncvar" there would hide the package
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        for number in range(sys.maxsize):
            if time.monotonic() >= until:
                return 0
            workers = draw.choice((2, 3))
            if workers not in expected:
                code, expected[workers], _, text = run(
                    workers, folder / f"whole-{workers}", draw, 0, options
                )
                if code != 0:
                    sys.exit(text)
            code, last, told, text = run(
                workers, folder / f"run-{number}", draw, draw.randint(1, 4), options
            )
            left = [entry for entry in os.listdir(runtime / "syncvar") if entry != ".lock"]
            is_same = code == 0 and last == expected[workers] and not left
            line = {
                "workers": workers,
                "told": told,
                "starts": text.count("as attempt"),
                "exit": code,
                "left": left,
                "same": is_same,
            }
            print(json.dumps(line), flush=True)
            if not is_same:
                sys.stdout.write(text)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
