"""Run tests of another library as one rank, over our layer in its place; `tests/support/foreign_suites.py` starts it.

    run_foreign_tests.py LIBRARY RESULTS FILE [TEST ...]

Each line of RESULTS.RANK is a JSON list: the test, its phase, and how it ended. The run stops at the first failure,
because the ranks are not in step after it.
"""

import importlib
import json
import os
import sys
import types
import unittest.mock

import pytest

COLLECT = "collect"


class Recorder:
    """A plugin of pytest that writes what happens to a file."""

    def __init__(self, path):
        self.file = open(path, "w", buffering=1)  # noqa: SIM115  (open until the process ends)

    def pytest_itemcollected(self, item):
        self.write(item.nodeid, COLLECT, "")

    def pytest_runtest_logreport(self, report):
        ended = "broken" if report.failed and report.when != "call" else report.outcome
        self.write(report.nodeid, report.when, ended, str(report.longrepr or "")[-600:])

    def write(self, *fields):
        self.file.write(json.dumps(fields) + "\n")


def module(name, **attributes):
    """Make a module that other modules can import."""
    made = types.ModuleType(name)
    vars(made).update(attributes)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


def horovod():
    """Give our layer the name of Horovod."""
    for name in ("", ".torch", ".torch.elastic"):
        sys.modules[f"horovod{name}"] = importlib.import_module(f"syncvar.compat.horovod{name}")
    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        module(name, in_thread=None)
    sys.modules["mock"] = unittest.mock
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    if hasattr(torch.optim, "Muon"):  # newer than the tests, and refuses their parameters
        torch.optim.Muon.__module__ = "newer"
    os.environ["HOROVOD_RANK"] = os.environ.get("SYNCVAR_RANK", "0")
    os.environ["HOROVOD_SIZE"] = os.environ.get("SYNCVAR_WORLD_SIZE", "1")


class World:
    """What the tests of mpi4jax use of a communicator of mpi4py."""

    def Get_rank(self):
        return importlib.import_module("syncvar").rank()

    def Get_size(self):
        return importlib.import_module("syncvar").world_size()

    def Clone(self):
        return self

    Dup = Clone
    rank, size = property(Get_rank), property(Get_size)

    def Barrier(self):
        importlib.import_module("syncvar").barrier()


class Status:
    """The status of a message."""

    def Get_source(self):
        raise NotImplementedError("syncvar.jax returns no status")


def mpi4jax():
    """Give functions over `syncvar.jax` the names and arguments of mpi4jax."""
    import jax.numpy as jnp

    from syncvar import jax as svj

    os.environ["JAX_PLATFORMS"] = "cpu"
    world = World()
    ops = {name.upper(): name for name in ("sum", "max", "min", "prod")}
    mpi = (
        module(
            "mpi4py.MPI",
            COMM_WORLD=world,
            Status=Status,
            Intracomm=World,
            ANY_TAG=-1,
            ANY_SOURCE=-2,
            **ops,
        )
        if module("mpi4py")
        else None
    )
    mpi.get_vendor = lambda: ("syncvar", (0, 1, 0))

    def refuse_status(status):
        if status is not None:
            status.Get_source()

    def allreduce(x, op, *, comm=None):
        return svj.all_reduce(x, op)

    def allgather(x, *, comm=None):
        return svj.all_gather(jnp.asarray(x)[None])

    def alltoall(x, *, comm=None):
        if x.shape[0] != world.size:
            raise ValueError("Alltoall input must have shape (nproc, ...)")
        return svj.all_to_all(x)

    def bcast(x, root, *, comm=None):
        return svj.broadcast(x, root)

    def barrier(*, comm=None):
        svj.barrier()

    def send(x, dest, *, tag=0, comm=None):
        svj.send(x, dest, tag=tag)

    def recv(x, source=-2, *, tag=-1, comm=None, status=None):
        refuse_status(status)
        return svj.recv(x, source, tag=max(tag, 0))

    def sendrecv(x, like, source, dest, *, sendtag=0, recvtag=-1, comm=None, status=None):
        refuse_status(status)
        tags = {"tag": sendtag, "recv_tag": max(recvtag, 0)}
        return svj.sendrecv(x, dest, source, like=like, **tags)

    def gather(x, root, *, comm=None):
        gathered = allgather(x)
        return gathered if world.rank == root else x

    def reduce(x, op, root, *, comm=None):
        total = svj.all_reduce(x, op)
        return total if world.rank == root else x

    def scatter(x, root, *, comm=None):
        if world.rank == root and x.shape[0] != world.size:
            raise ValueError("Scatter input must have shape (nproc, ...)")
        whole = x if world.rank == root else jnp.zeros((world.size, *x.shape), x.dtype)
        return svj.broadcast(whole, root)[world.rank]

    def scan(x, op, *, comm=None):
        gathered = allgather(x)[: world.rank + 1]
        return getattr(jnp, op)(gathered, axis=0)

    functions = (
        gather,
        reduce,
        scatter,
        scan,
        allreduce,
        allgather,
        alltoall,
        bcast,
        barrier,
        send,
        recv,
        sendrecv,
    )
    module("mpi4jax", **{one.__name__: one for one in functions})


def main():
    library, results, folder, *tests = sys.argv[1:]
    globals()[library]()
    sys.path.insert(0, os.path.join(folder, "utils"))
    only = ["--collect-only", *tests[1:]] if tests[0] == COLLECT else [f"@{tests[0]}"]
    recorder = Recorder(f"{results}.{os.environ.get('SYNCVAR_RANK', '0')}")
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=native"]
    options += ["-c", os.devnull, "--rootdir", folder, "-o", "timeout=100"]
    os.chdir(folder)
    pytest.main([*options, *only], plugins=[recorder])
    os._exit(0)  # also if a test has left the ranks out of step


if __name__ == "__main__":
    main()
