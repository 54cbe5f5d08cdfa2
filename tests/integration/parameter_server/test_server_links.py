"""Links between workers and servers, and arrays that are lent on one host, in one process."""

import contextlib
import gc
import os
import socket
import tempfile
import threading
import time

import numpy as np
import pytest
import zmq

from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import InternalError
from syncvar.core.process_ids import SERVER_0, failover_order
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.messages import frames_of, message_of, pack_frames, unpack_frames
from syncvar.parameter_server.same_host_links import (
    LEND_NBYTES_MIN,
    Pipe,
    ShmBufferPool,
    UnixListener,
)
from syncvar.parameter_server.server_links import ServerLinks
from syncvar.parameter_server.server_machine import Server
from syncvar.parameter_server.server_main import ServerLoop
from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.shm.segment import SharedSegment
from syncvar.shm.segment_file import SegmentId, SharedMemoryReference, create
from tests.support.harness import start_the_collector_of_pyzmq

start_the_collector_of_pyzmq()

MIB = 1 << 20


def environment(
    folder,
    *,
    role="worker",
    rank=0,
    job="job",
    generation=0,
    incarnation=0,
    servers=2,
    server_replicas=0,
):
    return RankEnvironment(
        rank=rank,
        world_size=2,
        local_rank=0 if role == "server" else rank,
        local_world_size=2,
        host_index=0,
        host_count=1,
        generation=generation,
        rendezvous=f"ipc://{folder}/store",
        job_id=job,
        role=role,
        servers=servers,
        server_replicas=server_replicas,
        incarnation=incarnation,
    )


def taken(links, sender=None, count=1, limit_s=60.0):
    """Return so many messages that come on any socket; who sends a long one goes on with that meanwhile."""
    found, until = [], time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} messages came"
        if sender is not None and sender.is_behind:
            assert not any(sender.receive(one) for one in sender.watching.wait(0.0))
        for one in links.watching.wait(0.05):
            while (came := links.receive(one)) is not None:
                found.append(came)
    return found


class Place:
    """Servers and workers of one process, each with its own links."""

    def __init__(self, folder, config):
        self.folder, self.config = folder, config
        self.context = zmq.Context()
        self.made = []

    def links(self, lender=None, **who):
        one = ServerLinks(self.context, environment(self.folder, **who), self.config, None, lender)
        self.made.append(one)
        if who.get("role") == "server":
            one.listen()
        return one

    def close(self):
        for one in self.made:
            one.close(0.0)
        self.context.term()


@pytest.fixture(params=["auto", "zmq"])
def place(request, runtime_folder):
    """Links of both kinds: pipes, and sockets of ZeroMQ."""
    one = Place(runtime_folder, RuntimeConfig(transport=request.param))
    yield one
    one.close()


@pytest.fixture
def runtime_folder():
    with tempfile.TemporaryDirectory(prefix="sv-") as made:
        yield made


def test_a_message_comes_whole_and_is_answered(place):
    server, worker = place.links(role="server", rank=1), place.links(rank=1)
    worker.connect(1, server.address)
    long = os.urandom(MIB)
    assert worker.send(SERVER_0 + 1, [b"head", b"", long])
    (came,) = taken(server, worker)
    assert (came.number, came.incarnation, [bytes(one) for one in came.frames]) == (
        1,
        0,
        [b"head", b"", long],
    )
    assert server.send(1, [b"answer"])
    (answer,) = taken(worker)
    assert (answer.number, [bytes(one) for one in answer.frames]) == (SERVER_0 + 1, [b"answer"])


@pytest.mark.parametrize("sizes", [(5 * MIB + 3,), (MIB, 2 * MIB), (30_000,) * 100])
def test_long_messages_and_many_parts_come_whole(place, sizes):
    server, worker = place.links(role="server", rank=1), place.links(rank=1)
    worker.connect(1, server.address)
    parts = [os.urandom(size) for size in sizes]
    assert worker.send(SERVER_0 + 1, [b"head", *parts, b"tail"])
    (came,) = taken(server, worker)
    assert [bytes(one) for one in came.frames] == [b"head", *parts, b"tail"]


