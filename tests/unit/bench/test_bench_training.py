"""What bench/training.py makes of the times of the libraries."""

import sys
from types import SimpleNamespace

import pytest

from tests.support.paths import BENCH


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import comparison.training

    yield comparison.training
    for name in [name for name in sys.modules if name.partition(".")[0] == "comparison"]:
        del sys.modules[name]


def found(us, accuracy=0.97, kind="optimizer", rows=8):
    return {"net": "mlp", "rows": rows, "kind": kind, "steps": 100, "us": us, "accuracy": accuracy}


def part_of(training, monkeypatch, times, rows=8, rounds=3):
    """Return the part for libraries whose turns give these results."""
    monkeypatch.setattr(
        training,
        "turn",
        lambda one, *_: (
            ({"results": times[one.name]}, "") if times[one.name] else (None, "it fell")
        ),
    )
    setting = SimpleNamespace(
        present={name: SimpleNamespace(name=name, label=name.upper()) for name in times},
        workers=(2,),
        effort=SimpleNamespace(rounds=rounds, timeout=1.0),
    )
    return training.training(
        setting,
        [one for one in training.TASKS if (one.net, one.rows) == ("mlp", rows)],
        "digits.npz",
    )


def test_the_fastest_kinds_are_compared_and_what_does_not_communicate_is_none(
    training, monkeypatch
):
    times = {
        "syncvar": [found(100.0, kind="list"), found(50.0)],
        "torch": [
            found(200.0, kind="ddp"),
            found(100.0, kind="ddp views"),
            found(10.0, kind="alone"),
        ],
        "tensorflow": [found(100.0, 0.976, kind="step"), found(400.0, kind="loop")],
    }
    part = part_of(training, monkeypatch, times)
    verdicts = {
        one.what.partition(",")[0] + one.what.rpartition(" against")[2]: one
        for one in part.verdicts
    }
    assert verdicts["steps per second torch ddp views"].value == 2.0
    assert verdicts["steps per second torch ddp views"].word == "reached"
    assert verdicts["steps per second tensorflow step"].value == 2.0
    assert verdicts["steps per second tensorflow step"].word == "MISSED"
    assert verdicts["final test accuracies apart tensorflow step"].value == pytest.approx(0.6)
    assert verdicts["final test accuracies apart tensorflow step"].word == "MISSED"
    assert verdicts["final test accuracies apart torch ddp views"].word == "reached"
    text = "\n".join(part.lines)
    assert "20000  50.0 (50.0-50.0)" in text
    assert not part.failed


def test_speed_has_no_bound_at_the_large_batch(training, monkeypatch):
    part = part_of(
        training,
        monkeypatch,
        {"syncvar": [found(9.0, rows=128)], "torch": [found(1.0, kind="ddp", rows=128)]},
        rows=128,
    )
    assert [one.word for one in part.verdicts] == ["not measured", "reached"]
    assert all("accuracies" in one.what for one in part.verdicts)


def test_a_library_that_fails_is_named_and_not_judged(training, monkeypatch):
    part = part_of(training, monkeypatch, {"syncvar": [], "torch": [found(1.0, kind="ddp")]})
    assert part.failed
    assert all(one.word == "not measured" for one in part.verdicts)
    assert "it fell" in "\n".join(part.lines)
