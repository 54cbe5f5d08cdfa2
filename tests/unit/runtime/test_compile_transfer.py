"""Programs of moved blocks, of plans and of structures, run on symbols by all ranks of a group, in orders in which one is as far ahead as it may be."""

import itertools
import random

import pytest
from test_compile_reduce import World, perform, tree

from syncvar.algorithms.builders import ALGORITHMS, build_all, unsuited
from syncvar.algorithms.compile_schedule import publications
from syncvar.algorithms.schedule import Buffer, Recv, RecvReduce, Send
from syncvar.algorithms.schedule import Copy as CopyStep
from syncvar.runtime.block_transfer import Move, TransferPath, lower_move
from syncvar.runtime.compile_reduce import (
    BufferPlacement,
    Cells,
    lower_reduce,
    lower_small,
)
from syncvar.runtime.instructions import Await, Combine, CopyInstruction, MemoryKind
from syncvar.runtime.planner import lower_rounds

COUNTS = (1, 2, 3, 5, 7, 12, 16, 25)
CELL = 3


class Call:
    """A call of a rank: its program, what it begins with, and what it has to end with."""

    def __init__(self, program, held, wanted, *, by_tail=True, late=False):
        self.program, self.held, self.wanted = program, held, wanted
        self.by_tail = by_tail  # cells of phase 0 lie on the side that was not written last; else by the parity of the phase
        self.late = late  # the first cells go with a phase of their own, after phase 0


def steps_of(world, rank, number, one):
    """Make a call; yields where it waits."""
    program, sides = one.program, {}
    own = {}  # SOURCE, TARGET and SCRATCH
    for name, values in one.held.items():
        world.memory[name, rank, number] = own[name] = dict(enumerate(values))

    def held(memory):
        kind, owner, place = memory
        if kind in (MemoryKind.SOURCE, MemoryKind.TARGET, MemoryKind.SCRATCH):
            return own.setdefault((kind, place), {})
        if kind == MemoryKind.PEER_SOURCE:
            return world.memory[(MemoryKind.SOURCE, place), owner, number]
        if kind == MemoryKind.SLOT:
            return world.memory.setdefault(("SLOT", owner, number & 1), {})
        if kind == MemoryKind.COMBINED:
            return world.memory.setdefault(("MADE", owner, place), {})
        return world.memory.setdefault(("CELLS", owner, sides[owner] ^ place), {})

    def read(stretch):
        return [
            held(stretch.memory).get(place, "nothing")
            for place in range(stretch.start, stretch.start + stretch.length)
        ]

    def write(stretch, values):
        held(stretch.memory).update(enumerate(values, stretch.start))

    first = sides[rank] = world.tails[rank] ^ 1 if one.by_tail else 1
    published = 0
    if one.late:
        world.at[rank] = (number, 0)
        yield (number, 0)
    for copy in program.opening:
        write(copy.target, read(copy.source))
    published += one.late
    world.memory["side", rank, number] = first
    world.at[rank] = (number, published)
    yield (number, published)
    if program.last_side is not None:
        world.tails[rank] = first ^ program.last_side
    for owner in range(world.size):
        sides[owner] = world.memory["side", owner, number]
    yield from perform(program, world, rank, number, published, read, write)
    for name, values in one.wanted.items():
        made = own.get(name, {})
        assert [made.get(place) for place in range(len(values))] == list(values), (
            f"rank {rank}, call {number}, {name}"
        )
    for (kind, _), values in one.held.items():
        if kind == MemoryKind.SOURCE:  # the program that called may write there now
            world.memory[(kind, _), rank, number].update(
                dict.fromkeys(range(len(values)), "overwritten")
            )


def run(size, calls, choose_rank):
    """Let ranks make calls, `calls[number][rank]`, one step of a rank at a time."""
    world = World(size)

    def all_of(rank):
        for number, ranks in enumerate(calls, 1):
            yield from steps_of(world, rank, number, ranks[rank])

    ranks = {rank: all_of(rank) for rank in range(size)}
    needs = dict.fromkeys(ranks, (0, 0))
    while ranks:
        ready = [rank for rank in ranks if world.has_come(rank, needs[rank])]
        assert ready, f"every rank waits: {needs}"
        rank = choose_rank(ready)
        try:
            needs[rank] = next(ranks[rank])
        except StopIteration:
            del ranks[rank]
            world.at[rank] = (1 << 30, 0)


def every_order(size, calls, draw):
    for first in range(size):
        order = [*range(first, size), *range(first)]
        run(size, calls, lambda ready, order=order: min(ready, key=order.index))
    run(size, calls, draw.choice)


