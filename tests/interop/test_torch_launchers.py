"""A process group of torch under mpirun and under Slurm; both and torch must be here, see install_mpi.sh and install_slurm.sh."""

import sys

import pytest
from test_slurm import cluster, daemons, srun  # noqa: F401  (fixtures)

from tests.support.mpi_jobs import notes, run, script

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(300)]

OF_TORCH = """
import torch, torch.distributed as dist
import syncvar.torch
dist.init_process_group("syncvar")
x = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(x)
report(dist.get_rank(), dist.get_world_size(), x.tolist())
dist.destroy_process_group()
"""


def test_under_mpirun(tmp_path):
    text = OF_TORCH.replace("report(dist.get_rank(), ", "note(")
    code, text = run("openmpi", 3, script(tmp_path, text))
    assert code == 0, text
    assert notes(tmp_path, 3) == ["3 [6.0, 6.0, 6.0, 6.0]\n"] * 3


def test_under_srun(cluster, tmp_path):  # noqa: F811
    report = 'import sys\ndef report(*parts): sys.stdout.write(" ".join(map(str, parts)) + "\\n")\n'
    (tmp_path / "group.py").write_text(report + OF_TORCH)
    done = srun(cluster, "-N2", "-n4", sys.executable, str(tmp_path / "group.py"))
    assert done.returncode == 0, done
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{rank} 4 [10.0, 10.0, 10.0, 10.0]" for rank in range(4)]
