"""Files that a user asks for are tried before the ranks start, and a file that is lost is named at the end."""

import contextlib
import json
import os
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
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0, ended
    assert "of SYNCVAR_TRACE: Not a directory" in ended.stderr
    assert "reduced" not in ended.stdout


def test_logs_events_and_traces_that_are_lost_are_named(launch, disk):
    job = launch(
        FILL, arguments=[str(disk)], env={"SYNCVAR_TRACE": f"{disk}/trace"},
        options=["--log-dir", f"{disk}/logs", "--output", "none", "--events", "/dev/full"],
    )  # fmt: skip
    assert job.wait() == 74, str(job)
    for rank in range(2):
        assert f"cannot write {disk}/logs/rank-{rank}.out of --log-dir: No space left" in job.report
        name = f"{disk}/trace/flight-rank{rank}.json"
        assert f"rank {rank}: cannot write {name} of SYNCVAR_TRACE: No space left" in job.report
    assert "its last 5001 bytes are missing" in job.report, str(job)
    assert "cannot write /dev/full of --events: No space left" in job.report, str(job)
    assert "all ranks succeeded, and files are lost: exit code 74" in job.report, str(job)


def test_totals_and_output_that_are_lost_change_the_exit_code(launch):
    job = launch(CHAT, options=["--stats=/dev/full"])
    assert job.wait() == 74, str(job)
    assert "cannot write /dev/full of --stats: No space left on device" in job.report, str(job)
    shell = ["sh", "-c", 'exec "$0" "$@" >/dev/full']
    job = launch(CHAT, prefix=shell)
    assert job.wait() == 74, str(job)
    assert "cannot write the standard output of the launcher: No space left" in job.report, str(job)


def test_flight_records_that_are_lost_are_named(launch, disk):
    fill(disk)
    job = launch("import syncvar as sv\nsv.barrier()\nassert sv.rank()\nsv.barrier()", env={"XDG_STATE_HOME": str(disk)})
    assert job.wait() == 1, str(job)
    assert "of flight records: No space left on device" in job.report, str(job)
    assert "set XDG_STATE_HOME to a folder with free space" in job.report, str(job)


def test_files_that_can_be_written_are_written_and_kept(launch, tmp_path):
    (tmp_path / "events").write_text('{"event": "of an earlier job"}\n')
    job = launch(
        CHAT, env={"SYNCVAR_TRACE": str(tmp_path / "new/trace")},
        options=["--events", str(tmp_path / "events"), f"--stats={tmp_path}/stats", "--log-dir", f"{tmp_path}/logs"],
    )  # fmt: skip
    assert job.wait() == 0, str(job)
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert events[0] == "of an earlier job"
    assert events[-1] == "job_end"
    assert json.loads((tmp_path / "stats").read_text())["missing"] == []
    assert len(list((tmp_path / "new/trace").glob("*.json"))) == 2
    assert (tmp_path / "new/trace").stat().st_mode & 0o77 == 0, "records are private"
    assert not [path for path in tmp_path.rglob("*") if "probe-" in path.name]
