"""The cases of variables on servers, and of how they are cut: over real processes with two servers, and in memory."""

import os
import sys

import pytest

from tests.verification.conformance import case_collection, case_grammar, in_memory_cases
from tests.verification.conformance.case_launcher import conduct

_CASES = case_collection.load("servers")
_OF_PARTITIONERS = [
    case
    for case in case_collection.load()
    if case["category"] in ("partitioner", "partition_rules")
]
_CATEGORIES = sorted({case["category"] for case in _CASES})


def _with_servers(replicas, _folder, environment):
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--workers",
        str(replicas),
        "--servers",
        "2",
        "--no-timestamps",
    ]
    return line, environment


def test_every_case_is_in_the_grammar():
    for case in _CASES:
        case_grammar.check(case_collection.without_category(case))
    assert len({case["id"] for case in _CASES}) == len(_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_cases_over_processes(replicas):
    assert "SYNCVAR_RANK" not in os.environ
    chosen = [case for case in (*_CASES, *_OF_PARTITIONERS) if case["replicas"] == replicas]
    outcomes = conduct(chosen, start=_with_servers)
    assert len(outcomes) == len(chosen)
    failed = [one for one in outcomes.values() if not one.passed]
    assert not failed, f"{len(failed)} of {len(chosen)} failed\n" + "\n".join(map(str, failed))


@pytest.mark.parametrize("category", _CATEGORIES)
def test_cases_in_memory(category):
    failed = [
        one
        for one in (in_memory_cases.run(case) for case in _CASES if case["category"] == category)
        if not one.passed
    ]
    assert not failed, "\n".join(map(str, failed))
