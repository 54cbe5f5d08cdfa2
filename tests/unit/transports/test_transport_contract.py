"""Every transport fulfils the one contract, and the real one refuses what is not its own."""

import contextlib
import functools
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
import zmq

import syncvar.transports.zeromq_transport as zeromq_module
from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.frame import FrameType, Header
from syncvar.testing import TRANSPORT_CHECKS, TransportFactory
from syncvar.transports.base import PeerDisconnected
from syncvar.transports.curve import link_keys
from syncvar.transports.lane_transport import LaneTransport
from syncvar.transports.zeromq_sockets import job_nonce
from syncvar.transports.zeromq_transport import ZeromqTransport
from tests.support.harness import start_the_collector_of_pyzmq
from tests.support.host_worlds import world_of_hosts

start_the_collector_of_pyzmq()

CONFIG = RuntimeConfig(
    heartbeat_interval_s=0.2, suspect_after_s=1.0, lost_after_s=3.0, handshake_timeout_s=5.0
)


@contextlib.contextmanager
def zeromq(endpoint, world_size, generation, config=CONFIG, job="job"):
    """A world whose ranks share one process but no ZeroMQ context, like processes."""
    contexts = [zmq.Context() for _ in range(world_size)]
    world = []
    try:
        for rank, context in enumerate(contexts):
            world.append(ZeromqTransport(context, rank, endpoint, job, config))
        for transport in world:
            transport.open({rank: one.address for rank, one in enumerate(world)}, generation)
        yield world
    finally:
        for transport in world:
            transport.close(0)
        for context in contexts:
            context.term()


@contextlib.contextmanager
def ipc(world_size, generation, **more):
    directory = tempfile.mkdtemp(prefix="sv")
    try:
        with zeromq(f"ipc://{directory}", world_size, generation, **more) as world:
            yield world
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def tcp(world_size, generation, **more):
    with zeromq("tcp://127.0.0.1", world_size, generation, **more) as world:
        yield world


def far(world_size, generation, config=CONFIG, wrap=None):
    """A world whose ranks are on hosts of their own: encrypted tcp, unless the settings differ."""
    keys = [link_keys(bytes(range(32)))] * world_size
    own = wrap and functools.partial(wrap, config=config)
    return world_of_hosts(config, keys, own, generation)


@contextlib.contextmanager
def lanes(world_size, generation, config=CONFIG):
    """A world whose ranks are on hosts of their own, with lanes for data that are not encrypted."""
    config = config.replaced(encryption="control-only")
    with far(world_size, generation, config, wrap=LaneTransport) as world:
        yield world


@contextlib.contextmanager
def tls_lanes(world_size, generation, config=CONFIG):
    """A world whose ranks are on hosts of their own, with lanes that TLS encrypts."""
    wrap = functools.partial(LaneTransport, key=link_keys(bytes(range(32))).lanes)
    with far(world_size, generation, config, wrap=wrap) as world:
        yield world


# The transport in memory is checked by the example of `check_transport`.
FACTORIES = {
    name: TransportFactory(connect)
    for name, connect in (
        ("ipc", ipc),
        ("tcp", tcp),
        ("far", far),
        ("lanes", lanes),
        ("tls", tls_lanes),
    )
}


# A rank on lanes closes slowly here, because one thread drives all ranks and the others do not read.
CHECKED = [
    pytest.param(
        transport,
        check,
        marks=[pytest.mark.slow]
        if transport == "tls" or (transport == "lanes" and "orderly_close" in check)
        else [],
    )
    for transport in FACTORIES
    for check in TRANSPORT_CHECKS
]


@pytest.mark.parametrize(("transport", "check"), CHECKED)
def test_the_transport_fulfils_its_contract(transport, check):
    TRANSPORT_CHECKS[check](FACTORIES[transport])


# -- what the real transport refuses ---------------------------------------------------------------

GENERATION = 3
JOB = "job"


