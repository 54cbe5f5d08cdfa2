"""The house rules: no figure of `house.py` grows beyond its baseline."""

import json

import house


def test_no_figure_is_above_its_baseline_and_its_goal():
    baseline = json.loads(house.BASELINE.read_text())
    measured = house.figures()
    assert measured.keys() == house.GOALS.keys()
    grown = {
        name: f"{figure}, baseline {baseline[name]}"
        for name, figure in measured.items()
        if figure > max(baseline[name], house.GOALS[name])
    }
    assert not grown, "python tests/tidy/house.py --list MEASURE prints what a measure counts"
