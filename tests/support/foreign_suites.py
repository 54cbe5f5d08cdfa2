"""Tests of Horovod and mpi4jax over our layers: fetch them, run them on several ranks, print a table.

    python -m tests.support.foreign_suites mpi4jax --workers 2
    python -m tests.support.foreign_suites horovod --workers 2 --source CHECKOUT

The tests of mpi4jax come from its released package. That of Horovod has none: `--source` is a checkout of its
repository at v0.28.1. Nothing is copied into this repository. Every job has a deadline.
"""

import argparse
import collections
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.paths import REPOSITORY

RUNNER = REPOSITORY / "tests" / "support" / "rank_scripts" / "run_foreign_tests.py"
RELEASES = {"mpi4jax": "0.9.1.post2", "horovod": "0.28.1", "mpi4py": "4.1.2"}
# Library -> folder of its tests, and files that need nothing else.
FOLDERS = {"mpi4jax": "tests", "horovod": "test"}
CHOSEN = {
    "mpi4jax": ("collective_ops/", "test_jax_transforms.py"),
    "horovod": ("parallel/test_torch.py",),
}
JOB_LIMIT_S = 900


def fetch(library, folder):
    """Return the unpacked source package of a release; download it by pip if it is not there."""
    version = RELEASES[library]
    target = folder / f"{library}-{version}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
        command += [library, "-d", str(folder), f"{library}=={version}"]
        subprocess.run(command, check=True, timeout=JOB_LIMIT_S)
        with tarfile.open(folder / f"{library}-{version}.tar.gz") as package:
            package.extractall(folder, filter="data")
    return target


class Suite:
    """The tests of a library, and how each has ended."""

    def __init__(self, library, source, workers, scratch):
        self.library, self.workers, self.scratch = library, workers, scratch
        self.folder = Path(source).resolve() / FOLDERS[library]
        self.outcomes = {}
        self.reasons = {}

    def collected(self):
        """Return the names of the tests."""
        lines = self.job(["collect", *CHOSEN[self.library]], workers=1)[0]
        names = dict.fromkeys(name for name, phase, *_ in lines if phase == "collect")
        if not names:
            raise SystemExit(f"no test found: {(self.scratch / 'output').read_text()[-2000:]}")
        return list(names)

    def job(self, tests, workers):
        """Run tests in a job, and return the lines of each rank."""
        results = self.scratch / "results"
        for old in self.scratch.glob("results.*"):
            old.unlink()
        launcher = [sys.executable, "-m", "syncvar_launcher", "--workers", str(workers)]
        options = ["--timeout", str(JOB_LIMIT_S), "--start-method", "spawn"]
        command = [
            *launcher,
            *options,
            str(RUNNER),
            self.library,
            str(results),
            str(self.folder),
            *tests,
        ]
        with (self.scratch / "output").open("a") as output:
            subprocess.run(
                command,
                stdout=output,
                stderr=output,
                timeout=JOB_LIMIT_S + 60,
                check=False,
                cwd=REPOSITORY,
            )
        files = [self.scratch / f"results.{rank}" for rank in range(workers)]
        return [
            [json.loads(line) for line in one.read_text().splitlines()] if one.exists() else []
            for one in files
        ]

    def run(self):
        """Run all tests: a new job begins after each failure."""
        waiting = self.collected()
        while waiting:
            file = self.scratch / "tests"
            file.write_text("\n".join(waiting))
            ranks = [self.ends(lines) for lines in self.job([str(file)], self.workers)]
            done = 0
            for name in waiting:
                ends = [one.get(name) for one in ranks]
                if not any(ends):
                    break
                done += 1
                self.outcomes[name] = self.combined(ends)
                if self.outcomes[name] not in ("passed", "skipped"):
                    break
            if not done:
                self.outcomes[waiting[0]] = "hangs"
                done = 1
            waiting = waiting[done:]
        return collections.Counter(self.outcomes.values())

    def ends(self, lines):
        """Return test -> how it ended on a rank."""
        found = {}
        for name, phase, *rest in lines:
            if phase == "collect":
                continue
            outcome, reason = rest
            if outcome in ("failed", "broken"):
                found[name] = outcome
                self.reasons.setdefault(name, reason.strip().rpartition("\n")[2])
            elif phase == "call" or outcome == "skipped":
                found.setdefault(name, outcome)
        return found

    def combined(self, ends):
        """Return how a test ended, from all ranks."""
        for outcome in ("failed", "broken"):
            if outcome in ends:
                return "failed"
        if None in ends:
            return "hangs"
        return "passed" if "passed" in ends else "skipped"


def main():
    """Run a suite and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=FOLDERS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--source", help="folder of the unpacked source, instead of the released package"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="foreign-") as made:
        scratch = Path(made)
        source = arguments.source or fetch(arguments.library, scratch)
        suite = Suite(arguments.library, source, arguments.workers, scratch)
        counts = suite.run()
    total = sum(counts.values())
    print(f"| {arguments.library} | {arguments.workers} ranks | {total} tests | {dict(counts)} |")
    for name, outcome in suite.outcomes.items():
        if outcome not in ("passed", "skipped"):
            print(f"{outcome}: {name}: {suite.reasons.get(name, '')[:300]}")


if __name__ == "__main__":
    main()
