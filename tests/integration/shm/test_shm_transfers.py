"""Blocks that are moved side by side: persistent calls, ranks that bring something else all at once, results and operands."""

from types import SimpleNamespace

import numpy as np
import pytest

import syncvar as sv
from syncvar._native.constants import Need
from syncvar.collectives.groups import communicator_of
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime import block_transfer, program_runner
from syncvar.runtime.program_runner import ADDRESS
from syncvar.shm.channel_table import ProcessReader
from syncvar.testing import run_ranks
from tests.support.harness import covering, everywhere

COUNTS = [0, 1, 7, 5_000, 40_000, 300_000]  # nothing, small slots, one window, several
WAYS = [*((count, "auto") for count in COUNTS), (40_000, "off"), (150_000, "off")]


def results(size, fn, single_copy="auto"):
    return everywhere(size, fn, shared=True, config=RuntimeConfig(single_copy=single_copy))


def block(rank, count, dtype="f4", turn=0):
    return (np.arange(count) % 97 + 100 * rank + turn).astype(dtype)


@pytest.mark.parametrize(("size", "way"), covering([2, 3, 4], WAYS, strength=1))
def test_prepared_and_first_calls_give_the_same(monkeypatch, size, way):
    count, single_copy = way
    monkeypatch.setattr(block_transfer, "_READ_BYTES", 400_000)  # the C runner reads the longest

    def fn():
        rank = sv.rank()
        everyone = [block(other, count) for other in range(size)]
        rows = [
            np.concatenate([block(other, count, "f4", dest) for dest in range(size)])
            for other in range(size)
        ]
        total = sum(row.astype("f8") for row in rows).astype("f4")
        out, gathered, piece = (
            np.empty(count, "f4"),
            np.empty(size * count, "f4"),
            np.empty(count, "f4"),
        )
        parts = [np.empty(count, "f4") for _ in range(size)]
        for turn in range(4):
            root = turn % size
            for into in (None, out):
                made = sv.broadcast(everyone[rank], root=root, out=into)
                assert np.array_equal(made, everyone[root])
                assert into is None or made is into
            for into in (None, gathered):
                made = sv.all_gather(everyone[rank], out=into)
                assert np.array_equal(made, np.concatenate(everyone))
                assert into is None or made is into
            for into in (None, piece):
                made = sv.reduce_scatter(rows[rank], out=into)
                assert np.array_equal(made, total[rank * count : (rank + 1) * count])
                assert into is None or made is into
            for into in (None, parts, gathered):
                made = sv.all_to_all(rows[rank], out=into)
                for source, one in enumerate(made):
                    assert np.array_equal(one, block(source, count, "f4", rank))
                assert into is not parts or made[0] is parts[0]
        x = everyone[rank].copy()
        assert np.array_equal(sv.broadcast(x, root=size - 1, out=x), everyone[size - 1])
        assert np.array_equal(x, everyone[size - 1])

    results(size, fn, single_copy)


@pytest.mark.parametrize(
    ("what", "of_x", "reads"),
    covering(
        [(2, "f4", "sum"), (3, "f2", "mean"), (4, "i4", "mean")],
        ["private", "resident", "resident on even ranks"],
        ["all", "none", "all but rank 1"],
    ),
)
def test_blocks_are_taken_wherever_they_lie(monkeypatch, what, of_x, reads):
    (size, dtype, op), count = what, 20_000
    monkeypatch.setattr(block_transfer, "_READ_BYTES", 0)  # the C runner reads too

    def placed(values):
        is_resident = of_x == "resident" or (of_x != "private" and sv.rank() % 2 == 0)
        made = sv.empty(values.shape, dtype) if is_resident else np.empty(values.shape, dtype)
        made[...] = values
        return made

    def fn():
        rank = sv.rank()
        channel = communicator_of(None).channel
        sv.barrier()
        assert (channel.reach is not None) == (reads != "none")
        if rank == 1 and reads == "all but rank 1":
            channel.reach = None
        wanted = [block(other, size * count, dtype).reshape(size, count) for other in range(size)]
        for turn in range(3):
            x = placed(wanted[rank])
            assert np.array_equal(sv.broadcast(x, root=turn % size), wanted[turn % size])
            assert np.array_equal(sv.all_gather(x), np.concatenate(wanted))
            for source, part in enumerate(sv.all_to_all(x)):
                assert np.array_equal(part.reshape(-1), wanted[source][rank])
            rows = sum(one[rank].astype("f8") for one in wanted) / (size if op == "mean" else 1)
            made = sv.reduce_scatter(x, op)
            assert np.array_equal(made.reshape(-1), rows.astype(made.dtype))
            assert np.array_equal(x, wanted[rank])
            x[...] = 0  # once a call has ended, nobody looks at its operands
            strided = np.asfortranarray(wanted[rank])
            assert np.array_equal(sv.broadcast(strided, root=0), wanted[0])

    results(size, fn, "off" if reads == "none" else "auto")


