"""The launcher's end of `syncvar stacks`: it answers its own user, names who is silent, and never waits for who asks."""

import contextlib
import os
import socket

import msgpack
import pytest

from syncvar.cli.stacks import stacks_text
from syncvar.core.stack_dump import StackFrame, Thread
from syncvar_launcher.job import status_socket
from syncvar_launcher.job.status_socket import SOCKET, StatusSocket
from syncvar_launcher.local.stack_requests import ANSWER_S, StackRequest

JOB = {
    "name": "1a2b3c4d",
    "pid": 7,
    "workers": 2,
    "servers": 0,
    "lasted_s": 1.0,
    "command": "syncvar-launch a.py",
    "folder": "/job",
}


class Stacks:
    """Two ranks; the second answers nothing."""

    def __init__(self):
        self.asked = []
        self.frames = (StackFrame("/job/a.py", 3, "f"),)

    def ask(self, rank, *, all_threads=False):
        self.asked.append((rank, all_threads))
        return StackRequest(rank, 0)

    def answer(self, asked, *, is_last=False):
        return [Thread("", True, self.frames)] if asked.rank == 0 else None

    def pid(self, rank):
        return 100 + rank


class View:
    """A job whose ranks answer in the second round."""

    rounds = 1

    def about(self):
        return JOB

    def position(self, number):
        return "not waiting in any call"

    def want(self, now):
        return 2

    def has_round(self, number):
        return self.rounds >= number

    def status(self, now, *, has_log):
        return {"job": JOB, "rounds": self.rounds, "has_log": has_log}


@pytest.fixture
def ends():
    made = []
    yield made
    for end in made:
        end.close()


@pytest.fixture
def server(tmp_path, ends):
    """The launcher's end, and a function that connects to it and sends."""
    stacks = Stacks()
    with_sockets = StatusSocket(tmp_path, View(), stacks, range(2))

    def connect(data):
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ends.append(end)
        end.settimeout(5.0)
        end.connect(str(tmp_path / SOCKET))
        end.sendall(data)
        look(with_sockets, 0.0)
        return end

    yield with_sockets, stacks, connect
    with_sockets.close()


def look(server, now):
    """Do what the launcher's loop does."""
    for _ in range(3):
        for descriptor in server.descriptors():
            server.readable(descriptor, now)
        server.tick(now)


def received(end):
    data = b""
    with contextlib.suppress(ConnectionResetError):  # it was closed with something unread
        while piece := end.recv(65536):
            data += piece
    return data


def question(**fields):
    return msgpack.packb({"question": "stacks", **fields})


def test_who_does_not_answer_in_time_is_named(server):
    service, stacks, connect = server
    end = connect(question(all_threads=True))
    assert stacks.asked == [(0, True), (1, True)]
    assert service.due(0.0) < 0.1, "it looks again soon"
    service.tick(ANSWER_S - 0.1)
    end.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.recv(1)
    end.settimeout(5.0)
    service.tick(ANSWER_S)
    assert stacks_text(msgpack.unpackb(received(end))) == (
        "job 1a2b3c4d: 2 ranks, launcher 7, since 1 s: syncvar-launch a.py\n"
        "rank 0: in user code, a.py:3\n"
        "  /job/a.py:3 in f\n"
        "rank 1: does not answer within 2 s (process 101); not waiting in any call\n"
    )
    assert service.due(0.0) == float("inf")


def test_strangers_nonsense_and_silence_are_let_go(server, monkeypatch):
    service, stacks, connect = server
    for nonsense in (
        b"\xc1",
        b"x" * 10,
        msgpack.packb([1]),
        msgpack.packb({"answer": 1}),
        msgpack.packb(7),
    ):
        assert received(connect(nonsense)) == b""
    monkeypatch.setattr(status_socket, "_is_ours", lambda _: False)
    assert received(connect(question())) == b""
    monkeypatch.undo()
    silent = connect(b"")
    service.tick(60.0)
    assert received(silent) == b""
    assert stacks.asked == []
    assert os.stat(service._listener.getsockname()).st_mode & 0o777 == 0o600


def test_who_reads_late_gets_all_and_holds_up_nobody(server):
    service, stacks, connect = server
    stacks.frames = tuple(StackFrame("/job/" + "a" * 1000, line, "f") for line in range(2000))
    late = connect(question())
    service.tick(ANSWER_S)
    assert msgpack.unpackb(received(connect(msgpack.packb({"question": "job"})))) == {"job": JOB}
    data = b""
    while not data or late.fileno() >= 0:
        piece = late.recv(65536)
        service.tick(ANSWER_S)
        if not piece:
            break
        data += piece
    assert len(msgpack.unpackb(data)["ranks"][0]["threads"][0][2]) == 2000


def test_many_who_ask_nothing_leave_room_for_others(server):
    service, _, connect = server
    for _ in range(20):
        connect(b"")
    assert len(service.descriptors()) <= 9
    assert msgpack.unpackb(received(connect(msgpack.packb({"question": "job"})))) == {"job": JOB}


@pytest.mark.parametrize("rounds", [2, 1])
def test_status_waits_for_the_ranks_and_at_most_so_long(server, rounds):
    service, _, connect = server
    end = connect(msgpack.packb({"question": "status", "log": True}))
    end.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.recv(1)
    end.settimeout(5.0)
    service._view.rounds = rounds
    service.tick(0.1 if rounds == 2 else 2.5)
    assert msgpack.unpackb(received(end)) == {"job": JOB, "rounds": rounds, "has_log": True}
