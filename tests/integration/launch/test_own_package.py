"""Workers import the package that launched them, whatever is called `syncvar` where they start or where their script is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import syncvar
from syncvar.bootstrap.worker_entry import command_of

DECOY = "raise SystemExit('this is not syncvar')\n"
OURS = os.path.realpath(syncvar.__file__)

SCRIPT = """
import json, os, sys
import syncvar as sv, syncvar.data
import mine

def work():
    return [os.path.realpath(sv.__file__), os.path.realpath(sv.data.__file__), mine.__file__, float(sv.all_reduce(1))]

if __name__ == "__main__":
    print(json.dumps(sv.run(work, workers=2) if "run" in sys.argv else [work()]))
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a script, a module of its own, and a folder and a file with our name."""
    (tmp_path / "syncvar").mkdir()
    for name in ("syncvar/__init__.py", "syncvar.py"):
        (tmp_path / name).write_text(DECOY)
    (tmp_path / "mine.py").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def ended(line, folder, **variables):
    return subprocess.run(
        line,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    ("start", "target"), [("spawn", ("script.py",)), ("fork", ("-m", "script"))]
)
def test_workers_import_what_launched_them(place, start, target):
    done = ended(
        [sys.executable, "-m", "syncvar_launcher", "-n", "2", "--start-method", start, *target],
        place,
    )
    assert done.returncode == 0, done
    told = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()]
    assert (
        told
        == [[[OURS, str(Path(OURS).parent / "data" / "__init__.py"), str(place / "mine.py"), 2.0]]]
        * 2
    ), "its own modules as ever"


def test_workers_of_a_program_import_what_started_them(place, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("script.py", "mine.py"):
        (elsewhere / name).write_text((place / name).read_text())
    done = ended([sys.executable, str(elsewhere / "script.py"), "run"], place)
    assert done.returncode == 0, done
    assert [one[0] for one in json.loads(done.stdout)] == [OURS, OURS]


def test_no_folder_is_added_for_who_asks_for_safe_paths(place):
    (place / "plain.py").write_text("import sys; print(sys.path)")
    line = [*command_of("syncvar.bootstrap.worker_main"), str(place / "plain.py")]
    plain, safe = ended(line, place), ended(line, place, PYTHONSAFEPATH="1")
    expected = (
        ended([sys.executable, "plain.py"], place),
        ended([sys.executable, "plain.py"], place, PYTHONSAFEPATH="1"),
    )
    assert (plain.stdout, safe.stdout) == (expected[0].stdout, expected[1].stdout)
    assert str(place) in plain.stdout
    assert str(place) not in safe.stdout
