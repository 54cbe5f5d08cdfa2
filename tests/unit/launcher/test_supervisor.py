"""What the launcher does when workers end, in every order of events."""

import itertools

import pytest

from syncvar.core.process_ids import SERVER_0
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.job.supervisor import (
    DropServer,
    Kill,
    LoseWorker,
    NotifyPeerLost,
    RestartWorker,
    Supervisor,
    Terminate,
)

CONFIG = RuntimeConfig(abort_grace_s=2.0, term_grace_s=10.0)
LOST = {"error": "PeerLost", "message": "rank 1 was lost", "traceback": "", "exit_code": 70}
OWN = {"error": "ValueError", "message": "mine", "traceback": "Traceback …", "exit_code": 1}
DISAGREE = {"error": "MismatchError", "message": "no", "traceback": "", "exit_code": 76}


def supervisor(workers=3, *, is_command=False, timeout_s=float("inf")):
    return Supervisor(workers, CONFIG, range(workers if is_command else 0), 0.0, timeout_s)


def end(one, *ranks, now=99.0):
    for rank in ranks:
        one.exited(rank, -9, now, joined=True)


def test_all_who_said_goodbye_and_ended_with_zero_are_a_success():
    for order in itertools.permutations(range(3)):
        one = supervisor()
        for rank in order:
            one.left(rank)
            assert one.exited(rank, 0, 1.0, joined=False) == []
        assert one.is_over
        assert one.outcome().exit_code == 0
        assert one.outcome().cause is None


# Three ranks fail: 1 of its own, 0 and 2 because of that; what they said and their ends come in any order.
FAILURES = {
    "exception": [("failed", 1, OWN), ("exited", 1, 1)],
    "exit": [("exited", 1, 3)],
    "signal": [("exited", 1, -11)],
    "no goodbye": [("exited", 1, 0)],
    "silent": [("silent", 1, "its process is stopped")],
}
CODES = {"exception": 1, "exit": 3, "signal": 139, "no goodbye": 70, "silent": 70}


@pytest.mark.parametrize("kind", FAILURES)
def test_the_first_failure_by_cause_wins_in_every_order_of_events(kind):
    own = FAILURES[kind]
    for zero_first in (True, False):
        others = [("failed", 0, LOST), ("exited", 0, 70), ("failed", 2, LOST), ("exited", 2, 70)]
        if not zero_first:
            others = others[2:] + others[:2]
        for places in itertools.combinations(range(len(own) + len(others)), len(own)):
            left_own, left_others = list(own), list(others)
            one = supervisor()
            for place in range(len(own) + len(others)):
                name, rank, what = (left_own if place in places else left_others).pop(0)
                if name == "exited":
                    one.exited(rank, what, 0.5, joined=True)
                else:
                    getattr(one, name)(rank, what, 0.5)
            outcome = one.outcome()
            assert outcome.cause.rank == 1
            assert outcome.exit_code == CODES[kind]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_failures_of_equal_weight_the_first_wins(first):
    one = supervisor(2)
    one.failed(first, OWN | {"exit_code": 10 + first}, 1.0)
    one.failed(1 - first, OWN | {"exit_code": 11 - first}, 1.1)
    assert one.outcome().cause.rank == first
    assert one.outcome().exit_code == 10 + first


def test_a_disagreement_is_heavier_than_a_loss_and_lighter_than_an_own_failure():
    one = supervisor()
    one.failed(0, LOST, 1.0)
    assert one.outcome().exit_code == 70
    one.failed(1, DISAGREE, 1.1)
    assert one.outcome().exit_code == 76
    one.failed(2, OWN, 1.2)
    assert one.outcome().exit_code == 1


@pytest.mark.parametrize("status", [0, 1, 2, 3, 255, -6, -9, -11, -15])
def test_a_plain_end_has_the_code_that_shells_give_it(status):
    one = supervisor(1)
    one.exited(0, status, 1.0, joined=True)
    assert one.outcome().exit_code == (
        70 if status == 0 else status if status > 0 else 128 - status
    )


