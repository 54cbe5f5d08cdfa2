"""Against other libraries, where they are installed: `pytest -m peers` after `python bench/compare.py --setup`.

The folder of the peers' environments is `.peers`, or what SYNCVAR_PEERS says.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PEERS = Path(os.environ.get("SYNCVAR_PEERS", ".peers")).absolute()
pytestmark = [pytest.mark.peers, pytest.mark.slow]

MPI = """
import sys
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
x = np.random.default_rng(rank).integers(-1000, 1000, (size * 7, 5)).astype(sys.argv[1])
made = {name: np.empty_like(x) for name in ("all_reduce", "max", "scan")}
world.Allreduce(x, made["all_reduce"])
world.Allreduce(x, made["max"], MPI.MAX)
world.Scan(x, made["scan"])
made["all_gather"] = np.concatenate(world.allgather(x))
made["broadcast"] = world.bcast(x, root=size - 1)
made["all_to_all"] = np.concatenate(world.alltoall(list(x.reshape(size, 7, 5))))
made["scatter"] = world.scatter(list(x.reshape(size, 7, 5)), root=0)
block = np.empty((7, 5), x.dtype)
world.Reduce_scatter_block(x, block)
made["reduce_scatter"] = block
np.savez(f"{sys.argv[2]}/{rank}.npz", **made)
"""
OURS = """
import sys
import numpy as np
import syncvar as sv

rank, size = sv.rank(), sv.world_size()
x = np.random.default_rng(rank).integers(-1000, 1000, (size * 7, 5)).astype(sys.argv[1])
made = {"all_reduce": sv.all_reduce(x), "max": sv.all_reduce(x, "max"), "scan": sv.scan(x)}
made["all_gather"] = sv.all_gather(x)
made["broadcast"] = sv.broadcast(x, root=size - 1)
made["all_to_all"] = np.concatenate(sv.all_to_all(list(x.reshape(size, 7, 5))))
made["scatter"] = sv.scatter(list(x.reshape(size, 7, 5)))
made["reduce_scatter"] = sv.reduce_scatter(x)
theirs = np.load(f"{sys.argv[2]}/{rank}.npz")
for name, mine in made.items():
    assert mine.dtype == theirs[name].dtype and (mine == theirs[name]).all(), name
print("equal", sorted(made))
"""


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("mpi", ["openmpi", "mpich", "intelmpi"])
def test_the_same_as_mpi4py(launch, tmp_path, mpi, workers, dtype):
    python = PEERS / mpi / "bin" / "python"
    assert python.exists(), f"no {python}: run `python bench/compare.py --setup --peers {PEERS}`"
    (tmp_path / "mpi.py").write_text(MPI)
    flags = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []
    starter = (
        [PEERS / mpi / "bin" / "mpiexec.hydra"] if mpi == "intelmpi" else [f"mpirun.{mpi}", *flags]
    )
    own = (
        {
            "I_MPI_ROOT": str(PEERS / mpi),
            "LD_LIBRARY_PATH": str(PEERS / mpi / "lib"),
            "I_MPI_FABRICS": "shm",
        }
        if mpi == "intelmpi"
        else {}
    )
    subprocess.run(
        [
            *starter,
            "-n",
            str(workers),
            str(python),
            "-m",
            "mpi4py",
            str(tmp_path / "mpi.py"),
            dtype,
            str(tmp_path),
        ],
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | own,
    )
    job = launch(OURS, workers=workers, arguments=[dtype, str(tmp_path)])
    assert job.wait(120) == 0, str(job)
    assert job.out.count("equal") == workers


REFUSED = """
import numpy as np
import syncvar as sv
try:
    print("total", sv.all_reduce(1))
except sv.ConfigError as error:
    print("refused:", str(error).partition(",")[0])
"""


@pytest.mark.parametrize(
    ("mpi", "variable"), [("openmpi", "OMPI_COMM_WORLD_SIZE"), ("mpich", "PMI_SIZE")]
)
def test_under_mpirun_nobody_takes_itself_for_a_world_of_one(mpi, variable):
    flags = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []

    def said(workers, **environ):
        line = [f"mpirun.{mpi}", *flags, "-np", str(workers), sys.executable, "-c", REFUSED]
        done = subprocess.run(
            line,
            check=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=os.environ | environ,
        )
        return done.stdout.splitlines()

    refused = said(2)
    assert len(refused) == 2
    assert all(line.startswith(f"refused: {variable}=2") for line in refused)
    assert said(2, SYNCVAR_WORLD_SIZE="1") == ["total 1"] * 2
    assert said(1) == ["total 1"]


TORCH = """
import numpy as np
import torch
import syncvar as sv

total = sv.all_reduce(torch.full((3, 2), sv.rank() + 1.0))
assert isinstance(total, np.ndarray) and (total == sum(range(1, sv.world_size() + 1))).all()
assert sv.all_gather(torch.arange(4).reshape(2, 2)[:, 0]).tolist() == [0, 2] * sv.world_size()
v = sv.Variable(torch.ones(3), name="w")
v.assign(torch.zeros(3))
try:
    sv.all_reduce(torch.ones(2, requires_grad=True))
except sv.ConfigError as error:
    print("told:", error)
print("torch", torch.__version__)
"""


def test_torch_tensors_go_in(launch):
    site = next(iter((PEERS / "torch" / "lib").glob("python3*/site-packages")), None)
    assert site is not None, (
        f"no torch under {PEERS}: run `python bench/compare.py --setup --peers {PEERS}`"
    )
    own = next(path for path in sys.path if path.endswith("site-packages"))
    job = launch(TORCH, workers=2, env={"PYTHONPATH": f"{own}:{site}"})
    assert job.wait(120) == 0, str(job)
    assert job.out.count("torch 2") == 2
    assert np.__version__


BIG = """
import numpy as np
import syncvar as sv

count = (2 << 30) // 4 + 1000  # more than 2 GiB
x = np.full(count, sv.rank() + 1, np.float32)
total = sv.all_reduce(x, out=x)
assert total is x and (x[:: 1 << 20] == 3).all() and x[-1] == 3
del x, total
y = sv.broadcast(np.ones(count, np.float32) if sv.rank() == 0 else None)
assert y.size == count and y[-1] == 1
print("done")
"""


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_more_than_2_gib(launch, transport):
    job = launch(
        BIG, workers=2, env={"SYNCVAR_TRANSPORT": transport, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "100"}
    )
    assert job.wait(120) == 0, str(job)
    assert job.out.count("done") == 2
