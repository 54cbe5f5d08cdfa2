"""Checkpoints of real processes: killed at every step of a save, resumed bit for bit, stopped by SIGTERM."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import syncvar as sv
from tests.support.launching import await_true
from tests.support.paths import RANK_SCRIPTS


@pytest.mark.slow
def test_a_save_that_is_killed_at_any_step_leaves_the_old_or_the_new(tmp_path):
    script = RANK_SCRIPTS / "killed_saves.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 38
    for line in lines:
        assert line["status"] == signal.SIGKILL, line
        is_new = line["file"] == "manifest" and (line["step"], line["when"]) in {
            ("rename", "after"),
            ("sync_folder", "before"),
            ("sync_folder", "after"),
            ("remove", "before"),
            ("remove", "after"),
        }
        value = 2.0 if is_new else 1.0
        assert line["found"] == [[[value], value], [[value], value + 1], [[value], -1.0]], line
        assert line["after"] == [[[3.0], 3.0], [[3.0], 4.0], [[3.0], -1.0]], line
        assert line["names"] == 3, f"what the killed save left is removed: {line}"
    assert any(line["left"] > 4 for line in lines), "there was something to remove"


TRAINING = """
    import hashlib, os, signal, sys
    import numpy as np
    import syncvar as sv
    from syncvar.checkpoint.folder import Disk

    folder, kill = sys.argv[1], sys.argv[2].split(",")
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.ones(1000), name="w", aggregation="MEAN")
        seen = sv.Variable(0, name="seen", synchronization="ON_READ", aggregation="SUM")
        own = sv.Variable(0.0, name="own", synchronization="NONE")
    shared, mine = np.random.default_rng(1), np.random.default_rng(100 + sv.rank())
    optimizer = sv.optimizers.Adam(0.01)
    data = sv.data.from_arrays({"x": np.arange(960.0)}, batch_size=48, shuffle=True, seed=5)
    batches = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = sv.Checkpoint(w=w, seen=seen, own=own, shared=shared, mine=mine, optimizer=optimizer, batches=batches, step=-1)

    def train(x):
        optimizer.apply_gradients([(w.read_value() * shared.random() + mine.random(1000) + x.mean(), w)])
        seen.assign_add(len(x))
        own.assign_add(mine.random())

    with sv.CheckpointManager(checkpoint, folder, keep=2) as manager:
        print("restored", manager.restore_latest() is not None and checkpoint.step, flush=True)
        for step in range(checkpoint.step + 1, 12):
            strategy.run(train, args=(next(batches)["x"],))
            checkpoint.step = step
            if step == 7 and kill[0] == str(sv.rank()):
                original = Disk.rename
                def rename(folder, source, target):
                    if target.startswith(kill[1]):
                        if kill[2] == "after":
                            original(folder, source, target)
                        os.kill(os.getpid(), signal.SIGKILL)
                    original(folder, source, target)
                Disk.rename = staticmethod(rename)
            if step % 2:
                manager.save(step)
    everything = [w.numpy(), seen.numpy(), shared.random(3), np.float64(optimizer.iterations)]
    everything += [*sv.all_gather(mine.random(1)), *sv.all_gather(own.numpy())]
    print("final", hashlib.sha256(b"".join(np.asarray(one).tobytes() for one in everything)).hexdigest(), flush=True)
"""


def last(job, rank, word):
    return [line.split()[1] for line in job.lines(rank) if line.startswith(word)][-1]


@pytest.mark.parametrize(
    ("kill", "step"),
    # By default test_restarts.py kills between the files of a save; here it is somebody else who starts the ranks again.
    [
        pytest.param("1,shard,before", "5", marks=pytest.mark.slow),
        pytest.param("0,manifest,after", "7", marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_of_a_save_and_resumed_the_weights_are_the_same_to_the_bit(
    launch, tmp_path, kill, step
):
    whole = launch(TRAINING, arguments=[str(tmp_path / "whole"), "none"])
    assert whole.wait() == 0, whole
    expected = last(whole, 0, "final")
    assert last(whole, 1, "final") == expected
    folder = str(tmp_path / "killed")
    first = launch(TRAINING, arguments=[folder, kill])
    assert first.wait() == 128 + signal.SIGKILL, first
    second = launch(TRAINING, arguments=[folder, "none"])
    assert second.wait() == 0, second
    assert last(second, 0, "restored") == last(second, 1, "restored") == step
    assert last(second, 0, "final") == last(second, 1, "final") == expected
    assert sorted(os.listdir(folder)) == ["step-0000000009", "step-0000000011"]


DAMAGED = """
    import os, sys
    import numpy as np
    import probe, syncvar as sv

    w = sv.Variable(np.zeros(4), name="w", aggregation="MEAN")
    with sv.CheckpointManager(sv.Checkpoint(w=w), sys.argv[1]) as manager:
        path = manager.restore_latest()
        probe.note("restored", path=path, value=float(w.numpy()[0]))
        if path is None:
            for step in (1, 2):
                w.assign(np.full(4, float(step)))
                manager.save(step)
            sv.barrier()
            if sv.rank() == 0:
                os.truncate(os.path.join(manager.latest, "manifest.json"), 10)
                sys.exit(3)
            sv.barrier()