def test_servers_speak_with_each_other(place):
    first, second = (place.links(role="server", rank=rank) for rank in range(2))
    first.connect(1, second.address)
    second.connect(0, first.address)
    assert first.send(SERVER_0 + 1, [b"copy"])
    (came,) = taken(second)
    assert came.number == SERVER_0
    assert second.send(SERVER_0, [b"copied"])
    (answer,) = taken(first)
    assert (answer.number, bytes(answer.frames[0])) == (SERVER_0 + 1, b"copied")


def test_a_server_hears_of_a_loss_that_is_told_while_it_tells_of_a_copy(runtime_folder):
    """To send on a socket of ZeroMQ takes its descriptor's signal away: who has sent looks again."""
    heirs = [failover_order(server, [0, 0, 0], 1) for server in range(3)]
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(contextlib.closing(Place(runtime_folder, RuntimeConfig())))
        first = place.links(role="server")
        launcher = place.context.socket(zmq.ROUTER)
        stack.callback(launcher.close, 0)
        launcher.bind(f"ipc://{runtime_folder}/store")
        me = environment(runtime_folder, role="server", rank=1, servers=3, server_replicas=1)
        serving = stack.enter_context(contextlib.closing(ServerLoop(me, place.config, {})))
        assert launcher.poll(10_000)
        identity, said = launcher.recv_multipart()
        addresses = {0: first.address, 1: parse_message(said)["address"]}

        def tell(version, ended):
            word = {
                "version": version,
                "addresses": addresses,
                "hosts": {},
                "ended": ended,
                "incarnations": {},
            }
            launcher.send_multipart([identity, pack_message("servers", **word)])

        def report_backup(server, say=serving._directory.report_backup):
            tell(2, {SERVER_0 + 2: "signal 9"})
            time.sleep(0.2)  # it is there, and nobody has looked
            say(server)

        serving._directory.report_backup = report_backup
        tell(1, {})
        thread = threading.Thread(target=serving.run)
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(serving.end)
        (seed,) = [
            one
            for one in Server(0, 2, heirs).server_lost(2, 1.0)
            if one.message == {"kind": "seed", "server": 2, "index": 0}
        ]
        first.connect(1, addresses[1])
        first.send(SERVER_0 + 1, frames_of(seed.message, seed.arrays))
        kinds = {message_of(came.frames)[0]["kind"] for came in taken(first, count=2)}
    assert kinds == {"backup_ack", "seed"}, "that of its own variables, whose copy is lost"


@pytest.mark.parametrize("who", [{"job": "other"}, {"generation": 1}, {"rank": 7}])
def test_who_is_of_another_job_or_start_is_not_heard(place, who):
    server, stranger, worker = place.links(role="server"), place.links(**who), place.links()
    stranger.connect(0, server.address)
    stranger.send(SERVER_0, [b"strange"])
    until = time.monotonic() + 10
    while not server.refused and time.monotonic() < until:
        for one in server.watching.wait(0.05):
            assert server.receive(one) is None
    assert server.refused == 1
    worker.connect(0, server.address)
    worker.send(SERVER_0, [b"mine"])
    assert bytes(taken(server)[0].frames[0]) == b"mine"


def test_of_two_incarnations_the_later_one_is_answered_and_the_other_can_be_told(place):
    server, before, after = place.links(role="server"), place.links(), place.links(incarnation=1)
    for one in (before, after):
        one.connect(0, server.address)
    before.send(SERVER_0, [b"a"])
    (early,) = taken(server)
    after.send(SERVER_0, [b"b"])
    taken(server)
    before.send(SERVER_0, [b"late"])
    (late,) = taken(server)
    assert late.incarnation == 0
    assert server.send(0, [b"for the later one"])
    assert server.send(0, [b"refused"], late.answers)
    assert bytes(taken(after)[0].frames[0]) == b"for the later one"
    assert bytes(taken(before)[0].frames[0]) == b"refused"
    assert early.answers == late.answers


def test_what_is_sent_to_nobody_is_lost_and_says_so(place):
    server, worker = place.links(role="server"), place.links()
    assert not server.send(0, [b"x"])
    assert not worker.send(SERVER_0 + 1, [b"x"])
    worker.connect(0, server.address)
    worker.forget(SERVER_0)
    assert not worker.send(SERVER_0, [b"x"])


