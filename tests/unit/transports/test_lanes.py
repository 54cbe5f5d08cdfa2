"""Lanes between hosts: they carry the data where they can, strangers are refused, and a broken one is a loss."""

import contextlib
import logging
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np
import pytest
import zmq

import syncvar.transports.lane_handshake as handshake
from syncvar.bootstrap.connect import _with_lanes
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.frame import HEADER_NBYTES, FrameType, Header
from syncvar.transports import lane_tls, lanes
from syncvar.transports.base import Frame, PeerDisconnected, Place
from syncvar.transports.curve import link_keys
from syncvar.transports.lane_transport import LanePath, LaneTransport
from syncvar.transports.zeromq_sockets import CLOSED
from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport
from tests.support.harness import start_the_collector_of_pyzmq
from tests.support.host_worlds import world_of_hosts

start_the_collector_of_pyzmq()

KEYS = link_keys(bytes(range(32)))
CONFIG = RuntimeConfig(
    heartbeat_interval_s=0.2, suspect_after_s=1.0, lost_after_s=3.0, handshake_timeout_s=5.0
)
MODES = {"plain": "control-only", "tls": "required"}


def world(mode="plain", *, has_lanes=(True, True), keys=(KEYS, KEYS)):
    """Ranks on hosts of their own, with lanes where the test wants them."""
    config = CONFIG.replaced(encryption=MODES[mode])

    def wrap(links, rank):
        key = keys[rank].lanes if mode == "tls" else None
        return LaneTransport(links, rank, config, key) if has_lanes[rank] else links

    return world_of_hosts(config, [KEYS] * len(has_lanes), wrap)


def header(source, number, nbytes=0, **fields):
    return Header(FrameType.DATA, source, 0, 0, number, nbytes=nbytes, **fields).pack()


def drive(ranks, until, limit_s=60.0):
    """Drive all ranks until a condition holds for what each has received; return that."""
    seen, end = [[] for _ in ranks], time.monotonic() + limit_s
    while not until(seen):
        assert time.monotonic() < end, seen
        for one, arrivals in zip(ranks, seen, strict=True):
            while (arrival := one.receive()) is not None:
                arrivals.append(arrival)
            one.wait(0.005)
    return seen


def exchange(ranks, count=3, nbytes=5000):
    """Let ranks 0 and 1 send each other frames; return the payloads that have arrived, in order."""
    for number in range(count):
        for source in (0, 1):
            payload = memoryview(bytes([number]) * nbytes)
            ranks[source].send(1 - source, header(source, number, nbytes), payload, borrow=True)
    seen = drive(ranks, lambda seen: all(len(one) >= count for one in seen))
    for rank in (0, 1):
        assert [(one.header.source, one.header.call) for one in seen[rank]] == [
            (1 - rank, number) for number in range(count)
        ]
        assert [bytes(one.payload) for one in seen[rank]] == [
            bytes([number]) * nbytes for number in range(count)
        ]


def paths(ranks):
    return [one._peers[1 - rank].path for rank, one in enumerate(ranks)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [0, 1])
def test_data_between_hosts_travel_on_lanes(mode, first):
    with world(mode) as ranks:
        ranks[first].send(1 - first, header(first, 9))
        (frame,) = drive(ranks, lambda seen: seen[1 - first])[1 - first]
        assert (frame.header.source, frame.header.call) == (first, 9)
        exchange(ranks, 40)
        exchange(ranks, 3, 1 << 20)
        assert paths(ranks) == [LanePath.LANE] * 2
        assert [one.refused_peers for one in ranks] == [0, 0]
        if mode == "tls":
            assert ranks[0]._lanes[1].tls.version == "TLSv1.3"


@pytest.mark.parametrize("has_lanes", [(True, False), (False, True)])
def test_a_rank_without_lanes_gets_everything_on_its_link(has_lanes):
    with world(has_lanes=has_lanes) as ranks:
        exchange(ranks)
        with_lanes = has_lanes.index(True)
        assert ranks[with_lanes]._peers[1 - with_lanes].path is LanePath.LINK


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def test_data_use_the_link_where_no_lane_can_be_connected(monkeypatch, caplog):
    port = closed_port()
    listen = handshake.LaneListener.open
    monkeypatch.setattr(handshake.LaneListener, "open", lambda one: listen(one) and port)
    with world() as ranks, caplog.at_level(logging.INFO, "syncvar"):
        exchange(ranks)
        exchange(ranks)
        assert paths(ranks) == [LanePath.LINK] * 2
    (told,) = [one.getMessage() for one in caplog.records if "ZeroMQ" in one.message]
    assert f"127.0.0.1 port {port}: Connection refused" in told


