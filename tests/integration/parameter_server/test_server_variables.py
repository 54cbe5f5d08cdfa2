"""Variables on servers as users write them, over real processes: exact sums whatever dies, and the bits of synchronous training."""

import os
import random
import re
import signal

import pytest
from test_servers import servers_of

from tests.support import counted_pushes
from tests.support.launching import Job, await_true

BITS = """
import numpy as np
import probe, syncvar as sv

servers = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=0)
for strategy in (servers, sv.MirroredStrategy(reproducible=True)):
    with strategy.scope():
        w = sv.Variable(np.linspace(-1, 1, 1001, dtype=np.float32), name=f"w{strategy is servers}", aggregation="MEAN")
    adam, noise = sv.optimizers.Adam(0.01), np.random.default_rng(sv.rank())
    for _ in range(8):
        strategy.run(lambda: adam.apply_gradients([(w.read_value() + noise.normal(size=1001).astype(np.float32), w)]))
    probe.note("bits", bits=w.numpy().tobytes().hex())
with servers.scope():
    v = sv.Variable(0, name="v")
if sv.rank() == 1:
    v.assign_add(5)
sv.barrier()
probe.note("seen", v=int(v))
"""


def start(launch, script, *options, workers=2, **keywords):
    return launch(script, options=("--servers", "2", *options), workers=workers, **keywords)


