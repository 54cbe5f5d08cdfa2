"""The examples in one process: what they print, and equal bits of digits for 1, 2 and 4 workers."""

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


def test_digits_ends_with_equal_bits_for_1_2_and_4_workers():
    data = digits.load()

    def program():
        trainer = digits.Trainer(data, sv.MirroredStrategy(reproducible=True))
        metrics = trainer.epoch(np.arange(len(data.train_labels)))
        return trainer.digest(), trainer.test_accuracy(), *np.round(metrics, 9)

    results = [result for workers in (1, 2, 4) for result in everywhere(workers, program)]
    assert len(results) == 7
    assert len(set(results)) == 1
    assert results[0][1] > 0.5


def test_the_last_lines_of_digits(capsys, monkeypatch):
    monkeypatch.setattr(digits, "EPOCHS", 2)
    everywhere(2, digits.main)
    said = capsys.readouterr().out
    assert "\repoch  2/2" in said
    *_, digest, last = said.splitlines()
    assert re.fullmatch(r"weights_sha256=[0-9a-f]{64}", digest)
    assert re.fullmatch(r"test_accuracy=0\.\d{3} workers=2 seconds=\d+\.\d", last)


def test_digits_refuses_three_workers_and_a_missing_scikit_learn(monkeypatch):
    with pytest.raises(sv.ConfigError, match="--workers 1, 2 or 4"):
        digits.own_shards(3, 0)
    assert [list(digits.own_shards(2, rank)) for rank in (0, 1)] == [[0, 1], [2, 3]]
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'syncvar\[examples\]'"):
        digits.load()
