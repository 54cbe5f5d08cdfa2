"""Workers of `sv.run` have the environment that `syncvar-launch` gives to its ranks.

They look for modules as the caller does; programs that they start do not.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.launching import LIMIT_S

SCRIPT = """
    import json, os, subprocess, sys
    import syncvar as sv

    def report():
        code = "import sys; print(sys.path)"
        line = [sys.executable, "-S", "-c", code]
        child = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        two = int(sv.all_reduce(1))
        return {"environ": dict(os.environ), "path": sys.path, "child": child, "two": two}

    if __name__ == "__main__":
        if "run" not in sys.argv:
            print(json.dumps([report()]))
        else:
            sys.path[1:1] = [os.path.abspath("added"), "relative"]
            import found_by_path
            print(json.dumps([*sv.run(found_by_path.report, workers=2), {"path": sys.path}]))
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a script, and one with a module that only a longer path finds."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "found_by_path.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def ended(place, command, **variables):
    process = subprocess.run(
        command,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "TMPDIR": str(place), **variables},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def own(environ):
    """The variables of a rank without those that differ between any two jobs."""
    return {name: value for name, value in environ.items() if not name.startswith("SYNCVAR_")}


@pytest.mark.parametrize("how", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_have_the_environment_of_launched_ranks(place, how):
    given = {"PYTHONPATH": "/nonexistent/of-the-user", "SYNCVAR_LAUNCH_START_METHOD": how}
    *workers, caller = json.loads(ended(place, [sys.executable, "script.py", "run"], **given))
    line = [sys.executable, "-m", "syncvar_launcher", "-n", "2", "--output", "first", "script.py"]
    (rank,) = json.loads(ended(place, line, **given).partition(" ")[2])
    for number, worker in enumerate(workers):
        assert worker["two"] == 2
        expected = {**own(rank["environ"]), "RANK": str(number), "LOCAL_RANK": str(number)}
        assert own(worker["environ"]) == expected
        assert worker["environ"].keys() == rank["environ"].keys()
        assert worker["path"] == [os.path.join(place, folder) for folder in caller["path"]]
        assert str(place) not in worker["child"]
        assert "site-packages" not in worker["child"]
        assert "/nonexistent/of-the-user" in worker["child"]
