"""Lists, tuples and dicts of arrays, small and long, wherever their arrays lie and by whatever way each rank goes, against plain NumPy.

As a script, this is a rank of a job: `pytree_calls.py SEED TURNS`.
"""

import contextlib
import sys

import numpy as np

import syncvar as sv
from syncvar.collectives.groups import communicator_of
from syncvar.core.errors import SharedMemoryFull

SMALL = [(3, 1, 4), (1, 1), (0, 2), (5,) * 17, (200, 1, 30), (2,) * 161]
LONG = [
    (9_000, 5, 30_001),
    (40_000, 70_000),
    (50_000, 50_000),
    (1,) * 20 + (20_000,) * 3,
    (80_000, 3, 3, 66_000),
    (900, 7) * 80,
]
KINDS = (
    list,
    tuple,
    lambda leaves: {f"{place:03}": leaf for place, leaf in reversed(list(enumerate(leaves)))},
    lambda leaves: {"b": (list(leaves[1:]), {}), "a": leaves[0]},
    lambda leaves: [[leaves[0]], ({"x": {"y": list(leaves[1:])}},)],
)


def in_order(value):
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    return (
        [leaf for part in value for leaf in in_order(part)]
        if isinstance(value, list | tuple)
        else [value]
    )


def skeleton(value):
    """Return a structure with None in the place of each array."""
    if isinstance(value, dict):
        return {name: skeleton(value[name]) for name in sorted(value)}
    return (
        type(value)(skeleton(part) for part in value) if isinstance(value, list | tuple) else None
    )


def brought(rank, place, count, dtype):
    return ((rank + 1) * (place + 2) + np.arange(count) % 5).astype(dtype)


def wanted(size, place, count, dtype, op):
    terms = np.stack([brought(rank, place, count, dtype) for rank in range(size)])
    total = terms.max(0) if op == "max" else terms.astype("f8").sum(0)
    return (total / size if op == "mean" else total).astype(dtype)


def laid(values, chance):
    """Return an array of these values that lies anywhere: in shared memory, alone, in another one, or with gaps."""
    way = chance.integers(12)
    made = np.empty(values.size, values.dtype)
    if way == 0:
        with contextlib.suppress(SharedMemoryFull):
            made = sv.empty(values.size, values.dtype)
    elif way < 3:
        made = np.empty(values.size + 9, values.dtype)[4:-5]
    elif way == 3:
        made = np.empty(2 * values.size, values.dtype)[::2]
    made[...] = values
    return made


def check_every_structure(seed, sizes, turns):
    chance, own = np.random.default_rng(seed), np.random.default_rng((seed, sv.rank()))
    size, rank = sv.world_size(), sv.rank()
    for counts in sizes:
        for dtype, op in (
            ("f4", "sum"),
            ("f8", "mean"),
            ("f2", "sum"),
            ("i4", "max"),
            ("f2", "mean"),
        ):
            for turn in range(turns):
                kind = KINDS[chance.integers(len(KINDS))]
                x = [
                    laid(brought(rank, place, count, dtype), own)
                    for place, count in enumerate(counts)
                ]
                last = (
                    [x[-1], x[-2]] if counts[-1] == counts[-2] else [x[-2], np.zeros_like(x[-1])]
                )  # two that lie where the other's result goes
                outs = [None, x, [laid(array, own) for array in x], [*x[:-2], *last]][
                    own.integers(4)
                ]
                is_later = own.integers(4) == 0
                before = [array.copy() for array in x]
                made = sv.all_reduce(
                    kind(x), op, out=None if outs is None else kind(outs), async_op=bool(is_later)
                )
                made = made.wait() if is_later else made
                assert skeleton(made) == skeleton(kind(x))
                place_of_result = in_order(made) if outs is None else outs
                for place, (count, result) in enumerate(zip(counts, in_order(made), strict=True)):
                    expected = wanted(size, place, count, dtype, op)
                    told = f"{dtype} {op} {counts} turn {turn} array {place} rank {rank} out {outs is not None} later {is_later}"
                    assert result.dtype == expected.dtype, told
                    assert result.tobytes() == expected.tobytes(), told
                    assert place_of_result[place].tobytes() == expected.tobytes(), told
                    if outs is None and communicator_of(None).is_shared:
                        assert x[place].tobytes() == before[place].tobytes(), told
                        assert result.base is None, told


