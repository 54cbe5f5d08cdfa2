"""What tests of worlds in one process share: ranks of which none may fail, a caught error, and which cases run by default."""

import itertools
import threading

import pytest
import zmq

import syncvar as sv
from syncvar.core.errors import SyncvarError
from syncvar.testing import run_ranks


def everywhere(size, fn, *, timeout_s=60, **world):
    """Run ranks of which none may fail; return their results. Of several errors the cause is raised, not a consequence."""
    results = run_ranks(size, fn, timeout_s=timeout_s, **world)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        consequences = sv.TransportError, threading.BrokenBarrierError
        raise min(errors, key=lambda error: isinstance(error, consequences))
    return results


def caught(fn, *arguments, of=SyncvarError, **keywords):
    """Call and return the error; None where there was none. One that is not of this kind is raised."""
    try:
        fn(*arguments, **keywords)
    except of as error:
        return error
    return None


def covering(*axes, strength=2):
    """Return all combinations of the axes' values; those that are not needed to see the values together are slow tests.

    Args:
        axes: The values of each argument.
        strength: Of each so many axes every combination of values is in some case of the default run: 2 is every pair,
            1 every value.
    """
    every = list(itertools.product(*axes))

    def seen_in(case):
        return {
            tuple((place, axes[place].index(case[place])) for place in places)
            for places in itertools.combinations(range(len(axes)), strength)
        }

    wanted = set().union(*map(seen_in, every))
    chosen = set()
    while wanted:
        best = max(range(len(every)), key=lambda number: len(seen_in(every[number]) & wanted))
        chosen.add(best)
        wanted -= seen_in(every[best])
    return [
        case if number in chosen else pytest.param(*case, marks=pytest.mark.slow)
        for number, case in enumerate(every)
    ]


def start_the_collector_of_pyzmq():
    """Borrow memory once: pyzmq keeps a thread and sockets for that, for good, which no test leaks."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as one,
        context.socket(zmq.PAIR) as other,
    ):
        one.bind("inproc://borrow")
        other.connect("inproc://borrow")
        one.send(bytes(1 << 20), copy=False, track=True)
        other.recv()
