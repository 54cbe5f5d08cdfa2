"""Programs of long reductions, run on symbols by all ranks of a group, in orders in which one is as far ahead as it may be."""

import itertools
import random

import pytest

from syncvar.algorithms.reproducible_tree import tree_order
from syncvar.runtime.compile_reduce import (
    EVERYWHERE,
    BufferPlacement,
    Cells,
    ResultPlacement,
    lower_reduce,
    lower_small,
)
from syncvar.runtime.instructions import (
    Await,
    Combine,
    CopyInstruction,
    Memory,
    MemoryKind,
    Publish,
    Span,
    assemble,
    extents,
)

COUNTS = (1, 3, 4, 5, 8, 9, 16, 17, 23, 33)
BLOCK = 3


class World:
    """Memory that all ranks see, and how far each of them is: (call, phase)."""

    def __init__(self, size):
        self.size = size
        self.memory = {}
        self.at = [(0, 0)] * size
        self.tails = [0] * size

    def has_come(self, rank, need):
        return all(self.at[other] >= need for other in range(self.size) if other != rank)


def tree(values):
    values = list(values)
    for left, right in tree_order(0, len(values)):
        values[left] = (values[left], values[right])
    return values[0]


def perform(program, world, rank, number, published, read, write):
    """Take the steps of a program, when so many phases after phase 0 have been published; yields where it waits."""
    for step in program.steps:
        if isinstance(step, CopyInstruction):
            write(step.target, read(step.source))
        elif isinstance(step, Combine):
            write(
                step.target, [tree(values) for values in zip(*map(read, step.terms), strict=True)]
            )
        elif isinstance(step, Publish):
            published += 1
            world.at[rank] = (number, published)
        else:
            assert isinstance(step, Await)
            yield (number, published - step.back)


def call(world, rank, number, count, cells, places, in_place, ends):
    """Make a call as a rank; yields where it waits."""
    program = lower_reduce(rank, world.size, count, cells, places, BLOCK, ends)
    first = world.tails[rank] ^ 1

    def key(memory, of_call=number):
        kind, owner, place = memory
        if kind in (MemoryKind.SOURCE, MemoryKind.TARGET, MemoryKind.SCRATCH):
            return (
                "TARGET" if in_place and kind == MemoryKind.SOURCE else kind.name,
                rank,
                of_call,
            )
        if kind == MemoryKind.PEER_SOURCE:
            return ("TARGET" if in_place else "SOURCE", owner, of_call)
        if kind == MemoryKind.PEER_TARGET:
            return ("TARGET", owner, of_call)
        if kind == MemoryKind.CELLS:
            return ("CELLS", owner, place ^ sides[owner])
        return (kind.name, owner, place)

    def read(stretch):
        memory, start, length = stretch
        held = world.memory.get(key(memory), {})
        return [held.get(place, "nothing") for place in range(start, start + length)]

    def write(stretch, values):
        held = world.memory.setdefault(key(stretch.memory), {})
        for place, value in enumerate(values, stretch.start):
            held[place] = value

    sides = {rank: first}
    for one in program.opening:
        write(one.target, read(one.source))
    if program.opening:
        world.tails[rank] = first
    world.memory["side", rank, number] = first
    world.at[rank] = (number, 0)
    yield (number, 0)
    sides.update((other, world.memory["side", other, number]) for other in range(world.size))
    if program.last_side is not None:
        world.tails[rank] = first ^ program.last_side
    yield from perform(program, world, rank, number, 0, read, write)
    brought = ("TARGET" if in_place else "SOURCE", rank, number)
    if places.sources:  # the program that called may write there now
        world.memory.setdefault(brought, {}).update(
            {place: "overwritten" for place in range(count) if not in_place}
        )


def calls(world, rank, plan):
    for number, (count, cells, places, in_place, *given) in enumerate(plan, 1):
        ends = given[0] if given else EVERYWHERE
        held = world.memory.setdefault(("TARGET" if in_place else "SOURCE", rank, number), {})
        held.update({place: f"{number}.{rank}.{place}" for place in range(count)})
        yield from call(world, rank, number, count, cells, places, in_place, ends)
        terms = ends.terms(rank, world.size)
        if terms:
            made = world.memory["TARGET", rank, number]
            wanted = [tree(f"{number}.{one}.{place}" for one in terms) for place in range(count)]
            assert [made[place] for place in range(count)] == wanted, f"rank {rank}, call {number}"
        elif not in_place:
            assert ("TARGET", rank, number) not in world.memory


def run(size, plan, choose):
    world = World(size)
    ranks = {rank: calls(world, rank, plan) for rank in range(size)}
    needs = dict.fromkeys(ranks, (0, 0))
    while ranks:
        ready = [rank for rank in ranks if world.has_come(rank, needs[rank])]
        assert ready, f"every rank waits: {needs}"
        rank = choose(ready)
        try:
            needs[rank] = next(ranks[rank])
        except StopIteration:
            del ranks[rank]
            world.at[rank] = (1 << 30, 0)


def kinds_of_places(size):
    everyone = frozenset(range(size))
    yield BufferPlacement(), False
    yield BufferPlacement(goes_on=True), False
    yield BufferPlacement(frozenset({0})), False
    yield BufferPlacement(frozenset({size - 1}), goes_on=True), False
    yield BufferPlacement(everyone), False
    yield BufferPlacement(everyone, makes_first=True), False
    yield BufferPlacement(everyone, into_all=True), False
    yield BufferPlacement(everyone, into_all=True, by_owners=True), True
    yield BufferPlacement(frozenset({1}), into_all=True, makes_first=True), False
    yield BufferPlacement(everyone, by_owners=True), True
    yield BufferPlacement(converts=True, makes_first=True), False


