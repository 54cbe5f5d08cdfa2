"""Run all fault tests several times in a row and check that nothing is left behind.

    python -m tests.fuzz.repeat_faults          # ten times
    python -m tests.fuzz.repeat_faults 3 -x     # three times; further arguments go to pytest

Each run is a pytest of its own. Between runs it looks for what none of them may leave: processes that carry the mark
of the tests, private directories of jobs, names in /dev/shm. At the end it prints the longest time of each bound.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import REPOSITORY, TESTS


def marked():
    """Return the processes that some test of this user's has started and not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if (
                b"SYNCVAR_TEST_RUN=" + str(os.getpid()).encode() in path.read_bytes()
                and int(path.parent.name) != os.getpid()
            ):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def look(place):
    """Return the runtime directories of our test sessions, and the names in /dev/shm."""
    return {str(path) for path in (*place.iterdir(), *Path("/dev/shm").iterdir())}


def main():
    """Return 0 when every run has passed and left nothing."""
    numbers = [argument for argument in sys.argv[1:] if argument.isdigit()]
    further = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    times = int(numbers[0]) if numbers else 10
    place = Path(tempfile.mkdtemp(prefix="svr-", dir="/tmp"))  # short, because of the sockets in it
    os.environ |= {"SYNCVAR_TEST_RUN": str(os.getpid()), "SYNCVAR_TEST_RUNTIME": str(place)}
    passed, longest = 0, {}
    for run in range(1, times + 1):
        began, before = time.monotonic(), look(place)
        with tempfile.NamedTemporaryFile("r", suffix=".tsv") as bounds:
            files = sorted(
                str(path) for path in (TESTS / "integration" / "faults").glob("test_faults_*.py")
            )
            ended = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "--tb=short",
                    "-p",
                    "no:cacheprovider",
                    *files,
                    *further,
                ],
                cwd=REPOSITORY,
                env={**os.environ, "SYNCVAR_TEST_BOUNDS": bounds.name},
                capture_output=True,
                text=True,
                check=False,
            )
            for line in bounds:
                name, seconds, bound = line.rstrip("\n").split("\t")
                longest[name] = max(longest.get(name, (0.0, 0.0)), (float(seconds), float(bound)))
        left = [*(f"process {pid}" for pid in marked()), *sorted(look(place) - before)]
        ok = ended.returncode == 0 and not left
        passed += ok
        last = (ended.stdout.strip().split("\n") or [""])[-1]
        print(
            f"run {run} of {times}: {last} ({time.monotonic() - began:.0f} s), left behind: {', '.join(left) or 'nothing'}",
            flush=True,
        )
        if not ok:
            print(re.sub(r"(?m)^", "    ", ended.stdout[-20_000:]), flush=True)
    shutil.rmtree(place)
    print(f"\n{'longest of all runs':<50} {'s':>8} {'bound':>8}")
    for name, (seconds, bound) in sorted(longest.items()):
        print(f"{name:<50} {seconds:>8.3f} {bound:>8g}{'  over' if seconds > bound else ''}")
    print(f"\n{passed} of {times} runs passed and left nothing behind")
    return 0 if passed == times else 1


if __name__ == "__main__":
    raise SystemExit(main())
