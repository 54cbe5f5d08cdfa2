"""Reading ahead in a thread: what is read, how far, exceptions, and that the thread ends whatever happens."""

import gc
import threading
import time

import numpy as np
import pytest

from syncvar.data import from_arrays, from_generator


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "syncvar-prefetch"]


def settled(ask, limit_s=60.0):
    until = time.monotonic() + limit_s
    while not ask():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_the_same_elements_in_the_same_order():
    rows = from_arrays(np.arange(50), batch_size=7, shuffle=True, seed=2)
    for position in (0, 3, 8, 20):
        plain = [batch.tolist() for batch in rows.at(1, position)]
        assert [batch.tolist() for batch in rows.prefetch(3).at(1, position)] == plain
    assert len(rows.prefetch(1)) == len(rows)
    assert not threads()


@pytest.mark.parametrize("size", [1, 4])
def test_it_reads_ahead_and_not_further(size):
    made = []
    dataset = from_generator(lambda: range(100)).map(lambda x: made.append(x) or x).prefetch(size)
    iterator = iter(dataset)
    assert not made, "nothing is read before somebody asks"
    assert next(iterator) == 0
    settled(lambda: len(made) == size + 2)  # one taken, `size` waiting, one in the making
    time.sleep(0.02)
    assert len(made) == size + 2
    assert next(iterator) == 1
    settled(lambda: len(made) == size + 3)
    iterator.close()
    assert not threads()


@pytest.mark.parametrize("error", [ValueError("broken file"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_reaches_the_consumer_at_its_place(error):
    def elements():
        yield 1
        yield 2
        raise error

    iterator = iter(from_generator(elements).prefetch(5))
    assert [next(iterator), next(iterator)] == [1, 2]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    assert any(entry.name == "elements" for entry in caught.traceback), (
        "it shows where it was raised"
    )
    assert not threads()
    assert next(iterator, "over") == "over"


@pytest.mark.parametrize(
    "how", ["del", "close", "break", "exception", "end", "never begun", "load"]
)
def test_the_thread_ends_with_the_iterator(how):
    closed = []

    def elements():
        try:
            yield from range(10**6)
        finally:
            closed.append(True)

    dataset = from_generator(elements).prefetch(3).map(lambda x: x).prefetch(2)
    iterator = iter(dataset if how != "end" else from_generator(lambda: range(4)).prefetch(2))
    if how != "never begun":
        assert next(iterator) == 0
        assert threads()
    if how == "close":
        iterator.close()
    elif how == "break":
        for _ in iterator:
            break
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            for _ in iterator:
                raise ZeroDivisionError
    elif how == "end":
        assert list(iterator) == [1, 2, 3]
        assert not threads()
    elif how == "load":
        iterator.load_state_dict({"epoch": 0, "position": 5, "seed": ""})
        assert not threads()
        assert next(iterator) == 5
    del iterator
    gc.collect()
    assert not threads()
    if how not in ("end", "never begun"):
        assert closed == [True] * (2 if how == "load" else 1), "the user's generator is closed too"


def test_a_slow_element_is_waited_for():
    gate = threading.Event()

    def elements():
        yield 1
        gate.wait(10)
        yield 2

    iterator = iter(from_generator(elements).prefetch(2))
    assert next(iterator) == 1
    threading.Timer(0.05, gate.set).start()
    assert list(iterator) == [2]
