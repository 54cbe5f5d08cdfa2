"""Lists, tuples and dicts of arrays, small and long, wherever their arrays lie and by whatever way each rank goes, against plain NumPy."""

import contextlib

import numpy as np
import pytest
from harness import everywhere
from prepared_calls import fill_the_arena
from test_prepared_equals_plain import CONFIG, LAYOUTS

import syncvar as sv
from syncvar.engine.group import Communicator
from syncvar.errors import ArenaFull
from syncvar.execution import reductions

SMALL = [(3, 1, 4), (1, 1), (0, 2), (5,) * 17, (200, 1, 30)]
LONG = [(9_000, 5, 30_001), (40_000, 70_000), (50_000, 50_000), (1,) * 20 + (20_000,) * 3, (80_000, 3, 3, 66_000)]
KINDS = (list, tuple, lambda leaves: {f"{place:02}": leaf for place, leaf in reversed(list(enumerate(leaves)))})


def in_order(value):
    return [value[name] for name in sorted(value)] if isinstance(value, dict) else list(value)


def brought(rank, place, count, dtype):
    return ((rank + 1) * (place + 2) + np.arange(count) % 5).astype(dtype)


def wanted(size, place, count, dtype, op):
    terms = np.stack([brought(rank, place, count, dtype) for rank in range(size)])
    total = terms.max(0) if op == "max" else terms.astype("f8").sum(0)
    return (total / size if op == "mean" else total).astype(dtype)


def laid(values, chance):
    """Return an array of these values that lies anywhere: in the arena, alone, in another one, or with gaps."""
    way = chance.integers(5)
    made = np.empty(values.size, values.dtype)
    if way == 0 or (way == 1 and values.nbytes > 1000):
        with contextlib.suppress(ArenaFull):
            made = sv.empty(values.size, values.dtype)
    elif way == 2:
        made = np.empty(values.size + 9, values.dtype)[4:-5]
    elif way == 3:
        made = np.empty(2 * values.size, values.dtype)[::2]
    made[...] = values
    return made


def check_every_structure(seed, sizes, turns):
    chance, own = np.random.default_rng(seed), np.random.default_rng((seed, sv.rank()))
    size, rank = sv.world_size(), sv.rank()
    for counts in sizes:
        for dtype, op in (("f4", "sum"), ("f8", "mean"), ("f2", "sum"), ("i4", "max"), ("f2", "mean")):
            for turn in range(turns):
                kind = KINDS[chance.integers(3)]
                x = [laid(brought(rank, place, count, dtype), own) for place, count in enumerate(counts)]
                last = [x[-1], x[-2]] if counts[-1] == counts[-2] else [x[-2], np.zeros_like(x[-1])]  # two that lie where the other's result goes
                outs = [None, x, [laid(array, own) for array in x], [*x[:-2], *last]][own.integers(4)]
                is_later = own.integers(4) == 0
                before = [array.copy() for array in x]
                made = sv.all_reduce(kind(x), op, out=None if outs is None else kind(outs), async_op=bool(is_later))
                made = made.wait() if is_later else made
                assert type(made) is type(kind(x))
                place_of_result = in_order(made) if outs is None else outs
                for place, (count, result) in enumerate(zip(counts, in_order(made), strict=True)):
                    expected = wanted(size, place, count, dtype, op)
                    told = f"{dtype} {op} {counts} turn {turn} array {place} rank {rank} out {outs is not None} later {is_later}"
                    assert result.dtype == expected.dtype, told
                    assert result.tobytes() == expected.tobytes(), told
                    assert place_of_result[place].tobytes() == expected.tobytes(), told
                    if outs is None:
                        assert x[place].tobytes() == before[place].tobytes(), told
                        assert result.base is None, told


@pytest.mark.parametrize(("layout", "size"), [("arena", 2), ("arena", 3), ("python", 2), pytest.param("arena", 4, marks=pytest.mark.slow),
                                              pytest.param("python", 4, marks=pytest.mark.slow), pytest.param("full", 2, marks=pytest.mark.slow)])  # fmt: skip
def test_structures_wherever_their_arrays_lie(monkeypatch, layout, size):
    monkeypatch.setattr(reductions, "_ALONE_BYTES", 128 << 10)

    def fn():
        held = []
        if layout == "full":
            sv.all_reduce(np.zeros(100_000))
            held = fill_the_arena() if sv.rank() == 1 else []
        check_every_structure(7, SMALL, 4)
        check_every_structure(8, LONG, 4)
        return bool(held)

    everywhere(size, fn, timeout_s=90, **{"config": CONFIG, **LAYOUTS[layout]})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_many_structures(monkeypatch, size, seed):
    monkeypatch.setattr(reductions, "_ALONE_BYTES", 128 << 10)
    everywhere(size, lambda: check_every_structure(100 + seed, SMALL + LONG, 12), timeout_s=110, config=CONFIG, **LAYOUTS["arena"])


@pytest.mark.needs_kernel
@pytest.mark.parametrize("counts", [(3, 4), (70_000, 2, 80_000)])
def test_structures_are_reduced_in_c_once_they_are_prepared(monkeypatch, counts):
    calls = []
    plain = reductions.reduce_shared
    monkeypatch.setattr("syncvar.engine.prepared_reductions.reduce_shared", lambda *given: calls.append(given) or plain(*given))
    general = Communicator.perform
    monkeypatch.setattr(Communicator, "perform", lambda *given, **options: calls.append(given[1]) or general(*given, **options))

    def fn():
        sv.all_reduce(np.zeros(100_000))  # takes the memory for segments
        sv.barrier()
        calls.clear()
        sv.barrier()
        x = [np.ones(count, np.float32) for count in counts]
        for kind in KINDS:
            for out in (None, kind(x)):
                for _ in range(3):
                    sv.all_reduce(kind(x), "mean", out=out)
        return [type(one).__name__ for key, one in sv.collectives.communicator_of(None).prepared_calls.items() if len(key) == 4 and key[2] is None]

    assert everywhere(2, fn, shared=True) == [["SlotCall"] * 3] * 2
    assert not calls


@pytest.mark.needs_kernel
@pytest.mark.parametrize("where", ["both", "source", "target"])
def test_arrays_of_the_arena_are_reduced_in_c_where_they_lie(monkeypatch, where):
    """Where cells begin on a page, and where an array lies, was told by one word: of such arrays the C runner then found no cells."""
    calls = []
    plain = reductions.reduce_shared
    monkeypatch.setattr("syncvar.engine.prepared_reductions.reduce_shared", lambda *given: calls.append(given) or plain(*given))

    def fn():
        x, out = np.ones(100_000, np.float32), np.empty(100_000, np.float32)
        sv.all_reduce(out, out=np.empty_like(out))  # takes the memory for segments
        sv.barrier()
        calls.clear()
        sv.barrier()
        if where != "target":
            x = sv.empty(100_000, np.float32)
            x[...] = 1
        if where != "source":
            out = x if where == "both" else sv.empty(100_000, np.float32)
        sums = [sv.all_reduce(x, out=out)[0] for _ in range(8)]
        return sums == ([2.0] * 8 if where != "both" else [2.0 ** (turn + 1) for turn in range(8)])

    assert everywhere(2, fn, shared=True) == [True, True]
    assert not calls