NOBODY = 1 << 22, 1 << 22  # no system has so many processes


@pytest.mark.parametrize("place", [0, 3, 64])
def test_results_that_no_cache_holds_are_whole(place):
    """Those are written past the caches, in lines: what lies before and behind them, and between, is written otherwise."""
    count = (17 << 20) // 2 - 1_001

    def fn():
        rank = sv.rank()
        room = np.zeros(2 * count + 100, "u1")
        out = room[place : place + 2 * count]
        expected = np.concatenate([block(other, count, "u1") for other in range(2)])
        for _ in range(2):
            out[:] = 0
            sv.all_gather(block(rank, count, "u1"), out=out)
            assert np.array_equal(out, expected)
        assert not room[:place].any()
        assert not room[place + 2 * count :].any()

    results(2, fn)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_rank_that_is_gone_ends_the_reading(is_prepared):
    def fn():
        x = np.ones(100_000)
        for _ in range(3 * is_prepared):
            sv.broadcast(x)
        sv.barrier()
        if sv.rank() == 1:
            communicator_of(None).channel.reach.processes = NOBODY
        return sv.broadcast(x) is not None

    config = RuntimeConfig(collective_timeout_s=1.0, call_runner="python")
    found = run_ranks(2, fn, shared=True, timeout_s=120, config=config)
    assert all(isinstance(one, sv.DeadlineExceeded | sv.PeerLost) for one in found), found


@pytest.mark.needs_c_extension
def test_the_runner_in_c_sees_that_a_rank_is_gone(monkeypatch):
    def finds(reach, *_):
        reach.processes = NOBODY
        return True

    monkeypatch.setattr(ProcessReader, "finds", finds)
    monkeypatch.setattr(block_transfer, "_READ_BYTES", 0)
    config = RuntimeConfig(collective_timeout_s=1.0)
    found = run_ranks(
        2, lambda: sv.broadcast(np.ones(100_000)), shared=True, timeout_s=120, config=config
    )
    assert all(isinstance(one, sv.DeadlineExceeded | sv.PeerLost) for one in found[1:]), found


def test_a_rank_that_is_gone_when_a_failed_reading_is_looked_into_ends_as_one_that_was_gone_before():
    """The C runner has failed to read, for another reason; before Python finds out why, the process ends."""
    channel = SimpleNamespace(reach=SimpleNamespace(read=lambda *_, **__: False))
    found = program_runner.reading(channel, iter([-7, Need.UNREAD]), iter([(1, ADDRESS | 8)]))
    assert [next(found), next(found)] == [-7, Need.PEER_ENDED]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_memory_that_others_cannot_read_goes_by_cells(monkeypatch, is_prepared):
    monkeypatch.setattr(block_transfer, "_READ_BYTES", 0)

    def fn():
        ground = bytearray(400_000)  # not NumPy's: it may be anything
        x = np.frombuffer(ground, np.float32)
        for turn in range(1 + 2 * is_prepared):
            x[...] = np.arange(100_000) + turn + 5 * sv.rank()
            for collective in (sv.broadcast, sv.all_gather):
                assert np.array_equal(collective(x)[:100_000], np.arange(100_000) + turn)

    results(2, fn)
    monkeypatch.setattr(ProcessReader, "can_read", lambda *_: False)
    monkeypatch.setattr(ProcessReader, "read", None)
    results(2, fn)


