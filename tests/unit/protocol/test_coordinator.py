"""What the launcher tells whom: joining, aborts, leaving, verdicts, poison, generations, as dialogues."""

import pytest

from syncvar.core.errors import WireError
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.coordinator import (
    AbortJob,
    Coordinator,
    SendMessage,
    ShowMessage,
    Unresponsive,
)
from syncvar.protocol.frame import PROTOCOL_VERSION

CONFIG = RuntimeConfig(rendezvous_timeout_s=30.0, missing_report_s=5.0, stall_warning_s=10.0)


def made(world_size=3):
    return Coordinator(world_size, "j", CONFIG)


def join(coordinator, rank, now=0.0, generation=0, job="j", **about):
    fields = {"protocol": PROTOCOL_VERSION, "byte_order": "little"} | about
    message = pack_message(
        "join",
        rank=rank,
        job=job,
        generation=generation,
        address=f"a{rank}",
        pid=10 + rank,
        host="box",
        about=fields,
    )
    return coordinator.join(parse_message(message), now)


def joined(world_size=3):
    coordinator = made(world_size)
    for rank in range(world_size):
        join(coordinator, rank)
    return coordinator


def say(coordinator, rank, kind, now=1.0, **fields):
    return told(coordinator.message(rank, parse_message(pack_message(kind, **fields)), now))


def told(actions):
    """{rank: [messages]} of the actions; every message passes the schema that workers check."""
    result = {}
    for action in actions:
        assert isinstance(action, SendMessage), action
        result.setdefault(action.rank, []).append(parse_message(action.data))
    return result


def report(**more):
    return {
        "group": 0,
        "members": [0, 1, 2],
        "call": 4,
        "ordinal": 4,
        "fingerprint": 1,
        "description": "barrier",
        "site": "a.py:1",
        "awaiting": [1],
        "alternatives": [],
        "waited_s": 0.1,
        "mismatch": False,
        "is_awaited": True,
        "has_active_threads": False,
        "entered": {0: 4},
    } | more


def kinds(messages):
    return {rank: [one["kind"] for one in those] for rank, those in messages.items()}


# -- joining ---------------------------------------------------------------------------------------


def test_everybody_gets_the_roll_when_the_last_has_joined():
    coordinator = made(2)
    assert join(coordinator, 1) == ("", [])
    refused, actions = join(coordinator, 0, 3.0)
    assert refused == ""
    messages = told(actions)
    assert kinds(messages) == {0: ["members"], 1: ["members"]}
    assert messages[0][0]["addresses"] == {0: "a0", 1: "a1"}
    assert messages[0][0]["hosts"] == {0: "box", 1: "box"}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"job": "another"}, "another job"),
        ({"generation": 7}, "generation 7 cannot be joined"),
        ({"rank": 3}, "outside a world of 3"),
        ({"rank": 0}, "already taken by process 10"),
    ],
)
def test_who_does_not_belong_is_refused_with_the_reason(more, reason):
    coordinator = made()
    join(coordinator, 0)
    refused, actions = join(coordinator, **{"rank": 1} | more)
    assert reason in refused
    assert actions == []


def test_ranks_that_cannot_work_together_are_all_refused():
    coordinator = made()
    join(coordinator, 0)
    join(coordinator, 2, protocol=9)
    assert not coordinator.handshake.failed, "the table is to be whole"
    refused, actions = join(coordinator, 1)
    messages = told(actions)
    assert refused == ""
    assert kinds(messages) == {rank: ["refused"] for rank in range(3)}
    assert {messages[rank][0]["error"] for rank in range(3)} == {"HandshakeError"}
    assert (
        f"  protocol: {PROTOCOL_VERSION} (ranks 0, 1), 9 (rank 2)"
        in messages[2][0]["reason"].splitlines()
    )
    assert not coordinator.handshake.is_complete
    assert join(coordinator, 0)[0].startswith("the ranks differ"), "and whoever comes again"


