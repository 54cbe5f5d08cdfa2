"""The symbolic checker: runs the plans of all ranks on expressions instead of numbers.

What it accepts is correct on any transport that delivers the messages from one rank to another in order. It assumes
the least: no buffering at all, so a transfer happens only when both ends have posted it, and memory that stays
borrowed by a send until something that follows from the receipt is known here. Beyond the rules of `Round` it demands
that both ends of a transfer count it as the same round, because the round is part of the name of a message, and that
no Copy is idle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncvar.algorithms.hierarchical import stages
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
    step_text,
)
from syncvar.cli.plan import TrafficReport, traffic
from syncvar.core.errors import PlanError
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.symbolic_values import UNDEFINED, Expressions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.algorithms.hierarchical import StagePart
    from syncvar.algorithms.schedule import Round, Step
    from tests.verification.schedules.collective_contracts import Contract


def verify(plans: Sequence[Schedule], contract: Contract) -> TrafficReport:
    """Prove that the plans of a group fulfil a contract.

    Args:
        plans: The plans of all ranks, in rank order.
        contract: What they must achieve.

    Returns:
        Counts of rounds, messages and elements.

    Raises:
        PlanError: A rule is broken, or the contract is not met; the message names rank, round and step.

    Cost: about one dictionary look-up per element moved, and one pass over the world size per message.

    Source: the idea of checking chunks against pre- and postconditions is msccl-tools' (Cowan et al. 2023, "MSCCLang:
        Microsoft Collective Communication Language", section 3); vector clocks are Fidge's and Mattern's (1988).
    """
    _check_headings(plans, contract)
    for plan in plans:
        for number in range(len(plan.rounds)):
            _check_round(plan, number)
    run = _Run(plans, contract)
    run.to_the_end()
    run.check_contract(contract)
    return traffic(plans)


def _check_headings(plans: Sequence[Schedule], contract: Contract) -> None:
    if len(plans) != contract.world_size:
        raise PlanError(f"{len(plans)} plans for a contract of {contract.world_size} ranks")
    for rank, plan in enumerate(plans):
        found = (plan.rank, plan.world_size, plan.work_count)
        wanted = (rank, contract.world_size, contract.work_counts[rank])
        if found != wanted:
            raise PlanError(
                f"plan {rank} says (rank, world size, work count) = {found}, the contract says {wanted}"
            )


def _place(rank: int, number: int, index: int, step: Step) -> str:
    return f"rank {rank}, round {number}, step {index} ({type(step).__name__} {step_text(step)})"


def _chunks(step: Step) -> tuple[Chunk, ...]:
    return (step.source, step.target) if isinstance(step, Copy | Reduce) else (step.chunk,)


def _overlap(one: Chunk, other: Chunk) -> bool:
    return (
        one.buffer == other.buffer
        and one.start < other.stop
        and other.start < one.stop
        and one.count > 0 < other.count
    )


def _step_fault(plan: Schedule, step: Step) -> str | None:
    """Return what is wrong with one step alone, or None."""
    for chunk in _chunks(step):
        limit = plan.work_count if chunk.buffer == Buffer.WORK else plan.scratch_count
        if not 0 <= chunk.start <= chunk.stop <= limit:
            return f"the chunk is out of range, {chunk.buffer.name} has {limit} elements"
    if isinstance(step, Copy | Reduce):
        if step.source.count != step.target.count:
            return "source and target differ in count"
        if _overlap(step.source, step.target):
            return "source and target overlap"
    elif step.peer == plan.rank or not 0 <= step.peer < plan.world_size:
        return "the peer is not another rank of the group"
    return None


def _check_round(plan: Schedule, number: int) -> None:
    """Check what can be seen in one round of one rank alone."""
    local_seen = False
    links: set[tuple[bool, int]] = set()
    written: list[Chunk] = []
    sent: list[Chunk] = []
    for index, step in enumerate(plan.rounds[number]):
        fault = _step_fault(plan, step)
        if isinstance(step, Copy | Reduce):
            local_seen = True
        else:
            link = (isinstance(step, Send), step.peer)
            if fault is None and local_seen:
                fault = "a transfer comes after a local step"
            if fault is None and link in links:
                fault = "there is a second transfer with this peer in this direction"
            links.add(link)
            (sent if isinstance(step, Send) else written).append(step.chunk)
        if fault is not None:
            raise PlanError(f"{_place(plan.rank, number, index, step)}: {fault}")
    _check_overlaps(plan, number, written, sent)


def _check_overlaps(plan: Schedule, number: int, written: list[Chunk], sent: list[Chunk]) -> None:
    """Check that no range written by a transfer meets another written or sent range of the round.

    Ordered by start, a range that meets any earlier one meets the earlier one that reaches furthest.
    """
    ends = {
        (chunk.buffer, is_write): -1 for chunk in (*written, *sent) for is_write in (True, False)
    }
    spans = [(chunk.buffer, chunk.start, chunk.stop, True) for chunk in written if chunk.count]
    spans += [(chunk.buffer, chunk.start, chunk.stop, False) for chunk in set(sent) if chunk.count]
    for buffer, start, stop, is_write in sorted(spans):
        if start < ends[buffer, True] or (is_write and start < ends[buffer, False]):
            raise PlanError(
                f"rank {plan.rank}, round {number}: {buffer.name} element {start} is written and also written or sent "
                f"by another transfer of the round: the ranges overlap"
            )
        ends[buffer, is_write] = max(ends[buffer, is_write], stop)


@dataclass(slots=True)
class _LentRange:
    """A sent range: borrowed until this rank knows that the peer has done `receipt` rounds."""

    chunk: Chunk
    peer: int
    receipt: int
    number: int


@dataclass(slots=True)
class _RankState:
    """One rank in the run. clock[p]: how many rounds of p precede this rank's now; -1: not even p's start."""

    plan: Schedule
    memory: tuple[list[int], list[int]]
    clock: list[int]
    number: int = 0
    pending: int = 0
    incoming: list[list[int]] = field(default_factory=list)
    loans: list[_LentRange] = field(default_factory=list)


class _Run:
    def __init__(self, plans: Sequence[Schedule], contract: Contract) -> None:
        self.expressions = Expressions()
        self.states: list[_RankState] = []
        # Posted and not yet met, by (source, target): the step's index and, for sends, the values.
        self.sends: dict[tuple[int, int], tuple[int, Send, list[int]]] = {}
        self.receives: dict[tuple[int, int], tuple[int, Recv | RecvReduce]] = {}
        self.ready: deque[int] = deque()
        for rank, plan in enumerate(plans):
            work = [UNDEFINED] * plan.work_count
            held = contract.before[rank]
            work[held.start : held.stop] = [
                self.expressions.leaf(rank, element) for element in range(held.start, held.stop)
            ]
            clock = [-1] * len(plans)
            clock[rank] = 0
            self.states.append(_RankState(plan, (work, [UNDEFINED] * plan.scratch_count), clock))

    def to_the_end(self) -> None:
        """Run every rank to its end; the order in which ready ranks go on cannot matter."""
        for rank in range(len(self.states)):
            self._post(rank)
        while self.ready:
            rank = self.ready.popleft()
            self._finish_round(rank)
            self._post(rank)
        self._check_all_ended()

    def _post(self, rank: int) -> None:
        """Post the transfers of a rank's next round, if there is one."""
        state = self.states[rank]
        if state.number == len(state.plan.rounds):
            return
        steps = state.plan.rounds[state.number]
        state.pending = sum(not isinstance(step, Copy | Reduce) for step in steps)
        if not state.pending:
            self.ready.append(rank)
            return
        for index, step in enumerate(steps[: state.pending]):
            if isinstance(step, Send):
                link = (rank, step.peer)
                self.sends[link] = (index, step, self._read(rank, index, step, step.chunk))
            elif isinstance(step, Recv | RecvReduce):
                link = (step.peer, rank)
                self.receives[link] = (index, step)
            if link in self.sends and link in self.receives:
                self._transfer(link)

    def _transfer(self, link: tuple[int, int]) -> None:
        source, target = self.states[link[0]], self.states[link[1]]
        send_index, send, values = self.sends.pop(link)
        index, step = self.receives.pop(link)
        here = _place(link[1], target.number, index, step)
        there = _place(link[0], source.number, send_index, send)
        if source.number != target.number:
            raise PlanError(f"{here}: it meets {there}: the two ends count different rounds")
        if step.chunk.count != len(values):
            raise PlanError(f"{here}: it meets {there}: the element counts differ")
        self._check_loans(link[1], here, step.chunk, source.clock)
        if isinstance(step, RecvReduce):
            own = self._read(link[1], index, step, step.chunk)
            values = self._combine(here, values, own, step.incoming_left)
        self._write(target, step.chunk, values)
        if send.chunk.count:
            source.loans.append(_LentRange(send.chunk, link[1], target.number + 1, source.number))
        target.incoming.append(source.clock)
        for rank in link:
            self.states[rank].pending -= 1
            if not self.states[rank].pending:
                self.ready.append(rank)

    def _finish_round(self, rank: int) -> None:
        """Run the local steps of a round whose transfers are complete."""
        state = self.states[rank]
        if state.incoming:
            state.clock = list(map(max, state.clock, *state.incoming))
            state.incoming = []
            state.loans = [loan for loan in state.loans if state.clock[loan.peer] < loan.receipt]
        else:
            state.clock = list(state.clock)
        for index, step in enumerate(state.plan.rounds[state.number]):
            if not isinstance(step, Copy | Reduce):
                continue
            here = _place(rank, state.number, index, step)
            values = self._read(rank, index, step, step.source)
            self._check_loans(rank, here, step.target, state.clock)
            if isinstance(step, Reduce):
                own = self._read(rank, index, step, step.target)
                values = self._combine(here, values, own, step.source_left)
            elif (
                values
                and values == state.memory[step.target.buffer][step.target.start : step.target.stop]
            ):
                raise PlanError(f"{here}: the copy is idle, the target holds these values already")
            self._write(state, step.target, values)
        state.number += 1
        # A fresh list each round: messages under way refer to the clock of the round that sent them.
        state.clock[rank] = state.number

    def _read(self, rank: int, index: int, step: Step, chunk: Chunk) -> list[int]:
        state = self.states[rank]
        values = state.memory[chunk.buffer][chunk.start : chunk.stop]
        if UNDEFINED in values:
            element = chunk.start + values.index(UNDEFINED)
            here = _place(rank, state.number, index, step)
            raise PlanError(
                f"{here}: {chunk.buffer.name} element {element} is read and was never written"
            )
        return values

    def _combine(self, here: str, other: list[int], own: list[int], other_left: bool) -> list[int]:
        left, right = (other, own) if other_left else (own, other)
        try:
            return list(map(self.expressions.combine, left, right))
        except PlanError as error:
            raise PlanError(f"{here}: {error}") from None

    @staticmethod
    def _write(state: _RankState, chunk: Chunk, values: list[int]) -> None:
        state.memory[chunk.buffer][chunk.start : chunk.stop] = values

    def _check_loans(self, rank: int, here: str, chunk: Chunk, clock: list[int]) -> None:
        """Check that a write follows the receipt of every send of the range, by what this rank or `clock` knows."""
        state = self.states[rank]
        for loan in state.loans:
            if (
                _overlap(loan.chunk, chunk)
                and max(state.clock[loan.peer], clock[loan.peer]) < loan.receipt
            ):
                raise PlanError(
                    f"{here}: it writes to memory that is borrowed by the send to rank {loan.peer} in round {loan.number}, "
                    f"whose receipt is not known here"
                )

    def _check_all_ended(self) -> None:
        waits = [
            (rank, peer, index, step)
            for (rank, peer), (index, step) in (
                *((link, posted[:2]) for link, posted in self.sends.items()),
                *(((target, source), posted) for (source, target), posted in self.receives.items()),
            )
        ]
        if not waits:
            return
        texts = [
            f"{_place(rank, self.states[rank].number, index, step)} waits for rank {peer}"
            for rank, peer, index, step in sorted(waits, key=lambda wait: wait[:3])
        ]
        ended = [
            peer
            for _, peer, _, _ in waits
            if self.states[peer].number == len(self.states[peer].plan.rounds)
        ]
        if ended:
            raise PlanError(f"unmatched: rank {min(ended)} has ended, but " + "; ".join(texts))
        raise PlanError("deadlock: " + "; ".join(texts))

    def check_contract(self, contract: Contract) -> None:
        """Check what each rank holds and knows at its end."""
        agreed: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, state in enumerate(self.states):
            ended = f"rank {rank}, at its end after {state.number} rounds"
            for wanted in contract.after[rank]:
                contributors = sum(1 << contributor for contributor in set(wanted.contributors))
                for element in range(wanted.chunk.start, wanted.chunk.stop):
                    value = state.memory[wanted.chunk.buffer][element]
                    where = f"{ended}: element {element} holds {self.expressions.text(value)}"
                    if value == UNDEFINED or self.expressions.contributors[value] != contributors:
                        raise PlanError(
                            f"{where}, but {contract.collective} wants ranks {wanted.contributors}"
                        )
                    origin = (
                        element
                        if wanted.origin is None
                        else element - wanted.chunk.start + wanted.origin
                    )
                    if self.expressions.element[value] != origin:
                        raise PlanError(f"{where} of element {self.expressions.element[value]}")
                    if wanted.expression is not None and value != self.expressions.of(
                        wanted.expression, origin
                    ):
                        raise PlanError(f"{where}, but the contract wants {wanted.expression}")
                    first_value, first_rank = agreed.setdefault(
                        (origin, contributors), (value, rank)
                    )
                    if value != first_value:
                        raise PlanError(
                            f"{where}, but on rank {first_rank} it is {self.expressions.text(first_value)}: "
                            f"the bytes would differ"
                        )
            for other in contract.heard_of[rank]:
                if not 0 <= other < len(self.states) or state.clock[other] < 0:
                    raise PlanError(f"{ended}: it has not heard of rank {other}")


