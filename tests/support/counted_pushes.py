"""A program that counts what it has pushed in the same transaction, so that one that was killed goes on where it was: sums are exact."""

STEPS = 80
SCRIPT = f"""
import time
import numpy as np
import probe, syncvar as sv

strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
me, workers = strategy.replica_id, strategy.num_replicas_in_sync
with strategy.scope():
    table = sv.Variable(np.zeros((10, 3), np.int64), name="table")
    done = sv.Variable(np.zeros(workers, np.int64), name="done")
first = int(done.lookup([me])[0])
probe.note("joined", first=first)
last = done.numpy()
for step in range(first, {STEPS}):
    with strategy.transaction():
        table.assign_add(np.full((10, 3), step + 1))
        table.scatter_add([me, 9 - me, me], np.ones((3, 3), np.int64))
        done.scatter_add([me], [1])
    if step % 8 == 0:
        whole, now = strategy.snapshot([table, done])
        assert (whole[5] - whole[4]).tolist() == [0, 0, 0], whole  # of rows on two servers, written together
        assert (now >= last).all() and now[me] == step + 1, (now, last, step)
        last = now
    if step == {STEPS // 2}:
        probe.note("half")
        probe.gate("on")
    time.sleep(0.001)
until = time.monotonic() + 25
while not (done.numpy() == {STEPS}).all():
    assert time.monotonic() < until, done.numpy()
    time.sleep(0.01)
probe.note("sums", table=table.numpy()[:, 0].tolist())
"""


def check(job, workers):
    """Fail unless every worker has seen the exact sums at the end."""
    each = workers * STEPS * (STEPS + 1) // 2
    wanted = [each] * 10
    for rank in range(workers):
        wanted[rank] += 2 * STEPS
        wanted[9 - rank] += STEPS
    assert [event["table"] for event in job.events("sums")] == [wanted] * workers, job
