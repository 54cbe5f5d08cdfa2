"""Snapshots over two servers while workers go on: of what a transaction keeps equal none is ever seen unequal."""

import pytest

SCRIPT = """
import sys
import numpy as np
import probe, syncvar as sv

READERS, EACH = 2, int(sys.argv[1])
strategy = sv.ParameterServerStrategy(staleness=None)
with strategy.scope():
    a, b = sv.Variable(np.zeros(2, np.int64), name="a"), sv.Variable(np.zeros(2, np.int64), name="b")
    ended = sv.Variable(np.zeros(1, np.int64), name="ended")
assert a.server_of(0) != b.server_of(0)
rank = strategy.replica_id
if rank < READERS:
    last, seen = -1, 0
    for count in range(EACH):
        x, y = strategy.snapshot([a, b])
        assert x.tolist() == y.tolist() and x[0] == x[1] >= last, (rank, count, x, y, last)
        seen, last = seen + (x[0] != last), x[0]
    probe.note("read", snapshots=EACH, seen=int(seen))
    ended.assign_add([1])
else:
    made = 0
    while ended.numpy()[0] < READERS:
        for _ in range(10):
            with strategy.transaction():
                a.assign_add([1, 1])
                b.assign_add([1, 1])
        made += 10
    probe.note("wrote", transactions=made, a=a.numpy().tolist())
"""


@pytest.mark.slow
def test_a_hundred_thousand_snapshots_never_see_half_a_transaction(launch):
    job = launch(SCRIPT, workers=3, options=("--servers", "2"), arguments=("50000",))
    assert job.wait(500) == 0, job
    read = job.events("read")
    assert sum(event["snapshots"] for event in read) == 100_000
    assert min(event["seen"] for event in read) >= 100  # the writer went on meanwhile
    (wrote,) = job.events("wrote")
    assert wrote["a"] == [wrote["transactions"]] * 2
