"""Messages between ranks of one host: through boxes in shared memory, and over links where these have no room."""

import random
import threading

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar._native.constants import EntryForm
from syncvar.bootstrap.process import current
from syncvar.core.errors import SharedMemoryFull
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.p2p_matching import UsedChannel, channel_of
from syncvar.shm import message_ring
from syncvar.shm.message_ring import RingTable, array_code
from syncvar.testing import run_ranks
from tests.support.harness import caught, everywhere

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0)
IN_PARTS = RuntimeConfig(
    collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0, single_copy="off"
)
SHORT = 256 << 10  # bytes of a ring: it comes round often
CHECKED = RuntimeConfig(
    collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0, check_shm="on"
)


def ways(what="send"):
    """Return how the messages of this rank went: "shm message", or over links."""
    return {
        event.path
        for event in current().recorder.events()
        if event.label.startswith(what) and event.state == "done"
    }


DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
]
SHAPES = [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 1, 3, 4), (1021,), (8192,), (8193,), (300, 300)]


def _values(dtype, shape, seed):
    made = np.random.default_rng(seed).integers(0, 100, shape)
    if dtype == "bfloat16":
        dtype = ml_dtypes.bfloat16
    return made.astype(dtype)


LAYOUTS = {
    "as it is": lambda x: x,
    "columns first": lambda x: np.array(x, order="F"),
    "every other": lambda x: np.repeat(x.reshape(-1), 2)[::2].reshape(x.shape),
    "backwards": lambda x: x.reshape(-1)[::-1].copy()[::-1].reshape(x.shape),
    "resident": lambda x: _resident(x),
    "read-only": lambda x: np.frombuffer(x.tobytes() or b"", x.dtype).reshape(x.shape),
}


def _resident(x):
    made = sv.empty(x.shape, x.dtype)
    made[...] = x
    return made


@pytest.mark.parametrize(
    "config", [SOON, IN_PARTS, CHECKED], ids=["read where they lie", "in parts", "checked"]
)
def test_arrays_of_any_dtype_shape_and_layout_arrive_as_they_were_sent(config):
    cases = [
        (dtype, SHAPES[(number * 7 + turn) % len(SHAPES)], layout)
        for turn, layout in enumerate(LAYOUTS)
        for number, dtype in enumerate(DTYPES)
    ]

    def fn():
        for number, (dtype, shape, layout) in enumerate(cases):
            x = _values(dtype, shape, number)
            if sv.rank() == 0:
                sv.send(LAYOUTS[layout](x), 1, tag=number % 3)
                continue
            out = [
                None,
                np.empty_like(x),
                np.array(x * 0, order="F"),
                np.empty((*x.shape, 2), x.dtype)[..., 0],
            ][number % 4]
            got = sv.recv(0, tag=number % 3, out=out)
            assert out is None or got is out
            assert got.dtype == x.dtype
            assert got.shape == x.shape
            assert got.tobytes() == x.tobytes()
            got[...] = 0  # it is the receiver's own
        return "shm message" in ways("send" if sv.rank() == 0 else "recv")

    assert everywhere(2, fn, shared=True, config=config) == [True] * 2


def _program(seed, size, steps):
    """Return for each rank the sends and receives of a random program that cannot wait in a circle, in its order."""
    chance = random.Random(seed)
    lines = {rank: [] for rank in range(size)}
    waiting = []  # (source, dest, tag, number), sent and not received
    for number in range(steps):
        source, dest = chance.sample(range(size), 2)
        tag, nbytes = (
            chance.randrange(3),
            chance.choice([0, 8, 100, 4096, 60_000, 65_536, 65_544, 200_000, 700_000]),
        )
        is_started = nbytes > 65_536 or chance.random() < 0.3
        lines[source].append(("send", dest, tag, number, nbytes, is_started))
        waiting.append((source, dest, tag, number, nbytes))
        while waiting and chance.random() < 0.5:
            pick = chance.choice(waiting)
            pick = next(one for one in waiting if one[:3] == pick[:3])  # the oldest of its tag
            waiting.remove(pick)
            lines[pick[1]].append(
                ("recv", pick[0], pick[2], pick[3], pick[4], chance.random() < 0.3)
            )
    for source, dest, tag, number, nbytes in waiting:
        lines[dest].append(("recv", source, tag, number, nbytes, False))
    return lines


