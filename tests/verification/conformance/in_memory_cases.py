"""The same interpreter over the in-memory world: each case in a world of its own, ranks are threads.

python -m tests.verification.conformance.in_memory_cases [PART OF AN ID ...]
"""

import sys
import tempfile
import time
import warnings

from syncvar.bootstrap.process import current, use
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.session import LocalServers
from syncvar.testing import run_ranks
from tests.verification.conformance import case_collection, case_interpreter
from tests.verification.conformance.case_launcher import Outcome

_CONFIG = RuntimeConfig(collective_timeout_s=60.0)


def run(case):
    """Run one case; return its outcome."""
    began = time.monotonic()
    found = []
    with tempfile.TemporaryDirectory(prefix="sv-conf-") as folder:

        def body():
            context = current()
            return case_interpreter.run_case(
                case_collection.without_category(case), "case", folder, lambda: use(context)
            )

        servers = (
            LocalServers(case["replicas"], 2) if case["strategy"] == "parameter_server" else None
        )
        answers = run_ranks(
            case["replicas"], body, config=_CONFIG, timeout_s=120.0, servers=servers
        )
    for rank, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            found.append(f"rank {rank}: {type(answer).__name__}: {answer}")
            continue
        differences, broken = answer
        found += [f"rank {rank}: {text}" for text in differences]
        found += [f"rank {rank}: the group broke: {broken}"] if broken else []
    return Outcome(case, found, time.monotonic() - began)


def main(parts):
    warnings.simplefilter("ignore")
    passed = failed = 0
    for case in case_collection.load():
        if case_collection.missing(case) or not all(
            part in case["id"] or part == case["category"] for part in parts
        ):
            continue
        outcome = run(case)
        passed, failed = passed + outcome.passed, failed + (not outcome.passed)
        if not outcome.passed:
            print(f"[{case['category']}] {outcome}", flush=True)
    print(f"{passed} passed, {failed} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
