"""Jobs that are started again after a failure, and jobs that are told to stop: what they end with, and what they leave."""

import itertools
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching import await_true, check_bound, state

SLOWLY = pytest.mark.slow

# A fault is [rank, place, step], by the number of restarts before it: who kills himself, where, at which step.
TRAINING = """
    import hashlib, json, os, signal, sys, time
    import numpy as np
    import probe, syncvar as sv
    from syncvar.checkpoint.folder import Disk

    directory, faults, pause_s = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
    restarts = os.environ["SYNCVAR_RESTARTS"]
    fault = faults.get(restarts)
    rank = int(os.environ["SYNCVAR_RANK"])

    def perhaps(place, step):
        if fault == [rank, place, step]:
            probe.note("dies", place=place, step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def rename(folder, source, target, original=Disk.rename):
        perhaps("before " + target.partition("-")[0].partition(".")[0], current[0])
        original(folder, source, target)
        perhaps("after " + target.partition("-")[0].partition(".")[0], current[0])

    Disk.rename, current = staticmethod(rename), [-1]
    probe.note("starts", restarts=restarts, generation=os.environ["SYNCVAR_GENERATION"])
    perhaps("meet", -1)
    strategy = sv.MultiWorkerMirroredStrategy(reproducible=True)
    assert sv.restart_count() == int(restarts)
    with strategy.scope():
        w = sv.Variable(np.ones(300), name="w", aggregation="MEAN")
        seen = sv.Variable(0, name="seen", synchronization="ON_READ", aggregation="SUM")
        own = sv.Variable(0.0, name="own", synchronization="NONE")
    mine = np.random.default_rng(100 + rank)
    optimizer = sv.optimizers.Adam(0.01)
    data = sv.data.from_arrays({"x": np.arange(480.0)}, batch_size=48, shuffle=True, seed=5).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = sv.Checkpoint(w=w, seen=seen, own=own, mine=mine, optimizer=optimizer, batches=batches, step=-1)

    def train(x):
        gradient = w.read_value() * mine.random(300) + x.mean()
        perhaps("compute", current[0])
        optimizer.apply_gradients([(gradient, w)])
        perhaps("write", current[0])
        seen.assign_add(len(x))
        own.assign_add(mine.random())

    with sv.CheckpointManager(checkpoint, directory, keep=2, on_preemption=True) as manager:
        perhaps("restore", -1)
        if manager.restore_latest() is not None:
            probe.note("restored", step=checkpoint.step)
        for step in range(checkpoint.step + 1, 24):
            current[0] = step
            strategy.run(train, args=(next(batches)["x"],))
            checkpoint.step = step
            time.sleep(pause_s)
            if step == 6:
                probe.note("running")
            if manager.should_stop():
                probe.note("stops", step=step)
                manager.stop(step)
            if step % 4 == 3:
                manager.save(step)
    everything = [w.numpy(), seen.numpy(), np.float64(optimizer.iterations)]
    everything += [*sv.all_gather(mine.random(1)), *sv.all_gather(own.numpy())]
    probe.note("final", digest=hashlib.sha256(b"".join(np.asarray(one).tobytes() for one in everything)).hexdigest())
"""

_expected = {}


def training(launch, directory, workers, faults=None, pause_s=0.0, options=()):
    arguments = [str(directory), json.dumps(faults or {}), str(pause_s)]
    return launch(TRAINING, workers=workers, arguments=arguments, options=options)


def digests(job):
    return {event["digest"] for event in job.events("final")}


def expected(launch, tmp_path, workers):
    """Return the digest of a run that nothing disturbs."""
    if workers not in _expected:
        job = training(launch, tmp_path / "undisturbed", workers)
        assert job.wait() == 0, job
        (_expected[workers],) = digests(job)
        assert len(job.events("final")) == workers
    return _expected[workers]


def seeded(seed, workers, *places):
    """Return faults, one for each start: who and when are drawn, where is given."""
    draw = np.random.default_rng(seed)
    return {
        str(number): [int(draw.integers(workers)), place, int(draw.integers(5, 11))]
        for number, place in enumerate(places)
    }


