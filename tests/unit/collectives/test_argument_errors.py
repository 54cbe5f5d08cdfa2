"""What users of other libraries pass and is no array, pair or list: the error names the remedy."""

import ml_dtypes
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


REMEDIES = [
    (np.ones(2, np.clongdouble), "x.astype('complex128')"),
    (np.ones(2, np.longdouble), "x.astype('float64')"),
    (np.ones(2, ml_dtypes.float8_e4m3fn), "x.astype('float16')"),
    (np.array(["a", "b"]), "sv.broadcast_object(x.tolist())"),
    (np.array([b"a"]), "sv.broadcast_object(x.tolist())"),
    (np.array(["a", "b"], object), "sv.broadcast_object(x.tolist())"),
    ("a", "sv.broadcast_object(x)"),
    (["a"], "sv.broadcast_object(x)"),
    (np.array(["2020-01-01"], "M8[D]"), "x.astype('int64')"),
    (np.zeros(2, [("a", "f4")]), "x['name']"),
]


@pytest.mark.parametrize("index", range(len(REMEDIES)))
def test_what_does_not_travel_names_what_does(index):
    wrong, remedy = REMEDIES[index]
    with pytest.raises(sv.ConfigError) as raised:
        sv.all_reduce(wrong)
    assert remedy in str(raised.value)