class Outsider:
    """A raw socket that speaks ZMTP to a rank, with an identity and frames of its own making."""

    def __init__(self, address, job=JOB, generation=GENERATION, rank=1, kind=b"s", identity=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        incarnation = b"12345678"
        made = zeromq_module._IDENTITY.pack(kind, job_nonce(job), generation, rank, incarnation)
        self.socket.setsockopt(zmq.ROUTING_ID, made if identity is None else identity)
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(0)
        self.context.term()

    def send(self, *parts):
        self.socket.send_multipart(list(parts))


def frame(payload=b"", **fields):
    numbers = {"source": 1, "generation": GENERATION, "group": 0, "nbytes": len(payload)} | fields
    return Header(FrameType.DATA, **numbers).pack(), payload


def drive(transport, seconds=60.0, until=lambda seen: False):
    """Take what arrives until a condition holds or the time is over."""
    seen = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until(seen):
        arrival = transport.receive()
        if arrival is not None:
            seen.append(arrival)
        else:
            transport.wait(0.02)
    return seen


def check_rank_2_is_heard(world):
    world[2].send(
        0, Header(FrameType.DATA, 2, GENERATION, 0, 77, nbytes=3).pack(), memoryview(b"abc")
    )
    seen = []
    deadline = time.monotonic() + 60.0
    while not seen and time.monotonic() < deadline:
        drive(
            world[2], 0.01
        )  # what could not be sent while the link opened goes when its sender drives
        seen = drive(world[0], 0.01, until=bool)
    assert [(one.header.source, bytes(one.payload)) for one in seen] == [(2, b"abc")]


@pytest.fixture(params=["ipc", "tcp"])
def world(request):
    with {"ipc": ipc, "tcp": tcp}[request.param](3, GENERATION) as made:
        yield made


@pytest.mark.parametrize(
    "claim",
    [
        {"job": "another job"},
        {"generation": GENERATION + 1},
        {"generation": GENERATION - 1},
        {"rank": 3},
        {"rank": 1 << 31},
        {"kind": b"x"},
        {"identity": b"me"},
        {"identity": b"s" * 200},
    ],
)
def test_a_stranger_is_refused_and_counted_and_disturbs_nobody(world, claim):
    with Outsider(world[0].address, **claim) as stranger:
        for _ in range(3):
            stranger.send(*frame(b"payload"))
        drive(world[0], until=lambda seen: seen or world[0].refused_frames == 3)
        assert world[0].refused_frames == 3
        check_rank_2_is_heard(world)
    assert drive(world[0], 0.1) == []


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (frame(b"abc", source=2), "claims rank 2"),
        (frame(b"abc", generation=GENERATION + 1), "claims rank 1, generation 4"),
        (frame(b"abc", nbytes=4), "announces 4 bytes and has 3"),
        (frame(b"", nbytes=4), "announces 4 bytes and has 0"),
        (frame(b"x" * 5000, nbytes=4999), "announces 4999 bytes and has 5000"),
        (frame(b"", nbytes=CONFIG.segment_bytes + 1), "exceeds the limit"),
        (frame(b"", nbytes=(1 << 64) - 1), "exceeds the limit"),
        ((b"", b""), "a header has"),
        ((b"\0" * 60, b""), "not a frame of syncvar"),
        ((b"sv", b"x" * 100), "a header has"),
    ],
)
def test_a_frame_that_is_not_what_it_claims_ends_its_link_and_is_not_delivered(
    world, parts, reason
):
    with Outsider(world[0].address) as peer:
        peer.send(*frame(b"good"))
        peer.send(*parts)
        peer.send(*frame(b"after"))
        first, lost = drive(world[0], until=lambda seen: len(seen) == 2)
        assert bytes(first.payload) == b"good"
        assert isinstance(lost, PeerDisconnected)
        assert lost.peer == 1
        assert reason in lost.reason
        check_rank_2_is_heard(world)
    assert drive(world[0], 0.1) == []


def test_a_header_with_any_bit_flipped_is_never_delivered():
    header, payload = frame(b"payload", call=5, group=9, fingerprint=1234567)
    for bit in range(0, len(header) * 8, 7):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with ipc(2, GENERATION) as world, Outsider(world[0].address) as peer:
            peer.send(bytes(flipped), payload)
            (lost,) = drive(world[0], until=bool)
            assert isinstance(lost, PeerDisconnected), f"bit {bit} was not noticed"


def test_a_message_of_too_many_parts_is_refused_and_counted(world):
    with Outsider(world[0].address) as peer:
        peer.send(*frame(b"good"), b"more", b"and more")
        peer.send(*frame(b"good"))
        (one,) = drive(world[0], until=bool)
        assert bytes(one.payload) == b"good"
        assert world[0].refused_frames == 1


def test_a_message_larger_than_a_frame_may_be_closes_the_connection(world):
    with Outsider(world[0].address) as peer:
        peer.send(*frame(b"good"))
        assert len(drive(world[0], until=bool)) == 1
        header, _ = frame(b"", nbytes=CONFIG.segment_bytes)
        peer.send(header, bytes(CONFIG.segment_bytes + 8192))
        (lost,) = drive(world[0], until=bool)
        assert isinstance(lost, PeerDisconnected)
        check_rank_2_is_heard(world)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03" + b"\xff" * 100,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL"
        + bytes(16)
        + b"\0"
        + bytes(31)
        + b"\x06"
        + b"\xff" * 8,
        b"",
    ],
    ids=["http", "tls", "greeting", "size", "nothing"],
)
def test_bytes_of_another_protocol_on_a_tcp_port_are_ignored(garbage):
    with tcp(3, GENERATION) as world:
        host, _, port = world[0].address.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(garbage)
            check_rank_2_is_heard(world)
        assert drive(world[0], 0.2) == []
        check_rank_2_is_heard(world)