def _run(lines):
    seen, works = [], []
    for what, other, tag, number, nbytes, is_started in lines[sv.rank()]:
        if what == "send":
            x = np.full(nbytes // 4, number, np.int32)
            work = sv.send(x, other, tag=tag, async_op=is_started)
            x[...] = -1
            if is_started:
                works.append(work)
            continue
        got = sv.recv(other, tag=tag, async_op=is_started)
        if is_started:
            works.append(got)
            seen.append((number, nbytes, got))
        else:
            seen.append((number, nbytes, got))
    for work in works:
        work.wait()
    for number, nbytes, got in seen:
        x = got.wait() if hasattr(got, "wait") else got
        assert x.nbytes == nbytes
        assert (x == number).all(), (number, x[:3])
    return len(seen)


@pytest.mark.parametrize("config", [SOON, IN_PARTS], ids=["read where they lie", "in parts"])
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_of_messages(config, seed):
    _run_program(config, seed, size=2 + seed, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["shm", "links"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_longer_random_programs_of_messages(seed, shared):
    _run_program(IN_PARTS if seed % 2 else SOON, seed, size=2 + seed % 3, steps=250, shared=shared)


def _run_program(config, seed, *, size, steps, shared=True):
    lines = _program(seed, size, steps)
    results = everywhere(size, lambda: _run(lines), shared=shared, config=config)
    assert sum(results) == steps


def test_both_directions_at_once_and_long_messages_of_two_ranks_cross():
    def fn():
        other = 1 - sv.rank()
        for count in (1, 8000, 100_000, 1_000_000):
            x = np.full(count, sv.rank() + 1.0)
            works = [sv.send(x, other, tag=tag, async_op=True) for tag in range(3)]
            got = [sv.recv(other, tag=tag) for tag in (2, 0, 1)]
            for work in works:
                work.wait()
            assert all((one == other + 1).all() for one in got)
        return ways()

    for config in (SOON, IN_PARTS):
        assert everywhere(2, fn, shared=True, config=config) == [{"shm message"}] * 2


@pytest.fixture
def short_rings(monkeypatch):
    """Boxes as they are where many ranks share shared memory."""
    monkeypatch.setattr(message_ring, "_RINGS_BYTES", 0)


@pytest.mark.usefixtures("short_rings")
def test_what_finds_no_room_in_the_box_goes_over_a_link_and_nothing_waits_or_changes_places():
    def fn():
        other = 1 - sv.rank()
        for tag in (5, 6):
            for number in range(20):
                sv.send(
                    np.full(8000, number), other, tag=tag
                )  # 64 KB each: far more than a box holds
        sv.barrier()
        for tag in (6, 5):
            for number in range(20):
                assert (sv.recv(other, tag=tag) == number).all()
        sv.barrier()
        sv.send(1, other)
        assert sv.recv(other) == 1
        return len(ways()), next(
            event.path
            for event in reversed(current().recorder.events())
            if event.label.startswith("send")
        )

    assert everywhere(2, fn, shared=True, config=SOON) == [(2, "shm message")] * 2


@pytest.mark.usefixtures("short_rings")
def test_of_messages_that_nobody_asks_for_no_more_is_kept_than_a_window():
    narrow = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.5, window_bytes=1 << 18)

    def fn():
        if sv.rank() == 0:
            for number in range(40):
                sv.send(np.full(4000, number), 1, tag=1, async_op=True)
                if number % 10 == 9:
                    sv.send(number, 1, tag=2)
                    sv.recv(1, tag=3)
            return len(ways())
        for number in range(40):
            if number % 10 == 9:
                assert sv.recv(0, tag=2) == number
                inward = current().post.inward(0)
                assert inward._unexpected_nbytes <= (1 << 18) + 32_000 + SHORT
                sv.send(0, 0, tag=3)
        for number in range(40):
            assert (sv.recv(0, tag=1) == number).all()
        assert inward._unexpected_nbytes == 0
        return not inward._unexpected

    assert everywhere(2, fn, shared=True, config=narrow) == [2, True]


def test_without_room_in_the_shm_all_messages_go_over_links(monkeypatch):
    def full(*_):
        raise SharedMemoryFull("no room")

    def fn():
        if sv.rank() == 0:
            monkeypatch.setattr(current().shm, "allocate", full)
        sv.barrier()
        other = 1 - sv.rank()
        for count in (1, 9000, 100_000):
            if sv.rank() == 0:
                sv.send(np.arange(count), other)
                assert (sv.recv(other) == np.arange(count) + 1).all()
            else:
                sv.send(sv.recv(other) + 1, other)
        return ways()

    here, there = everywhere(2, fn, shared=True, config=SOON)
    assert here == {"links pair"}
    assert there == {"shm message"}


def test_where_there_is_no_room_for_a_long_ring_there_may_be_for_a_short_one(monkeypatch):
    def fn():
        shm = current().shm
        allocate = shm.allocate

        def narrow(nbytes):
            if nbytes > 1 << 20:
                raise SharedMemoryFull("no room")
            return allocate(nbytes)

        if sv.rank() == 0:
            monkeypatch.setattr(shm, "allocate", narrow)
        sv.barrier()
        other = 1 - sv.rank()
        for number in range(20):
            if sv.rank() == 0:
                sv.send(np.full(8000, number), other)
            assert (sv.recv(other) == number).all()
            if sv.rank() == 1:
                sv.send(np.full(8000, number), other)
        post = current().post
        return (
            ways(),
            post.outward(other).ring_writer().ring_bytes,
            post.inward(other)._ring.ring_bytes,
        )

    assert everywhere(2, fn, shared=True, config=CHECKED) == [
        ({"shm message"}, SHORT, message_ring.RING_BYTES),
        ({"shm message"}, message_ring.RING_BYTES, SHORT),
    ]


def test_a_pair_that_does_not_talk_takes_no_memory():
    def fn():
        before = current().shm._extents.used_bytes
        if sv.rank() == 0:
            sv.send(1, 1)
        if sv.rank() == 1:
            sv.recv(0)
        sv.barrier()
        return current().shm._extents.used_bytes - before

    first, second, third = everywhere(3, fn, shared=True, config=SOON)
    assert message_ring.RING_BYTES < first < message_ring.RING_BYTES + (1 << 14)
    assert second == third == 0


@pytest.mark.parametrize("config", [SOON, IN_PARTS], ids=["read where they lie", "in parts"])
def test_a_cycle_of_long_messages_gets_a_verdict_and_the_pair_goes_on(config):
    def fn():
        other = (sv.rank() + 1) % sv.world_size()
        before = (sv.rank() - 1) % sv.world_size()
        x = np.full(100_000, float(sv.rank()))
        error = caught(lambda: sv.send(x, other))
        assert "deadlock" in str(error)
        x[...] = -1.0  # what was given up is not read
        assert isinstance(caught(lambda: sv.recv(before)), sv.MismatchError)  # it was the same call
        work = sv.send(np.full(100_000, 7.0), other, async_op=True)
        assert (sv.recv(before) == 7.0).all()
        work.wait()
        return [
            str(event.path)
            for event in current().recorder.events()
            if event.label.startswith("send")
        ][-1]

    assert everywhere(3, fn, shared=True, config=config) == ["shm message"] * 3


def test_a_receive_whose_out_does_not_fit_uses_the_message_up_and_the_sender_goes_on():
    def fn():
        for count in (3, 100_000):
            if sv.rank() == 0:
                sv.send(np.ones(count), 1)
                sv.send(np.zeros(count), 1)
                continue
            with pytest.raises(sv.ConfigError, match="out has shape"):
                sv.recv(0, out=np.empty(2))
            work = sv.recv(0, out=np.empty(2), async_op=True)
            with pytest.raises(sv.ConfigError, match="out has shape"):
                work.wait()
        sv.barrier()

    everywhere(2, fn, shared=True, config=SOON)


def test_a_wait_that_meets_its_deadline_names_the_other_rank_and_breaks_the_group():
    brief = RuntimeConfig(
        collective_timeout_s=0.3, report_after_s=5.0, rendezvous_timeout_s=60.0, stall_warning_s=5.0
    )
    over = threading.Barrier(2)

    def receiving():
        if sv.rank() == 1:
            over.wait(20)
            return caught(lambda: sv.barrier())
        error = caught(lambda: sv.recv(1, timeout=0.2))
        over.wait(20)
        return error

    def sending():
        if sv.rank() == 1:
            over.wait(20)
            return caught(lambda: sv.recv(0))
        error = caught(lambda: sv.send(np.ones(100_000), 1))
        over.wait(20)
        return error

    for fn, words in (
        (receiving, "recv(from rank 1, tag 0)"),
        (sending, "send(float64[100000] to rank 1, tag 0)"),
    ):
        error, theirs = run_ranks(2, fn, shared=True, config=brief, timeout_s=120)
        assert isinstance(error, sv.DeadlineExceeded), error
        assert words in str(error)
        assert "for rank 1" in str(error)
        assert isinstance(theirs, sv.SyncvarError), theirs


def test_a_rank_that_ends_leaves_what_it_has_sent_and_nothing_more_comes():
    def fn():
        if sv.rank() == 0:
            sv.send(np.arange(3), 1)
            return None
        current().engine.publish(lambda key: None)
        got = sv.recv(0).tolist()
        return got, caught(lambda: sv.recv(0))

    got, error = run_ranks(2, fn, shared=True, config=SOON, timeout_s=120)[1]
    assert got == [0, 1, 2]
    assert isinstance(error, sv.PeerLost)


def test_two_threads_of_a_rank_receive_different_tags_from_the_same_rank():
    def fn():
        other, context = 1 - sv.rank(), current()
        failures = []

        def talk(tag):
            from syncvar.bootstrap.process import use

            try:
                with use(context):
                    for number in range(100):
                        sv.send(np.full(100, number), other, tag=tag)
                        assert (sv.recv(other, tag=tag) == number).all()
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=talk, args=(tag,), name=f"syncvar-test-{tag}") for tag in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return failures

    assert everywhere(2, fn, shared=True, config=SOON) == [[], []]


def test_a_message_is_kept_whose_receive_another_thread_begins_while_it_is_looked_at():
    def fn():
        if sv.rank() == 0:
            for tag in (1, 2):
                sv.send(np.full(100, tag), 1, tag=tag)
            return
        other = channel_of(current().world, current(), 0, 1, 1)
        inward, following = other.end, other.end._following

        def begun_by_another_thread(stream):
            if stream != other.stream.identity:
                return following(stream)
            inward.expected.add((stream, 0))
            return 1

        inward._following = begun_by_another_thread
        assert (sv.recv(0, tag=2) == 2).all()
        inward._following = following
        assert (sv.recv(0, tag=1) == 1).all()

    everywhere(2, fn, shared=True, config=SOON)


def test_a_channel_is_not_dropped_between_its_lookup_and_its_message():
    """Meanwhile many tags are used, each with a channel of its own."""
    tags = 300

    def fn():
        other = 1 - sv.rank()
        if sv.rank() == 0:
            with UsedChannel(current().world, current(), 0, 1, 5) as channel:
                for tag in range(10, tags):  # as another thread
                    sv.send(tag, 1, tag=tag)
                again = channel_of(current().world, current(), 0, 1, 5)
            assert again is channel
            sv.send(tags, 1, tag=5)
            sv.barrier()
            return len(current().world.streams) < tags - 10
        received = [int(sv.recv(other, tag=tag)) for tag in range(10, tags)]
        assert received == list(range(10, tags))
        assert sv.recv(other, tag=5) == tags
        sv.barrier()
        return True

    assert everywhere(2, fn, shared=True, config=SOON) == [True, True]


def test_a_message_goes_over_a_link_while_its_own_thread_has_the_box():
    """As in a signal's handler that comes while a long message waits."""

    def fn():
        line = channel_of(current().world, current(), 0, 1, 1)
        for turn in range(20):
            if sv.rank() == 1:
                assert (sv.recv(0, tag=1) == turn).all()
            elif turn == 0:
                sv.send(np.full(100, turn), 1, tag=1)
            else:
                with line.end.lock:
                    sv.send(np.full(100, turn), 1, tag=1)
        return len(line.end.expected) if sv.rank() == 1 else 0

    assert everywhere(2, fn, shared=True, config=SOON) == [0, 0]


def test_what_has_come_of_a_failed_receive_is_dropped_by_whoever_has_the_box_next():
    def fn():
        if sv.rank() == 0:
            for tag in (1, 2, 3):
                sv.send(np.full(100, tag), 1, tag=tag)
            sv.barrier()
            return None
        lost = channel_of(current().world, current(), 0, 1, 1)
        inward, key = lost.end, (lost.stream.identity, 0)
        assert (sv.recv(0, tag=2) == 2).all()
        with inward.lock:
            inward.forget(key)  # as of another thread, at any time
            before = key in inward._unexpected, inward._unexpected_nbytes
        assert (sv.recv(0, tag=3) == 3).all()
        sv.barrier()
        return before, key in inward._unexpected, inward._unexpected_nbytes

    assert everywhere(2, fn, shared=True, config=SOON) == [None, ((True, 800), False, 0)]


# -- the ring itself -------------------------------------------------------------------------------


@pytest.fixture
def pair():
    """Both ends of a box, and its sender's ring as the receiver sees it."""
    found = {}

    def fn():
        context = current()
        found[sv.rank()] = RingTable(context._channels, SHORT)
        if sv.rank() == 0:
            found["out"] = found[0].outbox(1)
        sv.barrier()
        if sv.rank() == 1:
            found["in"] = found[1].inbox(0)
            found["test"](found["out"], found["in"])
        sv.barrier()

    def run(test):
        found["test"] = test
        everywhere(2, fn, shared=True, config=CHECKED)

    return run


@pytest.mark.parametrize("seed", range(4))
def test_a_ring_gives_back_what_was_put_in_order_however_it_is_filled(pair, seed):
    def test(out, into):
        chance = random.Random(seed)
        here, number, asked = [], 0, 0
        for _ in range(1000):
            if chance.random() < 0.55:
                data = chance.randbytes(
                    chance.choice([0, 1, 8, 63, 64, 1000, 1023, 1024, 5000, 65_536])
                )
                shape = (1,) * chance.randrange(4) + (len(data),)
                if out.put(
                    array_code(1, 5, len(shape)), 1 << 63 | seed, number, shape, data, len(data)
                ):
                    here.append((number, shape, data))
                    number += 1
                else:
                    asked += 1
                    assert sum(len(data) for _, _, data in here) > SHORT // 3
            else:
                entry = into.first()
                assert (entry is None) == (not here)
                if entry is not None:
                    was, shape, data = here.pop(0)
                    assert (entry.form, entry.kind, entry.dtype, entry.stream, entry.call) == (
                        EntryForm.WHOLE,
                        1,
                        5,
                        1 << 63 | seed,
                        was,
                    )
                    assert entry.shape == shape
                    assert into.bytes_at(entry.data, entry.nbytes).tobytes() == data
                    into.free()
        assert into.news == number
        assert asked

    pair(test)


def test_eight_long_messages_may_be_open_and_a_number_is_used_again_when_it_was_answered_or_given_up(
    pair,
):
    def test(out, into):
        def tell():
            return out.put_address(array_code(1, 5, 1), 1, 0, (1 << 20,), 1 << 20, 4096, 0)

        numbers = [tell() for _ in range(8)]
        assert numbers == list(range(1, 9))
        assert tell() == 0
        into.confirm(1)
        out.cancel(2)
        assert [out.answer(number) for number in (1, 2)] == [2, 0]
        assert [tell(), tell(), tell()] == [9, 10, 0]
        assert [into.is_cancelled(number) for number in (1, 2, 3, 9, 10)] == [
            False,
            True,
            False,
            False,
            False,
        ]
        into.want(3)
        assert out.answer(3) == 1
        assert out.answer(9) == 0
        into.confirm(9)
        assert out.answer(1) == 2  # its place is another one's by now

    pair(test)


def test_who_refuses_is_sent_nothing_more_until_it_takes_again(pair):
    def test(out, into):
        def put():
            return out.put(array_code(1, 5, 1), 1, 0, (60_000,), bytes(60_000), 60_000)

        while put():
            pass
        into.refuse(refuses=True)
        while into.first() is not None:
            into.free()
        assert not put()
        into.refuse(refuses=False)
        assert put()

    pair(test)


def test_nothing_is_begun_where_the_message_is_not_there():
    def fn():
        if sv.rank() == 1:
            work = sv.recv(0, async_op=True)
            assert not work.done()
            sv.barrier()
            return work.wait().tolist()
        sv.barrier()
        sv.send(np.arange(2), 1)
        return [0, 1]

    assert everywhere(2, fn, shared=True, config=SOON) == [[0, 1]] * 2
