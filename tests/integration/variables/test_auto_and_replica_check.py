"""AUTO and the replica checker in real processes: one file of decisions, replayed; a flipped bit ends the job with words."""

import json

import pytest

LINKS = {"SYNCVAR_TRANSPORT": "zmq"}  # in shared memory nothing is decided

SCRIPT = """
import numpy as np
import syncvar as sv

strategy = sv.MirroredStrategy()
with strategy.scope():
    v = sv.Variable(np.zeros(2, np.float32), aggregation="SUM", name="v")
x = np.ones(2, np.float32)

def step(turns):
    for _ in range(6 if turns else 300):
        v.assign_add(x)
        if turns:
            v.numpy()

for number in range(72):
    strategy.run(step, args=(24 <= number < 48,))
changes = v.explain().changes
print("changes", [list(change[:3]) for change in changes], v.numpy().tolist(), changes[0][3])
"""


@pytest.mark.slow
def test_a_launched_job_changes_within_20_steps_and_can_be_replayed(launch, tmp_path):
    path = tmp_path / "auto.jsonl"
    job = launch(
        SCRIPT, workers=2, env={**LINKS, "SYNCVAR_AUTO_LOG": str(path), "SYNCVAR_LOG_LEVEL": "info"}
    )
    assert job.wait(120) == 0, str(job)
    first = [job.lines(rank)[-1] for rank in (0, 1)]
    assert first[0] == first[1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["begins"] is True
    changes = [(line["step"], line["to"]) for line in lines[1:]]
    assert [to for _, to in changes] == ["deferred", "eager", "deferred"]
    assert all(
        turn < step <= turn + 20 for (step, _), turn in zip(changes, (0, 24, 48), strict=True)
    )
    assert job.err.count("AUTO, run ") == 3

    again = launch(SCRIPT, workers=2, env={**LINKS, "SYNCVAR_AUTO_REPLAY": str(path)})
    assert again.wait(120) == 0, str(again)
    assert [again.lines(rank)[-1].rpartition("]")[0] for rank in (0, 1)] == [
        line.rpartition("]")[0] for line in first
    ]
    assert again.lines(0)[-1].endswith("replayed")


BROKEN = """
import numpy as np
import syncvar as sv

strategy = sv.MirroredStrategy()
with strategy.scope():
    v = sv.Variable(np.ones((100, 100)), name="weights")
for number in range(1, 101):
    if number == 42 and sv.rank() == 2:
        v._state.storage.array.view(np.uint64)[3, 7] ^= np.uint64(1)
    strategy.run(lambda: None)
"""


def test_a_flipped_bit_ends_a_launched_job_with_name_place_and_window(launch):
    job = launch(BROKEN, workers=3, env={"SYNCVAR_CHECK_EVERY": "20"})
    assert job.wait(120) != 0
    assert (
        "MismatchError: the copies of variable 'weights' are not the same on all replicas: rank 2 differs"
        in job.err
    )
    assert (
        "in elements 307 to 307 of the flat array. They parted after run 40 and not later than run 60"
        in job.err
    )