def test_random_bytes_on_a_tcp_port_are_ignored():
    draw = random.Random(1)
    with tcp(3, GENERATION) as world:
        host, _, port = world[0].address.removeprefix("tcp://").partition(":")
        for _ in range(60):
            with (
                socket.create_connection((host, int(port))) as connection,
                contextlib.suppress(OSError),
            ):
                start = draw.choice(
                    [
                        b"",
                        b"\xff\0\0\0\0\0\0\0\x01\x7f",
                        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48),
                    ]
                )
                connection.sendall(start + draw.randbytes(draw.randint(0, 300)))
        check_rank_2_is_heard(world)
        assert drive(world[0], 0.2) == []


PEER = """
import sys, time, zmq
from syncvar.core.settings import RuntimeConfig
from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport
from syncvar.protocol.frame import FrameType, Header
transport = ZeromqTransport(zmq.Context(), 1, sys.argv[1], "job", RuntimeConfig())
print(transport.address, flush=True)
transport.open({0: sys.stdin.readline().strip(), 1: transport.address}, 3)
for number in range(50):
    transport.send(0, Header(FrameType.DATA, 1, 3, 0, number, nbytes=1000).pack(), memoryview(bytes(1000)))
while True:
    transport.receive()
    transport.wait(0.05)
"""


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_killed_peer_is_lost_within_a_second_and_after_its_frames(scheme):
    directory = tempfile.mkdtemp(prefix="sv")
    endpoint = f"ipc://{directory}" if scheme == "ipc" else "tcp://127.0.0.1"
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with zmq.Context() as context:
        transport = ZeromqTransport(context, 0, endpoint, JOB, CONFIG)
        try:
            transport.open({0: transport.address, 1: peer.stdout.readline().strip()}, GENERATION)
            transport.send(1, Header(FrameType.DATA, 0, GENERATION, 0, 0).pack())
            peer.stdin.write(transport.address + "\n")
            peer.stdin.flush()
            assert len(drive(transport, 60.0, until=lambda seen: len(seen) == 50)) == 50
            peer.send_signal(signal.SIGKILL)
            (lost,) = drive(transport, 60.0, until=bool)
            assert isinstance(lost, PeerDisconnected)
        finally:
            transport.close(0)
            peer.kill()
            peer.communicate()
            shutil.rmtree(directory)


def test_a_peer_that_is_not_there_is_lost_after_the_handshake_timeout():
    config = RuntimeConfig(handshake_timeout_s=0.3, lost_after_s=0.1, heartbeat_interval_s=0.05)
    with tcp(2, GENERATION, config=config) as world:
        world[0].open({1: "tcp://127.0.0.1:1"}, GENERATION)
        world[0].send(1, *frame(b"abc", source=0)[:1])
        (lost,) = drive(world[0], until=bool)
        assert isinstance(lost, PeerDisconnected)
        assert lost.peer == 1


def test_a_socket_path_that_is_too_long_is_refused_with_a_remedy():
    with zmq.Context() as context, pytest.raises(ConfigError, match="shorter directory"):
        ZeromqTransport(context, 0, "ipc:///tmp/" + "x" * 120, JOB, CONFIG)


def test_frames_of_a_peer_whose_goodbye_came_first_on_the_other_connection_are_delivered(world):
    """A pair of ranks has two connections: that one has ended in order says nothing of frames still on the other."""
    world[0].send(1, Header(FrameType.DATA, 0, GENERATION, 0, 0).pack())
    for number in range(3):
        world[1].send(0, Header(FrameType.DATA, 1, GENERATION, 0, number).pack())
    deadline = time.monotonic() + 60.0
    while world[1]._unsent and time.monotonic() < deadline:
        drive(world[1], 0.05)
    world[0]._departed.add(1)
    world[0]._disconnected(1)  # before the first frame has been looked at
    assert [one.header.call for one in drive(world[0], until=lambda seen: len(seen) == 3)] == [
        0,
        1,
        2,
    ]


