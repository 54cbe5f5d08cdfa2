"""What ranks tell of themselves is compared: a table for what they must have alike, a sentence for what they had better."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.bootstrap.context import compatibility_fields
from syncvar.core.errors import WireError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.membership import check_about, compare_abouts


def world(**differing):
    """Four ranks alike, but for what some have instead: name -> {rank: value}."""
    about = compatibility_fields(RuntimeConfig())
    return {
        rank: about
        | {
            name.replace("__", "."): values[rank]
            for name, values in differing.items()
            if rank in values
        }
        for rank in range(4)
    }


def test_ranks_alike_are_neither_refused_nor_warned():
    assert compare_abouts(world()) == ("", "")
    assert compare_abouts({0: {}, 1: compatibility_fields(RuntimeConfig())}) == ("", ""), (
        "who tells nothing is not compared"
    )


@pytest.mark.timeout(20)
def test_a_script_that_comes_through_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "script")
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "script"), raising=False
    )
    assert compatibility_fields(RuntimeConfig())["script"] == ""


def test_a_rank_tells_all_that_matters_and_little():
    about = compatibility_fields(RuntimeConfig(check_every=7))
    assert {"protocol", "byte_order", "syncvar", "python", "numpy", "script"} < about.keys()
    assert about["set.check_every"] == 7
    settings = {name for name in about if name.startswith("set.")}
    shared = {"algorithm", "algorithm_choice", "check_every", "check_finite", "encryption"}
    assert settings == {f"set.{name}" for name in shared}
    check_about(about)


@pytest.mark.parametrize(
    "name",
    [
        "syncvar",
        "protocol",
        "byte_order",
        "set__algorithm",
        "set__check_every",
        "set__check_finite",
    ],
)
def test_what_must_be_alike_is_refused_with_a_table(name):
    refusal, warning = compare_abouts(world(**{name: {1: "other", 3: "other"}}))
    lines = refusal.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"  {name.replace('set__', '').replace('_order', ' order')}: ")
    assert "(ranks 0, 2), 'other' (ranks 1, 3)" in lines[1]
    assert warning == ""


def test_what_had_better_be_alike_is_one_sentence_that_names_ranks():
    refusal, warning = compare_abouts(
        world(
            python={3: "3.99"},
            numpy={0: "0.1"},
            script={0: "a.py 1", 1: "train.py 00000000", 2: "", 3: "a.py 1"},
        )
    )
    assert refusal == ""
    assert "\n" not in warning
    for words in ("'3.99' (rank 3)", "'0.1' (rank 0)", "'train.py 00000000' (rank 1)"):
        assert words in warning
    assert "(ranks 0, 3)" in warning.partition("script")[2], (
        "a rank whose script is not known is not compared"
    )


_ABOUT = st.dictionaries(
    st.sampled_from(["syncvar", "python", "script", "protocol", "set.a"]) | st.text(max_size=64),
    st.integers() | st.text(max_size=300),
    max_size=40,
)


@given(st.dictionaries(st.integers(0, 4096), _ABOUT, max_size=20))
def test_whatever_ranks_tell_makes_a_short_text_that_does_nothing_to_a_terminal(told):
    for about in told.values():
        check_about(about)
    for text in compare_abouts(told):
        assert len(text) < 20_000
        assert all(" " <= character <= "~" for character in text.replace("\n", "")), text


@pytest.mark.parametrize(
    "about",
    [{str(number): 1 for number in range(65)}, {"n" * 65: 1}, {"script": "x" * 1025}],
    ids=["many", "name", "text"],
)
def test_too_much_is_refused(about):
    with pytest.raises(WireError, match="a rank"):
        check_about(about)