@pytest.mark.parametrize(
    ("workers", "faults", "options"),
    [
        (2, {**seeded(1, 2, "compute"), "1": [1, "meet", -1], "2": [0, "before manifest", 15]}, ()),
        pytest.param(3, {"0": [1, "after shard", 7], "1": [2, "meet", -1]}, (), marks=SLOWLY),
        pytest.param(3, seeded(2, 3, "write", "write"), (), marks=SLOWLY),
        pytest.param(
            3, {"0": [0, "after manifest", 11], "1": [0, "restore", -1]}, (), marks=SLOWLY
        ),
        pytest.param(
            4,
            {"0": [3, "before shard", 11], "1": [1, "write", 13]},
            ("--fake-hosts", "2"),
            marks=SLOWLY,
        ),
    ],
)
def test_killed_and_started_again_and_again_the_weights_are_the_same_to_the_bit(
    launch, tmp_path, workers, faults, options
):
    whole = expected(launch, tmp_path, workers)
    job = training(
        launch,
        tmp_path / "c",
        workers,
        faults,
        options=("--max-restarts", str(len(faults)), *options),
    )
    assert job.wait() == 0, job
    assert [(event["rank"], event["place"], event["step"]) for event in job.events("dies")] == [
        tuple(one) for one in faults.values()
    ], job
    assert len(job.events("final")) == workers
    assert digests(job) == {whole}, job
    starts = {(event["restarts"], event["generation"]) for event in job.events("starts")}
    assert starts == {(str(number), str(number)) for number in range(len(faults) + 1)}
    for number, (rank, _, _) in enumerate(faults.values(), 1):
        assert f"\n  {number}. after " in job.err
        assert f"rank {rank} on" in next(
            line for line in job.err.split("\n") if line.startswith(f"  {number}. after ")
        )
    assert f"syncvar: started again {len(faults)} times:" in job.err


def test_the_launcher_told_to_end_lets_the_ranks_save_and_the_next_launch_goes_on(launch, tmp_path):
    whole = expected(launch, tmp_path, 2)
    options = ("--max-restarts", "2")
    first = training(launch, tmp_path / "c", 2, pause_s=0.03, options=options)
    first.await_events("running", 2)
    first.send(signal.SIGTERM)
    assert first.wait() == 75, first
    (step,) = {event["step"] for event in first.events("stops")}
    assert 6 <= step < 23
    assert len(first.events("starts")) == 2, (
        "it is not started again: somebody wants the machine back"
    )
    assert first.report.rstrip("\n").split("\n") == [
        "syncvar: received SIGTERM: ending the ranks, up to 5 s; a second signal kills them",
        "syncvar: the ranks stopped as asked after SIGTERM (exit code 75); run it again to go on",
    ]
    second = training(launch, tmp_path / "c", 2, options=options)
    assert second.wait() == 0, second
    assert {event["step"] for event in second.events("restored")} == {step}
    assert digests(second) == {whole}, second


def test_a_rank_told_to_end_by_somebody_else_lets_all_save_and_they_are_started_again(
    launch, tmp_path
):
    whole = expected(launch, tmp_path, 2)
    job = training(launch, tmp_path / "c", 2, pause_s=0.03, options=("--max-restarts", "1"))
    job.await_events("running", 2)
    job.kill_rank(1, signal.SIGTERM)
    assert job.wait() == 0, job
    assert digests(job) == {whole}, job
    (step,) = {event["step"] for event in job.events("stops")}
    assert {event["step"] for event in job.events("restored")} == {step}
    assert "syncvar: the ranks stopped as asked (exit code 75)\n" in job.err
    assert "all ranks stopped as asked" in job.err.split("started again 1 time:\n")[1]


def test_a_scheduler_that_signals_every_process_is_one_notice(launch, tmp_path):
    job = training(launch, tmp_path / "c", 2, pause_s=0.03)
    job.await_events("running", 2)
    for rank in range(2):
        job.kill_rank(rank, signal.SIGTERM)
    job.send(signal.SIGTERM)
    assert job.wait() == 75, job
    assert len({event["step"] for event in job.events("stops")}) == 1


