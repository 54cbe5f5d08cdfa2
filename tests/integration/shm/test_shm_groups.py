"""Groups of ranks that share memory: side by side, in other orders, dropped and made again, and after something went wrong."""

import contextlib
import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.core.errors import ConfigError, MismatchError, SharedMemoryFull, UsageError
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import caught, covering, everywhere
from tests.support.paths import REPOSITORY

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.02, shutdown_timeout_s=1.0)
COUNTS = (1, 50, 5_000, 20_000, 150_000)  # everybody sums, each its part, several segments


def results(size, fn):
    """Run ranks of which none may fail."""
    return everywhere(size, fn, shared=True, config=SOON)


def check_sums(group=None, *, seed=0, counts=COUNTS, turns=2):
    """Make calls of all sizes, each of them with other numbers than the one before."""
    ranks = range(sv.world_size()) if group is None else group.ranks
    me = sv.rank()
    for turn, count in itertools.product(range(turns), counts):
        base = np.arange(count) % 7 + turn + seed
        total = sv.all_reduce((base + me).astype(np.float64), group=group)
        assert total.tobytes() == (len(ranks) * base + sum(ranks)).astype(np.float64).tobytes(), (
            turn,
            count,
        )


# -- side by side ----------------------------------------------------------------------------------


def test_every_sub_group_in_every_order():
    def fn():
        rank = sv.rank()
        groups = [
            sv.new_group(members)
            for size in (2, 3, 4)
            for members in itertools.permutations(range(4), size)
        ]
        for seed, group in enumerate(groups):
            if rank in group.ranks:
                check_sums(group, seed=seed, counts=(3,), turns=2)
                assert sv.all_gather(rank, group=group).tolist() == list(group.ranks)
                assert int(sv.broadcast(rank, root=group.size - 1, group=group)) == group.ranks[-1]
            else:
                with pytest.raises(UsageError, match="not a member"):
                    sv.all_reduce(1, group=group)
        sv.barrier()
        for seed, group in enumerate(groups[-3:]):
            check_sums(group, seed=seed, turns=1)

    results(4, fn)


def test_overlapping_groups_take_turns():
    def fn():
        rank = sv.rank()
        groups = [
            sv.new_group(members) for members in ([0, 1, 2], [2, 3], [3, 0, 1], [1, 2], [0, 3])
        ]
        for turn in range(12):
            for group in groups:
                if rank in group.ranks:
                    check_sums(group, seed=turn, counts=(COUNTS[turn % len(COUNTS)],), turns=1)
            check_sums(seed=turn, counts=(7,), turns=1)

    results(4, fn)


def test_two_groups_in_other_orders_with_started_calls():
    def fn():
        rank = sv.rank()
        first, second = sv.new_group([0, 1]), sv.new_group([1, 0])
        for turn, count in itertools.product(range(4), COUNTS):
            order = [(first, 1.0), (second, 100.0)][:: 1 if rank == 0 else -1]
            works = {
                factor: sv.all_reduce(
                    np.full(count, factor * (turn + rank)), group=group, async_op=True
                )
                for group, factor in order
            }
            for factor in (1.0, 100.0) if (turn + rank) % 2 else (100.0, 1.0):
                assert (works[factor].wait() == factor * (2 * turn + 1)).all()

    results(2, fn)


def test_calls_that_a_blocking_call_of_another_group_waits_beside():
    """A rank that is in a call of one group goes on with those that it has started in the other."""

    def fn():
        rank = sv.rank()
        first, second = sv.new_group([0, 1]), sv.new_group([0, 1])
        for turn in range(20):
            mine, other = (first, second) if rank == 0 else (second, first)
            x = np.full(20_000, turn + rank)
            work = sv.all_reduce(x, group=mine, async_op=True)
            assert (sv.all_reduce(x, group=other) == 2 * turn + 1).all()
            assert (work.wait() == 2 * turn + 1).all()

    results(2, fn)


def test_many_started_calls_of_many_groups():
    def fn():
        rank = sv.rank()
        groups = [sv.new_group(range(3)) for _ in range(5)]
        order = np.random.default_rng(rank).permutation(5)
        works = {}
        for turn in range(6):
            for place in order:
                works[turn, place] = sv.all_reduce(
                    np.full(COUNTS[(turn + place) % 5], turn + place + rank),
                    group=groups[place],
                    async_op=True,
                )
        for key in np.random.default_rng(rank + 9).permutation(sorted(works)):
            turn, place = map(int, key)
            assert (works[turn, place].wait() == 3 * (turn + place) + 3).all()

    results(3, fn)


# -- threads ---------------------------------------------------------------------------------------


