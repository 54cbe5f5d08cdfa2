"""Files that a user asks for are tried before the ranks start, and a file that is lost is named at the end."""

import contextlib
import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

CHAT = """
import numpy as np, sys
import probe, syncvar as sv
probe.note("started")
sv.all_reduce(np.ones(4))
sys.stdout.write("x" * 60_000 + "\\n")
"""
FILL = """
import os, sys
import probe, syncvar as sv
sv.barrier()
if sv.rank() == 0:
    with open(sys.argv[1] + "/fill", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
sv.barrier()
print("y" * 5000)
"""


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of 200 KiB; return its folder and what fills it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    with open(folder / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("form", ["full", "file in place of the folder"])
def test_every_file_is_tried_before_the_ranks_start(launch, disk, tmp_path, form):
    if form == "full":
        fill(disk)
        folder, why = disk, "No space left on device; free some space there, or name another place"
    else:
        folder = tmp_path / "file"
        folder.write_text("")
        why = "Not a directory; make the folder first, or name another place"
    asked = [
        (["--log-dir", f"{folder}/logs"], {}, "--log-dir"),
        (["--events", f"{folder}/events"], {}, "--events"),
        ([f"--stats={folder}/stats"], {}, "--stats"),
        ([], {"SYNCVAR_TRACE": f"{folder}/trace"}, "SYNCVAR_TRACE"),
        ([], {"SYNCVAR_AUTO_LOG": f"{folder}/auto"}, "SYNCVAR_AUTO_LOG"),
    ]
    for job, origin in [(launch(CHAT, options=o, env=e), name) for o, e, name in asked]:
        assert job.wait() == 78, str(job)
        assert f"of {origin}: {why}" in job.report, str(job)
        assert str(folder) in job.report, str(job)
        assert not job.events("started"), str(job)


def test_a_rank_without_a_launcher_tries_its_trace_first(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {**os.environ, "SYNCVAR_TRACE": str(tmp_path / "file/trace")}
    command = [sys.executable, "-c", "import syncvar as sv; sv.all_reduce(1); print('reduced')"]
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode != 0, ended
    assert "of SYNCVAR_TRACE: Not a directory" in ended.stderr
    assert "reduced" not in ended.stdout


def test_a_rank_without_a_launcher_names_the_trace_that_it_loses(tmp_path):
    trace = tmp_path / "trace"
    (trace / "flight-rank0.json").mkdir(parents=True)
    script = "import syncvar as sv; sv.barrier(); sv.shutdown(); print('after the shutdown')"
    environ = {**os.environ, "SYNCVAR_TRACE": str(trace)}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended
    assert "after the shutdown" in ended.stdout
    assert (
        ended.stderr.count(f"cannot write {trace}/flight-rank0.json of SYNCVAR_TRACE: Is a dir")
        == 1
    )


@pytest.mark.parametrize("hosts", [[], ["--fake-hosts", "2"], ["-H", "localhost:2"]], ids=str)
def test_logs_events_and_traces_that_are_lost_are_named(launch, disk, hosts):
    job = launch(
        FILL,
        arguments=[str(disk)],
        env={"SYNCVAR_TRACE": f"{disk}/trace"},
        options=["--log-dir", f"{disk}/logs", "--output", "none", "--events", "/dev/full", *hosts],
    )
    assert job.wait() == 74, str(job)
    for rank in range(2):
        assert f"cannot write {disk}/logs/rank-{rank}.out of --log-dir: No space left" in job.report
        name = f"{disk}/trace/flight-rank{rank}.json"
        assert f"rank {rank}: cannot write {name} of SYNCVAR_TRACE: No space left" in job.report
    assert "its last 5001 bytes are missing" in job.report, str(job)
    assert "cannot write /dev/full of --events: No space left" in job.report, str(job)
    assert "all ranks succeeded, and files are lost: exit code 74" in job.report, str(job)


EVERY_FILE = """
import numpy as np, sys
import probe, syncvar as sv
from syncvar.variables import deferral_tuner as decisions, registry
checkpoint = sv.Checkpoint(w=sv.Variable(np.ones(3)))
with sv.CheckpointManager(checkpoint, sys.argv[1] + "/runs/a") as manager:
    manager.save(1)
    manager.save(2, async_op=True)
    if sv.rank() == 0:
        sv.save(sys.argv[1] + "/saved/model.safetensors", {"w": 1})
        change = decisions.DeferralChange(decisions.ProgramPoint("begin", 1, "step"), "w", "a", "b", "")
        registry.append_changes(sys.argv[1] + "/auto", 1, [change], begins=True)
print("done")
probe.note("ready")
probe.gate("look")
"""


@pytest.mark.parametrize(
    "umask",
    [
        pytest.param(0o022, marks=pytest.mark.slow),
        0o027,
        pytest.param(0o077, marks=pytest.mark.slow),
    ],
)
def test_files_that_a_user_asks_for_honour_the_umask_and_the_others_are_private(
    launch, tmp_path, umask
):
    place = tmp_path / "files"
    place.mkdir()
    options = [f"--log-dir={place}/logs", f"--events={place}/events", f"--stats={place}/stats"]
    job = launch(
        EVERY_FILE,
        arguments=[str(place)],
        options=options,
        env={"SYNCVAR_TRACE": f"{place}/a/trace"},
        prefix=["sh", "-c", f'umask {umask:o}; exec "$0" "$@"'],
    )
    job.await_events("ready", 2)
    runtime = os.environ["XDG_RUNTIME_DIR"]
    private = [path for path in pathlib.Path(runtime).rglob("*") if not path.is_symlink()]
    assert private
    assert [path for path in private if path.is_file() and path.stat().st_mode & 0o077] == []
    job.open_gate("look")
    assert job.wait() == 0, str(job)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "syncvar",
            "trace",
            "merge",
            f"{place}/a/trace",
            "-o",
            f"{place}/merged",
        ],
        check=False,
        umask=umask,
    )
    assert done.returncode == 0
    found = sorted(place.rglob("*"))
    names = {path.name for path in found}
    assert {
        "rank-0.out",
        "events",
        "stats",
        "flight-rank0.json",
        "manifest.json",
        "model.safetensors",
    } <= names, names
    assert {"auto", "merged"} <= names
    assert not [path for path in found if "tmp" in path.name]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    wanted = {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in found}
    assert modes == wanted