def test_staleness_0_gives_the_bits_of_synchronous_training_and_a_barrier_shows_every_push(launch):
    job = start(launch, BITS)
    assert job.wait() == 0, job
    bits = [event["bits"] for event in job.events("bits")]
    assert len(bits) == 4
    assert len(set(bits)) == 1
    assert [event["v"] for event in job.events("seen")] == [5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_sums_are_exact_when_a_server_or_a_worker_is_killed(launch, seed):
    """Kill one of them at the half, or, with the odd seeds, a worker and a server, a little while after the half."""
    draw = random.Random(seed)
    workers = draw.choice([2, 3])
    job = start(
        launch,
        counted_pushes.SCRIPT,
        "--server-replicas",
        "1",
        "--max-restarts",
        "2",
        workers=workers,
    )
    job.await_events("half", workers, limit_s=120)
    server = servers_of(job)[draw.randrange(2)]
    if seed % 2:
        job.open_gate("on")
        before = len(job.events("joined"))
        job.kill_rank(draw.randrange(workers))
        await_true(lambda: len(job.events("joined")) > before, 60, "the worker's return")
        os.kill(server, signal.SIGKILL)
    else:
        if draw.random() < 0.5:
            os.kill(server, signal.SIGKILL)
        else:
            job.kill_rank(draw.randrange(workers))
        job.open_gate("on")
    assert job.wait(120) == 0, job
    counted_pushes.check(job, workers)


@pytest.mark.slow
def test_the_embedding_converges_though_a_server_is_killed_half_way(launch):
    job = launch(
        target=["-m", "syncvar.examples.embedding"],
        workers=3,
        options=("--servers", "2", "--server-replicas", "1"),
    )
    await_true(lambda: "epoch 10\n" in job.out, 60.0, "the half of the training")
    os.kill(servers_of(job)[1], signal.SIGKILL)
    assert job.wait(120) == 0, job
    assert float(re.search(r"held-out ratings: (\S+) ", job.out).group(1)) < 0.13, job
    assert "server 0 has copies of its variables and takes its place" in job.err, job


COORDINATED = """
import numpy as np
import probe, syncvar as sv

def square(k):
    if k == 5:
        probe.note("begun")
        probe.gate("on")
    table.scatter_update([k], [k])
    return k * k

strategy = sv.ParameterServerStrategy(staleness=None)
with strategy.scope():
    table = sv.Variable(np.full(40, -1), name="table")
coordinator = sv.ClusterCoordinator(strategy)
values = [coordinator.schedule(square, (k,)) for k in range(40)]
coordinator.join(40)
probe.note("results", values=coordinator.fetch(values), table=table.numpy().tolist())
"""


@pytest.mark.slow
def test_functions_of_a_worker_that_is_killed_run_elsewhere(launch):
    job = start(launch, COORDINATED, "--max-restarts", "1", workers=3)
    job.await_events("begun", limit_s=120)
    (event,) = job.events("begun")
    job.kill_rank(event["rank"])
    job.await_events("begun", 2, limit_s=120)
    job.open_gate("on")
    assert job.wait(120) == 0, job
    (results,) = job.events("results")
    assert results["values"] == [k * k for k in range(40)]
    assert results["table"] == list(range(40))


DEFINED_LATE = """
import syncvar as sv

def step(x):
    return double(x)

strategy = sv.ParameterServerStrategy(staleness=None)
coordinator = sv.ClusterCoordinator(strategy)

def double(x):
    return 2 * x

coordinator.schedule(step, args=(2,)).fetch()
"""
ABSENT = """
import probe, syncvar as sv

strategy = sv.ParameterServerStrategy(staleness=None)
functions = []
if strategy.is_chief:
    def double(x):
        return 2 * x

    functions = [double]
coordinator = sv.ClusterCoordinator(strategy)
try:
    coordinator.schedule(*functions, args=(2,)).fetch()
except sv.UsageError as error:
    probe.note("refused", text=str(error), notes=getattr(error, "__notes__", []))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [["job.py"], ["-m", "job"]])
def test_a_coordinator_above_what_its_functions_need_says_what_to_move(tmp_path, target):
    (tmp_path / "job.py").write_text(DEFINED_LATE)
    job = Job(tmp_path, workers=2, options=["--servers", "1"], target=target)
    assert job.wait(60) == 1, job
    expected = (
        "UsageError: job.py makes sv.ClusterCoordinator in line 8, above what its scheduled "
        "functions need: double (which step uses), line 10. "
    )
    assert expected in job.err, job


@pytest.mark.slow
def test_a_function_that_a_worker_does_not_have_is_one_sentence(launch):
    job = start(launch, ABSENT, workers=2)
    assert job.wait(60) == 0, job
    (event,) = job.events("refused")
    assert event["text"].startswith("double, script.py line 7, does not exist on rank 1, which"), (
        event
    )
    assert event["notes"] == []


SAVED = """
import time
import numpy as np
import probe, syncvar as sv

def push(times):
    for _ in range(times):
        with strategy.transaction():
            table.assign_add(np.ones((4, 2)))
            done.scatter_add([strategy.replica_id], [1])
    strategy.tick()

def await_done(count):
    until = time.monotonic() + 40
    while not (done.numpy() >= count).all():
        assert time.monotonic() < until, done.numpy()
        time.sleep(0.01)

strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
with strategy.scope():
    table = sv.Variable(np.zeros((4, 2)), name="table")
    done = sv.Variable(np.zeros(2, np.int64), name="done")
manager = sv.CheckpointManager(sv.Checkpoint(table=table, done=done), "saved")
restored = manager.restore_latest()
if restored is None:
    push(10)
    await_done(10)
    manager.save(10)
    probe.note("saved")
    probe.gate("saved")
    push(7)
    probe.note("half")
    probe.gate("on")
probe.note("done", here=int(done.numpy()[strategy.replica_id]))
push(20 - int(done.numpy()[strategy.replica_id]))
await_done(20)
probe.note("sums", table=table.numpy()[:, 0].tolist())
"""


@pytest.mark.slow
def test_without_copies_a_job_goes_on_from_its_checkpoint_and_says_what_is_lost(launch):
    job = start(launch, SAVED, "--max-restarts", "1")
    job.await_events("saved", 2, limit_s=120)
    job.open_gate("saved")
    job.await_events("half", 2, limit_s=120)
    os.kill(servers_of(job)[1], signal.SIGKILL)
    await_true(lambda: "restart 1 of 1" in job.err, 60, "the restart")
    job.open_gate("on")
    assert job.wait(120) == 0, job
    assert "server 1 on" in job.err, job
    for rank in range(2):
        said = rf"rank {rank} goes on from \S+/step-0000000010: 7 of the 17 pushes that it had made are lost, number 11 and later"
        assert re.search(said, job.err), job
    assert [event["here"] for event in job.events("done")] == [10, 10], job
    assert [event["table"] for event in job.events("sums")] == [[40.0] * 4] * 2, job


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (2, 1)])
def test_servers_are_killed_one_after_the_other_and_nothing_is_lost(launch, order):
    """The second one once what the first one held has a copy again; with (0, 1) it is the one that took its place."""
    first, second = order
    job = launch(
        counted_pushes.SCRIPT, options=("--servers", "3", "--server-replicas", "1"), workers=2
    )
    job.await_events("half", 2, limit_s=120)
    found = servers_of(job)
    os.kill(found[first], signal.SIGKILL)
    copies = [
        f"server {(first + 2) % 3} has a new copy of the variables of server {first}",
        f"server {(first + 1) % 3} has a new copy of the variables of server {(first + 2) % 3}",
    ]
    await_true(lambda: all(line in job.err for line in copies), 60, "the new copies")
    os.kill(found[second], signal.SIGKILL)
    job.open_gate("on")
    assert job.wait(120) == 0, job
    counted_pushes.check(job, 2)
    assert f"server {second} on" in job.err, job


@pytest.mark.slow
def test_a_script_whose_last_push_was_refused_fails(launch):
    script = """
    import time
    import numpy as np
    import syncvar as sv

    strategy = sv.ParameterServerStrategy(staleness=None)
    with strategy.scope():
        v = sv.Variable(np.zeros(4), name="v")
    with strategy.servers.pushing("a push of too much") as asking:
        asking.push(v.server_of(0), v.key_of(0), "assign_add", np.ones(5))
    until = time.monotonic() + 30
    client = strategy.here.session.client
    while client.unanswered and time.monotonic() < until:  # refused, and nobody has looked
        time.sleep(0.01)
    """
    job = launch(script, workers=1, options=("--servers", "1"))
    assert job.wait() == 1, str(job)
    assert "ConfigError: a push of shape (5,) to a shard of shape (4,)" in job.err, str(job)
