"""The checker is checked: every single change to a small plan is rejected.

The one equivalence granted: an empty chunk has no elements, so where it lies, and what would be done to its elements,
is not a change. A mutant that becomes the very same plan when empty chunks are stripped of place and operation is the
same plan. Nothing else survives.
"""

import pytest

from syncvar.algorithms.builders import ALGORITHMS, build_all, sums_by_the_tree, unsuited
from syncvar.algorithms.schedule import Buffer, Chunk, Copy, Recv, RecvReduce, Reduce, Send
from syncvar.core.errors import PlanError
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify

ROOTED = {"broadcast", "reduce", "gather", "scatter"}
OF_BLOCKS = {"all_gather", "header_exchange", "gather", "scatter", "reduce_scatter"}
FOLD_OR_SKIP = {
    "doubling",
    "halving",
    "tree",
    "scatter_gather",
    "bruck",
}  # five ranks are a case of their own
PAIRS = [
    (collective, algorithm, n)
    for collective, names in ALGORITHMS.items()
    for algorithm in names
    for n in ((2, 3, 4, 5) if algorithm in FOLD_OR_SKIP else (2, 3, 4))
    if unsuited(collective, algorithm, n, even=True) is None
]


def mutated_chunks(chunk):
    for start, stop in [(1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)]:
        yield chunk._replace(start=chunk.start + start, stop=chunk.stop + stop)
    yield chunk._replace(buffer=Buffer.SCRATCH if chunk.buffer == Buffer.WORK else Buffer.WORK)


def mutated_steps(step, world_size):
    """Every way to change one step, as the tuple of steps that takes its place."""
    yield ()
    yield (step, step)
    for name in ("chunk", "source", "target"):
        if hasattr(step, name):
            for chunk in mutated_chunks(getattr(step, name)):
                yield (step._replace(**{name: chunk}),)
    if hasattr(step, "peer"):
        for peer in range(-1, world_size + 1):
            if peer != step.peer:
                yield (step._replace(peer=peer),)
    match step:
        case Recv(peer, chunk):
            yield (RecvReduce(peer, chunk, incoming_left=False),)
            yield (RecvReduce(peer, chunk, incoming_left=True),)
            yield (Send(peer, chunk),)
        case RecvReduce(peer, chunk, left):
            yield (Recv(peer, chunk),)
            yield (RecvReduce(peer, chunk, incoming_left=not left),)
        case Send(peer, chunk):
            yield (Recv(peer, chunk),)
        case Copy(source, target):
            yield (Reduce(source, target, source_left=False),)
            yield (Reduce(source, target, source_left=True),)
            yield (Copy(target, source),)
        case Reduce(source, target, left):
            yield (Copy(source, target),)
            yield (Reduce(source, target, source_left=not left),)
            yield (Reduce(target, source, source_left=left),)
            yield (Reduce(target, source, source_left=not left),)


def mutated_rounds(rounds, world_size):
    """Every single change to the rounds of one rank, with a word to say which."""
    for number, steps in enumerate(rounds):
        for index, step in enumerate(steps):
            for change in mutated_steps(step, world_size):
                changed = (*steps[:index], *change, *steps[index + 1 :])
                yield (
                    f"round {number}, {step} -> {change}",
                    (*rounds[:number], changed, *rounds[number + 1 :]),
                )
        if number + 1 < len(rounds):
            changed = (*rounds[:number], rounds[number + 1], steps, *rounds[number + 2 :])
            yield f"rounds {number} and {number + 1} exchanged", changed


def without_empty_detail(rounds):
    """Strip empty chunks of place and operation, and drop local steps that touch no element."""
    nothing = Chunk(0, 0)

    def strip(step):
        if isinstance(step, Copy | Reduce):
            return () if step.source.count == step.target.count == 0 else (step,)
        if step.chunk.count:
            return (step,)
        return (Send(step.peer, nothing) if isinstance(step, Send) else Recv(step.peer, nothing),)

    return tuple(tuple(stripped for step in steps for stripped in strip(step)) for steps in rounds)


def with_room(plan, rounds=None):
    """Enlarge SCRATCH, so that no mutant is rejected only because the buffer happens to end."""
    return plan._replace(
        rounds=plan.rounds if rounds is None else rounds,
        scratch_count=plan.scratch_count + plan.work_count + 2,
    )


@pytest.mark.parametrize(
    ("collective", "algorithm", "world_size", "size"),
    [
        pytest.param(*pair, size, marks=[pytest.mark.slow] if pair[2] > 3 else [])
        for pair in PAIRS
        for size in ("one element", "one element more than ranks")
    ],
)
def test_every_single_change_to_a_plan_is_rejected(collective, algorithm, world_size, size):
    case = {"count": 1 if size == "one element" else world_size + 1}
    if collective in OF_BLOCKS or collective == "all_to_all":
        case = {"count": 1 if size == "one element" else 2}
    if collective in ROOTED:
        case["root"] = world_size - 1
    tree = sums_by_the_tree(collective, algorithm, world_size)
    contract = contract_of(collective, world_size, tree=tree, **case)
    plans = [with_room(plan) for plan in build_all(collective, algorithm, world_size, **case)]
    verify(plans, contract)

    survivors, mutants = [], 0
    for rank, plan in enumerate(plans):
        for name, rounds in mutated_rounds(plan.rounds, world_size):
            if without_empty_detail(rounds) == without_empty_detail(plan.rounds):
                continue
            mutants += 1
            try:
                verify([*plans[:rank], plan._replace(rounds=rounds), *plans[rank + 1 :]], contract)
            except PlanError:
                pass
            else:
                survivors.append(f"rank {rank}: {name}")
    assert survivors == []
    assert mutants >= 8 * world_size


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        (collective, algorithm)
        for collective in (*sorted(OF_BLOCKS), "all_to_all")
        for algorithm in ALGORITHMS[collective]
        if unsuited(collective, algorithm, 4, even=False) is None
    ],
)
def test_uneven_blocks_leave_no_change_unnoticed(collective, algorithm):
    for world_size in (2, 3, 4):
        if unsuited(collective, algorithm, world_size, even=False):
            continue
        case = {"counts": [2, 0, 3, 1][:world_size]}
        if collective == "all_to_all":
            case = {
                "matrix": [
                    [(3 * s + 2 * d) % 4 for d in range(world_size)] for s in range(world_size)
                ]
            }
        if collective in ROOTED:
            case["root"] = 1
        plans = [with_room(plan) for plan in build_all(collective, algorithm, world_size, **case)]
        contract = contract_of(collective, world_size, **case)
        for rank, plan in enumerate(plans):
            for name, rounds in mutated_rounds(plan.rounds, world_size):
                if without_empty_detail(rounds) != without_empty_detail(plan.rounds):
                    with pytest.raises(PlanError):
                        verify(
                            [*plans[:rank], plan._replace(rounds=rounds), *plans[rank + 1 :]],
                            contract,
                        )
                        pytest.fail(
                            f"{algorithm} on {world_size} ranks, rank {rank}: {name} was accepted"
                        )
