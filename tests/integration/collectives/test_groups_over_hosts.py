"""Calls of groups that span several hosts: ranks share memory on each host and have links between hosts."""

import threading
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, MismatchError, PeerLost, SharedMemoryFull
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks
from syncvar.transports.in_memory import Faults
from tests.support.harness import caught

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, shutdown_timeout_s=1.0)
SIZES = [(3, 2), (4, 2), (5, 2), (7, 3)]


def ranks(size, hosts, fn, **more):
    results = run_ranks(size, fn, shared=True, hosts=hosts, config=SOON, timeout_s=120, **more)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results


def test_the_collectives_take_the_way_over_hosts():
    def fn():
        plans = []
        for collective in (
            "all_reduce",
            "all_gather",
            "broadcast",
            "barrier",
            "header_exchange",
            "reduce",
            "scan",
        ):
            plans.append(type(current().world.plan(collective, 4, 4)).__name__)
        return plans

    for seen in ranks(4, 2, fn):
        assert seen == ["CompiledStages"] * 6 + ["LinkSchedule"]


@pytest.mark.parametrize(("size", "hosts"), SIZES)
def test_reproducible_sums_have_the_bits_of_one_host(size, hosts):
    def fn():
        made = []
        for count in (1, 7, 40_000):
            x = np.random.default_rng((count, sv.rank())).standard_normal(count).astype(np.float32)
            made.append(sv.all_reduce(x, reproducible=True).tobytes())
        return made

    assert ranks(size, hosts, fn) == ranks(size, 1, fn)


@pytest.mark.parametrize(("size", "hosts"), SIZES)
def test_all_ranks_end_with_the_same_bytes(size, hosts):
    def fn():
        made = []
        for dtype in (np.float32, np.float16, np.complex128):
            for count in (1, 20_001):
                x = np.random.default_rng((count, sv.rank())).standard_normal(count).astype(dtype)
                for op in ("sum", "mean", "prod"):
                    made.append(sv.all_reduce(x, op).tobytes())
        values, places = sv.all_reduce(np.arange(10.0) * (sv.rank() - 1) ** 2, "minloc")
        return made, values.tobytes(), places.tobytes()

    results = ranks(size, hosts, fn)
    assert all(one == results[0] for one in results)


def rows_of(rank, count):
    """What a rank brings: small whole numbers, whose sums are exact in every order."""
    return np.random.default_rng((rank, count)).integers(-50, 50, (count, 3)).astype(np.float32)


