"""Links between hosts: members are let in, strangers are refused and cannot stop a job."""

import contextlib
import os
import shutil
import socket
import tempfile
import time

import pytest
import zmq
from zmq.utils import z85

from syncvar.config import RuntimeConfig
from syncvar.errors import ConfigError, HandshakeError
from syncvar.runtime.secret import job_secret
from syncvar.transports.curve import Gate, link_keys
from syncvar.transports.zeromq import ZeromqTransport
from syncvar.wire import Kind, pack_header

SECRET = bytes(range(32))
CONFIG = RuntimeConfig(heartbeat_interval_s=0.2, suspect_after_s=1.0, lost_after_s=3.0, handshake_timeout_s=2.0)


@contextlib.contextmanager
def world(secrets=(SECRET, SECRET)):
    """Two ranks on hosts of their own."""
    directory = tempfile.mkdtemp(prefix="sv")
    contexts = [zmq.Context() for _ in secrets]
    ranks = []
    try:
        for rank, (context, secret) in enumerate(zip(contexts, secrets, strict=True)):
            made = ZeromqTransport(
                context, rank, f"ipc://{directory}", "job", CONFIG, outside="tcp://127.0.0.1", keys=link_keys(secret)
            )
            ranks.append(made)
        for one in ranks:
            one.open({rank: other.outside for rank, other in enumerate(ranks)}, 0)
        yield ranks
    finally:
        for one in ranks:
            one.close(0)
        for context in contexts:
            context.term()
        shutil.rmtree(directory)


def passes(ranks, limit_s=5.0):
    """Send a frame from rank 0 to rank 1; return what rank 1 gets."""
    ranks[0].send(1, pack_header(Kind.DATA, 0, 0, 0, 7))
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


def test_members_reach_each_other():
    with world() as ranks:
        arrival = passes(ranks)
        assert arrival.header.call == 7
        assert [one.refused_peers for one in ranks] == [0, 0]


def test_a_rank_with_another_secret_is_refused():
    with world((SECRET, bytes(32))) as ranks:
        lost = passes(ranks)
        assert lost.peer == 1


def test_strangers_are_refused_and_members_do_not_notice(caplog):
    own = zmq.curve_keypair()
    keys = link_keys(SECRET)
    with world() as ranks, zmq.Context() as context:
        address = ranks[1].outside
        host, port = address.removeprefix("tcp://").split(":")
        strangers = [
            dealer(context, address),
            dealer(context, address, own, zmq.curve_keypair()[0]),
            dealer(context, address, own, keys.listener[0]),  # knows the public key, which is no secret, and no more
        ]
        raw = [socket.create_connection((host, int(port))) for _ in range(20)]
        try:
            for number, one in enumerate(raw):
                one.sendall((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" * 40, b"")[number % 4])
            for one in strangers:
                with contextlib.suppress(zmq.Again):
                    one.send(pack_header(Kind.DATA, 0, 0, 0, 9), zmq.NOBLOCK)
            arrival = passes(ranks)
            assert arrival.header.call == 7
            until = time.monotonic() + 5
            while not ranks[1].refused_peers and time.monotonic() < until:
                ranks[1].wait(0.01)
            assert ranks[1].refused_peers >= 1
            assert ranks[1].receive() is None
            assert ranks[1].refused_frames == 0, "a stranger's frame came through"
            assert sum("stranger" in one.message for one in caplog.records) == 1
        finally:
            for one in (*raw, *strangers):
                one.close()


def test_nobody_listens_without_a_secret():
    with zmq.Context() as context, pytest.raises(ConfigError, match="without the job's secret"):
        ZeromqTransport(context, 0, "ipc:///tmp", "job", CONFIG, outside="tcp://127.0.0.1")


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