def test_data_use_the_link_where_this_rank_cannot_listen(monkeypatch, caplog):
    def refuse(_):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(handshake.LaneListener, "open", refuse)
    with world() as ranks:
        exchange(ranks)
        assert paths(ranks) == [LanePath.LINK] * 2
    assert "this rank cannot listen: Address already in use" in caplog.text


@pytest.mark.parametrize("answer", [b"", b"x" * 16])
@pytest.mark.parametrize("mode", MODES)
def test_data_use_the_link_where_another_process_answers(monkeypatch, mode, answer):
    """One that says nothing is given up after a while, and one that says something else at once."""
    monkeypatch.setattr(handshake, "_CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen, port = handshake.LaneListener.open, other.getsockname()[1]
        monkeypatch.setattr(handshake.LaneListener, "open", lambda one: listen(one) and port)
        with world(mode) as ranks:
            ranks[0].send(1, header(0, 0))
            with contextlib.ExitStack() as stack:
                other.settimeout(0.01)
                accepted = []

                def answers(seen):
                    with contextlib.suppress(TimeoutError):
                        accepted.append(stack.enter_context(other.accept()[0]))
                        accepted[-1].sendall(answer)
                    return seen[1]

                drive(ranks, answers)
                exchange(ranks)
                assert len(accepted) == 1
            assert paths(ranks) == [LanePath.LINK] * 2


def test_a_rank_that_ends_before_its_lane_is_there_loses_nothing():
    for closing in (0, 1):
        with world() as ranks:
            for number in range(20):
                ranks[closing].send(1 - closing, header(closing, number))
            other = ranks[1 - closing]
            other.wait(0.05)
            other.receive()
            ranks[closing].close(5.0)
            seen = []
            end = time.monotonic() + 60
            while len(seen) < 20 and time.monotonic() < end:
                if (arrival := other.receive()) is not None:
                    seen.append(arrival)
                else:
                    other.wait(0.01)
            assert [one.header.call for one in seen] == list(range(20))
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                assert other.receive() is None, "an orderly end is no loss"
                other.wait(0.01)


# -- strangers -------------------------------------------------------------------------------------


def lane_port(ranks):
    """Return where rank 1 listens for lanes."""
    return "127.0.0.1", ranks[1]._listener.open()


def refused(ranks, count):
    """Drive until rank 1 has refused so many; nothing may have come meanwhile."""
    seen = drive(ranks, lambda _: ranks[1].refused_peers >= count)
    assert seen == [[], []]


HELLO = struct.Struct("<8sI16s")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(20),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48),
        HELLO.pack(b"svlane01", 0, bytes(16)),
        HELLO.pack(b"svlane01", 1, bytes(16)),
        HELLO.pack(b"svlane01", 1 << 31, bytes(16)),
    ],
    ids=["http", "tls", "zmtp", "zero", "own", "rank"],
)
def test_a_stranger_at_the_port_of_lanes_is_refused_and_counted(mode, data):
    with world(mode) as ranks:
        exchange(ranks)
        with socket.create_connection(lane_port(ranks), timeout=60) as stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            refused(ranks, 1)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):  # an alert of TLS, and then the end
                    pass
        exchange(ranks)


def test_the_key_of_a_lane_serves_once(monkeypatch):
    keys = []
    random = handshake.LaneKey.random
    monkeypatch.setattr(
        handshake.LaneKey, "random", classmethod(lambda _: keys.append(random()) or keys[-1])
    )
    with world() as ranks:
        exchange(ranks)
        with socket.create_connection(lane_port(ranks), timeout=60) as stranger:
            stranger.sendall(HELLO.pack(b"svlane01", 0, keys[0].shown))
            refused(ranks, 1)
            with contextlib.suppress(ConnectionResetError):
                assert not stranger.recv(100)
        exchange(ranks)


