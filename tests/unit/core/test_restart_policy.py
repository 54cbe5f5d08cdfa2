"""Which ends of a job are followed by another start, how long the launcher waits before, and what it tells."""

import ast

import pytest

from syncvar.core import exit_status
from syncvar.core.restart_policy import (
    HOPELESS_CODES,
    HOPELESS_ERRORS,
    SHORT_S,
    Decision,
    Ending,
    Restarting,
    pause_s,
)
from tests.support.paths import REPOSITORY

KILLED = Ending(exit_code=137, failure="rank 1 was killed by signal 9 (SIGKILL)", lasted_s=3.0)
STOPPED = Ending(exit_code=exit_status.PREEMPTED, lasted_s=60.0)


def test_without_being_asked_nothing_is_started_again():
    for ending in (KILLED, STOPPED, Ending(exit_code=0)):
        assert Restarting(0, 1.0).after(ending) == Decision(restarts=False)


@pytest.mark.parametrize("code", [1, 3, 69, 70, 74, 75, 134, 137, 139, 143, 255])
def test_a_failure_that_may_pass_is_tried_again_as_often_as_asked_and_not_once_more(code):
    job = Restarting(2, 1.0)
    ending = Ending(exit_code=code, failure="rank 0 failed", lasted_s=3.0)
    assert job.after(ending) == Decision(restarts=True, reason="restart 1 of 2", pause_s=1.0)
    assert job.after(ending) == Decision(restarts=True, reason="restart 2 of 2", pause_s=2.0)
    assert job.after(ending) == Decision(restarts=False, reason="there have been 2 of 2 restarts")
    assert job.number == 2


@pytest.mark.parametrize("code", sorted(HOPELESS_CODES))
def test_an_end_that_would_come_again_is_the_end(code):
    job = Restarting(5, 1.0)
    decision = job.after(Ending(exit_code=code, failure="rank 0 failed"))
    assert not decision.restarts
    assert decision.reason == f"exit code {code} ({HOPELESS_CODES[code]}) would come again"
    assert job.number == 0


def test_usage_configuration_keys_limits_disagreement_and_the_time_limit_are_hopeless_and_losses_are_not():
    assert set(HOPELESS_CODES) == {2, 71, 76, 77, 78, 124, 126, 127}
    assert (
        set(HOPELESS_CODES)
        & {
            exit_status.INTERNAL,
            exit_status.CHECKPOINT,
            exit_status.PREEMPTED,
            exit_status.RENDEZVOUS,
            1,
            137,
            139,
            143,
        }
        == set()
    )


@pytest.mark.parametrize("error", sorted(HOPELESS_ERRORS))
def test_an_exception_that_speaks_of_the_program_is_the_end(error):
    decision = Restarting(5, 1.0).after(
        Ending(exit_code=1, failure="rank 0 exited with status 1", error=error)
    )
    assert decision == Decision(restarts=False, reason=f"{error} would come again")
    assert Restarting(5, 1.0).after(Ending(exit_code=1, failure="x", error="ValueError")).restarts


def test_the_exceptions_of_the_library_in_the_list_exist():
    source = ast.parse((REPOSITORY / "syncvar" / "core" / "errors.py").read_text())
    ours = {node.name for node in source.body if isinstance(node, ast.ClassDef)}
    builtin = {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
    assert ours >= HOPELESS_ERRORS - builtin
    assert builtin <= HOPELESS_ERRORS


def test_ranks_that_never_met_are_not_started_again_and_those_that_had_are():
    never = Ending(exit_code=exit_status.RENDEZVOUS, failure="the job failed", had_met=False)
    assert Restarting(2, 1.0).after(never) == Decision(
        restarts=False, reason="the ranks have never all joined"
    )
    job = Restarting(2, 1.0)
    assert job.after(KILLED).restarts
    assert job.after(
        Ending(exit_code=exit_status.RENDEZVOUS, failure="the job failed", had_met=True)
    ).restarts
    assert (
        Restarting(2, 1.0)
        .after(Ending(exit_code=137, failure="killed while the ranks met", had_met=False))
        .restarts
    )


@pytest.mark.parametrize("ending", [KILLED, STOPPED])
def test_who_was_told_to_end_has_ended(ending):
    told = Ending(
        exit_code=ending.exit_code,
        failure=ending.failure,
        lasted_s=ending.lasted_s,
        was_end_requested=True,
    )
    assert Restarting(9, 1.0).after(told) == Decision(
        restarts=False, reason="the launcher got a request to end"
    )


def test_a_stop_that_nobody_asked_the_launcher_for_does_not_count():
    job = Restarting(1, 1.0)
    for number in range(1, 50):
        assert job.after(STOPPED) == Decision(
            restarts=True, reason=f"restart {number}, which does not count", pause_s=1.0
        )
    assert job.after(KILLED) == Decision(restarts=True, reason="restart 1 of 1", pause_s=1.0)
    assert job.after(STOPPED).restarts
    assert not job.after(KILLED).restarts
    assert job.number == 51


def test_a_program_that_only_stops_does_not_go_round_for_ever():
    job = Restarting(3, 1.0)
    soon = Ending(exit_code=exit_status.PREEMPTED, lasted_s=SHORT_S - 0.1)
    assert [job.after(soon).restarts for _ in range(5)] == [True, True, True, False, False]


def test_one_rank_that_asks_alone_has_failed():
    job = Restarting(1, 1.0)
    alone = Ending(
        exit_code=exit_status.PREEMPTED, failure="rank 1 exited with status 75", lasted_s=60.0
    )
    assert [job.after(alone).restarts for _ in range(2)] == [True, False]


def test_pauses_double_up_to_half_a_minute():
    assert [pause_s(number, 0.5) for number in (1, 2, 3, 6, 7, 8, 10_000)] == [
        0.5,
        1,
        2,
        16,
        30,
        30,
        30,
    ]
    assert [pause_s(number, 0.0) for number in (1, 5)] == [0, 0]
    assert [pause_s(number, 100.0) for number in (1, 2, 3)] == [100, 100, 100], (
        "who asks for more gets it"
    )


def test_the_summary_tells_each_restart_and_why():
    job = Restarting(100, 1.0)
    assert job.summary() == []
    job.after(KILLED)
    assert job.summary() == [
        "started again 1 time:",
        "  1. after 3.0 s: rank 1 was killed by signal 9 (SIGKILL)",
    ]
    job.after(STOPPED)
    assert job.summary()[0] == "started again 2 times:"
    assert job.summary()[2] == "  2. after 60.0 s: all ranks stopped as asked"
    for _ in range(30):
        job.after(KILLED)
    lines = job.summary()
    assert lines[:2] == ["started again 32 times:", "  (earlier ones left out)"]
    assert [line.split(".")[0].strip() for line in lines[2:]] == [
        str(number) for number in range(23, 33)
    ]
