"""A rank hears that another one is lost after all of its data have arrived: the call completes."""

import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import PeerLost
from syncvar.transports.in_memory import MemoryTransport

WORLD, LIMIT_S = 2, 60


class LateTransport(MemoryTransport):
    """A transport; rank 0 waits in a call until the loss of rank 1 has arrived too."""

    is_late = False
    has_waited = False

    def wait(self, timeout_s):
        """Wait for an arrival; return whether there is a control message."""
        if self._rank != 0 or not LateTransport.is_late:
            return super().wait(timeout_s)
        LateTransport.has_waited = True
        until = time.monotonic() + LIMIT_S
        while not self._network.control[0]:
            assert time.monotonic() < until, "the loss did not come"
            time.sleep(0.001)
        return True


def body():
    sv.barrier()
    values = np.full(100, sv.rank() + 1.0)
    if sv.rank() == 1:
        while not LateTransport.has_waited:
            time.sleep(0.001)
        sv.all_reduce(values)
        raise ValueError("planted failure")
    LateTransport.is_late = True
    total = sv.all_reduce(values)
    LateTransport.is_late = False
    with pytest.raises(PeerLost):
        sv.all_reduce(values)
    return total


def test_a_call_whose_data_have_arrived_completes(monkeypatch):
    monkeypatch.setattr("syncvar.testing.world.MemoryTransport", LateTransport)
    total, error = sv.testing.run_ranks(WORLD, body, shared=False, timeout_s=LIMIT_S)
    assert isinstance(error, ValueError), error
    assert isinstance(total, np.ndarray), total
    np.testing.assert_array_equal(total, np.full(100, 3.0))
