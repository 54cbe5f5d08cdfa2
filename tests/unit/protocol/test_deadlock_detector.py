"""Reports of long waits: mismatch, certain deadlock, stall; and nothing said where a rank may still move."""

import itertools
import random

import pytest

from syncvar.protocol.deadlock_detector import WaitReport, find_deadlock, find_mismatch, find_stalls
from syncvar.protocol.unreceived_messages import ENTERED_MAX

ALL = (0, 1, 2, 3, 4)


def report(
    rank, group, members, call=0, *, entered=None, fingerprint=1, received=0.0, since=0.0, **more
):
    fields = {
        "description": f"call of group {group}",
        "site": "a.py:1",
        "awaiting": (),
        "mismatch": False,
        "has_active_threads": False,
    } | more
    return WaitReport(
        rank=rank,
        group=group,
        members=tuple(members),
        call=call,
        ordinal=call + 1,
        fingerprint=fingerprint,
        since=since,
        received=received,
        entered={group: call} | (entered or {}),
        **fields,
    )


# -- mismatch --------------------------------------------------------------------------------------


def test_the_same_call_everywhere_is_no_mismatch():
    assert find_mismatch([report(rank, 7, (0, 1, 2)) for rank in range(3)], 99.0) == []


def test_two_fingerprints_at_one_call_are_a_mismatch_with_a_row_for_every_member():
    reports = [
        report(0, 7, (0, 1, 2)),
        report(1, 7, (0, 1, 2), fingerprint=2, description="other"),
        report(2, 8, (2,)),
    ]
    (verdict,) = find_mismatch(reports, 1.0)
    assert (verdict.group, verdict.call, verdict.members) == (7, 0, (0, 1, 2))
    assert set(verdict.table) == {0, 1, 2}
    assert verdict.table[1].startswith("other (call 1) at a.py:1")
    assert "group 8" in verdict.table[2]


def test_other_calls_and_other_groups_are_not_compared():
    members = (0, 1)
    assert (
        find_mismatch([report(0, 7, members, 0), report(1, 7, members, 1, fingerprint=2)], 9.0)
        == []
    )
    assert find_mismatch([report(0, 7, members), report(1, 8, members, fingerprint=2)], 9.0) == []


def test_a_verdict_waits_a_moment_for_those_who_have_not_reported():
    reports = [report(0, 7, ALL, received=1.0), report(1, 7, ALL, fingerprint=2, received=1.2)]
    assert find_mismatch(reports, 1.3) == []
    (verdict,) = find_mismatch(reports, 1.6)
    assert verdict.table[4] == "has not reported"


def test_one_rank_that_saw_a_strange_frame_is_enough():
    (verdict,) = find_mismatch([report(0, 7, (0, 1), mismatch=True)], 1.0)
    assert verdict.table == {0: "call of group 7 (call 1) at a.py:1", 1: "has not reported"}


# -- deadlock --------------------------------------------------------------------------------------


def ring(length, **more):
    """Ranks 0 … length-1, each in a group with the next, which has not entered it."""
    return [report(rank, 100 + rank, (rank, (rank + 1) % length), **more) for rank in range(length)]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_a_cycle_of_any_length_is_a_deadlock_in_whatever_order_it_is_reported(length):
    for order in itertools.permutations(ring(length)):
        verdicts = find_deadlock(list(order))
        assert {verdict.group for verdict in verdicts} == {100 + rank for rank in range(length)}
        for verdict in verdicts:
            assert set(verdict.table) == set(range(length))
            for rank in range(length):
                assert verdict.table[rank].endswith(f"for rank {(rank + 1) % length}")


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_cycle_with_a_rank_that_has_not_reported_or_may_move_is_none(length, missing):
    reports = ring(length)
    assert find_deadlock([one for one in reports if one.rank != missing]) == []
    reports[missing] = report(
        missing, 100 + missing, (missing, (missing + 1) % length), has_active_threads=True
    )
    assert find_deadlock(reports) == []


def test_a_rank_that_has_entered_the_call_is_not_waited_for():
    reports = ring(3)
    reports[1] = report(1, 101, (1, 2), entered={100: 0})
    assert find_deadlock(reports) == []


def test_a_rank_with_two_waits_may_move():
    assert find_deadlock([*ring(2), report(0, 300, (0, 3))]) == []


def test_a_rank_whose_threads_wait_in_two_calls_moves_if_one_ends():
    waits = [report(0, 100, (0, 1)), report(0, 200, (0, 2))]
    assert find_deadlock([*waits, report(1, 101, (0, 1))]) == []  # rank 2 has not reported
    verdicts = find_deadlock([*waits, report(1, 101, (0, 1)), report(2, 201, (1, 2))])
    assert {verdict.group for verdict in verdicts} == {100, 200, 101, 201}
    assert verdicts[0].table[0] == (
        "waits in call of group 100 (call 1) at a.py:1 for rank 1; "
        "waits in call of group 200 (call 1) at a.py:1 for rank 2"
    )


def test_a_started_call_keeps_no_rank_from_moving_and_from_waiting():
    started = report(0, 50, (0, 1), is_awaited=False)
    assert len(find_deadlock([started, *ring(2)])) == 2
    assert find_deadlock([started, *ring(2)[1:]]) == []


