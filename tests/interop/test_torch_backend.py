"""The backend "syncvar" of torch.distributed, beside gloo and by itself: `pytest -m tensors`."""

import gc
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import caught, everywhere
from tests.support.launching import LIMIT_S
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.tensors
SCRIPTS = REPOSITORY / "tests" / "support" / "rank_scripts"
SOON = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)


def group_of(torch, memory=None):
    """Return a process group on the ranks of the world, as torch would make it."""
    from syncvar.torch.process_group import SyncvarProcessGroup
    from syncvar.torch.torch_rendezvous import TorchJob

    options = SimpleNamespace(
        store=None,
        group_rank=sv.rank(),
        group_size=sv.world_size(),
        group_id="test",
        timeout=torch.distributed.default_pg_timeout,
    )
    group = sv.new_group(range(sv.world_size()))
    return SyncvarProcessGroup(group, options, TorchJob(is_default=False), memory)


class FakeDevice:
    """Tensors with the attribute `is_far` are on a device; copies go through memory of the host."""

    def __init__(self, torch):
        self.torch, self.fetched, self.stored = torch, 0, 0

    def is_host(self, tensor):
        return not getattr(tensor, "is_far", False)

    def allocate(self, tensor):
        return self.torch.full_like(tensor, 77, memory_format=self.torch.contiguous_format)

    def fetch(self, tensor, host):
        self.fetched += 1
        host.copy_(tensor)

    def store(self, host, tensor):
        self.stored += 1
        tensor.copy_(host)


def far(tensor):
    tensor.is_far = True
    return tensor


# -- calls of one process group --------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_every_reduction_of_every_dtype(torch, size):
    dist = torch.distributed
    ops = {
        "SUM": lambda parts: parts.sum(0),
        "PRODUCT": lambda parts: parts.prod(0),
        "MIN": lambda parts: parts.amin(0),
        "MAX": lambda parts: parts.amax(0),
        "BAND": lambda parts: np.bitwise_and.reduce(parts.numpy()),
        "BOR": lambda parts: np.bitwise_or.reduce(parts.numpy()),
        "BXOR": lambda parts: np.bitwise_xor.reduce(parts.numpy()),
        "AVG": lambda parts: parts.sum(0) / size,
    }
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def fn():
        group = group_of(torch)
        for dtype in (*floats, torch.int8, torch.uint8, torch.int32, torch.int64):
            everyone = [(torch.arange(6) % 4 + rank + 1).to(dtype) for rank in range(size)]
            wide = torch.stack(everyone).to(torch.float64 if dtype in floats else torch.int64)
            for name, expected in ops.items():
                if dtype in floats and name[0] == "B":
                    continue
                mine = everyone[sv.rank()].clone()
                options = dist.AllreduceOptions()
                options.reduceOp = getattr(dist.ReduceOp, name)
                assert group.allreduce([mine], options).wait()
                want = torch.as_tensor(expected(wide)).to(dtype)
                assert torch.equal(mine, want), (dtype, name, mine, want)
        half = torch.full((3,), float(sv.rank() + 1))
        options = dist.AllreduceOptions()
        options.reduceOp = dist._make_nccl_premul_sum(0.5)
        group.allreduce([half], options).wait()
        assert torch.equal(half, torch.full((3,), size * (size + 1) / 4))
        flags = torch.tensor([sv.rank() == 0, False, True])
        group.allreduce([flags]).wait()
        assert flags.tolist() == [True, False, True]
        assert "float8" in str(caught(group.allreduce, [half.to(torch.float8_e4m3fn)]))

    everywhere(size, fn, shared=True, config=SOON)


