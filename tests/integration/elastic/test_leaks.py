"""What a worker keeps of generations that it has left: nothing."""

import pytest

LEAKS = """
    import gc, os, sys
    import numpy as np
    import probe, syncvar as sv

    def held():
        gc.collect()
        targets = []
        for number in os.listdir("/proc/self/fd"):
            try:
                targets.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
            except OSError:
                pass  # the descriptor of the folder itself
        with open("/proc/self/maps") as maps:
            mapped = [line.split(maxsplit=5)[5].strip() for line in maps if len(line.split()) > 5]
        shared = [name for name in mapped if "memfd" in name or name.startswith("/dev/shm")]
        kinds = {kind: targets.count(kind) for kind in ("socket", "pipe", "anon_inode")}
        return {
            **kinds, "all": len(targets), "threads": len(os.listdir("/proc/self/task")), "shared": len(shared)
        }

    strategy = sv.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.zeros(20_000), name="w", aggregation="MEAN")
    state = sv.elastic.State(w=w, optimizer=sv.optimizers.Adam(0.1), times=0)
    worker = int(os.environ["SYNCVAR_RANK"])

    @sv.elastic.run
    def train(state):
        group = sv.new_group([0, sv.world_size() - 1])
        for _ in range(2):
            strategy.run(lambda: state.optimizer.apply_gradients([(np.ones(20_000), state.w)]))
            sv.all_reduce(np.ones(50_000))
        state.times += 1
        state.commit()
        if state.times in (5, 25):
            probe.note("held", times=state.times, **held())
        if state.times < 25:
            if sv.rank() == state.times % sv.world_size():
                raise sv.PeerLost(0, "this worker says so")  # it enrolls again, so the others do too
            sv.barrier()

    train(state)
    probe.note("final", times=state.times)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "call_runner"), [((), "auto"), (("--fake-hosts", "2"), "python")]
)
def test_nothing_is_left_of_twenty_generations(launch, options, call_runner):
    job = launch(LEAKS, workers="2:3", options=options, env={"SYNCVAR_CALL_RUNNER": call_runner})
    assert job.wait() == 0, job
    assert len(job.events("final")) == 3, job
    for worker in range(3):
        early, late = job.events("held", worker)
        for kind in ("socket", "pipe", "anon_inode", "all", "threads", "shared"):
            # A connection may close a little later. A leak would be one for each generation.
            assert late[kind] <= early[kind] + 4, (kind, job)