def test_the_others_are_told_once_of_each_failure():
    one = supervisor()
    (told,) = one.failed(1, OWN, 1.0)
    assert told == NotifyPeerLost(1, "uncaught ValueError: mine", status=None, kind="raised")
    assert one.exited(1, 1, 1.1, joined=True) == []
    assert one.silent(1, "silent", 1.2) == []


def test_grace_then_sigterm_then_grace_then_sigkill():
    one = supervisor()
    one.exited(1, 3, 100.0, joined=True)
    assert one.next_due() == 102.0
    assert one.tick(101.9) == []
    assert one.tick(102.0) == [Terminate((0, 2))]
    assert one.tick(102.1) == []
    assert one.next_due() == 112.0
    one.exited(0, -15, 103.0, joined=True)
    assert one.tick(111.9) == []
    assert one.tick(112.0) == [Kill((2,))]
    assert one.tick(200.0) == []
    assert one.next_due() == float("inf")
    one.exited(2, -9, 112.1, joined=True)
    assert one.is_over
    assert one.outcome().exit_code == 3


def test_a_late_look_at_the_clock_kills_at_once():
    one = supervisor()
    one.exited(1, 3, 100.0, joined=True)
    assert one.tick(500.0) == [Kill((0, 2))]


@pytest.mark.parametrize("status", [-15, -9, 143, 137, 0])
def test_those_that_we_ended_are_never_the_cause(status):
    one = supervisor()
    one.failed(1, DISAGREE, 100.0)
    one.tick(102.0)
    one.exited(0, status, 102.1, joined=True)
    one.failed(
        2, {"error": "SystemExit", "message": "143", "traceback": "", "exit_code": 143}, 102.2
    )
    end(one, 1, 2)
    assert one.outcome().cause.rank == 1
    assert one.outcome().exit_code == 76


def test_a_culprit_that_hangs_after_its_word_and_is_killed_keeps_its_own_code():
    one = supervisor()
    one.failed(1, OWN | {"exit_code": 5}, 100.0)
    one.tick(102.0)
    one.tick(112.0)
    end(one, 0, 1, 2)
    assert one.outcome().exit_code == 5
    assert one.outcome().cause.traceback == "Traceback …"


def test_a_slow_culprit_that_dumps_core_after_sigterm_is_still_the_cause():
    one = supervisor()
    one.failed(0, LOST, 100.0)
    one.tick(102.0)
    one.exited(1, -11, 105.0, joined=True)
    assert one.outcome().cause.rank == 1
    assert one.outcome().exit_code == 139


def test_the_first_signal_ends_gracefully_and_the_second_at_once():
    one = supervisor()
    assert one.signalled(2, 5.0) == [Terminate((0, 1, 2))]
    assert one.next_due() == 15.0
    assert one.signalled(2, 6.0) == [Kill((0, 1, 2))]
    end(one, 0, 1, 2)
    assert one.outcome().exit_code == 130
    assert one.outcome().interrupted == 2


def test_after_a_signal_workers_that_saved_and_ask_to_be_run_again_are_believed():
    for codes, expected in (((75, 75, 75), 75), ((75, 75, 1), 143), ((0, 0, 0), 143)):
        one = supervisor()
        one.signalled(15, 5.0)
        for rank, code in enumerate(codes):
            if code:
                one.failed(
                    rank,
                    {"error": "SystemExit", "message": "", "traceback": "", "exit_code": code},
                    6.0,
                )
            else:
                one.left(rank)
            one.exited(rank, code, 6.0, joined=False)
        assert one.is_over
        assert one.outcome().exit_code == expected


STOP = {"error": "SystemExit", "message": "75", "traceback": "", "exit_code": 75}


def test_ranks_that_take_a_signal_for_a_notice_get_more_time_and_others_do_not():
    for listening, expected in (((), 15.0), ((1,), 25.0)):
        one = supervisor()
        one.takes_notice(2, is_on=True)
        one.takes_notice(2, is_on=False)
        for rank in listening:
            one.takes_notice(rank, is_on=True)
        assert one.signalled(15, 5.0) == [Terminate((0, 1, 2))]
        assert one.next_due() == expected
        assert one.tick(expected - 0.1) == []
        assert one.tick(expected) == [Kill((0, 1, 2))]
    one = supervisor()
    one.takes_notice(1, is_on=True)
    one.left(1)
    one.exited(1, 0, 1.0, joined=False)
    one.signalled(15, 5.0)
    assert one.next_due() == 15.0, "who has ended needs no time"