def test_ranks_that_all_have_another_protocol_than_the_launcher_are_refused():
    coordinator = made(2)
    join(coordinator, 0, protocol=1)
    messages = told(join(coordinator, 1, protocol=1)[1])
    assert kinds(messages) == {rank: ["refused"] for rank in range(2)}
    assert messages[0][0]["error"] == "HandshakeError"
    assert messages[0][0]["reason"] == (
        f"the ranks have protocol 1, and this process has {PROTOCOL_VERSION}: "
        "install the same syncvar everywhere"
    )


def test_what_ranks_had_better_have_alike_is_said_once():
    coordinator = made(2)
    join(coordinator, 0, numpy="1.26")
    actions = join(coordinator, 1, numpy="2.1")[1]
    assert [action.text for action in actions if isinstance(action, ShowMessage)] == [
        "the ranks differ: NumPy '1.26' (rank 0), '2.1' (rank 1)"
    ]
    assert kinds(told(action for action in actions if isinstance(action, SendMessage))) == {
        0: ["members"],
        1: ["members"],
    }
    join(coordinator, 0, generation=1, numpy="1.26")
    assert not [
        one
        for one in join(coordinator, 1, generation=1, numpy="2.1")[1]
        if isinstance(one, ShowMessage)
    ]


@pytest.mark.parametrize("generation", [0, 2, 5])
def test_after_a_restart_those_of_an_earlier_generation_are_refused(generation):
    coordinator = Coordinator(3, "j", CONFIG, 3)
    refused, actions = join(coordinator, 0, generation=generation)
    assert refused == f"generation {generation} cannot be joined, 3 is in force"
    assert actions == []
    assert coordinator.handshake.members == coordinator.next_handshake.members == {}
    assert join(coordinator, 0, generation=3) == ("", [])


def test_the_missing_are_named_then_the_meeting_fails_for_launcher_and_ranks():
    coordinator = made()
    join(coordinator, 1)
    assert coordinator.tick(4.9) == []
    (sentence,) = coordinator.tick(5.0)
    assert isinstance(sentence, ShowMessage)
    assert "waiting for ranks 0, 2" in sentence.text
    failure, *tells = coordinator.tick(30.0)
    assert isinstance(failure, AbortJob)
    assert "ranks 0, 2 did not join within 30 s" in failure.reason
    ((message,),) = told(tells).values()
    assert (message["kind"], message["missing"]) == ("refused", [0, 2])
    assert coordinator.tick(31.0) == []


# -- ends ------------------------------------------------------------------------------------------


def test_a_rank_that_ended_badly_is_told_to_all_others_once():
    coordinator = joined()
    messages = told(coordinator.ended(1, "signal 9", 1.0, -9))
    assert kinds(messages) == {0: ["abort"], 2: ["abort"]}
    abort = messages[0][0]
    assert (abort["rank"], abort["host"], abort["reason"]) == (1, "box", "signal 9")
    assert abort["status"] == [-9]
    assert coordinator.ended(1, "signal 9", 2.0) == []


def test_a_rank_that_says_how_it_fails_is_told_to_all_others_once():
    coordinator = joined()
    reason = "uncaught ValueError: no data"
    messages = say(coordinator, 1, "process_failure", reason=reason, failure_kind="raised")
    assert sorted(messages) == [0, 2]
    assert all(
        one["kind"] == "abort" and one["rank"] == 1 for each in messages.values() for one in each
    )
    found = {(one["reason"], one["failure_kind"]) for each in messages.values() for one in each}
    assert found == {(reason, "raised")}
    assert not coordinator.ended(1, "its process ended without leaving", 2.0)


def test_a_rank_that_waits_for_the_next_generation_hears_of_a_loss_too():
    coordinator = joined()
    say(coordinator, 0, "leave", entered={0: 4}, skipped=[], sent=[], sites={})
    assert join(coordinator, 0, generation=1) == ("", [])
    messages = told(coordinator.ended(1, "signal 9", 1.0))
    assert kinds(messages) == {0: ["abort"], 2: ["abort"]}


