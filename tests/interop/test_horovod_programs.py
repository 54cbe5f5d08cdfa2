"""Programs written for Horovod, over syncvar, in real processes: `pytest -m tensors`."""

import re
import subprocess
import sys

import pytest

NEEDS_TORCH = pytest.mark.tensors
pytestmark = pytest.mark.timeout(900)
ENV = {"OMP_NUM_THREADS": "1"}

OPERATIONS = """
import torch
import syncvar.compat.horovod.torch as hvd

def raises(kind, text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"{function} did not raise {kind}")

raises(ValueError, "has not been initialized", hvd.rank)
hvd.init()
rank, size = hvd.rank(), hvd.size()
ranks = range(size)
assert hvd.is_initialized() and hvd.local_rank() == rank and hvd.local_size() == size
assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
x = torch.arange(6.0).reshape(2, 3) + rank
total = sum(torch.arange(6.0).reshape(2, 3) + one for one in ranks)

# The default is the average; integers are truncated.
assert torch.equal(hvd.allreduce(x), total / size)
assert torch.equal(hvd.allreduce(x, op=hvd.Sum, name="x"), total)
assert torch.equal(hvd.allreduce(x, average=False), total)
assert torch.equal(hvd.allreduce(x, op=hvd.Max), torch.arange(6.0).reshape(2, 3) + size - 1)
assert torch.equal(hvd.allreduce(x, op=hvd.Min), torch.arange(6.0).reshape(2, 3))
assert hvd.allreduce(torch.tensor(2), op=hvd.Product) == 2**size
assert hvd.allreduce(torch.tensor(rank)) == (size - 1) // 2
assert hvd.allreduce(torch.tensor(3), op=hvd.Sum, prescale_factor=0.5) == size
assert torch.allclose(hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0), total * 6 / size)
half = hvd.allreduce(x, compression=hvd.Compression.fp16)
assert half.dtype == torch.float32 and torch.allclose(half, total / size)
y = x.clone()
assert hvd.allreduce_(y, op=hvd.Sum) is y and torch.equal(y, total)
raises(NotImplementedError, "no Adasum", hvd.allreduce, x, op=hvd.Adasum)
raises(ValueError, "average is its old form", hvd.allreduce, x, True, op=hvd.Sum)

# Asynchronous operations run in the order of submission.
handles = [hvd.allreduce_async(x * one, name=f"number {one}", op=hvd.Sum) for one in range(5)]
raises(ValueError, "'again' runs already", lambda: [hvd.allreduce_async(x, name="again") for _ in range(2)])
for one, handle in reversed(list(enumerate(handles))):
    assert torch.equal(hvd.synchronize(handle), total * one)
    assert hvd.poll(handle)
hvd.barrier()
group = hvd.grouped_allreduce([x, x[0]], op=hvd.Sum, name="group")
assert torch.equal(group[0], total) and torch.equal(group[1], total[0])
copies = [x.clone(), x[0].clone()]
assert hvd.grouped_allreduce_(copies)[0] is copies[0] and torch.equal(copies[1], total[0] / size)
handle = hvd.grouped_allreduce_async_(copies, op=hvd.Max)
assert torch.equal(hvd.synchronize(handle)[0], total / size)

rows = torch.full((rank + 1, 2), float(rank))
wanted = torch.cat([torch.full((one + 1, 2), float(one)) for one in ranks])
assert torch.equal(hvd.allgather(rows), wanted)
assert torch.equal(hvd.synchronize(hvd.allgather_async(rows, name="rows")), wanted)
assert torch.equal(hvd.grouped_allgather([rows, x[0]])[0], wanted)
assert torch.equal(hvd.broadcast(x, 1), torch.arange(6.0).reshape(2, 3) + 1)
y = x.clone()
assert hvd.synchronize(hvd.broadcast_async_(y, 0, name="y")) is y and y[0, 0] == 0
raises(ValueError, "root rank 7", hvd.broadcast, x, 7)
pieces = torch.arange(2.0 * size)
assert torch.equal(hvd.reducescatter(pieces, op=hvd.Sum), size * pieces[2 * rank : 2 * rank + 2])
assert torch.equal(hvd.alltoall(pieces), torch.cat([pieces[2 * rank : 2 * rank + 2]] * size))
splits = torch.tensor([1, *[0] * (size - 2), 2], dtype=torch.int32)
parts, lengths = hvd.alltoall(pieces[:3], splits=splits)
assert lengths.tolist() == [int(splits[rank])] * size
assert torch.equal(parts, torch.cat([pieces[:1] if rank == 0 else pieces[1:3]] * size if rank in (0, size - 1) else [pieces[:0]]))
raises(ValueError, "cannot be split equally", hvd.alltoall, torch.zeros(2 * size + 1))
raises(ValueError, "do not fit", hvd.alltoall, pieces[:1], splits=[5] * size)

# Gradients flow as in Horovod.
for function, wanted in (
    (lambda x: hvd.allreduce(x, op=hvd.Sum), torch.full((2, 3), float(size))),
    (lambda x: hvd.allreduce(x), torch.ones(2, 3)),
    (lambda x: hvd.allgather(x), torch.ones(2, 3)),
    (lambda x: hvd.broadcast(x, 0), torch.full((2, 3), float(rank == 0))),
):
    z = x.clone().requires_grad_()
    function(z).sum().backward()
    assert torch.equal(z.grad, wanted), (z.grad, wanted)

# Objects are plain data, with tensors in them.
assert hvd.broadcast_object({"lr": 0.1, "t": x} if rank == 0 else None)["t"][0, 0] == 0
assert hvd.allgather_object(("rank", rank)) == [("rank", one) for one in ranks]

# Process sets.
members = list(range(1, size))
first = hvd.add_process_set(members)
assert (first.size(), first.included()) == (size - 1, rank > 0) and first.process_set_id == 1
raises(ValueError, "already", hvd.add_process_set, hvd.ProcessSet(members[::-1]))
if first.included():
    assert hvd.allreduce(torch.tensor(1.0 + rank), op=hvd.Sum, process_set=first) == sum(members) + size - 1
    assert hvd.broadcast(torch.tensor(rank), 1, process_set=first) == 1
    assert first.rank() == rank - 1
else:
    raises(ValueError, "does not belong", hvd.allreduce, x, process_set=first)
assert hvd.remove_process_set(first) and not hvd.remove_process_set(first)

# Ranks that differ get an error with both names, and may go on.
raises(hvd.HorovodInternalError, "bias", hvd.allreduce, x, name=("bias" if rank else "weight"))
raises(hvd.HorovodInternalError, "rank 1", hvd.allreduce, x if rank else x[0])
assert hvd.allreduce(torch.ones(1)) == 1

# Join: rank 0 has one batch, rank r has r + 1.
for _ in range(2):
    for step in range(rank + 1):
        mean = hvd.allreduce(torch.ones(3), name="loss")
        assert torch.allclose(mean, torch.full((3,), (size - step) / size)), (rank, step, mean)
    assert hvd.join() == size - 1
if rank == 0:
    hvd.join()
else:
    raises(hvd.HorovodInternalError, "hvd.join", hvd.allgather, x)
    raises(hvd.HorovodInternalError, "hvd.join", hvd.allgather_object, 1)
    hvd.join()
if rank == 0:
    hvd.join()
else:
    raises(hvd.HorovodInternalError, "hvd.join", hvd.allgather_object, 1)
    hvd.join()
hvd.shutdown()
assert not hvd.is_initialized()
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == size
hvd.shutdown()
print("all operations are right")
"""

