"""The report of bounds: a table of medians, and what it counts as too slow."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "process"))

from tests.support import fault_bounds


def test_a_median_above_twice_its_bound_is_too_slow():
    found = {
        ("F01", 1.0): [0.5, 9.0, 0.7],
        ("F02", 1.0): [1.5, 1.9, 1.2],
        ("F03", 1.0): [2.5, 2.6, 0.1],
    }
    lines, above = fault_bounds.table(found)
    assert above == ["F03"]
    assert [line.split() for line in lines[1:]] == [
        ["F01", "0.700", "1"],
        ["F02", "1.500", "1", "above", "the", "bound"],
        ["F03", "2.500", "1", "above", "2", "times", "the", "bound"],
    ]


def test_each_case_is_in_its_file():
    for case in fault_bounds.CASES:
        name, _, test = case.partition("::")
        text = (Path(fault_bounds.__file__).parent / name).read_text()
        assert f"def {test.partition('[')[0]}(" in text, case