def test_who_shows_no_certificate_of_the_job_is_refused():
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    another_job = lane_tls.LaneTls(bytes(32))._client
    another_job.verify_mode = ssl.CERT_NONE
    with world("tls") as ranks:
        exchange(ranks)
        for number, context in enumerate((anybody, old, another_job), 1):
            with socket.create_connection(lane_port(ranks)) as raw:
                raw.settimeout(0.01)
                stranger = context.wrap_socket(raw, do_handshake_on_connect=False)
                end = time.monotonic() + 60
                while ranks[1].refused_peers < number and time.monotonic() < end:
                    with contextlib.suppress(OSError):
                        stranger.do_handshake()
                        stranger.send(HELLO.pack(b"svlane01", 0, bytes(16)))
                    assert ranks[1].receive() is None
                    ranks[1].wait(0.01)
                stranger.close()
            assert ranks[1].refused_peers == number
        exchange(ranks)


def test_ranks_with_different_secrets_have_no_lane():
    """Their links would not let them come that far; a lane checks for itself, and refuses."""
    with world("tls", keys=(KEYS, link_keys(bytes(32)))) as ranks:
        exchange(ranks)
        assert paths(ranks) == [LanePath.LINK] * 2
        assert ranks[1].refused_peers == 1


def test_strangers_who_say_nothing_are_closed_but_for_a_few(monkeypatch):
    monkeypatch.setattr(handshake, "_PROVE_S", 0.1)
    with world() as ranks, contextlib.ExitStack() as stack:
        exchange(ranks)
        place = lane_port(ranks)
        idle = [stack.enter_context(socket.create_connection(place)) for _ in range(60)]
        for one in idle[::3]:
            one.sendall(b"svlane01")  # a beginning that never goes on
        refused(ranks, 60 - handshake._WAITING_MAX)
        exchange(ranks)
        assert len(ranks[1]._listener.arrivals) == handshake._WAITING_MAX


def test_many_strangers_at_once_take_no_more_than_their_share(monkeypatch):
    monkeypatch.setattr(handshake, "_PENDING_MAX", 20)
    monkeypatch.setattr(handshake, "_ACCEPTED_MAX", 10)
    with world() as ranks, contextlib.ExitStack() as stack:
        exchange(ranks)
        place = lane_port(ranks)
        for _ in range(50):
            stack.enter_context(socket.create_connection(place))
        refused(ranks, 30)
        assert len(ranks[1]._listener.arrivals) == 20
        exchange(ranks)


# -- what a lane refuses ---------------------------------------------------------------------------


def raw_frame(payload=b"abc", checksum=None, **fields):
    fields = {"nbytes": len(payload)} | fields
    source = fields.pop("source", 0)
    total = zlib.crc32(payload) if checksum is None else checksum
    return header(source, 5, **fields) + total.to_bytes(4, "little") + payload


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (raw_frame(checksum=1), "the checksum of a payload of rank 0 is wrong"),
        (
            raw_frame(bytes(100_000), checksum=1),
            "the checksum of a payload of rank 0 is wrong",
        ),
        (raw_frame(source=1), "claims rank 1"),
        (raw_frame(b"", nbytes=CONFIG.segment_bytes + 1), "exceeds the limit"),
        (raw_frame(b"", nbytes=(1 << 64) - 1), "exceeds the limit"),
        (bytes(HEADER_NBYTES + 4), "not a frame of syncvar"),
    ],
    ids=["sum", "long", "source", "limit", "most", "zeros"],
)
def test_a_frame_that_is_not_what_it_claims_ends_its_lane_and_is_not_delivered(data, reason):
    with world() as ranks:
        exchange(ranks)
        raw = ranks[0]._lanes[1].socket
        raw.sendall(raw_frame(b"good"))
        raw.sendall(data)
        raw.sendall(raw_frame(b"after"))
        seen = drive(ranks, lambda seen: len(seen[1]) == 2)[1]
        assert bytes(seen[0].payload) == b"good"
        assert isinstance(seen[1], PeerDisconnected)
        assert reason in seen[1].reason


@pytest.mark.parametrize("mode", MODES)
def test_a_lane_that_breaks_is_a_loss_after_its_frames_and_once(mode):
    with world(mode) as ranks:
        exchange(ranks)
        for number in range(5):
            ranks[0].send(1, header(0, number))
        ranks[0]._lanes[1].socket.shutdown(socket.SHUT_RDWR)
        seen = drive(ranks, lambda seen: seen[0] and len(seen[1]) == 6)
        assert [one.header.call for one in seen[1][:5]] == list(range(5))
        assert seen[1][5] == PeerDisconnected(0, CLOSED)
        assert seen[0] == [PeerDisconnected(1, CLOSED)]
        for rank, one in enumerate(ranks):
            assert one.send(1 - rank, header(rank, 9), memoryview(b"abc"), borrow=True) is None
        end = time.monotonic() + 0.5
        drive(ranks, lambda seen: time.monotonic() > end and seen == [[], []])


