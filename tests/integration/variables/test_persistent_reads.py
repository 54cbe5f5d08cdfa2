"""A prepared read of a replica's own copy does what the table says, with either runner, and leaves to it what it refuses."""

import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.core.settings import RuntimeConfig
from syncvar.variables.variable_state import plain_look
from tests.support.harness import caught, everywhere

ON_WRITE, ON_READ, NONE = (
    sv.VariableSynchronization.ON_WRITE,
    sv.VariableSynchronization.ON_READ,
    sv.VariableSynchronization.NONE,
)
SUM = sv.VariableAggregation.SUM


@pytest.fixture(params=["python", pytest.param("c", marks=pytest.mark.needs_c_extension)])
def ranks(request):
    """Run a function on two ranks with one of the runners."""
    config = RuntimeConfig(
        collective_timeout_s=60.0, shutdown_timeout_s=1.0, call_runner=request.param
    )

    def run(fn):
        return everywhere(2, fn, shared=True, config=config)

    run.runner = request.param
    return run


def made(value=(1.0, 2.0), **more):
    return sv.Variable(np.array(value), aggregation=SUM, **{"synchronization": ON_WRITE, **more})


def test_it_is_there_where_reading_never_sends_anything(ranks):
    def fn():
        kinds = {
            "on_write": made(),
            "auto": made(synchronization="AUTO"),
            "none": made(synchronization=NONE),
        }
        return {name: type(v._state.look).__name__ for name, v in kinds.items()}, made(
            synchronization=ON_READ
        )._state.look is plain_look

    runner = "LocalLook" if ranks.runner == "python" else "Look"
    assert ranks(fn) == [(dict.fromkeys(("on_write", "auto", "none"), runner), True)] * 2


def test_a_copy_never_changes_and_a_view_is_of_the_memory(ranks):
    """Also where `copy` is something else that is true or false."""

    def fn():
        found = []
        for yes, no in ((True, False), (1, 0), (np.True_, np.False_), ("copy", "")):
            v = made()
            kept, view, before = v.read_value(yes), v.read_value(copy=no), v._state.storage.moves
            found.append(
                (
                    kept is view,
                    np.shares_memory(kept, view),
                    kept.flags.writeable,
                    view.flags.writeable,
                )
            )
            v.assign_add(np.ones(2))
            found.append(
                (kept.tolist(), v.read_value(no).tolist(), (v._state.storage.moves - before) // 2)
            )
            view = v.read_value(no)
            del kept
            v.assign_add(np.ones(2))
            found.append((view.tolist(), (v._state.storage.moves - before) // 2))
        return found

    expected = [(False, True, False, False), ([1.0, 2.0], [3.0, 4.0], 1), ([5.0, 6.0], 1)]
    assert ranks(fn) == [expected * 4] * 2


def test_it_is_refused_under_another_strategy(ranks):
    """But of the default strategy's variables; and each thread has places of its own."""

    def fn():
        mine, other = sv.MirroredStrategy(), sv.MirroredStrategy()
        with mine.scope():
            v = made()
            found = [v.numpy().tolist()]
        w = made()
        context, told = current(), []

        def elsewhere():
            with use(context):
                told.append(v.read_value().tolist())

        with other.scope():
            found += [
                type(caught(v.read_value)),
                type(caught(lambda: v.read_value(copy=False))),
                w.numpy().tolist(),
            ]
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            found.append(type(caught(v.read_value)))
        found += [
            other.run(lambda: type(caught(v.read_value))),
            mine.run(lambda: v.numpy().tolist()),
            v.numpy().tolist(),
        ]
        return [*found, *told]

    error, value = sv.UsageError, [1.0, 2.0]
    assert ranks(fn) == [[value, error, error, value, error, error, value, value, value]] * 2


def test_reads_are_counted_also_those_that_come_after_an_increment(ranks):
    def fn():
        v = made(synchronization="AUTO")
        for turn in range(5):
            v.assign_add(np.ones(2))
            for _ in range(turn % 3):
                v.read_value(copy=bool(turn))
        numbers = v.explain().numbers
        return [numbers[name] for name in ("reads", "increments", "turns", "writes")]

    assert ranks(fn) == [[4, 5, 3, 5]] * 2


def test_beside_a_write_it_gives_a_copy(ranks):
    def fn():
        v = made()
        found = []
        for name, value in (("is_being_written", True), ("changes", 1)):
            before = getattr(v._state.storage, name)
            setattr(v._state.storage, name, value)
            seen = v.read_value()
            setattr(v._state.storage, name, before)
            found.append(
                (
                    seen.tolist(),
                    np.shares_memory(seen, v._state.storage.array),
                    seen.flags.writeable,
                )
            )
        return found

    assert ranks(fn) == [[([1.0, 2.0], False, False)] * 2] * 2


def test_what_waits_is_sent_by_a_read(ranks):
    def fn():
        v = made(synchronization="AUTO")
        v.pin("deferred")
        v.assign_add(np.ones(2))
        waits = v._state.look is plain_look
        value = v.read_value().tolist()
        v.pin("eager")
        return waits, value, v._state.look is plain_look, v.numpy().tolist()

    assert ranks(fn) == [(True, [3.0, 4.0], False, [3.0, 4.0])] * 2