def flattened(
    collective: str,
    sizes: Sequence[int],
    *,
    count: int = 0,
    counts: Sequence[int] = (),
    itemsize: int = 1,
    root: int = 0,
    matrix: Sequence[Sequence[int]] = (),
    reproducible: bool = False,
) -> list[Schedule]:
    """Return the stages of all ranks as schedules of the whole group; arguments as for `stages`.

    Ranks that wait for others have empty rounds.
    """
    n = sum(sizes)
    contract = contract_of(
        collective, n, count=count, counts=counts or None, root=root, matrix=matrix or None
    )
    everyone = []
    for rank in range(n):
        args = ScheduleArgs(rank, n, count, tuple(counts), root, tuple(map(tuple, matrix)))
        found = stages(collective, sizes, args, itemsize=itemsize, reproducible=reproducible)
        assert found is not None
        everyone.append(found)
    rounds: list[list[Round]] = [[] for _ in range(n)]
    scratch = [found.room for found in everyone]
    for number in range(len(everyone[0].parts)):
        done = [
            _written_out(found.parts[number], contract.work_counts[rank], scratch[rank])
            for rank, found in enumerate(everyone)
        ]
        longest = max(map(len, done))
        for rank, part_rounds in enumerate(done):
            rounds[rank] += [*part_rounds, *((),) * (longest - len(part_rounds))]
            plan = everyone[rank].parts[number].plan
            scratch[rank] += plan.scratch_count if plan is not None else 0
    return [
        Schedule(
            collective,
            "hierarchical",
            rank,
            n,
            contract.work_counts[rank],
            scratch[rank],
            tuple(rounds[rank]),
        )
        for rank in range(n)
    ]


def _written_out(part: StagePart, work_count: int, scratch: int) -> list[Round]:
    """Return the rounds of a part with ranks and chunks of the whole group.

    What the stages share behind WORK is the start of SCRATCH.
    """
    if part.plan is None:
        return []

    def moved(chunk: Chunk) -> Chunk:
        start = part.chunk.start if chunk.buffer == Buffer.WORK else scratch
        here = Chunk(chunk.start + start, chunk.stop + start, chunk.buffer)
        if chunk.buffer == Buffer.WORK and here.stop > work_count:
            assert here.start >= work_count or not here.count
            return Chunk(here.start - work_count, here.stop - work_count, Buffer.SCRATCH)
        return here

    def renamed(step: Step) -> Step:
        if isinstance(step, Copy | Reduce):
            return step._replace(source=moved(step.source), target=moved(step.target))
        assert isinstance(step, Send | Recv | RecvReduce)
        return step._replace(peer=part.members[step.peer], chunk=moved(step.chunk))

    return [tuple(renamed(step) for step in steps) for steps in part.plan.rounds]
