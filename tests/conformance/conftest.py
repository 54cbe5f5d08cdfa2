"""The launches of the conformance cases, one for each number of replicas, and their report by category."""

import collections
import time

import collection
import conductor
import pytest

_REPORT = pytest.StashKey()


@pytest.fixture(scope="session")
def outcomes(pytestconfig):
    """Return a function: number of replicas -> outcomes by id of all its cases, from one launch over real processes."""
    done = pytestconfig.stash.setdefault(_REPORT, {})
    cases = [case for case in collection.load() if not collection.waits(case)]

    def run(replicas):
        if replicas not in done:
            began = time.monotonic()
            launches = []
            mine = [case for case in cases if case["replicas"] == replicas]
            found = conductor.conduct(mine, launches=launches)
            done[replicas] = found, time.monotonic() - began, len(launches)
        return done[replicas][0]

    return run


def pytest_terminal_summary(terminalreporter, config):
    done = config.stash.get(_REPORT, {})
    if not done:
        return
    counts = collections.defaultdict(lambda: [0, 0])
    for found, _, _ in done.values():
        for outcome in found.values():
            counts[outcome.case["category"]][0 if outcome.passed else 1] += 1
    write = terminalreporter.write_line
    terminalreporter.section("conformance over real processes")
    write(
        "  ".join(f"{name} {passed}/{passed + failed}" for name, (passed, failed) in sorted(counts.items()))
    )
    for replicas, (found, seconds, launches) in sorted(done.items()):
        write(f"{replicas} replicas: {len(found)} cases in {seconds:.1f} s, launches {launches}")
    waiting = [case for case in collection.load() if collection.waits(case)]
    write(
        f"not yet ({len(waiting)} cases): "
        + ", ".join(f"{entry} ({needs})" for entry, needs in collection.NOT_YET.items())
    )
