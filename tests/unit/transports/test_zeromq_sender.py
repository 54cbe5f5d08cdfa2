"""Whether what was sent has reached the other host is seen by looking, while signs of life go on."""

import socket
import time

import pytest

from syncvar.transports.zeromq_links import Delivery
from syncvar.transports.zeromq_sockets import ConnectionCopy, Sent

PING_NBYTES = 50


class Link:
    """A link on which ZeroMQ has written so much; a look sees what a test sets."""

    def __init__(self):
        self.outbox = []
        self.written = self.acknowledged = 0
        self.is_full = False

    def sent(self):
        held = self.written - self.acknowledged
        return Sent(self.acknowledged, held, is_steady=not self.is_full)


def looked(link, times=1):
    """Return a delivery that has looked so often at a link that did not change meanwhile."""
    one = Delivery(link)
    for _ in range(times):
        one.look()
    return one


def test_signs_of_life_that_are_always_under_way_do_not_count():
    link = Link()
    link.written = 1000
    one = looked(link)
    for number in range(1, 41):  # the way takes 20 looks, and each look finds another sign of life
        link.written += PING_NBYTES
        link.acknowledged = max(0, number - 20) * PING_NBYTES
        one.look()
        assert not one.is_complete
    link.acknowledged = 1000 + PING_NBYTES
    assert one.look()
    assert one.is_complete
    assert link.sent().held


def test_what_zeromq_still_writes_counts():
    link = Link()
    one = looked(link, 2)
    assert one.is_complete, "nothing was written"
    one = looked(link)
    for _ in range(10):  # the other host takes all at once, and ZeroMQ has more
        link.written += 8192
        link.acknowledged = link.written
        assert one.look()
        assert not one.is_complete
    one.look()
    assert one.is_complete


def test_what_zeromq_cannot_write_yet_counts():
    link = Link()
    link.written, link.is_full = 100_000, True
    one = looked(link, 3)
    link.acknowledged, link.is_full = 70_000, False
    one.look()
    link.written += 8192
    one.look()
    link.acknowledged = 100_000
    one.look()
    assert not one.is_complete
    link.acknowledged = 108_192
    one.look()
    assert one.is_complete


def test_frames_that_zeromq_has_not_taken_count():
    link = Link()
    link.outbox = [1, 2]
    one = looked(link, 3)
    assert not one.is_complete
    for outbox in ([1], []):
        link.outbox = outbox
        assert one.look(), "a frame has gone"
        assert not one.is_complete
    one.look()
    assert one.is_complete


def test_signs_of_life_that_do_not_arrive_are_no_movement():
    link = Link()
    link.written = 1000
    one = looked(link)
    for _ in range(10):
        link.written += PING_NBYTES
        assert not one.look()
    link.acknowledged += 1
    assert one.look()
    assert not one.is_complete


def test_a_system_that_counts_no_acknowledgements_tells_by_what_it_holds():
    link = Link()
    link.written = 1000
    one = looked(link, 3)
    assert not one.is_complete
    link.written = 0  # held and acknowledged are 0 now, as where nothing is counted
    assert one.look()
    assert one.is_complete


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.setblocking(False)
        yield near, far


def await_sent(copy, condition):
    until = time.monotonic() + 60
    while not condition(sent := copy.sent()):
        assert time.monotonic() < until, sent
        time.sleep(0.01)
    return sent


def test_the_system_tells_what_was_acknowledged(connection):
    near, far = connection
    copy = ConnectionCopy(near.fileno())
    try:
        before = await_sent(copy, lambda sent: sent.is_steady)
        assert not before.held
        written = 0
        with pytest.raises(BlockingIOError):
            while True:
                written += near.send(bytes(1 << 16))
        full = await_sent(copy, lambda sent: sent.written == before.written + written)
        assert full.held
        assert not full.is_steady, "it takes no more"
        far.settimeout(60)
        left = written
        while left:
            left -= len(far.recv(1 << 20))
        after = await_sent(copy, lambda sent: sent.is_steady and not sent.held)
        assert after.acknowledged == before.acknowledged + written
    finally:
        copy.close()
    assert copy.sent() == Sent()
