"""Jobs of all kinds start again and again, alone and beside busy loops, and each ends as it should."""

import pytest

from tests.fuzz import repeat_starts

STARTS = 200


@pytest.mark.slow
@pytest.mark.parametrize("load", [pytest.param(0, marks=pytest.mark.nightly), 4])
def test_every_start_ends(load):
    ends = list(repeat_starts.run_many(STARTS // 2, load, seed=load))
    assert [one.trouble for one in ends if one.trouble] == []
    assert len(ends) == STARTS // 2
    assert {one.kind for one in ends} == set(repeat_starts.KINDS)
