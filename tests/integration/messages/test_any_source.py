"""Probes, receives from any source, synchronous sends: over links, in shared memory, without C, and to oneself."""

import threading
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.p2p_channel import (
    EITHER,
    TAG_MAX,
    ReceiveArgs,
    pair_identity,
    stream_identity,
    tag_of,
)
from syncvar.runtime.p2p_matching import matcher_of
from syncvar.testing import run_ranks
from tests.support.fake_tensors import Tensor
from tests.support.harness import everywhere

SOON = {"collective_timeout_s": 60.0, "report_after_s": 0.05, "rendezvous_timeout_s": 60.0}
LONG = 300_000  # elements, above `eager_bytes`
LATER_S = 0.1  # long enough for the other rank to wait in the engine


@pytest.fixture(
    params=[
        "links",
        "shm",
        pytest.param("python", marks=pytest.mark.slow),
    ]
)
def ranks(request):
    runner = "python" if request.param == "python" else "auto"

    def run(size, fn, **settings):
        config = RuntimeConfig(**{**SOON, "call_runner": runner, **settings})
        shared = request.param != "links"
        return everywhere(size, fn, config=config, shared=shared, timeout_s=120)

    return run


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [0, 1, 12345, TAG_MAX])
def test_the_tag_follows_from_the_identity_of_a_pair(tag):
    pair, other = pair_identity(1, 0, 1), pair_identity(1, 1, 0)
    assert tag_of(stream_identity(pair, tag), pair) == tag
    assert tag_of(stream_identity(pair, tag), other) is None


# -- probe -----------------------------------------------------------------------------------------


def test_a_probe_describes_the_next_message_and_leaves_it(ranks):
    def fn():
        if sv.rank() == 1:
            sv.send(np.zeros((2, 3), np.int8), 0, tag=4)
            sv.send_object({"a": 1}, 0, tag=5)
            sv.send(np.arange(float(LONG)), 0, tag=6)
            return None
        first = sv.probe(1, tag=4)
        assert first == sv.probe(tag=4) == sv.probe(tag=4, wait=False)
        assert first == (1, 4, False, np.dtype(np.int8), (2, 3), 6)
        second = sv.probe(tag=5)
        assert second[:5] == (1, 5, True, None, None)
        assert second.nbytes > 0
        third = sv.probe(1, tag=6)
        assert third == (1, 6, False, np.dtype(float), (LONG,), LONG * 8)
        assert sv.recv(1, tag=4).shape == (2, 3)
        assert sv.probe(1, tag=4, wait=False) is None
        assert sv.recv_object(1, tag=5) == {"a": 1}
        return float(sv.recv(1, tag=6).sum())

    assert ranks(2, fn)[0] == np.arange(float(LONG)).sum()


def test_a_probe_waits_for_a_message_of_its_tag_and_source(ranks):
    def fn():
        rank = sv.rank()
        if rank == 0:
            infos = [sv.probe(2, tag=7), sv.probe(1, tag=None), sv.probe(tag=9)]
            values = [float(sv.recv(info.source, tag=info.tag)) for info in infos]
            return [(info.source, info.tag) for info in infos], values
        time.sleep(LATER_S * rank)
        if rank == 1:
            sv.send(8.0, 0, tag=8)
        else:
            sv.send(7.0, 0, tag=7)
            sv.send(9.0, 0, tag=9)
        return None

    assert ranks(3, fn)[0] == ([(2, 7), (1, 8), (2, 9)], [7.0, 8.0, 9.0])


def test_a_message_that_a_started_receive_will_take_is_not_the_next(ranks):
    def fn():
        if sv.rank() == 1:
            sv.recv(0)
            sv.send(1.0, 0)
            sv.send([2.0, 3.0], 0)
            return None
        work = sv.recv(1, async_op=True)
        sv.send(0, 1)
        info = sv.probe(1)
        return info.shape, float(work.wait()), sv.recv(1).tolist()

    assert ranks(2, fn)[0] == ((2,), 1.0, [2.0, 3.0])


def test_a_probe_of_a_rank_that_sends_nothing_ends_with_its_error(ranks):
    def fn():
        if sv.rank() == 1:
            return None
        with pytest.raises(sv.PeerLost, match="rank 1"):
            sv.probe(tag=3)
        return True

    assert ranks(2, fn)[0]


def test_a_probe_has_a_deadline(ranks):
    is_over = threading.Event()

    def fn():
        if sv.rank() == 1:  # busy, so no deadlock
            return is_over.wait(60)
        with pytest.raises(sv.DeadlineExceeded, match=r"probe\(from any rank, tag 3\)"):
            sv.probe(tag=3, timeout=0.3)
        is_over.set()
        return True

    assert ranks(2, fn) == [True, True]


