"""Where the launcher writes (pipes, terminals, sockets, files) while readers are slow or gone, and its clock."""

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest

from syncvar_launcher.io import standard_streams
from syncvar_launcher.io.standard_streams import QUEUE_NBYTES, NonblockingWriter, Outlets

INFINITE = float("inf")


@contextlib.contextmanager
def ends(kind, folder):
    """Give a descriptor to read and one to write, closed at the end."""
    made = []
    if kind == "socket":
        pair = socket.socketpair()
        made = [one.detach() for one in pair]
    elif kind == "terminal":
        made = list(os.openpty())
    else:
        made = list(os.pipe())
    try:
        yield made
    finally:
        for descriptor in made:
            with contextlib.suppress(OSError):
                os.close(descriptor)


@contextlib.contextmanager
def opened(descriptor):
    one = NonblockingWriter(descriptor)
    try:
        yield one
    finally:
        one.close()


def read_all(frame_sink, descriptor, count):
    """Read so many bytes, as a slow reader and a loop that polls would."""
    data = b""
    while len(data) < count:
        ready = select.select(
            [descriptor], [frame_sink.descriptor] if frame_sink.descriptor >= 0 else [], [], 10
        )
        assert any(ready), f"nothing moves after {len(data)} of {count} bytes"
        if ready[1]:
            frame_sink.flush()
        if ready[0]:
            data += os.read(descriptor, 1000)
    return data


def refuse(_descriptor):
    return -1


@pytest.mark.parametrize("kind", ["pipe", "pipe of another user", "terminal", "socket"])
def test_a_reader_that_does_not_read_never_blocks_and_loses_nothing(kind, tmp_path, monkeypatch):
    if "another" in kind:
        monkeypatch.setattr(standard_streams, "_reopen", refuse)
    text = b"".join(b"%07d\n" % number for number in range(QUEUE_NBYTES // 8))
    with ends(kind, tmp_path) as (reader, writer), opened(writer) as one:
        assert not one.is_full
        assert one.write(text) == len(text)
        assert one.write(text) == len(text)
        assert one.is_full
        assert one.descriptor >= 0
        assert os.get_blocking(writer), "the open file that others share stays as it is"
        assert not select.select([], [one.descriptor], [], 0)[1], (
            "it is polled without end otherwise"
        )
        whole = text * 2
        if kind == "terminal":  # each line feed becomes two bytes
            whole = whole.replace(b"\n", b"\r\n")
        assert read_all(one, reader, len(whole)) == whole
        assert one.descriptor == -1
        assert not one.is_full
        assert one.written == 2 * len(text)


def test_a_file_takes_all_at_once(tmp_path):
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"before ")
    with opened(file) as one:
        one.write(b"x" * (2 * QUEUE_NBYTES))
        assert one.descriptor == -1
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"before " + b"x" * (2 * QUEUE_NBYTES), (
        "one position in it, ours and the shell's"
    )


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_reader_that_is_gone_is_told(kind, tmp_path):
    with ends(kind, tmp_path) as (reader, writer), opened(writer) as one:
        one.write(b"x" * (2 * QUEUE_NBYTES))
        os.close(reader)
        with pytest.raises(BrokenPipeError) as raised:
            one.flush()
        assert raised.value.errno == errno.EPIPE
        assert one.descriptor == -1


def test_a_pipe_without_reader_from_the_start_is_told(tmp_path):
    with ends("pipe", tmp_path) as (reader, writer):
        os.close(reader)
        with opened(writer) as one, pytest.raises(BrokenPipeError):
            one.write(b"x")


def test_patience_counts_from_its_begin_and_anew_with_each_byte_taken(tmp_path):
    with ends("pipe", tmp_path) as (reader, writer), opened(writer) as one:
        assert one.give_up_after(1.0, 0.0) == INFINITE, "nothing waits"
        one.write(b"x" * QUEUE_NBYTES)
        assert one.give_up_after(INFINITE, 5.0) == INFINITE
        assert one.give_up_after(1.0, 1000.0) == 1001.0
        assert one.give_up_after(1.0, 1000.9) == 1001.0
        os.read(reader, 1 << 16)
        one.flush()
        assert one.give_up_after(1.0, 1000.95) == 1001.95
        waits = QUEUE_NBYTES - one.written
        assert one.give_up_after(1.0, 1001.95) == INFINITE
        assert (one.dropped, one.descriptor, one.is_full) == (waits, -1, False)
        one.write(b"more")
        assert one.dropped == waits + 4
        os.read(reader, 1 << 16)
        assert one.renew() == waits + 4
        one.write(b"again")
        assert os.read(reader, 100) == b"again"


def test_the_same_pipe_or_terminal_for_both_keeps_the_order(tmp_path):
    for kind in ("pipe", "terminal", "socket"):
        with (
            ends(kind, tmp_path) as (reader, writer),
            contextlib.closing(Outlets(writer, writer)) as both,
        ):
            assert both.out is both.err
            both.out.write(b"a" * QUEUE_NBYTES)
            both.err.write(b"b" * QUEUE_NBYTES)
            assert both.is_full("out")
            assert both.is_full("err")
            assert not both.has_room()
            assert len(both.descriptors()) == 1
            assert read_all(both.out, reader, 2 * QUEUE_NBYTES).strip(b"a").strip(b"b") == b""
            assert both.are_empty()


def test_files_and_different_pipes_have_queues_of_their_own(tmp_path):
    first, second = (
        os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2)
    )
    with contextlib.closing(Outlets(first, second)) as both:
        both.out.write(b"a")
        both.err.write(b"b")
    os.close(first)
    os.close(second)
    assert (tmp_path / "file").read_bytes() == b"ab"
    with (
        ends("pipe", tmp_path) as (_, full),
        ends("pipe", tmp_path) as (reader, free),
        contextlib.closing(Outlets(full, free)) as both,
    ):
        both.out.write(b"a" * (2 * QUEUE_NBYTES))
        both.err.write(b"b")
        assert os.read(reader, 10) == b"b"
        assert (both.is_full("out"), both.is_full("err")) == (True, False)


def test_the_terminal_that_controls_us_is_known_by_its_number(tmp_path):
    """A child with a terminal of its own says what it finds."""
    pid, terminal = os.forkpty()
    if pid == 0:
        try:
            is_right = os.fstat(0).st_rdev == standard_streams._controlling_terminal()
            os._exit(0 if is_right and stat.S_ISCHR(os.fstat(0).st_mode) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


CLOCK = """
import os, time
from syncvar_launcher.io.standard_streams import SignalWatch

with SignalWatch(os.environ) as watch:
    began, ours, begun = time.monotonic(), watch.now(), time.monotonic()
    print("ready", flush=True)
    while not watch.is_to_stop:
        time.sleep(0.005)
    lasted = watch.stop()
    assert not watch.is_to_stop
    assert not watch.pending
    print(time.monotonic() - begun, watch.now() - ours, time.monotonic() - began, lasted)
"""


def test_the_clock_stands_while_the_launcher_is_stopped():
    process = subprocess.Popen(
        [sys.executable, "-c", CLOCK], stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTSTP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    least, ours, most, lasted = map(float, out.split())
    assert lasted >= 0.49
    assert least - lasted - 0.001 < ours < most - lasted + 0.001
