"""Why a connection has ended, as the system tells it by a copy of the descriptor."""

import contextlib
import socket
import struct
import time

import pytest

from syncvar.core.settings import RuntimeConfig
from syncvar.transports.zeromq_sockets import CLOSED, ConnectionCopy, unanswered

CONFIG = RuntimeConfig(heartbeat_interval_s=0.01, suspect_after_s=0.2, lost_after_s=0.2)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    yield near, far
    near.close()
    far.close()


def await_end(near):
    """Return when the other end's close has come."""
    near.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert near.recv(1) == b""


@pytest.mark.parametrize("lasted_s", [0.0, 0.4])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_the_other_process_closes_is_not_silent(pair, lasted_s, is_reset):
    near, far = pair
    copy = ConnectionCopy(near.fileno())
    if is_reset:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    await_end(near)
    time.sleep(lasted_s)  # nobody has looked meanwhile
    near.close()
    assert copy.reason(CONFIG) == CLOSED


def test_a_connection_on_which_nothing_comes_is_silent_for_as_long_as_it_says(pair):
    near, far = pair
    copy = ConnectionCopy(near.fileno())
    began = time.monotonic()
    far.sendall(b"x")
    assert near.recv(1) == b"x"
    time.sleep(0.4)
    near.close()
    words = copy.reason(CONFIG).split(" ")
    assert words[:2] == ["silent", "for"], words
    assert 0.3 <= float(words[2]) <= time.monotonic() - began + 0.2


def test_a_connection_that_is_ended_here_is_neither(pair):
    near, far = pair
    copy = ConnectionCopy(near.fileno())
    far.sendall(b"x")
    assert near.recv(1) == b"x"
    near.close()
    assert copy.reason(RuntimeConfig()).startswith("this rank closed the connection: ")


def test_the_other_end_sees_the_end_when_the_copy_is_closed_too(pair):
    near, far = pair
    copy = ConnectionCopy(near.fileno())
    near.close()
    copy.close()
    copy.close()
    await_end(far)
    assert copy.reason(CONFIG) == CLOSED


def test_only_tcp_connections_are_copied():
    near, far = socket.socketpair()
    with near, far:
        copy = ConnectionCopy(near.fileno())
        near.close()
        assert far.recv(1) == b""
        assert copy.reason(CONFIG) == CLOSED
    assert ConnectionCopy(1 << 20).reason(CONFIG) == CLOSED


def test_a_new_connection_without_an_answer_says_how_long():
    assert unanswered(3.44) == "silent for 3.4 s: it did not answer a new connection"
