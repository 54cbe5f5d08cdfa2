"""Each rule of the checker, broken once by hand; and contracts that nothing or everything can meet."""

from dataclasses import replace

import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    ScheduleArgs,
    Send,
)
from syncvar.algorithms.tree import binomial_reduce
from syncvar.cli.plan_cost import TrafficReport
from syncvar.core.errors import InternalError, PlanError
from tests.verification.schedules.collective_contracts import (
    Contract,
    ExpectedRange,
    all_gather_contract,
    all_reduce_contract,
    all_to_all_contract,
    barrier_contract,
    broadcast_contract,
    contract_of,
    gather_contract,
    reduce_contract,
    reduce_scatter_contract,
    scan_contract,
    scatter_contract,
    tree_expression,
)
from tests.verification.schedules.schedule_checker import verify
from tests.verification.schedules.symbolic_values import Expressions

NOTHING = Chunk(0, 0)
ONE = Chunk(0, 1)
SLOT = Chunk(0, 1, Buffer.SCRATCH)


def plans_of(*rounds_of_ranks, work=1, scratch=0):
    return [
        Schedule("test", "test", rank, len(rounds_of_ranks), work, scratch, tuple(rounds))
        for rank, rounds in enumerate(rounds_of_ranks)
    ]


def rejected(plans, contract, *words):
    with pytest.raises(PlanError) as caught:
        verify(plans, contract)
    for word in words:
        assert word in str(caught.value)


def test_a_plan_error_is_a_bug_of_ours():
    assert issubclass(PlanError, InternalError)


def test_an_empty_plan_of_one_rank_meets_every_contract():
    for contract in (
        all_reduce_contract(1, 3, tree=True),
        all_gather_contract([3]),
        broadcast_contract(1, 3, 0),
    ):
        assert verify(plans_of((), work=3), contract) == TrafficReport(0, (0,), (0,))
    verify(plans_of((), work=0), barrier_contract(1))


def test_an_empty_plan_of_two_ranks_meets_no_contract():
    rejected(
        plans_of((), ()),
        all_reduce_contract(2, 1),
        "rank 0",
        "element 0 holds x0",
        "wants ranks (0, 1)",
    )
    rejected(plans_of((), ()), all_gather_contract([0, 1]), "rank 0", "holds nothing")
    rejected(plans_of((), ()), broadcast_contract(2, 1, 0), "rank 1", "holds nothing")
    rejected(plans_of((), (), work=0), barrier_contract(2), "rank 0", "not heard of rank 1")


def test_an_impossible_contract_fails():
    plans = build_all("all_reduce", "ring", 3, count=4)
    good = all_reduce_contract(3, 4)
    verify(plans, good)
    absent = replace(good, after=((ExpectedRange(Chunk(0, 4), (0, 1, 2, 3)),),) * 3)
    rejected(plans, absent, "wants ranks (0, 1, 2, 3)")
    rejected(plans, replace(good, heard_of=((0, 1, 2, 3),) * 3), "not heard of rank 3")
    backwards = replace(good, after=((ExpectedRange(Chunk(0, 4), (0, 1, 2), (2, (1, 0))),),) * 3)
    rejected(plans, backwards, "operand order")


def test_a_contract_nobody_has_the_values_for_fails():
    contract = replace(broadcast_contract(2, 1, 0), before=(NOTHING, NOTHING))
    rejected(build_all("broadcast", "tree", 2, count=1), contract, "never written")


def test_plans_must_belong_to_the_contract():
    plans = build_all("all_reduce", "ring", 3, count=4)
    rejected(plans[:2], all_reduce_contract(3, 4), "2 plans")
    rejected(plans[::-1], all_reduce_contract(3, 4), "plan 0 says")
    rejected(plans, all_reduce_contract(3, 5), "the contract says")


def test_two_ranks_that_receive_before_they_send_deadlock():
    plans = plans_of(
        [(Recv(1, NOTHING),), (Send(1, NOTHING),)],
        [(Recv(0, NOTHING),), (Send(0, NOTHING),)],
        work=0,
    )
    rejected(
        plans,
        barrier_contract(2),
        "deadlock",
        "rank 0, round 0, step 0 (Recv w[0:0] = <1>) waits for rank 1",
    )


def test_sends_that_need_a_buffer_deadlock():
    plans = plans_of(
        [(Send(1, NOTHING),), (Recv(1, NOTHING),)],
        [(Send(0, NOTHING),), (Recv(0, NOTHING),)],
        work=0,
    )
    rejected(
        plans,
        barrier_contract(2),
        "deadlock",
        "rank 0, round 0, step 0 (Send w[0:0] to 1) waits for rank 1",
    )


