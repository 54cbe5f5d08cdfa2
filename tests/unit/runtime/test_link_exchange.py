"""Where payloads arrive that are under way: in the arrays of the call, while it waits for them."""

import numpy as np
import pytest

from syncvar.algorithms.compile_schedule import (
    INCOMING_RIGHT,
    OVERWRITE,
    Incoming,
    LinkRound,
    LinkSchedule,
)
from syncvar.protocol.frame import FrameType, Header
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.link_exchange import LinkExchange, ScratchPool
from syncvar.runtime.recorder import Recorder, RecordIdentity
from syncvar.runtime.request import Request, RequestState
from syncvar.transports.base import Frame

SEGMENT_NBYTES = 1 << 20
COUNT = 1 << 19  # elements of 4 bytes, in 16 frames of 128 KiB
PER_FRAME = 32 << 10


class Sink:
    rank, generation, segment_bytes = 0, 0, SEGMENT_NBYTES

    def __init__(self):
        self.scratch = ScratchPool()
        self.used = 0

    def post(self, links, peer, header, payload):
        raise AssertionError("the schedule sends nothing")

    def consumed(self, peer, group, nbytes):
        self.used += nbytes


def waiting_call(mode, work, **fields):
    """Return a call that waits for one chunk of rank 1, its frames, and its request."""
    sink = Sink()
    info = CallInfo(CollectiveSpec("test"), 3, (0, 1))
    entry = Recorder(RecordIdentity(0, 2)).begin(info, 7)
    links = LinkExchange(entry, sink)
    one = LinkRound((), {1: Incoming(mode, 0, 0, COUNT, 0)}, ())
    steps = links.run(LinkSchedule((one,), COUNT, 0, "test"), work, np.add)
    return sink, links, Request(entry, steps, links=links)


def header(segment, nbytes=4 * PER_FRAME, source=1, number=0):
    own = {"round": number, "segment": segment, "nbytes": nbytes}
    return Header(FrameType.DATA, source, 0, 3, 7, **own)


def test_a_payload_that_overwrites_arrives_in_its_array():
    work = np.zeros(COUNT, np.float32)
    sink, links, request = waiting_call(OVERWRITE, work)
    assert request.place(header(0)) is None, "it has not begun"
    request.advance()
    for segment in range(16):
        place = request.place(header(segment))
        place.memory[:] = np.full(PER_FRAME, segment, np.float32).view(np.uint8).data
        assert work[segment * PER_FRAME] == segment
        assert not request.is_over
        request.accept(Frame(header(segment), place.memory))
    assert request.state == RequestState.DONE
    assert (work == np.repeat(np.arange(16, dtype=np.float32), PER_FRAME)).all()
    assert sink.used == 4 * COUNT
    assert links.place(header(0)) is None, "nothing is missing"


def test_a_payload_that_is_combined_arrives_in_memory_that_is_used_again():
    work = np.ones(COUNT, np.float32)
    _, _, request = waiting_call(INCOMING_RIGHT, work)
    request.advance()
    addresses = set()
    for segment in range(16):
        place = request.place(header(segment))
        addresses.add(np.frombuffer(place.memory, np.uint8).ctypes.data)
        place.memory[:] = np.full(PER_FRAME, segment, np.float32).view(np.uint8).data
        request.accept(Frame(header(segment), place.memory))
    assert (work == np.repeat(np.arange(1, 17, dtype=np.float32), PER_FRAME)).all()
    assert len(addresses) == 1


def test_a_payload_that_has_no_place_is_copied():
    work = np.zeros(COUNT, np.float32)
    _, _, request = waiting_call(OVERWRITE, work)
    request.advance()
    assert request.place(header(0)) is not None
    own = np.full(PER_FRAME, 5, np.float32).view(np.uint8).data
    request.accept(Frame(header(0), own))  # the transport has used memory of its own
    assert work[0] == work[PER_FRAME - 1] == 5


@pytest.mark.parametrize(
    "wrong",
    [header(0, 8), header(16), header(1 << 31), header(0, source=2), header(0, number=1)],
    ids=["length", "behind", "far", "source", "round"],
)
def test_a_payload_that_is_not_expected_has_no_place(wrong):
    _, _, request = waiting_call(OVERWRITE, np.zeros(COUNT, np.float32))
    request.advance()
    assert request.place(wrong) is None


@pytest.mark.parametrize("mode", [OVERWRITE, INCOMING_RIGHT])
def test_a_call_that_fails_closes_its_places(mode):
    _, links, request = waiting_call(mode, np.zeros(COUNT, np.float32))
    request.advance()
    place = request.place(header(0))
    assert place.is_open
    request.fail(RuntimeError("over"))
    assert not place.is_open
    assert request.place(header(1)) is None
    assert not links.place(header(1)).is_open, "another thread has asked for it meanwhile"