SLOW = """
    import sys, time
    import probe, syncvar as sv

    v = sv.Variable(1.0, name="v")
    with sv.CheckpointManager(sv.Checkpoint(v=v), sys.argv[1], on_preemption=sys.argv[2] == "listens") as manager:
        probe.note("running")
        until = time.monotonic() + 100
        while sys.argv[2] == "no" and time.monotonic() < until:
            try:
                time.sleep(0.05)
            except SystemExit:  # a program that does not want to end
                probe.note("told")
        probe.gate("told")
        time.sleep(0.9)
        if manager.should_stop():
            manager.stop(1)
"""


def test_only_ranks_that_save_first_get_the_longer_grace(launch, tmp_path):
    options = ("--grace", "0.3", "--preempt-grace", "100")
    jobs = {
        how: launch(SLOW, arguments=[str(tmp_path / how), how], options=options)
        for how in ("listens", "no")
    }
    for job in jobs.values():
        job.await_events("running", 2)
        job.told = job.send(signal.SIGTERM)
        job.open_gate("told")
    assert jobs["no"].wait() == 143, jobs["no"]
    assert jobs["no"].ended - jobs["no"].told < 60, "long before the longer grace"
    assert jobs["listens"].wait() == 75, jobs["listens"]


FAILING = """
    import os, sys, time
    import numpy as np
    import probe, syncvar as sv

    restarts = int(os.environ["SYNCVAR_RESTARTS"])
    print("start", restarts, flush=True)
    sv.all_reduce(np.ones(100_000))
    probe.note("met", folder=os.environ["SYNCVAR_RENDEZVOUS"].removeprefix("ipc://").rpartition("/")[0])
    probe.gate(f"go-{restarts}")
    if sv.rank() == restarts % sv.world_size():
        sys.exit(40 + restarts)
    sv.barrier()
"""


@pytest.mark.parametrize("options", [(), pytest.param(("--fake-hosts", "2"), marks=SLOWLY)])
def test_the_limit_ends_the_job_with_the_last_culprit_and_nothing_stays_of_an_earlier_start(
    launch, tmp_path, pytestconfig, options
):
    job = launch(
        FAILING,
        workers=2,
        options=("--max-restarts", "2", "--log-dir", str(tmp_path / "logs"), *options),
    )
    pids, folders = set(), set()
    for number in range(3):
        met = job.await_events("met", 2 * (number + 1))[-2:]
        assert {event["rank"] for event in met} == {0, 1}
        assert not pids & {event["pid"] for event in met}
        assert all(not state(pid) for pid in pids), "the processes of the start before have ended"
        (folder,) = {event["folder"] for event in met}
        there = {
            entry.path
            for entry in os.scandir(f"{pytestconfig.syncvar_runtime}/syncvar")
            if entry.is_dir()
        }
        assert there == {folder}, "one private folder, that of this start"
        assert folder not in folders
        pids |= {event["pid"] for event in met}
        folders.add(folder)
        job.open_gate(f"go-{number}")
    assert job.wait() == 42, job
    report = job.report
    titles = [line for line in report.split("\n") if line.startswith("syncvar: rank ")]
    assert [
        ("rank 0" in one, f"exited with status {40 + at} after" in one)
        for at, one in enumerate(titles)
    ] == [
        (True, True),
        (False, True),
        (True, True),
    ]
    assert "syncvar: restart 1 of 2, in 0.1 s, as attempt 2\n" in report
    assert "syncvar: restart 2 of 2, in 0.2 s, as attempt 3\n" in report
    assert "syncvar: not started again: there have been 2 of 2 restarts\n" in report
    assert report.count("\ntry:\n") == 1, "advice for the last only"
    summary = report.split("started again 2 times:\n")[1].rstrip("\n").split("\n")
    assert [
        "rank 0" in summary[0],
        "status 40" in summary[0],
        "rank 1" in summary[1],
        "status 41" in summary[1],
    ] == [True] * 4
    assert (tmp_path / "logs" / "rank-1.out").read_text().split("\n") == [
        "start 0",
        "=== syncvar: restart 1 of 2, attempt 2 ===",
        "start 1",
        "=== syncvar: restart 2 of 2, attempt 3 ===",
        "start 2",
        "",
    ]


