"""The examples that a new user starts first, started as a user starts them."""

import re

import pytest


def trained(launch, workers, *arguments):
    """Train on the digits; return the SHA of the weights and the accuracy on the test digits."""
    job = launch(target=["-m", "syncvar.examples.digits"], workers=workers, arguments=arguments)
    assert job.wait(120) == 0, str(job)
    (weights,) = re.findall(r"weights_sha256=([0-9a-f]{64})", job.out)
    (accuracy,) = re.findall(rf"test_accuracy=(\S+) workers={workers} ", job.out)
    return weights, float(accuracy)


@pytest.mark.slow  # worlds in one process show it in the default run: tests/unit/examples/test_strategy_examples.py
def test_digits_on_3_workers_ends_with_the_weights_of_1(launch):
    assert trained(launch, 3, "--epochs", "2") == trained(launch, 1, "--epochs", "2")


@pytest.mark.slow
def test_digits_learns_the_digits_alike_on_1_to_6_workers(launch):
    made = {trained(launch, workers) for workers in (1, 2, 3, 4, 5, 6)}
    assert len(made) == 1
    ((_, accuracy),) = made
    assert accuracy >= 0.95


def test_hello(launch):
    job = launch(target=["-m", "syncvar.examples.hello"], workers=3)
    assert job.wait(120) == 0, str(job)
    assert [f"hello from rank {rank} of 3" in job.out for rank in range(3)] == [True] * 3
    assert "sum of ranks = 3, workers = 3" in job.out


def test_modes(launch):
    job = launch(target=["-m", "syncvar.examples.modes"], workers=3)
    assert job.wait(120) == 0, str(job)
    rows = dict(
        re.findall(r"^\[0\] (ON_WRITE|ON_READ|NONE|AUTO) +(\d+ +\d+) ", job.out, re.MULTILINE)
    )
    everybody = 10 * (1 + 2 + 3)
    expected = {
        "ON_WRITE": (everybody, everybody),
        "ON_READ": (10, everybody),
        "NONE": (10, 10),
        "AUTO": (everybody, everybody),
    }
    assert {mode: tuple(map(int, row.split())) for mode, row in rows.items()} == expected