def test_a_failure_gives_nobody_time_to_save():
    one = supervisor()
    one.takes_notice(0, is_on=True)
    one.exited(1, -9, 100.0, joined=True)
    assert one.tick(102.0) == [Terminate((0, 2))]
    assert one.tick(112.0) == [Kill((0, 2))]


def test_ranks_that_all_left_in_order_with_75_have_stopped_and_none_has_failed():
    for order in itertools.permutations(range(3)):
        one = supervisor()
        for rank in order:
            assert one.failed(rank, STOP, 1.0) == []
            assert one.exited(rank, 75, 1.1, joined=False) == [], (
                "the others are not told of a loss: they save too"
            )
        assert one.is_over
        assert one.outcome().exit_code == 75
        assert one.outcome().cause is None
        assert one.stopped == {0, 1, 2}


def test_who_stops_alone_is_the_cause_and_the_others_get_time_to_follow():
    one = supervisor()
    one.failed(0, STOP, 100.0)
    one.exited(0, 75, 100.1, joined=False)
    assert one.next_due() == 120.0
    assert one.tick(119.9) == []
    assert one.tick(120.0) == [Terminate((1, 2))]
    end(one, 1, 2)
    assert one.outcome().exit_code == 75
    assert one.outcome().cause.rank == 0


def test_who_exits_with_75_in_the_middle_of_the_job_is_lost():
    one = supervisor()
    assert one.failed(1, STOP, 100.0) == []
    assert one.exited(1, 75, 100.1, joined=True) == [NotifyPeerLost(1, "exited with status 75", 75)]
    assert one.tick(102.1) == [Terminate((0, 2))]
    one.failed(0, LOST, 102.2)
    end(one, 0, 2)
    assert one.outcome().cause.rank == 1
    assert one.outcome().exit_code == 75


def test_a_failure_while_others_stop_ends_the_job_as_soon_as_any_failure_and_is_its_cause():
    one = supervisor()
    one.failed(0, STOP, 100.0)
    one.exited(0, 75, 100.1, joined=False)
    one.failed(1, OWN, 101.0)
    assert one.next_due() == 103.0
    one.exited(1, 1, 101.1, joined=True)
    end(one, 2)
    assert one.outcome().exit_code == 1
    assert one.outcome().cause.rank == 1


def test_ranks_that_save_at_the_time_limit_do_not_hide_it():
    one = supervisor(timeout_s=60.0)
    one.tick(60.0)
    for rank in range(3):
        one.failed(rank, STOP, 61.0)
        one.exited(rank, 75, 61.0, joined=False)
    assert one.outcome().exit_code == 124


def test_after_a_signal_those_who_do_not_end_are_killed():
    one = supervisor()
    one.signalled(15, 5.0)
    end(one, 0, 2, now=6.0)
    assert one.tick(14.9) == []
    assert one.tick(15.0) == [Kill((1,))]
    assert one.outcome().exit_code == 143


def test_the_time_limit_ends_the_job_with_its_own_code():
    one = supervisor(timeout_s=60.0)
    assert one.next_due() == 60.0
    assert one.tick(59.9) == []
    assert one.tick(60.0) == [Terminate((0, 1, 2))]
    assert one.next_due() == 70.0
    assert one.tick(60.1) == []
    end(one, 0, 1, 2, now=61.0)
    assert one.outcome().exit_code == 124


