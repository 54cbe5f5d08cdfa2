"""The objects of a `sv.elastic.State` in worlds of other sizes: moved in place, with the values of the last commit."""

import numpy as np
import pytest

import syncvar as sv
from tests.support.elastic_worlds import Workers
from tests.support.harness import caught


def make_state():
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.arange(4.0), aggregation="MEAN", name="w")
    return sv.elastic.State(
        w=w,
        total=sv.Variable(1.0, aggregation="SUM", name="total"),
        seen=sv.Variable(10, synchronization="ON_READ", aggregation="SUM", name="seen"),
        own=sv.Variable(-1.0, synchronization="NONE", name="own"),
        optimizer=sv.optimizers.Adam(0.1),
        step=0,
    )


def train_step(state):
    def step():
        state.optimizer.apply_gradients([(np.full(4, 1.0 + sv.rank()), state.w)])

    state.w.strategy.run(step)
    state.total.assign_add(1.0)
    state.seen.assign_add(1)  # outside every scope: each replica its own
    state.own.assign(float(state.own) + 1.0)
    state.step += 1


def values_of(state):
    total, seen = float(state.total), int(state.seen.numpy())
    return state.w.numpy().tolist(), total, seen, state.step, state.optimizer.iterations


def train_two(state):
    objects = [id(one) for one in (state.w, state.total, state.seen, state.own, state.optimizer)]
    for _ in range(2):
        train_step(state)
        state.commit()
    train_step(state)  # not committed
    return objects


@pytest.mark.parametrize("shared", [False, True])
def test_sizes_come_and_go(shared):
    workers = Workers(4, make_state)
    expected_total = expected_seen = 0
    identities = {}
    for members in ([0, 1], [1, 0, 2], [2], [3, 2, 0, 1], [3, 1]):
        found = workers.generation_of(members, train_two, shared=shared)
        for worker, objects in zip(members, found, strict=True):
            assert identities.setdefault(worker, objects) == objects
        expected_total += 2 * len(members)
        expected_seen += 2 * len(members)
        results = workers.generation_of(members, values_of, shared=shared)
        _, total, seen, step, iterations = results[0]
        assert all(one == results[0] for one in results)
        assert (total, seen) == (1.0 + expected_total, 10 + expected_seen)
        assert step == iterations == workers.states[members[0]].step
    assert step == 10


def test_copies_of_a_rank_stay_its_own():
    workers = Workers(3, make_state)

    def own(state):
        return float(state.own)

    workers.generation_of([0, 1], train_two)
    assert workers.generation_of([2, 1, 0], own) == [-1.0, 1.0, 1.0]  # a newcomer and two holders


def test_restore_goes_back_to_the_last_commit():
    def train(state):
        for _ in range(3):
            train_step(state)
        state.commit()
        before = values_of(state)
        train_step(state)
        changed = values_of(state)
        state.restore()
        assert changed != before
        assert values_of(state) == before
        train_step(state)
        return values_of(state) == changed

    assert Workers(2, make_state).generation_of([0, 1], train, shared=True) == [True, True]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_variable_outside_the_state_says_what_to_do(is_early):
    strays = {}

    def stray_of(state):
        if id(state) not in strays:
            strays[id(state)] = sv.Variable([2.0, 3.0], aggregation="SUM", name="stray")
        return strays[id(state)]

    def make():
        state = make_state()
        if is_early:  # made before the job is elastic, or in its first generation
            stray_of(state)
        return state

    def write(state):
        for _ in range(4):
            stray_of(state).assign_add([1.0, 1.0])

    def train(state):
        stray = stray_of(state)
        error = caught(stray.assign_add, np.ones(2, np.float32), of=sv.UsageError)
        return str(error), stray.local_value().tolist()

    workers = Workers(2, make)
    if not is_early:
        workers.generation_of([0, 1], write, shared=True)
    for text, value in workers.generation_of([1, 0], train, shared=True):
        assert "sv.elastic.State(…, name=variable)" in text
        assert value == ([2.0, 3.0] if is_early else [10.0, 11.0])