def moves(kind, size, count, tell, lag=2):
    """Return the calls of all ranks that move blocks: kind of the call, and who tells where its blocks lie."""
    folds, root = kind in ("reduce_scatter", "converted"), size // 2
    puts = size - 1 if kind in ("all_to_all", "reduce_scatter", "converted", "scatter") else 1
    made = []
    for rank in range(size):
        others = [peer for peer in range(size) if peer != rank]
        if kind in ("broadcast", "scatter"):
            place = rank - (rank > root) if kind == "scatter" else 0
            takes, mine = ([] if rank == root else [(root, place)]), puts * (rank == root)
        elif kind == "gather":
            takes, mine = (
                ([(peer, 0) for peer in others] if rank == root else []),
                int(rank != root),
            )
        else:
            takes, mine = (
                [(peer, (rank - (rank > peer)) if puts > 1 else 0) for peer in others],
                puts,
            )
        keeps = kind != "broadcast" and (rank == root or kind not in ("gather", "scatter"))
        move = Move(
            rank,
            count,
            CELL,
            lag,
            puts,
            mine,
            tuple(takes),
            keeps=keeps,
            folds=folds,
            converts=kind == "converted",
            makes_first=kind == "converted",
        )
        everyone = len(tell) == size
        way = (
            TransferPath.DIRECT
            if everyone
            else TransferPath.SLOTS
            if count <= 2 and not tell
            else TransferPath.CELLS
        )
        has_published = way == TransferPath.CELLS and rank in tell and mine > 0
        program = lower_move(
            move,
            way,
            has_published=has_published,
            some_published=way == TransferPath.CELLS and bool(tell),
        )
        held = {
            (MemoryKind.SOURCE, place): [f"{rank}.{place}.{at}" for at in range(count)]
            for place in range(mine + keeps)
        }
        if folds:
            terms = [rank if peer == rank else peer for peer in range(size)]
            places = [
                mine if peer == rank else (rank - (rank > peer)) if puts > 1 else 0
                for peer in range(size)
            ]
            wanted = {
                (MemoryKind.TARGET, 0): [
                    tree(f"{one}.{place}.{at}" for one, place in zip(terms, places, strict=True))
                    for at in range(count)
                ]
            }
        else:
            wanted = {
                (MemoryKind.TARGET, at): [f"{peer}.{place}.{item}" for item in range(count)]
                for at, (peer, place) in enumerate(takes)
            }
            if keeps:
                wanted[MemoryKind.TARGET, len(takes)] = held[MemoryKind.SOURCE, mine]
        made.append(Call(program, held, wanted))
    return made


KINDS = (
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "reduce_scatter",
    "converted",
)


@pytest.mark.parametrize(("size", "lag"), [(2, 2), (2, 4), (3, 2), (3, 3), (4, 2)])
def test_every_order_moves_all_blocks(size, lag):
    draw = random.Random(size)
    everyone = frozenset(range(size))
    for kind, count, tell in itertools.product(
        KINDS, COUNTS, (frozenset(), frozenset({0}), frozenset({size - 1}), everyone)
    ):
        if kind == "converted" and tell:
            continue  # what has another dtype cannot be taken where it lies
        other = moves(
            draw.choice(KINDS[:6]),
            size,
            draw.choice(COUNTS),
            draw.choice([frozenset(), everyone]),
            lag,
        )
        every_order(
            size,
            [moves(kind, size, count, tell, lag), other, moves(kind, size, count, tell, lag)],
            draw,
        )


@pytest.mark.parametrize("change", ["no wait", "a copy less"])
@pytest.mark.parametrize("way", ["lying", "cells"])
def test_a_move_that_is_changed_is_found_out(way, change):
    calls = [
        moves("all_gather", 2, 12, frozenset({0, 1} if way == "lying" else ())) for _ in range(2)
    ]
    program = calls[0][0].program
    kind = CopyInstruction if change == "a copy less" else Await
    steps = list(program.steps)
    del steps[
        next(
            place
            for place, step in enumerate(steps)
            if isinstance(step, kind)
            and (kind is Await or step.target.memory.kind == MemoryKind.TARGET)
        )
    ]
    for call in calls:
        call[0].program = program._replace(steps=tuple(steps))
    with pytest.raises((AssertionError, KeyError)):
        for first in (0, 1):
            run(2, calls, lambda ready, first=first: first if first in ready else ready[0])


def planned(collective, algorithm, size, count, *, small, late):
    """Return the calls of all ranks that run a plan, and what each has to end with: the same as the plan's own steps give."""
    shape = (
        {"counts": (count,) * size}
        if collective in ("all_gather", "reduce_scatter")
        else {"count": count}
    )
    plans = build_all(collective, algorithm, size, root=0, **shape)
    works = [[f"{rank}.{at}" for at in range(plan.work_count)] for rank, plan in enumerate(plans)]
    ends = run_plainly(plans, works)
    made = []
    for rank in range(size):
        program = lower_rounds(publications(plans, rank), rank, CELL, 0 if late else small)
        made.append(
            Call(
                program,
                {(MemoryKind.TARGET, 0): works[rank]},
                {(MemoryKind.TARGET, 0): ends[rank]},
                by_tail=False,
                late=late,
            )
        )
    return made