def wanted_of(members, me, root, count):
    """What NumPy says about the calls of `calls_of`."""
    brought = [rows_of(rank, count) for rank in members]
    total, everything = sum(brought), np.concatenate(brought)
    lengths = [count] + [0] * (len(members) - 1)
    uneven = np.concatenate([rows_of(rank, rank * count // 4) for rank in members])
    whole, lone = np.array_split(total, len(members))[me], np.split(total, [count])[me > 0]
    parts = [np.array_split(one, len(members))[me] for one in brought]
    at_root = me == root
    assert len(lone) == lengths[me]
    return [
        total if at_root else None,
        whole,
        lone,
        everything if at_root else None,
        uneven if at_root else None,
        np.array_split(brought[root], len(members))[me],
        np.concatenate(parts),
        everything,
        uneven,
    ]


def calls_of(group, members, me, root, count):
    mine, options = rows_of(members[me], count), {"group": group}
    lengths = [count] + [0] * (len(members) - 1)
    uneven = rows_of(members[me], members[me] * count // 4)
    return [
        sv.reduce(mine, root=root, **options),
        sv.reduce_scatter(mine, **options),
        sv.reduce_scatter(mine, lengths=lengths, **options),
        sv.gather(mine, root, **options),
        sv.gather(uneven, root, **options),
        sv.scatter(mine if me == root else None, root, **options),
        np.concatenate(sv.all_to_all(mine, **options)),
        sv.all_gather(mine, **options),
        sv.all_gather(uneven, **options),
    ]


@pytest.mark.parametrize(
    ("size", "hosts"),
    [(4, 2), (5, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(3, 2), (7, 3)])],
)
def test_every_composed_call_is_right_for_any_group_root_and_size(size, hosts):
    chosen = [list(range(size)), [size - 1, 0], [*range(1, size)]]

    def fn():
        wrong = []
        for members in chosen:
            group = sv.new_group(members)
            if sv.rank() not in members:
                continue
            me = members.index(sv.rank())
            for root in (0, len(members) - 1):
                for count in (0, 5, 4_000, 60_000):
                    case = members, me, root, count
                    pairs = zip(calls_of(group, *case), wanted_of(*case), strict=True)
                    for number, (got, wanted) in enumerate(pairs):
                        if not (got is wanted or np.array_equal(got, wanted)):
                            wrong.append((case, number))
        return wrong

    assert ranks(size, hosts, fn) == [[]] * size


def test_a_value_in_place_is_written_only_at_the_end():
    def fn():
        x = np.full(50_000, sv.rank() + 1.0)
        if sv.rank() == 3:
            error = caught(lambda: sv.all_reduce(x, out=np.empty(3)))
        else:
            error = caught(lambda: sv.all_reduce(x, out=x))
        same = bool((x == sv.rank() + 1.0).all())
        sv.all_reduce(x, out=x)
        return type(error), same, x[0], x[-1]

    for rank, (error, same, first, last) in enumerate(ranks(4, 2, fn)):
        assert error is (ConfigError if rank == 3 else MismatchError)
        assert same
        assert first == last == 10.0


def test_started_calls_of_several_groups_go_on_together():
    def fn():
        everyone = sv.new_group([0, 1, 2, 3, 4])
        others = sv.new_group([1, 3, 4, 2])  # host 1's ranks in the middle: over links alone
        rows = sv.new_group([0, 1])
        started = [
            sv.all_reduce(np.full(30_000, number + 1.0), group=everyone, async_op=True)
            for number in range(4)
        ]
        if others.is_member:
            started.append(sv.all_reduce(np.ones(10), group=others, async_op=True))
        started.append(sv.broadcast(np.arange(20_000), root=3, async_op=True))
        if rows.is_member:
            started.append(sv.all_reduce(1, group=rows, async_op=True))
        order = started if sv.rank() % 2 else started[::-1]
        for work in order:
            work.wait()
        return [np.asarray(work.wait()).reshape(-1)[:2].tolist() for work in started[:4]]

    for seen in ranks(5, 2, fn):
        assert seen == [[5.0 * number, 5.0 * number] for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("seed", range(2))
def test_calls_that_are_refused_leave_every_later_one_right(seed):
    """At random ranks, other calls and bad arguments, small and long, one after the other."""
    plan = np.random.default_rng(seed)
    steps = [
        (int(plan.integers(0, 5)), int(plan.integers(0, 5)), int(plan.choice([3, 40_000])))
        for _ in range(12)
    ]

    def fn():
        rank, seen = sv.rank(), []
        for kind, odd, count in steps:
            x = np.full(count, rank + 1.0)
            if kind == 0 or rank != odd:
                calls = [lambda x=x: sv.all_reduce(x)]
            elif kind == 1:
                calls = [lambda x=x: sv.all_reduce(x[:-1])]
            elif kind == 2:
                calls = [lambda: sv.all_reduce(object())]
            else:
                calls = [sv.barrier if kind == 3 else lambda x=x: sv.all_gather(x)]
            totals = []
            error = caught(lambda: totals.append(float(calls[0]()[0])))  # noqa: B023
            seen.append(totals[0] if error is None else type(error).__name__)
        return seen

    for rank, seen in enumerate(ranks(5, 2, fn)):
        for (kind, odd, _), got in zip(steps, seen, strict=True):
            wanted = (
                15.0
                if kind == 0
                else "ConfigError"
                if kind == 2 and rank == odd
                else "MismatchError"
            )
            assert got == wanted


@pytest.mark.parametrize("odd", [0, 1, 4])
def test_memory_that_runs_out_on_one_rank_is_told_on_all_hosts(odd):
    def fn():
        if sv.rank() == odd:
            shm = current().shm

            def deny(nbytes):
                del shm.allocate
                raise SharedMemoryFull("planted")

            shm.allocate = deny
        errors = [type(caught(lambda: sv.all_reduce(np.ones(60_000)))), type(caught(sv.barrier))]
        return errors, float(sv.all_reduce(np.ones(60_000))[0])

    for rank, (errors, total) in enumerate(ranks(5, 2, fn)):
        assert errors[0] is (SharedMemoryFull if rank == odd else MismatchError)
        assert total == 5.0


def test_a_rank_that_leaves_is_told_on_all_hosts():
    def fn():
        sv.barrier()
        if sv.rank() == 4:
            raise KeyError("planted")
        return caught(lambda: [sv.all_reduce(np.ones(50_000)) for _ in range(50)])

    results = run_ranks(5, fn, shared=True, hosts=2, config=SOON, timeout_s=120)
    assert isinstance(results[4], KeyError)
    for one in results[:4]:
        assert isinstance(one, PeerLost)
        assert (one.rank, one.host) == (4, "host1")


@pytest.mark.parametrize("seed", range(2))
def test_frames_that_are_late_and_out_of_turn_change_nothing(seed):
    faults = Faults(seed=seed, delay_max=5, reorder=0.3)

    def fn():
        rank = sv.rank()
        made = []
        for count in (1, 5000, 20_000):
            made.append(float(sv.all_reduce(np.full(count, rank + 1.0))[-1]))
            made.append(sv.all_gather(np.full(rank + 1, rank)).tolist())
            made.append(sv.broadcast(np.full(count, rank), root=count % 4).tolist()[-1])
            sv.barrier()
        return made

    results = ranks(4, 2, fn, faults=faults)
    assert all(one == results[0] for one in results)
    assert results[0][0] == 10.0


def test_awaiting_names_ranks_of_other_hosts_and_of_this_one():
    seen = {}
    was_missed = threading.Event()

    def fn():
        sv.barrier()
        if sv.rank() == 3:
            assert was_missed.wait(50)  # in no call
        work = sv.all_reduce(np.ones(3), async_op=True)
        request = work._request
        assert request.is_shared
        assert request.links is not None
        until = time.monotonic() + 40
        while time.monotonic() < until and not work.done():
            seen.setdefault(sv.rank(), set()).add(request.awaiting)
            if (3,) in seen.get(2, ()) and any(set(one) & {2, 3} for one in seen.get(0, ())):
                was_missed.set()
            time.sleep(0.01)
        return float(work.wait()[0])

    assert ranks(4, 2, fn) == [4.0] * 4
    assert (3,) in seen[2]
    assert any(set(one) & {2, 3} for one in seen[0])