def test_a_send_that_nobody_receives_is_unmatched():
    plans = plans_of([(Send(1, NOTHING),)], [], work=0)
    rejected(plans, barrier_contract(2), "unmatched: rank 1 has ended", "rank 0, round 0, step 0")


def test_a_receive_that_nobody_sends_is_unmatched():
    plans = plans_of([], [(), (Recv(0, NOTHING),)], work=0)
    rejected(plans, barrier_contract(2), "unmatched: rank 0 has ended", "rank 1, round 1, step 0")


def test_both_ends_of_a_transfer_count_the_same_round():
    plans = plans_of(
        [(Send(1, NOTHING), Recv(1, NOTHING))], [(), (Send(0, NOTHING), Recv(0, NOTHING))], work=0
    )
    rejected(plans, barrier_contract(2), "count different rounds")


def test_both_ends_of_a_transfer_have_the_same_element_count():
    plans = plans_of([(Send(1, ONE),)], [(Recv(0, Chunk(0, 2)),)], work=2)
    rejected(plans, all_reduce_contract(2, 2), "element counts differ", "rank 1, round 0, step 0")


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_the_peer_is_another_rank_of_the_group(peer):
    rejected(plans_of([(Send(peer, ONE),)], []), all_reduce_contract(2, 1), "not another rank")


@pytest.mark.parametrize("chunk", [Chunk(0, 2), Chunk(-1, 0), Chunk(1, 0), SLOT, Chunk(2, 2)])
def test_chunks_lie_in_their_buffer(chunk):
    rejected(
        plans_of([(Send(1, chunk),)], []),
        all_reduce_contract(2, 1),
        "rank 0, round 0, step 0",
        "out of range",
    )


def test_scratch_is_written_before_it_is_read():
    for step in (
        Send(1, SLOT),
        Copy(SLOT, ONE),
        Reduce(SLOT, ONE, source_left=False),
        Reduce(ONE, SLOT, source_left=False),
    ):
        rejected(
            plans_of([(step,)], [], scratch=1),
            all_reduce_contract(2, 1),
            "SCRATCH element 0",
            "never written",
        )


@pytest.mark.parametrize("kind", [Send, Recv])
def test_one_transfer_per_peer_and_direction_in_a_round(kind):
    plans = plans_of([(kind(1, NOTHING), kind(1, NOTHING))], [])
    rejected(plans, all_reduce_contract(2, 1), "step 1", "second transfer")


def test_local_steps_come_after_the_transfers():
    plans = plans_of([(Copy(ONE, SLOT), Send(1, ONE))], [], scratch=1)
    rejected(plans, all_reduce_contract(2, 1), "step 1", "after a local step")


def test_written_ranges_of_a_round_do_not_overlap_each_other():
    plans = plans_of([(Recv(1, Chunk(0, 2)), Recv(2, Chunk(1, 3)))], [], [], work=3)
    rejected(plans, all_reduce_contract(3, 3), "rank 0, round 0", "element 1", "overlap")


@pytest.mark.parametrize("sent", [Chunk(0, 3), Chunk(1, 2), Chunk(2, 3)])
def test_written_ranges_of_a_round_do_not_overlap_sent_ones(sent):
    for other in ((Send(1, sent), Recv(2, Chunk(1, 3))), (Send(1, Chunk(1, 3)), Recv(2, sent))):
        rejected(
            plans_of([other], [], [], work=3),
            all_reduce_contract(3, 3),
            "rank 0, round 0",
            "overlap",
        )


def test_sent_ranges_of_a_round_may_overlap():
    plans = build_all("all_gather", "direct", 4, count=2)
    assert len({step.chunk for step in plans[0].rounds[0] if isinstance(step, Send)}) == 1
    verify(plans, all_gather_contract([2] * 4))


def test_local_steps_have_equal_counts_and_do_not_overlap_themselves():
    for step in (
        Copy(Chunk(0, 2), Chunk(2, 3)),
        Reduce(Chunk(0, 1), Chunk(1, 3), source_left=True),
    ):
        rejected(plans_of([(step,)], work=3), all_reduce_contract(1, 3), "differ in count")
    for step in (
        Copy(Chunk(0, 2), Chunk(1, 3)),
        Reduce(Chunk(0, 1), Chunk(0, 1), source_left=True),
    ):
        rejected(plans_of([(step,)], work=3), all_reduce_contract(1, 3), "overlap")


def test_an_idle_copy_is_rejected():
    plans = plans_of([(Copy(ONE, SLOT), Copy(ONE, SLOT))], scratch=1)
    rejected(plans, all_reduce_contract(1, 1), "rank 0, round 0, step 1", "idle")


