"""The launcher's end of the control channels: strangers and nonsense are refused and have no say."""

import contextlib
import shutil
import tempfile
import time

import pytest
import zmq

from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.frame import CONTROL_NBYTES_MAX, FRAMING_NBYTES, PROTOCOL_VERSION
from syncvar.transports.zeromq_links import control_identity


@pytest.fixture
def endpoint():
    directory = tempfile.mkdtemp(prefix="sv")
    yield f"ipc://{directory}/store"
    shutil.rmtree(directory)


@pytest.fixture
def store(endpoint):
    made = RendezvousServer(endpoint, 2, "job", RuntimeConfig(observe_interval_s=0))
    yield made
    made.close()


class Peer:
    def __init__(self, context, endpoint, rank, identity=None):
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, identity or control_identity(rank))
        self.socket.connect(endpoint)
        self.rank = rank
        self.kinds = []

    def join(self, job="job", rank=None, generation=0):
        about = {"protocol": PROTOCOL_VERSION, "byte_order": "little"}
        rank = self.rank if rank is None else rank
        self.socket.send(
            pack_message(
                "join",
                rank=rank,
                job=job,
                generation=generation,
                address="a",
                pid=1,
                host="h",
                about=about,
            )
        )

    def heard(self):
        """Return the kinds of all messages that have come so far."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.kinds.append(parse_message(self.socket.recv(zmq.NOBLOCK))["kind"])
        return self.kinds


@pytest.fixture
def connect(endpoint, store):
    context = zmq.Context()
    peers = []

    def make(rank, identity=None):
        peers.append(Peer(context, endpoint, rank, identity))
        return peers[-1]

    yield make
    for peer in peers:
        peer.socket.close(0)
    context.term()


def serve(store, until, limit_s=60.0):
    """Serve until a condition is true."""
    deadline = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline, "the condition did not come true"
        store.serve(time.monotonic())
        time.sleep(0.005)


def serve_a_while(store):
    """Serve where nothing is expected to happen."""
    until = time.monotonic() + 0.1
    serve(store, lambda: time.monotonic() > until)


BROKE = pack_message(
    "group_failure", failure_kind="lost", reason="r", group=-1, call=-1, missing=[0]
)


def test_ranks_that_join_get_the_roll(store, connect):
    peers = [connect(rank) for rank in range(2)]
    for peer in peers:
        peer.join()
    serve(store, lambda: all(peer.heard() for peer in peers))
    assert [peer.heard() for peer in peers] == [["members"], ["members"]]
    assert store.refused_messages == 0


def test_a_refused_stranger_is_answered_and_has_no_say(store, connect):
    stranger = connect(1)
    stranger.join(job="another")
    serve(store, stranger.heard)
    assert stranger.heard() == ["refused"]
    stranger.socket.send(BROKE)
    serve(store, lambda: store.refused_messages)
    assert store.refused_messages == 1
    assert store.coordinator.broken_by is None
    peers = [connect(rank) for rank in range(2)]
    for peer in peers:
        peer.join()
    serve(store, lambda: all(peer.heard() for peer in peers))
    stranger.join()
    stranger.socket.send(BROKE)
    serve(store, lambda: len(stranger.heard()) == 2)
    serve_a_while(store)
    assert stranger.heard() == ["refused", "refused"]
    assert [peer.heard() for peer in peers] == [["members"], ["members"]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        b"\xdd\xff\xff\xff\xff",
        pack_message("members"),
        BROKE[:-1],
        b"\x91" * 5000,
    ],
)
def test_nonsense_is_counted_said_and_changes_nothing(store, connect, data):
    peers = [connect(rank) for rank in range(2)]
    for peer in peers:
        peer.join()
    serve(store, lambda: all(peer.heard() for peer in peers))
    peers[0].socket.send(data)
    peers[1].socket.send_multipart([BROKE, BROKE])
    serve(store, lambda: store.refused_messages == 2)
    assert any("refused" in text for text in store.take_messages())
    serve_a_while(store)
    assert [peer.heard() for peer in peers] == [["members"], ["members"]]


@pytest.mark.parametrize("identity", [b"x", b"C" + bytes(20), b"D" + bytes(12)])
def test_a_peer_without_a_control_identity_is_refused(store, connect, identity):
    peer = connect(0, identity)
    peer.join()
    serve(store, lambda: store.refused_messages)
    assert store.refused_messages == 1
    assert store.coordinator.handshake.members == {}


def test_a_rank_that_claims_to_be_another_is_refused(store, connect):
    peer = connect(0)
    peer.join(rank=1)
    serve(store, lambda: store.refused_messages)
    assert store.refused_messages == 1
    assert store.coordinator.handshake.members == {}


def test_a_message_that_is_too_long_closes_only_its_own_connection(store, connect):
    peers = [connect(rank) for rank in range(2)]
    peers[0].join()
    serve(store, lambda: store.coordinator.handshake.members)
    connect(1).socket.send(bytes(CONTROL_NBYTES_MAX + FRAMING_NBYTES + 1))
    serve_a_while(store)
    peers[1].join()
    serve(store, lambda: all(peer.heard() for peer in peers))
    assert [peer.heard() for peer in peers] == [["members"], ["members"]]
