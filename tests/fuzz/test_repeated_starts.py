"""Jobs of all kinds start again and again, alone and beside busy loops, and each ends as it should."""

import pytest

from tests.fuzz import repeat_starts

STARTS = 200


@pytest.mark.slow
@pytest.mark.parametrize("load", [0, 4])
def test_every_start_ends(load):
    ends = list(repeat_starts.run_many(STARTS // 2, load, seed=load))
    assert [one.trouble for one in ends if one.trouble] == []
    assert len(ends) == STARTS // 2
    assert {one.kind for one in ends} == set(repeat_starts.KINDS)


@pytest.mark.slow
def test_a_start_that_hangs_is_told_with_its_stacks(monkeypatch):
    kind = repeat_starts.KINDS["fork"]._replace(
        script="import time\nprint('before', flush=True)\ntime.sleep(600)"
    )
    monkeypatch.setitem(repeat_starts.KINDS, "hangs", kind)
    (end,) = repeat_starts.run_many(1, 0, seed=0, limit_s=20.0, kinds=("hangs",))
    assert end.is_hang
    for words in (
        "no end after 20 s",
        "rank 0",
        "job.py:3",
        "before",
        "state S",
        "Fatal Python error: Aborted",
    ):
        assert words in end.trouble, end.trouble