def test_a_rank_that_leaves_is_told_to_those_who_have_not_left():
    coordinator = joined()
    assert kinds(say(coordinator, 0, "leave", entered={0: 4}, skipped=[], sent=[], sites={})) == {
        1: ["leave_notice"],
        2: ["leave_notice"],
    }
    messages = say(coordinator, 1, "leave", entered={0: 4, 9: 2}, skipped=[], sent=[], sites={})
    assert kinds(messages) == {2: ["leave_notice"]}
    assert (messages[2][0]["rank"], messages[2][0]["entered"]) == (1, {0: 4, 9: 2})
    assert coordinator.position(1) == "finished"


def test_the_next_generation_begins_when_all_have_left_and_joined_anew():
    coordinator = joined()
    say(coordinator, 0, "wait_report", **report())
    for rank in range(3):
        say(coordinator, rank, "leave", entered={0: 1}, skipped=[], sent=[], sites={})
        refused, actions = join(coordinator, rank, generation=1)
        assert refused == ""
        assert kinds(told(actions)) == ({} if rank < 2 else {one: ["members"] for one in range(3)})
    assert coordinator.handshake.generation == 1
    assert coordinator.left == {}
    assert "generation 0 cannot be joined" in join(coordinator, 0, generation=0)[0]
    assert kinds(told(coordinator.ended(0, "x", 1.0))) == {1: ["abort"], 2: ["abort"]}


def test_a_missed_deadline_is_told_to_the_others_with_its_call():
    fields = {
        "failure_kind": "deadline",
        "reason": "gave up",
        "group": 5,
        "call": 7,
        "missing": [2],
    }
    messages = say(joined(), 0, "group_failure", **fields)
    assert kinds(messages) == {1: ["abort"], 2: ["abort"]}
    assert {name: messages[1][0][name] for name in fields} == fields
    assert messages[1][0]["rank"] == 0


def test_a_lost_link_accuses_the_lost_and_not_the_messenger():
    fields = {
        "failure_kind": "lost",
        "reason": "it closed the connection",
        "group": -1,
        "call": -1,
        "missing": [2],
    }
    messages = say(joined(4), 0, "group_failure", **fields)
    assert kinds(messages) == {1: ["abort"], 3: ["abort"]}
    assert messages[1][0]["rank"] == 2


# -- verdicts --------------------------------------------------------------------------------------


def test_ranks_at_one_call_with_different_fingerprints_all_get_the_verdict():
    coordinator = joined()
    assert say(coordinator, 0, "wait_report", **report()) == {}
    assert (
        say(coordinator, 1, "wait_report", **report(fingerprint=2, description="all_reduce")) == {}
    )
    messages = say(coordinator, 2, "wait_report", **report())
    assert kinds(messages) == {rank: ["decision"] for rank in range(3)}
    assert messages[0][0]["table"][1].startswith("all_reduce (call 4) at a.py:1")
    assert coordinator.tick(99.0) == []


def test_a_cycle_over_two_groups_is_told_to_the_members_of_both():
    coordinator = joined()
    assert (
        say(coordinator, 0, "wait_report", **report(group=8, members=[0, 1], entered={8: 4})) == {}
    )
    messages = say(coordinator, 1, "wait_report", **report(group=9, members=[0, 1], entered={9: 4}))
    assert kinds(messages) == {0: ["decision"] * 2, 1: ["decision"] * 2}
    assert all("deadlock" in one["text"] for one in messages[0])
    assert all(one["is_deadlock"] for one in messages[0])


def test_a_rank_that_goes_on_takes_its_report_back():
    coordinator = joined()
    say(coordinator, 0, "wait_report", **report(group=8, members=[0, 1], entered={8: 4}))
    say(coordinator, 0, "wait_end", group=8, call=4)
    assert (
        say(coordinator, 1, "wait_report", **report(group=9, members=[0, 1], entered={9: 4})) == {}
    )
    assert coordinator.position(0) == "not waiting in any call"
    assert coordinator.position(1).startswith("waiting in barrier (call 4)")


def test_poison_is_told_to_the_members_with_what_the_others_do():
    coordinator = joined()
    say(coordinator, 2, "wait_report", **report(members=[0, 2]))
    fields = {
        "group": 0,
        "members": [0, 2],
        "call": 4,
        "description": "all_reduce",
        "reason": "ConfigError: op",
    }
    messages = say(coordinator, 0, "reject_call", **fields)
    assert kinds(messages) == {2: ["decision"]}
    verdict = messages[2][0]
    assert (verdict["group"], verdict["call"], verdict["last_call"]) == (0, 4, 4)
    assert set(verdict["table"]) == {0, 2}
    assert "rank 0 refused its own call" in verdict["text"]


