"""Training a module of PyTorch by the lines that messages and documents give: `pytest -m tensors`."""

import re

import pytest

import syncvar as sv
from syncvar.core.migration_hints import hint_for
from tests.support.harness import caught, everywhere

pytestmark = pytest.mark.tensors


def make(torch, *, equal=True):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if equal else float(sv.rank()))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(torch, model, scale=1.0):
    model.zero_grad()
    (model(torch.full((4, 3), 1.0 + sv.rank())).sum() * scale).backward()


@pytest.mark.parametrize("name", ["DistributedOptimizer", "DistributedDataParallel"])
def test_the_line_that_an_error_prints_trains_equal_modules(torch, name):
    line = re.search(r"sv\.all_reduce\(grads.*?\)", hint_for("sv", name))[0]

    def fn():
        model, optimizer = make(torch)
        for _ in range(3):
            backward(torch, model)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            exec(line, {"sv": sv, "grads": grads})
            optimizer.step()
        assert sv.check_equal(model)
        assert sv.check_equal(optimizer, "optimizer")

    everywhere(2, fn, shared=True)


def test_uneven_brings_a_module_and_its_optimizer_up_to_date(torch):
    def fn():
        model, optimizer = make(torch)
        address = model.weight.data_ptr()
        with sv.uneven(model, optimizer):
            for _ in range(2 + sv.rank()):
                backward(torch, model)
                grads = [p.grad for p in model.parameters()]
                sv.all_reduce(grads, "mean", out=grads)
                optimizer.step()
        assert model.weight.data_ptr() == address
        assert sv.check_equal(model)
        assert sv.check_equal(optimizer, "optimizer")
        return model.weight.tolist()

    one, other = everywhere(2, fn, shared=True)
    assert one == other


def test_a_module_that_has_drifted_is_named(torch):
    def fn():
        model, _ = make(torch, equal=False)
        error = caught(lambda: sv.check_equal(model, "model"))
        assert "model['weight'] differs between the ranks, first at index (0, 0)" in str(error)
        assert "model['weight'][0, 0] = 1.0" in str(error)

    everywhere(2, fn, shared=True)
