"""The house rules: no figure of `house.py` grows beyond its goal."""

import house


def test_no_figure_is_above_its_goal():
    measured = house.figures()
    assert measured.keys() == house.GOALS.keys()
    assert not house.above_limit(measured), (
        "python tests/tidy/house.py --list MEASURE prints what a measure counts"
    )