def exchange(first_left, second_left):
    return plans_of(
        [(Send(1, SLOT), RecvReduce(1, ONE, incoming_left=first_left))],
        [(Send(0, SLOT), RecvReduce(0, ONE, incoming_left=second_left))],
        scratch=1,
    )


def published(plans):
    return [plan._replace(rounds=((Copy(ONE, SLOT),), *plan.rounds)) for plan in plans]


def test_the_lower_contributor_is_the_left_operand():
    verify(published(exchange(first_left=False, second_left=True)), all_reduce_contract(2, 1))
    for first, second in [(True, True), (False, False), (True, False)]:
        plans = published(exchange(first_left=first, second_left=second))
        rejected(plans, all_reduce_contract(2, 1), "operand order", "round 1, step 1")


def test_a_contribution_counts_once():
    twice = (Copy(ONE, SLOT), Reduce(SLOT, ONE, source_left=False))
    rejected(
        plans_of([twice], scratch=1), all_reduce_contract(1, 1), "step 1", "counted twice: x0 + x0"
    )


def test_elements_do_not_mix():
    plans = plans_of([(Reduce(Chunk(0, 1), Chunk(1, 2), source_left=True),)], work=2)
    rejected(plans, all_reduce_contract(1, 2), "elements 0 and 1")
    plans = plans_of([(Copy(Chunk(0, 1), Chunk(1, 2)),)], work=2)
    rejected(plans, all_reduce_contract(1, 2), "element 1 holds x0 of element 0")


def test_all_ranks_hold_the_same_expression():
    # Rank 1 and rank 0 sum three contributions with different brackets, each with the lower operand on the left.
    slots = [Chunk(slot, slot + 1, Buffer.SCRATCH) for slot in range(3)]

    def rank_rounds(rank, *sums):
        others = [other for other in range(3) if other != rank]
        steps = [Send(other, slots[rank]) for other in others] + [
            Recv(other, slots[other]) for other in others
        ]
        return [(Copy(ONE, slots[rank]),), (*steps, *sums)]

    left_first = [
        rank_rounds(
            0, Reduce(slots[1], ONE, source_left=False), Reduce(slots[2], ONE, source_left=False)
        ),
        rank_rounds(
            1, Reduce(slots[0], ONE, source_left=True), Reduce(slots[2], ONE, source_left=False)
        ),
    ]
    last_alike = rank_rounds(
        2, Reduce(slots[1], slots[0], source_left=False), Reduce(slots[0], ONE, source_left=True)
    )
    last_other = rank_rounds(
        2, Reduce(slots[1], ONE, source_left=True), Reduce(slots[0], ONE, source_left=True)
    )
    verify(plans_of(*left_first, last_alike, scratch=3), all_reduce_contract(3, 1))
    rejected(
        plans_of(*left_first, last_other, scratch=3),
        all_reduce_contract(3, 1),
        "(x0 + (x1 + x2)), but on rank 0 it is ((x0 + x1) + x2)",
    )


def test_memory_is_borrowed_in_the_round_of_its_send():
    # The natural one-round all-reduce: send WORK itself, then reduce into it.
    plans = plans_of(
        [(Send(1, ONE), Recv(1, SLOT), Reduce(SLOT, ONE, source_left=False))],
        [(Send(0, ONE), Recv(0, SLOT), Reduce(SLOT, ONE, source_left=True))],
        scratch=1,
    )
    rejected(
        plans, all_reduce_contract(2, 1), "step 2", "borrowed by the send to rank 1 in round 0"
    )


def test_memory_is_borrowed_until_the_receipt_is_known_however_many_rounds_pass():
    first, second = (
        (Send(1, ONE), Recv(1, SLOT)),
        (Send(0, ONE), Recv(0, SLOT)),
    )
    sums = (Reduce(SLOT, ONE, source_left=False),), (Reduce(SLOT, ONE, source_left=True),)
    idle = ((),) * 5
    rejected(
        plans_of([first, *idle, sums[0]], [second, *idle, sums[1]], scratch=1),
        all_reduce_contract(2, 1),
        "round 6, step 0",
        "borrowed",
    )
    heard = ((Send(1, NOTHING), Recv(1, NOTHING)), (Send(0, NOTHING), Recv(0, NOTHING)))
    verify(
        plans_of([first, heard[0], sums[0]], [second, heard[1], sums[1]], scratch=1),
        all_reduce_contract(2, 1),
    )
    # The acknowledgement may come in the round of the write itself, because local steps follow the transfers.
    verify(
        plans_of([first, (*heard[0], *sums[0])], [second, (*heard[1], *sums[1])], scratch=1),
        all_reduce_contract(2, 1),
    )