@pytest.mark.parametrize("status", [0, 3, 70, 143, -6, -9, -11, -15])
def test_whatever_ranks_answer_to_the_time_limit_it_is_the_cause(status):
    for word in (None, OWN, LOST, OWN | {"error": "SystemExit", "exit_code": max(0, status)}):
        one = supervisor(timeout_s=60.0)
        one.tick(60.0)
        for rank in range(3):
            if word is not None:
                one.failed(rank, word, 60.1)
            one.exited(rank, status, 60.2, joined=True)
        outcome = one.outcome()
        assert (outcome.exit_code, outcome.cause.rank) == (124, -1)
        assert outcome.cause.reason == "the time limit of 60 s passed"
        assert outcome.cause.at == 60.0


@pytest.mark.parametrize("status", [0, 3, -11])
@pytest.mark.parametrize("error", ["DeadlineExceeded", "MismatchError", "ValueError"])
def test_what_a_rank_answers_when_told_to_end_is_not_the_cause_of_what_came_before(error, status):
    one = supervisor()
    one.failed(0, OWN | {"error": error}, 100.0)
    one.exited(0, 1, 100.1, joined=True)
    one.tick(102.0)
    one.failed(1, OWN | {"exit_code": 3}, 102.1)
    one.exited(1, 3, 102.1, joined=True)
    one.exited(2, status, 102.1, joined=True)
    assert one.outcome().cause.rank == 0


@pytest.mark.parametrize("error", ["DeadlineExceeded", "PeerLost", "GroupBroken"])
def test_others_lose_a_rank_that_reports_a_failure_of_others_only_when_its_process_has_ended(error):
    one = supervisor()
    assert one.failed(1, OWN | {"error": error, "exit_code": 70}, 100.0) == []
    assert one.is_reported_by_engine(1)
    assert not one.is_reported_by_engine(0)
    (action,) = one.exited(1, 70, 100.1, joined=True)
    assert action.rank == 1
    assert action.reason.startswith(f"uncaught {error}: ")


@pytest.mark.parametrize("status", [-15, -9, 143, 137, 0])
def test_a_rank_that_raised_and_is_told_to_end_while_it_ends_has_ended_by_its_error_alone(status):
    causes = []
    for is_slow in (False, True):
        one = supervisor()
        one.failed(1, OWN, 100.0)
        one.failed(0, OWN | {"message": "second"}, 100.5)
        if is_slow:
            assert one.tick(102.0) == [Terminate((0, 1, 2))]
        one.exited(1, status if is_slow else 1, 102.1, joined=True)
        end(one, 0, 2)
        causes.append(one.outcome().cause)
    assert causes[0] == causes[1]
    assert (causes[0].rank, causes[0].status, causes[0].at) == (1, 1, 100.0)


def test_a_crash_while_a_rank_that_raised_ends_is_told_whenever_it_comes():
    for is_late in (False, True):
        one = supervisor()
        one.failed(1, OWN, 100.0)
        if is_late:
            one.tick(102.0)
        one.exited(1, -11, 102.1, joined=True)
        end(one, 0, 2)
        assert (one.outcome().cause.status, one.outcome().exit_code) == (-11, 139)


def test_what_workers_are_forked_from_is_the_cause_of_what_becomes_of_its_workers():
    one = supervisor()
    one.never_began("the process that workers are forked from has ended", 137)
    end(one, 0, 1)
    assert (one.outcome().exit_code, one.outcome().cause.rank) == (137, -1)


def test_a_time_limit_that_passes_while_a_failed_job_ends_does_not_keep_the_launcher_busy():
    one = supervisor(timeout_s=60.0)
    one.exited(1, 3, 59.0, joined=True)
    assert one.next_due() == 61.0
    assert one.tick(60.5) == []
    assert one.next_due() == 61.0
    assert one.tick(61.0) == [Terminate((0, 2))]
    assert one.next_due() == 71.0
    end(one, 0, 2)
    assert one.outcome().exit_code == 3


def test_a_time_limit_on_a_job_that_has_ended_does_nothing():
    one = supervisor(1, timeout_s=60.0)
    one.left(0)
    one.exited(0, 0, 1.0, joined=False)
    assert one.tick(99.0) == []
    assert one.outcome().exit_code == 0