def test_a_lost_link_ends_its_lane_after_the_frames_that_have_arrived():
    with world() as ranks:
        exchange(ranks)
        payload = memoryview(bytes(2000))
        for number in range(5):
            ranks[0].send(1, header(0, number, 2000), payload)
        time.sleep(0.1)
        ranks[1]._links.lose(0, "silent for 3.0 s")
        seen = []
        while len(seen) < 6:
            if (arrival := ranks[1].receive()) is not None:
                seen.append(arrival)
        assert all(isinstance(one, Frame) for one in seen[:5])
        assert seen[5] == PeerDisconnected(0, "silent for 3.0 s")
        assert not ranks[1]._lanes


def test_queued_frames_of_a_full_lane_arrive_in_order_and_return_their_memory():
    with world() as ranks:
        exchange(ranks)
        memory = memoryview(bytearray(1 << 20))
        loans = [
            ranks[0].send(1, header(0, number, len(memory)), memory, borrow=True)
            for number in range(40)
        ]
        assert any(loan is not None and not loan.is_done() for loan in loans)
        seen = drive(ranks, lambda seen: len(seen[1]) == 40)[1]
        assert [one.header.call for one in seen] == list(range(40))
        assert all(loan is None or loan.is_done() for loan in loans)


LONG = 1 << 20


class Wanted:
    """A receiver that wants long payloads in memory of its own."""

    def __init__(self, transport, nbytes=LONG):
        self.place = Place(memoryview(bytearray(nbytes)))
        self.asked = []
        transport.placer = self.find

    def find(self, asked):
        self.asked.append(asked.call)
        return self.place


def give_on(lane, parts, receiver):
    """Send parts of a frame while a rank receives; return what arrives there."""
    end = time.monotonic() + 60.0
    while (arrival := receiver.receive()) is None:
        assert time.monotonic() < end
        if parts:
            with contextlib.suppress(BlockingIOError):
                parts = lanes._after(parts, lane._give(parts))
    return arrival


@pytest.mark.parametrize("mode", MODES)
def test_a_long_payload_arrives_where_the_receiver_wants_it(mode):
    payload = memoryview(np.random.default_rng(1).bytes(LONG))
    with world(mode) as ranks:
        exchange(ranks)
        wanted = Wanted(ranks[1])
        ranks[0].send(1, header(0, 1, 3), memoryview(b"abc"))
        ranks[0].send(1, header(0, 2, LONG), payload)
        ranks[0].send(1, header(0, 3))
        seen = drive(ranks, lambda seen: len(seen[1]) == 3)[1]
        assert [one.header.call for one in seen] == [1, 2, 3]
        assert seen[1].payload is wanted.place.memory
        assert wanted.place.memory == payload
        assert wanted.asked == [2], "a short one comes with its header"
        wanted.place = None
        ranks[0].send(1, header(0, 4, LONG), payload)
        (frame,) = drive(ranks, lambda seen: seen[1])[1]
        assert frame.payload == payload


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begun", [0, 30_000])
def test_a_place_that_is_closed_is_not_written_any_more(mode, begun):
    with world(mode) as ranks:
        exchange(ranks)
        wanted, lane = Wanted(ranks[1]), ranks[0]._lanes[1]
        if not begun:
            wanted.place.close()
        parts = lane._parts_of(header(0, 5, LONG), memoryview(bytes([7]) * LONG))
        assert lane._give([parts[0], parts[1][:40_000]]) == len(parts[0]) + 40_000
        drive(ranks, lambda _: wanted.asked and wanted.place.memory[begun] == (7 if begun else 0))
        wanted.place.close()
        wanted.place.memory[:] = bytes(LONG)
        frame = give_on(lane, [parts[1][40_000:]], ranks[1])
        assert frame.header.call == 5
        assert not any(wanted.place.memory)
        exchange(ranks)