def test_two_threads_in_two_groups():
    def fn():
        context, wrong = current(), []
        groups = [sv.new_group([0, 1]), sv.new_group([0, 1])]

        def body(place):
            try:
                with use(context):
                    for turn in range(10):
                        check_sums(
                            groups[place], seed=100 * place + turn, counts=(3, 20_000), turns=1
                        )
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=body, args=(place,)) for place in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not wrong, wrong
        check_sums()

    results(2, fn)


@pytest.mark.parametrize("count", [3, 20_000])
def test_a_second_thread_in_the_same_group_is_refused(count):
    refused = threading.Event()

    def fn():
        context, x = current(), np.ones(count)
        for _ in range(2):
            sv.all_reduce(x)
        if sv.rank() == 1:
            assert refused.wait(50)
            assert (sv.all_reduce(x) == 2).all()
        else:
            found = []

            def other():
                until = time.monotonic() + 40
                with use(context):
                    while not context.world.busy.locked() and time.monotonic() < until:
                        pass
                    found.append(caught(lambda: sv.all_reduce(x)))
                refused.set()

            thread = threading.Thread(target=other)
            thread.start()
            assert (sv.all_reduce(x) == 2).all()
            thread.join(50)
            assert isinstance(found[0], UsageError)
            assert "another thread" in str(found[0])
        check_sums()

    results(2, fn)


# -- dropped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 20_000])
@pytest.mark.parametrize("how", ["dropped", "destroyed"])
def test_groups_that_are_gone_leave_room_for_others(how, count):
    """Neither the table nor the memory grows with the number of groups there have been."""

    def fn():
        context = current()
        turns = 400 if how == "destroyed" and count == 3 else 120
        for turn in range(turns):
            group = sv.new_group([0, 1] if turn % 2 else [1, 0])
            for _ in range(2):
                assert (
                    sv.all_reduce(np.full(count, turn + sv.rank()), group=group) == 2 * turn + 1
                ).all()
            if how == "destroyed":
                group.destroy()
            del group
            if how == "dropped" and turn % 40 == 0:
                gc.collect()
        check_sums()
        return context._channels._entries, context.shm._extents.used_bytes

    for entries, memory in results(2, fn):
        most = 5 if how == "destroyed" else 60  # the others go when Python looks for cycles
        assert entries < most
        assert memory < most * (4 << 20)


def test_groups_dropped_on_one_rank_later_than_on_the_other():
    def fn():
        kept = []
        for turn in range(120):
            group = sv.new_group([0, 1])
            check_sums(group, seed=turn, counts=(3,), turns=1)
            if sv.rank() == 1:
                kept.append(group)
                if len(kept) > 10:
                    del kept[:9]
            group = None
            if turn % 30 == 0:
                gc.collect()
        return current()._channels._entries

    assert max(results(2, fn)) < 90


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_table_that_is_full_says_what_to_do():
    def fn():
        kept = []
        with contextlib.suppress(SharedMemoryFull):
            while len(kept) < 10_000:
                kept.append(sv.new_group([0, 1]))
        made = len(kept)
        del kept
        check_sums()
        check_sums(sv.new_group([0, 1]))
        return made

    one, other = results(2, fn)
    assert one == other < 10_000


# -- after something went wrong --------------------------------------------------------------------


def bad_argument(rank):
    sv.all_reduce(np.ones(3), "nonsense" if rank == 1 else "sum")


def bad_argument_of_a_long_call(rank):
    sv.all_reduce(np.ones(20_000), timeout=-1 if rank == 1 else None)


def bad_out(rank):
    sv.all_reduce(np.ones(3), out=np.ones(4) if rank == 1 else None)


def other_op(rank):
    sv.all_reduce(np.ones(3), "max" if rank == 1 else "sum")


def other_size(rank):
    sv.all_reduce(np.ones(20_000 if rank == 1 else 3))


def other_long_size(rank):
    sv.all_reduce(np.ones(150_000 + rank))


def other_collective(rank):
    if rank == 1:
        sv.barrier()
    else:
        sv.all_gather(np.ones(60_000))


def other_structure(rank):
    sv.all_reduce([np.ones(3), np.ones(20_000)] if rank == 1 else [np.ones(20_000), np.ones(3)])


EARLIER = [(0, 3), (1, 3), (1, 20_000), (2, 3), (2, 20_000), (3, 20_000)]
MISHAPS = (
    bad_argument,
    bad_argument_of_a_long_call,
    bad_out,
    other_op,
    other_size,
    other_long_size,
    other_collective,
    other_structure,
)


