"""The checker is checked: wrong results are seen, harm to one case costs no other its result, bad cases are refused."""

import copy
import math

import ml_dtypes
import numpy as np
import pytest

from tests.verification.conformance import (
    case_collection,
    case_grammar,
    case_launcher,
    compare_results,
)

_VARIABLE = {"synchronization": "ON_WRITE", "aggregation": "SUM", "dtype": "float32", "initial": 1}


def case(name, steps, final=None, **changes):
    variables = changes.pop("variables", {"v": _VARIABLE})
    return {
        "category": "own",
        "id": name,
        "strategy": "mirrored",
        "replicas": 2,
        "variables": variables,
        "steps": steps,
        "final_local": {} if final is None else {"v": final},
        **changes,
    }


def good(name):
    steps = [
        {
            "ctx": "replica",
            "op": "assign_add",
            "per_replica": [3, 8],
            "expect": {"ok": True, "local_after": {"v": [12.0, 12.0]}},
        },
        {"ctx": "cross", "op": "read_value", "expect": {"value": 12.0, "dtype": "float32"}},
    ]
    return case(name, steps, [12.0, 12.0])


def test_what_differs_is_named_and_costs_no_other_case_its_result():
    wrong = good("wrong")
    wrong["steps"][1]["expect"]["value"] = 11.0
    wrong["final_local"]["v"] = [12.0, 11.0]
    unexpected = case(
        "unexpected",
        [{"ctx": "replica", "op": "assign", "literal": "text", "expect": {"ok": True}}],
    )
    missing = case(
        "missing",
        [{"ctx": "replica", "op": "assign", "literal": 1, "expect": {"error": "ConfigError"}}],
    )
    launches = []
    found = case_launcher.conduct(
        [wrong, good("a"), unexpected, good("b"), missing, good("c")], launches=launches
    )
    texts = {name: "\n".join(outcome.differences) for name, outcome in found.items()}
    assert [found[name].passed for name in "abc"] == [True, True, True], texts
    assert "rank 0: step 1 (cross read_value): 12.0 instead of 11.0" in texts["wrong"]
    assert "rank 1: final_local: the copy of v 12.0 instead of 11.0" in texts["wrong"]
    assert "rank 0: final_local" not in texts["wrong"]
    assert "step 0 (replica assign): unexpected ConfigError" in texts["unexpected"]
    assert "step 0 (replica assign): no ConfigError" in texts["missing"]
    assert launches == ["wrong"]


def test_a_rank_that_hangs_or_ends_costs_no_other_case_its_result():
    cases = [good("a"), good("hangs"), good("b"), good("ends"), good("c")]
    launches = []
    found = case_launcher.conduct(
        cases, case_s=4.0, launches=launches, sabotage={"hangs": (1, "hang"), "ends": (0, "exit")}
    )
    texts = {name: str(outcome) for name, outcome in found.items()}
    assert [found[name].passed for name in ("a", "hangs", "b", "ends", "c")] == [
        True,
        False,
        True,
        False,
        True,
    ], texts
    assert "ranks [1] did not answer" in texts["hangs"]
    assert "DeadlineExceeded" in texts["hangs"]
    assert "ranks [0" in texts["ends"]
    assert launches == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        {"op": "assign_mul"},
        {"ctx": "nowhere"},
        {"values": 3},
        {"literal": 3},
        {"per_replica": [1]},
        {"var": "w"},
        {"expect": {"ok": True, "value": 3}},
        {"expect": {"per_rank": [1]}},
        {"expect": {"ok": True, "local_after": {"w": [1, 1]}}},
        {"expect": {"ok": True, "dtype": "float32"}},
        {"op": "read_value"},
        {"op": "container_misuse", "kind": "sing"},
        {"op": "merge_arg"},
        {"op": "multi"},
    ],
)
def test_what_the_grammar_does_not_know_is_refused(change):
    bad = case_collection.without_category(good("bad"))
    case_grammar.check(bad)
    bad = copy.deepcopy(bad)
    bad["steps"][0] |= change
    with pytest.raises(case_grammar.BadCase, match="bad: step 0"):
        case_grammar.check(bad)