@pytest.mark.parametrize("layout", ["shm", "links"])
def test_every_move_also_of_tensors_on_a_device_and_with_strides(torch, layout):
    dist, size = torch.distributed, 3
    made = {
        "plain": lambda *shape: torch.zeros(*shape),
        "strided": lambda *shape: torch.zeros(*shape, 2)[..., 0],
        "far": lambda *shape: far(torch.zeros(*shape)),
    }

    def fn():
        device = FakeDevice(torch)
        group, rank = group_of(torch, device), sv.rank()
        for kind, new in made.items():

            def full(value, *shape, new=new):
                tensor = new(*shape)
                tensor.fill_(value)
                return tensor

            ranks = [torch.full((2, 3), float(one)) for one in range(size)]
            x = full(rank, 2, 3)
            options = dist.BroadcastOptions()
            options.rootRank = 1
            group.broadcast([x], options).wait()
            assert torch.equal(x, ranks[1]), kind
            outs = [new(2, 3) for _ in range(size)]
            group.allgather([outs], [full(rank, 2, 3)]).wait()
            assert torch.equal(torch.stack(list(outs)), torch.stack(ranks)), kind
            whole = new(size * 2, 3)
            group.all_gather_single(whole, full(rank, 2, 3)).wait()
            assert torch.equal(whole, torch.cat(ranks)), kind
            outs = [[new(2, 3)] for _ in range(size)]
            group.allgather_coalesced(outs, [full(rank, 2, 3)]).wait()
            assert [float(one[0][0, 0]) for one in outs] == [0, 1, 2], kind
            roots = dist.GatherOptions()
            roots.rootRank = 2
            outs = [new(2, 3) for _ in range(size)]
            group.gather([outs] if rank == 2 else [], [full(rank, 2, 3)], roots).wait()
            assert [float(one[0, 0]) for one in outs] == ([0, 1, 2] if rank == 2 else [0, 0, 0])
            roots = dist.ScatterOptions()
            roots.rootRank = 1
            parts = [full(10 + one, 2, 3) for one in range(size)]
            out = new(2, 3)
            group.scatter([out], [parts] if rank == 1 else [], roots).wait()
            assert torch.equal(out, ranks[0] + 10 + rank), kind
            options = dist.ReduceOptions()
            options.rootRank = 1
            x = full(rank + 1, 2, 3)
            group.reduce([x], options).wait()
            assert float(x[0, 0]) == (6 if rank == 1 else rank + 1), kind
            out = new(2, 3)
            group.reduce_scatter([out], [[full(one, 2, 3) for one in range(size)]]).wait()
            assert torch.equal(out, ranks[0] + size * rank), kind
            out = new(2, 3)
            group.reduce_scatter_single(out, full(2, size * 2, 3)).wait()
            assert torch.equal(out, ranks[0] + 6), kind
            outs = [new(1 + one) for one in range(size)]
            group.alltoall(outs, [full(rank, 1 + rank) for _ in range(size)]).wait()
            assert [one.tolist() for one in outs] == [[0], [1, 1], [2, 2, 2]], kind
            out = new(3 * size, 2)
            splits = [rank + 1] * size
            group.all_to_all_single(
                out[:6], full(rank, 3 * (rank + 1), 2), [1, 2, 3], splits
            ).wait()
            if kind == "plain":
                assert out[:6, 1].tolist() == [0, 1, 1, 2, 2, 2]
            tensors = [full(rank, 4), full(1, 2, 2)]
            group.allreduce_coalesced(tensors).wait()
            assert [float(one.sum()) for one in tensors] == [12, 12], kind
            group._start_coalescing()
            outs = [full(rank, 2), full(1, 3)]
            for one in outs:
                group.allreduce([one])
            group._end_coalescing().wait()
            assert [float(one.sum()) for one in outs] == [6, 9], kind
        assert device.fetched > 10
        assert device.stored > 10
        moved = torch.full((3,), rank, dtype=torch.float8_e4m3fn)
        group.broadcast([moved]).wait()
        assert moved.float().tolist() == [0, 0, 0]

    everywhere(size, fn, shared=layout == "shm", config=SOON)


def test_messages_and_futures(torch):
    def fn():
        group, rank, size = group_of(torch), sv.rank(), sv.world_size()
        right, left = (rank + 1) % size, (rank - 1) % size
        got = torch.zeros(2, 2)
        works = [
            group.recv([got], left, 3),
            group.send([torch.full((2, 2), float(rank))], right, 3),
        ]
        for work in works:
            assert work.wait()
        assert float(got[1, 1]) == left
        assert works[0].source_rank() == left
        if rank:
            group.send([torch.full((1,), float(rank))], 0).wait()
        else:
            found = []
            for _ in range(size - 1):
                one = torch.zeros(1)
                work = group.recv_anysource([one])
                work.wait()
                found.append((work._source_rank(), int(one)))
            assert sorted(found) == [(1, 1), (2, 2)]
        x = torch.ones(3)
        future = group.allreduce([x]).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [6, 6, 6]
        assert future.wait()[0] is x
        # A function of a future may make calls: all ranks make them in the same order.
        chained = [
            group.allreduce([torch.full((1,), float(one))])
            .get_future()
            .then(lambda done: group.allreduce([done.value()[0]]).get_future().wait()[0])
            for one in range(4)
        ]
        assert [float(one.wait()) for one in chained] == [0, 9, 18, 27]
        work = group.barrier()
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        group.monitored_barrier(timedelta(seconds=60))

    everywhere(3, fn, shared=True, config=SOON)


def test_a_thread_may_wait_for_a_message_while_another_makes_the_call_before_it(torch):
    def fn():
        group, got, total = group_of(torch), torch.zeros(1), torch.ones(1)
        if sv.rank():
            group.allreduce([total]).wait()
            group.send([torch.full((1,), 7.0)], 0).wait()
            return
        group._start_coalescing()
        group.recv([got], 1)
        work = group._end_coalescing()
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        waiter.join(0.2)  # let it wait
        group.allreduce([total]).wait()
        waiter.join(60)
        assert (float(got), float(total)) == (7, 2)

    everywhere(2, fn, shared=True, config=SOON)


