"""`sv.elastic.State` in real processes: they leave the job and join it again, or go on without a lost one."""

import pytest

REJOINED = """
    import numpy as np
    import syncvar as sv
    from syncvar.elastic.elastic_state import held_by

    w = sv.Variable(np.zeros(5), aggregation="MEAN", name="w")
    seen = sv.Variable(0, synchronization="ON_READ", aggregation="SUM", name="seen")
    optimizer = sv.optimizers.Adam(0.1)
    state = sv.elastic.State(w=w, seen=seen, optimizer=optimizer, rng=np.random.default_rng(sv.rank()), step=0)
    known = [id(one) for one in (w, seen, optimizer, w.strategy)]
    held_by(state).synchronize()
    for start in range(3):
        for _ in range(5):
            optimizer.apply_gradients([(np.full(5, 1.0 + sv.rank()), w)])
            w.assign_add(np.ones(5))
            seen.assign_add(1)
            state.step += 1
        state.commit()
        drawn = state.rng.integers(1 << 60)
        w.assign_add(np.full(5, 100.0))
        sv.barrier()
        sv.shutdown()
        sv.init()
        held_by(state).moves_to_current_world()
        held_by(state).synchronize()
        assert state.rng.integers(1 << 60) == drawn
        state.restore()
    assert known == [id(one) for one in (w, seen, optimizer, w.strategy)]
    print(state.step, seen.numpy(), optimizer.iterations, np.round(w.numpy(), 3)[0], held_by(state).holds())
"""


@pytest.mark.slow
def test_ranks_that_join_again_go_on_from_their_commit(launch):
    job = launch(REJOINED)
    assert job.wait() == 0, job
    lines = [line[4:] for line in job.out.splitlines()]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("15 30 15 ")
