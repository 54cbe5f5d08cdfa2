"""What there is when the launcher begins: streams that are closed, a signal at once, a folder that is gone, wrong places."""

import os
import signal
import subprocess
import sys

import pytest
from launching import await_true

MODULE = (sys.executable, "-m", "syncvar_launcher")
ENTRY = (sys.executable, "-c", "import sys; from syncvar_launcher.run import main; sys.exit(main())")  # as the installed command does


def launched(line, folder, **keywords):
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60, check=False, **keywords)


def is_one_sentence(text):
    return text.startswith("syncvar-launch: ") and text.count("\n") == 1 and "Traceback" not in text


# Closed streams.

STREAMS = """
import os, sys
import probe, syncvar as sv

assert sv.all_reduce(1) == 2
probe.note("streams", links=[os.readlink(f"/proc/self/fd/{number}") for number in range(3)], read=sys.stdin.read())
print("out")
print("err", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_streams_that_are_closed_at_the_start_are_as_dev_null(launch, closed):
    code = 3 if closed == (1,) else 0
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    options = ("--start-method", "spawn" if len(closed) == 3 else "fork")
    job = launch(STREAMS, workers=2, arguments=[str(code)], options=options, prefix=("sh", "-c", f'exec "$@" {redirections}', "sh"))
    assert job.wait() == code, str(job)
    for event in job.events("streams"):
        assert event["read"] == ""
        assert event["links"][0] == os.devnull, "not a pipe of the launcher's own"
        assert all(link.startswith("pipe:") for link in event["links"][1:]), event
    assert len(job.events("streams")) == 2
    if 1 not in closed:
        assert job.lines(0) == job.lines(1) == ["out"], str(job)
    if 2 not in closed:
        assert job.lines(1, job.err) == ["err"], str(job)


# A signal before anything can handle it.

AT_IMPORT = """
import sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            open({ready!r}, "w").close()
            time.sleep(60)
        return None

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("module", "line", "number"),
    [
        ("syncvar.errors", MODULE, signal.SIGINT),
        ("syncvar.errors", ENTRY, signal.SIGTERM),
        ("syncvar_launcher.options", ENTRY, signal.SIGINT),
        ("syncvar_launcher.running", MODULE, signal.SIGTERM),
        ("zmq", ENTRY, signal.SIGINT),
    ],
    ids=lambda value: {MODULE: "module", ENTRY: "command"}.get(value, str(value)),
)
def test_f13_a_signal_while_the_launcher_is_imported(tmp_path, module, line, number):
    ready = tmp_path / "ready"
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(module=module, ready=str(ready)))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [*line, "-n", "2", "--no-python", "true"], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        await_true(ready.exists, what=f"the import of {module}")
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (128 + number, "", "")


# Wrong places.


def test_a_folder_that_has_been_removed_is_told(tmp_path):
    gone = tmp_path / "gone"
    (tmp_path / "script.py").write_text("import os; print(os.getcwd())")
    for options, code in (((), 78), (("--cwd", str(tmp_path)), 0)):
        gone.mkdir()
        shell = f'rmdir "{gone}"; exec "$@"'
        ended = launched(["sh", "-c", shell, "sh", *MODULE, "-n", "2", *options, "script.py"], gone)
        assert ended.returncode == code, ended
        if code:
            assert is_one_sentence(ended.stderr), ended.stderr
            assert "has been removed" in ended.stderr
            assert "--cwd" in ended.stderr
        else:
            assert sorted(ended.stdout.splitlines()) == [f"[0] {tmp_path}", f"[1] {tmp_path}"], ended


def test_a_lock_that_is_a_link_is_not_followed_and_told(tmp_path):
    base = tmp_path / "run" / "syncvar"
    base.mkdir(parents=True, mode=0o700)
    (base / ".lock").symlink_to(tmp_path / "elsewhere")
    ended = launched([*MODULE, "-n", "2", "--no-python", "true"], tmp_path, env={**os.environ, "XDG_RUNTIME_DIR": str(base.parent)})
    assert ended.returncode == 78
    assert is_one_sentence(ended.stderr), ended.stderr
    assert f"{base}/.lock, which is a link" in ended.stderr
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("size", ["9223372036854775807", str(10**30), str((1 << 46) + 1)])
def test_an_arena_that_no_process_can_map_is_refused(tmp_path, size):
    ended = launched([*MODULE, "-n", "2", "--no-python", "true"], tmp_path, env={**os.environ, "SYNCVAR_ARENA_BYTES": size})
    assert ended.returncode == 78
    assert is_one_sentence(ended.stderr), ended.stderr
    assert f"arena_bytes ({size}) is more than a process can map: at most {1 << 46}" in ended.stderr
