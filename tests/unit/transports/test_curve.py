"""Links between hosts: members are let in, strangers are refused and cannot stop a job."""

import contextlib
import os
import socket
import struct
import time
import zlib

import pytest
import zmq
from zmq.utils import z85

import syncvar.transports.zeromq_transport as zeromq_module
from syncvar.bootstrap.job_private import job_secret
from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core.errors import ConfigError, HandshakeError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.frame import (
    CONTROL_NBYTES_MAX,
    FRAMING_NBYTES,
    UNPROVED_NBYTES_MAX,
    FrameType,
    Header,
)
from syncvar.transports.curve import WAITING_MAX, Gate, link_keys
from syncvar.transports.zeromq_links import ZeromqControl
from syncvar.transports.zeromq_sockets import job_nonce
from syncvar.transports.zeromq_transport import HostLinks, ZeromqTransport
from tests.support.host_worlds import world_of_hosts

SECRET = bytes(range(32))
CONFIG = RuntimeConfig(
    heartbeat_interval_s=0.2, suspect_after_s=1.0, lost_after_s=3.0, handshake_timeout_s=2.0
)
MODES = {mode: CONFIG.replaced(encryption=mode) for mode in ("required", "control-only", "off")}


def world(secrets=(SECRET, SECRET), config=CONFIG):
    """Two ranks on hosts of their own."""
    is_open = config.encryption == "off"
    return world_of_hosts(config, [None if is_open else link_keys(one) for one in secrets])


def passes(ranks, limit_s=60.0, payload=b""):
    """Send a frame from rank 0 to rank 1; return what rank 1 gets."""
    ranks[0].send(
        1, Header(FrameType.DATA, 0, 0, 0, 7, nbytes=len(payload)).pack(), memoryview(payload)
    )
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        for one in ranks:
            one.wait(0.01)
        arrival = ranks[1].receive()
        lost = ranks[0].receive()
        if arrival is not None or lost is not None:
            return arrival or lost
    return None


def dealer(context, address, keys=None, server=None):
    one = context.socket(zmq.DEALER)
    one.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        one.setsockopt(zmq.CURVE_PUBLICKEY, keys[0])
        one.setsockopt(zmq.CURVE_SECRETKEY, keys[1])
        one.setsockopt(zmq.CURVE_SERVERKEY, server)
    one.connect(address)
    return one


@pytest.mark.parametrize("mode", MODES)
def test_members_reach_each_other(mode):
    with world(config=MODES[mode]) as ranks:
        for payload in (b"", b"short", bytes(range(256)) * 100):
            arrival = passes(ranks, payload=payload)
            assert (arrival.header.call, bytes(arrival.payload)) == (7, payload)
        ranks[0].close(1.0)
        until = time.monotonic() + 60
        while 0 not in ranks[1]._departed and time.monotonic() < until:
            ranks[1].wait(0.01)
            assert ranks[1].receive() is None, "its goodbye was not understood"
        assert 0 in ranks[1]._departed
        assert [one.refused_peers for one in ranks] == [0, 0]


@pytest.mark.parametrize("mode", ["required", "control-only"])
def test_a_rank_with_another_secret_is_refused(mode):
    with world((SECRET, bytes(32)), MODES[mode]) as ranks:
        lost = passes(ranks)
        assert lost.peer == 1
        if mode == "control-only":
            assert ranks[1].refused_peers == 1


def by_hand(context, address, *, ticket=None, rank=0, job="job"):
    """Return a socket that says of itself that it is a rank."""
    one = context.socket(zmq.DEALER)
    one.setsockopt(zmq.LINGER, 0)
    one.setsockopt(
        zmq.ROUTING_ID, zeromq_module._IDENTITY.pack(b"s", job_nonce(job), 0, rank, b"12345678")
    )
    if ticket is not None:
        one.setsockopt(zmq.PLAIN_USERNAME, b"%d" % rank)
        one.setsockopt(zmq.PLAIN_PASSWORD, ticket)
    one.connect(address)
    return one


