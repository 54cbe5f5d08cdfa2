"""Tests of other projects over syncvar's layers; `pytest -m foreign tests/interop/foreign`, see fetch_suites.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.fetch_suites import MPI4PY_MODULES, run_mpi4py, summary
from tests.support.foreign_suites import fetch

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(0)]
DEMOS = {  # program of mpi4py's folder demo -> standard input, and a part of what it prints
    "helloworld.py": ("", "process 2 of 3"),
    "compute-pi/cpi-cco.py": ("1000\n0\n", "pi is approximately 3.14159"),
    "sequential/test_seq.py": ("", "process 1 of 3"),
    "reductions/test_reductions.py": ("", "OK"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    named = os.environ.get("SYNCVAR_FOREIGN_FOLDER")
    return Path(named).resolve() if named else tmp_path_factory.mktemp("suites")


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_mpi4py_over_the_layer(folder, workers):
    found = run_mpi4py(folder, [workers], MPI4PY_MODULES)
    print("\n".join(summary(found)))
    outcomes = [word for one in found for word, _ in one.outcomes.values()]
    assert len(outcomes) == 551
    assert outcomes.count("passed") >= 540
    assert not {"wrong", "hang", "skipped"} & set(outcomes)


@pytest.mark.parametrize("name", list(DEMOS))
def test_a_program_of_mpi4py(folder, name):
    given, printed = DEMOS[name]
    script = fetch("mpi4py", folder) / "demo" / name
    launch = [str(Path(sys.executable).parent / "syncvar-launch"), "--workers", "3"]
    command = [*launch, "-m", "syncvar.compat.mpi4py", str(script)]
    result = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=300, cwd=script.parent
    )
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout + result.stderr
