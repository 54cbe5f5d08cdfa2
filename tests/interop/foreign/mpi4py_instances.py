"""Run the test methods of one test module of mpi4py on this rank, over syncvar's layer.

    syncvar-launch --workers 2 tests/interop/foreign/mpi4py_instances.py FOLDER MODULE RESULTS

FOLDER holds mpi4py's tests, RESULTS gets a file for each rank: a line `begin NAME` and a line
`end NAME OUTCOME REASON` for each method. Methods in RESULTS/done are left out.
"""

import importlib
import os
import sys
import unittest
from pathlib import Path

from syncvar.compat.mpi4py import install


class Outcome(unittest.TestResult):
    """Collects the outcome of one test method and of its parts."""

    def __init__(self):
        super().__init__()
        self.reason = ""

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.reason = reason

    def addError(self, test, err):
        super().addError(test, err)
        self.reason = self.reason or f"{err[0].__name__}: {err[1]}"

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.reason = self.reason or f"{err[0].__name__}: {err[1]}"

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.reason = self.reason or f"{err[0].__name__}: {err[1]} in {subtest}"

    def word(self):
        if self.errors:
            return "error"
        if self.failures:
            return "wrong"
        return "skipped" if self.skipped else "passed"


def methods(suite):
    """Yield the test methods of a suite, in their order."""
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from methods(one)
        else:
            yield one


def main(folder, module, results):
    install()
    sys.path.insert(0, folder)
    for name in ("cupy", "numba"):
        sys.modules[name] = None
    from mpi4py import MPI

    done = set(Path(results, "done").read_text().split())
    tests = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module))
    world = MPI.COMM_WORLD
    with open(os.path.join(results, f"rank{world.rank}"), "a", buffering=1) as lines:
        for test in methods(tests):
            name = test.id().replace(f"{module}.", "", 1)
            if name in done:
                continue
            lines.write(f"begin {name}\n")
            outcome = Outcome()
            test.run(outcome)
            reason = " ".join(outcome.reason.split())[:300]
            lines.write(f"end {name} {outcome.word()} {reason}\n")
            world.Barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