def refused(ranks, by, limit_s=60.0):
    """Drive rank 1 until it has refused so many; return what came to it all the same."""
    seen, until = [], time.monotonic() + limit_s
    while ranks[1].refused_peers < by and time.monotonic() < until:
        ranks[1].wait(0.01)
        seen.append(ranks[1].receive())
    assert ranks[1].refused_peers >= by
    return [one for one in seen if one is not None]


def test_a_link_that_is_not_encrypted_needs_the_ticket_of_its_pair():
    keys, other = link_keys(SECRET), link_keys(SECRET, "another job")
    wrong = [keys.ticket(1, 0), keys.ticket(0, 0), other.ticket(0, 1), b"x", b"x" * 255, None]
    with world(config=MODES["control-only"]) as ranks, zmq.Context() as context:
        peers = [by_hand(context, ranks[1].outside, ticket=one) for one in wrong]
        for one in peers:
            one.send(Header(FrameType.DATA, 0, 0, 0, 7).pack() + bytes(4))
        assert refused(ranks, len(wrong)) == []
        assert ranks[1].refused_frames == 0, "none of them got as far as a frame"
        assert passes(ranks).header.call == 7
        for one in peers:
            one.close()


@pytest.mark.parametrize("mode", ["control-only", "off"])
def test_hello_is_checked_where_nothing_is_encrypted(mode):
    ticket = link_keys(SECRET).ticket(0, 1) if mode == "control-only" else None
    with world(config=MODES[mode]) as ranks, zmq.Context() as context:
        one = by_hand(context, ranks[1].outside, ticket=ticket, job="another job")
        one.send(Header(FrameType.DATA, 0, 0, 0, 7).pack() + bytes(4))
        assert refused(ranks, 1) == []
        assert passes(ranks).header.call == 7
        again = by_hand(context, ranks[1].outside, ticket=ticket)
        again.send(Header(FrameType.DATA, 0, 0, 0, 9).pack() + bytes(4))
        assert refused(ranks, 2) == [], "rank 0 is there already: this is somebody else"
        assert passes(ranks).header.call == 7
        one.close()
        again.close()