def test_wrong_arguments_of_probes_and_receives(ranks):
    def fn():
        for wrong in (-1, 2, "0", True):
            with pytest.raises(sv.ConfigError, match="source"):
                sv.probe(wrong)
        for wrong in (-1, 1 << 31, "0"):
            with pytest.raises(sv.ConfigError, match="tag"):
                sv.probe(tag=wrong)
            with pytest.raises(sv.ConfigError, match="tag"):
                sv.recv_any(tag=wrong)
        with pytest.raises(sv.ConfigError, match="timeout"):
            sv.recv_any(timeout=-1)
        with pytest.raises(sv.ConfigError, match="timeout"):
            sv.probe(wait=False, timeout=0)
        return True

    assert all(ranks(2, fn))


# -- any source ------------------------------------------------------------------------------------


def test_messages_from_any_source_arrive_once_each(ranks):
    def fn():
        rank = sv.rank()
        if rank:
            for step in range(20):
                sv.send(np.full(step, rank), 0, tag=step % 3)
                if step % 5 == 0:
                    sv.send_object((rank, step), 0, tag=9)
            sv.send(np.full(LONG, rank), 0, tag=1)
            return None
        seen = {1: [], 2: []}
        for _ in range(2 * 25):
            one = sv.recv_any(tag=None)
            assert one.is_object == (one.tag == 9)
            if one.is_object:
                assert one.value[0] == one.source
            else:
                assert (one.value == one.source).all()
                seen[one.source].append((one.tag, one.value.size))
        assert sv.probe(tag=None, wait=False) is None
        return seen

    seen = ranks(3, fn)[0]
    for messages in seen.values():
        for tag in range(3):
            sizes = [size for number, size in messages if number == tag]
            expected = [step for step in range(20) if step % 3 == tag]
            assert sizes == expected + ([LONG] if tag == 1 else [])


def test_a_started_receive_from_any_source(ranks):
    def fn():
        rank = sv.rank()
        if rank:
            sv.recv(0, tag=1)
            sv.send(np.full(3 if rank == 1 else LONG, rank), 0, tag=5)
            return None
        out = np.zeros(3, int)
        first = sv.recv_any(tag=5, out=out, async_op=True)
        assert not first.done()
        sv.send(0, 1, tag=1)
        one = first.wait()
        assert one.value is out
        second = sv.recv_any(tag=None, async_op=True)
        sv.send(0, 2, tag=1)
        two = second.wait()
        return (one.source, one.tag, out.tolist()), (two.source, two.tag, int(two.value.sum()))

    assert ranks(3, fn)[0] == ((1, 5, [1, 1, 1]), (2, 5, 2 * LONG))


def test_an_unfit_message_is_an_error_of_its_receive_only(ranks):
    def fn():
        if sv.rank():
            time.sleep(LATER_S)
            sv.send(np.ones(2), 0)
            sv.send_object("text", 0)
            sv.send(3.0, 0)
            return None
        with pytest.raises(sv.ConfigError, match="out has shape"):
            sv.recv_any(out=np.zeros(5))
        with pytest.raises(sv.ConfigError, match="object"):
            sv.recv_any(out=np.zeros(5), async_op=True).wait()
        return float(sv.recv_any().value)

    assert ranks(2, fn)[0] == 3.0


def test_a_tensor_that_is_written_to(ranks):
    def fn():
        if sv.rank():
            sv.send([1.0, 2.0], 0)
            sv.send([3.0, 4.0], 0)
            return None
        out = Tensor(np.zeros(2))
        first = sv.recv_any(out=out)
        assert first.value is out
        assert first.source == 1
        seen = out.array.tolist()
        assert sv.recv_any(out=out, async_op=True).wait().value is out
        return seen, out.array.tolist()

    assert ranks(2, fn)[0] == ([1.0, 2.0], [3.0, 4.0])


def test_no_message_comes_in_a_block_of_uneven(ranks):
    def fn():
        with sv.uneven():
            with pytest.raises(sv.UsageError, match=r"do not work inside"):
                sv.recv_any()
            with pytest.raises(sv.UsageError, match=r"do not work inside"):
                sv.probe(wait=False)
        return True

    assert all(ranks(2, fn))


def test_a_receive_from_any_source_in_a_group(ranks):
    def fn():
        group = sv.new_group([2, 0])
        if sv.rank() == 1:
            sv.send(1.0, 0)
        if sv.rank() == 2:
            sv.send(2.0, 1, group=group)
        if sv.rank():
            return None
        one, other = sv.recv_any(group=group), sv.recv_any()
        return one.source, float(one.value), other.source, float(other.value)

    assert ranks(3, fn)[0] == (0, 2.0, 1, 1.0)


