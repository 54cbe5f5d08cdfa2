"""Every case of every category, over real processes and over the in-memory world."""

import collections

import pytest

from tests.verification.conformance import (
    case_collection,
    case_grammar,
    case_report,
    in_memory_cases,
)

_CASES = case_collection.load()
_NOW = [case for case in _CASES if not case_collection.waits(case)]
_GRID = sorted({(case["replicas"], case["category"]) for case in _NOW})
# Each pair of a number of replicas and a path is one launch. By default 1 to 3 replicas, once each; links are those of two hosts.
_DEFAULT = {(1, "auto"), (2, "auto"), (3, "hosts")}
_OVER_PROCESSES = [
    pytest.param(
        replicas,
        category,
        transport,
        marks=[] if (replicas, transport) in _DEFAULT else [pytest.mark.slow],
    )
    for transport in ("auto", "zmq", "hosts")
    for replicas, category in _GRID
    if transport == "auto" or replicas > 1
]


@pytest.fixture(scope="session")
def launches(pytestconfig):
    """The launches of this run; each number of replicas has one."""
    made = case_report.Launches()
    pytestconfig.pluginmanager.register(made)
    return made


def test_every_case_is_in_the_grammar():
    for case in _CASES:
        case_grammar.check(case_collection.without_category(case))
    assert len({case["id"] for case in _CASES}) == len(_CASES)


def test_a_case_waits_exactly_while_its_feature_is_missing():
    wrong = {
        case["id"]: case_collection.missing(case)
        for case in _CASES
        if bool(case_collection.missing(case)) != case_collection.waits(case)
    }
    assert not wrong, (
        "change collection.NOT_YET: these cases wait without need, or need what is missing"
    )
    unused = [
        entry
        for entry in case_collection.NOT_YET
        if not any(entry in (c["category"], c["id"]) or c["id"].startswith(entry) for c in _CASES)
    ]
    assert not unused


@pytest.mark.parametrize(
    ("replicas", "category", "transport"), _OVER_PROCESSES, ids=lambda value: str(value)
)
def test_cases_over_processes(launches, replicas, category, transport):
    found = [
        one
        for one in launches.outcomes(replicas, transport).values()
        if one.case["category"] == category
    ]
    assert len(found) == sum(
        case["category"] == category and case["replicas"] == replicas for case in _NOW
    )
    failed = [one for one in found if not one.passed]
    assert not failed, f"{len(failed)} of {len(found)} failed\n" + "\n".join(map(str, failed))


@pytest.mark.filterwarnings("ignore:variable .* the initial value of replica")
@pytest.mark.parametrize("category", sorted({case["category"] for case in _NOW}))
def test_cases_in_memory(category):
    failed = []
    seen = collections.Counter()
    for case in _NOW:
        if case["category"] == category:
            outcome = in_memory_cases.run(case)
            seen[outcome.passed] += 1
            if not outcome.passed:
                failed.append(outcome)
    assert not failed, f"{dict(seen)}\n" + "\n".join(map(str, failed))