@pytest.mark.parametrize("place", ["zmq"], indirect=True)
def test_something_else_than_a_message_is_dropped(place):
    server, worker = place.links(role="server"), place.links()
    worker.connect(0, server.address)
    dealer = worker.sockets()[0]
    whole = b"".join(pack_frames([b"head", b"x"]).pieces)
    lent = b"".join(
        pack_frames(
            [b"head", b"x" * 8], [(1, SharedMemoryReference(SegmentId(0, 0, 1), 4096, 8))]
        ).pieces
    )
    for parts in ([b""], [whole[:-8]], [whole, b"x"], [lent]):
        dealer.send_multipart(parts)
    worker.send(SERVER_0, [b"whole"])
    assert bytes(taken(server)[0].frames[0]) == b"whole"
    assert server.refused == 4


def test_who_is_no_member_cannot_make_a_server_take_much_memory(place):
    """A stream of our own: the first message introduces who has come, and is short."""
    server = place.links(role="server")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"{server.address.removeprefix('ipc://')}p")
        stranger.sendall((1 << 33).to_bytes(8, "little") + bytes(64))
        until = time.monotonic() + 10
        while not server.refused:
            assert time.monotonic() < until
            for one in server.watching.wait(0.05):
                assert server.receive(one) is None
        assert stranger.recv(1) == b""


# Pipes.


@pytest.fixture
def pipes(runtime_folder):
    door = UnixListener(f"{runtime_folder}/door")
    near = Pipe.open(f"{runtime_folder}/door", pack_frames([b"hello"]))
    far = door.accept()
    yield near, far
    for one in (near, far, door):
        one.close()


def piped(near, far, limit_s=60.0):
    """Return the parts of all messages that come out of a pipe until everything is through."""
    found, until = [], time.monotonic() + limit_s
    while near.is_behind or not found:
        assert time.monotonic() < until, found
        near.flush()
        while (message := far.receive()) is not None:
            found.append(unpack_frames(message)[0])
    return found


def test_what_a_pipe_does_not_take_at_once_follows(pipes):
    near, far = pipes
    long = np.arange(4 * MIB, dtype=np.uint8)
    assert near.send(pack_frames([b"head", long, b"tail"]))
    assert near.is_behind
    assert near.send(pack_frames([b"next"]))
    hello, message, after = piped(near, far)
    assert (bytes(hello[0]), bytes(after[0])) == (b"hello", b"next")
    assert np.array_equal(np.frombuffer(message[1], np.uint8), long)
    assert (bytes(message[0]), bytes(message[2])) == (b"head", b"tail")
    assert message[1].readonly


def test_short_messages_that_come_together_are_read_one_by_one(pipes):
    near, far = pipes
    for count in range(500):
        assert near.send(pack_frames([b"%d" % count, b"x" * count]))
    assert [bytes(one[0]) for one in piped(near, far)] == [
        b"hello",
        *(b"%d" % count for count in range(500)),
    ]


def test_a_pipe_says_that_it_has_more_as_long_as_it_has_messages_in_hand(pipes):
    near, far = pipes
    for count in range(3):
        near.send(pack_frames([b"%d" % count]))
    left = []
    while far.receive() is not None:
        left.append(far.has_more)
    assert left == [True, True, True, False]  # the first one was the introduction
    near.send(pack_frames([b"x" * MIB]))
    until = time.monotonic() + 10
    while far.receive() is None:
        assert time.monotonic() < until
        near.flush()
    assert far.has_more  # more may have come behind a long one


@pytest.mark.parametrize("cut", [1, 7, 8, 30, 71])
def test_a_message_that_comes_in_parts_is_read_when_it_is_whole(pipes, cut):
    near, far = pipes
    piped(near, far)
    whole = b"".join(pack_frames([b"head", b"array"]).pieces)
    for _ in range(2):
        near._socket.send(whole[:cut])
        assert far.receive() is None
        near._socket.send(whole[cut:])
        (message,) = piped(near, far)
        assert [bytes(one) for one in message] == [b"head", b"array"]