@pytest.mark.parametrize(
    ("mishap", "size"),
    covering(MISHAPS, [3, 2], strength=1),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_call_after_a_mishap_works(mishap, size):
    def fn():
        sv.barrier()
        seen = []
        for turn in range(4):
            error = caught(lambda: mishap(sv.rank()))
            seen.append(type(error))
            check_sums(seed=turn, counts=COUNTS[turn:] + COUNTS[:turn], turns=1)
        return seen

    for rank, seen in enumerate(results(size, fn)):
        refuses = mishap in (bad_argument, bad_argument_of_a_long_call, bad_out) and rank == 1
        assert set(seen) == {ConfigError if refuses else MismatchError}, f"rank {rank}: {seen}"


def test_a_call_given_up_is_followed_by_many_small_and_long_ones():
    """Data that a rank had published for a call that failed are never those of a later call."""

    def fn():
        rank, draw = sv.rank(), np.random.default_rng(5)
        for turn in range(40):
            mishap = MISHAPS[draw.integers(len(MISHAPS))]
            assert caught(lambda: mishap(rank)) is not None  # noqa: B023
            for count in draw.choice(COUNTS, draw.integers(0, 4)):
                check_sums(seed=turn, counts=(int(count),), turns=1)

    results(2, fn)


@pytest.mark.parametrize(
    ("calls", "count"),
    [(0, 20_000), (3, 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in EARLIER)],
)
def test_a_rank_that_leaves_a_run_early(calls, count):
    """The others are told, and after the run all are at the same call."""

    def fn():
        rank, strategy, seen = sv.rank(), sv.MultiWorkerMirroredStrategy(), []

        def step():
            for number in range(4):
                if rank == 1 and number == calls:
                    raise KeyError("mine")
                assert (sv.all_reduce(np.full(count, number + rank)) == 3 * number + 3).all()

        sv.barrier()
        for turn in range(3):
            try:
                strategy.run(step)
            except (KeyError, MismatchError) as error:
                seen.append(type(error))
            check_sums(seed=turn, counts=(3, 20_000), turns=1)
        return seen

    for rank, seen in enumerate(results(3, fn)):
        assert seen == [KeyError if rank == 1 else MismatchError] * 3


def test_the_first_call_of_a_group_refused_before_it_began():
    refused = threading.Event()

    def fn():
        if sv.rank() == 1:
            error = caught(lambda: sv.all_reduce(np.ones(3), "nonsense"))
            refused.set()
        else:
            assert refused.wait(50)
            time.sleep(0.1)
            error = caught(lambda: sv.all_reduce(np.ones(3)))
        check_sums()
        return type(error)

    assert results(2, fn) == [MismatchError, ConfigError]


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_ranks_name_the_one_that_skips_a_call_in_a_run(pause_s):
    """After the longer pause the other one has reported its wait, and this rank is in no call."""

    def fn():
        strategy = sv.MultiWorkerMirroredStrategy()

        def step():
            if sv.rank() == 0:
                sv.all_reduce(np.ones(3))

        seen = []
        for turn in range(3):
            seen.append(caught(lambda: strategy.run(step)))
            if sv.rank() == 1:
                time.sleep(pause_s)
            seen.append(caught(sv.barrier))
            check_sums(seed=turn, counts=(3, 20_000), turns=1)
        return [type(one) for one in seen]

    zero, one = results(2, fn)
    assert zero == [MismatchError] * 6
    assert one == [type(None), MismatchError] * 3


DEADLOCK = """
import sys
sys.path[:0] = {folders!r}
from test_shm_groups import *

def fn():
    rank = sv.rank()
    first, second = sv.new_group([0, 1]), sv.new_group([0, 1])
    for turn in range(3):
        mine, other = (first, second) if rank == 0 else (second, first)
        error = caught(lambda: sv.all_reduce(np.ones({count}), group=mine))
        assert isinstance(error, MismatchError) and "deadlock" in str(error), error
        check_sums(seed=turn, counts=(3, 20_000), turns=1)
        error = caught(lambda: sv.all_reduce(np.ones({count}), group=other))  # the call that the other one had made
        assert isinstance(error, MismatchError), error
        for group in (first, second):
            check_sums(group, seed=turn, counts=(3, 20_000), turns=1)

results(2, fn)
print("right")
"""


@pytest.mark.parametrize("count", [3, 20_000])
def test_groups_can_be_used_after_a_deadlock_was_told(count):
    """In a process of its own: a thread that might resolve the deadlock, as pytest's, would keep it from being told."""
    code = textwrap.dedent(DEADLOCK).format(
        count=count, folders=[str(REPOSITORY), str(Path(__file__).parent)]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("right", "")
