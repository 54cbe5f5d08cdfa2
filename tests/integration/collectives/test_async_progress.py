"""A started call goes on while its caller does something else."""

import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import progress
from tests.support.harness import everywhere

CONFIG = RuntimeConfig(collective_timeout_s=60.0, rendezvous_timeout_s=60.0)


@pytest.mark.parametrize("turn", range(3))
def test_a_long_call_ends_while_its_callers_sleep(turn, monkeypatch):
    monkeypatch.setattr(progress, "_IDLE_S", 1_000.0)  # a thread that nothing wakes never looks

    def fn():
        sv.barrier()
        time.sleep(0.02 * sv.rank())  # the first one has to wait for the second
        x = np.full(1 << 18, sv.rank() + turn, np.float64)
        work = sv.all_reduce(x, async_op=True)
        x[...] = -1  # it has been taken
        until = time.monotonic() + 40
        while time.monotonic() < until and not work._request.is_over:
            time.sleep(0.005)
        return work._request.is_over, set(work.wait().tolist())

    assert everywhere(2, fn, shared=True, config=CONFIG) == [(True, {1.0 + 2 * turn})] * 2