def run_plainly(plans, works):
    """Run a plan as messages: each round sends what all ranks held when it began."""
    held = [
        {Buffer.WORK: list(work), Buffer.SCRATCH: ["nothing"] * plan.scratch_count}
        for plan, work in zip(plans, works, strict=True)
    ]

    def part(rank, chunk):
        return held[rank][chunk.buffer][chunk.start : chunk.stop]

    for rounds in zip(*(plan.rounds for plan in plans), strict=True):
        sent = {
            (rank, step.peer): part(rank, step.chunk)
            for rank, steps in enumerate(rounds)
            for step in steps
            if isinstance(step, Send)
        }
        for rank, steps in enumerate(rounds):
            for step in steps:
                if isinstance(step, Send):
                    continue
                if isinstance(step, Recv | RecvReduce):
                    value, target, is_left = (
                        sent[step.peer, rank],
                        step.chunk,
                        isinstance(step, RecvReduce) and step.incoming_left,
                    )
                    reduces = isinstance(step, RecvReduce)
                else:
                    value, target, reduces = (
                        part(rank, step.source),
                        step.target,
                        not isinstance(step, CopyStep),
                    )
                    is_left = reduces and step.source_left
                if reduces:
                    pairs = zip(value, part(rank, target), strict=True)
                    value = [(one, other) if is_left else (other, one) for one, other in pairs]
                held[rank][target.buffer][target.start : target.stop] = value
    return [one[Buffer.WORK] for one in held]


def joined(counts, size, cells, *, makes_first=False):
    """Return the calls of all ranks that reduce arrays as one vector; without cells through slots.

    With `makes_first` rank 0 cannot combine in its targets.
    """
    made = []
    for rank in range(size):
        if cells is None:
            program = lower_small(rank, size, counts)
        else:
            program = lower_reduce(
                rank, size, counts, cells, BufferPlacement(makes_first=makes_first and rank == 0), 8
            )
        held = {
            (MemoryKind.SOURCE, place): [f"{rank}.{place}.{at}" for at in range(count)]
            for place, count in enumerate(counts)
        }
        wanted = {
            (MemoryKind.TARGET, place): [
                tree(f"{one}.{place}.{at}" for one in range(size)) for at in range(count)
            ]
            for place, count in enumerate(counts)
        }
        made.append(Call(program, held, wanted))
    return made


@pytest.mark.parametrize(
    ("size", "lag", "sums_all"), [(2, 1, False), (2, 4, True), (3, 2, False), (4, 2, True)]
)
def test_every_order_reduces_a_structure(size, lag, sums_all):
    draw = random.Random(size)
    for counts, width in (
        ((3, 0, 5), 4),
        ((1,) * 9, 4),
        ((1,) * 19, 8),
        ((2, 1, 1, 1, 1, 9), 8),
        ((0, 7, 0), 4),
        ((13, 4), 4),
        ((2, 30, 1), 4),
    ):
        cells = Cells(width, lag, sums_all)
        between = joined(draw.choice([(5,), (2, 2), (9, 9)]), size, cells)
        every_order(
            size,
            [joined(counts, size, cells), between, joined(counts, size, cells, makes_first=True)],
            draw,
        )
        every_order(size, [joined(counts, size, None) for _ in range(3)], draw)


def test_arrays_of_a_cell_are_combined_in_their_targets_where_they_are_few_and_alike_on_all_ranks():
    """Which of two NaN is kept may depend on how much is combined at once: so all ranks combine the same stretches."""
    for counts, folds in (((3, 5), [3, 5]), ((2, 2, 2, 2), [2, 2, 2, 2]), ((1,) * 5 + (3,), [8])):
        for makes_first in (False, True):
            program = lower_reduce(
                0, 2, counts, Cells(8, sums_all=True), BufferPlacement(makes_first=makes_first), 8
            )
            made = [step.target for step in program.steps if isinstance(step, Combine)]
            assert [one.length for one in made] == folds
            assert {one.memory.kind for one in made} == {
                MemoryKind.SCRATCH if makes_first or len(folds) == 1 else MemoryKind.TARGET
            }


COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce_scatter")


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_order_runs_a_plan_to_its_end(collective, size):
    draw = random.Random(size)
    names = {
        algorithm
        for algorithm in ALGORITHMS[collective]
        if unsuited(collective, algorithm, size, even=True) is None
    }
    assert names
    for algorithm, count in itertools.product(sorted(names), (0, 1, 4, 9)):
        for small, late in ((100, False), (1, False), (0, True)):
            calls = [
                planned(collective, algorithm, size, count, small=small, late=late)
                for _ in range(3)
            ]
            if late and not calls[0][0].program.steps and not calls[0][0].program.opening:
                continue
            every_order(size, calls, draw)