def test_a_call_that_is_refused_keeps_nothing_alive(monkeypatch):
    monkeypatch.setattr(
        block_transfer, "_READ_BYTES", 0
    )  # what lies here is read by the other rank

    def fn():
        x = np.ones(100_000)
        for _ in range(3):
            sv.broadcast(x)
            with pytest.raises(sv.MismatchError):
                sv.broadcast(x) if sv.rank() else sv.all_gather(x)
        sv.barrier()
        return len(communicator_of(None).channel._in_use)

    assert results(2, fn) == [0, 0]


def test_half_types_and_means_are_rounded_once():
    def fn():
        rank = sv.rank()
        x = np.full((4, 3), 0.1 + rank, "f2")
        for _ in range(3):
            mean, total = sv.reduce_scatter(x, "mean"), sv.reduce_scatter(x)
            whole = sv.reduce_scatter(np.arange(4) + rank, "mean")
        exact = np.float32(np.float16(0.1)) + np.float32(np.float16(1.1))
        assert mean.dtype == total.dtype == np.float16
        assert mean.tolist() == [[float(np.float16(exact / 2))] * 3] * 2
        assert total.tolist() == [[float(np.float16(exact))] * 3] * 2
        assert whole.dtype == np.float64
        return whole.tolist()

    assert results(2, fn) == [[0.5, 1.5], [2.5, 3.5]]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_bring_something_else_take_the_general_way_together(size):
    """Some ranks are in a persistent call, others are not: what is prepared depends on what a rank has brought before."""

    def fn():
        rank, last = sv.rank(), size - 1
        for turn in range(30):
            odd = turn % 3 == 2
            count = 20_000 if odd and rank == last else 10_000 * (turn % 2) + 5
            lengths = [
                20_000 if odd and other == last else 10_000 * (turn % 2) + 5
                for other in range(size)
            ]
            made = sv.all_gather(block(rank, count))
            assert np.array_equal(
                made, np.concatenate([block(other, one) for other, one in enumerate(lengths)])
            )
            x = None if odd and rank == last else block(rank, 6_000)
            assert np.array_equal(sv.broadcast(x), block(0, 6_000))
            shape = (size * 2, 3) if odd and rank == last else (size, 3)
            found = sv.all_to_all(np.full(shape, rank))
            assert [one.tolist() for one in found] == [
                [[other] * 3] * (2 if odd and other == last else 1) for other in range(size)
            ]

    results(size, fn)


def test_a_mismatch_of_a_prepared_call_is_told_and_changes_nothing():
    def fn():
        rank = sv.rank()
        x, out = block(rank, 9), np.zeros(18, "f4")
        for _ in range(3):
            sv.all_gather(x, out=out)
        out[:] = -1
        with pytest.raises(sv.MismatchError):
            sv.all_gather(x, out=out) if rank else sv.broadcast(x)
        with pytest.raises(sv.MismatchError):
            sv.all_gather(x.astype("f8") if rank else x, out=out)
        changed = not np.array_equal(out, np.full(18, -1, "f4"))
        return changed, sv.all_gather(x).size

    assert results(2, fn) == [(False, 18)] * 2


def test_wrong_outputs_are_refused():
    def fn():
        x = block(sv.rank(), 8)
        sv.all_gather(x), sv.all_to_all(x)
        for call in (
            lambda: sv.all_gather(x, out=np.empty(15, "f4")),
            lambda: sv.broadcast(x, out=np.empty(8, "f8")),
            lambda: sv.reduce_scatter(x, out=np.empty(3, "f4")),
            lambda: sv.all_to_all(x, out=[np.empty(4, "f4")]),
            lambda: sv.all_to_all(x, out=[np.empty(3, "f4"), np.empty(4, "f4")]),
            lambda: sv.all_to_all(x, out=x),
        ):
            with pytest.raises((sv.ConfigError, sv.MismatchError)):
                call()
        return sv.all_reduce(1).tolist()

    assert results(2, fn) == [2, 2]