@pytest.mark.parametrize("mode", ["control-only", "off"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_payload_that_has_changed_on_its_way_is_refused(mode, parts):
    ticket = link_keys(SECRET).ticket(0, 1) if mode == "control-only" else None
    payload = bytes(range(200))
    header = Header(FrameType.DATA, 0, 0, 0, 7, nbytes=len(payload)).pack() + zlib.crc32(
        payload
    ).to_bytes(4, "little")
    flipped = bytes([*payload[:100], payload[100] ^ 4, *payload[101:]])
    with world(config=MODES[mode]) as ranks, zmq.Context() as context:
        one = by_hand(context, ranks[1].outside, ticket=ticket)
        for data in (payload, flipped, payload):
            one.send_multipart([header + data] if parts == 1 else [header, data])
        seen, until = [], time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < until:
            ranks[1].wait(0.01)
            seen += filter(None, [ranks[1].receive()])
        assert bytes(seen[0].payload) == payload
        assert (seen[1].peer, seen[1].reason) == (0, "the checksum of a payload of rank 0 is wrong")
        one.close()


def test_strangers_who_come_and_go_while_a_rank_computes_stop_nobody():
    """ZeroMQ's own thread would wait where nobody takes what it tells of them: signs of life among what waits then."""
    with world() as ranks:
        assert passes(ranks).header.call == 7
        host, port = ranks[1].outside.removeprefix("tcp://").split(":")
        for _ in range(
            1100
        ):  # two messages each, and two thousand is what there is place for by default
            with socket.create_connection((host, int(port)), timeout=10) as one:
                assert one.recv(10)
        with socket.create_connection((host, int(port)), timeout=10) as one:
            assert one.recv(64), "nobody is there who would answer a member's sign of life"
        assert passes(ranks).header.call == 7


def test_strangers_are_refused_and_members_do_not_notice(caplog):
    own = zmq.curve_keypair()
    keys = link_keys(SECRET)
    with world() as ranks, zmq.Context() as context:
        address = ranks[1].outside
        host, port = address.removeprefix("tcp://").split(":")
        strangers = [
            dealer(context, address),
            dealer(context, address, own, zmq.curve_keypair()[0]),
            dealer(
                context, address, own, keys.listener[0]
            ),  # knows the public key, which is no secret, and no more
        ]
        raw = [socket.create_connection((host, int(port))) for _ in range(20)]
        try:
            for number, one in enumerate(raw):
                one.sendall(
                    (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" * 40, b"")[
                        number % 4
                    ]
                )
            for one in strangers:
                with contextlib.suppress(zmq.Again):
                    one.send(Header(FrameType.DATA, 0, 0, 0, 9).pack(), zmq.NOBLOCK)
            arrival = passes(ranks)
            assert arrival.header.call == 7
            until = time.monotonic() + 60
            while not ranks[1].refused_peers and time.monotonic() < until:
                ranks[1].wait(0.01)
            assert ranks[1].refused_peers >= 1
            assert ranks[1].receive() is None
            assert ranks[1].refused_frames == 0, "a stranger's frame came through"
            assert sum("stranger" in one.message for one in caplog.records) == 1
        finally:
            for one in (*raw, *strangers):
                one.close()


@pytest.mark.slow
def test_strangers_who_say_nothing_are_closed_but_for_a_few_and_members_stay():
    patient = RuntimeConfig(
        heartbeat_interval_s=0.2, suspect_after_s=1.0, lost_after_s=3.0, handshake_timeout_s=60.0
    )
    with world(config=patient) as ranks, contextlib.ExitStack() as stack:
        assert passes(ranks).header.call == 7
        for rank in (0, 1):  # one has members and strangers, one strangers only
            host, port = ranks[rank].outside.removeprefix("tcp://").split(":")
            idle = [
                stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(120)
            ]
            for number, one in enumerate(idle):
                one.setblocking(False)
                if number % 3 == 0:
                    one.sendall(
                        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE"
                    )  # a beginning that never goes on

            def is_closed(one):
                try:
                    while one.recv(64):  # the listener's greeting
                        pass
                except BlockingIOError:
                    return False
                except OSError:
                    return True
                return True

            left, until = idle, time.monotonic() + 40
            while len(left) > WAITING_MAX and time.monotonic() < until:
                left = [one for one in left if not is_closed(one)]
                ranks[0].wait(0.01)
            assert len(left) == WAITING_MAX, (
                "the others are closed before the handshake's limit, and no more than need be"
            )
        assert passes(ranks).header.call == 7, "the member's connection is none of a stranger"
        assert ranks[1].receive() is None


def test_a_stranger_who_sends_more_than_a_handshake_needs_is_closed():
    patient = CONFIG.replaced(handshake_timeout_s=60.0)
    with world(config=patient) as ranks:
        host, port = ranks[1].outside.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            announced = (CONFIG.segment_bytes).to_bytes(8, "big")
            stranger.sendall(
                b"\xff"
                + bytes(8)
                + b"\x7f\x03\x01"
                + b"CURVE".ljust(52, b"\0")
                + b"\x06"
                + announced
            )
            stranger.sendall(bytes(2 * UNPROVED_NBYTES_MAX))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(64):  # the listener's greeting, and then the end
                    pass
        assert passes(ranks).header.call == 7
        for _ in range(3):  # a member sends much more
            ranks[0].send(
                1,
                Header(FrameType.DATA, 0, 0, 0, 8, nbytes=1 << 19).pack(),
                memoryview(bytes(1 << 19)),
            )
        time.sleep(0.3)
        assert passes(ranks).header.call == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (None, ["another mode of encryption"]),
        (link_keys(SECRET), ["the same secret", "SYNCVAR_ENCRYPTION"]),
    ],
)
def test_whoever_is_refused_before_it_could_read_why_is_told_what_it_may_be(keys, words):
    with socket.create_server(("127.0.0.1", 0)) as listener, zmq.Context() as context:
        listener.settimeout(10)
        control = ZeromqControl(
            context, f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1, CONFIG, keys
        )
        try:
            until = (
                time.monotonic() + 30
            )  # a reset that comes before the connection was noticed is no refusal, so ten may not do
            with pytest.raises(HandshakeError) as told:
                while time.monotonic() < until:
                    one, _ = listener.accept()
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.close()  # resets it: whatever had been sent is lost
                    control.receive()
        finally:
            control.close(0)
    assert all(one in str(told.value) for one in words), told.value


