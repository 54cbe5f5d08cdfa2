"""Calls that the ranks make alike, and calls that they do not, in one order drawn from a seed; run as a rank by test_mismatched_calls.py.

Arguments: the seed, how many calls, and every how manieth the ranks disagree on; or "pairs" and a step: every pair of
different calls, or every `step`-th of them. Every result of a call that all ranks make is compared with ==, and a call
that they do not make alike has to raise MismatchError on every rank.
"""

import itertools
import random
import sys
import time

import numpy as np

import syncvar as sv

RANK, SIZE = sv.rank(), sv.world_size()
LONG = 30_000  # elements: more than a small slot, and several windows of it
slowest = 0.0


def brought(rank, count):
    return (np.arange(count) * 5 + rank * 3) % 7 + 1.0


def total(count, ranks=None):
    return sum(brought(rank, count) for rank in (range(SIZE) if ranks is None else ranks))


def cut(values, rank=RANK):
    return np.array_split(values, SIZE)[rank]


def at(root, value):
    return value if root == RANK else None


def calls(count, root):
    """Return name -> (call, expected result); all names stand for calls that differ from one another."""
    mine, every = brought(RANK, count), [brought(rank, count) for rank in range(SIZE)]
    zeros = np.zeros(count)
    return {
        "all_reduce": (lambda: sv.all_reduce(mine), total(count)),
        "mean": (lambda: sv.all_reduce(mine, "mean"), total(count) / SIZE),
        "tree": (lambda: sv.all_reduce(mine, reproducible=True), total(count)),
        "shorter": (lambda: sv.all_reduce(mine[1:]), total(count)[1:]),
        "reduce": (lambda: sv.reduce(mine, root=root), at(root, total(count))),
        "reduce elsewhere": (
            lambda: sv.reduce(mine, root=(root + 1) % SIZE),
            at((root + 1) % SIZE, total(count)),
        ),
        "broadcast": (lambda: sv.broadcast(at(root, mine), root=root), every[root]),
        "broadcast elsewhere": (
            lambda: sv.broadcast(mine, root=(root + 1) % SIZE),
            every[(root + 1) % SIZE],
        ),
        "all_gather": (lambda: sv.all_gather(mine), np.concatenate(every)),
        "gather": (lambda: sv.gather(mine, root=root), at(root, np.concatenate(every))),
        "scatter": (lambda: sv.scatter(at(root, mine), root=root), cut(every[root])),
        "reduce_scatter": (lambda: sv.reduce_scatter(mine), cut(total(count))),
        "all_to_all": (
            lambda: np.concatenate(sv.all_to_all(mine)),
            np.concatenate([cut(one) for one in every]),
        ),
        "scan": (lambda: sv.scan(mine), total(count, range(RANK + 1))),
        "exscan": (lambda: sv.exscan(mine), total(count, range(RANK)) + zeros),
        "barrier": (sv.barrier, None),
        "objects": (
            lambda: sv.all_gather_object([RANK, count]),
            [[rank, count] for rank in range(SIZE)],
        ),
        "one object": (
            lambda: sv.broadcast_object(at(root, {"n": count}), root=root),
            {"n": count},
        ),
    }


def agreed(name, call, expected):
    try:
        result = call()
    except sv.SyncvarError as error:
        raise SystemExit(
            f"rank {RANK}: {name}, which all ranks make: {type(error).__name__}: {error}"
        ) from error
    is_right = (
        result == expected
        if isinstance(expected, list | dict) or expected is None
        else np.array_equal(result, expected)
    )
    if not is_right:
        raise SystemExit(f"rank {RANK}: {name}: got {result!r:.300}, not {expected!r:.300}")


def refused(names, call):
    global slowest
    began = time.monotonic()
    try:
        result = call()
    except sv.MismatchError:
        slowest = max(slowest, time.monotonic() - began)
        return
    except sv.SyncvarError as error:
        raise SystemExit(f"rank {RANK}: {names}: {type(error).__name__}: {error}") from error
    raise SystemExit(f"rank {RANK}: {names}, and this rank is told nothing but {result!r:.300}")


def disagree(chosen, odd, count, root):
    """Let the ranks in `odd` make the second of two calls, the others the first."""
    names = f"ranks {odd} make {chosen[1]}, the others {chosen[0]}, {count} elements, root {root}"
    refused(names, calls(count, root)[chosen[RANK in odd]][0])


def at_random(seed, number, every):
    chance = random.Random(seed)
    names = list(calls(SIZE, 0))
    refusals = 0
    for turn in range(number):
        count, root = chance.choice([SIZE, 2 * SIZE + 3, LONG]), chance.randrange(SIZE)
        chosen, odd = chance.sample(names, 2), chance.sample(range(SIZE), chance.randrange(1, SIZE))
        if chance.randrange(every):
            agreed(
                f"call {turn}: {chosen[0]} of {count}, root {root}", *calls(count, root)[chosen[0]]
            )
        else:
            refusals += 1
            disagree(chosen, odd, count, root)
    return refusals


def in_pairs(step):
    names, count = list(calls(SIZE, 0)), 2 * SIZE + 1
    refusals = 0
    for number, pair in enumerate(itertools.permutations(names, 2)):
        root = number % SIZE
        if number % step:
            continue
        for odd in ([root], [rank for rank in range(SIZE) if (rank + number // SIZE) % 2]):
            refusals += 1
            disagree(pair, odd, count, root)
            agreed(f"after {pair}", *calls(count, root)[names[refusals % len(names)]])
    for name, (call, expected) in calls(LONG, 0).items():
        agreed(name, call, expected)
    return refusals


def main():
    started = time.monotonic()
    told = (
        in_pairs(int(sys.argv[2]))
        if sys.argv[1] == "pairs"
        else at_random(*map(int, sys.argv[1:4]))
    )
    sv.barrier()
    print(
        f"refused {told}, the slowest after {slowest:.2f} s, all in {time.monotonic() - started:.1f} s",
        flush=True,
    )


main()
