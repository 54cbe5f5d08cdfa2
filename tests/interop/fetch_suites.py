"""Fetch the tests of other projects from their released packages, and run them over syncvar's layers.

    python -m tests.interop.fetch_suites mpi4py --folder /tmp/suites
    python -m tests.interop.fetch_suites mpi4py --folder /tmp/suites --workers 2 --modules test_comm

The packages go to a folder outside this repository. Nothing of them is copied in. Each module runs
in a job of its own. A test method that hangs ends its job; the next job goes on behind it.
"""

import argparse
import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.foreign_suites import fetch

HERE = Path(__file__).resolve().parent
MPI4PY_MODULES = (
    "test_cco_buf",
    "test_cco_vec",
    "test_cco_obj",
    "test_cco_nb_buf",
    "test_cco_nb_vec",
    "test_p2p_buf",
    "test_p2p_obj",
    "test_comm",
)
SILENCE_S = 120  # a method that takes longer hangs
JOB_S = 1800


class Module:
    """The outcomes of one test module with some number of ranks.

    Attributes:
        outcomes: Name of a method -> (word, reason); the worst word of all ranks.
    """

    RANKING = ("passed", "skipped", "wrong", "error", "hang")

    def __init__(self, name, workers, results):
        self.name, self.workers, self.results = name, workers, results
        self.outcomes = {}

    def run(self, tests):
        """Run all methods; start again behind one that hangs or ends its job."""
        while True:
            before = len(self.outcomes)
            for old in self.results.glob("rank*"):
                old.unlink()
            (self.results / "done").write_text("\n".join(self.outcomes))
            status = self._job(tests)
            self._read(hangs=status is None)
            if status == 0 or len(self.outcomes) == before:
                return

    def _job(self, tests):
        """Run one job and return its exit status; None if it hangs."""
        script = str(HERE / "foreign" / "mpi4py_instances.py")
        launch = [str(Path(sys.executable).parent / "syncvar-launch"), "--workers"]
        command = [*launch, str(self.workers), script, str(tests), self.name, str(self.results)]
        with open(self.results / "output", "ab") as output:
            job = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=self.results
            )
            begun = time.monotonic()
            last, seen = begun, -1
            while job.poll() is None:
                time.sleep(0.2)
                size = sum(one.stat().st_size for one in self.results.glob("rank*"))
                now = time.monotonic()
                if size != seen:
                    last, seen = now, size
                if now - last > SILENCE_S or now - begun > JOB_S:
                    os.killpg(job.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.wait(30)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
                    return None
        return job.returncode

    def _read(self, *, hangs):
        """Add the outcomes of a job. A method in which it stopped has not passed."""
        begun, ended = collections.Counter(), collections.Counter()
        for file in self.results.glob("rank*"):
            for line in file.read_text().splitlines():
                kind, name, *rest = line.split(" ", 3)
                if kind == "begin":
                    begun[name] += 1
                    continue
                ended[name] += 1
                word, reason = (*rest, "")[:2]
                old = self.outcomes.get(name, ("passed", ""))
                if self.RANKING.index(word) >= self.RANKING.index(old[0]):
                    self.outcomes[name] = word, reason
        stopped = [name for name in begun if ended[name] < self.workers]
        for name in stopped:
            word, reason = self.outcomes.get(name, ("passed", ""))
            if word in ("passed", "skipped"):
                word, reason = ("hang", "deadline") if hangs else ("error", "the job ended")
            self.outcomes[name] = word, reason

    def counts(self):
        """Return how many methods have each outcome."""
        return collections.Counter(word for word, _ in self.outcomes.values())


def run_mpi4py(folder, workers, modules):
    """Run test modules of mpi4py with each number of ranks; return the modules with outcomes."""
    tests = fetch("mpi4py", folder) / "test"
    found = []
    for count in workers:
        for name in modules:
            results = folder / "results" / f"{name}-{count}"
            results.mkdir(parents=True, exist_ok=True)
            module = Module(name, count, results)
            module.run(tests)
            found.append(module)
            print(row(module), flush=True)
            for method, (word, reason) in module.outcomes.items():
                if word not in ("passed", "skipped"):
                    print(f"    {word}: {method}: {reason}", flush=True)
    return found


def row(module):
    """Return one line of the table."""
    counts = module.counts()
    words = "  ".join(f"{word} {counts[word]:3}" for word in Module.RANKING)
    return f"{module.name:16} {module.workers} ranks  of {len(module.outcomes):3}  {words}"


def summary(found):
    """Return the lines of the table with a total for each number of ranks."""
    lines = [row(one) for one in found]
    for workers in sorted({one.workers for one in found}):
        counts = collections.Counter()
        for one in found:
            if one.workers == workers:
                counts += one.counts()
        words = ", ".join(f"{counts[word]} {word}" for word in Module.RANKING)
        lines.append(f"{workers} ranks: {sum(counts.values())} methods: {words}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=["mpi4py"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--modules", nargs="+", default=list(MPI4PY_MODULES))
    options = parser.parse_args()
    found = run_mpi4py(options.folder.resolve(), options.workers, options.modules)
    print("\n".join(summary(found)))
    return int(any(one.counts()["hang"] or one.counts()["wrong"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