def test_every_socket_has_limits():
    with world() as ranks, zmq.Context() as context:
        ranks[0].send(1, Header(FrameType.DATA, 0, 0, 0, 7).pack())
        control = ZeromqControl(context, "ipc:///nowhere", 0, CONFIG)
        store = RendezvousServer(
            f"ipc://{os.path.dirname(ranks[0].address.removeprefix('ipc://'))}/store",
            2,
            "job",
            CONFIG,
        )
        try:
            limits = {}
            for name, one in (
                ("router", ranks[0]._router),
                ("link", ranks[0]._links[1].socket),
                ("control", control.socket),
                ("store", store.socket),
            ):
                limits[name] = (
                    one.getsockopt(zmq.MAXMSGSIZE),
                    one.getsockopt(zmq.HANDSHAKE_IVL),
                    one.getsockopt(zmq.LINGER),
                )
        finally:
            control.close(0)
            store.close()
    frame, control = CONFIG.segment_bytes + FRAMING_NBYTES, CONTROL_NBYTES_MAX + FRAMING_NBYTES
    assert limits == {
        "router": (frame, 3400, 0),
        "link": (frame, 3400, 0),
        "control": (control, 300_000, 0),
        "store": (control, 3400, 0),
    }


def test_nobody_listens_without_a_secret():
    with zmq.Context() as context, pytest.raises(ConfigError, match="without the job's secret"):
        ZeromqTransport(context, 0, "ipc:///tmp", "job", CONFIG, links=HostLinks("tcp://127.0.0.1"))


def test_a_second_gate_in_a_context_is_refused():
    keys = link_keys(SECRET)
    with zmq.Context() as context:
        gate = Gate(context, keys)
        with pytest.raises(HandshakeError, match="no gate can be set up"):
            Gate(context, keys)
        gate.close()
        gate.close()


def test_keys_follow_from_the_secret_alone():
    assert link_keys(SECRET) == link_keys(SECRET)
    one, other = link_keys(SECRET), link_keys(bytes(32))
    assert len({one.member, one.listener, other.member, other.listener}) == 4
    assert z85.decode(one.member[1]) != SECRET


def test_the_secret_comes_from_descriptor_file_or_variable(tmp_path):
    descriptor = os.memfd_create("key")
    os.write(descriptor, SECRET)
    try:
        environ = {"SYNCVAR_KEY_FD": str(descriptor)}
        assert job_secret(environ) == SECRET
        assert job_secret(environ) == SECRET  # joining again
    finally:
        os.close(descriptor)
    path = tmp_path / "key"
    path.write_text("0a" * 32)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        job_secret({"SYNCVAR_KEY_FILE": str(path)})
    path.chmod(0o600)
    assert job_secret({"SYNCVAR_KEY_FILE": str(path)}) == b"\x0a" * 32
    environ = {"SYNCVAR_KEY": "0b" * 32}
    assert job_secret(environ) == b"\x0b" * 32
    assert not environ, "children must not inherit it"


@pytest.mark.parametrize("text", ["-1", "x", "99999"])
def test_a_descriptor_without_a_secret_is_refused(text):
    with pytest.raises(ConfigError, match="SYNCVAR_KEY_FD"):
        job_secret({"SYNCVAR_KEY_FD": text})
