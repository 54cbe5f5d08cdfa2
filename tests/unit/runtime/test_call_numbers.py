"""Where the calls of each group stand, when two threads ask at once."""

import gc
import sys
import threading

import pytest

from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.unreceived_messages import STREAMS_MAX, SentCount, pack_counts
from syncvar.runtime.communicator import Communicator, begin_epochs
from syncvar.runtime.recorder import CallNumbers, Recorder
from syncvar.runtime.sequence import EpochRange, SequenceTracker

GROUP = 7


@pytest.fixture
def often():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Quiet:
    """An engine that knows of no verdict."""

    is_quiet = True

    def __init__(self, book):
        self.book = book

    def check_ended_blocks(self, groups):
        """Look at nothing."""


def test_blocks_end_on_one_thread_while_another_looks_for_a_call(often):
    book, wrong, over = SequenceTracker({}, CallNumbers()), [], threading.Event()

    def look():
        try:
            while not over.is_set():
                book.skipped_block(GROUP, -1, ())
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    group = Communicator(GROUP, (0, 1), Recorder(), None)
    group.engine = Quiet(book)
    for _ in range(1_500):
        begin_epochs([group])
        group.next_call += 1
    over.set()
    thread.join(20)
    assert not thread.is_alive()
    assert not wrong, wrong


def test_what_a_rank_that_leaves_tells_is_always_short_enough():
    """The last block of each group before older ones."""
    book = SequenceTracker({}, CallNumbers())
    for group in range(2_000):
        for block in range(20):
            book.blocks(group).append(EpochRange((0, 1), block, block + 1))
    skipped = book.skipped()
    counts = pack_counts(
        SentCount(2**63 + tag, 1, 2**31 - 1, 2**40, "x" * 200) for tag in range(STREAMS_MAX)
    )
    message = parse_message(
        pack_message("leave", entered=book.entered(), skipped=skipped, **counts)
    )
    assert (message["skipped"], len(message["sent"])) == (skipped, 4 * STREAMS_MAX)
    assert (
        len({skipped[place] for place in range(0, len(skipped), 3)}) == len(skipped) // 3 == 1_300
    )
    assert set(skipped[1::3]) == {19}
    few = SequenceTracker({}, CallNumbers())
    few.blocks(7).extend([EpochRange((0, 1), 3, 9), EpochRange((0, 1), 12, 19)])
    assert few.skipped() == [7, 3, 9, 7, 12, 19]


def test_the_garbage_collector_may_note_a_number_while_the_numbers_are_told():
    """A group's finalizer notes where it stood, whenever the collector runs."""
    book, ended = SequenceTracker({}, CallNumbers()), []
    for group in range(2_000):
        book.note(group, 1)

    class Group:
        def __init__(self):
            self.itself = self

        def __del__(self):
            ended.append(self)
            book.note(0, 2)

    before = gc.get_threshold()
    gc.collect()
    try:
        gc.set_threshold(700)
        for _ in range(50):
            Group()
            assert len(book.entered()) == 2_000
    finally:
        gc.set_threshold(*before)
        ended.clear()
    gc.collect()