OPTIMIZER = """
import itertools
import torch
from torch import nn
import syncvar.compat.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(rank)
batch = torch.randn(8 * size, 4, generator=torch.Generator().manual_seed(7))
labels = batch.sum(dim=1, keepdim=True)

def module(equal=False):
    if equal:
        torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 600), nn.Linear(600, 1))

def alone(passes, steps):
    '''One process with the whole batch.'''
    model = module(equal=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            nn.functional.mse_loss(model(batch), labels).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]

mine = slice(8 * rank, 8 * rank + 8)
for passes, groups, compression, op, factor in (
    (1, None, hvd.Compression.none, hvd.Average, 1.0),
    (2, 2, hvd.Compression.none, hvd.Average, 2.0),
    (1, "lists", hvd.Compression.fp16, hvd.Average, 1.0),
    (1, 0, hvd.Compression.none, hvd.Sum, 1.0),
):
    model = module(equal=rank == 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    lists = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes,
        groups=lists if groups == "lists" else groups, compression=compression, op=op,
        gradient_predivide_factor=factor)
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(passes):
            loss = nn.functional.mse_loss(model(batch[mine]), labels[mine])
            (loss if op == hvd.Average else loss / size).backward()
        optimizer.step()
        scheduler.step()
    tolerance = 2e-2 if compression is hvd.Compression.fp16 else 1e-5
    for one, other in zip(model.parameters(), alone(passes, 5), strict=True):
        assert torch.allclose(one, other, atol=tolerance), (passes, groups, (one - other).abs().max())
    weights = hvd.allgather(torch.cat([one.detach().flatten() for one in model.parameters()])[None])
    assert (weights == weights[0]).all()

# Gradients may be changed between `synchronize` and `step`; a parameter without gradient is zero.
model = module(equal=True)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
for step in range(3):
    output = model[0](batch[mine]).sum() if (step + rank) % 2 else model(batch[mine]).sum()
    output.backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert len(set(hvd.allgather_object(float(norm)))) == 1
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
state = optimizer.state_dict()
optimizer.load_state_dict(state)

# One rank has state, the others get it.
fresh = torch.optim.Adam(model.parameters(), lr=0.5)
if rank == 0:
    fresh.load_state_dict(state)
hvd.broadcast_optimizer_state(fresh, root_rank=0)
assert fresh.param_groups[0]["lr"] == 1e-3 and fresh.state_dict()["state"][0]["step"] == 3

# A scheduler may have been made before: it sets the rate, and the steps use all gradients.
model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
for rate in (0.1, 0.05):
    before = model.weight.item()
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    optimizer.step()
    assert abs(before - model.weight.item() - rate * (size + 1) / 2) < 1e-6
    optimizer.zero_grad()
    scheduler.step()

# Sparse gradients.
for as_dense in (False, True):
    embedding = nn.Embedding(10, 3, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
    before = embedding.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0),
                                         embedding.named_parameters(), sparse_as_dense=as_dense)
    embedding(torch.tensor([0, rank + 1])).sum().backward()
    optimizer.step()
    change = before - embedding.weight.detach()
    assert torch.allclose(change[0], torch.ones(3)) and torch.allclose(change[rank + 1], torch.full((3,), 1 / size))

# Batch normalization over all ranks: the same as one process with the whole batch.
images = torch.randn(4 * size, 3, 5, generator=torch.Generator().manual_seed(1))
reference, ours = nn.BatchNorm1d(3), hvd.SyncBatchNorm(3)
whole = images.clone().requires_grad_()
(reference(whole) ** 3).sum().backward()
part = images[4 * rank : 4 * rank + 4].clone().requires_grad_()
(ours(part) ** 3).sum().backward()
assert torch.allclose(part.grad, whole.grad[4 * rank : 4 * rank + 4], atol=1e-5)
assert torch.allclose(ours.running_var, reference.running_var) and torch.allclose(ours.running_mean, reference.running_mean)

# Half types: sums and counts do not overflow, and the statistics keep the dtype of the module.
many = torch.ones(70_000, 1)
many[::2] = -1
for dtype, kept in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
    ours = hvd.SyncBatchNorm(1, momentum=1.0).to(kept)
    normal = ours(many.to(dtype))
    assert normal.dtype == dtype and torch.equal(normal.float(), many), normal
    assert ours.running_var.dtype == kept and ours.running_mean == 0
    assert abs(float(ours.running_var) - 1) < 1e-4

def refused(text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (ValueError, AssertionError) as error:
        assert text in str(error), error
        return
    raise AssertionError(text)

model = module(equal=True)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
names = list(model.named_parameters())
refused("must be unique", hvd.DistributedOptimizer, plain, [("a", one) for _, one in names])
refused("were not named", hvd.DistributedOptimizer, plain, names[1:])
refused("sequence of tuples", hvd.DistributedOptimizer, plain, model.parameters())
refused("must be > 0", hvd.DistributedOptimizer, plain, backward_passes_per_step=0)
refused("only appear once", hvd.DistributedOptimizer, plain, names, groups=[[names[0][1]]] * 2)
distributed = hvd.DistributedOptimizer(plain, names)
model(batch).sum().backward()
refused("zero_grad() was called after", distributed.zero_grad)
refused("more than backward_passes_per_step", lambda: model(batch).sum().backward())
distributed.step()
hvd.shutdown()
print("all steps are right")
"""