@pytest.mark.slow
def test_a_launcher_that_is_killed_in_a_later_start_leaves_nothing(launch, nothing_left_behind):
    job = launch(FAILING, workers=2, options=("--max-restarts", "2"))
    job.await_events("met", 2)
    job.open_gate("go-0")
    job.await_events("met", 4)
    killed = job.send(signal.SIGKILL)
    job.wait()
    await_true(lambda: not nothing_left_behind.own_processes(), 60, "the end of every process")
    check_bound("a launcher that is killed in a later start", time.monotonic() - killed, 3.0)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(2)", 2),
        pytest.param("sv.Variable([1.0], aggregation='NO')", 1, marks=SLOWLY),
        pytest.param("import no_such_module", 1, marks=SLOWLY),
    ],
)
def test_what_would_come_again_is_not_tried_again(launch, end, code):
    job = launch(
        f"import sys, probe, syncvar as sv\nsv.init()\n{end}",
        workers=1,
        options=("--max-restarts", "5"),
    )
    assert job.wait() == code, job
    assert len(job.events("began")) == 1
    assert "syncvar: not started again: " in job.err
    assert "would come again" in job.err


DYING = """
    import probe, sys
    sys.exit(9)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=SLOWLY)]
)
def test_a_signal_in_the_pause_before_a_restart_ends_the_job(launch, number, code):
    job = launch(
        DYING, workers=1, options=("--max-restarts", "5"), env={"SYNCVAR_RESTART_DELAY_S": "20"}
    )
    await_true(lambda: "as attempt 2" in job.err)
    told = job.send(number)
    assert job.wait() == code, job
    check_bound("a signal in the pause", job.ended - told, 1.0)
    assert f"interrupted by {signal.Signals(number).name} before the restart" in job.err
    assert len(job.events("began")) == 1


@pytest.mark.slow
def test_the_time_limit_counts_over_all_starts_and_pauses_grow(launch):
    limit_s = 4.0
    job = launch(DYING, workers=1, options=("--max-restarts", "1000", "--timeout", str(limit_s)))
    assert job.wait() == 124, job
    assert limit_s <= job.ended - job.began
    check_bound("the time limit", job.ended - job.began - limit_s, 2.0)
    began = [event["at"] for event in job.events("began")]
    assert 2 <= len(began) <= 2 + math.log2(limit_s / 0.1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert all(gap >= pause for gap, pause in zip(gaps, (0.1, 0.2, 0.4), strict=False)), gaps
    assert f"the time limit of {limit_s:g} s passed" in job.err


@pytest.mark.slow
def test_the_example_killed_and_started_again_ends_as_if_nothing_had_happened(launch, tmp_path):
    def start(name, *options):
        return launch(
            target=["-m", "syncvar.examples.resume"],
            arguments=[str(tmp_path / name), "--steps", "120"],
            options=options,
            start="spawn",
        )

    whole = start("whole")
    assert whole.wait() == 0, whole
    killed = start("killed", "--max-restarts", "2")
    await_true(
        lambda: (
            (tmp_path / "killed").is_dir()
            and any("manifest" in str(path) for path in (tmp_path / "killed").rglob("*"))
        )
    )
    victim = _worker(killed, 1)
    os.kill(victim, signal.SIGKILL)
    assert killed.wait() == 0, killed
    assert "rank 1 on" in killed.err.split("started again 1 time:\n")[1]
    assert killed.lines(0)[-1] == whole.lines(0)[-1]
    assert killed.lines(0)[-1].startswith("steps=120 weights_sha256=")


def _worker(job, rank):
    """Return the process of a rank, found by its environment."""
    for child in (
        Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    ):
        if f"SYNCVAR_RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(
            b"\0"
        ):
            return int(child)
    raise AssertionError(f"rank {rank} does not run")