def test_the_record_names_the_chosen_source(ranks):
    def fn():
        if sv.rank():
            sv.send(1.0, 0, tag=2)
            return None
        sv.recv_any(tag=None)
        events = current().recorder.events()
        return [(one.label, one.path) for one in events if one.collective == "recv_any"]

    (found,) = ranks(2, fn)[0]
    assert found == ("recv_any(from any rank, any tag)", "found rank 1, tag 2")


# -- deadlocks -------------------------------------------------------------------------------------


def test_ranks_that_probe_each_other_are_a_deadlock(ranks):
    def fn():
        with pytest.raises(sv.MismatchError, match=r"deadlock") as raised:
            sv.probe(1 - sv.rank(), tag=3)
        assert set(raised.value.table) == {0, 1}
        sv.send(1.0, 1 - sv.rank(), tag=3)
        info = sv.probe(tag=3)
        return float(sv.recv(info.source, tag=3)) + float(sv.all_reduce(1.0))

    assert ranks(2, fn) == [3.0, 3.0]


def test_a_receive_from_any_source_is_part_of_a_deadlock(ranks):
    def fn():
        rank = sv.rank()
        with pytest.raises(sv.MismatchError, match=r"deadlock") as raised:
            sv.recv_any() if rank == 0 else sv.recv(rank - 1)
        assert set(raised.value.table) == {0, 1, 2}
        return float(sv.all_reduce(1.0))

    assert ranks(3, fn) == [3.0] * 3


def test_a_receive_from_any_source_waits_for_a_rank_that_computes(ranks):
    def fn():
        rank = sv.rank()
        if rank == 2:
            time.sleep(3 * LATER_S)
            sv.send(5.0, 0)
        elif rank == 1:
            assert float(sv.recv(0)) == 6.0
        else:
            assert float(sv.recv_any().value) == 5.0
            sv.send(6.0, 1)
        return float(sv.all_reduce(1.0))

    assert ranks(3, fn) == [3.0] * 3


# -- logs and replays ------------------------------------------------------------------------------


def test_a_replay_finds_the_recorded_messages(ranks, tmp_path):
    def fn(delays):
        rank = sv.rank()
        group = sv.new_group([2, 1, 0])
        if rank:
            time.sleep(delays[rank])
            for step in range(3):
                sv.send(step, 0, tag=step)
            sv.send(rank, 2, group=group)
            return None
        info = sv.probe(tag=None)
        found = [(info.source, info.tag)]
        works = [sv.recv_any(tag=2, async_op=True), sv.recv_any(tag=2, async_op=True)]
        while sv.probe(1, tag=0, wait=False) is None:
            pass
        found += [sv.recv_any(tag=None)[::2] for _ in range(4)]
        found += [sv.recv_any(group=group)[::2] for _ in range(2)]
        return found + [work.wait()[::2] for work in works]

    folder = str(tmp_path)
    first = ranks(3, lambda: fn([0, 0, 2 * LATER_S]), match_log=folder)[0]
    second = ranks(3, lambda: fn([0, 2 * LATER_S, 0]), match_replay=folder)[0]
    assert second == first
    assert first[0][0] == 1


def test_a_replay_repeats_a_receive_that_has_failed(ranks, tmp_path):
    def fn():
        if sv.rank():
            sv.send(np.ones(2), 0)
            sv.send(3.0, 0)
            sv.barrier()
            return None
        sv.barrier()
        with pytest.raises(sv.ConfigError, match="out has shape"):
            sv.recv_any(out=np.zeros(5))
        return float(sv.recv_any().value)

    folder = str(tmp_path)
    assert ranks(2, fn, match_log=folder)[0] == 3.0
    assert ranks(2, fn, match_replay=folder)[0] == 3.0


def test_a_replay_of_another_program_is_an_error(ranks, tmp_path):
    def fn(probes):
        if sv.rank() == 1:
            sv.recv(0)
            sv.send(1.0, 0)
            sv.send(2.0, 0)
            return None
        if probes:
            assert sv.probe(wait=False) is None
        sv.send(0.0, 1)
        if probes:
            return [float(sv.recv_any().value) for _ in range(2)]
        with pytest.raises(sv.UsageError, match="match_replay: in the recorded run call 1"):
            sv.recv_any()
        return [float(sv.recv_any().value) for _ in range(2)]

    folder = str(tmp_path)
    assert ranks(2, lambda: fn(probes=True), match_log=folder)[0] == [1.0, 2.0]
    assert ranks(2, lambda: fn(probes=False), match_replay=folder)[0] == [1.0, 2.0]
    (tmp_path / "matches-0.log").write_text("not a log")
    with pytest.raises(sv.ConfigError, match=r"matches-0.log cannot be read"):
        ranks(2, lambda: sv.probe(wait=False), match_replay=folder)


