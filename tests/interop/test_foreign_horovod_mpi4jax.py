"""The tests and examples of Horovod and mpi4jax over our layers: `pytest -m foreign`.

SYNCVAR_HOROVOD_SOURCE is a checkout of Horovod at v0.28.1: its released package has no tests. The package of mpi4jax has.
"""

import os
import re
from pathlib import Path

import pytest

from tests.interop.test_horovod_programs import TORCHVISION
from tests.support.foreign_suites import Suite, fetch

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(7200)]


@pytest.fixture
def horovod():
    source = os.environ.get("SYNCVAR_HOROVOD_SOURCE", "")
    assert source, "set SYNCVAR_HOROVOD_SOURCE to a checkout of Horovod at v0.28.1"
    return Path(source)


def check(suite, failures):
    """Run a suite and compare what does not pass with what is known."""
    counts = suite.run()
    print(suite.library, suite.workers, dict(counts))
    wrong = {
        name.rpartition("::")[2]
        for name, end in suite.outcomes.items()
        if end not in ("passed", "skipped")
    }
    assert wrong <= failures, {name: suite.reasons.get(name) for name in suite.outcomes}
    assert counts["passed"] > 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_mpi4jax(tmp_path, workers):
    check(Suite("mpi4jax", fetch("mpi4jax", tmp_path), workers, tmp_path), MPI4JAX)


@pytest.mark.parametrize("workers", [2, 3])
def test_horovod(tmp_path, horovod, workers):
    check(Suite("horovod", horovod, workers, tmp_path), HOROVOD)


def test_horovods_published_example_runs_with_its_import_changed(launch, tmp_path, horovod):
    text = (horovod / "examples" / "pytorch" / "pytorch_mnist.py").read_text()
    text = text.replace("import horovod.torch as hvd", "import syncvar.compat.horovod.torch as hvd")
    text = text.replace("import horovod\n", "import syncvar.compat.horovod as horovod\n")
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("datasets", "transforms"):
        (package / f"{name}.py").write_text(TORCHVISION)
    (tmp_path / "mnist.py").write_text(text)
    job = launch(
        target=[str(tmp_path / "mnist.py"), "--epochs", "1", "--batch-size", "32", "--lr", "0.05"],
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert job.wait(1200) == 0, str(job)
    losses = [float(one) for one in re.findall(r"Loss: ([\d.]+)", "\n".join(job.lines(0)))]
    assert losses[-1] < losses[0] * 0.9, str(job)
    assert "Test set: Average loss" in job.out


# What does not pass, and why.
MPI4JAX = {
    "test_abort_on_error",  # from here: they look into mpi4jax itself, or start MPI
    "test_deadlock_on_exit",
    "test_debug_logging",
    "test_set_logging_from_envvar",
    "test_mpi_abi_info",
    "test_mpi_abi_compatibility_check",
    "test_mpi_abi_skip_check",
    "test_send_recv_status",  # from here: messages have no status
    "test_send_recv_status_jit",
    "test_sendrecv_status",
    "test_sendrecv_status_jit",
    "test_sendrecv_jacfwd",  # expects an error, where ours works
}
HOROVOD = {
    "test_horovod_allgather_duplicate_name_error",  # from here: ranks submit in different orders
    "test_horovod_allreduce_duplicate_name_error",
    "test_horovod_broadcast_duplicate_name_error",
    "test_horovod_reducescatter_duplicate_name_error",
    "test_broadcast_state_no_grad",  # expects gradients of zero after broadcast_optimizer_state
}