@pytest.mark.parametrize(
    "spec",
    [
        {"sum": 1},
        {"array": 1, "shape": 2},
        {"by": [{"array": 1}]},
        {"var": "w"},
        {"none": 1},
        {"indices": [0], "values": [1]},
    ],
)
def test_operands_that_the_grammar_does_not_know_are_refused(spec):
    bad = case("bad", [{"ctx": "cross", "op": "assign", "operand": spec, "expect": {"ok": True}}])
    with pytest.raises(case_grammar.BadCase):
        case_grammar.check(case_collection.without_category(bad))


@pytest.mark.parametrize(
    "change", [{"strategy": "magic"}, {"replicas": 0}, {"note": 1}, {"final_local": {"v": [1]}}]
)
def test_cases_that_the_grammar_does_not_know_are_refused(change):
    with pytest.raises(case_grammar.BadCase):
        case_grammar.check(case_collection.without_category(good("bad") | change))


@pytest.mark.parametrize(
    ("expected", "actual", "dtype", "same"),
    [
        (1.0, np.float32(1 + 5e-7), "float32", True),
        (1.0, np.float32(1 + 5e-6), "float32", False),
        (1.0, np.float64(1 + 5e-12), "float64", False),
        (1.0, np.float64(1 + 5e-13), "float64", True),
        (1.0, np.float16(1.0009765625), "float16", True),
        (1.0, np.float16(1.002), "float16", False),
        (1.0, np.asarray(1.0078125, ml_dtypes.bfloat16), "bfloat16", True),
        (1.0, np.float64(1.0), "float32", False),
        (1.0, 1.0, "float32", False),
        (1.0, 1.0, None, True),
        (1, np.int64(1), "int64", True),
        (2**53 + 1, np.int64(2**53), "int64", False),
        (True, np.True_, "bool", True),
        (True, 1, None, False),
        (1, True, None, False),
        ("nan", np.float32(math.nan), "float32", True),
        ("inf", np.float32(math.inf), "float32", True),
        ("inf", np.float32(-math.inf), "float32", False),
        (0.0, np.float32(1e-20), "float32", False),
        (0.0, np.float32(1e-35), "float32", True),
        ({"re": 1, "im": 2}, np.complex64(1 + 2j), "complex64", True),
        ({"re": 1, "im": 2}, np.complex64(1 - 2j), "complex64", False),
        ([1.0, 2.0], np.array([1, 2], np.float32), "float32", True),
        ([1.0], np.float32(1.0), "float32", False),
        (1.0, np.array([1.0]), None, False),
        ([[1.0, 2.0]], np.array([1.0, 2.0]), None, False),
        ([], np.zeros((0, 3)), None, True),
        ([], np.zeros((3, 0)), None, False),
        ([[1.0], [2.0, 3.0]], (np.array([1.0]), [np.float64(2.0), 3]), None, True),
        ({"a": 1.0, "b": None}, {"a": np.array(1.0), "b": None}, None, True),
        ({"a": 1.0}, {"a": 1.0, "b": 2}, None, False),
        (None, np.zeros(()), None, False),
        ("SUM", "SUM", None, True),
        ("SUM", "MEAN", None, False),
        (3.0, None, None, False),
    ],
)
def test_comparing(expected, actual, dtype, same):
    assert (compare_results.wrong_value(expected, actual, dtype) == "") is same


def test_errors_are_classes_of_the_package_or_of_python():
    import syncvar as sv

    assert compare_results.error_class("RowOutOfRange", sv) is sv.RowOutOfRange
    assert compare_results.error_class("IndexError", sv) is IndexError
    with pytest.raises(LookupError):
        compare_results.error_class("Variable", sv)