def test_a_left_block_dooms_the_calls_up_to_its_end():
    messages = say(
        joined(),
        1,
        "abort_step",
        group=0,
        members=[0, 1, 2],
        call=6,
        last_call=99,
        reason="KeyError: 'x'",
    )
    assert kinds(messages) == {0: ["decision"], 2: ["decision"]}
    assert (messages[0][0]["call"], messages[0][0]["last_call"]) == (7, 99)
    assert "KeyError" in messages[0][0]["text"]


def crossed(coordinator, rank):
    """Report that rank 0 waits in group 8 for rank 1, or rank 1 in group 9 for rank 0."""
    group = 8 + rank
    return say(
        coordinator,
        rank,
        "wait_report",
        **report(group=group, members=[0, 1], call=7, entered={group: 7}),
    )


REJECT = {"group": 8, "members": [0, 1], "call": 7, "description": "barrier", "reason": "text"}
ABORT = {"group": 8, "members": [0, 1], "call": 4, "last_call": 9, "reason": "text"}
LEAVE = {"entered": {8: 5}, "skipped": [], "sent": [], "sites": {}}
SKIP = LEAVE | {"entered": {8: 10}, "skipped": [8, 6, 8]}


@pytest.mark.parametrize("is_first", [True, False], ids=["reported before", "reported after"])
@pytest.mark.parametrize(
    ("rank", "kind", "fields"),
    [
        (2, "reject_call", REJECT),
        (2, "abort_step", ABORT),
        (0, "abort_step", ABORT),  # a rank that refuses its own next call
        (2, "leave", LEAVE),
        (2, "leave", SKIP),
    ],
)
def test_a_call_that_ends_with_an_error_is_part_of_no_deadlock(rank, kind, fields, is_first):
    coordinator = joined()
    waits = report(group=8, members=[0, 1, 2], call=7, entered={8: 7})
    if is_first:
        say(coordinator, 0, "wait_report", **waits)
    say(coordinator, rank, kind, **fields)
    if not is_first:
        say(coordinator, 0, "wait_report", **waits)
    assert coordinator.position(0) == "not waiting in any call"
    assert crossed(coordinator, 1) == {}
    # The rank has heard of it, and waits elsewhere: now there is a circle.
    later = report(group=8, members=[0, 1], call=12, entered={8: 12})
    assert say(coordinator, 0, "wait_report", **later) == {}  # one of its threads goes on
    say(coordinator, 0, "wait_end", group=8, call=7)
    assert coordinator.tick(5.0) == []
    messages = say(coordinator, 0, "wait_report", **later)
    assert set(messages) == {0, 1}
    assert all(one["is_deadlock"] for one in messages[0])


def test_a_report_that_overlaps_its_decision_makes_no_second_one():
    coordinator = joined()
    crossed(coordinator, 0)
    assert set(crossed(coordinator, 1)) == {0, 1}
    assert crossed(coordinator, 0) == {}
    assert crossed(coordinator, 1) == {}
    assert coordinator.tick(99.0) == []


def test_the_latest_report_says_whether_all_threads_of_a_rank_wait():
    coordinator = joined()
    crossed(coordinator, 1)
    other = report(group=7, members=[0, 2], entered={7: 4})
    say(coordinator, 0, "wait_report", **other)
    assert crossed(coordinator, 0) == {}  # two threads wait, and the call with rank 2 may end
    say(coordinator, 0, "wait_end", group=7, call=4)
    assert coordinator.tick(5.0) == []  # the thread that waited there makes other calls
    assert set(crossed(coordinator, 0)) == {0, 1}


