"""What goes into `sv.run` and what comes out: refusals are one exception, and come before anything starts where they can."""

import subprocess
import traceback

import pytest

import syncvar as sv


class Own:
    """A value of a class of the program's own."""


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sv.run(divmod, workers=1, args=(Own(), 1)),
        lambda: sv.run(divmod, workers=1, args=({"a": ["\ud800"]}, 1)),
        lambda: sv.run(divmod, workers=1, kwargs={"x": Own()}),
        lambda: sv.broadcast_object([Own()]),
        lambda: sv.all_gather_object({"k": "\ud800"}),
        lambda: sv.run(lambda captured=Own().__reduce_ex__, lock=__import__("threading").Lock(): captured),
    ],
    ids=["args", "text", "kwargs", "broadcast_object", "all_gather_object", "function"],
)
def test_a_refused_value_is_one_exception(call, nothing_starts):
    with pytest.raises(sv.ConfigError) as raised:
        call()
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback (most recent call last)") == 1, printed
    assert "During handling" not in printed