@pytest.mark.parametrize("place", ["auto"], indirect=True)
def test_who_has_closed_a_pipe_is_not_sent_to_and_can_be_reached_again(place):
    server, worker = place.links(role="server"), place.links()
    worker.connect(0, server.address)
    worker.send(SERVER_0, [b"first"])
    taken(server)
    (pipe,) = [one for one in server.sockets() if isinstance(one, Pipe)]
    pipe._socket.send(b"\x01" + bytes(7))  # too short for a message: the worker closes the pipe
    until = time.monotonic() + 10
    while not worker.refused:
        assert time.monotonic() < until
        assert [worker.receive(one) for one in worker.watching.wait(0.05)] in ([], [None])
    while pipe in server.sockets():
        assert time.monotonic() < until
        for one in server.watching.wait(0.05):
            server.receive(one)
    assert not server.send(0, [b"lost"])
    assert worker.send(SERVER_0, [b"again"])
    assert bytes(taken(server)[0].frames[0]) == b"again"


# Lending.


@pytest.fixture
def segments():
    made, _ = create(64 * MIB, 2, 2, 0)
    both = [SharedSegment.attach(os.dup(made.fd), place) for place in range(2)]
    made.close()
    yield both
    for one in both:
        one.close()


@pytest.fixture
def lenders(segments):
    both = [ShmBufferPool(shm) for shm in segments]
    yield both
    for one in both:
        one.close()


def lent(lender, array, number=0):
    ((index, reference),) = lender.lend(number, [b"head", array])
    assert index == 1
    return reference


def test_what_is_lent_is_read_where_it_lies_and_cannot_be_written(lenders):
    server, worker = lenders
    array = np.arange(MIB, dtype=np.float32)
    seen = np.frombuffer(worker.borrow(lent(server, array)), np.float32)
    array[:] = 0
    assert np.array_equal(seen, np.arange(MIB, dtype=np.float32))
    assert not seen.flags.writeable


def test_a_block_is_used_again_when_the_last_view_of_it_is_gone_and_not_before(lenders):
    server, worker = lenders
    array = np.ones(LEND_NBYTES_MIN, np.uint8)
    first = lent(server, array)
    view = np.frombuffer(worker.borrow(first), np.uint8)[10:20]
    second = lent(server, array * 2)
    assert second != first
    assert view.tolist() == [1] * 10
    del view
    gc.collect()
    third = lent(server, array * 3)
    assert third == first


def test_what_a_process_that_has_ended_had_borrowed_comes_back(lenders):
    server, _ = lenders
    array = np.ones(LEND_NBYTES_MIN, np.uint8)
    first = lent(server, array)
    server.forget(0, 0)
    assert lent(server, array) == first


def test_what_a_later_incarnation_has_borrowed_stays_when_the_earlier_one_is_reported_late(lenders):
    server, _ = lenders
    array = np.ones(LEND_NBYTES_MIN, np.uint8)
    ((_, first),) = server.lend(0, [b"head", array], 1)
    server.forget(0, 0)
    second = lent(server, array)
    assert second != first
    server.forget(0, 1)
    assert {lent(server, array), lent(server, array)} == {first, second}


