"""Handing over shared memory: the job's own workers get it, everybody else a sentence, and the launcher never waits."""

import contextlib
import gc
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest

from syncvar.protocol.object_codec import unpack_object
from syncvar.shm import fd_passing
from syncvar.shm.fd_passing import FdServer, fd_socket_path, fetch
from syncvar.shm.segment import SharedSegment
from syncvar.shm.segment_file import create

MIB = 1 << 20
JOB = "0123456789abcdef"


def make(generation):
    return create(64 * MIB, 2, 2, generation)


class Launcher:
    """A launcher's loop in a thread, around what is tested."""

    def __init__(self, path, maker=make):
        self.handing = FdServer(str(path), JOB, 2, maker)
        self.stopped = False
        self.longest_s = 0.0
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def loop(self):
        while not self.stopped:
            ready = select.select(self.handing.descriptors(), [], [], 0.01)[0]
            began = time.perf_counter()
            for descriptor in ready:
                self.handing.readable(descriptor)
            self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def close(self):
        self.stopped = True
        self.thread.join()
        self.handing.close()


@pytest.fixture
def launcher(pytestconfig):
    launchers = []
    path = f"{pytestconfig.syncvar_runtime}/shm"

    def start(*args):
        launchers.append(Launcher(path, *args))
        return launchers[-1]

    start.path = path
    yield start
    for one in launchers:
        one.close()
        one.close()


def connected(path):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    until = time.monotonic() + 60
    while True:
        try:
            connection.connect(path)
            return connection
        except BlockingIOError:
            assert time.monotonic() < until
            time.sleep(0.001)


WORKER = """
import sys
import numpy as np
from syncvar.shm.fd_passing import fetch
from syncvar.shm.segment import SharedSegment
from syncvar.protocol.object_codec import pack_object
path, job, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd, reason = fetch(path, job, 0, rank, 10)
assert reason is None, reason
shm = SharedSegment.attach(fd, rank)
array = shm.empty((1000,), np.float64)
array[:] = rank + 1
words = shm.words
words[shm.table(rank) // 8] = shm.locate(array)
while not words[shm.table(1 - rank) // 8]:
    assert not shm.is_aborted
other = shm.view(words[shm.table(1 - rank) // 8], 1000, np.float64)
sys.stdout.buffer.write(pack_object([float(other.sum()), float(array.sum())]))
sys.stdout.flush()
sys.stdin.read()
while not shm.is_aborted:
    pass
"""


def test_two_processes_share_one_memory(launcher):
    one = launcher()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, launcher.path, JOB, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        sums = [unpack_object(worker.stdout.read1()) for worker in workers]
        assert sums == [[2000.0, 1000.0], [1000.0, 2000.0]]
        one.handing.abort()
        for worker in workers:
            worker.communicate(timeout=120)
            assert worker.returncode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_the_socket_is_private(launcher):
    before = os.umask(0)
    try:
        one = launcher()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.lstat(launcher.path).st_mode) == 0o600
    one.close()
    assert not os.path.exists(launcher.path)


def test_the_descriptor_is_not_inherited(launcher):
    launcher()
    fd, reason = fetch(launcher.path, JOB, 0, 0, 5)
    assert reason is None
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("job", "generation", "rank", "words"),
    [
        ("another", 0, 0, "this is another job"),
        (JOB + "x", 0, 0, "this is another job"),
        (JOB, 0, 2, "there is no local rank 2 among 2"),
    ],
)
def test_who_is_refused_hears_why(launcher, job, generation, rank, words):
    one = launcher()
    assert fetch(launcher.path, job, generation, rank, 5) == (None, words)
    assert one.handing.refused_requests == 1


def test_no_shm_is_a_reason_told_once(launcher):
    one = launcher(lambda generation: (None, f"none for generation {generation}"))
    for generation in (0, 0, 1):
        assert fetch(launcher.path, JOB, generation, 0, 5) == (
            None,
            f"none for generation {generation}",
        )
    assert one.handing.take_messages() == [
        "no shared memory, data go through unix sockets: none for generation 0"
    ]
    assert one.handing.take_messages() == []


def test_a_fallback_is_told_once(launcher, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    one = launcher()
    for generation in range(3):
        for rank in range(2):
            os.close(fetch(launcher.path, JOB, generation, rank, 5)[0])
    assert one.handing.take_messages() == [
        "shared memory: a file in /dev/shm instead of memfd (Function not implemented)"
    ]


def test_nobody_there(tmp_path):
    fd, reason = fetch(str(tmp_path / "shm"), JOB, 0, 0, 5)
    assert fd is None
    assert (
        reason == f"the launcher sends no shared memory ({tmp_path}/shm: No such file or directory)"
    )


def test_a_launcher_that_does_not_answer(pytestconfig):
    path = f"{pytestconfig.syncvar_runtime}/shm"
    stuck = FdServer(path, JOB, 2, make)
    try:
        assert fetch(path, JOB, 0, 0, 0.2) == (
            None,
            "the launcher did not send shared memory within 0.2 s",
        )
    finally:
        stuck.close()


def test_a_launcher_that_is_gone_in_the_middle(pytestconfig):
    path = f"{pytestconfig.syncvar_runtime}/shm"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def hang_up():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        fd, reason = fetch(path, JOB, 0, 0, 5)
        thread.join()
    os.unlink(path)
    assert fd is None
    assert reason == "the launcher closed the connection"


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\0" * 87, b"\0" * 88, b"\xff" * 89, b"GET / HTTP/1.1\r\n\r\n" * 3000]
)
def test_garbage_is_answered_and_dropped(launcher, data):
    one = launcher()
    with connected(launcher.path) as stranger:
        with contextlib.suppress(OSError):
            stranger.send(data)
        if not data:
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000)[:1] in (b"\0", b"")
    fd, reason = fetch(launcher.path, JOB, 0, 0, 5)
    assert reason is None
    os.close(fd)
    assert one.handing.refused_requests == 1


