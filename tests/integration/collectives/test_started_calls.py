"""Started calls of every collective, against NumPy: the input is taken at the start, whoever is late."""

import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar._native import missing_reason
from syncvar.bootstrap.process import current, use
from syncvar.collectives.groups import communicator_of
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.persistent_call import PersistentCall
from syncvar.shm.channel_table import SEGMENT_BYTES
from syncvar.shm.segment import SharedSegment
from tests.support.harness import caught, everywhere

CONFIG = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
RUNNERS = ["c", "python"] if not missing_reason() else ["python"]
COUNTS = [1, 6, 900, 9_000, 60_000]


def world(size, fn, runner):
    return everywhere(size, fn, shared=True, config=CONFIG.replaced(call_runner=runner))


def inputs(size, count, turn, dtype):
    """Return the inputs of all ranks; small integers, so that sums are exact in every order."""
    chance = np.random.default_rng((count, turn))
    return chance.integers(0, 50, (size, count * size)).astype(dtype)


def expected(name, values, rank):
    """Return the result of a collective on a rank; root 1."""
    size = len(values)
    blocks = values.reshape(size, size, -1)
    results = {
        "all_reduce": values.sum(0),
        "reduce": values.sum(0) if rank == 1 else None,
        "broadcast": values[1],
        "all_gather": values.reshape(-1),
        "gather": values.reshape(-1) if rank == 1 else None,
        "reduce_scatter": blocks.sum(0)[rank],
        "all_to_all": blocks[:, rank].reshape(-1),
        "scan": values[: rank + 1].sum(0),
        "exscan": values[:rank].sum(0),
        "barrier": None,
    }
    return results[name]


def start(name, x, out):
    options = {"root": 1} if name in ("reduce", "broadcast", "gather") else {}
    if out is not None:
        options["out"] = out
    arguments = () if name == "barrier" else (x,)
    return getattr(sv, name)(*arguments, async_op=True, **options)


def joined(made):
    """Return a result as one array: an all-to-all gives a list of parts."""
    return np.concatenate(made) if isinstance(made, list) else made