MIXED = [
    ("f8", "i8"),
    ("f4", "f8", "i8", "f2", "i1"),
    ("f8", "i8") * 30,
    ("f4", "f8", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2"),
    ("i4", "f4", "i4"),
]


def check_arrays_of_several_kinds(seed, turns):
    """Short ones are reduced side by side, also beside long ones of one kind; else each kind for itself. Whichever way a rank goes."""
    chance, own = np.random.default_rng(seed), np.random.default_rng((seed, sv.rank()))
    size, rank = sv.world_size(), sv.rank()
    for turn in range(turns):
        dtypes = MIXED[turn % len(MIXED)]
        counts = chance.integers(0, [4, 90, 900, 20_000][chance.integers(4)], len(dtypes))
        if turn % 2:
            counts = counts % (1_800 // len(dtypes) + 2)
            for place in np.flatnonzero(np.array(dtypes) == dtypes[chance.integers(len(dtypes))])[
                : chance.integers(1, 4)
            ]:
                counts[place] = chance.integers(3_000, 70_000)
        for _ in range(
            4
        ):  # the same forms again: persistent calls, where a rank has no other array for its results
            op, kind = ("sum", "max", "mean")[chance.integers(3)], KINDS[turn % len(KINDS)]
            x = [
                laid(brought(rank, place, count, dtype), own)
                for place, (count, dtype) in enumerate(zip(counts, dtypes, strict=True))
            ]
            expected = []
            for place, (count, dtype) in enumerate(zip(counts, dtypes, strict=True)):
                to = (
                    np.dtype("f8")
                    if op == "mean" and np.dtype(dtype).kind in "iu"
                    else np.dtype(dtype)
                )
                expected.append(
                    wanted(size, place, count, dtype, op)
                    if op != "mean"
                    else wanted(size, place, count, "f8", op).astype(to)
                )
            outs = None if own.integers(3) else [laid(array, own) for array in expected]
            made = sv.all_reduce(
                kind(x),
                op,
                out=None if outs is None else kind(outs),
                async_op=bool(own.integers(4) == 0),
            )
            made = made if isinstance(made, dict | list | tuple) else made.wait()
            assert skeleton(made) == skeleton(kind(x)), turn
            for result, value, place_of_result in zip(
                in_order(made), expected, in_order(made) if outs is None else outs, strict=True
            ):
                assert (result.dtype, result.tobytes()) == (value.dtype, value.tobytes()), (
                    turn,
                    op,
                    dtypes,
                    counts,
                )
                assert place_of_result.tobytes() == value.tobytes(), (turn, op)


def check_results_where_other_arrays_lie():
    """Each result goes where another array lies, or two go to the same place, or parts of them do."""
    size, count = sv.world_size(), 50_000
    for counts, placed in (
        ((count, count), lambda x: [x[1], x[0]]),
        ((count, count), lambda x: [np.zeros(count), x[0]]),
    ):
        for turn in range(5):
            x = [brought(sv.rank(), place, some, "f8") for place, some in enumerate(counts)]
            made = sv.all_reduce(x, out=placed(x))
            for place, some in enumerate(counts):
                assert np.array_equal(made[place], wanted(size, place, some, "f8", "sum")), (
                    turn,
                    place,
                )
    for turn in range(5):
        whole = np.arange(2.0 * count + 1) % 11 + sv.rank()
        before = whole.copy()
        made = sv.all_reduce(
            [whole[:count], whole[count + 1 :]], out=[whole[1 : count + 1], np.empty(count)]
        )
        others = sum(np.arange(2.0 * count + 1) % 11 + rank for rank in range(size))
        assert np.array_equal(made[0], others[:count]), turn
        assert np.array_equal(made[1], others[count + 1 :]), turn
        assert np.array_equal(whole[count + 1 :], before[count + 1 :]), turn


def check_results_over_other_arrays(seed, turns):
    """What is brought lies anywhere in one array, where results go as well; on each rank elsewhere."""
    chance, own, size = (
        np.random.default_rng(seed),
        np.random.default_rng((seed, sv.rank())),
        sv.world_size(),
    )
    for turn in range(turns):
        counts = (
            chance.integers(0, 30_000, 2 + turn % 5) if turn % 3 else chance.integers(1, 40, 100)
        )
        total, whole = int(counts.sum()), np.empty(2 * int(counts.sum()) + 9, "f4")
        starts = np.cumsum(counts) - counts
        whole[...] = np.arange(whole.size) % 97 + sv.rank()
        x = [
            whole[start : start + count]
            for start, count in zip(own.integers(0, total + 9, counts.size), counts, strict=True)
        ]
        outs = [
            whole[start : start + count]
            for start, count in zip(starts + own.integers(0, total + 9), counts, strict=True)
        ]
        for place, array in enumerate(x):  # some in place
            if own.integers(3) == 0 and not any(
                np.may_share_memory(array, other) for other in (*outs[:place], *outs[place + 1 :])
            ):
                outs[place] = array
        parts = sv.all_gather(np.concatenate(x)[None])
        made = sv.all_reduce(x, out=outs)
        for place, (start, count) in enumerate(zip(starts, counts, strict=True)):
            assert np.array_equal(made[place], parts[:, start : start + count].sum(0)), (
                turn,
                place,
                size,
            )
            assert np.array_equal(outs[place], made[place]), (turn, place)


if __name__ == "__main__":
    check_results_over_other_arrays(int(sys.argv[1]), 3 * int(sys.argv[2]))
    check_arrays_of_several_kinds(int(sys.argv[1]), 10 * int(sys.argv[2]))
    check_results_where_other_arrays_lie()
    check_every_structure(int(sys.argv[1]), SMALL + LONG, int(sys.argv[2]))
    print("all structures are right", flush=True)
