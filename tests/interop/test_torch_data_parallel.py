"""`syncvar.torch.DataParallel` on the ranks of one process: `pytest -m tensors`."""

import doctest
import importlib

import pytest

import syncvar as sv
from tests.support.harness import caught, everywhere

pytestmark = pytest.mark.tensors


def net_of(torch, seed=0):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 30)
            self.second = torch.nn.Linear(30, 2, dtype=torch.float64)
            self.sometimes = torch.nn.Linear(2, 2, dtype=torch.float64)
            self.never = torch.nn.Linear(1, 1)

        def forward(self, x, uses=False):
            y = self.second(self.first(x).relu().double())
            return self.sometimes(y) if uses else y

    torch.manual_seed(seed)
    return Net()


def batches(torch, rank, count):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def mean_gradients(torch, net, parts):
    """Return the mean over ranks of the gradients of one process; `parts` are (batch, uses)."""
    found = []
    for x, uses in parts:
        net.zero_grad()
        net(x, uses).pow(2).sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
    means = []
    for grads in zip(*found, strict=True):
        known = [grad for grad in grads if grad is not None]
        means.append(sum(known) / len(parts) if known else None)
    return means


@pytest.mark.parametrize("nbytes", [1, 300, 25 << 20])
def test_gradients_are_the_mean_for_any_size_of_buckets(torch, nbytes):
    size = 2

    def fn():
        from syncvar.torch import DataParallel

        net = net_of(torch, seed=sv.rank())  # rank 0's values count
        model = DataParallel(net, bucket_bytes=nbytes, first_bucket_bytes=nbytes)
        assert sv.check_equal(net)
        for step in range(3):
            x = batches(torch, sv.rank(), step + 1)[-1]
            uses = [rank == step % 2 for rank in range(size)]
            model.zero_grad()
            model(x, uses[sv.rank()]).pow(2).sum().backward()
            parts = [(batches(torch, r, step + 1)[-1], uses[r]) for r in range(size)]
            twin = net_of(torch)
            twin.load_state_dict(net.state_dict())
            for mine, mean in zip(
                net.parameters(), mean_gradients(torch, twin, parts), strict=True
            ):
                assert (mine.grad is None) == (mean is None)
                assert mean is None or torch.allclose(mine.grad, mean)
        assert net.never.weight.grad is None

    everywhere(size, fn, shared=True)


def test_passes_in_no_sync_are_averaged_by_the_next_one(torch):
    def fn():
        from syncvar.torch import DataParallel

        net = torch.nn.Linear(1, 1, bias=False)
        model = DataParallel(net)
        with model.no_sync():
            model(torch.full((1, 1), 10.0 * sv.rank())).sum().backward()
        assert float(net.weight.grad) == 10.0 * sv.rank()
        model(torch.ones(1, 1)).sum().backward()
        assert float(net.weight.grad) == 6.0
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 1)).sum().backward()
        assert float(net.weight.grad) == 1.0

    everywhere(2, fn, shared=True)


def fail(gradient):
    raise ValueError(gradient.shape)


def test_a_backward_pass_that_raises_leaves_nothing_to_the_next_one(torch):
    def fn():
        from syncvar.torch import DataParallel

        first, second = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        net = torch.nn.Sequential(first, torch.nn.Identity(), second)
        model = DataParallel(net, bucket_bytes=1, first_bucket_bytes=1)
        hook = net[1].register_forward_hook(lambda _net, _inputs, y: y.register_hook(fail) and None)
        with pytest.raises(ValueError, match="Size"):  # the gradient of `second` is on its way
            (model(torch.ones(1, 1)) * 9).sum().backward()
        hook.remove()
        model.zero_grad()
        model(torch.full((1, 1), sv.rank() + 1.0)).sum().backward()
        with torch.no_grad():
            wanted = [1.5 * second.weight, 1.5 * first.weight]
        for layer, gradient in zip((first, second), wanted, strict=True):
            assert torch.allclose(layer.weight.grad, gradient)

    everywhere(2, fn, shared=True)


def test_loops_of_different_lengths(torch):
    def fn():
        from syncvar.torch import DataParallel

        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        model = DataParallel(net, first_bucket_bytes=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sv.uneven(net, optimizer):
            for x in batches(torch, sv.rank(), 1 + 2 * sv.rank()):
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
        assert sv.check_equal(net)

    everywhere(2, fn, shared=True)


def test_the_ranks_continue_while_others_still_compute(torch):
    """A bucket is started in the backward pass, before the other rank has come to its own."""

    def fn():
        from syncvar.torch import DataParallel

        net = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        model = DataParallel(net, bucket_bytes=1, first_bucket_bytes=1)
        seen = []
        net[0].register_full_backward_hook(lambda *_: seen.append(model._started))
        model(torch.ones(2, 20, requires_grad=True)).sum().backward()
        assert seen[0] >= 6

    everywhere(2, fn, shared=True)


def test_modules_that_cannot_be_averaged_are_refused(torch):
    from syncvar.torch import DataParallel

    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    assert "needs a gradient" in str(caught(DataParallel, frozen))
    far = torch.nn.Linear(2, 2, device="meta")
    assert "on meta" in str(caught(DataParallel, far))


def test_a_gradient_that_comes_twice_is_refused(torch):
    from torch.utils.checkpoint import checkpoint

    from syncvar.torch import DataParallel

    net = torch.nn.Linear(2, 2)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(checkpoint(self.net, x, use_reentrant=True))

    model = DataParallel(Twice())
    x = torch.ones(1, 2, requires_grad=True)
    error = caught(lambda: model(x).sum().backward(), of=Exception)
    assert "twice" in str(error)


def test_the_example_in_the_docstring(torch):
    module = importlib.import_module("syncvar.torch.torch_data_parallel")
    assert doctest.testmod(module).failed == 0
