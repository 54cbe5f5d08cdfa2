"""Cycles of messages over real processes, where the launcher is sure that nobody can move."""

import pytest

SENDING = """
import numpy as np
import probe, syncvar as sv

error = probe.failure(sv.send, np.zeros(100_000), (sv.rank() + 1) % sv.world_size())
assert isinstance(error, sv.MismatchError), error
assert int(sv.all_reduce(1)) == sv.world_size()
"""
RECEIVING = """
import probe, syncvar as sv

error = probe.failure(sv.recv, (sv.rank() + 1) % sv.world_size())
assert isinstance(error, sv.MismatchError), error
assert int(sv.all_reduce(1)) == sv.world_size()
"""


@pytest.mark.parametrize(("script", "workers"), [(SENDING, 3), (RECEIVING, 2)], ids=["sending", "receiving"])
def test_a_cycle_gets_a_verdict_and_the_world_goes_on(launch, script, workers):
    job = launch(script, workers=workers)
    assert job.wait() == 0, str(job)
    for event in job.events("raised"):
        assert "deadlock" in event["text"]
        assert len(event["table"]) == workers
