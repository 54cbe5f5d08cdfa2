"""The in-memory network's faults: decided by the seed alone; calls end right, or with the right error."""

import random
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import DeadlineExceeded, PeerLost, TransportError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.frame import FrameType, Header
from syncvar.testing import Faults, run_ranks
from syncvar.transports.in_memory import MemoryNetwork, MemoryTransport
from tests.support.harness import covering

QUICK = RuntimeConfig(collective_timeout_s=0.4, shutdown_timeout_s=0.2)
PATIENT = RuntimeConfig(collective_timeout_s=30.0, segment_bytes=4096)


# -- the seed decides ------------------------------------------------------------------------------


def survivors(seed, disturbance):
    """Which frames of each link arrive, and how late, when senders run in an order of their own."""
    network = MemoryNetwork(3, Faults(seed=seed, delay_max=5, loss=0.3))
    transports = [MemoryTransport(network, rank) for rank in range(3)]

    def send(rank):
        draw = random.Random(f"{disturbance}/{rank}")
        for number in range(40):
            targets = [peer for peer in range(3) if peer != rank]
            draw.shuffle(targets)
            for peer in targets:
                if draw.random() < 0.3:
                    transports[rank].send(
                        peer, Header(FrameType.CREDIT, rank, 0, 0, nbytes=1).pack()
                    )
                transports[rank].send(peer, Header(FrameType.DATA, rank, 0, 0, number).pack())

    threads = [threading.Thread(target=send, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived = {}
    for rank in range(3):
        arrived[rank] = sorted(
            (item.frame.header.source, item.frame.header.call, item.due)
            for item in network.flying[rank]
            if item.frame.header.kind == FrameType.DATA
        )
    return arrived


def test_the_same_seed_makes_the_same_decisions_however_threads_run():
    for seed in range(10):
        first = survivors(seed, 0)
        assert all(survivors(seed, disturbance) == first for disturbance in range(1, 6))
    assert survivors(1, 0) != survivors(2, 0)


# -- loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_lost_frames_end_in_a_missed_deadline_on_all_ranks(world_size):
    # A rank that comes after another one gave up gets the error of that one.
    begins = threading.Barrier(world_size)

    def fn():
        begins.wait(50)
        try:
            sv.barrier()
        except TransportError as error:
            return error
        return None

    config = QUICK.replaced(collective_timeout_s=2.0)
    for error in run_ranks(world_size, fn, config=config, faults=Faults(loss=1.0)):
        assert isinstance(error, DeadlineExceeded), repr(error)
        assert error.missing
        assert "barrier (call 1)" in str(error)


@pytest.mark.parametrize("seed", range(6))
def test_a_frame_lost_now_and_then_gives_right_results_or_an_error_and_never_wrong_ones(seed):
    def fn():
        done = 0
        try:
            for number in range(200):
                assert int(sv.all_reduce(number)) == 3 * number
                done += 1
        except TransportError as error:
            return done, error
        return done, None

    out = run_ranks(3, fn, config=QUICK, faults=Faults(seed=seed, loss=0.01))
    assert all(not isinstance(one, BaseException) for one in out), out
    if any(error is not None for _, error in out):
        assert all(isinstance(error, DeadlineExceeded | PeerLost) for _, error in out), out
        assert any(isinstance(error, DeadlineExceeded) for _, error in out)
        assert max(done for done, _ in out) - min(done for done, _ in out) <= 1


# -- cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 4, 10])
@pytest.mark.parametrize("link", [(0, 1), (1, 2), (2, 0)])
def test_a_cut_link_is_a_lost_peer_for_both_ends_and_for_everybody(link, number):
    def fn():
        try:
            for _ in range(20):
                sv.all_reduce(np.ones(30_000))
        except TransportError as error:
            return error
        return None

    out = run_ranks(3, fn, config=PATIENT, faults=Faults(cut=(*link, number)))
    assert all(isinstance(error, PeerLost) for error in out), out
    assert all(error.rank in link for error in out), out
    one, other = link
    assert out[one].rank == other or out[other].rank == one


# -- delay and reorder: right results --------------------------------------------------------------

DTYPES = ["int8", "uint32", "int64", "float16", "float32", "float64", "complex128"]


def contribution(rank, count, dtype):
    return (np.arange(count) % 4 + rank % 3 + 1).astype(dtype)


def folded(op, parts):
    total = parts[0].astype("c16" if parts[0].dtype.kind == "c" else "f8")
    for part in parts[1:]:
        total = {
            "sum": np.add,
            "mean": np.add,
            "prod": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
        }[op](total, part.astype(total.dtype))
    return total / len(parts) if op == "mean" else total


def check_collectives(world_size, counts):
    rank = sv.rank()
    n = world_size
    for index, count in enumerate(counts):
        dtype = DTYPES[index % len(DTYPES)]
        parts = [contribution(one, count, dtype) for one in range(n)]
        for op in ("sum", "prod", "min", "max") if dtype[0] != "c" else ("sum",):
            for reproducible in (False, True):
                got = sv.all_reduce(parts[rank], op, reproducible=reproducible)
                assert got.dtype == parts[0].dtype
                assert np.array_equal(got, folded(op, parts).astype(dtype))
        if n in (1, 2, 4) and dtype[0] in "fi":
            assert np.array_equal(
                sv.all_reduce(parts[rank].astype("f8"), "mean"), folded("mean", parts)
            )
        out = np.empty_like(parts[rank])
        assert sv.all_reduce(parts[rank], out=out) is out
        assert np.array_equal(out, folded("sum", parts).astype(dtype))
        root = index % n
        assert np.array_equal(
            sv.broadcast(parts[root] if rank == root else None, root=root), parts[root]
        )
        assert np.array_equal(
            sv.broadcast(parts[rank] if rank == root else np.empty(count, dtype), root=root),
            parts[root],
        )
        uneven = [part[: (7 * one + 3) % (count + 1)] for one, part in enumerate(parts)]
        assert np.array_equal(sv.all_gather(uneven[rank]), np.concatenate(uneven))
        assert np.array_equal(
            sv.all_gather(parts[rank].reshape(1, -1), axis=-1), np.concatenate(parts).reshape(1, -1)
        )
        works = [
            sv.all_reduce(
                parts[rank] if dtype[0] == "c" else parts[rank].astype("f8") + k, async_op=True
            )
            for k in range(8)
        ]
        for k, work in enumerate(works):
            want = folded("sum", parts) + (0 if dtype[0] == "c" else n * k)
            assert np.array_equal(work.wait(), want.astype(dtype if dtype[0] == "c" else "f8"))
    tree = sv.all_reduce({"a": float(rank), "b": [np.full(3, rank), (1, 2.0)]})
    total = n * (n - 1) // 2
    assert float(tree["a"]) == total
    assert list(tree["b"][0]) == [total] * 3
    assert [float(one) for one in tree["b"][1]] == [n, 2.0 * n]
    sent = sv.broadcast({"x": np.arange(5), "y": [1, 2.5]} if rank == n - 1 else None, root=n - 1)
    assert list(sent["x"]) == [0, 1, 2, 3, 4]
    everyone = [
        {"rank": one, "text": "é" * one, "big": 1 << (60 + one), "t": (1, None)} for one in range(n)
    ]
    assert sv.all_gather_object(everyone[rank]) == everyone
    assert sv.broadcast_object(everyone[rank] if rank == 0 else object(), 0) == everyone[0]
    assert sv.gather_object(rank, n - 1) == (list(range(n)) if rank == n - 1 else None)
    assert sv.scatter_object(everyone if rank == 0 else None, 0) == everyone[rank]
    check_groups(n)
    sv.barrier()
    return "done"


def check_groups(n):
    """Groups that overlap, in another order, and with calls in flight in all of them."""
    rank = sv.rank()
    backwards = sv.new_group(range(n - 1, -1, -1))
    even, odd = sv.new_group(range(0, n, 2)), sv.new_group(range(n // 2, n))
    groups = [group for group in (None, backwards, even, odd) if group is None or group.is_member]
    works = [
        (group, k, sv.all_reduce(rank + k, group=group, async_op=True))
        for k in range(4)
        for group in groups
    ]
    for group, k, work in reversed(works):
        members = range(n) if group is None else group.ranks
        assert int(work.wait()) == sum(members) + k * len(members)
    assert list(sv.all_gather(rank, group=backwards)) == list(range(n - 1, -1, -1))
    half = backwards.split(rank % 2, key=-rank)
    assert list(sv.all_gather(rank, group=half)) == sorted(
        (one for one in range(n) if one % 2 == rank % 2), reverse=True
    )


NETWORKS = {
    "both": Faults(seed=3, delay_max=3, reorder=0.3),
    "delay": Faults(seed=1, delay_max=4),
    "reorder": Faults(seed=2, reorder=0.4),
    "calm": Faults(),
}


@pytest.mark.parametrize(
    ("world_size", "network"), covering([2, 3, 4, 5, 1], list(NETWORKS), strength=1)
)
def test_every_collective_is_exact_under_delay_and_reordering(world_size, network):
    faults = NETWORKS[network]
    counts = [*sorted({0, 1, max(0, world_size - 1), world_size, world_size + 1}), 10_007]
    out = run_ranks(
        world_size, check_collectives, world_size, counts, config=PATIENT, faults=faults
    )
    assert out == ["done"] * world_size, out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_collective_is_exact_under_many_seeds(world_size, seed):
    faults = Faults(seed=seed, delay_max=seed % 7, reorder=(seed % 5) / 10)
    out = run_ranks(
        world_size,
        check_collectives,
        world_size,
        [0, 1, world_size, 10_007],
        config=PATIENT,
        faults=faults,
    )
    assert out == ["done"] * world_size, out


def test_calls_are_counted_as_a_program_counts_them_also_beyond_runs():
    """On the wire, each begin and end of a run goes on to the next million."""

    def fn():
        strategy = sv.MirroredStrategy()
        for _ in range(3):
            strategy.run(sv.barrier)
        with pytest.raises(sv.MismatchError) as raised:
            sv.barrier() if sv.rank() else sv.all_reduce(1.0)
        return str(raised.value)

    texts = run_ranks(2, fn)
    assert texts[0].startswith("all_reduce(sum, float64[]) (call 4): "), texts
    assert texts[1].startswith("barrier (call 4): "), texts
    for text in texts:
        assert "rank 0: all_reduce(sum, float64[]) (call 4) at" in text, text
        assert "rank 1: barrier (call 4) at" in text, text
