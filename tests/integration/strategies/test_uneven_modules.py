"""`with sv.uneven(module):` leaves the modules of all ranks equal. What PyTorch itself does is in test_torch_training.py."""

import types

import numpy as np
import pytest

import syncvar as sv
from tests.support.harness import caught, everywhere

LAYOUTS = {"shm": {"shared": True}, "links": {}, "hosts": {"shared": True, "hosts": 2}}


class KerasModel:
    """What is used of a model of Keras."""

    def __init__(self):
        self.arrays = [np.zeros(3), np.zeros((2, 2), np.float32)]
        self.weights = [
            types.SimpleNamespace(path="dense/kernel"),
            types.SimpleNamespace(path="dense/bias"),
        ]

    def get_weights(self):
        return [one.copy() for one in self.arrays]

    def set_weights(self, arrays):
        for one, other in zip(self.arrays, arrays, strict=True):
            one[...] = other


class OptimizerLike:
    """What is used of an optimizer of PyTorch: a state of numbers and lists."""

    def __init__(self):
        self.param_groups = [{"lr": 0.1}]
        self.steps = 0

    def state_dict(self):
        return {"state": {0: {"step": self.steps}}, "param_groups": self.param_groups}

    def load_state_dict(self, state):
        self.steps = state["state"][0]["step"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_are_equal_after_loops_of_different_lengths(layout):
    def fn():
        model, optimizer = KerasModel(), OptimizerLike()
        with sv.uneven(model, optimizer):
            for step in range(2 + 3 * (sv.rank() == 1)):
                mean = sv.all_reduce(np.full(3, float(step + sv.rank())), "mean")
                model.arrays[0] += mean
                optimizer.steps += 1
        sv.check_equal([model, optimizer], "trained")
        return model.arrays[0].tolist(), optimizer.steps

    results = everywhere(3, fn, **LAYOUTS[layout])
    assert results == [([1.0 + 2.0 + 3.0 + 4.0 + 5.0] * 3, 5)] * 3


def test_a_group_has_its_own_modules():
    def fn():
        pair = sv.new_group([0, 2])
        model = KerasModel()
        if pair.is_member:
            with sv.uneven(model, group=pair):
                for _ in range(1 + sv.rank()):
                    model.arrays[0] += sv.all_reduce(np.ones(3), group=pair)
            assert sv.check_equal(model, group=pair)
        return model.arrays[0][0]

    assert everywhere(3, fn, shared=True) == [4.0, 0.0, 4.0]


def test_what_is_no_module_is_refused_before_anything_is_sent():
    def fn():
        for wrong, word in (
            (np.zeros(3), "not array([0., 0., 0.])"),
            (KerasModel, "pass the module itself"),
            (sv.Variable(0.0, name="v"), "leave it out"),
            (sv.new_group([0, 1]), "sv.uneven(group=group)"),
        ):
            error = caught(lambda wrong=wrong: sv.uneven(wrong))
            assert type(error) is sv.ConfigError
            assert word in str(error)
        error = caught(lambda: sv.uneven(*[KerasModel()] * (1 + sv.rank())).__enter__())
        assert "rank 1: stop_at_first=False, 2 modules" in str(error)

    everywhere(2, fn, shared=True)
