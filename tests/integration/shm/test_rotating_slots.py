"""Vectors that everybody sums and that are longer than a few KiB: each rank tells where it has put its own, in slots that take turns."""

import numpy as np
import pytest

import syncvar as sv
from syncvar._native.constants import RING_SLOTS
from syncvar.bootstrap.process import current
from syncvar.core.errors import SharedMemoryFull
from syncvar.core.settings import RuntimeConfig
from syncvar.shm.channel_table import SMALL_BYTES, WIDE_BYTES
from tests.support.harness import everywhere

NATIVE = RuntimeConfig(collective_timeout_s=60.0, rendezvous_timeout_s=60.0)
PLAIN = RuntimeConfig(collective_timeout_s=60.0, rendezvous_timeout_s=60.0, call_runner="python")
CHECKED = RuntimeConfig(collective_timeout_s=60.0, rendezvous_timeout_s=60.0, check_shm="on")
COUNTS = [WIDE_BYTES // 4, WIDE_BYTES // 4 + 1, 5000, SMALL_BYTES // 4]


def _brought(count, rank, turn):
    return np.random.default_rng(100 * turn + rank).integers(-1000, 1000, count).astype(np.float32)


def _ways(x, turn):
    """Return the sum of `x` by one of the ways in which programs ask for it."""
    out = np.empty_like(x)
    match turn % 8:
        case 0:
            return sv.all_reduce(x)
        case 1:
            return sv.all_reduce(x, out=out)
        case 2:
            return sv.all_reduce(x, out=x)
        case 3:
            return sv.all_reduce(x, timeout=60.0)
        case 4:
            return sv.all_reduce(x, async_op=True).wait()
        case 5:
            return np.concatenate(sv.all_reduce([x[:7], x[7:]]))
        case 6:
            room = np.concatenate((x, x[:3]))
            return sv.all_reduce(
                room[: x.size], out=room[3:]
            )  # the result covers up what is brought
        case _:
            return sv.all_reduce(x, "mean") * sv.world_size()


@pytest.mark.parametrize("config", [NATIVE, PLAIN, CHECKED], ids=["native", "plain", "checked"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_way_of_asking_brings_the_same_sum_call_after_call(size, config):
    def fn():
        for turn in range(4 * RING_SLOTS):
            count = COUNTS[turn % 7 % len(COUNTS)]
            wanted = np.sum([_brought(count, rank, turn) for rank in range(size)], axis=0)
            x = _brought(count, sv.rank(), turn)
            kept = x.copy()
            got = _ways(x, turn)
            assert np.allclose(got, wanted, atol=1e-3), (turn, count)
            assert turn % 8 == 2 or np.array_equal(x, kept)
        return current().world.channel.is_native

    natives = everywhere(size, fn, shared=True, config=config)
    assert set(natives) == {natives[0]}
    assert config is NATIVE or natives[0] is False


@pytest.mark.needs_c_extension
def test_each_rank_is_read_where_it_tells_that_it_has_put_its_vector():
    """One rank has slots that take turns, the other has no room for them: both tell, and both are found."""

    def fn():
        context = current()
        allocate = context.shm.allocate

        def narrow(nbytes):
            if nbytes == RING_SLOTS * SMALL_BYTES:
                raise SharedMemoryFull("no room")
            return allocate(nbytes)

        if sv.rank() == 1:
            context.shm.allocate = narrow
        seen = set()
        for turn in range(3 * RING_SLOTS):
            x = _brought(4000, sv.rank(), turn)
            assert np.array_equal(
                sv.all_reduce(x), _brought(4000, 0, turn) + _brought(4000, 1, turn)
            )
            seen.add(context.world.channel.slots_now(x.nbytes)[0])
        return len(seen), context._channels.ring(context.world.channel.entry) != 0

    (places, has_ring), (_, other_has) = everywhere(2, fn, shared=True, config=NATIVE)
    assert has_ring
    assert not other_has
    assert places > 2


def test_small_vectors_take_no_memory_for_slots_that_take_turns():
    def fn():
        before = current().shm._extents.used_bytes
        for count in (1, WIDE_BYTES // 4):
            for _ in range(3):
                sv.all_reduce(np.ones(count, np.float32))
        return current().shm._extents.used_bytes - before

    assert everywhere(2, fn, shared=True, config=NATIVE) == [0, 0]
