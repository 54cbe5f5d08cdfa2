"""Where the array of each rank lies is that rank's own business: in shared memory, in private memory, or there in part.

What is found here has been found by the random calls of test_persistent_equals_plain.py; these are the cases by name.
"""

import itertools

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from tests.support.rank_scripts.random_collectives import fill_the_shm

SOON = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
MIB = 1 << 20


def results(size, fn, **more):
    out = run_ranks(size, fn, shared=True, config=SOON, timeout_s=60, **more)
    for one in out:
        if isinstance(one, BaseException):
            raise one
    return out


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("size", [2, 3])
def test_in_place_where_some_ranks_have_their_array_in_shared_memory(size, op):
    """Persistent calls took the beginning of shared memory for the place of an array that has none."""

    def fn():
        rank = sv.rank()
        header = np.array(current().shm.words[:8])
        for count, resident in itertools.product([9_000, 131_072, 131_073], range(1, 1 << size)):
            x = sv.empty(count) if resident >> rank & 1 else np.empty(count)
            for call in range(4):
                x[...] = np.arange(count) % 7 + rank + call
                sv.all_reduce(x, op, out=x)
                parts = [np.arange(count) % 7 + one + call for one in range(size)]
                wanted = sum(parts) if op == "sum" else sum(parts) / size
                assert np.array_equal(x, wanted), (count, bin(resident), call)
        assert (np.array(current().shm.words[:8]) == header).all()

    results(size, fn)


def test_training_where_the_shm_of_one_rank_is_full():
    """The buffer for gradients is private there, and in shared memory on the other rank."""

    def fn():
        rank = sv.rank()
        sv.all_reduce(
            np.zeros(30_000)
        )  # takes the memory for segments, without which there are no long calls
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            w = sv.Variable(np.zeros(30_000))
            held = fill_the_shm() if rank == 1 else []
            optimizer = sv.optimizers.SGD(1.0)
        for step in range(8):
            strategy.run(
                lambda: optimizer.apply_gradients([(np.full(30_000, step + sv.rank(), float), w)])  # noqa: B023
            )
        assert bool(held) == (rank == 1)
        assert len(np.unique(w.numpy())) == 1
        return float(w.numpy()[0])

    wanted = -sum(step + 0.5 for step in range(8))
    assert results(2, fn, shm_bytes=64 * MIB) == [wanted, wanted]