def test_ranks_that_do_not_meet_end_the_job_with_the_code_of_a_rendezvous():
    one = supervisor()
    assert one.did_not_meet("rank 2 did not join", 30.0) == []
    assert one.tick(32.0) == [Terminate((0, 1, 2))]
    end(one, 0, 1, 2, now=33.0)
    assert one.outcome().exit_code == 69
    assert one.outcome().cause.reason == "rank 2 did not join"


def test_a_rank_with_a_failure_of_its_own_is_the_cause_of_a_meeting_that_failed():
    one = supervisor()
    one.did_not_meet("rank 2 did not join", 30.0)
    one.failed(2, OWN, 30.1)
    assert one.outcome().exit_code == 1


@pytest.mark.parametrize(
    ("is_command", "goodbye", "joined", "succeeds"),
    [
        (False, True, False, True),
        (False, True, True, True),
        (False, False, False, False),
        (False, False, True, False),
        (True, False, False, True),
        (True, True, True, True),
        (True, False, True, False),
    ],
)
def test_status_zero_is_success_only_for_those_who_left_in_order(
    is_command, goodbye, joined, succeeds
):
    one = supervisor(1, is_command=is_command)
    if goodbye:
        one.left(0)
    one.exited(0, 0, 1.0, joined=joined)
    assert (one.outcome().exit_code == 0) is succeeds
    if not succeeds:
        assert one.outcome().cause.reason == "left with status 0 before shutdown"


# Servers: numbers of their own; with copies, without, and at the end.

PAIR = ((1,), (0,))
TRIPLE = ((1,), (2,), (0,))


def with_servers(mirrors, *, workers=2, restarts=0):
    return Supervisor(workers, CONFIG, (), 0.0, mirrors=mirrors, restarts=restarts)


def test_servers_are_told_to_end_when_the_last_worker_has_and_only_then():
    one = with_servers(((), ()))
    one.left(0)
    one.left(1)
    assert one.exited(0, 0, 1.0, joined=False) == []
    assert one.exited(1, 0, 2.0, joined=False) == [Terminate((SERVER_0, SERVER_0 + 1))]
    assert not one.is_over
    assert one.next_due() == 12.0
    assert one.exited(SERVER_0, 0, 3.0, joined=False) == []
    assert one.tick(12.0) == [Kill((SERVER_0 + 1,))]
    assert one.exited(SERVER_0 + 1, -9, 12.0, joined=False) == []
    assert (one.is_over, one.outcome().exit_code, one.outcome().cause) == (True, 0, None)


def test_a_server_that_is_told_to_end_before_it_serves_has_not_failed():
    one = with_servers(((),), workers=1)
    one.left(0)
    one.exited(0, 0, 1.0, joined=False)
    assert (
        one.failed(
            SERVER_0,
            {"error": "SystemExit", "message": "143", "traceback": "", "exit_code": 143},
            1.1,
        )
        == []
    )
    assert one.exited(SERVER_0, 143, 1.2, joined=False) == []
    assert one.outcome().exit_code == 0


@pytest.mark.parametrize("status", [-9, 1, 0])
def test_a_server_without_a_copy_that_ends_is_the_cause(status):
    one = with_servers(((), ()))
    assert [action.rank for action in one.exited(SERVER_0 + 1, status, 1.0, joined=False)] == [
        SERVER_0 + 1
    ]
    for rank in range(2):
        one.failed(rank, LOST, 1.5)
        one.exited(rank, 70, 1.5, joined=False)
    one.exited(SERVER_0, 0, 2.0, joined=False)
    assert one.is_over
    assert one.outcome().cause.rank == SERVER_0 + 1


def test_a_server_whose_copy_is_there_is_done_without_and_the_next_may_be_one_too_many():
    for mirrors, order, fatal in (
        (PAIR, (0, 1), 1),
        (PAIR, (1, 0), 1),
        (TRIPLE, (0, 1), 1),
        (TRIPLE, (0, 2), 1),
        (((), (0,)), (1, 0), 1),
    ):
        one = with_servers(mirrors)
        for place, server in enumerate(order):
            (action,) = one.exited(SERVER_0 + server, -9, 1.0, joined=False)
            assert isinstance(action, DropServer if place < fatal else NotifyPeerLost), (
                mirrors,
                order,
            )
        assert one.outcome().exit_code == 137


