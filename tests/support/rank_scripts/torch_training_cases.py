"""Train small modules with torch.distributed, once over gloo and once over syncvar, and compare the bits.

    syncvar-launch --torch-env --workers 2 torch_training_cases.py [CASE ...]

Each rank prints the names of the cases whose parameters are the same, and those that differ.
"""

import hashlib
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncvar.torch  # noqa: F401

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, uses=False):
        y = self.second(self.norm(self.first(x)).relu())
        return self.unused(y[:, :2]) if uses else y


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 6, generator=generator)


def digest(module):
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(model, optimizer=None, steps=STEPS, **options):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step), **options).pow(2).mean().backward()
        optimizer.step()


def ddp(**options):
    net = Net()
    for parameter in net.unused.parameters():
        parameter.requires_grad_(options.get("find_unused_parameters", False))
    return net, DistributedDataParallel(net, **options)


def plain():
    net, model = ddp()
    train(model)
    return net


def static_graph():
    net, model = ddp(static_graph=True, gradient_as_bucket_view=True)
    train(model)
    return net


def find_unused():
    net, model = ddp(find_unused_parameters=True)
    for step in range(STEPS):
        model(batch(step), uses=dist.get_rank() == step % 2).pow(2).mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= parameter.grad
    return net


def joined():
    net, model = ddp(broadcast_buffers=False)
    with model.join():
        train(model, steps=2 + dist.get_rank())
    net.norm = nn.Identity()  # its statistics are of this rank
    return net


def fp16_hook():
    net, model = ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model)
    return net


def in_bfloat16(_state, bucket):
    """Average in bfloat16: torch's own hook refuses the CPU."""
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())

    def widened(future):
        return bucket.buffer().copy_(future.value()[0])

    return dist.all_reduce(half, async_op=True).get_future().then(widened)


def bf16_hook():
    net, model = ddp()
    model.register_comm_hook(None, in_bfloat16)
    train(model)
    return net


def power_sgd():
    net, model = ddp()
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, steps=5)
    return net


def zero():
    net, model = ddp()
    optimizer = ZeroRedundancyOptimizer(
        [one for one in model.parameters() if one.requires_grad], torch.optim.Adam, lr=0.01
    )
    train(model, optimizer)
    return net


def compiled():
    net, model = ddp()
    train(torch.compile(model, backend="aot_eager"))
    return net


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        state = {name: tensor.clone() for name, tensor in model.named_parameters()}
    holder = nn.Module()
    for name, tensor in state.items():
        holder.register_buffer(name.replace(".", "_"), tensor.detach())
    return holder


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    net.norm = nn.Identity()
    for layer in (net.first, net.second, net):
        fully_shard(layer, mesh=mesh)
    train(net)
    return net


def sparse():
    net = nn.Sequential(nn.EmbeddingBag(20, 3, sparse=True), nn.Linear(3, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = (torch.arange(8).view(4, 2) + step + 3 * dist.get_rank()) % 20
        model(rows).pow(2).sum().backward()
        optimizer.step()
    return net


CASES = (
    plain, static_graph, find_unused, joined, fp16_hook, bf16_hook, power_sgd, zero, fsdp1, fsdp2, sparse, compiled,
)  # fmt: skip


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [case for case in CASES if case.__name__ in sys.argv[1:] or len(sys.argv) == 1]
    found = {}
    for backend in ("gloo", "syncvar"):
        dist.init_process_group(backend)
        assert dist.get_backend() == backend
        for case in chosen:
            torch.manual_seed(7)
            found[backend, case.__name__] = digest(case())
        dist.barrier()
        dist.destroy_process_group()
    names = [case.__name__ for case in chosen]
    same = [name for name in names if found["gloo", name] == found["syncvar", name]]
    print("same:", " ".join(same))
    print("differ:", " ".join(name for name in names if name not in same))


if __name__ == "__main__":
    main()