@pytest.mark.parametrize("kind", ["deadline", "interrupted", "lost"])
def test_a_broken_group_has_neither_deadlocks_nor_stalls(kind):
    coordinator = joined()
    say(coordinator, 1, "wait_report", now=0.0, **report())
    fields = {"failure_kind": kind, "reason": "x", "group": -1, "call": -1, "missing": [2]}
    say(coordinator, 0, "group_failure", **fields)
    assert coordinator.tick(20.0) == []
    assert crossed(coordinator, 0) == crossed(coordinator, 1) == {}
    assert coordinator.position(1).startswith("waiting in")


HERE = {
    "last_call": "barrier (call 3)",
    "age_s": 11.6,
    "is_finished": True,
    "stack": "in user code, a.py:9 < a.py:1",
}
WAITS = "rank 0 has been waiting {} s in barrier (call 4) at a.py:1: ranks 1, 2 have not entered it"


def sentences(actions):
    return [action.text for action in actions if isinstance(action, ShowMessage)]


def test_a_stall_names_what_the_late_ranks_did_last_and_where_they_are():
    coordinator = joined()
    say(coordinator, 0, "wait_report", now=0.0, **report())
    assert coordinator.tick(9.8) == []
    assert kinds(told(coordinator.tick(10.0))) == {1: ["ping"], 2: ["ping"]}
    say(coordinator, 1, "status", now=10.1, **HERE)
    assert coordinator.tick(10.1) == [], "the other one may answer yet"
    say(coordinator, 2, "status", now=10.2, **HERE | {"last_call": "", "stack": ""})
    assert sentences(coordinator.tick(10.2)) == [
        WAITS.format(10)
        + "; rank 1: last call barrier (call 3), 12 s ago, now in user code, a.py:9 < a.py:1; rank 2: no call yet"
    ]
    assert coordinator.tick(50.0) == []
    assert kinds(told(coordinator.tick(60.0))) == {1: ["ping"], 2: ["ping"]}
    for rank in (1, 2):
        say(coordinator, rank, "status", now=60.0, **HERE | {"is_finished": False, "age_s": 3.0})
    assert sentences(coordinator.tick(60.0)) == [
        WAITS.format(60)
        + "; ranks 1, 2: last call barrier (call 3), under way for 3 s, now in user code, a.py:9 < a.py:1"
    ]


def test_a_stall_is_said_after_10_60_and_300_seconds():
    coordinator = joined()
    say(coordinator, 0, "wait_report", now=0.0, **report())
    said = []
    for now in range(1000):
        for action in coordinator.tick(float(now)):
            if isinstance(action, SendMessage):
                say(coordinator, action.rank, "status", now=float(now), **HERE)
        said += [now] * len(sentences(coordinator.tick(float(now))))
    assert said == [10, 60, 300, 600, 900]


def test_a_late_rank_that_reports_a_call_of_its_own_is_not_told_of_twice():
    coordinator = joined()
    say(coordinator, 0, "wait_report", now=0.0, **report())
    elsewhere = report(
        group=7,
        members=[1, 2],
        description="gather",
        site="b.py:2",
        entered={7: 4},
        has_active_threads=True,
    )
    say(coordinator, 1, "wait_report", now=0.0, **elsewhere)
    coordinator.tick(10.0)
    for rank in (1, 2):
        say(coordinator, rank, "status", now=10.0, **HERE)
    first, second = sentences(coordinator.tick(10.0))
    assert first.count("rank 1 ") == 1
    assert first.endswith(
        "; rank 1 waits in gather (call 4) at b.py:2; rank 2: last call barrier (call 3), 12 s ago, now in user code, a.py:9 < a.py:1"
    )
    assert second.startswith("rank 1 has been waiting 10 s in gather")


def test_who_is_waited_for_is_asked_and_who_does_not_answer_is_told_of():
    coordinator = joined()
    say(coordinator, 0, "wait_report", now=0.0, **report())
    assert kinds(told(coordinator.tick(10.0))) == {1: ["ping"], 2: ["ping"]}
    say(coordinator, 2, "status", now=10.0, **HERE)
    assert coordinator.tick(10.9) == []
    *said, record_silent = coordinator.tick(11.0)
    assert record_silent == Unresponsive(1, 1.0)
    assert sentences(said) == [
        WAITS.format(11)
        + "; rank 2: last call barrier (call 3), 12 s ago, now in user code, a.py:9 < a.py:1"
    ]
    assert coordinator.tick(12.0) == []
    coordinator.stalls.record_silent(1, "it sleeps")
    assert [coordinator.position(rank) for rank in (1, 2)] == [
        "not waiting in any call; it sleeps",
        "not waiting in any call",
    ]
    say(coordinator, 1, "status", **HERE)
    assert coordinator.position(1) == "not waiting in any call"