ELASTIC = """
import os
import numpy as np
import torch
import syncvar as sv
import syncvar.compat.horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank() + 10 * sv.restart_count())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)

@hvd.elastic.run
def train(state, text):
    print(text, "from epoch", state.epoch, "after", sum(state.sums), "rows", state.sampler.processed_num)
    assert state.best.tolist() == [state.epoch] * 2 and state.last == state.epoch, (state.best, state.last)
    while state.epoch < 6:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.epoch += 1
        state.sums.append(state.epoch)
        state.best, state.last = state.best + 1, np.float32(state.epoch)
        state.sampler.record_batch(0, 1)
        if state.epoch == 4 and hvd.rank() == 1 and sv.restart_count() == 0:
            os._exit(3)
        if state.epoch % 2:
            state.commit()
    return hvd.allgather_object(float(model.weight.detach().sum()))

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, sums=[], sampler=sampler,
                               best=np.zeros(2), last=np.float32(0))
state.register_reset_callbacks([lambda: print("reset")])
weights = train(state, "begins")
assert weights[0] == weights[1] and state.sums == [1, 2, 3, 4, 5, 6], (weights, state.sums)
state.epoch = 99
state.restore()
assert state.epoch == 5
print("has trained")
hvd.shutdown()
"""

LOST = """
import torch
import syncvar.compat.horovod.torch as hvd

hvd.init()
if hvd.rank() == 1:
    raise ValueError("no labels")
hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="loss"))
"""

