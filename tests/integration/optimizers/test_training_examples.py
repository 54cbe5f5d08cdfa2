"""The training examples as a user starts them; those with other libraries: `pytest -m tensors`."""

import re

import pytest


def test_local_sgd(launch):
    job = launch(target=["-m", "syncvar.examples.local_sgd"], workers=4)
    assert job.wait(120) == 0, str(job)
    loss, off = re.search(
        r"error (\S+) \(of the noise 0\.0100\), weights off by at most (\S+),", job.out
    ).groups()
    assert float(loss) < 0.011
    assert float(off) < 0.02
    assert "workers=4 steps=400 averagings=50" in job.out


def test_easgd(launch):
    job = launch(target=["-m", "syncvar.examples.easgd"], workers=4)
    assert job.wait(120) == 0, str(job)
    center, workers = map(
        float, re.search(r"center (\S+), of the workers (\S+) ", job.out).groups()
    )
    assert center < 0.011
    assert center <= workers
    assert "workers=4 steps=400 period=4" in job.out


def test_hogwild(launch):
    job = launch(target=["-m", "syncvar.examples.hogwild"], workers=3)
    assert job.wait(120) == 0, str(job)
    shared, best = map(
        float,
        re.search(r"shared weights (\S+), of the synchronous solution (\S+) ", job.out).groups(),
    )
    assert best <= shared < best + 0.01
    assert "workers=3 steps=24000 without a lock" in job.out


def test_gossip(launch):
    job = launch(target=["-m", "syncvar.examples.gossip"], workers=4)
    assert job.wait(120) == 0, str(job)
    assert float(re.search(r"mean squared error (\S+) ", job.out).group(1)) < 0.011
    spreads = [
        float(one) for one in re.search(r"spread of the replicas: (.+)", job.out).group(1).split()
    ]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < spreads[0] / 1000
    assert "workers=4 rounds=400" in job.out


def test_model_parallel(launch):
    job = launch(target=["-m", "syncvar.examples.model_parallel"], workers=4)
    assert job.wait(120) == 0, str(job)
    assert float(re.search(r"workers=4 steps=30 largest_difference=(\S+)", job.out).group(1)) < 1e-9


@pytest.mark.tensors
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("example", ["torch_module", "torch_gradients", "jax_gradients"])
def test_with_another_library(launch, example, workers):
    job = launch(target=["-m", f"syncvar.examples.{example}"], workers=workers)
    assert job.wait(120) == 0, str(job)
    accuracy = float(re.search(rf"accuracy=(\S+) workers={workers}", job.out).group(1))
    assert accuracy > 0.97
    assert f"gradients by {example.partition('_')[0]}" in job.out


@pytest.mark.tensors
def test_a_module_goes_on_from_its_checkpoint_on_another_number_of_workers(launch, tmp_path):
    losses = []
    for workers in (2, 3):
        job = launch(
            target=["-m", "syncvar.examples.torch_module", str(tmp_path / "saved")], workers=workers
        )
        assert job.wait(120) == 0, str(job)
        losses.append(float(re.search(r"loss (\S+)", job.out).group(1)))
    assert losses[1] < losses[0]
