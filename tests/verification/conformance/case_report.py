"""The launches of a test run, one for each number of replicas, and the report of them at its end."""

import collections
import time

from tests.verification.conformance import case_collection, case_launcher


class Launches:
    """The outcomes of all cases by number of replicas and path, each from one launch over real processes; made when asked for.

    Registered with pytest as a plugin, to print its report at the end of the run.
    """

    def __init__(self):
        self._done = {}

    def outcomes(self, replicas, transport="auto"):
        """Return the outcomes by id of all cases of this number of replicas that do not wait for a feature."""
        key = replicas, transport
        if key not in self._done:
            began = time.monotonic()
            launches = []
            cases = [
                case
                for case in case_collection.load()
                if case["replicas"] == replicas and not case_collection.waits(case)
            ]
            found = case_launcher.conduct(cases, launches=launches, transport=transport)
            self._done[key] = found, time.monotonic() - began, len(launches)
        return self._done[key][0]

    def pytest_terminal_summary(self, terminalreporter):
        """Print passed and all cases by category, the launches, and what waits for a feature."""
        if not self._done:
            return
        counts = collections.defaultdict(lambda: [0, 0])
        for found, _, _ in self._done.values():
            for outcome in found.values():
                counts[outcome.case["category"]][0] += outcome.passed
                counts[outcome.case["category"]][1] += 1
        write = terminalreporter.write_line
        terminalreporter.section("conformance over real processes")
        write(
            "  ".join(
                f"{name} {passed}/{every}" for name, (passed, every) in sorted(counts.items())
            )
        )
        for (replicas, transport), (found, seconds, launches) in sorted(self._done.items()):
            write(
                f"{replicas} replicas over {transport}: {len(found)} cases in {seconds:.1f} s, launches {launches}"
            )
        waiting = sum(case_collection.waits(case) for case in case_collection.load())
        entries = ", ".join(
            f"{entry} ({needs})" for entry, needs in case_collection.NOT_YET.items()
        )
        write(f"not yet ({waiting} cases): {entries}")