def test_an_error_reaches_the_work_and_the_group_stays_usable(torch):
    is_over = threading.Event()

    def fn():
        group = group_of(torch)
        mine = torch.ones(2 + sv.rank())
        error = caught(lambda: group.allreduce([mine]).wait())
        assert isinstance(error, sv.MismatchError)
        work = group.allreduce([mine])
        assert isinstance(caught(work.wait), sv.MismatchError)
        assert not work.is_success()
        assert isinstance(work.exception(), sv.MismatchError)
        same = torch.ones(2)  # the group stays usable
        group.allreduce([same]).wait()
        assert same.tolist() == [2, 2]
        if sv.rank():
            assert is_over.wait(60)
            return
        with pytest.raises(
            RuntimeError, match=r"Rank 1 failed to pass monitoredBarrier: .*; the timeout is"
        ):
            group.monitored_barrier(timedelta(seconds=0.3))
        is_over.set()

    everywhere(2, fn, shared=True, config=SOON)


def test_split_sizes_that_do_not_fit_raise_before_anything_is_sent(torch):
    group = group_of(torch)
    x = torch.ones(4, 2)
    assert "split sizes [3]" in str(caught(group.all_to_all_single, x.clone(), x, [3], [4]))


def test_parts_of_other_sizes_than_expected_raise(torch):
    def fn():
        group, x = group_of(torch), torch.ones(4)
        splits = [1, 3] if sv.rank() == 0 else [3, 1]
        wanted = "the ranks sent [1, 3] elements" if sv.rank() == 0 else "the ranks sent [3, 1]"
        work = group.all_to_all_single(torch.zeros(4), x, [2, 2], splits)
        assert wanted in str(caught(work.wait))
        work = group.alltoall([torch.zeros(2), torch.zeros(2)], list(x.split(splits)))
        assert wanted in str(caught(work.wait))

    everywhere(2, fn, shared=True, config=SOON)


def test_tensors_of_a_future_are_free_without_a_garbage_collection(torch):
    def fn():
        group, seen = group_of(torch), []
        gc.disable()
        try:
            for _ in range(5):
                x = torch.ones(3)
                work = group.allreduce([x])
                work.get_future().wait()
                seen.append(weakref.ref(x))
                del x, work
            return [one() for one in seen]
        finally:
            gc.enable()

    assert everywhere(1, fn, config=SOON) == [[None] * 5]


# -- jobs ------------------------------------------------------------------------------------------


def test_training_gives_the_bits_of_gloo(launch):
    """Two ranks: DDP, join, hooks, ZeRO, FSDP, FSDP2, sparse gradients and torch.compile."""
    job = launch(
        target=[str(SCRIPTS / "torch_training_cases.py")],
        options=["--torch-env"],
        env={"OMP_NUM_THREADS": "1"},
    )
    assert job.wait(5 * LIMIT_S) == 0, job.err
    for rank in range(2):
        lines = {line.partition(":")[0]: line.partition(":")[2].split() for line in job.lines(rank)}
        assert lines["differ"] == []
        assert len(lines["same"]) == 12


def test_ranks_that_only_a_store_connects(tmp_path):
    command = [sys.executable, str(SCRIPTS / "torch_store_ranks.py"), str(tmp_path), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[[0, 1, 2, 2], [2, 1, 0, 2]]",
        "[[0, 1, 2, 1], [2, 1, 0, 1]]",
        "[[0, 1, 2, 2], [2, 1, 0, 2]]",
    ]


def test_the_usual_line_works_without_variables_of_torchrun(launch):
    job = launch(
        """
        import torch, torch.distributed as dist
        import syncvar.torch

        for _ in range(2):
            dist.init_process_group("syncvar")
            objects = [None] * dist.get_world_size()
            dist.all_gather_object(objects, {"rank": dist.get_rank()})
            total = torch.ones(2)
            work = dist.all_reduce(total, async_op=True)
            work.wait()
            dist.barrier()
            wrong = torch.ones(1 + dist.get_rank())
            try:
                dist.all_reduce(wrong, async_op=True).get_future().wait()
            except Exception as error:
                print(type(error).__name__)
            for _ in range(4):  # two of these groups may have one name
                pair = dist.new_group([0, 1], use_local_synchronization=True)
                dist.all_reduce(total, group=pair)
                dist.destroy_process_group(pair)
            print([one["rank"] for one in objects], total.tolist())
            dist.destroy_process_group()
        """,
        workers=2,
    )
    assert job.wait(5 * LIMIT_S) == 0, job.err
    assert job.lines(0) == ["MismatchError", "[0, 1] [32.0, 32.0]"] * 2
