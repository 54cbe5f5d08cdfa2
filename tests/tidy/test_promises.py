"""The table of promises (tests/promises.toml): each names a test that is there, is run, and does as much as was promised."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.paths import REPOSITORY

PROMISES = tomllib.loads((REPOSITORY / "tests" / "promises.toml").read_text())["promise"]
KEYS = {"says", "test", "set", "constant", "amount", "cases", "ids"}
MARKS = {
    "default": (
        "not slow and not tensors and not mpi and not ray and not dask and not slurm "
        "and not nightly and not foreign"
    ),
    "slow": "slow and not peers and not nightly and not foreign",
    "nightly": "nightly",
}  # as pyproject.toml, .ci/run and .ci/nightly have them


def collected(marks):
    """Return the ids of the cases that a run with these marks has, of the files that the table names."""
    files = sorted({promise["test"].partition("::")[0] for promise in PROMISES})
    line = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "--assert=plain",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        *files,
    ]
    done = subprocess.run(
        line, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def cases():
    return {name: collected(marks) for name, marks in MARKS.items()}


def of(test, ids):
    return [one for one in ids if one == test or one.startswith(f"{test}[")]


@pytest.mark.parametrize(
    "promise", PROMISES, ids=lambda promise: promise["test"].rpartition("::")[2]
)
def test_a_promise_is_kept(promise, cases):
    assert promise.keys() <= KEYS, "no other keys"
    assert of(promise["test"], cases[promise["set"]]), (
        f"{promise['test']} is not in the {promise['set']} set"
    )
    every = of(promise["test"], [one for found in cases.values() for one in found])
    assert len(every) >= promise.get("cases", 1)
    for pattern in promise.get("ids", ()):
        assert any(re.search(pattern, one) for one in every), (
            f"no case {pattern!r} of {promise['test']}"
        )
    if "constant" in promise:
        path, _, function = promise["test"].partition("::")
        tree = ast.parse((REPOSITORY / path).read_text())
        (value,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and node.targets[0].id == promise["constant"]
        )
        assert value >= promise["amount"], promise["says"]
        (body,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
        assert promise["constant"] in names, f"{function} does not use {promise['constant']}"


def test_ci_runs_every_set():
    text = (REPOSITORY / ".ci" / "run").read_text()
    assert "pytest -q -m tensors" in text
    assert f"-m '{MARKS['slow']}'" in text
    assert "pytest" in text
    addopts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"][
        "ini_options"
    ]["addopts"]
    nightly = (REPOSITORY / ".ci" / "nightly").read_text()
    assert f"-m {MARKS['nightly']}" in nightly
    assert addopts[-2:] == ["-m", MARKS["default"]]
