"""The example `syncvar.examples.elastic_digits` while workers are killed: the last line of an undisturbed run."""

import json
import os
import signal

import pytest

from tests.support.launching import await_true


def digits(launch, workers, pause_s=0.0, options=()):
    target = ["-m", "syncvar.examples.elastic_digits"]
    arguments = ["--epochs", "3", "--pause", str(pause_s)]
    return launch(target=target, workers=workers, arguments=arguments, options=options)


@pytest.mark.slow
def test_digits_trains_the_same_weights_while_workers_are_killed(launch):
    job = digits(launch, "1:3", 0.1, ("--events", "events.jsonl", "--max-restarts", "1"))
    await_true(lambda: job.out.count("begins at step 0") == 3, what="the start")
    events = map(json.loads, (job.folder / "events.jsonl").read_text().splitlines())
    pids = {one["rank"]: one["pid"] for one in events if one["event"] == "rank_start"}
    os.kill(pids[0], signal.SIGKILL)
    await_true(lambda: job.out.count("worker 0 of 2 begins at step") == 1, what="two workers")
    os.kill(pids[2], signal.SIGKILL)
    assert job.wait() == 0, job
    undisturbed = digits(launch, 2)
    assert undisturbed.wait() == 0, undisturbed
    (expected,) = [line[4:] for line in undisturbed.out.splitlines() if "weights_sha256" in line]
    assert expected.startswith("steps=33 rows=3960 "), undisturbed
    assert expected in job.out, job