def test_new_copies_count_where_servers_are_lost_one_after_the_other():
    one = with_servers(TRIPLE)
    assert [type(action) for action in one.exited(SERVER_0, -9, 1.0, joined=False)] == [DropServer]
    one.copied(2, 0)
    one.copied(1, 2)
    assert [type(action) for action in one.exited(SERVER_0 + 1, -9, 2.0, joined=False)] == [
        DropServer
    ]
    assert [type(action) for action in one.exited(SERVER_0 + 2, -9, 3.0, joined=False)] == [
        NotifyPeerLost
    ]


def test_a_server_that_is_stopped_is_ended_before_its_copy_takes_its_place():
    one = with_servers(PAIR)
    assert one.silent(SERVER_0, "its process is stopped", 1.0) == [
        DropServer(SERVER_0, "its process is stopped"),
        Kill((SERVER_0,)),
    ]
    assert one.silent(SERVER_0, "its process is stopped", 2.0) == []
    assert one.exited(SERVER_0, -9, 2.0, joined=False) == []
    assert one.outcome().exit_code == 0


def test_a_server_that_fails_by_an_exception_is_done_without_too():
    one = with_servers(PAIR)
    (action,) = one.failed(SERVER_0, OWN, 1.0)
    assert action == DropServer(SERVER_0, "uncaught ValueError: mine")
    assert one.exited(SERVER_0, 1, 1.0, joined=False) == []


def test_a_worker_that_nobody_waits_for_is_started_again_alone():
    for how in ("signal", "exception"):
        one = with_servers(((),), restarts=1)
        if how == "exception":
            assert one.failed(1, OWN, 1.0, joined=False) == []
        assert one.exited(1, -9 if how == "signal" else 1, 1.0, joined=False) == []
        assert not one.is_over
        assert one.next_due() == 2.0
        assert one.tick(1.9) == []
        (again,) = one.tick(2.0)
        assert again.rank == 1
        assert again.reason == ("signal 9" if how == "signal" else "uncaught ValueError: mine")
        assert isinstance(
            one.exited(1, -9, 3.0, joined=False)[0], NotifyPeerLost
        )  # so often, and not once more
        assert one.outcome().cause.rank == 1


def test_servers_stay_while_the_last_worker_is_about_to_be_started_again():
    one = with_servers(((),), workers=1, restarts=1)
    assert one.exited(0, -9, 1.0, joined=False) == []
    assert one.tick(2.0)[0].rank == 0
    one.left(0)
    assert one.exited(0, 0, 3.0, joined=False) == [Terminate((SERVER_0,))]


def test_a_worker_whose_failure_would_come_again_is_not_started_again_alone():
    one = with_servers(((),), restarts=3)
    (action,) = one.failed(
        1,
        {"error": "SyntaxError", "message": "no", "traceback": "", "exit_code": 1},
        1.0,
        joined=False,
    )
    assert isinstance(action, NotifyPeerLost)
    two = with_servers(((),), restarts=3)
    assert isinstance(two.exited(1, 2, 1.0, joined=False)[0], NotifyPeerLost)  # wrong arguments


@pytest.mark.parametrize(
    "why", ["it had joined the others", "there are no servers", "the job is ending"]
)
def test_a_worker_is_not_started_again_alone_where_that_does_not_help(why):
    one = Supervisor(2, CONFIG, (), 0.0, mirrors=() if "no servers" in why else ((),), restarts=3)
    if "ending" in why:
        one.signalled(15, 0.5)
    one.exited(1, -9, 1.0, joined="joined" in why)
    assert not any(isinstance(action, RestartWorker) for action in one.tick(5.0))
    assert 1 in one.causes


def test_a_failure_forgets_who_was_to_be_started_again():
    one = with_servers(((),), workers=3, restarts=3)
    one.exited(1, -9, 1.0, joined=False)
    one.exited(2, 3, 1.1, joined=True)
    assert not any(isinstance(action, RestartWorker) for action in one.tick(2.5))
    one.exited(0, 70, 3.0, joined=False)
    one.exited(SERVER_0, 0, 3.0, joined=False)
    assert one.is_over


