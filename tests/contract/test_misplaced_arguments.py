"""What users of PyTorch pass and is no array, no pair or no list: the error names the remedy."""

import numpy as np
import pytest

import syncvar as sv


class Parameter:
    """As one of PyTorch shows itself where it is no variable of sv."""

    __module__ = "torch.nn.parameter"
    dtype = "torch.float32"


def gradients():
    yield np.ones(3)


def test_apply_gradients_of_parameters_names_the_lines_for_a_module():
    sgd = sv.optimizers.SGD(0.1)
    with pytest.raises(sv.ConfigError) as raised:
        sgd.apply_gradients([(np.ones(3), Parameter())])
    text = str(raised.value)
    assert text.startswith("apply_gradients steps variables of sv, and the second of a pair is a t")
    assert 'sv.all_reduce(grads, "mean", out=grads) before opt.step()' in text
    with pytest.raises(sv.ConfigError, match=r"numpy\.ndarray: make it with sv\.Variable\(array"):
        sgd.apply_gradients([(np.ones(3), np.ones(3))])
    with pytest.raises(sv.ConfigError, match="gradient first"):
        sgd.apply_gradients([(sv.Variable(1.0), np.ones(3))])


def test_a_gradient_that_is_none_names_what_to_write():
    for wrong in (None, [np.ones(3), None], {"w": None}):
        with pytest.raises(sv.ConfigError, match=r"not None: write np\.zeros.*requires_grad"):
            sv.all_reduce(wrong)


@pytest.mark.parametrize("make", [gradients, lambda: map(abs, [1]), lambda: {"a": 1.0}.values()])
def test_what_can_only_be_iterated_over_becomes_a_list(make):
    with pytest.raises(sv.ConfigError, match=r"and no array: pass a list of arrays, list\(x\)"):
        sv.all_reduce(make(), "mean")