def test_a_benchmark_tries_its_files_first_and_names_those_it_loses():
    command = [
        sys.executable,
        "-m",
        "syncvar",
        "bench",
        "barrier",
        "--no-model",
        "--workers",
        "2",
        "-J",
    ]
    for path, code, why in (
        (
            "/nonexistent/file",
            2,
            "cannot write /nonexistent/file of --json: No such file or directory",
        ),
        ("/dev/full", 74, "rank 0: cannot write /dev/full of --json: No space left on device"),
    ):
        ended = subprocess.run(
            [*command, path], capture_output=True, text=True, timeout=110, check=False
        )
        assert ended.returncode == code, ended
        assert why in ended.stderr, ended
        assert ("Avg bus bandwidth" in ended.stdout) == (code == 74), ended


def test_a_merged_trace_goes_to_a_pipe_as_it_is(tmp_path):
    environ = {**os.environ, "SYNCVAR_TRACE": str(tmp_path / "trace")}
    subprocess.run(
        [sys.executable, "-c", "import syncvar as sv; sv.barrier()"],
        env=environ,
        timeout=110,
        check=True,
    )
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb") as file:
        command = [
            sys.executable,
            "-m",
            "syncvar",
            "trace",
            "merge",
            f"{tmp_path}/trace",
            "-o",
            f"{tmp_path}/pipe",
        ]
        subprocess.run(command, timeout=110, check=True)
        assert "traceEvents" in json.loads(file.read())
    assert (tmp_path / "pipe").is_fifo()


def test_totals_and_output_that_are_lost_change_the_exit_code(launch):
    job = launch(CHAT, options=["--stats=/dev/full"])
    assert job.wait() == 74, str(job)
    assert "cannot write /dev/full of --stats: No space left on device" in job.report, str(job)
    shell = ["sh", "-c", 'exec "$0" "$@" >/dev/full']
    job = launch(CHAT, prefix=shell)
    assert job.wait() == 74, str(job)
    assert "cannot write the standard output of the launcher: No space left" in job.report, str(job)


@pytest.mark.parametrize("hosts", [[], ["-H", "localhost:2"]], ids=str)
def test_flight_records_that_are_lost_are_named(launch, disk, hosts):
    fill(disk)
    script = "import syncvar as sv\nsv.barrier()\nassert sv.rank()\nsv.barrier()"
    job = launch(script, env={"XDG_STATE_HOME": str(disk)}, options=hosts)
    assert job.wait() == 1, str(job)
    assert "of flight records: No space left on device" in job.report, str(job)
    assert "set XDG_STATE_HOME to a folder with free space" in job.report, str(job)


def test_files_that_can_be_written_are_written_and_kept(launch, tmp_path):
    (tmp_path / "events").write_text('{"event": "of an earlier job"}\n')
    job = launch(
        CHAT,
        env={"SYNCVAR_TRACE": str(tmp_path / "new/trace")},
        options=[
            "--events",
            str(tmp_path / "events"),
            f"--stats={tmp_path}/stats",
            "--log-dir",
            f"{tmp_path}/logs",
        ],
    )
    assert job.wait() == 0, str(job)
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert events[0] == "of an earlier job"
    assert events[-1] == "job_end"
    assert json.loads((tmp_path / "stats").read_text())["missing"] == []
    assert len(list((tmp_path / "new/trace").glob("*.json"))) == 2
    assert not [path for path in tmp_path.rglob("*") if "probe-" in path.name]
