"""Models of PyTorch and Keras in the scope of a strategy. Stand-ins have the names by which syncvar finds them."""

import sys
import types

import pytest

import syncvar as sv
from syncvar.core.errors import UsageError


@pytest.fixture(params=["torch.nn.Module", "keras.layers.Layer", "tf_keras.layers.Layer"])
def base(request, monkeypatch):
    """Return the base class of the models of a library."""
    module, _, name = request.param.rpartition(".")
    kind = type(name, (), {"__module__": module})
    stand_in = types.ModuleType(module)
    setattr(stand_in, name, kind)
    monkeypatch.setitem(sys.modules, module, stand_in)
    return kind


KINDS = [sv.MirroredStrategy, sv.CentralStorageStrategy, sv.ParameterServerStrategy]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_made_in_a_scope_is_refused(base, kind):
    class Net(base):
        pass

    strategy = kind()
    with (
        pytest.raises(
            UsageError, match=r"makes a model of another library \(.*Net\).*outside the block"
        ),
        strategy.scope(),
    ):
        kept = Net()
    assert not sv.has_strategy(), "the scope has ended"
    del kept


def test_other_models_are_none_of_its_business(base):
    class Net(base):
        pass

    before = Net()
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        variable = sv.Variable(1.0)
        with strategy.scope():
            before.rate = 2.0
    after = Net()
    assert variable.numpy() == 1.0
    with strategy.scope():
        pass
    del before, after


def test_the_programs_own_error_comes_first(base):
    kept = []
    with pytest.raises(KeyError), sv.MirroredStrategy().scope():
        kept.append(type("Net", (base,), {})())
        raise KeyError("mine")


def test_without_such_a_library_nothing_is_searched(monkeypatch):
    for module in ("torch.nn", "keras.layers", "tf_keras.layers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("gc.get_objects", lambda: pytest.fail("it searches"))
    with sv.MirroredStrategy().scope():
        pass
