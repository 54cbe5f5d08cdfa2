"""Long messages by the C runner: the sender puts parts while the receiver takes them, and Python goes on where either stops."""

import mmap
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import syncvar as sv
from syncvar._native import AdmissionState, CommunicatorState, MessageCounter, message_end
from syncvar._native.constants import EntryForm, RingWord
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.shm.message_ring import (
    FILLED,
    NEWS,
    RING,
    USED,
    RingReader,
    RingTable,
    RingWriter,
    array_code,
)
from tests.support.harness import everywhere

pytestmark = pytest.mark.needs_c_extension

RING_BYTES, IDENTITY, CALL, ABORT_AT = 256 << 10, 1 << 63 | 7, 5, 0
BOX = 4096
SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0)


class Pair:
    """Both ends of a box in memory of its own: each as the C runner has it, and as Python has it."""

    def __init__(self):
        self.memory = mmap.mmap(-1, BOX + 256 + RING_BYTES)
        self.words = memoryview(self.memory).cast("Q")
        self.words[BOX // 8 + RING] = RING_BYTES
        shm = SimpleNamespace(
            words=self.words, memory=self.memory, ground=np.frombuffer(self.memory, np.uint8)
        )
        self.out, self.into = RingWriter(shm, BOX), RingReader(shm, BOX)

    def at(self, word):
        return self.words[BOX // 8 + word]

    def attend(self, number):
        self.words[BOX // 8 + RingWord.ATTENDED] = number

    def abort(self):
        self.words[ABORT_AT] = 1

    def told(self):
        """Wait until the sender has told of a message, and take the entry."""
        while (entry := self.into.first()) is None:
            pass
        self.into.free()
        return entry


class End:
    """The C runner of an end, and what it calls."""

    def __init__(self, pair, x, patience_s=20.0):
        self.added, self.handed = [], []
        self.busy, self.lock = threading.Lock(), threading.Lock()
        self.count = MessageCounter(IDENTITY, CALL)
        self.stream = CommunicatorState()
        self.stream.next_call = CALL
        self.engine = AdmissionState()
        self.engine.is_quiet = True
        self.native = message_end(
            pair.memory,
            (BOX, RING_BYTES, RING_BYTES // 2, 65536, ABORT_AT),
            IDENTITY,
            (400, False),
            int(patience_s * 1e9),
            stream=self.stream,
            count=self.count,
            engine=self.engine,
            context=SimpleNamespace(uneven=None),
            add=[self.added.append],
            go_on=self._go_on,
            busy=self.busy,
            box=self.lock,
            kept={},
            shared=[],
        )
        self.native.remember(x.dtype, x.shape, array_code(1, 7, x.ndim), "told")

    def _go_on(self, array, call, begin, number, done, error):
        assert self.busy.locked()
        assert self.lock.locked()
        assert begin > 0
        self.lock.release()
        self.handed.append((array, call, number, done, error))
        if error is not None:
            raise error
        return "gone on with"

    def is_free(self):
        return not self.busy.locked() and not self.lock.locked()


def _values(nbytes):
    return np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)


def _beside(fn):
    """Start a function in a thread; the result is a list that has what it returns when the thread has ended."""
    made = []
    thread = threading.Thread(target=lambda: made.append(fn()), name="syncvar-test-beside")
    thread.start()
    return thread, made


@pytest.mark.parametrize("nbytes", [65_537, 98_304, 262_144, 1_000_003, 8 << 20])
def test_parts_flow_through_a_ring_that_may_be_shorter_than_the_message(nbytes):
    pair, x = Pair(), _values(nbytes)
    sender, receiver = End(pair, x), End(pair, x)
    for turn in range(4):
        thread, sent = _beside(lambda: sender.native.send(x))
        while not pair.at(NEWS):
            pass
        out = np.zeros_like(x) if turn % 2 else None
        got = receiver.native.receive(out)
        thread.join(20)
        assert sent == [True]
        assert out is None or got is out
        assert (got == x).all()
        assert pair.at(USED) == pair.at(FILLED)
        assert pair.at(RingWord.ATTENDED) == 0
    for end in (sender, receiver):
        assert [(told, call) for told, call, *_ in end.added] == [
            ("told", CALL + turn) for turn in range(4)
        ]
        assert (end.stream.next_call, end.count.next_call) == (CALL + 4, CALL + 4)
        assert end.is_free()
        assert not end.handed


def test_a_sender_whose_receiver_does_not_come_hands_over_what_it_has_told():
    pair, x = Pair(), _values(200_000)
    sender = End(pair, x, patience_s=0.002)
    assert sender.native.send(x)
    assert sender.handed == [(x, CALL, 1, 0, None)]
    assert sender.is_free()
    assert pair.at(RingWord.ATTENDED) == 0  # nobody is to ask for parts on its account
    entry = pair.told()
    assert (entry.form, entry.call, entry.nbytes, entry.number) == (
        EntryForm.BY_ADDRESS,
        CALL,
        x.nbytes,
        1,
    )
    assert entry.place == x.__array_interface__["data"][0]
    assert (sender.stream.next_call, sender.count.next_call) == (CALL + 1, CALL + 1)


def test_a_sender_whose_receiver_stops_hands_over_at_the_byte_it_has_reached():
    pair, x = Pair(), _values(600_000)
    sender = End(pair, x)
    thread, sent = _beside(lambda: sender.native.send(x))
    pair.into.want(pair.told().number)
    got = np.zeros_like(x)
    done = 0
    while done < 100_000:
        entry = pair.into.first()
        if entry is not None:
            got[entry.place : entry.place + entry.nbytes] = pair.into.bytes_at(
                entry.data, entry.nbytes
            )
            done = entry.place + entry.nbytes
            pair.into.free()
    pair.abort()  # so that the sender waits no longer than until the ring is full
    thread.join(20)
    assert sent == [True]
    [(_, call, number, gone, error)] = sender.handed
    assert (call, number, error) == (CALL, 1, None)
    assert done < gone < x.nbytes
    while done < x.nbytes:  # what the engine does
        while (entry := pair.into.first()) is not None:
            got[entry.place : entry.place + entry.nbytes] = pair.into.bytes_at(
                entry.data, entry.nbytes
            )
            done = entry.place + entry.nbytes
            pair.into.free()
        gone += pair.out.part(IDENTITY, CALL, gone, x.data) if gone < x.nbytes else 0
    assert (got == x).all()


def test_a_sender_whose_message_was_read_where_it_lies_is_done():
    pair, x = Pair(), _values(200_000)
    sender = End(pair, x)
    thread, sent = _beside(lambda: sender.native.send(x))
    pair.into.confirm(pair.told().number)
    thread.join(20)
    assert sent == [True]
    assert not sender.handed
    assert len(sender.added) == 1


@pytest.mark.parametrize("wrong", ["nothing more", "a part that is not next", "another message"])
def test_a_receiver_that_finds_no_next_part_hands_over_what_it_has(wrong):
    pair, x = Pair(), _values(600_000)
    receiver = End(pair, x, patience_s=0.02 if wrong == "nothing more" else 20.0)
    pair.attend(1)
    assert (
        pair.out.put_address(array_code(1, 7, 1), IDENTITY, CALL, x.shape, x.nbytes, 4096, 0) == 1
    )
    done = pair.out.part(IDENTITY, CALL, 0, x.data)
    if wrong == "a part that is not next":
        pair.out.part(IDENTITY, CALL, done + 64, x.data)
    elif wrong == "another message":
        pair.out.put(array_code(1, 7, 1), IDENTITY, CALL + 1, (8,), bytes(8), 8)
    out = np.zeros_like(x)
    assert receiver.native.receive(out) == "gone on with"
    assert receiver.handed == [(out, CALL, 1, done, None)]
    assert (out[:done] == x[:done]).all()
    assert not out[done:].any()
    assert receiver.is_free()
    assert pair.out.answer(1) == 1
    assert (pair.into.first() is None) == (wrong == "nothing more")  # what is not its own stays


def test_a_receiver_leaves_a_message_whose_sender_does_not_attend_as_it_is():
    pair, x = Pair(), _values(600_000)
    receiver = End(pair, x)
    pair.out.put_address(array_code(1, 7, 1), IDENTITY, CALL, x.shape, x.nbytes, 4096, 0)
    for attended in (0, 2):
        pair.attend(attended)
        assert receiver.native.receive(None) is None
    assert pair.at(USED) == 0
    assert pair.out.answer(1) == 0
    assert receiver.stream.next_call == CALL
    assert receiver.is_free()


def test_eight_long_messages_are_open_and_the_ninth_is_left_to_python():
    pair, x = Pair(), _values(200_000)
    sender = End(pair, x, patience_s=0.0)
    assert [sender.native.send(x) for _ in range(9)] == [True] * 8 + [False]
    pair.out.cancel(1)
    assert sender.native.send(x)
    assert [number for _, _, number, _, _ in sender.handed] == list(range(1, 10))


def test_what_a_signal_raises_is_handed_over_and_leaves_no_lock():
    pair, x = Pair(), _values(200_000)
    sender, main = End(pair, x), threading.get_ident()

    class StoppedError(Exception):
        pass

    def stop(*_):
        raise StoppedError

    def send_signal():
        while not pair.at(NEWS):
            pass
        signal.pthread_kill(main, signal.SIGUSR1)
        pair.abort()  # so that it does not wait on

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        thread, _ = _beside(send_signal)
        with pytest.raises(StoppedError):
            sender.native.send(x)
        thread.join(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    [(_, call, number, gone, error)] = sender.handed
    assert (call, number, gone) == (CALL, 1, 0)
    assert isinstance(error, StoppedError)
    assert sender.is_free()


def test_the_engine_goes_on_with_what_the_c_runner_has_begun_to_receive():
    x = _values(700_001)

    def fn():
        if sv.rank() == 0:
            for _ in range(2):
                sv.send(x, 1)
            return True
        sv.recv(0)
        line = current().world.streams[0, 1, 0]
        box = RingTable(current()._channels).inbox(0)
        while (entry := box.first()) is None:
            pass
        stream, out = line.stream, np.zeros_like(x)
        assert entry.form == EntryForm.BY_ADDRESS
        stream.busy.acquire()
        line.end.lock.acquire()
        box.free()
        stream.next_call = entry.call + 1
        box.want(entry.number)
        got = line.continue_in_engine(out, entry.call, 1, entry.number, 0, None)
        stream.busy.release()
        return got is out and bool((got == x).all())

    assert everywhere(2, fn, shared=True, config=SOON) == [True, True]
