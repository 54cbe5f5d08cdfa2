"""What there is when the launcher begins: streams that are closed, a signal at once, a folder that is gone, wrong places."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from syncvar_launcher.local.host_resources import needed_files
from tests.support.launching import await_true

MODULE = (sys.executable, "-m", "syncvar_launcher")
ENTRY = (
    sys.executable,
    "-c",
    "import sys; from syncvar_launcher.main import program; sys.exit(program())",
)  # as the installed command does


def launched(line, folder, **keywords):
    return subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=120, check=False, **keywords
    )


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
    job = launch(
        STREAMS,
        workers=2,
        arguments=[str(code)],
        options=options,
        prefix=("sh", "-c", f'exec "$@" {redirections}', "sh"),
    )
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
        ("syncvar.core.errors", MODULE, signal.SIGINT),
        ("syncvar.core.errors", ENTRY, signal.SIGTERM),
        ("syncvar_launcher.options.parse_options", ENTRY, signal.SIGINT),
        ("syncvar_launcher.job.restart_loop", MODULE, signal.SIGTERM),
        ("zmq", ENTRY, signal.SIGINT),
        ("syncvar.core.errors", ENTRY, signal.SIGHUP),
        ("zmq", MODULE, signal.SIGHUP),
    ],
    ids=lambda value: {MODULE: "module", ENTRY: "command"}.get(value, str(value)),
)
def test_f13_a_signal_while_the_launcher_is_imported(tmp_path, module, line, number):
    ready = tmp_path / "ready"
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(module=module, ready=str(ready)))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [*line, "-n", "2", "--no-python", "true"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_true(ready.exists, what=f"the import of {module}")
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (128 + number, "")
    assert (
        err
        == f"syncvar-launch: received {number.name} before the ranks began; nothing was started\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("form", ["gone", "full"])
def test_an_early_signal_ends_a_launcher_whose_error_stream_nobody_reads(tmp_path, form, number):
    ready = tmp_path / "ready"
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(module="zmq", ready=str(ready)))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    line, environ = [*ENTRY, "-n", "2", "--no-python", "true"], {**os.environ, "PYTHONPATH": path}
    reads, writes = os.pipe()
    process = subprocess.Popen(line, env=environ, stderr=writes)
    try:
        await_true(ready.exists, what="the import of zmq")
        if form == "full":
            os.set_blocking(writes, False)
            with contextlib.suppress(BlockingIOError):
                while os.write(writes, bytes(4096)):
                    pass
            os.set_blocking(writes, True)
        else:
            os.close(reads)
        process.send_signal(number)
        assert process.wait(timeout=120) == 128 + number
    finally:
        process.kill()
        process.wait()
        os.close(writes)
        if form == "full":
            os.close(reads)


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
            assert sorted(ended.stdout.splitlines()) == [f"[0] {tmp_path}", f"[1] {tmp_path}"], (
                ended
            )


def test_a_lock_that_is_a_link_is_not_followed_and_told(tmp_path, pytestconfig):
    base = Path(
        pytestconfig.syncvar_runtime, "link", "syncvar"
    )  # short, as a path of sockets must be
    base.mkdir(parents=True, mode=0o700)
    (base / ".lock").symlink_to(tmp_path / "elsewhere")
    ended = launched(
        [*MODULE, "-n", "2", "--no-python", "true"],
        tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(base.parent)},
    )
    assert ended.returncode == 78
    assert is_one_sentence(ended.stderr), ended.stderr
    assert f"{base}/.lock, which is a link" in ended.stderr
    assert not (tmp_path / "elsewhere").exists()
    shutil.rmtree(base.parent)


@pytest.mark.parametrize("size", ["9223372036854775807", str(10**30), str((1 << 46) + 1)])
def test_an_shm_that_no_process_can_map_is_refused(tmp_path, size):
    ended = launched(
        [*MODULE, "-n", "2", "--no-python", "true"],
        tmp_path,
        env={**os.environ, "SYNCVAR_SHM_BYTES": size},
    )
    assert ended.returncode == 78
    assert is_one_sentence(ended.stderr), ended.stderr
    assert f"shm_bytes ({size}) is more than a process can map: at most {1 << 46}" in ended.stderr


# Limits of the system.


def limited(number):
    return ("sh", "-c", f'ulimit -n {number}; exec "$@"', "sh")


@pytest.mark.parametrize(("workers", "allowed"), [(16, 64), (2, 16)])
def test_f41_too_few_open_files_are_told_before_anything_starts(launch, workers, allowed):
    job = launch("import probe", workers=workers, prefix=limited(allowed))
    assert job.wait() == 71, str(job)
    needed, _ = needed_files(workers, 1, has_logs=False, are_linked=False)
    assert is_one_sentence(job.err), job.err
    assert f"needs {needed} open files for {workers} ranks, and {allowed} are allowed" in job.err
    assert "ulimit -n" in job.err
    assert not job.events(), "nothing was started"
    assert not list(job.folder.glob("state/syncvar/*"))


@pytest.mark.parametrize("how", ["shm", "zmq", "fake hosts"])
def test_f41_what_is_said_to_be_needed_suffices(launch, how, tmp_path):
    hosts = 2 if how == "fake hosts" else 1
    needed, _ = needed_files(4, hosts, has_logs=True, are_linked=how != "shm")
    options = ("--log-dir", str(tmp_path / "logs"), *(("--fake-hosts", "2") if hosts == 2 else ()))
    script = """
        import numpy as np, syncvar as sv
        for size in (1, 1000, 300_000):
            sv.all_reduce(np.ones(size)), sv.all_gather(np.ones(size)), sv.all_to_all(np.ones(4 * size))
    """
    job = launch(
        script,
        workers=4,
        prefix=limited(needed),
        options=options,
        env={"SYNCVAR_TRANSPORT": "zmq"} if how == "zmq" else {},
    )
    assert job.wait() == 0, str(job)
    short = launch(
        script,
        workers=4,
        prefix=limited(needed - 1),
        options=options,
        env={"SYNCVAR_TRANSPORT": "zmq"} if how == "zmq" else {},
    )
    assert short.wait() == 71, str(short)


def test_f41_too_few_processes_are_told(monkeypatch):
    """The system asks root for no limit, so that this limit is only said to be there."""
    import resource

    from syncvar_launcher.local import host_resources
    from syncvar_launcher.options.parse_options import parse

    chosen = parse(["-n", "16", "--no-python", "true"], {}, "/")
    allowed = host_resources.needed_tasks(16)
    monkeypatch.setattr(os, "getuid", lambda: os.stat("/proc/self").st_uid or 1)
    monkeypatch.setattr(host_resources, "_tasks_of_user", lambda: 7)
    real = resource.getrlimit
    for soft, hard, words in (
        (allowed + 7, allowed + 7, ""),
        (allowed + 6, 4096, f"ulimit -u {allowed + 7}"),
        (9, 9, "goes up to 9 here"),
    ):
        monkeypatch.setattr(
            resource,
            "getrlimit",
            lambda which, soft=soft, hard=hard: (
                (soft, hard) if which == resource.RLIMIT_NPROC else real(which)
            ),
        )
        if not words:
            host_resources.check_limits(chosen)
            continue
        with pytest.raises(
            host_resources.LimitTooLow,
            match=f"16 ranks need {allowed} processes and threads beside the 7 .* {soft} are allowed",
        ) as raised:
            host_resources.check_limits(chosen)
        assert words in str(raised.value)


def test_the_tasks_of_a_user_are_counted():
    from syncvar_launcher.local import host_resources

    before = host_resources._tasks_of_user()
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print(1, flush=True)",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        assert os.stat(f"/proc/{process.pid}/task").st_nlink - 2 == 2
        assert host_resources._tasks_of_user() >= 2
        process.stdin.close()
    assert before >= 1


# What was ignored before.


def test_the_end_of_a_rank_is_known_where_sigchld_was_ignored(launch):
    prefix = (
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
    )
    script = "import os, syncvar as sv; sv.all_reduce(1); os.kill(os.getpid(), 9) if sv.rank() else sv.all_reduce(1)"
    job = launch(script, workers=2, prefix=prefix)
    assert job.wait() == 137, str(job)
    assert "rank 1 on" in job.report
    assert "was killed by signal 9 (SIGKILL)" in job.report


# Names that are nearly right, and readers that leave.


def test_a_variable_that_is_nearly_a_setting_is_told_once(tmp_path):
    env = {**os.environ, "SYNCVAR_COLECTIVE_TIMEOUT_S": "1", "SYNCVAR_OF_MY_OWN": "1"}
    ended = launched([*MODULE, "-n", "2", "--no-python", "true"], tmp_path, env=env)
    assert ended.returncode == 0
    assert (
        ended.stderr
        == "syncvar-launch: SYNCVAR_COLECTIVE_TIMEOUT_S is no setting (did you mean SYNCVAR_COLLECTIVE_TIMEOUT_S?)\n"
    )
    alone = launched(
        [sys.executable, "-c", "import syncvar as sv; sv.init(); sv.barrier()"], tmp_path, env=env
    )
    assert (alone.returncode, alone.stderr) == (0, ended.stderr.removeprefix("syncvar-launch: "))


@pytest.mark.parametrize(
    "words",
    [
        ("settings",),
        ("coming-from", "mpi4py"),
        ("plan", "all_reduce", "--ranks", "8", "--count", "100"),
    ],
    ids=" ".join,
)
def test_a_reader_of_the_syncvar_command_may_leave(tmp_path, words):
    read, write = os.pipe()
    os.close(read)
    line = [
        sys.executable,
        "-c",
        "import sys; from syncvar.cli.commands import main; sys.exit(main())",
        *words,
    ]
    ended = subprocess.run(
        line,
        cwd=tmp_path,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
