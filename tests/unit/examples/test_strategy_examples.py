"""The examples in one process: what they print, and equal bits of digits for any number of workers."""

import re
import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.examples import digits, hello, modes
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=60)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_hello(size, capsys):
    everywhere(size, hello.main)
    said = capsys.readouterr().out
    for rank in range(size):
        assert f"hello from rank {rank} of {size}" in said
    assert f"sum of ranks = {size * (size - 1) // 2}, workers = {size}" in said


def test_modes_count_events_each_in_their_way(capsys):
    everywhere(4, modes.main)
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {
        "ON_WRITE": ["100", "100"],
        "ON_READ": ["10", "100"],
        "NONE": ["10", "10"],
        "AUTO": ["100", "100"],
    }


@pytest.mark.slow
def test_digits_ends_with_equal_bits_for_1_2_3_and_5_workers():
    data = digits.load()

    def program():
        trainer = digits.Trainer(data, sv.MultiWorkerMirroredStrategy())
        metrics = trainer.epoch(np.arange(720))
        return trainer.digest(), trainer.test_accuracy(), *np.round(metrics, 9)

    results = [result for workers in (1, 2, 3, 5) for result in everywhere(workers, program)]
    assert len(results) == 11
    assert len(set(results)) == 1
    assert results[0][1] > 0.5


def test_the_last_lines_of_digits(capsys):
    everywhere(2, lambda: digits.main(["--epochs", "2"]))
    said = capsys.readouterr().out
    assert "\repoch  2/2" in said
    *_, digest, last = said.splitlines()
    assert re.fullmatch(r"weights_sha256=[0-9a-f]{64}", digest)
    assert re.fullmatch(r"test_accuracy=0\.\d{3} workers=2 seconds=\d+\.\d", last)


@pytest.mark.parametrize("workers", [1, 5, 24, 30])
def test_each_shard_of_digits_has_one_worker(workers):
    assert [one for rank in range(workers) for one in digits.own_shards(workers, rank)] == list(
        range(digits.MICRO_SHARDS)
    )


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        digits.load()
