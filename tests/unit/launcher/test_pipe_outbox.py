"""What waits for a pipe that is full: nothing is lost, doubled or put out of order, and the end of its reader is told."""

import os

import pytest

from syncvar_launcher.hosts.agent_protocol import PipeOutbox


@pytest.fixture
def pipe():
    source, sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ends = {"source": source, "sink": sink}
    yield ends
    for descriptor in ends.values():
        os.close(descriptor)


def test_a_full_pipe_takes_the_rest_later_and_in_order(pipe):
    box = PipeOutbox(pipe["sink"])
    assert box.descriptors() == []
    parts = [bytes([index]) * 50_000 for index in range(8)]
    for part in parts:
        box.add(part)
    assert box.nbytes == 400_000
    taken = b""
    while True:
        assert box.flush()
        left = box.nbytes
        assert box.descriptors() == ([pipe["sink"]] if left else [])
        taken += os.read(pipe["source"], 1 << 20)
        assert len(taken) == 400_000 - left
        if not left:
            break
    assert taken == b"".join(parts)


def test_where_nobody_reads_any_more_it_says_so_and_forgets(pipe):
    box = PipeOutbox(pipe["sink"])
    os.close(pipe.pop("source"))
    box.add(b"x")
    assert not box.flush()
    assert (box.nbytes, box.descriptors()) == (0, [])
    assert box.flush()