def test_a_peer_is_lost_whose_frames_broke_off_after_its_goodbye_on_the_other_connection(world):
    """A goodbye overtakes long frames on the other connection: it does not say that these have arrived."""
    world[0].send(1, Header(FrameType.DATA, 0, GENERATION, 0, 0).pack())
    world[1].send(0, Header(FrameType.DATA, 1, GENERATION, 0, 7).pack())
    deadline = time.monotonic() + 60.0
    while world[1]._unsent and time.monotonic() < deadline:
        drive(world[1], 0.05)
    assert drive(world[0], 60.0, until=bool)
    world[0]._departed.add(1)
    world[1]._links.pop(0).close(0)  # the connection that carries its frames
    (lost,) = drive(world[0], 60.0, until=bool)
    assert isinstance(lost, PeerDisconnected)
    assert lost.peer == 1


@pytest.mark.slow
def test_a_stopped_peer_is_lost_over_tcp_and_is_the_agents_business_within_a_host():
    config = RuntimeConfig(heartbeat_interval_s=0.1, suspect_after_s=0.5, lost_after_s=4.0)
    script = PEER.replace(
        "RuntimeConfig()", "RuntimeConfig(heartbeat_interval_s=0.1, lost_after_s=4.0)"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", script, "tcp://127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with zmq.Context() as context:
        transport = ZeromqTransport(context, 0, "tcp://127.0.0.1", JOB, config)
        try:
            # This rank sends nothing: its ROUTER alone must see the silence.
            transport.open({0: transport.address, 1: peer.stdout.readline().strip()}, GENERATION)
            peer.stdin.write(transport.address + "\n")
            peer.stdin.flush()
            assert len(drive(transport, 60.0, until=lambda seen: len(seen) == 50)) == 50
            assert drive(transport, 5.0) == []  # alive, and silent but for its signs of life
            peer.send_signal(signal.SIGSTOP)
            (lost,) = drive(transport, 60.0, until=bool)
            assert isinstance(lost, PeerDisconnected)
        finally:
            transport.close(0)
            peer.kill()
            peer.communicate()


def test_a_wait_before_the_peers_are_known_waits():
    # While the ranks meet nobody takes frames; a wait that they end would use a core that others need to come.
    directory = tempfile.mkdtemp(prefix="sv")
    contexts = [zmq.Context() for _ in range(2)]
    try:
        early, late = (
            ZeromqTransport(one, rank, f"ipc://{directory}", "job", CONFIG)
            for rank, one in enumerate(contexts)
        )
        addresses = {0: early.address, 1: late.address}
        early.open(addresses, 1)
        early.send(1, Header(FrameType.DATA, 0, 1, 0, 7).pack())
        for _ in range(4):  # it leaves once the link is there
            assert early.receive() is None
            early.wait(0.05)
        began = time.monotonic()
        for wait in (late.wait, late.wait_idle, late.wait):
            wait(0.1)
        assert time.monotonic() - began >= 0.29
        late.open(addresses, 1)
        deadline = time.monotonic() + 60.0
        while (arrival := late.receive()) is None and time.monotonic() < deadline:
            late.wait(0.1)
        assert arrival is not None
        assert arrival.header.call == 7
    finally:
        for transport in (early, late):
            transport.close(0)
        for context in contexts:
            context.term()
        shutil.rmtree(directory)


ENDS = """
import sys, tempfile, threading, shutil, zmq
from syncvar.core.settings import RuntimeConfig
from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport
from syncvar.protocol.frame import FrameType, Header
config = RuntimeConfig(heartbeat_interval_s=0.01)
n = 4
for number in range(int(sys.argv[1])):
    directory = tempfile.mkdtemp(prefix="sv")
    contexts = [zmq.Context() for _ in range(n)]
    world = [ZeromqTransport(context, rank, "ipc://" + directory, "job", config) for rank, context in enumerate(contexts)]
    for one in world:
        one.open({rank: other.address for rank, other in enumerate(world)}, 1)
    seen = [0] * n
    def end(rank):
        for call in range(20):
            for peer in range(n):
                if peer != rank:
                    world[rank].send(peer, Header(FrameType.DATA, rank, 1, 0, call).pack())
        while seen[rank] < 20 * (n - 1):
            arrival = world[rank].receive()
            if arrival is None:
                world[rank].wait(0.01)
            else:
                assert hasattr(arrival, "payload"), arrival
                seen[rank] += 1
        world[rank].close(2.0)
        contexts[rank].term()
    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [60] * n, seen
    shutil.rmtree(directory)
print("all ended")
"""


@pytest.mark.timeout(660)
@pytest.mark.parametrize("worlds", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_worlds_whose_ranks_all_end_at_once_lose_nothing_and_nobody_is_aborted(worlds):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(worlds)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "all ended\n", "")