def test_a_receive_may_overwrite_borrowed_memory_only_with_a_message_that_follows_the_receipt():
    # Rank 0 gives its value to 1, and 2 gives one to 0 in the next round. Only if 2 has heard from 1 may it land there.
    contract = Contract(
        "test", 3, (1,) * 3, (ONE, NOTHING, ONE), ((ExpectedRange(ONE, (2,)),), (), ()), ((),) * 3
    )
    ignorant = plans_of(
        [(Send(1, ONE),), (Recv(2, ONE),)], [(Recv(0, ONE),)], [(), (Send(0, ONE),)]
    )
    rejected(
        ignorant, contract, "rank 0, round 1, step 0", "borrowed by the send to rank 1 in round 0"
    )
    told = plans_of(
        [(Send(1, ONE),), (), (Recv(2, ONE),)],
        [(Recv(0, ONE),), (Send(2, NOTHING),)],
        [(), (Recv(1, NOTHING),), (Send(0, ONE),)],
    )
    verify(told, contract)
    # A message of the same round from another rank does not help a receive: it may come after the write.
    beside = plans_of(
        [(Send(1, ONE),), (Recv(1, NOTHING), Recv(2, ONE))],
        [(Recv(0, ONE),), (Send(0, NOTHING),)],
        [(), (Send(0, ONE),)],
    )
    rejected(beside, contract, "rank 0, round 1, step 1", "borrowed")


def test_an_all_reduce_of_nothing_still_waits_for_every_rank():
    lonely = build_all("broadcast", "tree", 3, count=0)
    verify(lonely, broadcast_contract(3, 0, 0))
    rejected(lonely, all_reduce_contract(3, 0), "rank 0", "not heard of rank 1")


def test_the_tree_of_the_contract_is_demanded():
    ring = build_all("all_reduce", "ring", 4, count=4)
    rejected(ring, all_reduce_contract(4, 4, tree=True), "the contract wants ((0, 1), (2, 3))")


def test_a_reduction_to_rank_0_meets_its_own_contract():
    rounds = [tuple(binomial_reduce(ScheduleArgs(rank, 6, 2))) for rank in range(6)]
    work = Chunk(0, 2)
    wanted = ExpectedRange(work, tuple(range(6)), tree_expression(0, 6))
    contract = Contract("reduce", 6, (2,) * 6, (work,) * 6, ((wanted,), *((),) * 5), ((),) * 6)
    assert verify(plans_of(*rounds, work=2), contract) == TrafficReport(
        3, (0, 1, 1, 1, 1, 1), (0, 2, 2, 2, 2, 2)
    )


def test_there_is_a_contract_for_each_collective_by_name():
    assert contract_of("all_reduce", 3, count=2, tree=True) == all_reduce_contract(3, 2, tree=True)
    assert contract_of("all_gather", 2, count=3) == all_gather_contract([3, 3])
    assert contract_of("all_gather", 2, counts=[1, 3]) == all_gather_contract([1, 3])
    assert contract_of("broadcast", 3, count=2, root=1) == broadcast_contract(3, 2, 1)
    assert contract_of("barrier", 3) == barrier_contract(3)
    assert contract_of("reduce", 3, count=2, root=1, tree=True) == reduce_contract(
        3, 2, 1, tree=True
    )
    assert contract_of("gather", 2, count=3, root=1) == gather_contract([3, 3], 1)
    assert contract_of("scatter", 2, counts=[3, 1]) == scatter_contract([3, 1], 0)
    assert contract_of("reduce_scatter", 2, counts=[3, 1]) == reduce_scatter_contract([3, 1])
    assert contract_of("all_to_all", 2, count=1) == all_to_all_contract([[1, 1], [1, 1]])
    assert contract_of("scan", 3, count=2) == scan_contract(3, 2)
    assert contract_of("exscan", 3, count=2) == scan_contract(3, 2, exclusive=True)
    with pytest.raises(ValueError, match="no contract for a collective named 'sort'"):
        contract_of("sort", 2)


def test_equal_expressions_are_the_same_integer():
    expressions = Expressions()
    x0, x1, x2 = (expressions.leaf(rank, 5) for rank in range(3))
    assert expressions.leaf(0, 5) == x0
    assert expressions.leaf(0, 6) != x0
    left = expressions.combine(expressions.combine(x0, x1), x2)
    assert left == expressions.of(((0, 1), 2), 5)
    assert left != expressions.of((0, (1, 2)), 5)
    assert expressions.text(left) == "((x0 + x1) + x2)"
