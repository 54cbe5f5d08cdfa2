"""The evaluation example: the same scores, to the bit, for any number of workers and any size of a batch."""

import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.examples import evaluate
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=60)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def test_all_workers_count_every_digit_once():
    images, digits = evaluate.load()
    assert len(digits) == 1797
    centres = evaluate.centres_of(images, digits)
    found = ((images[:, None, :] - centres) ** 2).sum(axis=2).argmin(axis=1)
    accuracy = int((found == digits).sum()) / len(digits)
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (digits, found), 1)
    distances = []
    for size, rows in ((1, 1797), (1, 100), (2, 100), (3, 100), (3, 1796)):
        scores = everywhere(
            size, lambda rows=rows: evaluate.evaluate(sv.MirroredStrategy(), images, digits, rows)
        )
        assert {(one.accuracy, one.seen) for one in scores} == {(accuracy, 1797)}
        assert all(one.confusion.tolist() == expected.tolist() for one in scores)
        distances += [one.mean_distance for one in scores]
    assert np.allclose(distances, distances[0], rtol=1e-12)


def test_steps_of_which_most_workers_have_no_row():
    images, digits = (part[:13] for part in evaluate.load())
    one, *others = (
        scores
        for size in (1, 4)
        for scores in everywhere(
            size, lambda: evaluate.evaluate(sv.MirroredStrategy(), images, digits, 2)
        )
    )
    assert {(scores.accuracy, scores.seen) for scores in others} == {(one.accuracy, 13)}
    assert {scores.mean_of_means for scores in others} != {one.mean_of_means}, (
        "the short cut is another number"
    )


def test_the_last_line(capsys):
    everywhere(3, evaluate.main)
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "accuracy=0.9037284362826934 right=1624 seen=1797 workers=3"
    )


def test_a_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        evaluate.load()
