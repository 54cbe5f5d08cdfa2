"""Strangers at the ports of a job: a program that does to them what no member does, says so, and stays until its input ends.

    python intruders.py KIND COUNT FILE address:port …

FILE holds, as JSON, what a test has let a rank of the job tell: its secret, its identity, and how it encrypts.
"""

import contextlib
import json
import os
import random
import resource
import socket
import sys
import threading
import time
from pathlib import Path

import zmq

import syncvar.transports.zeromq_transport as zeromq_module
from syncvar.protocol.control_messages import pack_message
from syncvar.protocol.frame import PROTOCOL_VERSION, FrameType, Header
from syncvar.transports.curve import link_keys
from syncvar.transports.zeromq_links import control_identity
from syncvar.transports.zeromq_sockets import job_nonce

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
LIMIT_S = 10.0
FLOOD_NBYTES = 64 << 20


def greeting(mechanism):
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def connected(target):
    host, _, port = target.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout=LIMIT_S)
    except OSError as error:
        error.add_note(f"at {target}")
        raise


class Stranger:
    """Who does it.

    Args:
        about: What a rank of the job has told.
        count: How often, where often is the point.
        targets: All ports, as address:port.
    """

    def __init__(self, about, count, targets):
        self.about = about
        self.targets = targets
        self.count = count
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4096)
        self.kept = []
        self.draw = random.Random(7)

    def keep(self, target, data=b""):
        """Connect, say something, and stay."""
        one = connected(target)
        self.kept.append(one)
        with contextlib.suppress(OSError):
            one.sendall(data)
        return one

    def say(self, target, data):
        """Connect, say something, and go."""
        with connected(target) as one, contextlib.suppress(OSError):
            one.sendall(data)
            one.recv(64)

    def member(self, target, keys, job, rank=1, incarnation=b"12345678", generation=0):
        """Connect with keys, as who says that it is a rank; send it a frame, and to a place of meeting that it joins."""
        one = self.context.socket(zmq.DEALER)
        self.kept.append(one)
        one.setsockopt(zmq.LINGER, 0)
        is_meeting = target == self.about.get("meeting")
        identity = zeromq_module._IDENTITY.pack(b"s", job_nonce(job), generation, rank, incarnation)
        one.setsockopt(zmq.ROUTING_ID, control_identity(rank) if is_meeting else identity)
        if ":" in target.rpartition(":")[0]:
            one.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            keys(one)
        one.connect(f"tcp://{target}")
        about = {"protocol": PROTOCOL_VERSION, "byte_order": "little"}
        join = pack_message(
            "join",
            rank=rank,
            job=job,
            generation=generation,
            address="a",
            pid=1,
            host="h",
            about=about,
        )
        with contextlib.suppress(
            zmq.Again
        ):  # who is refused at once has nowhere to put it any more
            one.send(
                join
                if is_meeting
                else Header(FrameType.DATA, rank, generation, 0, 3, nbytes=8).pack() + bytes(8),
                zmq.NOBLOCK,
            )
        return one

    def recorded(self, target):
        """Return what a member says at a port; at one of lanes, which refuse ZeroMQ, what it says at another one."""
        for place in (target, *self.targets):
            heard = self.heard_at(place)
            if len(heard) > 500:
                return heard
        raise AssertionError(heard)

    def heard_at(self, target):
        """Return what a member says on a connection, heard by somebody on the way. Its frame is another job's: nobody is disturbed."""
        heard = bytearray()
        with socket.create_server(("127.0.0.1", 0)) as server:
            keys = link_keys(bytes.fromhex(self.about["secret"]))
            self.member(f"127.0.0.1:{server.getsockname()[1]}", keys.connect, "another job")
            inner, _ = server.accept()
        outer = connected(target)

        def carry(source, sink, noted):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    noted += data
                    sink.sendall(data)

        ways = [
            threading.Thread(target=carry, args=way, daemon=True)
            for way in ((inner, outer, heard), (outer, inner, bytearray()))
        ]
        for way in ways:
            way.start()
        until = time.monotonic() + LIMIT_S
        while (
            len(heard) < 64 + 200 + 250 + 100
            and all(way.is_alive() for way in ways)
            and time.monotonic() < until
        ):  # greeting, HELLO, INITIATE, a message
            time.sleep(0.01)
        for one in (inner, outer):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for way in ways:
            way.join()
        for one in (inner, outer, self.kept.pop()):
            one.close()
        return bytes(heard)

    # -- the kinds ---------------------------------------------------------------------------------

    def raw_tcp(self, target):
        self.keep(target, bytes(100))
        self.say(target, b"\xff" * 100)

    def http(self, target):
        self.say(target, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.keep(target, b"POST /api/jobs HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")

    def tls(self, target):
        hello = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + self.draw.randbytes(190)
        self.say(target, hello)
        self.keep(target, hello)

    def no_key(self, target):
        self.member(target, None, self.about["job"])

    def wrong_key(self, target):
        own = zmq.curve_keypair()
        real = link_keys(bytes.fromhex(self.about["secret"])).listener[0]
        for server in (
            zmq.curve_keypair()[0],
            real,
        ):  # the second knows the public key, which is no secret

            def keys(one, server=server):
                one.curve_publickey, one.curve_secretkey, one.curve_serverkey = *own, server

            self.member(target, keys, self.about["job"])

    def another_job(self, target):
        self.member(target, link_keys(os.urandom(32)).connect, "another job")
        self.member(
            target, link_keys(bytes.fromhex(self.about["secret"])).connect, "another job"
        )  # one secret for two jobs

    def replayed(self, target):
        heard = self.recorded(target)
        self.say(target, heard)
        self.keep(target, heard)

    def again(self, target):
        keys = link_keys(bytes.fromhex(self.about["secret"]))
        for rank in (0, 1):
            self.member(target, keys.connect, self.about["job"], rank)

    def oversized(self, target):
        for size in ((1 << 20) - 1, 1 << 31, (1 << 62) + 1):
            for mechanism in (b"CURVE", b"NULL", b"PLAIN"):
                for _ in range(max(1, self.count // 20)):
                    self.keep(
                        target, greeting(mechanism) + b"\x06" + size.to_bytes(8, "big") + b"x" * 100
                    )

    def flooding(self, target):
        """Announce a frame, short to huge, and send as much of it as is taken, up to `FLOOD_NBYTES`."""
        block = bytes(1 << 20)
        for size in (1 << 20, 1 << 30, 1 << 34, (1 << 62) + 1):
            for mechanism in (b"CURVE", b"NULL", b"PLAIN"):
                for flags in (b"\x02", b"\x06"):  # a message, a command
                    one = self.keep(target, greeting(mechanism) + flags + size.to_bytes(8, "big"))
                    with contextlib.suppress(OSError):
                        for _ in range(FLOOD_NBYTES >> 20):
                            one.sendall(block)

    def truncated(self, target):
        heard = self.recorded(target)
        for end in range(1, len(heard), max(1, len(heard) * 10 // self.count)):
            self.say(target, heard[:end])

    def random(self, target):
        starts = (b"", SIGNATURE, greeting(b"CURVE"), greeting(b"NULL"))
        for _ in range(self.count):
            with connected(target) as one, contextlib.suppress(OSError):
                one.sendall(
                    self.draw.choice(starts) + self.draw.randbytes(self.draw.randint(0, 300))
                )

    def idle(self, target):
        for _ in range(self.count):
            self.keep(target)


KINDS = (
    "raw_tcp",
    "http",
    "tls",
    "no_key",
    "wrong_key",
    "another_job",
    "replayed",
    "again",
    "oversized",
    "flooding",
    "truncated",
    "random",
    "idle",
)


def main(kinds, count, path, *targets):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    stranger = Stranger(json.loads(Path(path).read_text()), int(count), targets)
    for kind in kinds.split(","):
        for target in targets:
            getattr(stranger, kind)(target)
    print("done", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