def test_results_may_lie_over_operands():
    def fn():
        rank = sv.rank()
        x = np.zeros(8, "f4")
        x[4 * rank : 4 * rank + 4] = (
            rank + 1
        )  # as MPI_IN_PLACE: the own block is where the result has it
        for _ in range(3):
            sv.all_gather(x[4 * rank : 4 * rank + 4], out=x)
        y = block(rank, 8)
        sv.reduce_scatter(y, out=y[2:6])
        return x.tolist(), y[2:6].tolist()

    total = (block(0, 8) + block(1, 8)).tolist()
    assert results(2, fn) == [
        ([1.0] * 4 + [2.0] * 4, total[:4]),
        ([1.0] * 4 + [2.0] * 4, total[4:]),
    ]


def test_started_calls_take_their_values_at_once():
    def fn():
        rank = sv.rank()
        x = block(rank, 30_000)
        works = [sv.reduce_scatter(x, async_op=True), sv.all_to_all(x, async_op=True)]
        x += 1_000_000
        piece, parts = (work.wait() for work in works)
        half = slice(15_000 * rank, 15_000 * (rank + 1))
        return np.array_equal(piece, (block(0, 30_000) + block(1, 30_000))[half]), np.array_equal(
            parts[0], block(0, 30_000)[half]
        )

    assert results(2, fn) == [(True, True)] * 2


def test_byte_order_and_bad_arguments_take_the_long_way():
    def fn():
        rank = sv.rank()
        sv.barrier()
        x = np.arange(4.0).astype(">f8" if rank else "<f8")
        seen = [
            one.tolist()
            for one in (sv.broadcast(x), sv.all_gather(x), sv.reduce_scatter(x), *sv.all_to_all(x))
        ]
        for call in (
            lambda: sv.reduce_scatter(x, "nope" if rank else "sum"),
            lambda: sv.broadcast(x, root=7 if rank else 0),
            lambda: sv.all_gather(np.array([None, 1]) if rank else x),
        ):
            with pytest.raises(sv.ConfigError if rank else sv.MismatchError):
                call()
        return seen, float(sv.all_reduce(1.0))

    half = [[0.0, 2.0], [4.0, 6.0]]
    for rank, (seen, total) in enumerate(results(2, fn)):
        assert seen == [
            [0, 1, 2, 3],
            [0, 1, 2, 3] * 2,
            half[rank],
            *[[0, 1] if rank == 0 else [2, 3]] * 2,
        ]
        assert total == 2.0


def test_started_gathers_take_their_values_at_once():
    def fn():
        x = block(sv.rank(), 200_000, "f8")
        works = [sv.all_gather(x, async_op=True), sv.broadcast(x, async_op=True)]
        x[:] = -7
        gathered, sent = (work.wait() for work in works)
        everyone = np.concatenate([block(0, 200_000, "f8"), block(1, 200_000, "f8")])
        return np.array_equal(gathered, everyone), np.array_equal(sent, block(0, 200_000, "f8"))

    assert results(2, fn) == [(True, True)] * 2


def test_parts_of_as_many_dimensions_as_numpy_has():
    """The results were made as one array of one dimension more."""
    shape = (1,) * 64

    def fn():
        for _ in range(3):
            made = sv.all_to_all([np.full(shape, 10.0 * sv.rank() + other) for other in range(2)])
        return [(one.shape, float(one.ravel()[0])) for one in made]

    assert everywhere(2, fn, shared=True) == [
        [(shape, float(rank)), (shape, 10.0 + rank)] for rank in range(2)
    ]
