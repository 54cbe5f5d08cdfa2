"""A worker has a commit only if it has adopted it: its own first values and older copies are not the same."""

import itertools

import numpy as np
import pytest

import syncvar as sv
from syncvar.elastic.elastic_state import held_by
from tests.support.elastic_worlds import Workers


def test_a_newcomer_before_the_first_commit_takes_the_values_of_the_others():
    numbers = itertools.count(1.0)

    def make():
        return sv.elastic.State(w=sv.Variable(np.full(2, next(numbers)), aggregation="MEAN"))

    def values(state):
        return state.w.numpy().tolist()

    workers = Workers(4, make)
    assert workers.generation_of([0, 1], values) == [[1.0, 1.0]] * 2
    assert workers.generation_of([0, 2, 1], values) == [[1.0, 1.0]] * 3
    assert workers.generation_of([3, 0], values) == [[1.0, 1.0]] * 2


class Module:
    """An object with a state, as a module of PyTorch is one."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_modules_begin_with_the_values_of_rank_0_and_generators_with_their_own():
    seeds = itertools.count(1)

    def make():
        seed = next(seeds)
        return sv.elastic.State(module=Module(seed), random=np.random.default_rng(seed))

    def values(state):
        return state.module.value, float(state.random.random())

    workers = Workers(3, make)
    drawn = [float(np.random.default_rng(seed).random()) for seed in (1, 2, 3)]
    assert workers.generation_of([1, 0], values) == [(2, drawn[1]), (2, drawn[0])]
    assert [one[0] for one in workers.generation_of([2, 0, 1], values)] == [2, 2, 2]


def make_compressed():
    optimizer = sv.optimizers.SGD(0.1, compress=sv.compressors.TopK(0.25))
    return sv.elastic.State(w=sv.Variable(np.zeros(8), name="w"), optimizer=optimizer)


def train(state):
    gradient = np.arange(8.0) * 10.0 ** sv.rank()  # the errors of compression differ
    state.optimizer.apply_gradients([(gradient, state.w)])
    state.commit()


def errors(state):
    """Return what compression has left out on this rank."""
    parts = held_by(state)._complete.parts()
    assert parts
    return {key: one.array.tolist() for key, one in parts.items()}


def break_off(snapshot):
    raise InterruptedError


@pytest.mark.parametrize("members", [[0, 1], [1, 0], [0, 1, 3]], ids=str)
def test_a_take_over_that_ends_half_way_counts_no_part_twice(members):
    workers, undisturbed = Workers(4, make_compressed), Workers(4, make_compressed)
    workers.generation_of([0, 1, 2], train)
    undisturbed.generation_of([0, 1, 2], train)
    held = held_by(workers.states[1])
    adopt, held._adopt = held._adopt, break_off
    found = workers.generation_of(members, errors, may_fail=True)
    assert isinstance(found[members.index(1)], InterruptedError)
    held._adopt = adopt
    expected = undisturbed.generation_of(members, errors)
    assert workers.generation_of(members, errors) == expected
