"""Calls in shared memory in which something goes wrong, or nearly: no rank ever takes bytes that are not there yet.

Each of these was a bug once.
"""

import threading
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.core.errors import SharedMemoryFull, SyncvarError
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.arithmetic import GilMonitor
from syncvar.testing import run_ranks
from tests.support.harness import caught

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, shutdown_timeout_s=1.0)


def ranks(size, fn, config=SOON):
    return run_ranks(size, fn, shared=True, config=config, timeout_s=120)


def deny_memory(shm, times=1):
    """Let the next allocations fail."""
    left = [times]

    def deny(nbytes):
        left[0] -= 1
        if not left[0]:
            del shm.allocate
        raise SharedMemoryFull("planted")

    shm.allocate = deny


@pytest.mark.parametrize("count", [3, 60_000, 1_000_000])
def test_what_overflows_is_infinite_on_all_ranks_whatever_numpy_is_told_to_do(count):
    def fn():
        rank = sv.rank()
        sv.barrier()
        x = np.full(count, 1.0 + rank, np.float32)
        x[: count // 3] = 3e38
        with np.errstate(over="raise" if rank == 1 else "ignore"):
            seen = [sv.all_reduce(x, op) for op in ("sum", "mean", "sum", "mean")]
        return [one.tobytes() for one in seen], int(np.isinf(seen[0]).sum()), int(sv.all_reduce(1))

    zero, one = ranks(2, fn)
    assert zero == one
    assert zero[1:] == (count // 3, 2)


def test_memory_that_runs_out_in_the_middle_never_gives_others_stale_bytes():
    def fn():
        sv.barrier()
        if sv.rank() == 1:
            deny_memory(current().shm, 2)  # of the prepared way, and of the long way after it
        got = []
        first = caught(lambda: got.append(sv.all_gather(np.ones(100_000))))
        caught(sv.all_reduce, 1)
        return first, [int((x != 1).sum()) for x in got]

    (zero, wrong), (one, _) = ranks(2, fn)
    assert isinstance(one, SharedMemoryFull)
    assert isinstance(zero, SyncvarError), f"{wrong} elements are wrong"


def test_memory_that_runs_out_at_the_start_is_told_to_the_others():
    told = threading.Event()

    def fn():
        sv.barrier()
        if sv.rank() == 1:
            deny_memory(current().shm, 2)  # of the prepared way, and of the general way after it
        first = caught(lambda: sv.all_reduce(np.ones(100_000)))
        if sv.rank() == 0:
            told.set()
        assert told.wait(50)
        return first, caught(sv.all_reduce, 1)

    (zero, _), (one, _) = ranks(2, fn)
    assert isinstance(one, SharedMemoryFull)
    assert isinstance(zero, SyncvarError)


def test_a_call_of_a_group_that_is_dropped_was_made():
    """The call book takes a group's calls from its communicator, which may be gone when the other rank needs it."""

    def fn():
        group = sv.new_group([0, 1])
        if sv.rank() == 0:
            time.sleep(0.3)
        return int(sv.all_reduce(5, group=group))

    assert ranks(2, fn) == [10, 10]


@pytest.mark.parametrize("keywords", [{"op": ["sum"]}, {"reproducible": []}])
def test_an_argument_that_cannot_be_a_key_is_told_to_the_others(keywords):
    def fn():
        x = np.ones(3)
        sv.all_reduce(x)
        bad = caught(sv.all_reduce, x, of=Exception, **(keywords if sv.rank() == 1 else {}))
        return type(bad).__name__, int(sv.all_reduce(1))

    assert [after for _, after in ranks(2, fn)] == [2, 2]


def test_the_number_of_runs_has_no_end():
    """Each run takes two blocks of a million call numbers; words had 47 bits for them once."""

    def fn():
        world = current().world
        world.block_end = ((1 << 47) // 10**6 - 2) * 10**6 - 1
        seen = []
        for _ in range(4):
            world.begin_epoch()
            seen += [int(sv.all_reduce(1)), int(sv.all_reduce(np.ones(3))[0])]
            world.begin_epoch()
        return seen

    assert ranks(2, fn) == [[2] * 8] * 2


@pytest.mark.slow
def test_a_structure_of_very_many_leaves():
    """Each leaf after the first takes two phases; words had 16 bits for them once."""

    def fn():
        parts = [np.full(1, float(number)) for number in range(33_000)]
        total = sv.all_reduce(parts)
        return all(float(one[0]) == 2 * number for number, one in enumerate(total)), int(
            sv.all_reduce(1)
        )

    assert ranks(2, fn) == [(True, 2)] * 2


def test_a_prepared_call_looks_at_the_queue_when_it_has_the_group():
    """Another thread may start a call between the first look and taking the group."""

    class Busy:
        def __init__(self, lock):
            self.lock, self.before = lock, None

        def locked(self):
            return self.lock.locked()

        def __enter__(self):
            before, self.before = self.before, None
            if before is not None:
                before()
            return self.lock.__enter__()

        def __exit__(self, *error):
            self.lock.release()

    def fn():
        context, x, started = current(), np.ones(3), []
        world = context.world
        busy = world.busy = Busy(world.busy)
        for _ in range(2):
            sv.all_reduce(x)

        def start():
            with use(context):
                started.append(sv.all_reduce(np.full(3, 5.0), async_op=True))

        def elsewhere():
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()

        if sv.rank() == 0:
            busy.before = elsewhere
            second = sv.all_reduce(x)
            return started[0].wait().tolist(), second.tolist()
        time.sleep(0.1)
        return sv.all_reduce(np.full(3, 5.0)).tolist(), sv.all_reduce(x).tolist()

    # The C runner looks at both in one step, between which no other thread runs.
    assert ranks(2, fn, SOON.replaced(call_runner="python")) == [([10.0] * 3, [2.0] * 3)] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_number_is_not_one_of_an_earlier_call(size):
    assert (
        ranks(size, lambda: [int(sv.all_reduce(np.array(turn))) for turn in range(6)])
        == [[turn * size for turn in range(6)]] * size
    )


@pytest.fixture
def crowded(monkeypatch):
    monkeypatch.setattr(GilMonitor, "holds", lambda self: True)


@pytest.mark.parametrize("dtype", ["c8", "c16", "f2", "?", "f4"])
def test_long_calls_that_hold_the_lock(dtype, crowded):
    def fn():
        op = "max" if dtype == "?" else "sum"
        return [int(np.count_nonzero(sv.all_reduce(np.ones(100_000, dtype), op))) for _ in range(3)]

    assert ranks(2, fn) == [[100_000] * 3] * 2


def test_a_strided_vector_on_one_rank(crowded):
    def fn():
        x = np.ones(200_000)[::2] if sv.rank() == 0 else np.ones(100_000)
        return [float(sv.all_reduce(x).sum()) for _ in range(3)]

    assert ranks(2, fn) == [[200_000.0] * 3] * 2
