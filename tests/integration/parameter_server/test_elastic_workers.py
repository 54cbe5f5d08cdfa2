"""Workers of parameter servers come and go; the servers apply each push once."""

import pytest

from tests.support.launching import Job

PUSH = """
    import os, time
    import numpy as np
    import probe
    import syncvar as sv

    me, incarnation = probe.RANK, int(os.environ["SYNCVAR_INCARNATION"])
    strategy = sv.ParameterServerStrategy(staleness=None)
    with strategy.scope():
        pushes = sv.Variable(np.zeros(4, np.int64), name="pushes")
        total = sv.Variable(0.0, name="total")
    for step in range(40):
        with strategy.transaction():
            pushes.scatter_add([me], [1])
            total.assign_add(1.0)
        if step == 4:
            pushes.numpy()  # after it, the servers have all pushes of this worker
        if me in (1, 2) and step == 9 and incarnation == 0:
            os.kill(os.getpid(), 9)
        time.sleep(0.005)
    pushes.numpy()
    probe.note("ready")
    probe.gate("count")
    probe.note("counted", pushes=pushes.numpy().tolist(), total=float(total.numpy()))
"""


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_job_goes_on_without_workers_that_are_lost(tmp_path, restarts):
    options = ("--servers", "2", "--max-restarts", str(restarts))
    job = Job(tmp_path, PUSH, workers="2:4", options=options, start="auto")
    job.await_events("ready", 4 if restarts else 2)
    job.open_gate("count")
    assert job.wait() == 0, job
    counted = job.events("counted")
    # A worker that is killed may have pushes under way, each of which counts wholly or not at all.
    again = 40 if restarts else 0
    for one in counted:
        assert one["pushes"][0] == one["pushes"][3] == 40, job
        assert {count - again for count in one["pushes"][1:3]} <= set(range(5, 11)), job
        assert one["total"] == sum(one["pushes"]), job
    assert len(counted) == (4 if restarts else 2), job
    assert job.report.count("is lost: signal 9") + job.report.count("started again alone") >= 2, job


def test_spare_workers_have_no_use_beside_servers(tmp_path):
    job = Job(tmp_path, PUSH, workers="2:4", options=("--servers", "1", "--spares", "1"))
    assert job.wait() == 78, job
    assert "--spares beside --servers" in job.err, job