# The parts of torchvision that Horovod's example uses, over the digits of scikit-learn.
TORCHVISION = """
import torch
from torch.nn import functional


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x


class ToTensor:
    def __call__(self, x):
        return x


class Normalize:
    def __init__(self, mean, deviation):
        self.mean, self.deviation = mean[0], deviation[0]

    def __call__(self, x):
        return (x - self.mean) / self.deviation


class MNIST(torch.utils.data.Dataset):
    def __init__(self, folder, train, download=False, transform=None):
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).float()[:, None] / 16
        images = functional.interpolate(images, size=(28, 28), mode="bilinear")
        part = slice(0, 1500) if train else slice(1500, None)
        self.images, self.labels = images[part], torch.from_numpy(digits.target)[part]
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, place):
        return self.transform(self.images[place]), int(self.labels[place])
"""

# A training loop of the same shape as Horovod's published example, with Horovod's own import.
EXAMPLE = """
import torch
from torchvision import datasets, transforms
import horovod
import horovod.torch as hvd

hvd.init()
torch.manual_seed(42)
data = datasets.MNIST("data", train=True, download=True, transform=transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize((0.13,), (0.31,))]))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=50, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(f"Loss: {hvd.allreduce(torch.stack(losses).mean()):.4f}")
"""


@NEEDS_TORCH
def test_every_operation(launch):
    job = launch(OPERATIONS, workers=3, env=ENV)
    assert job.wait(600) == 0, str(job)
    assert job.out.count("all operations are right") == 3


@NEEDS_TORCH
def test_the_optimizer_makes_the_steps_of_one_process_with_the_whole_batch(launch):
    job = launch(OPTIMIZER, env={**ENV, "SYNCVAR_CALL_RUNNER": "python"})
    assert job.wait(600) == 0, str(job)
    assert job.out.count("all steps are right") == 2


@NEEDS_TORCH
def test_elastic_goes_on_from_the_last_commit(launch):
    job = launch(
        ELASTIC, options=["--max-restarts", "1"], env={**ENV, "SYNCVAR_RESTART_DELAY_S": "0.05"}
    )
    assert job.wait(600) == 0, str(job)
    assert job.out.count("begins from epoch 0 after 0 rows 0") == 2
    assert job.out.count("begins from epoch 3 after 6 rows 6") == 2
    assert job.out.count("has trained") == 2
    assert job.out.count("reset") == 2
    assert not list((job.folder / "state").rglob("elastic-commit*"))


@NEEDS_TORCH
def test_a_rank_that_fails_is_named_and_the_others_do_not_hang(launch):
    job = launch(LOST, env=ENV)
    assert job.wait(600) == 1, str(job)
    assert "rank 1 on" in job.report.split("\n")[0]
    assert "ValueError: no labels" in job.report.split("\n")[0]


@NEEDS_TORCH
def test_a_program_with_horovods_own_import_runs_unchanged(launch, tmp_path):
    (tmp_path / "train.py").write_text(EXAMPLE)
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("datasets", "transforms"):
        (package / f"{name}.py").write_text(TORCHVISION)
    job = launch(
        target=["-m", "syncvar.compat.horovod", str(tmp_path / "train.py")],
        env={**ENV, "PYTHONPATH": str(tmp_path)},
    )
    assert job.wait(600) == 0, str(job)
    losses = [
        [float(one) for one in re.findall(r"Loss: (\S+)", text)]
        for text in map("\n".join, map(job.lines, (0, 1)))
    ]
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0] * 0.7


def test_without_torch_the_import_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import syncvar.compat.horovod.torch"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "pip install 'syncvar[torch]'" in done.stderr.splitlines()[-1]
    done = subprocess.run(
        [sys.executable, "-m", "syncvar.compat.horovod"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "usage: python -m syncvar.compat.horovod SCRIPT" in done.stderr