"""


def test_a_restart_goes_on_from_the_checkpoint_before_a_damaged_one(launch, tmp_path):
    job = launch(DAMAGED, arguments=[str(tmp_path)], options=["--max-restarts", "1"])
    assert job.wait() == 0, job
    again = [event for event in job.events("restored") if event["path"] is not None]
    assert [(event["path"][-1], event["value"]) for event in again] == [("1", 1.0)] * 2
    assert f"{tmp_path}/step-0000000002 cannot be read: the manifest is not JSON" in job.err


LOST = """
    import os, signal, sys
    import numpy as np
    import probe, syncvar as sv

    w = sv.Variable(np.zeros(4), name="w", aggregation="MEAN")
    with sv.CheckpointManager(sv.Checkpoint(w=w), sys.argv[1]) as manager:
        manager.save(1)
        manager.save(2, async_op=True)
        if sv.rank() == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        while not manager.should_stop():
            pass
"""


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_during_a_save_is_named_and_the_program_is_not_blamed(
    launch, tmp_path, lost
):
    job = launch(LOST, workers=3, arguments=[str(tmp_path), str(lost)])
    assert job.wait() == 128 + signal.SIGKILL, job
    assert (
        job.err.count(f"{tmp_path}/step-0000000002 ended without a commit: rank {lost} on ") == 1
    ), job
    assert job.err.count("The checkpoints before it are complete") == 1, job
    assert "call wait()" not in job.err, job
    manager = sv.CheckpointManager(sv.Checkpoint(w=sv.Variable(np.zeros(4))), tmp_path)
    assert manager.restore_latest() == f"{tmp_path}/step-0000000001"


PREEMPTED = """
    import sys, time
    import numpy as np
    import probe, syncvar as sv

    w = sv.Variable(np.zeros(4), name="w", aggregation="SUM")
    with sv.CheckpointManager(sv.Checkpoint(w=w), sys.argv[1], keep=1, on_preemption=True) as manager:
        manager.save(10_000)  # a later step of a run before
        for step in range(10_000):
            w.assign(np.full(4, float(step)) / sv.world_size())
            if step == 3:
                probe.note("running")
            time.sleep(0.002)
            if manager.should_stop():
                probe.note("stops", step=step)
                manager.stop(step)
"""


def test_sigterm_to_one_rank_is_a_notice_and_all_save_the_same_step_and_exit_75(launch, tmp_path):
    job = launch(PREEMPTED, workers=3, arguments=[str(tmp_path / "c")])
    job.await_events("running", 3)
    job.kill_rank(1, signal.SIGTERM)
    assert job.wait() == 75, job
    stops = {event["rank"]: event["step"] for event in job.events("stops")}
    assert set(stops) == {0, 1, 2}, job
    assert len(set(stops.values())) == 1
    assert os.listdir(tmp_path / "c") == [f"step-{stops[0]:010d}"], (
        "and nothing else, the lock neither"
    )
    assert f"step-{stops[0]:010d} to continue" in job.err


@pytest.mark.slow  # by default test_restarts.py tells the launcher to end, lets the ranks save and goes on
def test_the_example_that_is_stopped_by_sigterm_to_the_launcher_and_run_again_ends_as_one_left_alone(
    launch, tmp_path
):
    target, last_line = ["-m", "syncvar.examples.resume"], "steps=200 weights_sha256="
    whole = launch(target=target, arguments=[str(tmp_path / "whole"), "--steps", "200"])
    folder = tmp_path / "stopped"
    first = launch(target=target, arguments=[str(folder), "--steps", "200", "--pause", "0.02"])
    await_true(lambda: any(folder.glob("step-*/manifest.json")), what="the checkpoint of step 50")
    first.send(signal.SIGTERM)
    assert first.wait() == 75, first
    assert whole.wait() == 0, whole
    second = launch(target=target, arguments=[str(folder), "--steps", "200"])
    assert second.wait() == 0, second
    assert "continues after step" in second.out
    (expected,) = [line for line in whole.lines(0) if line.startswith(last_line)]
    assert expected in second.lines(0)
