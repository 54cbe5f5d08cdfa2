"""The table of faults is whole: every row, every phase, and no test that does not exist."""

import ast
import re
import subprocess
import sys

from tests.support import fault_table as table
from tests.support.paths import TESTS


def named():
    """Return every test that the table names."""
    return {
        test for row in table.ROWS.values() for tests in row.tests.values() for test in tests
    } | {test for _, tests in table.CONTROLS.values() for test in tests}


def functions(name):
    """Return the tests of a file without their cases."""
    tree = ast.parse((TESTS / name).read_text())
    return {
        f"{name}::{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_test_that_is_named_exists():
    files = {test.partition("::")[0] for test in named()}
    assert not sorted(
        {test.partition("[")[0] for test in named()} - set().union(*map(functions, files))
    )


def test_every_case_that_is_named_exists():
    cases = {test for test in named() if "[" in test}
    files = sorted(
        {f"tests/{test.partition('::')[0]}" for test in cases}
    )  # collecting takes its time: only what has cases
    line = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "--assert=plain",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(
        line, cwd=TESTS.parent, capture_output=True, text=True, timeout=100, check=True
    )
    assert not sorted(cases - {text.removeprefix("tests/") for text in done.stdout.splitlines()})


def test_there_is_a_row_for_every_fault():
    assert list(table.ROWS) == list(table.PHASES) == [f"F{number:02d}" for number in range(1, 61)]
    assert {row.waits_for for row in table.ROWS.values()} == {"", "servers"}


def test_every_phase_of_a_row_has_a_test():
    lacking = {}
    for name, row in table.ROWS.items():
        assert set(row.tests) <= set(table.PHASES[name]) | set("SRHCXVKE"), name
        without = "".join(phase for phase in table.PHASES[name] if not row.tests.get(phase))
        if without and not row.waits_for:
            lacking[name] = without
    assert lacking == table.MISSING, (
        "a phase without a test is said, and one that has got a test is no longer said"
    )


def test_bounds_are_positive_and_short_ones_are_not_longer():
    for name, row in table.ROWS.items():
        assert row.bound is None or 0 < row.bound[1] <= row.bound[0], name


def test_the_tests_speak_of_no_other_fault():
    """A test that has the number of a fault in its name shows a fault that is in the table."""
    names = {
        number
        for path in TESTS.rglob("test_*.py")
        for number in re.findall(r"def test_f(\d\d)_", path.read_text())
    }
    assert {f"F{number}" for number in names} <= set(table.ROWS)


def test_every_control_has_a_test():
    assert all(tests for _, tests in table.CONTROLS.values())