def test_a_group_that_a_long_list_lacks_was_perhaps_used_before():
    many = dict.fromkeys(range(1000, 1000 + ENTERED_MAX), 0)
    reports = [report(0, 100, (0, 1)), report(1, 101, (0, 1), entered=many)]
    assert find_deadlock(reports) == []
    many.popitem()
    many.popitem()
    reports[1] = report(1, 101, (0, 1), entered=many)
    assert len(find_deadlock(reports)) == 2


def test_a_chain_that_ends_in_somebody_who_computes_is_no_deadlock():
    assert find_deadlock(ring(5)[:4]) == []


def test_ranks_beside_a_cycle_are_not_in_its_table():
    reports = [*ring(2), report(3, 400, (3, 0)), report(4, 400, (4, 3, 0))]
    verdicts = find_deadlock(reports)
    assert {verdict.group for verdict in verdicts} == {100, 101}
    assert set(verdicts[0].table) == {0, 1}


def test_no_false_deadlock_in_any_state_of_ranks_that_can_still_finish():
    """Random programs without deadlock, stopped anywhere: a cycle is never found."""
    draw = random.Random(0)
    for _ in range(3000):
        size = draw.randint(2, 5)
        groups = [tuple(sorted(draw.sample(range(size), draw.randint(2, size)))) for _ in range(4)]
        order = [
            draw.randrange(len(groups)) for _ in range(8)
        ]  # one global order, so that all can finish
        programs = [[group for group in order if rank in groups[group]] for rank in range(size)]
        place = [0] * size
        reports = {}
        for _ in range(draw.randint(0, 40)):
            rank = draw.randrange(size)
            if place[rank] >= len(programs[rank]):
                continue
            group = programs[rank][place[rank]]
            call = programs[rank][: place[rank]].count(group)
            entered = {
                g: programs[rank][: place[rank] + 1].count(g) - 1 for g in range(len(groups))
            }
            reports[rank] = report(rank, group, groups[group], call, entered=entered)
            there = all(
                programs[other][: place[other] + 1].count(group) > call for other in groups[group]
            )
            if there and draw.random() < 0.9:
                place[rank] += 1
                reports.pop(rank)
            assert find_deadlock(list(reports.values())) == []


# -- waits for any of several ranks ----------------------------------------------------------------


def any_of(rank, group, *alternatives, **more):
    return report(rank, group, (rank,), alternatives=alternatives, **more)


def test_a_wait_for_any_rank_is_a_deadlock_if_all_of_them_wait():
    reports = [
        any_of(0, 90, (1, 10, 4), (2, 20, 0)),
        report(1, 7, (0, 1)),
        report(2, 8, (1, 2), entered={20: -1}),
    ]
    found = find_deadlock(reports)
    assert {(one.group, one.members) for one in found} == {(90, (0,)), (7, (0, 1)), (8, (1, 2))}
    assert set(found[0].table) == {0, 1, 2}
    assert "for ranks 1, 2" in found[0].table[0]


def test_a_wait_for_any_rank_ends_if_one_of_them_can_move():
    blocked = [any_of(0, 90, (1, 10, 4), (2, 20, 0)), report(1, 7, (0, 1))]
    assert find_deadlock(blocked) == []  # rank 2 has not reported
    sent = [*blocked, report(2, 8, (1, 2), entered={20: 0})]
    assert find_deadlock(sent) == []  # its message is on the way
    free = [*blocked, report(2, 8, (2, 3))]
    assert find_deadlock(free) == []  # it waits for rank 3, which has not reported


def test_two_ranks_that_probe_each_other():
    found = find_deadlock([any_of(0, 90, (1, 10, 0)), any_of(1, 91, (0, 11, 0))])
    assert {one.group for one in found} == {90, 91}


def test_a_stall_of_a_probe_does_not_name_late_ranks():
    (stall,) = find_stalls([any_of(0, 90, (1, 10, 0), since=0.0)], 99.0, 5.0)
    assert stall.sentence.endswith("no message has come")


# -- stalls ----------------------------------------------------------------------------------------


def test_a_stall_says_who_waits_for_whom_since_when_and_where():
    reports = [
        report(0, 7, (0, 1, 2)),
        report(1, 7, (0, 1, 2), since=4.0),
        report(2, 8, (2, 3), since=9.0),
    ]
    ((key, waited_s, sentence, late),) = find_stalls(reports, 12.0, 5.0)
    assert (key, waited_s, late) == ((7, 0), 12.0, [2])
    assert sentence.startswith(
        "ranks 0, 1 have been waiting 12 s in call of group 7 (call 1) at a.py:1: rank 2 has not entered it"
    )
    assert sentence.endswith("rank 2 waits in call of group 8 (call 1) at a.py:1")


def test_a_short_wait_is_no_stall_and_ranks_that_are_all_there_wait_for_data():
    assert find_stalls([report(0, 7, (0, 1))], 4.9, 5.0) == []
    ((_, _, sentence, late),) = find_stalls([report(rank, 7, (0, 1)) for rank in (0, 1)], 6.0, 5.0)
    assert "all ranks have entered it, and data are missing" in sentence
    assert late == []
