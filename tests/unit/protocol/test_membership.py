"""The roll call: who is taken in, who is refused and why, what is said meanwhile; the whole dialogue as text."""

import pytest

from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar.protocol.membership import Handshake, Member
from tests.support.paths import GOLDEN

ABOUT = {"protocol": PROTOCOL_VERSION, "byte_order": "little"}


def member(rank, **more):
    return Member(rank, f"ipc:///r{rank}", "box", 100 + rank, ABOUT | more)


def roll(world_size=3, timeout_s=30.0, interval_s=5.0):
    return Handshake(world_size, 0, timeout_s, interval_s)


def dialogue():
    """Play a meeting that comes together late, and one that does not."""
    lines = []

    def say(now, event, answer):
        lines.append(f"{now:5.1f}  {event:<28} {answer or '-'}")

    for title, joins in (
        ("all come", {0: 0.0, 2: 7.0, 1: 12.0}),
        ("one never comes", {3: 0.0, 0: 1.0, 1: 9.0}),
    ):
        meeting = roll(world_size=len(joins) + (title != "all come"))
        lines.append(f"-- {title}")
        now = 0.0
        while now <= 40.0 and not meeting.is_complete and not meeting.failed:
            for rank, at in joins.items():
                if at == now:
                    say(now, f"rank {rank} joins", meeting.join(member(rank), now))
            sentence, failure = meeting.tick(now)
            if sentence or failure:
                say(now, "tick", f"FAILED: {failure}" if failure else sentence)
            now += 0.5
        lines.append(f"       complete: {meeting.is_complete}")
    meeting = roll()
    lines.append("-- refusals")
    say(0.0, "rank 1 joins", meeting.join(member(1), 0.0))
    say(1.0, "rank 1 joins again", meeting.join(member(1), 1.0))
    say(2.0, "rank 7 joins", meeting.join(member(7), 2.0))
    say(3.0, "rank -1 joins", meeting.join(member(-1), 3.0))
    say(6.0, "rank 2 ends (finished)", meeting.ended(2, "finished"))
    say(7.0, "rank 0 joins", meeting.join(member(0), 7.0))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_the_dialogue_of_a_roll_call_is_the_stored_one():
    assert dialogue() == (GOLDEN / "roll_call.txt").read_text()


def test_the_clock_runs_from_the_first_to_join():
    meeting = roll()
    assert meeting.tick(1000.0) == ("", "")
    meeting.join(member(0), 1000.0)
    assert meeting.tick(1029.9)[1] == ""
    assert "did not join within 30 s" in meeting.tick(1030.0)[1]


def test_a_complete_roll_call_never_fails():
    meeting = roll(world_size=1)
    meeting.join(member(0), 0.0)
    assert meeting.is_complete
    assert meeting.tick(1e9) == ("", "")
    assert meeting.ended(0, "finished") == ""


def test_a_failure_is_told_once_and_refuses_whoever_comes_later():
    meeting = roll()
    meeting.join(member(0), 0.0)
    failure = meeting.tick(30.0)[1]
    assert failure
    assert meeting.tick(31.0) == ("", "")
    assert meeting.join(member(1), 32.0) == failure


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_ended_without_joining_fails_the_roll_call_in_either_order(order):
    meeting = roll(world_size=2)
    answers = []
    for step in order:
        answers.append(meeting.join(member(0), 0.0) if step == 0 else meeting.ended(1, "finished"))
    answers.append(meeting.tick(0.0)[1])
    assert any(
        "rank 1 finished without joining, while rank 0 waited" in answer for answer in answers
    )
    assert meeting.failed