@pytest.mark.parametrize("fields", [{"source": 1}, {"generation": 1}])
def test_the_receiver_is_not_asked_about_frames_of_others(fields):
    claim = {"source": 0, "generation": 0, **fields}
    head = Header(FrameType.DATA, claim["source"], claim["generation"], 0, 1, nbytes=LONG)
    with world() as ranks:
        exchange(ranks)
        wanted = Wanted(ranks[1])
        ranks[0].send(1, head.pack(), memoryview(bytes(LONG)))
        (lost,) = drive(ranks[1:], lambda seen: seen[0])[0]
        assert isinstance(lost, PeerDisconnected)
        assert not wanted.asked


def test_a_wrong_checksum_of_a_placed_payload_ends_its_lane():
    with world() as ranks:
        exchange(ranks)
        wanted, lane = Wanted(ranks[1]), ranks[0]._lanes[1]
        (prefix, payload) = lane._parts_of(header(0, 5, LONG), memoryview(bytearray(LONG)))
        payload[LONG // 2] = 1
        lost = give_on(lane, [prefix, payload], ranks[1])
        assert wanted.asked == [5]
        assert isinstance(lost, PeerDisconnected)
        assert "checksum" in lost.reason


PEER = """
import sys, zmq
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.frame import FrameType, Header
from syncvar.transports.curve import link_keys
from syncvar.transports.lane_transport import LaneTransport
from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport
config, keys = RuntimeConfig(encryption="required"), link_keys(bytes(range(32)))
links = ZeromqTransport(zmq.Context(), 1, sys.argv[1], "job", config, links=HostLinks("tcp://127.0.0.1", keys))
transport = LaneTransport(links, 1, config, keys.lanes)
print(transport.outside, flush=True)
transport.open({0: sys.stdin.readline().strip(), 1: transport.outside}, 0)
for number in range(50):
    transport.send(0, Header(FrameType.DATA, 1, 0, 0, number, nbytes=1000).pack(), memoryview(bytes(1000)))
while True:
    transport.receive()
    transport.wait(0.05)
"""


def test_a_killed_peer_is_lost_after_its_frames():
    directory = tempfile.mkdtemp(prefix="sv")
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, f"ipc://{directory}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with zmq.Context() as context:
        links = ZeromqTransport(
            context,
            0,
            f"ipc://{directory}",
            "job",
            CONFIG,
            links=HostLinks("tcp://127.0.0.1", KEYS),
        )
        transport = LaneTransport(links, 0, CONFIG, KEYS.lanes)
        try:
            transport.open({0: transport.outside, 1: peer.stdout.readline().strip()}, 0)
            peer.stdin.write(transport.outside + "\n")
            peer.stdin.flush()
            seen = drive([transport], lambda seen: len(seen[0]) == 50)[0]
            assert [one.header.call for one in seen] == list(range(50))
            peer.kill()
            ((lost,),) = drive([transport], lambda seen: seen[0])
            assert lost == PeerDisconnected(1, CLOSED)
        finally:
            transport.close(0)
            peer.kill()
            peer.communicate()
            shutil.rmtree(directory)


# -- when there are lanes --------------------------------------------------------------------------


class Links:
    """A transport of ZeroMQ that listens, or does not."""

    def __init__(self, outside):
        self.outside = outside


@pytest.mark.parametrize(
    ("outside", "settings"), [("", {}), ("tcp://127.0.0.1:1", {"transport": "zmq"})]
)
def test_no_lanes_on_one_host_or_with_zmq(outside, settings):
    links = Links(outside)
    assert _with_lanes(links, 0, RuntimeConfig(**settings), KEYS) is links


def test_encrypted_data_stay_on_links_without_the_package_that_makes_certificates(
    monkeypatch, caplog
):
    monkeypatch.setattr(lane_tls.importlib.util, "find_spec", lambda _: None)
    links = Links("tcp://127.0.0.1:1")
    with caplog.at_level(logging.INFO, "syncvar"):
        assert _with_lanes(links, 0, RuntimeConfig(), KEYS) is links
    assert "pip install 'syncvar[lanes]'" in caplog.text


def test_all_processes_of_a_job_make_the_same_certificate_and_other_jobs_another():
    one, same, other = (
        lane_tls.LaneTls(keys.lanes)._certificate
        for keys in (KEYS, link_keys(bytes(range(32))), link_keys(bytes(range(32)), "other"))
    )
    assert one == same
    assert one != other
    assert KEYS.lanes not in one


def test_lanes_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    for mode in MODES:
        with world(mode) as ranks:
            exchange(ranks)
    end = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < end:
        time.sleep(0.05)  # ZeroMQ's own threads close theirs
    assert len(os.listdir("/proc/self/fd")) <= before
