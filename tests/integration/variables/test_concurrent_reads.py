"""A thread that reads while another thread of the process writes: what it has read is whole, and never changes."""

import contextlib
import signal
import sys
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.testing import run_ranks
from syncvar.variables.grouped_writes import change_copies

KEPT = 20
FAILED = 1 << 60


@pytest.fixture(autouse=True)
def often():
    """Let threads take turns 500 times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def written(write):
    """Write again and again in another thread meanwhile; gives a list whose first element counts the writes."""
    context, is_over, errors, made = current(), threading.Event(), [], [0]

    def work():
        try:
            with use(context):
                while not is_over.is_set():
                    write()
                    made[0] += 1
        except BaseException as error:  # told to the test
            errors.append(error)
            made[0] = FAILED

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield made
    finally:
        is_over.set()
        thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def is_whole(seen):
    return bool((seen == seen.flat[0]).all())


def observed(read, made, at_least=100):
    """Read until writes have been seen; return (reads that were torn, reads that changed later)."""
    torn = changed = reads = 0
    kept, firsts = [], set()
    while (reads < at_least or made[0] < KEPT or len(firsts) < 2) and made[0] < FAILED:
        reads += 1
        seen = read()
        kept.append((seen, seen.copy()))
        torn += not is_whole(kept[-1][1])
        firsts.add(float(kept[-1][1].flat[0]))
        if len(kept) == KEPT:
            changed += sum(not np.array_equal(*pair) for pair in kept)
            kept.clear()
    return torn, changed


def increased(v, one):
    return lambda: v.assign_add(one)


def replaced(v, one):
    number = [0.0]

    def write():
        number[0] += 1.0
        v.assign(one * number[0])

    return write


def scattered(v, one):
    rows = np.arange(len(one))
    return lambda: v.scatter_add(rows, one)


def stepped(v, one):
    return lambda: change_copies([v], lambda arrays: np.add(arrays[0], one, out=arrays[0]))


READINGS = {
    "local_value": lambda v: v.local_value(),
    "asarray": np.asarray,
    "a product": lambda v: v * 2,
    "a part": lambda v: v[1:],
}


@pytest.mark.parametrize("write", [increased, replaced, scattered, stepped])
@pytest.mark.parametrize("mode", ["NONE", "ON_READ", "ON_WRITE"])
def test_in_a_world_of_one(mode, write):
    v = sv.Variable(np.zeros(20_000), synchronization=mode, aggregation="SUM")
    with written(write(v, np.ones(20_000))) as made:
        assert observed(v.read_value, made) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1000, 20_000])
@pytest.mark.parametrize("mode", ["NONE", "ON_READ"])
def test_thousands_of_reads(mode, size):
    v = sv.Variable(np.zeros(size), synchronization=mode, aggregation="SUM")
    with written(increased(v, np.ones(size))) as made:
        assert observed(v.read_value, made, 2000) == (0, 0)


@pytest.mark.parametrize("reading", READINGS)
def test_every_way_of_reading(reading):
    v = sv.Variable(np.zeros(20_000), synchronization="NONE")
    with written(increased(v, np.ones(20_000))) as made:
        assert observed(lambda: READINGS[reading](v), made) == (0, 0)


@pytest.mark.parametrize("mode", ["NONE", "ON_READ"])
def test_where_the_replicas_share_memory(mode):
    def program():
        v = sv.Variable(np.zeros(20_000), synchronization=mode, aggregation="SUM")
        with written(increased(v, np.ones(20_000))) as made:
            return observed(v.local_value, made)

    assert run_ranks(2, program, shared=True) == [(0, 0)] * 2


@pytest.mark.parametrize("is_shared", [False, True])
def test_copies_that_are_summed_on_reading(is_shared):
    def program():
        v = sv.Variable(np.zeros(20_000), synchronization="ON_READ", aggregation="SUM")
        with written(increased(v, np.ones(20_000))):
            return sum(not is_whole(v.read_value()) for _ in range(30))

    assert run_ranks(2, program, shared=is_shared) == [0, 0]


def test_two_threads_that_write_lose_nothing():
    v = sv.Variable(np.zeros(20_000), synchronization="NONE")
    one, rows = np.ones(20_000), np.arange(20_000)
    with written(increased(v, one)) as made:
        for _ in range(50):
            v.scatter_add(rows, one)
            assert is_whole(v.local_value())
    assert v.local_value()[0] == made[0] + 50


def test_a_signal_in_the_middle_of_a_write_may_read():
    v = sv.Variable(np.zeros(20_000), synchronization="NONE")
    one = np.ones(20_000)
    seen = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: seen.append(v.local_value()[::1000].copy()))
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-4)
    try:
        while len(seen) < 20:
            v.assign_add(one)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert all(map(is_whole, seen))


def test_a_change_of_several_arrays_may_read_what_it_changes():
    v = sv.Variable(np.zeros(3), synchronization="NONE")
    seen = []
    change_copies([v], lambda arrays: (seen.append(v.local_value()), arrays[0].fill(1.0)))
    assert seen[0].tolist() == [0.0] * 3
    assert v.numpy().tolist() == [1.0] * 3