def test_an_array_that_was_made_to_be_lent_is_lent_where_it_is_to_eight_readers(lenders):
    server, worker = lenders
    made = server.allocate((512, 100), np.dtype(np.float32))
    made[...] = np.arange(51_200).reshape(512, 100)
    place = server._shm.locate(made)
    buffer = memoryview(made.reshape(-1).view(np.uint8))
    words = [server.lend(0, [b"head", buffer])[0][1].offset for _ in range(9)]
    assert [word // 64 * 64 + 64 == place for word in words] == [True] * 8 + [False]
    assert len(set(words)) == 9
    for word in words:
        assert np.array_equal(
            np.frombuffer(worker.borrow(server._shm.refer(word, made.nbytes)), np.float32).reshape(
                512, 100
            ),
            made,
        )
    assert server.lend(0, [b"head", buffer])[0][1].offset in words[:8]  # it has been given back
    assert server._shm.locate(server.allocate((4,), np.dtype(np.float32))) is None


def test_a_block_whose_array_is_in_use_is_not_used_for_another_one(lenders):
    server, worker = lenders
    made = server.allocate((LEND_NBYTES_MIN,), np.dtype(np.uint8))
    made[...] = 7
    first = lent(server, memoryview(made))
    worker.borrow(first).release()
    other = lent(server, np.zeros(LEND_NBYTES_MIN, np.uint8))
    assert other.offset // 64 != first.offset // 64
    assert (made == 7).all()


def test_short_arrays_are_not_lent(lenders):
    server, _ = lenders
    long, short = np.ones(LEND_NBYTES_MIN, np.uint8), np.ones(LEND_NBYTES_MIN - 1, np.uint8)
    assert server.lend(0, [b"head", short]) == []
    assert server.lend(0, [long, short]) == []  # the first part is no array
    assert ShmBufferPool(server._shm, lends=False).lend(0, [b"head", long]) == []


def test_arrays_are_lent_to_who_has_said_that_it_sees_them(place, lenders):
    server, worker, blind = (
        place.links(lenders[0], role="server"),
        place.links(lenders[1]),
        place.links(rank=1),
    )
    array = np.arange(MIB, dtype=np.uint8)
    for one, seen in ((worker, [0, 1]), (blind, [0, 0])):
        one.connect(0, server.address)
        for count in seen:
            before = lenders[0].lent, lenders[1].lent
            one.send(SERVER_0, [b"head", array])
            (came,) = taken(server, one)
            assert np.array_equal(np.frombuffer(came.frames[1], np.uint8), array)
            assert (
                lenders[1].lent - before[1] == count
            )  # the first time it does not know whether the server sees it
            server.send(came.number, [b"head", array], came.answers)
            (answer,) = taken(one, server)
            assert np.array_equal(np.frombuffer(answer.frames[1], np.uint8), array)
            assert lenders[0].lent - before[0] == (one is worker)
            del came, answer


def test_what_has_no_room_is_left_to_be_sent(lenders):
    server, _ = lenders
    array = np.ones(9 * MIB, np.uint8)
    found = server.lend(0, [b"head", *[array] * 8])
    assert 0 < len(found) < 8
    assert [index for index, _ in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-64, 1), (4, 1), (0, 64 * MIB), (64 * MIB, 0), (0, -1)]
)
def test_what_lies_outside_is_not_borrowed(lenders, offset, nbytes):
    with pytest.raises(
        InternalError, match=r"another process (refers to|lends) -?\d+ bytes at -?\d+"
    ):
        lenders[1].borrow(lenders[1]._shm.refer(offset, nbytes))


@pytest.fixture
def other_host():
    """A lender in the memory of another host, with the same places in it."""
    made, _ = create(64 * MIB, 2, 2, 0, host=1)
    one = ShmBufferPool(SharedSegment.attach(made.fd, 0))
    yield one
    one.close()


def test_nothing_is_lent_between_two_hosts_that_both_share_memory(place, lenders, other_host):
    server, worker = place.links(other_host, role="server"), place.links(lenders[1])
    worker.connect(0, server.address)
    array = np.arange(MIB, dtype=np.uint8)
    for _ in range(2):
        worker.send(SERVER_0, [b"head", array])
        (came,) = taken(server, worker)
        server.send(came.number, [b"head", array], came.answers)
        (answer,) = taken(worker, server)
        assert all(
            np.array_equal(np.frombuffer(one.frames[1], np.uint8), array) for one in (came, answer)
        )
    assert other_host.lent == lenders[1].lent == 0


def test_a_reference_to_memory_of_another_host_is_refused_wherever_it_comes_from(
    place, lenders, other_host
):
    server, worker = place.links(lenders[0], role="server"), place.links(other_host)
    worker.connect(0, server.address)
    worker._mapped[SERVER_0] = (
        other_host.segment
    )  # a bug: it lends to who has not mapped its memory
    worker.send(SERVER_0, [b"head", np.ones(MIB, np.uint8)])
    with pytest.raises(
        InternalError,
        match=r"in segment \w+ \(host 1, generation 0\), and this process has mapped segment \w+ \(host 0",
    ):
        taken(server, worker)
