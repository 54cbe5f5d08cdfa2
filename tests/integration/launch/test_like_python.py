"""A worker is as `python script.py` would be: hooks, `__main__` up to the last handler, errors of any kind."""

import os
import subprocess
import sys
import zipfile

import pytest

MAIN = """
import atexit, pickle, sys, threading

class Thing:
    pass

def say(who):
    me = sys.modules["__main__"]
    print(who, type(pickle.loads(pickle.dumps(Thing()))) is Thing, me.__name__, me.Thing is Thing, me.__spec__ and me.__spec__.name, flush=True)

def late(main):
    main.join()
    say("thread")

threading.Thread(target=late, args=(threading.current_thread(),)).start()
atexit.register(say, "handler")
say("script")
"""

WAITS = """
import sys, time
import syncvar as sv

print(float(sv.all_reduce(1.0)))
if sv.rank() == 1:
    time.sleep(0.5)  # rank 0 has reported that it waits
    sys.exit(3)
sv.barrier()
"""

HOOK = """
import sys, traceback

def hook(kind, error, trace):
    print("hook", kind.__name__, error, [frame.name for frame in traceback.extract_tb(trace)], flush=True)

sys.excepthook = hook
def inner():
    raise ValueError("planted")
inner()
"""

FAILING_HOOK = """
import sys

def hook(kind, error, trace):
    raise KeyError("of the hook")

sys.excepthook = hook
raise ValueError("planted")
"""

NO_TEXT = """
class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

raise Silent
"""


def plain(folder, *line):
    return subprocess.run(
        [sys.executable, *line],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_main_is_the_script_up_to_the_last_handler(launch, how):
    job = launch(MAIN, workers=1, start=how)
    assert job.wait() == 0, str(job)
    expected = plain(job.folder, "script.py")
    assert expected.returncode == 0
    assert job.lines(0) == expected.stdout.splitlines() != [], str(job)


@pytest.mark.parametrize("kind", ["module", "package", "folder", "archive"])
def test_main_of_a_module_a_package_a_folder_and_an_archive(launch, tmp_path, kind):
    place = tmp_path / "thing"
    place.mkdir()
    (place / "__main__.py").write_text(
        MAIN if kind != "folder" else "import sys; print(__name__, sys.argv[1:])"
    )
    (place / "__init__.py").touch()
    (place / "part.py").write_text(MAIN)
    with zipfile.ZipFile(tmp_path / "thing.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(__name__, sys.argv[1:])")
    target = {
        "module": ["-m", "thing.part"],
        "package": ["-m", "thing"],
        "folder": [str(place)],
        "archive": [str(tmp_path / "thing.zip")],
    }[kind]
    job = launch(workers=1, target=target, arguments=["a"], options=["--cwd", str(tmp_path)])
    assert job.wait() == 0, str(job)
    expected = plain(tmp_path, *target, "a")
    assert expected.returncode == 0, expected
    assert job.lines(0) == expected.stdout.splitlines() != [], str(job)


def test_a_hook_for_exceptions_is_called(launch):
    job = launch(HOOK, workers=1)
    assert job.wait() == 1, str(job)
    assert (
        job.lines(0)
        == plain(job.folder, "script.py").stdout.splitlines()
        == ["hook ValueError planted ['<module>', 'inner']"]
    )
    assert job.lines(0, job.err) == [], "the hook has spoken instead"
    assert "ValueError: planted" in job.report


def test_a_hook_that_fails_hides_nothing(launch):
    job = launch(FAILING_HOOK, workers=1)
    assert job.wait() == 1, str(job)
    said = "\n".join(job.lines(0, job.err))
    for words in (
        "Error in sys.excepthook:",
        "KeyError: 'of the hook'",
        "Original exception was:",
        "ValueError: planted",
    ):
        assert words in said, str(job)
        assert words in plain(job.folder, "script.py").stderr
    assert "bootstrap" not in job.err


def test_an_exception_without_a_text_is_told(launch):
    job = launch(NO_TEXT, workers=1)
    assert job.wait() == 1, str(job)
    assert "Silent: <exception str() failed>" in job.report, str(job)
    assert "bootstrap" not in job.err, str(job)


def test_names_of_files_that_are_no_utf8(launch, tmp_path):
    """The others are told of the script as they join, and of the line at which a rank waits."""
    folder = os.fsencode(tmp_path) + b"/d\xe9"
    os.mkdir(folder)
    path = os.fsdecode(folder + b"/caf\xe9.py")
    with open(path, "w") as file:
        file.write(WAITS)
    job = launch(
        target=[path], env={"SYNCVAR_REPORT_AFTER_S": "0.02"}, options=["--cwd", str(tmp_path)]
    )
    assert job.wait() == 3, str(job)
    assert job.lines(0) == ["2.0"], str(job)
    assert r"waiting in barrier (call 2) at" in job.report, str(job)
    assert r"caf\udce9.py:9" in job.report, str(job)
