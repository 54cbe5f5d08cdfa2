"""Where the calls of each group stand, when two threads ask at once."""

import gc
import sys
import threading
import weakref

import pytest

from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.unreceived_messages import ENTERED_MAX, STREAMS_MAX, SentCount, pack_counts
from syncvar.runtime import communicator
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
        begin_epochs([group], is_run=True)
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


def test_a_group_that_is_noted_by_another_thread_is_never_missing(often):
    book, over = SequenceTracker({}, CallNumbers()), threading.Event()
    book.note(GROUP, 1)

    def note():
        while not over.is_set():
            book.note(GROUP, 1)

    thread = threading.Thread(target=note)
    thread.start()
    try:
        found = [book.entered() for _ in range(20_000)]
    finally:
        over.set()
        thread.join(20)
    assert all(entered == {GROUP: 0} for entered in found)


class Counter:
    """Counts the calls of a group, which also refers to itself."""

    def __init__(self, book, identity, next_call):
        self.book, self.identity, self.next_call = book, identity, next_call
        self.itself = self
        book.announce(identity, 0)
        book.count_by(self)

    def __del__(self):
        self.book.release(self.identity, self.next_call)


def test_an_old_group_that_is_still_used_is_among_the_groups_used_last():
    book = SequenceTracker({}, CallNumbers())
    world = Counter(book, GROUP, 1)
    assert book.entered() == {GROUP: 0}
    for group in range(100, 100 + ENTERED_MAX):
        book.announce(group, 1)
    world.next_call = 2
    found = book.entered()
    assert len(found) == ENTERED_MAX
    assert found[GROUP] == 1
    assert 100 not in found


def test_a_group_whose_number_nobody_knows_for_a_moment_has_perhaps_entered_all_calls():
    """The collector clears the references to a group before it runs its finalizer."""
    book, found = SequenceTracker({}, CallNumbers()), []
    counter = Counter(book, GROUP, 5)
    look = weakref.ref(counter, lambda _: found.append(book.entered()[GROUP]))
    del counter
    gc.collect()
    assert look() is None
    assert found[0] >= 4
    assert book.entered() == {GROUP: 4}


def test_groups_that_swap_their_contents_have_the_right_numbers_at_each_moment(monkeypatch):
    book, found = SequenceTracker({}, CallNumbers()), []
    groups = [Communicator(group, (0, 1), Recorder(), None) for group in (GROUP, GROUP + 1)]
    for group, next_call in zip(groups, (3, 900), strict=True):
        group.engine, group.channel, group.next_call = Quiet(book), object(), next_call
        book.announce(group.identity, 0)
        book.count_by(group)
    monkeypatch.setattr(communicator, "note_change", lambda: found.append(book.entered()))
    groups[0].become(groups[1])
    assert [*found, book.entered()] == [{GROUP: 2, GROUP + 1: 899}] * 2
    groups[0].next_call += 1
    assert book.entered() == {GROUP: 2, GROUP + 1: 900}