# -- synchronous sends -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, LONG])
def test_a_synchronous_send_waits_for_its_receive(ranks, count):
    def fn():
        if sv.rank() == 0:
            work = sv.send(np.ones(count), 1, synchronous=True, async_op=True)
            other = sv.send_object({"n": count}, 1, tag=1, synchronous=True, async_op=True)
            sv.send(0, 1, tag=2)
            assert int(sv.recv(1, tag=3)) == 0
            assert not work.done()
            assert not other.done()
            sv.send(0, 1, tag=4)
            work.wait()
            other.wait()
            sv.send(np.full(count, 2.0), 1, synchronous=True)
            return None
        sv.recv(0, tag=2)
        time.sleep(LATER_S)
        sv.send(0, 0, tag=3)
        sv.recv(0, tag=4)
        assert sv.recv(0).sum() == count
        assert sv.recv_object(0, tag=1) == {"n": count}
        return float(sv.recv(0).sum())

    assert ranks(2, fn)[1] == 2.0 * count


def test_ranks_that_all_send_synchronously_are_a_deadlock(ranks):
    def fn():
        other = 1 - sv.rank()
        with pytest.raises(sv.MismatchError, match="deadlock"):
            sv.send(1.0, other, synchronous=True)
        return float(sv.all_reduce(1.0))

    assert ranks(2, fn) == [2.0, 2.0]


# -- to oneself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_messages_to_oneself_from_any_source(ranks, size):
    def fn():
        rank = sv.rank()
        assert sv.probe(wait=False) is None
        with pytest.raises(sv.UsageError, match="sent itself nothing"):
            sv.probe(rank)
        sv.send(np.ones((2, 2)), rank, tag=7)
        sv.send_object("text", rank, tag=3)
        info = sv.probe(tag=None)
        assert (info.source, info.tag, info.shape) == (rank, 7, (2, 2))
        assert sv.probe(rank, tag=3).is_object
        one, two = sv.recv_any(tag=None), sv.recv_any(tag=3)
        assert (one.source, one.tag, one.value.sum()) == (rank, 7, 4.0)
        work = sv.recv_any(tag=None, async_op=True)
        sv.send(5, rank, tag=11)
        three = work.wait()
        return two.value, three.tag, int(three.value)

    assert ranks(size, fn) == [("text", 11, 5)] * size


def test_a_started_receive_from_any_source_takes_no_later_message_of_its_own():
    """Another thread receives the message between the look and the receive."""

    def fn():
        matcher = matcher_of(current().world, current())
        sv.send(1.0, 0, tag=3)
        found = matcher.find((0,), 3)
        assert sv.recv(0, tag=3) == 1.0
        assert matcher.mailbox.take(found, ReceiveArgs(EITHER)) is None
        sv.send_object("text", 0, tag=3)  # another message than the one that was found
        assert matcher.mailbox.take(found, ReceiveArgs(EITHER)) is None
        return sv.recv_object(0, tag=3)

    assert run_ranks(1, fn, timeout_s=60) == ["text"]


def test_a_world_of_one_that_has_sent_itself_nothing():
    def fn():
        with pytest.raises(sv.UsageError, match=r"sv.recv_any\(tag=None, async_op=True\)"):
            sv.recv_any(tag=None)
        work = sv.recv_any(async_op=True)
        with pytest.raises(sv.UsageError, match="wait after that"):
            work.wait()
        sv.send(1, 0)
        return int(work.wait().value)

    assert run_ranks(1, fn) == [1]


def test_a_synchronous_send_to_oneself(ranks):
    def fn():
        rank = sv.rank()
        with pytest.raises(sv.UsageError, match="waits for its receive"):
            sv.send(1.0, rank, synchronous=True)
        work = sv.send(2.0, rank, synchronous=True, async_op=True)
        assert not work.done()
        with pytest.raises(sv.UsageError, match="waits for its receive"):
            work.wait()
        got = [float(sv.recv(rank))]
        assert work.wait() is None
        receive = sv.recv(rank, async_op=True)
        sv.send(3.0, rank, synchronous=True)
        return [*got, float(receive.wait())]

    assert ranks(2, fn) == [[2.0, 3.0]] * 2