NAMES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exscan",
    "barrier",
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_started_call_equals_numpy_and_has_taken_its_input(name, size, runner):
    met = threading.Barrier(size)

    def fn():
        rank = sv.rank()
        for count in COUNTS[:1] if name == "barrier" else COUNTS:
            for turn, dtype in enumerate(("f8", "f4", "i8", "f8", "f8", "f8")):
                values = inputs(size, count, turn, dtype)
                wanted = expected(name, values, rank)
                x = values[rank].copy()
                out = np.empty_like(wanted) if wanted is not None and turn % 2 else None
                if turn == 4 and rank == 0:  # the others have to wait for this rank
                    met.wait(60.0)
                work = start(name, x, out)
                x[...] = 77
                if turn == 4 and rank != 0:
                    met.wait(60.0)
                if turn == 5:  # more calls are started before this one is waited for
                    later = sv.all_reduce(values[rank], async_op=True)
                    assert np.array_equal(later.wait(), values.sum(0))
                made = work.wait()
                if wanted is None:
                    assert made is None
                else:
                    whole = joined(made)
                    assert (whole.dtype, whole.tobytes()) == (wanted.dtype, wanted.tobytes())
                    assert out is None or np.array_equal(out, wanted)
                assert work.done()

    world(size, fn, runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_started_calls_of_every_kind_take_the_persistent_path(monkeypatch, runner):
    begun, in_c = [], runner == "c"
    begin = PersistentCall.start

    def counted(self, *arguments):
        work = begin(self, *arguments)
        begun.append(work is not None)
        return work

    monkeypatch.setattr(PersistentCall, "start", counted)

    def fn():
        made = {}
        for name in NAMES:
            for count in (2, 150_000):
                x = np.ones(count * 2)
                for _ in range(3):
                    start(name, x, None).wait()
                sv.barrier()
                begun.clear()
                sv.barrier()
                work = start(name, x, None)
                made[name, count] = work._async_call is not None or (len(begun) > 0 and all(begun))
                is_small = count == 2
                assert not (in_c and is_small and name != "exscan") or work._async_call is not None
                work.wait()
                sv.barrier()
        return [key for key, is_persistent in made.items() if not is_persistent]

    assert world(2, fn, runner) == [[], []]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("count", [2, 9_000])
def test_inputs_that_differ_are_gathered_or_refused(count, runner):
    def fn():
        rank = sv.rank()
        for _ in range(3):
            sv.all_gather(np.ones(count))
            sv.all_to_all(np.ones(2 * count))
        work = sv.all_gather(np.full(count + rank, 1.0 + rank), async_op=True)
        assert work.wait().tolist() == [1.0] * count + [2.0] * (count + 1)
        work = sv.all_to_all(np.ones(2 * count, "f4" if rank else "f8"), async_op=True)
        error = caught(work.wait)
        assert sv.all_reduce(1.0) == 2.0
        return type(error)

    assert world(2, fn, runner) == [sv.MismatchError] * 2


@pytest.mark.parametrize("runner", RUNNERS)
def test_many_calls_of_all_kinds_are_under_way(runner):
    """They are waited for in another order than they were started in."""
    names = [name for name in NAMES if name != "barrier"]

    def fn():
        size, rank = sv.world_size(), sv.rank()
        chance = np.random.default_rng(5)
        for turn in range(12):
            order = chance.permutation(len(names))
            count = COUNTS[chance.integers(len(COUNTS) - 1)]
            values = inputs(size, count, turn, "f8")
            works = [start(names[place], values[rank].copy(), None) for place in order]
            own = np.random.default_rng((turn, rank)).permutation(len(names))
            for place in own:
                wanted = expected(names[order[place]], values, rank)
                made = works[place].wait()
                assert (made is None) == (wanted is None)
                assert wanted is None or np.array_equal(joined(made), wanted)

    world(3, fn, runner)


def test_two_threads_that_need_segments_at_once_get_the_same(monkeypatch):
    """One of them drives an earlier call. Else the others would read memory that nobody writes."""
    allocate, both = SharedSegment.allocate, [threading.Barrier(2), threading.Barrier(2)]

    def slow(self, nbytes):
        offset = allocate(self, nbytes)
        if nbytes > 1 << 20:
            both[sv.rank()].wait(60.0)
        return offset

    def fn():
        channel = communicator_of(None).channel
        sv.barrier()
        before = channel.shm._extents.used_bytes
        me = current()

        def reserve():
            with use(me):
                channel.reserve_segments()

        threads = [threading.Thread(target=reserve) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        allocate(channel.shm, 64)  # takes back what has been released
        return channel.shm._extents.used_bytes - before

    monkeypatch.setattr(SharedSegment, "allocate", slow)
    for used in world(2, fn, "python"):
        assert 2 * SEGMENT_BYTES < used < 4 * SEGMENT_BYTES


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_rank_that_waits_in_another_call_continues_its_started_one(runner):
    """Inputs of unlike lengths need more than what each rank publishes at the start."""

    def fn():
        rank, group = sv.rank(), sv.new_group([0, 1])
        for _ in range(3):
            sv.all_gather(np.ones(2), group=group)
            assert sv.all_reduce(1.0) == 2.0
        for _ in range(5):
            work = sv.all_gather(np.full(2 + rank, 1.0 + rank), group=group, async_op=True)
            made = work.wait() if rank else None
            assert sv.all_reduce(1.0) == 2.0
            made = work.wait() if made is None else made
            assert made.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]

    world(2, fn, runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_rank_without_result_brings_its_input_after_a_call_that_the_engine_has_ended(runner):
    met = threading.Barrier(2)

    def fn():
        rank = sv.rank()
        for _ in range(3):
            sv.reduce(np.ones(3), root=0)
        if rank:
            work = sv.reduce(np.ones(3), root=0, async_op=True)
            current().engine.continue_async_calls()
        met.wait(60.0)
        made = work.wait() if rank else sv.reduce(np.ones(3), root=0)
        works = [sv.reduce(np.full(3, 1.0 + rank + turn), async_op=True) for turn in range(4)]
        return [None if one is None else one.tolist() for one in (made, *(w.wait() for w in works))]

    sums = [[2.0] * 3, *([3.0 + 2 * turn] * 3 for turn in range(4))]
    assert world(2, fn, runner) == [sums, [None] * 5]