@pytest.mark.parametrize(
    ("size", "lag", "sums_all"),
    [(2, 1, False), (2, 2, True), (2, 4, True), (3, 4, True), (3, 2, False), (5, 4, False)],
)
def test_every_order_gives_the_tree_of_all_ranks(size, lag, sums_all):
    cells = Cells(4, lag, sums_all)
    draw = random.Random(size * 100 + lag)
    for count, (places, in_place) in itertools.product(COUNTS, kinds_of_places(size)):
        plan = [
            (count, cells, places, in_place),
            (draw.choice(COUNTS), cells, BufferPlacement(), False),
            (count, cells, places, in_place),
        ]
        for first in range(size):
            order = [*range(first, size), *range(first)]
            run(
                size, plan, lambda ready, order=order: min(ready, key=order.index)
            )  # one goes as far ahead as it may
        run(size, plan, draw.choice)


@pytest.mark.parametrize(
    "ends",
    [
        ResultPlacement("reduce", 0),
        ResultPlacement("reduce", 1),
        ResultPlacement("scan"),
        ResultPlacement("exscan"),
    ],
)
@pytest.mark.parametrize(
    ("size", "lag", "sums_all"), [(2, 1, False), (2, 4, True), (3, 2, False), (4, 4, False)]
)
def test_every_order_gives_each_rank_what_it_ends_with(size, lag, sums_all, ends):
    cells = Cells(4, lag, sums_all)
    draw = random.Random(size * 100 + lag)
    everyone = frozenset(range(size))
    kinds = [
        (BufferPlacement(), False),
        (BufferPlacement(), True),
        (BufferPlacement(goes_on=True), False),
        (BufferPlacement(frozenset({0})), False),
        (BufferPlacement(frozenset({size - 1})), False),
        (BufferPlacement(everyone), False),
        (BufferPlacement(everyone - {1}, makes_first=True), False),
        (BufferPlacement(converts=True, makes_first=True), False),
    ]
    for count, (places, in_place) in itertools.product(COUNTS, kinds):
        other = draw.choice(
            [EVERYWHERE, ResultPlacement("scan"), ResultPlacement("reduce", size - 1)]
        )
        plan = [
            (count, cells, places, in_place, ends),
            (draw.choice(COUNTS), cells, BufferPlacement(), False, other),
            (count, cells, places, in_place, ends),
        ]
        for first in range(size):
            order = [*range(first, size), *range(first)]
            run(size, plan, lambda ready, order=order: min(ready, key=order.index))
        run(size, plan, draw.choice)


@pytest.mark.parametrize(
    "ends",
    [EVERYWHERE, ResultPlacement("reduce", 2), ResultPlacement("scan"), ResultPlacement("exscan")],
)
def test_slots_are_combined_by_those_who_end_with_them(ends):
    for rank in range(4):
        opening, steps, *_ = lower_small(rank, 4, 5, ends=ends)
        terms = [Span(Memory(MemoryKind.SLOT, one), 0, 5) for one in ends.terms(rank, 4)]
        target = Span(Memory(MemoryKind.TARGET), 0, 5)
        assert opening == (
            CopyInstruction(
                Span(Memory(MemoryKind.SOURCE), 0, 5), Span(Memory(MemoryKind.SLOT, rank), 0, 5)
            ),
        )
        assert steps == (
            (Combine(tuple(terms), target),)
            if len(terms) > 1
            else tuple(CopyInstruction(one, target) for one in terms)
        )


@pytest.mark.parametrize("change", ["no wait", "a shorter wait", "a copy less"])
def test_a_program_that_is_changed_is_found_out(change):
    """What the test above proves it proves by failing otherwise."""
    cells = Cells(4, 2, sums_all=True)
    lowered = lower_reduce
    program = lowered(0, 2, 33, cells, BufferPlacement(), BLOCK)
    kind = CopyInstruction if change == "a copy less" else Await
    place = next(place for place, step in enumerate(program.steps) if isinstance(step, kind))
    steps = list(program.steps)
    if change == "a shorter wait":
        steps[place] = Await(steps[place].back + 2)
    else:
        del steps[place]
    changed = program._replace(steps=tuple(steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            globals(),
            "lower_reduce",
            lambda rank, *rest: changed if rank == 0 else lowered(rank, *rest),
        )
        with pytest.raises((AssertionError, KeyError)):
            for first in (0, 1):
                run(
                    2,
                    [(33, cells, BufferPlacement(), False)] * 2,
                    lambda ready, first=first: first if first in ready else ready[0],
                )


def test_memories_are_as_long_as_they_are_used():
    x, slot = Memory(MemoryKind.SOURCE), Memory(MemoryKind.CELLS, 1)
    program = lower_reduce(1, 2, 10, Cells(4, 2, sums_all=True), BufferPlacement(), BLOCK)
    assert extents(program)[x] == 10
    assert extents(program)[slot] == 8
    assert Span(x, 2, 6).cut(1, 3) == Span(x, 3, 2)
    code = assemble(program)
    numbers, opening, names, sizes = code.numbers()
    assert opening == 12
    assert len(numbers) % 8 == 0
    assert len(names) == 3 * len(sizes) == 3 * len(code.sizes)