def test_silent_and_vanished_clients_stop_nobody(launcher):
    one = launcher()
    strangers = [connected(launcher.path) for _ in range(60)]
    for stranger in strangers[::2]:
        stranger.close()
    for rank in range(2):
        fd, reason = fetch(launcher.path, JOB, 0, rank, 60)
        assert reason is None
        os.close(fd)
    assert len(one.handing.descriptors()) <= 1 + 2 * 2 + 16, "not many of them are kept"
    for stranger in strangers:
        stranger.close()
    assert one.longest_s < 60


def test_another_user_is_dropped(launcher, monkeypatch):
    one = launcher()
    asked = fd_passing._peer_user
    strangers = iter([os.getuid() + 1])
    monkeypatch.setattr(
        fd_passing, "_peer_user", lambda connection: next(strangers, None) or asked(connection)
    )
    with connected(launcher.path) as stranger, contextlib.suppress(ConnectionResetError):
        assert stranger.recv(10) == b""
    assert one.handing.refused_requests == 1
    fd, reason = fetch(launcher.path, JOB, 0, 0, 5)
    assert reason is None
    os.close(fd)


def test_a_number_that_was_another_descriptor_s(launcher, pytestconfig):
    path = f"{pytestconfig.syncvar_runtime}/shm"
    server = FdServer(path, JOB, 2, make)
    try:
        with connected(path):
            server.readable(server.descriptors()[0])
            waiting = server.descriptors()[1]
            server.readable(waiting)  # nothing has come
            server.readable(12345)
            assert server.descriptors()[1:] == [waiting]
    finally:
        server.close()


# Generations.


def fetched(launcher, generation, rank):
    fd, reason = fetch(launcher.path, JOB, generation, rank, 5)
    assert reason is None, reason
    return SharedSegment.attach(fd, rank)


def test_each_generation_has_its_own_and_old_ones_are_let_go(launcher):
    one = launcher()
    first = [fetched(launcher, 0, rank) for rank in range(2)]
    second = fetched(launcher, 1, 1)
    assert [shm.generation for shm in (*first, second)] == [0, 0, 1]
    assert sorted(one.handing._segments) == [0, 1], "rank 0 may still be in the old one"
    late = fetched(launcher, 0, 0)
    assert late.generation == 0
    last = fetched(launcher, 1, 0)
    assert sorted(one.handing._segments) == [1]
    assert fetch(launcher.path, JOB, 0, 0, 5) == (
        None,
        "generation 0 has ended; the current one is 1",
    )
    one.handing.abort(0)
    assert not last.is_aborted
    one.handing.abort(1)
    assert last.is_aborted
    assert second.is_aborted
    for shm in (*first, second, late, last):
        shm.close()


def test_after_a_restart_nobody_gets_memory_of_an_earlier_generation(pytestconfig):
    path = f"{pytestconfig.syncvar_runtime}/shm"
    asked = []
    server = FdServer(
        path, JOB, 2, lambda generation: (asked.append(generation), (None, "none"))[1], 2
    )
    try:
        assert server._answer(_request(1)) == (-1, "generation 1 has ended; the current one is 2")
        assert server._answer(_request(2)) == (-1, "none")
        assert asked == [2]
    finally:
        server.close()


def _request(generation):
    return struct.pack("=8s64sQQ", b"SVSHM\0\0\1", JOB.encode(), generation, 0)


def test_a_lost_rank_marks_all_there_are_and_will_be(launcher):
    one = launcher()
    segments = [fetched(launcher, 0, 0), fetched(launcher, 1, 0)]
    one.handing.abort()
    segments.append(fetched(launcher, 2, 0))
    assert all(shm.is_aborted for shm in segments)
    for shm in segments:
        shm.close()


def test_nothing_is_left_open(launcher):
    one = launcher()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for generation in range(20):
        for rank in range(2):
            fetched(launcher, generation, rank).close()
    until = time.monotonic() + 60
    while (
        len(os.listdir("/proc/self/fd")) > before + 1
    ):  # the newest; the last connection is closed a moment later
        assert time.monotonic() < until
        time.sleep(0.005)
    assert list(one.handing._segments) == [19]


def test_where_it_is_handed_over():
    assert fd_socket_path("/tmp/a/b") == "/tmp/a/b/shm"