def test_workers_are_told_to_end_before_servers_which_may_have_to_save_for_them():
    one = with_servers(((),))
    assert one.signalled(2, 1.0) == [Terminate((0, 1))]
    assert [
        action for action in one.exited(0, 143, 1.5, joined=False) if isinstance(action, Terminate)
    ] == []
    assert one.exited(1, 143, 1.6, joined=False)[-1] == Terminate((SERVER_0,))
    assert one.signalled(2, 1.7) == [Kill((SERVER_0,))]


def test_servers_of_a_host_that_is_gone_with_all_ranks_are_not_replaced():
    one = Supervisor(1, CONFIG, (), 0.0, mirrors=((1,), (0,)))
    assert not any(
        isinstance(action, DropServer) for action in one.unreachable(0, "its host is gone", 1.0)
    )
    assert not any(
        isinstance(action, DropServer)
        for server in (SERVER_0, SERVER_0 + 1)
        for action in one.unreachable(server, "its host is gone", 1.0)
    )
    assert one.is_over
    assert one.outcome().cause.rank == 0


def elastic(workers=4, fewest=2, restarts=0):
    return Supervisor(workers, CONFIG, (), 0.0, restarts=restarts, fewest=fewest)


def test_an_elastic_job_loses_workers_down_to_its_fewest():
    one = elastic()
    assert one.exited(1, -9, 1.0, joined=True) == [LoseWorker(1, "signal 9", -9, "lost", False)]
    assert one.failed(3, OWN, 2.0)[0].rank == 3
    assert one.outcome().cause is None
    assert isinstance(one.exited(0, 3, 3.0, joined=True)[0], NotifyPeerLost)
    assert one.outcome().exit_code == 3


def test_a_worker_that_will_start_again_counts_as_one_that_is_left():
    one = elastic(workers=3, restarts=1)
    assert one.exited(1, -9, 1.0, joined=True)[0].returns
    assert isinstance(
        one.exited(0, -9, 1.5, joined=True)[0], LoseWorker
    )  # 2 is left, and 1 returns
    assert isinstance(one.exited(2, -9, 1.6, joined=True)[0], NotifyPeerLost)


@pytest.mark.parametrize("error", [DISAGREE, {**OWN, "error": "ImportError"}])
def test_an_error_that_would_come_again_is_no_loss(error):
    one = elastic()
    assert isinstance(one.failed(1, error, 1.0)[0], NotifyPeerLost)


def test_only_the_last_members_matter_once_the_function_has_returned():
    one = elastic(restarts=2)
    one.exited(2, -9, 1.0, joined=True)
    assert one.will_restart(2)
    one.finish([0, 1])
    assert not one.will_restart(2)
    assert isinstance(one.exited(3, -9, 2.0, joined=False)[0], LoseWorker)  # a spare
    one.left(0)
    one.exited(0, 0, 3.0, joined=False)
    assert one.outcome().exit_code == 0
    assert isinstance(one.failed(1, OWN, 3.0)[0], NotifyPeerLost)
    assert one.outcome().exit_code == 1


def test_an_error_of_a_newcomer_is_a_loss():
    one = elastic()
    one.newcomers = {1}
    assert isinstance(one.failed(1, {**OWN, "error": "ImportError"}, 1.0)[0], LoseWorker)


def test_a_worker_that_is_stopped_is_killed_and_starts_again_and_one_of_a_lost_host_does_not():
    one = elastic(restarts=2)
    stopped = LoseWorker(1, "it is stopped", None, "lost", returns=True)
    assert one.silent(1, "it is stopped", 1.0) == [stopped, Kill((1,))]
    assert one.exited(1, -9, 1.1, joined=False) == []
    assert one.tick(100.0) == [RestartWorker(1, "it is stopped")]
    assert one.unreachable(3, "its host is gone", 101.0) == [
        LoseWorker(3, "its host is gone", None, "lost", returns=False)
    ]
