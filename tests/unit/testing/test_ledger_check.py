"""`syncvar.testing.assert_ledger`: growth fails, is accepted on request, and lines may move."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import ConfigError
from syncvar.testing import assert_ledger, run_ranks


def write(variable, count):
    for _ in range(count):
        variable.assign_add(np.ones(4))


def checked(file, count, **options):
    """Run the check on two ranks; return the exception of rank 0, which compares, or None."""

    def program():
        w = sv.Variable(np.zeros(4), name="w", aggregation="SUM")
        with assert_ledger(file, **options):
            write(w, count)

    return run_ranks(2, program)[0]


def test_growth_of_a_variable_fails_on_rank_0(tmp_path):
    file = tmp_path / "ledger.json"
    assert checked(file, 10, update=True) is None
    saved = file.read_text()
    for count in (10, 11, 4):
        assert checked(file, count) is None, count
    failed = checked(file, 20)
    assert isinstance(failed, AssertionError)
    for text in ("variable 'w', assign_add(sum) at ", "10 -> 20 calls", "320 -> 640 bytes"):
        assert text in str(failed)
    assert "SYNCVAR_UPDATE_LEDGER=1" in str(failed)
    assert checked(file, 20, tolerance=1.0) is None
    assert file.read_text() == saved


def test_growth_is_accepted_by_a_variable_of_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "ledger.json"
    missing = checked(file, 1)
    assert isinstance(missing, ConfigError)
    assert "SYNCVAR_UPDATE_LEDGER=1" in str(missing)
    monkeypatch.setenv("SYNCVAR_UPDATE_LEDGER", "1")
    assert checked(file, 2) is None
    monkeypatch.setenv("SYNCVAR_UPDATE_LEDGER", "0")
    assert isinstance(checked(file, 4), AssertionError)
    assert checked(file, 2) is None


def test_an_exception_of_the_block_is_not_hidden(tmp_path):
    with pytest.raises(KeyError), assert_ledger(tmp_path / "ledger.json", update=True):
        raise KeyError("mine")
    assert not (tmp_path / "ledger.json").exists()
