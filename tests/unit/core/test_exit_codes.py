"""Whether a process ends because of an exception, which decides whether it says goodbye and waits for others."""

import sys

from syncvar.core.exit_status import is_failing


def test_an_exception_that_ended_the_program_is_a_failure_and_one_seen_at_a_prompt_is_not(
    monkeypatch,
):
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    assert not is_failing()
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert is_failing()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not is_failing()