def test_a_rank_that_was_given_up_is_told_itself_and_one_that_ended_is_not():
    coordinator = joined()
    messages = told(coordinator.fence_rank(1, "silent", 1.0))
    assert kinds(messages) == {0: ["abort"], 1: ["abort"], 2: ["abort"]}
    assert {messages[rank][0]["rank"] for rank in range(3)} == {1}
    assert coordinator.fence_rank(1, "silent", 2.0) == []


@pytest.mark.parametrize("kind", ["members", "abort", "decision", "leave_notice", "refused"])
def test_a_worker_may_not_speak_for_the_launcher(kind):
    with pytest.raises(WireError, match="may not send"):
        joined().message(0, {"kind": kind}, 1.0)


def join_hosts(coordinator, hosts):
    """Let a rank of each host join; return the messages of the last join."""
    for rank, host in enumerate(hosts):
        index = hosts.index(host)
        fields = {"protocol": PROTOCOL_VERSION, "byte_order": "little", "probes": 1}
        about = fields | {"host_index": index, "outside": f"tcp://h:{rank}"}
        generation = coordinator.handshake.generation
        place = {"rank": rank, "address": f"a{rank}", "host": host, "pid": 10 + rank}
        message = pack_message("join", job="j", generation=generation, about=about, **place)
        refused, actions = coordinator.join(parse_message(message), 0.0)
        assert not refused
    return [parse_message(action.data) for action in actions]


def networks(actions):
    """Return the numbers that actions send, by rank."""
    return {one.rank: parse_message(one.data)["rates"] for one in actions}


def test_all_ranks_get_the_numbers_of_all_heads_and_a_later_membership_knows_them():
    coordinator = Coordinator(3, "j", CONFIG)
    assert {one["probes"] for one in join_hosts(coordinator, "abc")} == {True}
    report = {"kind": "host_rates", "path": "lanes"}
    assert coordinator.message(1, report | {"rates": [1, 2, 5, 6]}, 0.1) == []
    assert coordinator.message(2, report | {"rates": []}, 0.1) == []
    assert coordinator.message(2, report | {"rates": [0, 1, 9, 9]}, 0.1) == []  # twice
    actions = coordinator.message(0, report | {"rates": [0, 2, 3, 4, 0, 1, 1, 2]}, 0.1)
    flat = [0, 1, 1, 2, 0, 2, 3, 4, 1, 2, 5, 6]
    assert networks(actions) == dict.fromkeys(range(3), flat)
    assert coordinator.network.is_new
    later = Coordinator(2, "j", CONFIG, 1)  # the same hosts in another order of ranks
    later.network.known = coordinator.network.known
    known = join_hosts(later, "ca")
    assert [(one["probes"], one["rates"]) for one in known] == [(False, [0, 1, 3, 4])] * 2
    other = Coordinator(2, "j", CONFIG, 2)
    other.network.known = coordinator.network.known
    assert {one["probes"] for one in join_hosts(other, "ad")} == {True}


def test_a_head_that_is_late_holds_nobody_up():
    coordinator = Coordinator(2, "j", CONFIG)
    join_hosts(coordinator, "ab")
    rates = {"kind": "host_rates", "path": "", "rates": []}
    assert coordinator.message(1, rates, 0.1) == []
    assert coordinator.tick(1.0) == []
    assert networks(coordinator.tick(60.0)) == {0: [], 1: []}
    assert coordinator.message(0, rates | {"rates": [0, 1, 5, 6]}, 61.0) == []
    assert coordinator.tick(62.0) == []


def test_one_host_is_not_measured():
    assert not any(one["probes"] for one in join_hosts(Coordinator(2, "j", CONFIG), "aa"))
