"""`--events FILE`: what happens to a job as JSON lines, whole and in order, whoever reads them."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from syncvar.core.errors import ConfigError
from syncvar_launcher.job.job_files import EventLog
from tests.support.launching import await_true

FIELDS = {
    "job_start": {
        "version",
        "host",
        "hosts",
        "workers",
        "servers",
        "kind",
        "target",
        "programs",
        "start_method",
        "max_restarts",
        "options",
        "pid",
    },
    "rank_start": {"rank", "host", "pid", "restarts"},
    "met": {"generation", "after_s"},
    "stall": {"text"},
    "notice": {"text"},
    "signal": {"signal", "name"},
    "signal_forwarded": {"signal", "name"},
    "rank_failed": {"rank", "error", "message"},
    "rank_end": {"rank", "pid", "exit_code", "signal"},
    "restart": {"number", "reason", "pause_s", "generation", "rank", "why"},
    "preempted": {"signal"},
    "job_end": {"exit_code", "rank", "why", "elapsed_s"},
}

SCRIPT = """
import os, signal, sys
import probe, syncvar as sv

signal.signal(signal.SIGUSR1, lambda *_: probe.open_gate("signalled"))
if probe.RANK == 1 and os.environ["SYNCVAR_RESTARTS"] == "0":
    sv.barrier()
    raise ValueError("planted failure")
sv.barrier()
if os.environ["SYNCVAR_RESTARTS"] == "0":
    sv.barrier()
probe.note("again")
if probe.RANK == 1:
    probe.gate("signalled")
assert sv.all_reduce(1) == 2
"""


def read(path):
    """Return the events of a file, each with exactly the fields that are documented."""
    text = path.read_text()
    assert text.endswith("\n")
    events = [json.loads(line) for line in text.splitlines()]
    for event in events:
        assert event.keys() == FIELDS[event["event"]] | {"event", "time", "monotonic", "job"}, event
    assert [event["monotonic"] for event in events] == sorted(
        event["monotonic"] for event in events
    )
    return events


def test_the_events_of_a_job_with_one_restart(launch, tmp_path):
    path = tmp_path / "events.jsonl"
    env = {
        "SYNCVAR_RESTART_DELAY_S": "0.05",
        "SYNCVAR_STALL_WARNING_S": "0.2",
        "MY_SECRET": "hunter2",
    }
    job = launch(
        SCRIPT, options=["--events", str(path), "--max-restarts", "1", "-x", "MY_SECRET"], env=env
    )
    job.await_events("again", 2)
    await_true(lambda: '"stall"' in path.read_text(), what="the word about the wait")
    job.send(signal.SIGUSR1)
    assert job.wait() == 0, str(job)
    events = read(path)
    of = {what: [event for event in events if event["event"] == what] for what in FIELDS}
    counts = Counter(event["event"] for event in events)
    for what, count in {
        "job_start": 1,
        "rank_start": 4,
        "met": 2,
        "rank_end": 4,
        "restart": 1,
        "signal_forwarded": 1,
        "job_end": 1,
    }.items():
        assert counts[what] == count, counts
    assert not counts["signal"], "it was not one that ends the job"
    assert events[0]["event"] == "job_start"
    assert events[-1] == of["job_end"][0]
    assert len({event["job"] for event in events}) == 1
    assert sorted((one["rank"], one["restarts"]) for one in of["rank_start"]) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert (
        {one["pid"] for one in of["rank_start"]}
        == {one["pid"] for one in of["rank_end"]}
        == {one["pid"] for one in job.events("began")}
    )
    failed = next(one for one in of["rank_failed"] if one["rank"] == 1)
    assert (failed["error"], failed["message"]) == ("ValueError", "planted failure")
    restart = of["restart"][0]
    assert (restart["rank"], restart["number"], restart["generation"]) == (1, 1, 1)
    assert "rank 1" in restart["why"]
    assert "ValueError" in restart["why"]
    assert of["met"][0]["generation"] == 0
    assert of["met"][1]["generation"] == 1
    assert "rank 1" in of["stall"][-1]["text"]
    assert [one["exit_code"] for one in of["rank_end"][2:]] == [0, 0]
    assert (of["job_end"][0]["exit_code"], of["job_end"][0]["rank"]) == (0, None)
    assert "hunter2" not in path.read_text()

    again = launch(
        "import probe; probe.note('ready'); probe.gate('never')", options=["--events", str(path)]
    )
    again.await_events("ready", 2)
    again.send(signal.SIGTERM)
    assert again.wait() == 143, str(again)
    more = read(path)[len(events) :]
    assert [one["name"] for one in more if one["event"] == "signal"] == ["SIGTERM"], "appended"
    assert more[-1]["exit_code"] == 143
    assert more[-1]["job"] != events[0]["job"]


def test_a_pipe_that_nobody_reads_stops_nobody(launch, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    job = launch("import syncvar as sv; sv.barrier()", options=["--events", str(tmp_path / "pipe")])
    assert job.wait() == 0, str(job)


def log(path, said):
    return EventLog(path, "j", said.append)


def test_what_a_reader_does_not_take_is_dropped_in_the_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    said = []
    events = log(tmp_path / "pipe", said)
    began = time.monotonic()
    for _ in range(1000):
        events.add("notice", text="x" * 5000)  # no more than 2 000 characters of it
    events.close()
    assert time.monotonic() - began < 30
    assert said == [f"some events were dropped, because nobody read {tmp_path / 'pipe'}"]


def test_a_reader_gets_whole_lines_and_a_full_disk_is_told_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    said = []
    events = log(tmp_path / "pipe", said)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for number in range(100):
        events.add("notice", text=f"{number} \x1b[2J \n")
    lines = os.read(reader, 1 << 20).splitlines()
    os.close(reader)
    assert [json.loads(line)["text"] for line in lines] == [
        f"{number} \x1b[2J \n" for number in range(100)
    ]
    events.close()
    full = log(Path("/dev/full"), said)
    full.add("notice", text="x")
    full.add("notice", text="x")
    full.close()
    assert said == [
        "cannot write /dev/full of --events: No space left on device; the job goes on without it"
    ]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "no" / "file", tmp_path / "link"):
        with pytest.raises(ConfigError, match="of --events"):
            log(path, [])
    nothing = log(None, [])
    nothing.add("notice", text="")
    nothing.flush()
    nothing.close()
