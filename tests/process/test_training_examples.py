"""The training examples as a user starts them; those with gradients by other libraries: `pytest -m peers`.

The folder of the peers' environments is `.peers`, or what SYNCVAR_PEERS says: `torch` is made by `python bench/compare.py
--setup`, `jax` by `python -m venv .peers/jax && .peers/jax/bin/pip install jax`.
"""

import os
import re
import sys
from pathlib import Path

import pytest

PEERS = Path(os.environ.get("SYNCVAR_PEERS", ".peers")).absolute()


def test_local_sgd(launch):
    job = launch(target=["-m", "syncvar.examples.local_sgd"], workers=4)
    assert job.wait(60) == 0, str(job)
    loss, off = re.search(r"error (\S+) \(of the noise 0\.0100\), weights off by at most (\S+),", job.out).groups()
    assert float(loss) < 0.011
    assert float(off) < 0.02
    assert "workers=4 steps=400 averagings=50" in job.out


def test_easgd(launch):
    job = launch(target=["-m", "syncvar.examples.easgd"], workers=4)
    assert job.wait(60) == 0, str(job)
    center, workers = map(float, re.search(r"center (\S+), of the workers (\S+) ", job.out).groups())
    assert center < 0.011
    assert center <= workers
    assert "workers=4 steps=400 period=4" in job.out


def test_model_parallel(launch):
    job = launch(target=["-m", "syncvar.examples.model_parallel"], workers=4)
    assert job.wait(60) == 0, str(job)
    assert float(re.search(r"workers=4 steps=30 largest_difference=(\S+)", job.out).group(1)) < 1e-9


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradients_by_another_library(launch, library, workers):
    site = next(iter((PEERS / library / "lib").glob("python3*/site-packages")), None)
    assert site is not None, f"no {library} under {PEERS}: see the beginning of this file"
    own = next(path for path in sys.path if path.endswith("site-packages"))
    job = launch(
        target=["-m", f"syncvar.examples.{library}_gradients"], workers=workers, env={"PYTHONPATH": f"{own}:{site}"}
    )
    assert job.wait(100) == 0, str(job)
    accuracy = float(re.search(rf"accuracy=(\S+) workers={workers}", job.out).group(1))
    assert accuracy > 0.97
    assert f"gradients by {library}" in job.out
