"""One-sided reads between real processes: the owner computes, writes, stands still or is gone."""

import signal


def test_the_owner_only_computes_and_writes(launch):
    job = launch("""
        import numpy as np, probe, time
        import syncvar as sv
        v = sv.Variable(np.zeros(100_000), synchronization="NONE")
        sv.barrier()
        if sv.rank() == 0:
            seen, until = [], time.monotonic() + 60
            while len(seen) < 50 or (seen[-1] == seen[0] and time.monotonic() < until):
                copy = v.read_from(1)
                assert copy.min() == copy.max(), "half a write"
                seen.append(float(copy[0]))
            assert seen == sorted(seen) and seen[-1] > seen[0], seen
            probe.open_gate("done")
            probe.note("read")
        else:
            import os
            number = 0
            while not os.path.exists(os.path.join(probe.FOLDER, "gate-done")):
                number += 1
                v.assign(np.full(100_000, float(number)))
        sv.barrier()
    """)
    assert job.wait() == 0, str(job)
    assert len(job.events("read")) == 1, str(job)


def test_a_stopped_owner_costs_the_asker_its_call_and_nobody_the_group(launch):
    job = launch("""
        import probe, os, signal
        import syncvar as sv
        strategy = sv.MirroredStrategy(timeout=0.25)
        with strategy.scope():
            v = sv.Variable(float(sv.rank()), synchronization="NONE")
        sv.barrier()
        if sv.rank() == 1:
            probe.gate("past")  # the other rank is through the barrier
            probe.note("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            probe.open_gate("past")
            probe.gate("stopped")
            probe.failure(v.read_from, 1)
        strategy.timeout = 60.0
        sv.barrier()
        probe.note("read", value=float(v.read_from(1)))
        sv.barrier()
    """)
    job.await_events("stops")
    job.open_gate("stopped")
    job.await_events("raised")
    job.kill_rank(1, signal.SIGCONT)
    assert job.wait() == 0, str(job)
    (raised,) = job.events("raised")
    assert raised["error"] == "DeadlineExceeded", str(job)
    assert [event["value"] for event in job.events("read")] == [1.0, 1.0], str(job)


def test_an_owner_that_is_killed_is_lost_to_the_asker(launch):
    job = launch(
        """
        import probe, time
        import syncvar as sv
        v = sv.Variable(float(sv.rank()), synchronization="NONE")
        sv.barrier()
        if sv.rank() == 1:
            time.sleep(60)
        probe.note("waits")  # the other rank's part of the barrier has come
        probe.gate("killed")
        while probe.failure(v.read_from, 1) is None:
            pass
    """,
        env={"SYNCVAR_ABORT_GRACE_S": "10"},
    )  # the asker may end by itself, however late it hears of it
    job.await_events("waits")
    job.kill_rank(1)
    job.open_gate("killed")
    assert job.wait() != 0, str(job)
    (raised,) = job.events("raised")
    assert (raised["error"], raised["lost"]) == ("PeerLost", 1), str(job)
